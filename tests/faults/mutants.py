"""Mutants: defects patched into the product from outside, each breaking a promise that the checker must notice."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from services.dispatcher.sender import Sender
from services.postgres.pool import transaction
from services.worker.intake.acceptor import Acceptor
from services.worker.offsets.commits import Commit, Commits
from services.worker.store import statements as sql
from services.worker.store.jobs import JobStore
from services.worker.store.rows import effect_columns

HEAD_START_S = 0.3
OWN_RESULTS = "where is_ours and state = 'succeeded'"
OWN_EFFECTS = "where (place in (select place from settled)) is true"
ANNOUNCE = """
with announced as (
    insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body, target, traceparent)
    select event_id, kind, tenant, job_id, $9, type, body, target, traceparent
    from unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::text[], $7::text[], $8::text[])
        as effect (event_id, kind, tenant, job_id, type, body, target, traceparent)
)
select pg_notify('loraq_outbox', '')
"""


def _replaced(name: str, old: str, new: str) -> None:
    text = getattr(sql, name)
    assert old in text, f"the statement {name} no longer contains {old!r}: update the mutant"
    setattr(sql, name, text.replace(old, new))


def offset_before_commit() -> None:
    """Commit the position of the next record, whether or not the records below it have ended."""

    def commit(self: Commits, partition: Any) -> Commit:
        state = self._ledger.commit_state(partition)
        return Commit(state.frontier, "", state.changes)

    Commits._commit = commit  # type: ignore[method-assign]


def no_fence() -> None:
    """An attempt writes without comparing the job's fence and state."""
    _replaced("COMPLETE_JOBS", "jobs.fence = ended.fence and jobs.state in ('queued', 'running')", "true")
    update = "on conflict (accepted_on, tenant, job_id) do update set total_ms = excluded.total_ms"
    _replaced("COMPLETE_JOBS", OWN_RESULTS, f"{OWN_RESULTS} {update}")


def new_webhook_id_per_attempt() -> None:
    """Each attempt is signed with a new id."""
    send = Sender.send

    async def with_new_id(self: Sender, target: str, _id: str, *rest: Any) -> Any:
        return await send(self, target, str(uuid4()), *rest)

    Sender.send = with_new_id  # type: ignore[method-assign, assignment]


def row_without_outbox() -> None:
    """Every seventh outbox row is omitted."""
    _replaced("COMPLETE_JOBS", OWN_EFFECTS, f"{OWN_EFFECTS} and get_byte(uuid_send(job_id), 15) % 7 <> 0")


def result_changed() -> None:
    """A result is updated again after its job has ended."""
    complete = JobStore.complete

    async def and_touch(self: JobStore, completions: Any) -> Any:
        ours = await complete(self, completions)
        async with transaction(self._pool) as connection:
            await connection.execute("update loraq.results set total_ms = total_ms + 1")
        return ours

    JobStore.complete = and_touch  # type: ignore[method-assign]


def lost_job() -> None:
    """One record in a hundred is marked finished without being processed."""
    receive = Acceptor.receive
    count = 0

    def receive_most(self: Acceptor, records: Any) -> None:
        nonlocal count
        kept = []
        for record in records:
            count += 1
            if count % 100:
                kept.append(record)
            else:
                self._ledger.finish(record.place)
        receive(self, kept)

    Acceptor.receive = receive_most  # type: ignore[method-assign]


def webhook_before_row() -> None:
    """Outbox rows are committed in a separate transaction, before the rows that they announce."""
    complete = JobStore.complete

    async def announce_first(self: JobStore, completions: Any) -> Any:
        async with transaction(self._pool) as connection:
            await connection.execute(ANNOUNCE, *effect_columns(completions)[1:], self._pool_name)
        await asyncio.sleep(HEAD_START_S)
        return await complete(self, completions)

    _replaced("COMPLETE_JOBS", OWN_EFFECTS, "where false")
    JobStore.complete = announce_first  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        offset_before_commit,
        no_fence,
        new_webhook_id_per_attempt,
        row_without_outbox,
        result_changed,
        lost_job,
        webhook_before_row,
    )
}
