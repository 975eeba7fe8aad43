"""What `loraq jobs replay` does: the request of a job that ended, sent anew under an id of its own."""

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
from services.jobs.record_lookup import Found, Wanted, find_record
from services.kafka import headers as names
from services.postgres.pool import Connection, Pool, open_pool, transaction
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import damaged_key, producer_keys

ENDED = """
select tenant, job_id, pool, lane, state, accepted_at, fingerprint
from loraq.job_keys join loraq.jobs using (accepted_on, tenant, job_id)
where job_keys.job_id = any($1::uuid[]) and ($2::text is null or job_keys.tenant = $2)
"""
BEFORE = "select new_job_id, sent_at from loraq.job_replays where tenant = $1 and job_id = any($2::uuid[])"
BEGIN = """
insert into loraq.job_replays (tenant, job_id, new_job_id)
select $1, job_id, new_job_id from unnest($2::uuid[], $3::uuid[]) as asked (job_id, new_job_id)
on conflict (tenant, job_id) do update set new_job_id = excluded.new_job_id, begun_at = now(), sent_at = null
"""
SENT = "update loraq.job_replays set sent_at = now() where tenant = $1 and new_job_id = any($2::uuid[])"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks for: which job, on which lane (its own if None), with which deadline (the old one if None).

    With `again` a job that was replayed before is replayed once more; with `force` one that succeeded is.
    """

    job_id: UUID
    tenant: str | None
    lane: Lane | None
    deadline: datetime | None
    again: bool
    force: bool


async def replay_job(settings: Settings, wish: Wish) -> Receipt:
    """Send the job's request anew; its row will say `replay_of`. Raises InputError saying why that cannot be done."""
    async with open_pool(settings) as pool:
        async with transaction(pool, "look up the job") as connection:
            row = await _ended(connection, settings, wish)
            new_id = await _new_id(connection, row, wish)
        wanted = Wanted(row["tenant"], row["job_id"], Lane(row["lane"]), row["fingerprint"], row["accepted_at"])
        found = await find_record(settings, wanted)
        request = _renewed(found.request, new_id, wish)
        key = await _signing_key(pool, settings, found, row["tenant"])
        async with transaction(pool, "mark the replay") as connection:
            await connection.execute(BEGIN, row["tenant"], [row["job_id"]], [new_id])
        of = [(names.REPLAY_OF, str(row["job_id"]).encode())]
        async with JobProducer.from_settings(settings, producer_key=key) as producer:
            receipt = await producer.send(request, wish.lane or wanted.lane, headers=of)
        async with transaction(pool, "mark the replay") as connection:
            await connection.execute(SENT, row["tenant"], [new_id])
    return receipt


async def _ended(connection: Connection, settings: Settings, wish: Wish) -> Any:
    rows = await connection.fetch(ENDED, [wish.job_id], wish.tenant)
    if not rows:
        whose = f" of tenant {wish.tenant}" if wish.tenant else ""
        raise InputError(f"there is no job {wish.job_id}{whose}; a job is known once a worker has taken its record")
    if len(rows) > 1:
        owners = ", ".join(sorted(row["tenant"] for row in rows))
        raise InputError(f"several tenants have a job {wish.job_id}: say --tenant ({owners})")
    [row] = rows
    if row["pool"] != settings.pool:
        raise InputError(f"job {wish.job_id} is of pool {row['pool']!r}; set LORAQ_POOL to it")
    if row["state"] not in {str(state) for state in TERMINAL_STATES}:
        raise InputError(f"job {wish.job_id} is {row['state']}: it has not ended, so there is nothing to replay")
    if row["state"] == JobState.SUCCEEDED and not wish.force:
        raise InputError(f"job {wish.job_id} succeeded; --force replays it all the same")
    return row


async def _new_id(connection: Connection, row: Any, wish: Wish) -> UUID:
    """A fresh id; or that of a replay that may not have been sent, so that it makes one job."""
    before = await connection.fetchrow(BEFORE, row["tenant"], [row["job_id"]])
    if before is None:
        return uuid7()
    if before["sent_at"] is None:
        return UUID(str(before["new_job_id"]))
    if not wish.again:
        said = f"as job {before['new_job_id']} at {before['sent_at'].isoformat(timespec='seconds')}"
        raise InputError(f"job {row['job_id']} was replayed before, {said}; --again replays it once more")
    return uuid7()


def _renewed(request: JobRequest, new_id: UUID, wish: Wish) -> JobRequest:
    """A deadline that has passed is left out: the job would end as expired again."""
    deadline = wish.deadline or request.deadline
    if deadline is not None and deadline <= datetime.now(UTC):
        if wish.deadline is not None:
            raise InputError(f"--deadline {deadline.isoformat()} has passed already")
        deadline = None
    return request.model_copy(update={"job_id": new_id, "deadline": deadline})


async def _signing_key(pool: Pool, settings: Settings, found: Found, tenant: str) -> str | None:
    """The tenant's own key where its record was signed. The record was taken once, so whoever sent it was trusted."""
    was_signed = names.last(found.headers, SIGNATURE_HEADER) is not None
    if settings.producer_key is not None or not (was_signed or settings.require_signed_jobs):
        return None
    async with transaction(pool, "look up the tenant's key") as connection:
        keys = await producer_keys(connection, SecretBox(settings.secret_key), [tenant])
    if tenant in keys.damaged:
        raise InputError(f"the job cannot be signed in its tenant's name: {damaged_key(tenant)}")
    if tenant not in keys.opened:
        raise InputError(f"tenant {tenant} is disabled, so the job cannot be signed in its name")
    return keys.opened[tenant].decode()
