"""Lists webhooks with the result of their newest attempt."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant

OUTCOMES = ("pending", "retrying", "failed", "blocked", "delivered")
UNDELIVERED = OUTCOMES[:-1]
COLUMNS = ("created_at", "tenant", "job_id", "host", "outcome", "attempts", "next_attempt_at", "status_code", "reason")
# The outbox row holds whether more attempts follow, the newest attempt the outcome; `pending` before the first attempt.
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
class WebhookFilter:
    """Conditions that all must hold; None matches everything. `host` is host and port as written in the address."""

    outcomes: frozenset[str] = frozenset(UNDELIVERED)
    tenant: str | None = None
    job_id: UUID | None = None
    host: str | None = None
    since: datetime | None = None

    @property
    def states(self) -> list[str]:
        """States of matching outbox rows; `done`, by far the most frequent, only if delivered webhooks match."""
        return ["pending", "dead", *(["done"] if "delivered" in self.outcomes else [])]


async def list_webhooks(connection: Connection, matching: WebhookFilter, limit: int) -> list[dict[str, Any]]:
    """The newest matching webhooks, with the fields of COLUMNS and more; raises InputError for an unknown tenant.

    Only the host of the address is included: path and query may be secret.
    """
    if matching.tenant is not None:
        await require_tenant(connection, matching.tenant)
    rows = await connection.fetch(
        LIST,
        matching.states,
        list(matching.outcomes),
        matching.tenant,
        matching.job_id,
        matching.host,
        matching.since,
        limit,
    )
    return [_row(dict(row)) for row in rows]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"host": host_of(row.pop("url")), **row}


def host_of(url: str) -> str:
    """Host and port of an address, without user name, path and query."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return "?"
