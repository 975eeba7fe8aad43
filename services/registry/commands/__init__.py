"""`loraq registrar`, `tenants`, `adapters` and `endpoints`."""

import click

from services.registry.commands.adapters import adapters
from services.registry.commands.endpoints import endpoints
from services.registry.commands.tenants import tenants
from services.settings import load_settings

__all__ = ["adapters", "endpoints", "registrar", "tenants"]


@click.command()
def registrar() -> None:
    """Admit pushed adapters; one process, any number of them."""
    from services import lifecycle
    from services.registry.registrar import serve

    settings = load_settings()
    lifecycle.run("registrar", settings, lambda life: serve(life, settings))
