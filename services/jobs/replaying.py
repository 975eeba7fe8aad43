"""`loraq jobs replay`: sends the request of an ended job again as a new job with its own id."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from schemas.common import TERMINAL_STATES, JobState, Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.client.producer import JobProducer, Receipt
from services.client.signing import SIGNATURE_HEADER
from services.errors import InputError
from services.jobs.record_lookup import JobIdentity, JobRecord, find_record
from services.jobs.rows import no_such_job
from services.kafka import headers as names
from services.postgres.pool import Connection, Pool, open_pool, transaction
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import damaged_key, producer_keys

SELECT_JOB = """
select tenant, job_id, pool, lane, state, accepted_at, fingerprint
from loraq.job_keys join loraq.jobs using (accepted_on, tenant, job_id)
where job_keys.job_id = any($1::uuid[]) and ($2::text is null or job_keys.tenant = $2)
"""
SELECT_REPLAY = "select new_job_id, sent_at from loraq.job_replays where tenant = $1 and job_id = any($2::uuid[])"
MARK_STARTED = """
insert into loraq.job_replays (tenant, job_id, new_job_id)
select $1, job_id, new_job_id from unnest($2::uuid[], $3::uuid[]) as started (job_id, new_job_id)
on conflict (tenant, job_id) do update set new_job_id = excluded.new_job_id, begun_at = now(), sent_at = null
"""
MARK_SENT = "update loraq.job_replays set sent_at = now() where tenant = $1 and new_job_id = any($2::uuid[])"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The job to replay; `lane` and `deadline` default to those of the job.

    `again` allows a job that was replayed before, `force` one that succeeded.
    """

    job_id: UUID
    tenant: str | None
    lane: Lane | None
    deadline: datetime | None
    again: bool
    force: bool


async def replay_job(settings: Settings, replay: ReplayRequest) -> Receipt:
    """Send the job's request again; the new row has `replay_of`. Raises InputError if the job cannot be replayed."""
    async with open_pool(settings) as pool:
        async with transaction(pool, "look up the job") as connection:
            row = await _ended_job(connection, settings, replay)
            new_id = await _new_id(connection, row, replay)
        wanted = JobIdentity(row["tenant"], row["job_id"], Lane(row["lane"]), row["fingerprint"], row["accepted_at"])
        record = await find_record(settings, wanted)
        request = _new_request(record.request, new_id, replay)
        key = await _signing_key(pool, settings, record, row["tenant"])
        async with transaction(pool, "mark the replay") as connection:
            await connection.execute(MARK_STARTED, row["tenant"], [row["job_id"]], [new_id])
        headers = [(names.REPLAY_OF, str(row["job_id"]).encode())]
        async with JobProducer.from_settings(settings, producer_key=key) as producer:
            receipt = await producer.send(request, replay.lane or wanted.lane, headers=headers)
        async with transaction(pool, "mark the replay") as connection:
            await connection.execute(MARK_SENT, row["tenant"], [new_id])
    return receipt


async def _ended_job(connection: Connection, settings: Settings, replay: ReplayRequest) -> Any:
    rows = await connection.fetch(SELECT_JOB, [replay.job_id], replay.tenant)
    if not rows:
        raise no_such_job(replay.job_id, replay.tenant)
    if len(rows) > 1:
        owners = ", ".join(sorted(row["tenant"] for row in rows))
        raise InputError(f"several tenants have a job {replay.job_id}: give --tenant ({owners})")
    [row] = rows
    if row["pool"] != settings.pool:
        raise InputError(f"job {replay.job_id} belongs to pool {row['pool']!r}; set LORAQ_POOL={row['pool']}")
    if row["state"] not in {str(state) for state in TERMINAL_STATES}:
        raise InputError(f"job {replay.job_id} is {row['state']}; only a job that has ended can be replayed")
    if row["state"] == JobState.SUCCEEDED and not replay.force:
        raise InputError(f"job {replay.job_id} succeeded; give --force to replay it anyway")
    return row


async def _new_id(connection: Connection, row: Any, replay: ReplayRequest) -> UUID:
    """A new id, or that of an earlier replay that may not have been sent: both attempts must be one job."""
    earlier = await connection.fetchrow(SELECT_REPLAY, row["tenant"], [row["job_id"]])
    if earlier is None:
        return uuid7()
    if earlier["sent_at"] is None:
        return UUID(str(earlier["new_job_id"]))
    if not replay.again:
        how = f"as job {earlier['new_job_id']} at {earlier['sent_at'].isoformat(timespec='seconds')}"
        raise InputError(f"job {row['job_id']} was already replayed {how}; give --again to replay it again")
    return uuid7()


def _new_request(request: JobRequest, new_id: UUID, replay: ReplayRequest) -> JobRequest:
    """The request under its new id, without a deadline that has passed: the job would expire again."""
    deadline = replay.deadline or request.deadline
    if deadline is not None and deadline <= datetime.now(UTC):
        if replay.deadline is not None:
            raise InputError(f"--deadline {deadline.isoformat()} has already passed")
        deadline = None
    return request.model_copy(update={"job_id": new_id, "deadline": deadline})


async def _signing_key(pool: Pool, settings: Settings, record: JobRecord, tenant: str) -> str | None:
    """The tenant's producer key if the record was signed: a worker has accepted the record, so it is authentic."""
    was_signed = names.last(record.headers, SIGNATURE_HEADER) is not None
    if settings.producer_key is not None or not (was_signed or settings.require_signed_jobs):
        return None
    async with transaction(pool, "look up the tenant's key") as connection:
        keys = await producer_keys(connection, SecretBox(settings.secret_key), [tenant])
    if tenant in keys.damaged:
        raise InputError(f"the job cannot be signed for its tenant: {damaged_key(tenant)}")
    if tenant not in keys.opened:
        raise InputError(f"the job cannot be signed for its tenant: tenant {tenant} is disabled")
    return keys.opened[tenant].decode()
