"""Resends webhooks: makes their outbox rows due under the same webhook-id, with a new retry schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant
from services.webhooks.listing import host_of

# A pending row whose counted attempt has no delivery row has an attempt in flight. It is skipped, because concurrent
# attempts do not know of each other. A row that was never attempted is due already.
RESEND = """
with chosen as (
    select outbox.id
    from loraq.outbox
    where outbox.kind = 'webhook'
      and outbox.attempts > 0
      and ($1::uuid[] is null or outbox.job_id = any($1))
      and ($2::text is null or outbox.tenant = $2)
      and ($3::text is null or lower(split_part(outbox.target, '/', 3)) = lower($3))
      and (outbox.state = 'dead' or (outbox.state = 'done' and $4) or (outbox.state = 'pending' and exists (
          select from loraq.webhook_deliveries as delivery
          where delivery.tenant = outbox.tenant and delivery.job_id = outbox.job_id
            and delivery.webhook_id = outbox.event_id and delivery.attempt = outbox.attempts)))
    order by outbox.id
    limit $5
    for update of outbox skip locked
), resent as (
    update loraq.outbox
    set state = 'pending', next_attempt_at = now(), finished_at = null, resent_at = now(),
        attempts_before = outbox.attempts
    from chosen
    where outbox.id = chosen.id
    returning outbox.id, outbox.tenant, outbox.job_id, outbox.event_id as webhook_id, outbox.target as url,
        outbox.attempts
)
select resent.*, (select pg_notify('loraq_outbox', '')) as woken from resent order by id
"""
# The state of jobs that have nothing to resend, to explain why.
SKIPPED = """
select job_keys.job_id, min(outbox.state) as state, max(outbox.attempts) as attempts,
       exists (select from loraq.webhook_deliveries as delivery
               where delivery.tenant = job_keys.tenant and delivery.job_id = job_keys.job_id) as was_attempted
from loraq.job_keys
left join loraq.outbox
    on outbox.tenant = job_keys.tenant and outbox.job_id = job_keys.job_id and outbox.kind = 'webhook'
where job_keys.job_id = any($1::uuid[]) and ($2::text is null or job_keys.tenant = $2)
group by job_keys.tenant, job_keys.job_id
"""


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """Which webhooks to resend: of these jobs, or of all if empty; with `again`, delivered ones as well."""

    job_ids: Sequence[UUID]
    tenant: str | None
    host: str | None
    again: bool
    limit: int


async def resend(connection: Connection, request: ResendRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """The webhooks now due, oldest first, and one sentence for each requested job that has nothing to resend.

    Raises InputError for an unknown tenant.
    """
    if request.tenant is not None:
        await require_tenant(connection, request.tenant)
    job_ids = list(dict.fromkeys(request.job_ids))
    rows = await connection.fetch(RESEND, job_ids or None, request.tenant, request.host, request.again, request.limit)
    resent = [
        {name: row[name] for name in ("tenant", "job_id", "webhook_id", "attempts")} | {"host": host_of(row["url"])}
        for row in rows
    ]
    skipped = [job_id for job_id in job_ids if job_id not in {row["job_id"] for row in resent}]
    return resent, await _skip_reasons(connection, skipped, request.tenant) if skipped else []


async def _skip_reasons(connection: Connection, job_ids: Sequence[UUID], tenant: str | None) -> list[str]:
    known = {row["job_id"]: row for row in await connection.fetch(SKIPPED, job_ids, tenant)}
    return [f"job {job_id}: {_skip_reason(known.get(job_id))}" for job_id in job_ids]


def _skip_reason(row: Any) -> str:
    if row is None:
        return "no such job; a job is known once a worker has consumed its record"
    match row["state"]:
        case None if row["was_attempted"]:
            return (
                "its webhook is older than LORAQ_OUTBOX_RETENTION_DAYS and was deleted; the job's row has the outcome"
            )
        case None:
            return "it has no webhook, or has not ended"
        case "done":
            return "its webhook was delivered; give --again to resend it"
        case "pending" if not row["attempts"]:
            return "its webhook waits for its first attempt; is `loraq dispatcher` running?"
        case "pending":
            return "an attempt is in flight; see `loraq jobs show`, and try again if it fails"
        case _:
            return "its webhook goes to another host, or --limit excludes it"
