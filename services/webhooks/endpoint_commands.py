"""`loraq endpoints add | list | remove`."""

from dataclasses import asdict

import click

from services.cli.output import (
    json_option,
    on_database,
    one_tenant_option,
    print_json,
    print_rows,
    tenant_option,
)
from services.process.settings import Settings, load_settings
from services.webhooks.endpoints import add_endpoint, list_endpoints, remove_endpoint
from services.webhooks.guard import AddressGuard, parse_url
from services.webhooks.outcome import HOW_TO_ALLOW, NotAllowed, Unsendable

COLUMNS = ("tenant", "name", "url", "created_at")


@click.group()
def endpoints() -> None:
    """Register webhook addresses that jobs refer to by name."""


@endpoints.command("add")
@click.argument("name")
@click.argument("url")
@tenant_option
@json_option
def add(name: str, url: str, tenant: str, as_json: bool) -> None:
    """Register URL as NAME, for jobs with {"webhook": {"endpoint": "NAME"}}."""
    settings = load_settings()
    on_database(lambda connection: add_endpoint(connection, tenant, name, url), settings)
    if (warning := _warning(url, settings)) is not None:
        click.echo(warning, err=True)
    if as_json:
        print_json({"tenant": tenant, "name": name, "url": url})
    else:
        click.echo(f"Endpoint {name} of tenant {tenant} is registered.")


def _warning(url: str, settings: Settings) -> str | None:
    """A warning if a dispatcher with these settings would refuse the address; host names are not resolved."""
    parsed = parse_url(url)
    refusal = parsed if isinstance(parsed, Unsendable) else AddressGuard(settings.webhook_allow_networks).refuse(parsed)
    match refusal:
        case None:
            return None
        case NotAllowed(address):
            return f"Webhooks to {address} will be blocked by a dispatcher with these settings; {HOW_TO_ALLOW}."
        case Unsendable(reason):
            return f"Webhooks to this address will fail: {reason}."


@endpoints.command("list")
@one_tenant_option
@json_option
def list_all(tenant: str | None, as_json: bool) -> None:
    """List active endpoints."""
    found = on_database(lambda connection: list_endpoints(connection, tenant))
    if as_json:
        for endpoint in found:
            print_json(endpoint)
        return
    print_rows([asdict(endpoint) for endpoint in found], COLUMNS, "No endpoints.")


@endpoints.command("remove")
@click.argument("name")
@tenant_option
@json_option
def remove(name: str, tenant: str, as_json: bool) -> None:
    """Remove NAME; later jobs cannot use it."""
    on_database(lambda connection: remove_endpoint(connection, tenant, name))
    if as_json:
        print_json({"tenant": tenant, "name": name, "removed": True})
    else:
        click.echo(f"Endpoint {name} of tenant {tenant} is removed.")
