"""`loraq topics`: makes the pool's topics where they are missing."""

import asyncio

import click

from services.kafka import ensure_topics
from services.settings import load_settings


@click.command()
def topics() -> None:
    """Make the pool's missing topics; safe to run at any time."""
    settings = load_settings()
    made = asyncio.run(ensure_topics(settings))
    for name in made:
        click.echo(f"Made topic {name}.", err=True)
    if not made:
        click.echo(f"The topics of pool {settings.pool} are there already.", err=True)
