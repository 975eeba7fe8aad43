"""`loraq topics` and `loraq bucket`: create what a pool needs and does not have."""

import asyncio

import click

from services.process.settings import load_settings


@click.command()
def topics() -> None:
    """Create the pool's missing topics; safe to run at any time."""
    from services.kafka.clients import ensure_topics  # the command's help needs no Kafka client

    settings = load_settings()
    created = asyncio.run(ensure_topics(settings))
    for name in created:
        click.echo(f"Created topic {name}.", err=True)
    if not created:
        click.echo(f"The topics of pool {settings.pool} already exist.", err=True)


@click.command()
def bucket() -> None:
    """Create the bucket if it is missing; safe to run at any time."""
    from services.s3.store import open_store  # the S3 client is slow to import

    settings = load_settings()

    async def ensure() -> None:
        async with open_store(settings) as store:
            await store.ensure_bucket()

    asyncio.run(ensure())
    click.echo(f"The bucket {settings.s3_bucket} exists.", err=True)
