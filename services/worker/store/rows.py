"""Rows as the statements take them: one list per column."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from asyncpg import Record as Row

from services.postgres.pool import storable
from services.worker.engine.protocol import Finished
from services.worker.jobs import Job, JobKey
from services.worker.store.effects import Completion, logprobs_json


def ended_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    """Of `COMPLETE_JOBS`: one row per job, with what its result and its tokens are made of."""
    return list(map(spare, columns([_ended_row(each) for each in completions], 21)))


def _ended_row(each: Completion) -> tuple[Any, ...]:
    outcome, timings, job = each.outcome, each.timings, each.outcome.job
    finished, error, grant = outcome.finished, outcome.error, job.grant
    adapter = grant.adapter
    return (
        grant.accepted_on,
        *job.key,
        grant.fence,
        outcome.state,
        error.code if error else None,
        storable(error.message) if error else None,
        adapter.name if adapter else "",
        adapter.version if adapter else 0,
        *(_OUTPUTLESS if finished is None else _output(finished, each.output_url)),
        *timings,
    )


_OUTPUTLESS = (None,) * 8


def _output(finished: Finished, output_url: str | None) -> tuple[Any, ...]:
    return (
        storable(finished.text) if output_url is None else None,
        output_url,
        # The client encodes an array of integers one by one, which takes four times as long.
        f"{{{str(list(finished.token_ids))[1:-1]}}}",
        logprobs_json(finished.logprobs),
        finished.finish_reason,
        finished.prompt_tokens,
        finished.cached_tokens,
        finished.completion_tokens,
    )


def effect_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    """Of `COMPLETE_JOBS`: one row per effect, behind the place of its job among the rows of `ended_columns`."""
    rows = [
        (place, effect.event_id, effect.kind, *each.job.key, effect.type, effect.body, effect.target, each.traceparent)
        for place, each in enumerate(completions, start=1)
        for effect in each.effects
    ]
    return list(map(spare, columns(rows, 9)))


def fenced(jobs: Iterable[Job]) -> list[list[Any]]:
    """What a write of an attempt is conditional on: day, tenant, job_id, fence."""
    return columns([(job.grant.accepted_on, *job.key, job.grant.fence) for job in jobs], 4)


def columns(rows: Collection[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as one list per column, as `unnest` wants them."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def spare(column: list[Any]) -> list[Any]:
    """Nothing for a column of nothing but nulls: `unnest` fills the shorter of its arrays up with them."""
    return [] if column.count(None) == len(column) else column


def key_columns(keys: Iterable[JobKey]) -> list[list[Any]]:
    """Tenants and job_ids."""
    return columns(list(keys), 2)


def keys_of(rows: Iterable[Row]) -> set[JobKey]:
    """The jobs that a statement returned."""
    return {JobKey(row["tenant"], row["job_id"]) for row in rows}
