"""Jobs as they stand in the database, for people who look at them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from schemas.common import TERMINAL_STATES
from services.errors import InputError
from services.jobs.deliveries import deliveries_of
from services.postgres.pool import Connection, Pool, translated
from services.tenants.tenants import require_tenant

LIST = """
select tenant, job_id, adapter, adapter_version, lane, state, error_code, error_message, attempts, accepted_at,
       finished_at, completion_tokens, total_ms
from loraq.jobs
left join loraq.results using (accepted_on, tenant, job_id)
where ($1::text is null or tenant = $1) and ($2::text is null or state = $2)
order by accepted_at desc
limit $3
"""
SHOW = """
select jobs.tenant, jobs.job_id, jobs.pool, jobs.adapter, jobs.adapter_version, jobs.lane, jobs.state,
       jobs.error_code, jobs.error_message, jobs.attempts, jobs.accepted_at, jobs.started_at, jobs.finished_at,
       jobs.worker, jobs.replay_of, jobs.metadata, results.finish_reason, results.prompt_tokens,
       results.cached_tokens, results.completion_tokens, results.queue_ms, results.load_ms, results.first_token_ms,
       results.total_ms, results.output_url, results.output_text
from loraq.job_keys
join loraq.jobs using (accepted_on, tenant, job_id)
left join loraq.results using (accepted_on, tenant, job_id)
where job_keys.job_id = any($1::uuid[]) and ($2::text is null or job_keys.tenant = $2)
order by jobs.accepted_at
"""
FINGERPRINTS = "select tenant, job_id, fingerprint from loraq.job_keys where job_id = any($1::uuid[])"
POLL_S = 0.2
UNTAKEN_S = 10.0
FIRST_LOOK_S, MAX_LOOK_S = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom `wait_for` tells and asks: how many jobs have ended, again and again; once, that no worker has taken any of
    them; and why those without a row were put aside, ever less often."""

    untaken: Callable[[], None]
    ended: Callable[[int], None] | None = None
    put_aside: Callable[[], Awaitable[Mapping[UUID, str]]] | None = None


@dataclass(slots=True)
class Waited:
    """Rows of the jobs that ended, and why the others were put aside; a worker makes no row of those."""

    rows: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    put_aside: dict[UUID, str] = field(default_factory=dict)

    def left(self, job_ids: Sequence[UUID]) -> list[UUID]:
        """Those that have neither."""
        return [job_id for job_id in job_ids if job_id not in self.rows and job_id not in self.put_aside]


async def list_jobs(connection: Connection, tenant: str | None, state: str | None, limit: int) -> list[dict[str, Any]]:
    """The newest jobs, newest first; raises InputError for a tenant that is not registered."""
    await _check_tenant(connection, tenant)
    return [dict(row) for row in await connection.fetch(LIST, tenant, state, limit)]


async def show_job(connection: Connection, job_id: UUID, tenant: str | None) -> list[dict[str, Any]]:
    """Everything about a job, its webhooks too; ids are unique per tenant only. Raises InputError if there is none."""
    await _check_tenant(connection, tenant)
    rows = [dict(row) for row in await connection.fetch(SHOW, [job_id], tenant)]
    if not rows:
        whose = f" of tenant {tenant}" if tenant else ""
        raise InputError(f"there is no job {job_id}{whose}; a job is known once a worker has taken its record")
    return [row | {"webhooks": await deliveries_of(connection, row["tenant"], job_id)} for row in rows]


async def _check_tenant(connection: Connection, tenant: str | None) -> None:
    if tenant is not None:
        await require_tenant(connection, tenant)


async def wait_for(
    pool: Pool, tenants: Collection[str], job_ids: Sequence[UUID], timeout_s: float, listener: Listener
) -> Waited:
    """What became of the jobs, once each is terminal or was put aside.

    Raises InputError if that is not so within `timeout_s` seconds.
    """
    waited = Waited()
    now = asyncio.get_running_loop().time
    give_up_at, untaken_at = now() + timeout_s, now() + UNTAKEN_S
    look_s, look_at = FIRST_LOOK_S, now() + FIRST_LOOK_S
    while left := waited.left(job_ids):
        with translated("look for the jobs"):
            rows = [row for row in await pool.fetch(SHOW, left, None) if row["tenant"] in tenants]
        waited.rows |= {row["job_id"]: dict(row) for row in rows if _is_terminal(row)}
        if listener.ended is not None:
            listener.ended(len(job_ids) - len(waited.left(job_ids)))
        if not rows and not waited.rows and now() > untaken_at:
            listener.untaken()
            untaken_at = give_up_at + 1
        if listener.put_aside is not None and len(rows) < len(set(left)) and now() > look_at:
            waited.put_aside |= {job_id: why for job_id, why in (await listener.put_aside()).items() if job_id in left}
            look_s = min(2 * look_s, MAX_LOOK_S)
            look_at = now() + look_s
        if now() > give_up_at and (missing := waited.left(job_ids)):
            raise InputError(
                f"{len(set(missing))} of {len(job_ids)} jobs did not end within {timeout_s:g} s, {missing[0]}"
                " for one; check that a worker runs and look at `loraq jobs`"
            )
        await asyncio.sleep(POLL_S)
    return waited


async def require_own(pool: Pool, asked: Mapping[tuple[str, UUID], bytes]) -> None:
    """Raise InputError if one of the jobs, given as the fingerprint of what was asked, was another request's before."""
    with translated("compare the requests"):
        rows = await pool.fetch(FINGERPRINTS, [job_id for _, job_id in asked])
    for row in rows:
        if row["fingerprint"] != asked.get((row["tenant"], row["job_id"]), row["fingerprint"]):
            raise InputError(
                f"tenant {row['tenant']!r} used job_id {row['job_id']} before for a different request, and only that"
                " one was answered; send this one under a new id (`loraq dlq list` shows it)"
            )


def _is_terminal(row: Any) -> bool:
    return row["state"] in {str(state) for state in TERMINAL_STATES}
