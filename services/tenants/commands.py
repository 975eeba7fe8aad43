"""`loraq tenants add | list | show`."""

from dataclasses import asdict

import click

from services.cli.output import json_option, on_database, print_fields, print_json, print_rows
from services.process.settings import load_settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant, list_tenants, show_tenant

COLUMNS = ("tenant", "adapters", "endpoints", "created_at", "disabled_at")


@click.group()
def tenants() -> None:
    """Add and list tenants."""


@tenants.command("add")
@click.argument("tenant")
@json_option
def add(tenant: str, as_json: bool) -> None:
    """Add TENANT and print its two secrets, which are not shown again."""
    settings = load_settings()
    box = SecretBox(settings.secret_key)
    new = on_database(lambda connection: add_tenant(connection, box, tenant), settings)
    if as_json:
        print_json(new)
        return
    print_fields(asdict(new))
    click.echo(
        "Store both now: they are not shown again. Receivers verify webhooks with webhook_secret; producers sign "
        "records with producer_key if LORAQ_REQUIRE_SIGNED_JOBS is true.",
        err=True,
    )


@tenants.command("list")
@json_option
def list_all(as_json: bool) -> None:
    """List all tenants."""
    found = on_database(list_tenants)
    if as_json:
        for tenant in found:
            print_json(tenant)
        return
    print_rows(
        [asdict(tenant) for tenant in found], COLUMNS, "There are no tenants; add one with `loraq tenants add T`."
    )


@tenants.command("show")
@click.argument("tenant")
@json_option
def show(tenant: str, as_json: bool) -> None:
    """Show TENANT, without its secrets."""
    found = on_database(lambda connection: show_tenant(connection, tenant))
    if as_json:
        print_json(found)
    else:
        print_fields(asdict(found))
