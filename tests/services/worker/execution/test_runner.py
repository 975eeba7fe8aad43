"""How the runner handles an engine crash: which jobs run again, with which others, and which is charged."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

import pytest

from engine import Request
from schemas.common import JobState, Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.worker.engine.protocol import Done, Finished
from services.worker.execution.limits import Limits
from services.worker.execution.runner import Runner, RunnerCallbacks
from services.worker.jobs import Candidate, Claim, Job, JobKey, Outcome, Phase, Record
from services.worker.offsets.ledger import Partition, Place
from services.worker.queue.backlog import Backlog
from services.worker.queue.pace import Pace
from services.worker.queue.tenant_limits import LimitedTenants
from tests.waiting import eventually

MAX_ATTEMPTS = 3


@dataclass
class FakeEngine:
    """Keeps the requests that it is given."""

    ready: bool = True
    batch: list[Request] = field(default_factory=list)

    def add(self, requests: Iterable[Request]) -> None:
        self.batch.extend(requests)

    def expect(self, _digests: Iterable[str]) -> None: ...

    def cancel(self, request_ids: Collection[str]) -> None:
        self.batch = [request for request in self.batch if request.request_id not in request_ids]


class FakeAdapters:
    """Does nothing: all jobs use the base model."""

    def acquire(self, _job: Job) -> None: ...
    def release(self, _job: Job) -> None: ...
    def plan(self, _now: float) -> None: ...
    def lost(self) -> None: ...


@dataclass
class Harness:
    """A runner with fakes; `counts` are the attempts in the database."""

    counts: dict[JobKey, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    parked: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = FakeEngine()
        limits, backlog = Limits(8, 8, 60.0, MAX_ATTEMPTS, 1024), Backlog[Job](100)
        self.tenants = LimitedTenants(backlog, 8, 32, 5.0)
        self.runner = Runner(
            limits, backlog, self.engine, FakeAdapters(), Pace({}), self.tenants, self.callbacks(self.start)
        )

    def callbacks(self, start: Callable[[Sequence[Job]], Awaitable[dict[JobKey, int]]]) -> RunnerCallbacks:
        return RunnerCallbacks(
            start, self.outcomes.append, lambda _job: None, self.retry, self.parked.append, lambda: None
        )

    async def start(self, jobs: Sequence[Job]) -> dict[JobKey, int]:
        for job in jobs:
            self.counts[job.key] = self.counts.get(job.key, 0) + (not job.counted)
        return {job.key: self.counts[job.key] for job in jobs}

    def retry(self, job: Job) -> None:
        """Run the job again, as if it had been parked and was due."""
        job.phase = Phase.WAITING
        self.runner.add([job])

    def add(self, *prompts: str, deadline: datetime | None = None) -> list[Job]:
        jobs = [job(prompt, deadline) for prompt in prompts]
        self.runner.add(jobs)
        return jobs

    async def next_batch(self) -> list[str]:
        await eventually(lambda: self.engine.batch, what="a batch")
        return [request.prompt or "" for request in self.engine.batch]

    async def serve(self) -> None:
        """Run a batch in an engine that crashes if `poison` is in it."""
        self.batches.append(await self.next_batch())
        batch, self.engine.batch = self.engine.batch, []
        if any(request.prompt == "poison" for request in batch):
            self.runner.lost("it ended")
            self.runner.up()
        else:
            self.runner.done(Done(tuple(finished(request) for request in batch), ()))


def job(prompt: str, deadline: datetime | None = None, tenant: str = "acme") -> Job:
    request = JobRequest(tenant=tenant, prompt=prompt, deadline=deadline)
    record = Record(Place(Partition("jobs", 0), 0), Lane.STANDARD, None, b"", (), 0)
    candidate = Candidate(JobKey(tenant, uuid7()), request, b"", record, None, 0.0, 0)
    return Job(candidate, Claim(1, date(2026, 11, 29), 0.0, 0, None, None), 0.0, [record.place])


def finished(request: Request) -> Finished:
    assert request.request_id is not None
    return Finished(request.request_id, (1,), "x", "stop", 1, 0, 1, None, 0.0, 0, 0)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    feeding = asyncio.create_task(made.runner.feed())
    yield made
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)


@pytest.mark.parametrize("deadline", [None, datetime(2099, 1, 1, tzinfo=UTC)])
async def test_the_job_that_crashes_the_engine_is_found_and_the_others_are_not_charged(
    harness: Harness, deadline: datetime | None
) -> None:
    jobs = harness.add("a", "b", "c", "d", "poison", "e", "f", "g", deadline=deadline)
    while len(harness.outcomes) < len(jobs):
        await harness.serve()
    states = {each.job.request.prompt: each.state for each in harness.outcomes}
    assert states.pop("poison") is JobState.FAILED
    assert set(states.values()) == {JobState.SUCCEEDED}
    assert [harness.counts[each.key] for each in jobs] == [3 if each.request.prompt == "poison" else 1 for each in jobs]
    assert all(not each.counted for each in jobs)
    ends = [batch for batch in harness.batches if "poison" in batch]
    assert [len(batch) for batch in ends] == [8, 4, 2, 1, 1, 1]


async def test_a_trial_runs_alone_and_other_jobs_wait_for_it(harness: Harness) -> None:
    harness.add("a", "b")
    assert await harness.next_batch() == ["a", "b"]
    harness.engine.batch = []
    harness.runner.lost("it ended")
    harness.add("behind")
    harness.runner.up()
    for expected in (["behind"], ["a"], ["b"]):
        await harness.serve()
        assert harness.batches[-1] == expected


async def test_jobs_counted_but_not_submitted_are_not_charged(harness: Harness) -> None:
    """The engine crashes while the database marks the jobs as started."""
    gate = asyncio.Event()
    start = harness.start

    async def slowly(jobs: Sequence[Job]) -> dict[JobKey, int]:
        started = await start(jobs)
        await gate.wait()
        return started

    harness.runner._callbacks = harness.callbacks(slowly)
    [waiting] = harness.add("a")
    await eventually(lambda: harness.counts.get(waiting.key) == 1, what="the start to be written")
    harness.runner.lost("it ended")
    harness.runner.up()
    gate.set()
    await harness.serve()
    assert harness.counts[waiting.key] == 1
    assert [each.state for each in harness.outcomes] == [JobState.SUCCEEDED]


async def test_a_tenant_s_first_job_takes_the_place_of_one_of_a_flood(harness: Harness) -> None:
    harness.add(*(f"flood {number}" for number in range(12)))
    await harness.next_batch()
    harness.runner.add([job("newcomer", tenant="globex")])
    await eventually(lambda: len(harness.engine.batch) == 9, what="the newcomer")
    newcomer = harness.engine.batch[-1]
    assert newcomer.prompt == "newcomer"
    assert newcomer.displaces == harness.engine.batch[-2].request_id
    assert [request.displaces for request in harness.engine.batch[:-1]] == [None] * 8
    while len(harness.outcomes) < 13:
        await harness.serve()
    assert {each.state for each in harness.outcomes} == {JobState.SUCCEEDED}
