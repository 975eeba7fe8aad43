"""Reads jobs from the database: lists them, shows one, and waits until they have ended."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from schemas.common import TERMINAL_STATES, JobState
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
STATE = """
select jobs.state from loraq.job_keys join loraq.jobs using (accepted_on, tenant, job_id)
where job_keys.tenant = $1 and job_keys.job_id = $2
"""
FINGERPRINTS = "select tenant, job_id, fingerprint from loraq.job_keys where job_id = any($1::uuid[])"
POLL_S = 0.2
NONE_CONSUMED_S = 10.0
FIRST_LOOKUP_S, MAX_LOOKUP_S = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class WaitCallbacks:
    """Callbacks of `wait_for`.

    `on_none_consumed` is called once if no worker has consumed any of the jobs, `on_progress` with the number of ended
    jobs. `dead_letters` returns the reasons of dead-lettered jobs; it is called at growing intervals.
    """

    on_none_consumed: Callable[[], None]
    on_progress: Callable[[int], None] | None = None
    dead_letters: Callable[[], Awaitable[Mapping[UUID, str]]] | None = None


@dataclass(slots=True)
class WaitResult:
    """Rows of the jobs that ended, and reasons of those that were dead-lettered, which have no row."""

    rows: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    dead_letters: dict[UUID, str] = field(default_factory=dict)

    def unfinished(self, job_ids: Sequence[UUID]) -> list[UUID]:
        """The jobs that have neither."""
        return [job_id for job_id in job_ids if job_id not in self.rows and job_id not in self.dead_letters]


async def list_jobs(connection: Connection, tenant: str | None, state: str | None, limit: int) -> list[dict[str, Any]]:
    """The newest jobs, newest first; raises InputError for an unknown tenant."""
    await _check_tenant(connection, tenant)
    return [dict(row) for row in await connection.fetch(LIST, tenant, state, limit)]


async def show_job(connection: Connection, job_id: UUID, tenant: str | None) -> list[dict[str, Any]]:
    """All details of a job and its webhooks, one row per tenant that has this id; raises InputError if none has."""
    await _check_tenant(connection, tenant)
    rows = [dict(row) for row in await connection.fetch(SHOW, [job_id], tenant)]
    if not rows:
        raise no_such_job(job_id, tenant)
    return [row | {"webhooks": await deliveries_of(connection, row["tenant"], job_id)} for row in rows]


async def state_of(connection: Connection, tenant: str, job_id: UUID) -> JobState | None:
    """The state of a tenant's job; None if the database has no such job."""
    state = await connection.fetchval(STATE, tenant, job_id)
    return None if state is None else JobState(state)


def no_such_job(job_id: UUID, tenant: str | None) -> InputError:
    """The error for an unknown job, of a tenant or of any."""
    owner = f" of tenant {tenant}" if tenant else ""
    return InputError(f"no such job{owner}: {job_id}; a job is known once a worker has consumed its record")


async def _check_tenant(connection: Connection, tenant: str | None) -> None:
    if tenant is not None:
        await require_tenant(connection, tenant)


async def wait_for(
    pool: Pool, tenants: Collection[str], job_ids: Sequence[UUID], timeout_s: float, callbacks: WaitCallbacks
) -> WaitResult:
    """Wait until every job is terminal or dead-lettered; raises InputError after `timeout_s` seconds."""
    result = WaitResult()
    now = asyncio.get_running_loop().time
    give_up_at, none_consumed_at = now() + timeout_s, now() + NONE_CONSUMED_S
    lookup_s, lookup_at = FIRST_LOOKUP_S, now() + FIRST_LOOKUP_S
    while unfinished := result.unfinished(job_ids):
        with translated("look up the jobs"):
            rows = [row for row in await pool.fetch(SHOW, unfinished, None) if row["tenant"] in tenants]
        result.rows |= {row["job_id"]: dict(row) for row in rows if _is_terminal(row)}
        if callbacks.on_progress is not None:
            callbacks.on_progress(len(job_ids) - len(result.unfinished(job_ids)))
        if not rows and not result.rows and now() > none_consumed_at:
            callbacks.on_none_consumed()
            none_consumed_at = give_up_at + 1
        if callbacks.dead_letters is not None and len(rows) < len(set(unfinished)) and now() > lookup_at:
            reasons = await callbacks.dead_letters()
            result.dead_letters |= {job_id: reasons[job_id] for job_id in unfinished if job_id in reasons}
            lookup_s = min(2 * lookup_s, MAX_LOOKUP_S)
            lookup_at = now() + lookup_s
        if now() > give_up_at and (missing := result.unfinished(job_ids)):
            raise InputError(
                f"{len(set(missing))} of {len(job_ids)} jobs did not end within {timeout_s:g} s, for instance"
                f" {missing[0]}; check that a worker is running and see `loraq jobs`"
            )
        await asyncio.sleep(POLL_S)
    return result


async def require_own(pool: Pool, fingerprints: Mapping[tuple[str, UUID], bytes]) -> None:
    """Raise InputError if a job's id was used before for another request; `fingerprints` are those of the requests."""
    with translated("compare the requests"):
        rows = await pool.fetch(FINGERPRINTS, [job_id for _, job_id in fingerprints])
    for row in rows:
        if row["fingerprint"] != fingerprints.get((row["tenant"], row["job_id"]), row["fingerprint"]):
            raise InputError(
                f"tenant {row['tenant']!r} already used job_id {row['job_id']} for a different request, and the result"
                " is that request's; send this one under a new id (`loraq dlq list` shows it)"
            )


def _is_terminal(row: Any) -> bool:
    return row["state"] in {str(state) for state in TERMINAL_STATES}
