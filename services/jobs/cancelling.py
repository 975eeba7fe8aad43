"""`loraq jobs cancel`: sends a cancellation to the control topic, and optionally waits for the job to end."""

from typing import Any
from uuid import UUID

import click

from schemas.common import JobState
from services.cli.output import print_json
from services.client.producer import JobProducer
from services.errors import InputError
from services.jobs.rows import WaitCallbacks, wait_for
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings
from services.tenants.tenants import require_tenant

NOT_CONSUMED = "No worker has consumed the job yet; it is cancelled when it arrives."


async def cancel_job(settings: Settings, tenant: str, job_id: UUID, wait_s: float | None, *, as_json: bool) -> None:
    """Send a cancellation; with `wait_s`, raise InputError unless the job is cancelled within that many seconds."""
    if wait_s is None:
        receipt = await _send(settings, tenant, job_id)
        if as_json:
            print_json({"tenant": tenant, "job_id": job_id, "topic": receipt.topic, "offset": receipt.offset})
        else:
            click.echo(f"Asked for job {job_id} to be cancelled; a job that ends first stays as it ended.", err=True)
        return
    row = await _send_and_wait(settings, tenant, job_id, wait_s)
    if as_json:
        print_json(row)
    if row["state"] != JobState.CANCELLED:
        raise InputError(f"job {job_id} was not cancelled: it had already ended as {row['state']}")
    if not as_json:
        click.echo(f"Job {job_id} is cancelled.", err=True)


async def _send(settings: Settings, tenant: str, job_id: UUID) -> Any:
    async with JobProducer.from_settings(settings) as producer:
        return await producer.cancel(tenant, job_id)


async def _send_and_wait(settings: Settings, tenant: str, job_id: UUID, wait_s: float) -> dict[str, Any]:
    async with open_pool(settings) as pool:
        async with transaction(pool, "look up the tenant") as connection:
            await require_tenant(connection, tenant)
        await _send(settings, tenant, job_id)
        callbacks = WaitCallbacks(on_none_consumed=lambda: click.echo(NOT_CONSUMED, err=True))
        result = await wait_for(pool, [tenant], [job_id], wait_s, callbacks)
        return result.rows[job_id]
