"""`loraq registrar`."""

import click

from services.process.settings import load_settings


@click.command()
def registrar() -> None:
    """Admit pushed adapters. Several processes share the work."""
    from services.process import lifecycle
    from services.registrar.registrar import serve

    settings = load_settings()
    lifecycle.run("registrar", settings, lambda life: serve(life, settings))
