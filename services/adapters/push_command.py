"""`loraq adapters push`: the upload with its progress, the wait for admission, and the final output."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from schemas.common import AdapterStatus
from services.adapters.push import LocalAdapter, Pushed, inspect, push, wait_for_admission
from services.adapters.versions import AdapterRow
from services.cli.output import print_json
from services.errors import InputError, RetryableError
from services.postgres.pool import open_pool
from services.process.settings import Settings, load_settings
from services.s3.store import open_store


def push_and_wait(directory: Path, tenant: str, name: str, timeout_s: float | None, as_json: bool) -> None:
    """Push and wait up to `timeout_s` seconds for admission, or not at all if None.

    Raises ServiceError if the adapter is rejected, disabled, or still pending after the wait.
    """
    settings = load_settings()
    local = inspect(directory, settings.max_adapter_bytes)
    pushed, row = asyncio.run(_push(settings, tenant, name, local, timeout_s or 0.0))
    if as_json:
        print_json(asdict(row) | {"created": pushed.created})
    _report(pushed, row, waited=timeout_s is not None, quiet=as_json)


async def _push(
    settings: Settings, tenant: str, name: str, local: LocalAdapter, timeout_s: float
) -> tuple[Pushed, AdapterRow]:
    async with open_pool(settings) as pool, open_store(settings) as store:
        with _progress() as progress:
            task = progress.add_task(f"{local.directory.name} → {tenant}/{name}", total=local.size_bytes)
            pushed = await push(pool, store, tenant, name, local, lambda sent: progress.advance(task, sent))
        with Console(stderr=True).status(f"Waiting for the registrar to check {pushed.ref}"):
            return pushed, await wait_for_admission(pool, pushed, timeout_s)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _report(pushed: Pushed, row: AdapterRow, *, waited: bool, quiet: bool) -> None:
    """Print the result of the push; raises unless the version is ready, or pending without a wait."""
    again = "" if pushed.created else ", unchanged: the newest version has the same content"
    match row.status:
        case AdapterStatus.REJECTED:
            raise InputError(f"{pushed.ref} was rejected: {row.status_reason}")
        case AdapterStatus.DISABLED:
            undo = f"enable it with `loraq adapters enable {pushed.ref} --tenant {pushed.tenant}`"
            raise InputError(f"{pushed.ref} is disabled{again}; {undo}")
        case AdapterStatus.PENDING if waited:
            reason = row.status_reason or "no registrar has checked it; is `loraq registrar` running?"
            raise RetryableError(f"{pushed.ref} is still pending: {reason}")
    if not quiet:
        rank = f" (rank {row.rank}: {' '.join(row.target_modules)})" if row.rank else ""
        click.echo(f"{pushed.ref} of {pushed.tenant} is {row.status}{rank}{again}.")
    if row.status_reason:
        click.echo(row.status_reason, err=True)
