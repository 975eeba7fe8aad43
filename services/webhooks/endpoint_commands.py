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

COLUMNS = {"tenant": "tenant", "name": "name", "url": "url", "created_at": "created"}


@click.group()
def endpoints() -> None:
    """Register addresses that jobs may name as webhooks."""


@endpoints.command("add")
@click.argument("name")
@click.argument("url")
@tenant_option
@json_option
def add(name: str, url: str, tenant: str, as_json: bool) -> None:
    """Register URL as NAME; a job then says {"webhook": {"endpoint": "NAME"}}."""
    settings = load_settings()
    on_database(lambda connection: add_endpoint(connection, tenant, name, url), settings)
    if (warning := _refused(url, settings)) is not None:
        click.echo(warning, err=True)
    if as_json:
        print_json({"tenant": tenant, "name": name, "url": url})
    else:
        click.echo(f"{tenant} has the endpoint {name}.")


def _refused(url: str, settings: Settings) -> str | None:
    """What to say of an address that the dispatcher would not send to, as far as the address alone tells."""
    parsed = parse_url(url)
    refusal = parsed if isinstance(parsed, Unsendable) else AddressGuard(settings.webhook_allow_networks).refuse(parsed)
    match refusal:
        case None:
            return None
        case NotAllowed(address):
            return f"Webhooks to {address} will be blocked: with the settings here it is not allowed; {HOW_TO_ALLOW}."
        case Unsendable(reason):
            return f"Webhooks to this address will fail: {reason}."


@endpoints.command("list")
@one_tenant_option
@json_option
def list_all(tenant: str | None, as_json: bool) -> None:
    """List endpoints in use."""
    found = on_database(lambda connection: list_endpoints(connection, tenant))
    if as_json:
        for endpoint in found:
            print_json(endpoint)
        return
    print_rows([asdict(endpoint) for endpoint in found], COLUMNS, "There is no endpoint.")


@endpoints.command("remove")
@click.argument("name")
@tenant_option
@json_option
def remove(name: str, tenant: str, as_json: bool) -> None:
    """Remove NAME: no later job can use it."""
    on_database(lambda connection: remove_endpoint(connection, tenant, name))
    if as_json:
        print_json({"tenant": tenant, "name": name, "removed": True})
    else:
        click.echo(f"{tenant} no longer has the endpoint {name}.")
