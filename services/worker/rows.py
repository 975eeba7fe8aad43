"""Rows as the statements take them: one list per column."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from asyncpg import Record as Row

from services.database import Connection, storable
from services.worker import statements as sql
from services.worker.effects import Completion, Used, logprobs_json, usage_by_adapter
from services.worker.jobs import Job, JobKey


async def add_usage(connection: Connection, committed: list[Completion], stale: list[Completion]) -> None:
    """Add the tokens of a batch to the hour's; those of stale attempts as wasted."""
    used = usage_by_adapter(committed)
    for key, lost in usage_by_adapter(stale).items():
        used.setdefault(key, Used()).wasted_tokens += lost.completion_tokens + lost.wasted_tokens
    if not used:
        return
    rows = [
        (*key, each.jobs, each.prompt_tokens, each.cached_tokens, each.completion_tokens, each.wasted_tokens)
        for key, each in used.items()
    ]
    await connection.execute(sql.ADD_USAGE, *columns(rows, 8))


def result_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    """Of `INSERT_RESULTS`; every completion has an output."""
    return columns([_result_row(each) for each in completions], 15)


def _result_row(each: Completion) -> tuple[Any, ...]:
    finished, timings, job = each.outcome.finished, each.timings, each.job
    assert finished is not None
    return (
        job.grant.accepted_on,
        *job.key,
        storable(finished.text) if each.output_url is None else None,
        each.output_url,
        # The client encodes an array of integers one by one, which takes four times as long.
        f"{{{str(list(finished.token_ids))[1:-1]}}}",
        logprobs_json(finished.logprobs),
        finished.finish_reason,
        finished.prompt_tokens,
        finished.cached_tokens,
        finished.completion_tokens,
        timings.queue_ms,
        timings.load_ms,
        timings.first_token_ms,
        timings.total_ms,
    )


def outbox_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    """Of `INSERT_OUTBOX`: one row per effect."""
    rows = [
        (effect.event_id, effect.kind, *each.job.key, effect.type, effect.body, effect.target, each.traceparent)
        for each in completions
        for effect in each.effects
    ]
    return columns(rows, 8)


def fenced(jobs: Iterable[Job]) -> list[list[Any]]:
    """What a write of an attempt is conditional on: day, tenant, job_id, fence."""
    return columns([(job.grant.accepted_on, *job.key, job.grant.fence) for job in jobs], 4)


def columns(rows: Collection[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as one list per column, as `unnest` wants them."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def key_columns(keys: Iterable[JobKey]) -> list[list[Any]]:
    """Tenants and job_ids."""
    return columns(list(keys), 2)


def keys_of(rows: Iterable[Row]) -> set[JobKey]:
    """The jobs that a statement returned."""
    return {JobKey(row["tenant"], row["job_id"]) for row in rows}


def num_rows(status: str) -> int:
    """Rows that a statement wrote, of its status: `INSERT 0 500`."""
    return int(status.rpartition(" ")[2])
