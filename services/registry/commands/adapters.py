"""`loraq adapters push | list | show | disable | enable | pin | unpin`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from schemas.common import AdapterStatus
from services.database import Connection, open_pool
from services.errors import InputError, RetryableError
from services.objectstore import open_store
from services.registry import adapters as registry
from services.registry.adapters import AdapterRow
from services.registry.commands.output import (
    json_option,
    on_database,
    one_tenant_option,
    print_fields,
    print_json,
    print_rows,
    tenant_option,
)
from services.registry.push import LocalAdapter, Pushed, inspect, push, verdict
from services.settings import Settings, load_settings

COLUMNS = {
    "tenant": "tenant",
    "name": "name",
    "version": "version",
    "status": "status",
    "rank": "rank",
    "size_bytes": "bytes",
    "pinned": "pinned",
    "status_reason": "reason",
}
DEFAULT_WAIT_S = 120.0
DEFAULT_REASON = "Disabled by an operator."


@click.group()
def adapters() -> None:
    """Push adapters and decide which are served."""


@adapters.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@tenant_option
@click.option("--name", required=True, help="Name under which jobs ask for it.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the registrar's verdict.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=DEFAULT_WAIT_S, help="Seconds to wait for it."
)
@json_option
def push_command(directory: Path, tenant: str, name: str, no_wait: bool, timeout_s: float, as_json: bool) -> None:
    """Push the PEFT directory DIRECTORY as a new version of NAME."""
    settings = load_settings()
    local = inspect(directory, settings.max_adapter_bytes)
    pushed, row = asyncio.run(_push(settings, tenant, name, local, 0.0 if no_wait else timeout_s))
    if as_json:
        print_json(asdict(row) | {"created": pushed.created})
    _conclude(pushed, row, waited=not no_wait, quiet=as_json)


async def _push(
    settings: Settings, tenant: str, name: str, local: LocalAdapter, timeout_s: float
) -> tuple[Pushed, AdapterRow]:
    async with open_pool(settings) as pool, open_store(settings) as store:
        with _progress() as progress:
            task = progress.add_task(f"{local.directory.name} → {tenant}/{name}", total=local.size_bytes)
            pushed = await push(pool, store, tenant, name, local, lambda sent: progress.advance(task, sent))
        with Console(stderr=True).status(f"Waiting for the registrar's verdict on {pushed.ref}"):
            return pushed, await verdict(pool, pushed, timeout_s)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _conclude(pushed: Pushed, row: AdapterRow, *, waited: bool, quiet: bool) -> None:
    """Say where the push ended; raises for what must not pass as success."""
    again = "" if pushed.created else ", as before: its content is that of the newest version"
    match row.status:
        case AdapterStatus.REJECTED:
            raise InputError(f"{pushed.ref} was rejected: {row.status_reason}")
        case AdapterStatus.DISABLED:
            raise InputError(f"{pushed.ref} is disabled{again}; `loraq adapters enable {pushed.ref}` brings it back")
        case AdapterStatus.PENDING if waited:
            why = row.status_reason or "no registrar has looked at it; is `loraq registrar` running?"
            raise RetryableError(f"{pushed.ref} is still pending: {why}")
    if not quiet:
        rank = f" (rank {row.rank}: {' '.join(row.target_modules)})" if row.rank else ""
        click.echo(f"{pushed.ref} of {pushed.tenant} is {row.status}{rank}{again}.")
    if row.status_reason:
        click.echo(row.status_reason, err=True)


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
    nothing = "There is no adapter; push one with `loraq adapters push DIR --tenant T --name N`."
    print_rows([asdict(row) for row in rows], COLUMNS, nothing)


@adapters.command("show")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def show(ref: str, tenant: str, as_json: bool) -> None:
    """Show everything about one version, or about all versions of NAME, newest first."""
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
@click.option("--reason", default=DEFAULT_REASON, help="Told to whoever asks for it.")
@json_option
def disable(ref: str, tenant: str, reason: str, as_json: bool) -> None:
    """Take one version, or every version of NAME, out of service."""
    _change(ref, tenant, as_json, "disabled", lambda connection: registry.disable(connection, tenant, ref, reason))


@adapters.command("enable")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def enable(ref: str, tenant: str, as_json: bool) -> None:
    """Bring disabled versions back."""
    _change(ref, tenant, as_json, "enabled", lambda connection: registry.enable(connection, tenant, ref))


@adapters.command("pin")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def pin(ref: str, tenant: str, as_json: bool) -> None:
    """Keep in host memory whatever the traffic."""
    _change(
        ref, tenant, as_json, "pinned", lambda connection: registry.set_pinned(connection, tenant, ref, pinned=True)
    )


@adapters.command("unpin")
@click.argument("ref", metavar="NAME[@VERSION]")
@tenant_option
@json_option
def unpin(ref: str, tenant: str, as_json: bool) -> None:
    """Evict from host memory like any other."""
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
        click.echo(f"{tenant}: nothing to change, {ref} is as you want it.", err=True)
