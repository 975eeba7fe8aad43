"""Rows as parameters of the statements: one list per column."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from asyncpg import Record as Row

from services.postgres.pool import storable
from services.worker.engine.protocol import Finished
from services.worker.jobs import Job, JobKey
from services.worker.store.effects import Completion, logprobs_json


def ended_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    """First parameters of `COMPLETE_JOBS`: one row per job, with its result and its token counts."""
    return list(map(empty_if_null, columns([_ended_row(each) for each in completions], 21)))


def _ended_row(each: Completion) -> tuple[Any, ...]:
    outcome, timings, job = each.outcome, each.timings, each.outcome.job
    finished, error, claim = outcome.finished, outcome.error, job.claim
    adapter = claim.adapter
    return (
        claim.accepted_on,
        *job.key,
        claim.fence,
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
        # As text: the driver would encode the integers one by one, which takes four times as long.
        f"{{{str(list(finished.token_ids))[1:-1]}}}",
        logprobs_json(finished.logprobs),
        finished.finish_reason,
        finished.prompt_tokens,
        finished.cached_tokens,
        finished.completion_tokens,
    )


def effect_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    """Last parameters of `COMPLETE_JOBS`: one row per effect, with the place of its job in `ended_columns`."""
    rows = [
        (place, effect.event_id, effect.kind, *each.job.key, effect.type, effect.body, effect.target, each.traceparent)
        for place, each in enumerate(completions, start=1)
        for effect in each.effects
    ]
    return list(map(empty_if_null, columns(rows, 9)))


def fenced(jobs: Iterable[Job]) -> list[list[Any]]:
    """Columns that a write of an attempt is conditional on: day, tenant, job_id, fence."""
    return columns([(job.claim.accepted_on, *job.key, job.claim.fence) for job in jobs], 4)


def columns(rows: Collection[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as one list per column, for `unnest`."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def empty_if_null(column: list[Any]) -> list[Any]:
    """An empty list for a column of nulls only: `unnest` pads shorter arrays with nulls."""
    return [] if column.count(None) == len(column) else column


def key_columns(keys: Iterable[JobKey]) -> list[list[Any]]:
    """Columns of tenants and job_ids."""
    return columns(list(keys), 2)


def keys_of(rows: Iterable[Row]) -> set[JobKey]:
    """Keys of the jobs that a statement returned."""
    return {JobKey(row["tenant"], row["job_id"]) for row in rows}
