"""Traces: drawn, written, read again, and recorded in the database."""

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from schemas.common import Lane
from services.errors import InputError
from services.postgres.pool import Pool, transaction
from services.simulate.traces.popularity import zipf_shares
from services.simulate.traces.recorded import recorded_trace
from services.simulate.traces.trace import Bursts, Lengths, Synthetic, Trace, lines_of, read_trace


def synthetic(**changes: Any) -> Synthetic:
    given: dict[str, Any] = {"num_jobs": 4000, "num_adapters": 50, "num_tenants": 5, "rate_per_s": 40.0}
    return Synthetic(**given | changes)


def test_a_drawn_trace_has_the_asked_shape() -> None:
    lanes = {Lane.INTERACTIVE: 1.0, Lane.BATCH: 3.0}
    trace = synthetic(num_jobs=40_000, lanes=lanes, ranks=(8, 64), prompt=Lengths(100, 0.5)).draw(1)
    assert trace.uses() / 40_000 == pytest.approx(zipf_shares(50, 1.0), abs=0.01)
    assert np.bincount(trace.lane, minlength=3) / 40_000 == pytest.approx([0.25, 0.0, 0.75], abs=0.01)
    assert np.median(trace.prompt) == pytest.approx(100, abs=3)
    assert set(trace.output) == {150}
    assert trace.at_s[-1] == pytest.approx(1000, rel=0.03)
    assert trace.adapters.rank[:3] == [8, 64, 8]
    assert len(set(trace.adapters.tenant)) == 5


def test_bursts_keep_the_rate_and_raise_the_variance() -> None:
    def of_seconds(trace: Trace) -> Any:
        return np.bincount(trace.at_s.astype(int))[:-1]

    even, bursty = (synthetic(num_jobs=200_000, bursts=Bursts(factor, 20.0)).draw(2) for factor in (1.0, 9.0))
    assert len(bursty) / bursty.at_s[-1] == pytest.approx(40, rel=0.1)
    assert of_seconds(even).var() == pytest.approx(40, rel=0.1)
    assert of_seconds(bursty).var() > 10 * of_seconds(even).var()
    assert (np.diff(bursty.at_s) >= 0).all()


def test_a_seed_draws_the_same_trace_again() -> None:
    assert list(lines_of(synthetic().draw(5))) == list(lines_of(synthetic().draw(5)))
    assert list(lines_of(synthetic().draw(5))) != list(lines_of(synthetic().draw(6)))


def test_a_written_trace_is_read_again(tmp_path: Path) -> None:
    drawn = synthetic(num_jobs=200, lanes={Lane.BATCH: 1.0, Lane.INTERACTIVE: 1.0}, ranks=(8, 32)).draw(3)
    base = {"at_s": 1e6, "tenant": "acme", "adapter": None, "prompt_tokens": 3, "completion_tokens": 4}
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*lines_of(drawn), json.dumps(base)]))
    read = read_trace(path)
    jobs, again = drawn.of(np.arange(200)), read.of(np.arange(201))
    for field in ("group", "tenant", "lane", "prompt", "output"):
        assert list(getattr(again, field))[:200] == list(getattr(jobs, field))
    assert again.at_s[:200] == pytest.approx([at - jobs.at_s[0] for at in jobs.at_s], abs=1e-5)
    assert (again.group[200], read.adapters.rank[int(read.adapter[200])]) == ("", 0)
    assert read.ranks().items() <= drawn.ranks().items()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no job; record some, or leave out --trace"),
        ("{", "line 1 is not a job with at_s"),
        ('{"at_s": 0, "tenant": "a", "adapter": "b", "prompt_tokens": 0, "completion_tokens": 1}', "at least 1"),
        ('{"at_s": 0, "tenant": "a", "lane": "slow", "prompt_tokens": 1, "completion_tokens": 1}', "slow"),
        ("[1]", "line 1 is not a job"),
    ],
)
def test_a_line_that_is_no_job_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)


INSERT_JOB = """
insert into loraq.jobs (tenant, job_id, pool, adapter, adapter_version, lane, state, accepted_on, accepted_at)
values ('acme', $1, 'default', $2, 1, 'batch', $3, $4, $5)
"""
INSERT_RESULT = """
insert into loraq.results (tenant, job_id, accepted_on, output_token_ids, finish_reason, prompt_tokens, cached_tokens,
                           completion_tokens, queue_ms, load_ms, total_ms)
values ('acme', $1, $2, '{}', 'stop', 30, 0, $3, 0, 0, 0)
"""
INSERT_ADAPTER = """
insert into loraq.adapters (tenant, name, version, status, rank, uri, digest, size_bytes)
values ('acme', 'tone', 1, 'ready', 32, 's3://bucket/tone', 'digest', 1)
"""


async def test_succeeded_jobs_of_the_database_are_a_trace(pool: Pool, acme: str) -> None:
    began = datetime.now(UTC)
    async with transaction(pool) as connection:
        await connection.execute(INSERT_ADAPTER)
        for number, (adapter, state) in enumerate([("tone", "succeeded"), (None, "succeeded"), ("tone", "failed")]):
            job, today, at = UUID(int=number), date.today(), began + timedelta(seconds=number)  # noqa: DTZ011
            await connection.execute(INSERT_JOB, job, adapter, state, today, at)
            if state == "succeeded":
                await connection.execute(INSERT_RESULT, job, today, 7 + number)
        trace = await recorded_trace(connection, "default", began - timedelta(seconds=1), 10)
        with pytest.raises(InputError, match=r"the database, since .* holds no job"):
            await recorded_trace(connection, "another", began, 10)
    jobs = trace.of(np.arange(2))
    assert (jobs.group, jobs.tenant, jobs.output) == ([f"{acme}/tone", ""], ["acme", "acme"], [7, 8])
    assert (jobs.at_s, jobs.lane, jobs.prompt) == ([0.0, pytest.approx(1.0)], [2, 2], [30, 30])
    assert trace.ranks() == {"acme/tone": 32}
