"""`loraq worker`."""

import click

from services.process import lifecycle
from services.process.settings import load_settings

FACTORIES = {"loraq": "services.worker.engine.process:real_engine", "echo": "services.worker.engine.echo:echo_engine"}


@click.command()
@click.option(
    "--engine",
    type=click.Choice(sorted(FACTORIES)),
    default="loraq",
    show_default=True,
    help="`echo` answers each prompt with itself, without a model: for measuring everything but the engine.",
)
def worker(engine: str) -> None:
    """Run jobs: consume records, run the engine, write rows and commit offsets."""
    from services.worker.app import serve  # imported here: `--help` needs neither Kafka nor the engine

    settings = load_settings()
    lifecycle.run("worker", settings, lambda life: serve(life, settings, FACTORIES[engine]))
