"""What `loraq submit` does once its requests are valid: send, and wait if asked to."""

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
from services.jobs.dead_letters import Refusals
from services.jobs.rows import Listener, require_own, wait_for
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings
from services.tenants.tenants import require_tenant

SENT_COLUMNS = {"job_id": "job", "topic": "topic", "partition": "partition", "offset": "offset"}
UNTAKEN = (
    "No worker has taken the jobs yet; is `loraq worker` running, on this pool and lane? One that was refused is in"
    " `loraq dlq list`."
)
ENDED_COLUMNS = {"job_id": "job", "adapter": "adapter", "state": "state", "answer": "output or error"}


async def submit_jobs(
    settings: Settings, requests: Sequence[JobRequest], lane: Lane, wait_s: float | None, *, as_json: bool
) -> None:
    """Send all requests; with `wait_s` show how they ended. Raises InputError unless all succeeded."""
    with _progress() as progress:
        if wait_s is None:
            show_sent(await _send(settings, requests, lane, progress), as_json=as_json)
            return
        rows, put_aside = await _send_and_wait(settings, requests, lane, wait_s, progress)
    show_ended(rows, as_json=as_json)
    unsuccessful = [row for row in rows if row["state"] != JobState.SUCCEEDED]
    failed = [_why(row) for row in unsuccessful]
    failed += [f"job {job_id} is a dead letter, {why}" for job_id, why in put_aside.items()]
    if failed:
        hint = await _hint(settings, requests, unsuccessful[0]) if unsuccessful else ""
        raise InputError(f"{len(failed)} of {len(requests)} jobs did not succeed; {failed[0]}{hint}")


async def _hint(settings: Settings, requests: Sequence[JobRequest], row: dict[str, Any]) -> str:
    """What the tenant has that comes near the adapter that it has not."""
    adapters = {(each.tenant, each.job_id): each.adapter for each in requests}
    asked = adapters.get((row["tenant"], row["job_id"]))
    if asked is None or row["error_code"] != ErrorCode.UNKNOWN_ADAPTER:
        return ""
    async with open_pool(settings) as pool, transaction(pool, "look up adapters") as connection:
        return f"; {await suggestion(connection, row['tenant'], asked)}"


async def _send_and_wait(
    settings: Settings, requests: Sequence[JobRequest], lane: Lane, wait_s: float, progress: Progress
) -> tuple[list[dict[str, Any]], dict[UUID, str]]:
    """Rows in the order of the requests, and why those without one were put aside."""
    tenants = {request.tenant for request in requests}
    async with open_pool(settings) as pool:
        async with transaction(pool, "look up tenants") as connection:
            for tenant in sorted(tenants):
                await require_tenant(connection, tenant)
        begun = datetime.now(UTC)
        receipts = await _send(settings, requests, lane, progress)
        task = progress.add_task("waiting", total=len(requests))
        job_ids = [receipt.job_id for receipt in receipts]
        listener = Listener(
            untaken=lambda: progress.console.print(UNTAKEN, highlight=False, soft_wrap=True),
            ended=lambda count: progress.update(task, completed=count),
            put_aside=Refusals(settings, receipts, begun).known,
        )
        waited = await wait_for(pool, tenants, job_ids, wait_s, listener)
        pairs = zip(requests, job_ids, strict=True)
        await require_own(pool, {(request.tenant, job_id): fingerprint(request) for request, job_id in pairs})
        return [waited.rows[job_id] for job_id in job_ids if job_id in waited.rows], waited.put_aside


async def _send(settings: Settings, requests: Sequence[JobRequest], lane: Lane, progress: Progress) -> list[Receipt]:
    receipts: list[Receipt] = []
    async with JobProducer.from_settings(settings) as producer:
        task = progress.add_task("sending", total=len(requests))
        for start in range(0, len(requests), MAX_IN_FLIGHT):
            receipts += await producer.send_all(requests[start : start + MAX_IN_FLIGHT], lane)
            progress.update(task, completed=len(receipts))
    return receipts


def _progress() -> Progress:
    """Bars on stderr, and only where a person watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def show_sent(receipts: Sequence[Receipt], *, as_json: bool) -> None:
    """Where the broker put each job."""
    rows = [{name: getattr(receipt, name) for name in SENT_COLUMNS} for receipt in receipts]
    if not as_json:
        print_rows(rows, SENT_COLUMNS, "No job was sent.")
        return
    for row in rows:
        print_json(row)


def show_ended(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """How each job ended; the plain text of a single one that succeeded."""
    if as_json:
        for row in rows:
            print_json(row)
    elif len(rows) == 1 and rows[0]["state"] == JobState.SUCCEEDED:
        click.echo(_answer(rows[0]))
    elif len(rows) > 1:
        print_rows([row | {"answer": _answer(row)} for row in rows], ENDED_COLUMNS, "No job was sent.")


def _answer(row: dict[str, Any]) -> str:
    if row["state"] == JobState.SUCCEEDED:
        return str(row["output_text"] if row["output_url"] is None else row["output_url"])
    return _why(row)


def _why(row: dict[str, Any]) -> str:
    return f"{row['state']}, {row['error_code']}: {row['error_message']}"
