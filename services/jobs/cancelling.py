"""`loraq jobs cancel`: sends a cancellation to the control topic, and optionally waits for the job to end."""

from uuid import UUID

import click

from schemas.common import TERMINAL_STATES, JobState
from services.cli.output import print_json
from services.client.producer import JobProducer
from services.errors import InputError
from services.jobs.rows import WaitCallbacks, state_of, wait_for
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.tenants.tenants import require_tenant

NOT_CONSUMED_YET = "No worker has consumed the job yet."


async def cancel_job(settings: Settings, tenant: str, job_id: UUID, wait_s: float | None, *, as_json: bool) -> None:
    """Cancel a tenant's job; with `wait_s`, wait for its end at most that many seconds.

    Raises InputError unless the job is cancelled or, without `wait_s`, will be unless it ends first. A cancellation of
    a job that the database does not have is sent all the same: workers remember it in case the job arrives.
    """
    async with open_pool(settings) as pool:
        async with transaction(pool, "look up the job") as connection:
            await require_tenant(connection, tenant)
            state = await state_of(connection, tenant, job_id)
        if wait_s is None:
            await _send(settings, tenant, job_id, state, as_json=as_json)
        else:
            await _send_and_wait(pool, settings, tenant, job_id, state, wait_s, as_json=as_json)


async def _send(settings: Settings, tenant: str, job_id: UUID, state: JobState | None, *, as_json: bool) -> None:
    async with JobProducer.from_settings(settings) as producer:
        receipt = await producer.cancel(tenant, job_id)
    if as_json:
        where = {"topic": receipt.topic, "offset": receipt.offset}
        print_json({"tenant": tenant, "job_id": job_id, "state": state, **where})
    if state is None:
        raise InputError(
            f"no such job of tenant {tenant}: {job_id}; the cancellation is remembered in case the job arrives"
        )
    if state in TERMINAL_STATES:
        _report_end(job_id, state, as_json=as_json)
    elif not as_json:
        click.echo(f"Cancellation of job {job_id} was sent; the job was {state}.", err=True)


async def _send_and_wait(
    pool: Pool, settings: Settings, tenant: str, job_id: UUID, state: JobState | None, wait_s: float, *, as_json: bool
) -> None:
    if state is None:
        click.echo(f"No such job of tenant {tenant} yet: {job_id}; waiting in case it arrives.", err=True)
    async with JobProducer.from_settings(settings) as producer:
        await producer.cancel(tenant, job_id)
    callbacks = WaitCallbacks(on_none_consumed=lambda: click.echo(NOT_CONSUMED_YET, err=True))
    row = (await wait_for(pool, [tenant], [job_id], wait_s, callbacks)).rows[job_id]
    if as_json:
        print_json(row)
    _report_end(job_id, JobState(row["state"]), as_json=as_json)


def _report_end(job_id: UUID, state: JobState, *, as_json: bool) -> None:
    if state != JobState.CANCELLED:
        raise InputError(f"job {job_id} was not cancelled: it had already ended as {state}")
    if not as_json:
        click.echo(f"Job {job_id} is cancelled.", err=True)
