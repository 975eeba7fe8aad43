"""`loraq adapters push | list | show | disable | enable | pin | unpin`."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import click

from services.adapters import versions as registry
from services.cli.output import (
    DURATION_S,
    json_option,
    on_database,
    one_tenant_option,
    print_fields,
    print_json,
    print_rows,
    tenant_option,
)
from services.postgres.pool import Connection

COLUMNS = ("tenant", "name", "version", "status", "rank", "size_bytes", "pinned", "status_reason")
DEFAULT_WAIT_S = 120.0
DEFAULT_REASON = "Disabled by an operator."


@click.group()
def adapters() -> None:
    """Push, list, disable and pin adapters."""


@adapters.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@tenant_option
@click.option("--name", required=True, help="Name that jobs use for the adapter.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the registrar admits or rejects it.")
@click.option("--timeout", "timeout_s", type=DURATION_S, default=DEFAULT_WAIT_S, help="Seconds to wait for that.")
@json_option
def push_command(directory: Path, tenant: str, name: str, no_wait: bool, timeout_s: float, as_json: bool) -> None:
    """Push the PEFT directory DIRECTORY as a new version of NAME."""
    from services.adapters.push_command import push_and_wait  # the S3 client is slow to import

    push_and_wait(directory, tenant, name, None if no_wait else timeout_s, as_json)


@adapters.command("list")
@one_tenant_option
@json_option
def list_all(tenant: str | None, as_json: bool) -> None:
    """List every version of every adapter."""
    rows = on_database(lambda connection: registry.list_adapters(connection, tenant))
    if as_json:
        for row in rows:
            print_json(row)
        return
    nothing = "There are no adapters; push one with `loraq adapters push DIR --tenant T --name N`."
    print_rows([asdict(row) for row in rows], COLUMNS, nothing)


@adapters.command("show")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def show(ref: str, tenant: str, as_json: bool) -> None:
    """Show all fields of one version, or of all versions of NAME, newest first."""
    for index, row in enumerate(on_database(lambda connection: registry.show_adapter(connection, tenant, ref))):
        if as_json:
            print_json(row)
            continue
        if index:
            click.echo()
        print_fields(asdict(row))


@adapters.command("disable")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@click.option("--reason", default=DEFAULT_REASON, help="Reason given to jobs that use it.")
@json_option
def disable(ref: str, tenant: str, reason: str, as_json: bool) -> None:
    """Stop serving one version, or every version of NAME."""
    _change(ref, tenant, as_json, "disabled", lambda connection: registry.disable(connection, tenant, ref, reason))


@adapters.command("enable")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def enable(ref: str, tenant: str, as_json: bool) -> None:
    """Serve disabled versions again."""
    _change(ref, tenant, as_json, "enabled", lambda connection: registry.enable(connection, tenant, ref))


@adapters.command("pin")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def pin(ref: str, tenant: str, as_json: bool) -> None:
    """Keep versions in host memory regardless of traffic."""
    _change(
        ref, tenant, as_json, "pinned", lambda connection: registry.set_pinned(connection, tenant, ref, pinned=True)
    )


@adapters.command("unpin")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def unpin(ref: str, tenant: str, as_json: bool) -> None:
    """Let versions be evicted from host memory again."""
    _change(
        ref, tenant, as_json, "unpinned", lambda connection: registry.set_pinned(connection, tenant, ref, pinned=False)
    )


def _change(
    ref: str, tenant: str, as_json: bool, done: str, action: Callable[[Connection], Awaitable[list[int]]]
) -> None:
    versions = on_database(action)
    name = ref.partition("@")[0]
    if as_json:
        print_json({"tenant": tenant, "name": name, "change": done, "versions": versions})
    elif versions:
        click.echo(f"{tenant}: {done} {', '.join(f'{name}@{version}' for version in versions)}.")
    else:
        click.echo(f"{tenant}: {ref} is already {done} or was rejected; nothing changed.", err=True)
