"""`loraq dispatcher`."""

import click

from services.process import lifecycle
from services.process.settings import load_settings


@click.command()
def dispatcher() -> None:
    """Deliver the outcomes of jobs: signed webhooks, and events on Kafka."""
    from services.dispatcher.app import serve  # `--help` needs neither aiohttp nor Kafka

    settings = load_settings()
    lifecycle.run("dispatcher", settings, lambda life: serve(life, settings))
