"""`loraq tenants add | list | show | limits`."""

from dataclasses import asdict
from typing import Any

import click

from schemas.common import OverLimit
from services.cli.output import Real, json_option, on_database, print_fields, print_json, print_rows
from services.process.settings import load_settings
from services.tenants.limits import NAMES, change_limits, show_limits
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant, list_tenants, show_tenant

COLUMNS = ("tenant", "adapters", "endpoints", "created_at", "disabled_at")
MAX_COUNT = 2**31 - 1
MAX_TOKENS = 1e12


@click.group()
def tenants() -> None:
    """Add and list tenants, and limit what they use."""


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


@tenants.command("limits")
@click.argument("tenant")
@click.option("--weight", type=Real(0.01, 1000), help="Share of a lane relative to other tenants (default 1).")
@click.option("--running", type=click.IntRange(0, MAX_COUNT), help="Most jobs that run at once; 0 runs none.")
@click.option("--queued", type=click.IntRange(1, MAX_COUNT), help="Most jobs that wait in the workers' memory.")
@click.option("--tokens-per-s", type=Real(1e-6, MAX_TOKENS), help="Prompt and output tokens per second.")
@click.option(
    "--burst", type=Real(1e-6, MAX_TOKENS), help="Tokens at once after a pause (default: 10 s of --tokens-per-s)."
)
@click.option(
    "--over-limit",
    type=click.Choice([str(each) for each in OverLimit]),
    help="A job that cannot run soon waits in the database (default), or fails with limit_exceeded.",
)
@click.option(
    "--clear",
    type=click.Choice(["all", *(name.replace("_", "-") for name in NAMES)]),
    multiple=True,
    help="Reset a limit to its default; may be repeated.",
)
@json_option
def limits(tenant: str, clear: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show the limits of TENANT, which apply in each pool, or change those that are given.

    Running workers follow a change within a second.
    """
    changes = {name: value for name, value in options.items() if value is not None}
    if "over_limit" in changes:
        changes["over_limit"] = OverLimit(changes["over_limit"])
    cleared = NAMES if "all" in clear else [name.replace("-", "_") for name in clear]
    if both := sorted(changes.keys() & set(cleared)):
        raise click.UsageError(f"--clear and --{both[0].replace('_', '-')} contradict each other; give one of them.")
    if changes or cleared:
        found = on_database(lambda connection: change_limits(connection, tenant, changes, cleared))
    else:
        found = on_database(lambda connection: show_limits(connection, tenant))
    row = {"tenant": tenant} | asdict(found)
    print_json(row) if as_json else print_fields(row)
