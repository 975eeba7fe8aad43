"""`loraq adapters push`: the upload with its progress, the wait, and what is said at the end."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from schemas.common import AdapterStatus
from services.adapters.push import LocalAdapter, Pushed, inspect, push, verdict
from services.adapters.versions import AdapterRow
from services.cli.output import print_json
from services.errors import InputError, RetryableError
from services.postgres.pool import open_pool
from services.process.settings import Settings, load_settings
from services.s3.store import open_store


def push_and_wait(directory: Path, tenant: str, name: str, timeout_s: float | None, as_json: bool) -> None:
    """Push and wait `timeout_s` seconds for the verdict, or not at all; raises ServiceError unless it is admitted."""
    settings = load_settings()
    local = inspect(directory, settings.max_adapter_bytes)
    pushed, row = asyncio.run(_push(settings, tenant, name, local, timeout_s or 0.0))
    if as_json:
        print_json(asdict(row) | {"created": pushed.created})
    _conclude(pushed, row, waited=timeout_s is not None, quiet=as_json)


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
            undo = f"`loraq adapters enable {pushed.ref} --tenant {pushed.tenant}` brings it back"
            raise InputError(f"{pushed.ref} is disabled{again}; {undo}")
        case AdapterStatus.PENDING if waited:
            why = row.status_reason or "no registrar has looked at it; is `loraq registrar` running?"
            raise RetryableError(f"{pushed.ref} is still pending: {why}")
    if not quiet:
        rank = f" (rank {row.rank}: {' '.join(row.target_modules)})" if row.rank else ""
        click.echo(f"{pushed.ref} of {pushed.tenant} is {row.status}{rank}{again}.")
    if row.status_reason:
        click.echo(row.status_reason, err=True)
