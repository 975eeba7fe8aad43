"""The outbox in Postgres: claims due rows and records the outcome of each attempt.

A claim is one statement that counts the attempt and moves `next_attempt_at` forward; no transaction stays open while
the dispatcher talks to a receiver or a broker. If the dispatcher dies, its claims expire on their own. `attempts` is
the claim's fencing token: a write under an expired claim changes nothing. All times are the database's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from services.dispatcher.slots import Capacity
from services.postgres.pool import Pool, translated
from services.webhooks.outcome import Blocked, Delivered, Failed, Outcome, Retry

MAX_SCANNED = 500  # due rows that one claim looks at, so that a long backlog costs no more than a short one

CLAIM_WEBHOOKS = """
with scanned as (
    select id, lower(split_part(target, '/', 3)) as host, next_attempt_at
    from loraq.outbox
    where state = 'pending' and kind = 'webhook' and pool = $1 and next_attempt_at <= now()
      and lower(split_part(target, '/', 3)) <> all ($2::text[])
    order by next_attempt_at
    limit $3
), ranked as (
    select id, host, row_number() over (partition by host order by next_attempt_at) as position from scanned
), due as (
    select outbox.id
    from loraq.outbox
    join ranked using (id)
    left join unnest($4::text[], $5::integer[]) as capacity (host, slots) using (host)
    where ranked.position <= coalesce(capacity.slots, $6)
      and outbox.state = 'pending' and outbox.next_attempt_at <= now()
    order by outbox.next_attempt_at
    limit $7
    for update of outbox skip locked
)
update loraq.outbox claimed
set attempts = claimed.attempts + 1, next_attempt_at = now() + $8
from due where claimed.id = due.id
returning claimed.id, claimed.event_id, claimed.tenant, claimed.job_id, claimed.body, claimed.target,
    claimed.traceparent, claimed.attempts, claimed.attempts - claimed.attempts_before as tries,
    coalesce(claimed.resent_at, claimed.created_at) as schedule_started_at, now() as claimed_at,
    lower(split_part(claimed.target, '/', 3)) as host,
    (select webhook_secret from loraq.tenants where tenants.tenant = claimed.tenant) as sealed_secret
"""

FINISH_WEBHOOK = """
with finished as (
    update loraq.outbox
    set state = $3,
        next_attempt_at = case $3 when 'pending' then now() + $4 else next_attempt_at end,
        finished_at = case $3 when 'pending' then null else now() end
    where id = $1 and attempts = $2 and state = 'pending'
    returning case state when 'pending' then next_attempt_at end as next_attempt_at
)
insert into loraq.webhook_deliveries
    (webhook_id, tenant, job_id, url, attempt, outcome, status_code, error, started_at, duration_ms, next_attempt_at)
select $5, $6, $7, $8, $2, $9, $10, $11, $12, $13, (select next_attempt_at from finished)
where not exists (
    select from loraq.webhook_deliveries
    where tenant = $6 and job_id = $7 and webhook_id = $5 and attempt = $2
)
"""

RELEASE_WEBHOOKS = """
update loraq.outbox released
set attempts = released.attempts - 1, next_attempt_at = now()
from unnest($1::bigint[], $2::integer[]) as claim (id, attempts)
where released.id = claim.id and released.attempts = claim.attempts and released.state = 'pending'
"""

CLAIM_EVENTS = """
with due as (
    select id from loraq.outbox
    where state = 'pending' and kind = 'event' and pool = $1 and next_attempt_at <= now()
    order by next_attempt_at
    limit $2
    for update skip locked
)
update loraq.outbox claimed
set attempts = claimed.attempts + 1, next_attempt_at = now() + $3
from due where claimed.id = due.id
returning claimed.id, claimed.event_id, claimed.tenant, claimed.job_id, claimed.body, claimed.traceparent
"""

FINISH_EVENTS = """
update loraq.outbox set state = $2, finished_at = now() where id = any ($1::bigint[]) and state = 'pending'
"""

POSTPONE_EVENTS = """
update loraq.outbox set next_attempt_at = now() + $2 where id = any ($1::bigint[]) and state = 'pending'
"""

DELETE_FINISHED = """
delete from loraq.outbox where id in (
    select id from loraq.outbox
    where state <> 'pending' and finished_at < now() - $1::interval
    limit $2
    for update skip locked
)
"""

COUNT_PENDING = """
select kind, count(*) as rows, coalesce(extract(epoch from now() - min(next_attempt_at)), 0)::float8 as overdue_s
from loraq.outbox where state = 'pending' and pool = $1 group by kind
"""


@dataclass(frozen=True)
class WebhookRow:
    """A claimed webhook; `attempts` includes this attempt, `host` is the host and port by which claims are grouped.

    `tries` counts the attempts of the current schedule, which started at `schedule_started_at`: when the job ended, or
    when an operator had the webhook resent.
    """

    id: int
    event_id: UUID
    tenant: str
    job_id: UUID
    body: str
    target: str
    traceparent: str | None
    attempts: int
    tries: int
    schedule_started_at: datetime
    claimed_at: datetime
    host: str
    sealed_secret: bytes | None


@dataclass(frozen=True)
class EventRow:
    """A claimed event."""

    id: int
    event_id: UUID
    tenant: str
    job_id: UUID
    body: str
    traceparent: str | None


@dataclass(frozen=True)
class Backlog:
    """Pending rows of one kind, and how long the oldest of them has been due."""

    kind: str
    rows: int
    overdue_s: float


class Outbox:
    """The outbox rows of one pool. Raises RetryableError while the database is unavailable."""

    def __init__(self, database: Pool, pool: str) -> None:
        self._database = database
        self._pool = pool

    async def claim_webhooks(self, capacity: Capacity, claim_for: timedelta) -> list[WebhookRow]:
        """Claim due webhooks within `capacity`; the claims last for `claim_for`."""
        full = [host for host, slots in capacity.by_host.items() if slots <= 0]
        hosts, slots = list(capacity.by_host), list(capacity.by_host.values())
        limits = (hosts, slots, capacity.other_hosts, capacity.total)
        rows = await self._fetch(CLAIM_WEBHOOKS, self._pool, full, MAX_SCANNED, *limits, claim_for)
        return [WebhookRow(**row) for row in rows]

    async def finish_webhook(self, row: WebhookRow, outcome: Outcome, status: int | None, duration: timedelta) -> None:
        """Record the attempt and update its row, in one idempotent statement."""
        state, after = state_after(outcome)
        claim = (row.id, row.attempts, state, after)
        webhook = (row.event_id, row.tenant, row.job_id, row.target)
        result = (delivery_outcome(outcome), status, getattr(outcome, "reason", None))
        await self._execute(
            FINISH_WEBHOOK, *claim, *webhook, *result, row.claimed_at, duration / timedelta(milliseconds=1)
        )

    async def release_webhooks(self, rows: Iterable[WebhookRow]) -> None:
        """Undo the claims of rows that were not attempted."""
        claims = [(row.id, row.attempts) for row in rows]
        if claims:
            await self._execute(RELEASE_WEBHOOKS, *zip(*claims, strict=True))

    async def claim_events(self, limit: int, claim_for: timedelta) -> list[EventRow]:
        """Claim at most `limit` due events; the claims last for `claim_for`."""
        return [EventRow(**row) for row in await self._fetch(CLAIM_EVENTS, self._pool, limit, claim_for)]

    async def finish_events(self, ids: Sequence[int], state: str) -> None:
        """Mark events as acknowledged by the broker (`done`) or rejected for good (`dead`)."""
        if ids:
            await self._execute(FINISH_EVENTS, ids, state)

    async def postpone_events(self, ids: Sequence[int], after: timedelta) -> None:
        """Make events that the broker did not acknowledge due again after `after`."""
        if ids:
            await self._execute(POSTPONE_EVENTS, ids, after)

    async def delete_finished(self, older_than: timedelta, limit: int) -> int:
        """Delete at most `limit` rows that were finished longer than `older_than` ago; returns the number."""
        status = await self._execute(DELETE_FINISHED, older_than, limit)
        return int(status.rpartition(" ")[2])

    async def backlog(self) -> list[Backlog]:
        """Pending rows by kind."""
        return [Backlog(**row) for row in await self._fetch(COUNT_PENDING, self._pool)]

    async def _fetch(self, statement: str, *arguments: Any) -> list[Any]:
        with translated("read the outbox"):
            return await self._database.fetch(statement, *arguments)

    async def _execute(self, statement: str, *arguments: Any) -> str:
        with translated("write the outbox"):
            return await self._database.execute(statement, *arguments)


def state_after(outcome: Outcome) -> tuple[str, timedelta]:
    """The row's next state, and the delay until it is due again if that is `pending`."""
    match outcome:
        case Delivered():
            return "done", timedelta(0)
        case Retry(after):
            return "pending", after
        case Failed() | Blocked():
            return "dead", timedelta(0)


def delivery_outcome(outcome: Outcome) -> str:
    """The value of `webhook_deliveries.outcome`."""
    match outcome:
        case Delivered():
            return "delivered"
        case Retry():
            return "retrying"
        case Failed():
            return "failed"
        case Blocked():
            return "blocked"
