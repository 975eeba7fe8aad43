"""`loraq endpoints add | list | remove`."""

from dataclasses import asdict

import click

from services.output import (
    json_option,
    on_database,
    one_tenant_option,
    print_json,
    print_rows,
    tenant_option,
)
from services.registry.endpoints import add_endpoint, list_endpoints, remove_endpoint

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
    on_database(lambda connection: add_endpoint(connection, tenant, name, url))
    if as_json:
        print_json({"tenant": tenant, "name": name, "url": url})
    else:
        click.echo(f"{tenant} has the endpoint {name}.")


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
