"""The webhooks of a job, each with the result of its newest attempt."""

from typing import Any
from uuid import UUID

from services.postgres.pool import Connection
from services.webhooks.listing import host_of

COLUMNS = ("host", "outcome", "attempts", "next_attempt_at", "status_code", "reason")
# Old outbox rows are deleted, attempts are kept.
SELECT = """
with attempted as (
    select distinct on (webhook_id, url) webhook_id, url, outcome, attempt, next_attempt_at, status_code, error
    from loraq.webhook_deliveries
    where tenant = $1 and job_id = $2
    order by webhook_id, url, attempt desc
), waiting as (
    select event_id, target, attempts, next_attempt_at
    from loraq.outbox
    where tenant = $1 and job_id = $2 and kind = 'webhook' and state = 'pending'
)
select coalesce(attempted.url, waiting.target) as url, coalesce(attempted.outcome, 'pending') as outcome,
       greatest(attempted.attempt, waiting.attempts) as attempts, waiting.next_attempt_at, attempted.status_code,
       attempted.error as reason
from attempted
full join waiting on waiting.event_id = attempted.webhook_id and waiting.target = attempted.url
order by url
"""


async def deliveries_of(connection: Connection, tenant: str, job_id: UUID) -> list[dict[str, Any]]:
    """The job's webhooks with the fields of COLUMNS. Only the host of the address: path and query may be secret.

    `outcome` is that of the newest attempt, `pending` before the first.
    """
    rows = [dict(row) for row in await connection.fetch(SELECT, tenant, job_id)]
    return [{"host": host_of(row["url"])} | {name: row[name] for name in COLUMNS[1:]} for row in rows]
