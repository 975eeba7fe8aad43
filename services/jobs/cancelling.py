"""What `loraq jobs cancel` does: ask for the cancellation on the control topic, and wait for the end if asked to."""

from typing import Any
from uuid import UUID

import click

from schemas.common import JobState
from services.cli.output import print_json
from services.client.producer import JobProducer
from services.errors import InputError
from services.jobs.rows import Listener, wait_for
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings
from services.tenants.tenants import require_tenant

UNSEEN = "No worker has seen the job yet; it is cancelled when it arrives."


async def cancel_job(settings: Settings, tenant: str, job_id: UUID, wait_s: float | None, *, as_json: bool) -> None:
    """Ask for it; with `wait_s` raise InputError unless the job ends as cancelled within so many seconds."""
    if wait_s is None:
        receipt = await _ask(settings, tenant, job_id)
        if as_json:
            print_json({"tenant": tenant, "job_id": job_id, "topic": receipt.topic, "offset": receipt.offset})
        else:
            click.echo(f"Asked for job {job_id} to be cancelled; a job that ends first stays as it ended.", err=True)
        return
    row = await _ask_and_wait(settings, tenant, job_id, wait_s)
    if as_json:
        print_json(row)
    if row["state"] != JobState.CANCELLED:
        raise InputError(f"job {job_id} was not cancelled: it had ended before, as {row['state']}")
    if not as_json:
        click.echo(f"Job {job_id} is cancelled.", err=True)


async def _ask(settings: Settings, tenant: str, job_id: UUID) -> Any:
    async with JobProducer.from_settings(settings) as producer:
        return await producer.cancel(tenant, job_id)


async def _ask_and_wait(settings: Settings, tenant: str, job_id: UUID, wait_s: float) -> dict[str, Any]:
    async with open_pool(settings) as pool:
        async with transaction(pool, "look up the tenant") as connection:
            await require_tenant(connection, tenant)
        await _ask(settings, tenant, job_id)
        waited = await wait_for(
            pool, [tenant], [job_id], wait_s, Listener(untaken=lambda: click.echo(UNSEEN, err=True))
        )
        return waited.rows[job_id]
