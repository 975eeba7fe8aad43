"""Has webhooks sent again: their rows in the outbox become due, under the same webhook-id and with a fresh schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant
from services.webhooks.listing import host_of

# An attempt under way is one that was counted and not yet written down: it is left to its end, since two at once would
# not know of each other. One that was never attempted is due already.
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
# What a job has that was not sent again, and why not.
LEFT = """
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
class Wish:
    """Which webhooks are to be sent again: of these jobs, or of all; with `again` those that were delivered too."""

    job_ids: Sequence[UUID]
    tenant: str | None
    host: str | None
    again: bool
    limit: int


async def resend(connection: Connection, wish: Wish) -> tuple[list[dict[str, Any]], list[str]]:
    """What is due now, oldest first, and for each job that was named and has nothing among it a sentence why.

    Raises InputError for a tenant that is not registered.
    """
    if wish.tenant is not None:
        await require_tenant(connection, wish.tenant)
    asked = list(wish.job_ids) or None
    rows = await connection.fetch(RESEND, asked, wish.tenant, wish.host, wish.again, wish.limit)
    sent = [
        {name: row[name] for name in ("tenant", "job_id", "webhook_id", "attempts")} | {"host": host_of(row["url"])}
        for row in rows
    ]
    left = [job_id for job_id in dict.fromkeys(wish.job_ids) if job_id not in {row["job_id"] for row in sent}]
    return sent, await _reasons(connection, left, wish) if left else []


async def _reasons(connection: Connection, job_ids: Sequence[UUID], wish: Wish) -> list[str]:
    known = {row["job_id"]: row for row in await connection.fetch(LEFT, job_ids, wish.tenant)}
    return [f"job {job_id}: {_why(known.get(job_id))}" for job_id in job_ids]


def _why(row: Any) -> str:
    if row is None:
        return "there is no such job; one is known once a worker has taken its record"
    match row["state"]:
        case None if row["was_attempted"]:
            return "its webhook is no longer kept (LORAQ_OUTBOX_RETENTION_DAYS); its row has the outcome"
        case None:
            return "it has no webhook, or has not ended"
        case "done":
            return "its webhook was delivered; --again sends it once more"
        case "pending" if not row["attempts"]:
            return "its webhook waits for its first attempt; is `loraq dispatcher` running?"
        case "pending":
            return "an attempt is under way; look at it with `loraq jobs`, and ask again if it fails"
        case _:
            return "its webhook goes to another host, or --limit leaves it out"
