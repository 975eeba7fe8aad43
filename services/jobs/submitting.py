"""`loraq submit`: sends valid requests, and optionally waits for the jobs to end."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from schemas.common import ErrorCode, JobState, Lane
from schemas.identity import fingerprint
from schemas.job import JobRequest
from services.adapters.versions import suggestion
from services.cli.output import print_json, print_rows
from services.client.producer import MAX_IN_FLIGHT, JobProducer, Receipt
from services.errors import InputError
from services.jobs.dead_letters import DeadLetterLookup
from services.jobs.rows import WaitCallbacks, require_own, wait_for
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.tenants.tenants import require_tenant

SENT_COLUMNS = ("job_id", "topic", "partition", "offset")
NONE_CONSUMED = (
    "No worker has consumed the jobs yet; is `loraq worker` running for this pool and lane? Dead-lettered jobs are in"
    " `loraq dlq list`."
)
ENDED_COLUMNS = ("job_id", "adapter", "state", "output_or_error")


async def submit_jobs(
    settings: Settings, requests: Sequence[JobRequest], lane: Lane, wait_s: float | None, *, as_json: bool
) -> None:
    """Send all requests; with `wait_s`, wait and show the outcomes, and raise InputError unless all succeeded.

    Raises InputError for an unknown tenant, and RetryableError if the database is unavailable, before sending anything.
    """
    with _progress() as progress:
        async with open_pool(settings) as pool:
            await _check_tenants(pool, requests)
            if wait_s is None:
                show_sent(await _send(settings, requests, lane, progress), as_json=as_json)
                return
            rows, dead_letters = await _send_and_wait(pool, settings, requests, lane, wait_s, progress)
    show_ended(rows, as_json=as_json)
    unsuccessful = [row for row in rows if row["state"] != JobState.SUCCEEDED]
    failed = [_reason(row) for row in unsuccessful]
    failed += [f"job {job_id} was dead-lettered, {reason}" for job_id, reason in dead_letters.items()]
    if failed:
        hint = await _hint(settings, requests, unsuccessful[0]) if unsuccessful else ""
        raise InputError(f"{len(failed)} of {len(requests)} jobs did not succeed; {failed[0]}{hint}")


async def _hint(settings: Settings, requests: Sequence[JobRequest], row: dict[str, Any]) -> str:
    """For an unknown adapter, the tenant's adapters with similar names."""
    adapters = {(each.tenant, each.job_id): each.adapter for each in requests}
    adapter = adapters.get((row["tenant"], row["job_id"]))
    if adapter is None or row["error_code"] != ErrorCode.UNKNOWN_ADAPTER:
        return ""
    async with open_pool(settings) as pool, transaction(pool, "look up adapters") as connection:
        return f"; {await suggestion(connection, row['tenant'], adapter)}"


async def _check_tenants(pool: Pool, requests: Sequence[JobRequest]) -> None:
    async with transaction(pool, "look up the tenant") as connection:
        for tenant in sorted({request.tenant for request in requests}):
            await require_tenant(connection, tenant)


async def _send_and_wait(
    pool: Pool, settings: Settings, requests: Sequence[JobRequest], lane: Lane, wait_s: float, progress: Progress
) -> tuple[list[dict[str, Any]], dict[UUID, str]]:
    """The rows in the order of the requests, and the reasons of dead-lettered jobs."""
    started = datetime.now(UTC)
    receipts = await _send(settings, requests, lane, progress)
    task = progress.add_task("waiting", total=len(requests))
    job_ids = [receipt.job_id for receipt in receipts]
    callbacks = WaitCallbacks(
        on_none_consumed=lambda: progress.console.print(NONE_CONSUMED, highlight=False, soft_wrap=True),
        on_progress=lambda count: progress.update(task, completed=count),
        dead_letters=DeadLetterLookup(settings, receipts, started).reasons,
    )
    tenants = {request.tenant for request in requests}
    result = await wait_for(pool, tenants, job_ids, wait_s, callbacks)
    pairs = zip(requests, job_ids, strict=True)
    await require_own(pool, {(request.tenant, job_id): fingerprint(request) for request, job_id in pairs})
    return [result.rows[job_id] for job_id in job_ids if job_id in result.rows], result.dead_letters


async def _send(settings: Settings, requests: Sequence[JobRequest], lane: Lane, progress: Progress) -> list[Receipt]:
    receipts: list[Receipt] = []
    async with JobProducer.from_settings(settings) as producer:
        task = progress.add_task("sending", total=len(requests))
        for start in range(0, len(requests), MAX_IN_FLIGHT):
            receipts += await producer.send_all(requests[start : start + MAX_IN_FLIGHT], lane)
            progress.update(task, completed=len(receipts))
    return receipts


def _progress() -> Progress:
    """Progress bars on stderr, only if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def show_sent(receipts: Sequence[Receipt], *, as_json: bool) -> None:
    """Print the topic, partition and offset of each job."""
    rows = [{name: getattr(receipt, name) for name in SENT_COLUMNS} for receipt in receipts]
    if not as_json:
        print_rows(rows, SENT_COLUMNS, "No jobs were sent.")
        return
    for row in rows:
        print_json(row)


def show_ended(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print the outcome of each job; for a single job that succeeded, its output alone."""
    if as_json:
        for row in rows:
            print_json(row)
    elif len(rows) == 1 and rows[0]["state"] == JobState.SUCCEEDED:
        click.echo(_output(rows[0]))
    elif len(rows) > 1:
        print_rows([row | {"output_or_error": _output(row)} for row in rows], ENDED_COLUMNS, "No jobs were sent.")


def _output(row: dict[str, Any]) -> str:
    if row["state"] == JobState.SUCCEEDED:
        return str(row["output_text"] if row["output_url"] is None else row["output_url"])
    return _reason(row)


def _reason(row: dict[str, Any]) -> str:
    return f"{row['state']}, {row['error_code']}: {row['error_message']}"
