"""Webhooks as they stand, for people who look for those that did not arrive."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant

OUTCOMES = ("pending", "retrying", "failed", "blocked", "delivered")
UNDELIVERED = OUTCOMES[:-1]
COLUMNS = {
    "created_at": "job ended",
    "tenant": "tenant",
    "job_id": "job",
    "host": "webhook to",
    "outcome": "outcome",
    "attempts": "attempts",
    "next_attempt_at": "next attempt",
    "status_code": "status",
    "reason": "reason",
}
# A row says whether more attempts follow, the newest of its attempts what came of it; before the first it is `pending`.
LIST = """
select outbox.created_at, outbox.tenant, outbox.job_id, outbox.event_id as webhook_id, outbox.type,
       outbox.target as url, coalesce(newest.outcome, 'pending') as outcome, coalesce(newest.attempt, 0) as attempts,
       case outbox.state when 'pending' then outbox.next_attempt_at end as next_attempt_at,
       newest.started_at as attempted_at, newest.status_code, newest.error as reason, outbox.resent_at
from loraq.outbox
left join lateral (
    select attempt, outcome, status_code, error, started_at
    from loraq.webhook_deliveries as delivery
    where delivery.tenant = outbox.tenant and delivery.job_id = outbox.job_id
      and delivery.webhook_id = outbox.event_id and delivery.url = outbox.target
    order by attempt desc
    limit 1
) as newest on true
where outbox.kind = 'webhook'
  and outbox.state = any($1::text[])
  and coalesce(newest.outcome, 'pending') = any($2::text[])
  and ($3::text is null or outbox.tenant = $3)
  and ($4::uuid is null or outbox.job_id = $4)
  and ($5::text is null or lower(split_part(outbox.target, '/', 3)) = lower($5))
  and ($6::timestamptz is null or outbox.created_at >= $6)
order by outbox.created_at desc, outbox.id desc
limit $7
"""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which webhooks a person means; all that is given must hold. `host` is host and port as the address has them."""

    outcomes: frozenset[str] = frozenset(UNDELIVERED)
    tenant: str | None = None
    job_id: UUID | None = None
    host: str | None = None
    since: datetime | None = None

    @property
    def states(self) -> list[str]:
        """States of the outbox in which there can be such; the many that were delivered only if asked for."""
        return ["pending", "dead", *(["done"] if "delivered" in self.outcomes else [])]


async def list_webhooks(connection: Connection, chosen: Chosen, limit: int) -> list[dict[str, Any]]:
    """The newest of them, fields of COLUMNS and more. Of its address the host alone: the rest may be secret.

    Raises InputError for a tenant that is not registered.
    """
    if chosen.tenant is not None:
        await require_tenant(connection, chosen.tenant)
    rows = await connection.fetch(
        LIST,
        chosen.states,
        list(chosen.outcomes),
        chosen.tenant,
        chosen.job_id,
        chosen.host,
        chosen.since,
        limit,
    )
    return [_row(dict(row)) for row in rows]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"host": host_of(row.pop("url")), **row}


def host_of(url: str) -> str:
    """Host and port of an address, without what may be secret in it."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return "?"
