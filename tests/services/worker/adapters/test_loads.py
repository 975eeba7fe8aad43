"""Adapters come and go while jobs run: loads, evictions, failures and waits that are bounded."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import pytest

from schemas.common import AdapterStatus, ErrorCode, Lane
from schemas.job import JobRequest
from services.adapters.versions import AdapterVersion
from services.client.identifiers import uuid7
from services.errors import JobError, RetryableError
from services.worker.adapters.loads import URGENT_AFTER_S, AdapterCallbacks, Adapters, WaitLimits
from services.worker.engine.bridge import AdapterRefusedError, EngineLostError
from services.worker.jobs import Candidate, Claim, Job, JobKey, Outcome, Record
from services.worker.offsets.ledger import Partition, Place
from services.worker.queue.backlog import Backlog, Demand
from services.worker.queue.parking_store import ParkRequest
from tests.waiting import eventually

EACH = 40


@dataclass
class FakeStager:
    """Holds adapters at once, or raises what the test put down for a digest."""

    troubles: dict[str, list[Exception]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    on_disk: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def hold(self, digest: str, _uri: str, _size_bytes: int) -> AsyncIterator[Path]:
        self.fetched.append(digest)
        if self.troubles.get(digest):
            raise self.troubles[digest].pop(0)
        self.on_disk.append(digest)
        try:
            yield Path(digest)
        finally:
            self.on_disk.remove(digest)


@dataclass
class FakeEngine:
    """Loads at once, unless the test holds the door or puts down an error."""

    ready: bool = True
    loaded: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    door: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self, digest: str, _path: Path) -> int:
        await self.door.wait()
        if digest in self.errors:
            raise self.errors[digest]
        self.loaded.append(digest)
        return EACH

    def unload(self, digest: str) -> None:
        self.loaded.remove(digest)


@dataclass
class Bench:
    """Adapters between fakes; `now` only moves when the test says so."""

    budget: int = 100
    timeout_s: float = 60.0
    park_after_s: float = 1000.0
    stager: FakeStager = field(default_factory=FakeStager)
    engine: FakeEngine = field(default_factory=FakeEngine)
    outcomes: list[Outcome] = field(default_factory=list)
    crashes: list[BaseException] = field(default_factory=list)
    parked: list[ParkRequest] = field(default_factory=list)
    known: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine.door.set()
        self.backlog = Backlog[Job](100)
        self.adapters = Adapters(
            self.stager,
            self.engine,
            self.backlog,
            self.budget,
            WaitLimits(self.park_after_s, self.timeout_s),
            AdapterCallbacks(
                finish=self.outcomes.append,
                park=self.parked.append,
                load_ended=self.known.append,
                opened=lambda: None,
                crashed=self.crashes.append,
            ),
        )

    def add(self, digest: str, size_bytes: int = EACH) -> Job:
        adapter = AdapterVersion("acme", digest, 1, AdapterStatus.READY, None, digest, f"s3://b/{digest}/", size_bytes)
        request = JobRequest(tenant="acme", adapter=digest, prompt="x")
        record = Record(Place(Partition("jobs", 0), 0), Lane.STANDARD, None, b"", (), 0)
        candidate = Candidate(JobKey("acme", uuid7()), request, b"", record, None, 0.0, 0)
        job = Job(candidate, Claim(1, date(2026, 11, 29), 0.0, 0, adapter, None), time.monotonic(), [record.place])
        self.backlog.add(job, Demand(Lane.STANDARD, job.key.tenant, digest), time.monotonic())
        self.plan()
        return job

    def pop(self, limit: int) -> list[Job]:
        return [waiting.job for waiting in self.backlog.pop(limit)]

    def plan(self, ahead_s: float = 0.0) -> None:
        self.adapters.plan(time.monotonic() + ahead_s)

    async def loaded(self, *digests: str) -> None:
        await eventually(lambda: set(self.engine.loaded) == set(digests), what=f"{digests} to be loaded")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.adapters.close()
    assert made.crashes == []
    assert made.stager.on_disk == []


def start(bench: Bench) -> Job:
    """Hand one job to the engine."""
    [job] = bench.pop(1)
    bench.adapters.acquire(job)
    return job


async def test_jobs_start_once_their_adapter_is_loaded_and_it_is_loaded_once(bench: Bench) -> None:
    bench.engine.door.clear()
    jobs = [bench.add("a") for _ in range(3)]
    assert bench.pop(3) == []
    bench.engine.door.set()
    await bench.loaded("a")
    assert bench.pop(3) == jobs
    assert bench.stager.fetched == ["a"]
    assert jobs[0].load_s > 0


async def test_an_idle_adapter_makes_room_for_the_next(bench: Bench) -> None:
    for digest in ("a", "b"):
        bench.add(digest)
        await bench.loaded(*"ab"[: "ab".index(digest) + 1])
        bench.adapters.release(start(bench))
    bench.add("c")
    await bench.loaded("b", "c")
    await eventually(lambda: bench.stager.on_disk == ["b", "c"], what="the directory of a to be let go")


async def test_adapters_in_use_are_drained_for_one_that_has_waited_too_long(bench: Bench) -> None:
    running = []
    for digest in ("a", "b"):
        bench.add(digest)
        await bench.loaded(*"ab"[: "ab".index(digest) + 1])
        running.append(start(bench))
    bench.add("a")
    bench.add("c")
    bench.plan(ahead_s=URGENT_AFTER_S / 2)
    assert [job.group for job in bench.pop(1)] == ["a"], "nothing is drained yet"
    bench.add("a")
    bench.plan(ahead_s=URGENT_AFTER_S * 2)
    assert bench.pop(1) == [], "a starts no more jobs"
    bench.adapters.release(running[0])
    bench.plan(ahead_s=URGENT_AFTER_S * 2)
    await bench.loaded("b", "c")


async def test_what_was_drained_opens_again_when_nobody_needs_the_room(bench: Bench) -> None:
    for digest in ("a", "b"):
        bench.add(digest)
        await bench.loaded(*"ab"[: "ab".index(digest) + 1])
        start(bench)
    waiting = bench.add("c")
    bench.plan(ahead_s=URGENT_AFTER_S * 2)
    bench.add("a")
    bench.backlog.remove(lambda job: job is waiting)
    bench.plan(ahead_s=URGENT_AFTER_S * 2)
    assert [job.group for job in bench.pop(1)] == ["a"]


async def test_a_broken_adapter_fails_its_jobs_and_no_others(bench: Bench) -> None:
    bench.engine.errors["bad"] = AdapterRefusedError("adapter_model.safetensors is truncated")
    failed, good = bench.add("bad"), bench.add("good")
    await bench.loaded("good")
    assert bench.pop(2) == [good]
    [outcome] = bench.outcomes
    assert outcome.job is failed
    assert outcome.error is not None
    assert outcome.error.code is ErrorCode.ADAPTER_LOAD_FAILED
    assert outcome.error.message == "adapter 'bad@1' cannot be loaded: adapter_model.safetensors is truncated"
    del bench.engine.errors["bad"]
    bench.add("bad")
    await bench.loaded("good", "bad")


async def test_an_adapter_that_can_never_be_fetched_fails_its_jobs(bench: Bench) -> None:
    bench.stager.troubles["gone"] = [JobError(ErrorCode.ADAPTER_LOAD_FAILED, "s3://b/gone/x does not exist")]
    bench.add("gone")
    await eventually(lambda: bench.outcomes)
    assert bench.outcomes[0].error is not None
    assert "s3://b/gone/x does not exist" in bench.outcomes[0].error.message


async def test_one_larger_than_the_budget_is_refused_at_once(bench: Bench) -> None:
    bench.add("huge", size_bytes=101)
    [outcome] = bench.outcomes
    assert outcome.error is not None
    assert "LORAQ_HOST_CACHE_BYTES" in outcome.error.message


async def test_the_stores_trouble_is_tried_again_and_charged_to_nobody(bench: Bench) -> None:
    bench.stager.troubles["a"] = [RetryableError("the store is busy")]
    job = bench.add("a")
    await bench.loaded("a")
    assert bench.stager.fetched == ["a", "a"]
    assert bench.pop(1) == [job]
    assert (job.attempts, bench.outcomes) == (0, [])


async def test_a_job_waits_for_its_adapter_no_longer_than_allowed(bench: Bench) -> None:
    bench.stager.troubles["slow"] = [RetryableError("the store is busy") for _ in range(100)]
    bench.add("slow")
    await eventually(lambda: bench.stager.fetched)
    bench.plan(ahead_s=bench.timeout_s / 2)
    assert bench.outcomes == []
    bench.plan(ahead_s=bench.timeout_s + 1)
    [outcome] = bench.outcomes
    assert outcome.error is not None
    assert outcome.error.code is ErrorCode.ADAPTER_LOAD_TIMEOUT
    assert outcome.error.message == (
        "adapter 'slow@1' was not loaded within 60 s (LORAQ_ADAPTER_LOAD_TIMEOUT_S): the store is busy"
    )


async def test_after_the_engines_loss_adapters_are_loaded_again(bench: Bench) -> None:
    bench.add("a")
    await bench.loaded("a")
    start(bench)
    bench.engine.ready = False
    bench.engine.loaded.clear()
    bench.adapters.lost()
    job = bench.add("a")
    assert bench.pop(1) == []
    bench.engine.ready = True
    bench.plan()
    await bench.loaded("a")
    assert bench.pop(1) == [job]


async def test_an_engine_lost_while_loading_fails_no_job(bench: Bench) -> None:
    bench.engine.errors["a"] = EngineLostError("gone")
    job = bench.add("a")
    await eventually(lambda: bench.stager.fetched)
    bench.adapters.lost()
    del bench.engine.errors["a"]
    bench.plan()
    await bench.loaded("a")
    assert bench.pop(1) == [job]
    assert bench.outcomes == []


async def test_jobs_of_a_load_that_takes_long_are_parked_and_the_load_goes_on(bench: Bench) -> None:
    bench.adapters._waits = WaitLimits(500.0, 6000.0)
    bench.engine.door.clear()
    first = bench.add("slow")
    bench.plan(ahead_s=400.0)
    assert bench.parked == []
    bench.plan(ahead_s=600.0)
    [ticket] = bench.parked
    assert (ticket.job, ticket.reason) == (first, "adapter")
    assert 500.0 < ticket.cold_for_s < 700.0
    assert ticket.cold_for_s + ticket.delay_s < 6000.0
    bench.engine.door.set()
    await bench.loaded("slow")
    await eventually(lambda: bench.known == ["slow"], what="its end to be told")
    assert bench.outcomes == []


async def test_the_time_that_a_job_was_parked_counts_as_waiting(bench: Bench) -> None:
    bench.engine.door.clear()
    job = bench.add("slow")
    job.cold_since = time.monotonic() - 61.0
    bench.plan()
    [outcome] = bench.outcomes
    assert outcome.error.code is ErrorCode.ADAPTER_LOAD_TIMEOUT


async def test_adapters_that_wait_for_room_are_fetched_to_disk_meanwhile(bench: Bench) -> None:
    bench.budget = EACH
    bench.__post_init__()
    bench.engine.door.clear()
    bench.add("a")
    bench.stager.troubles["b"] = [RetryableError("the store is away")]
    bench.add("b")
    bench.add("c")
    await eventually(lambda: {"b", "c"} <= set(bench.stager.fetched), what="fetches ahead of their loads")
    bench.plan()
    await eventually(lambda: bench.stager.fetched.count("b") == 2, what="another fetch of b")
    bench.plan()
    assert bench.stager.fetched.count("c") == 1
    assert bench.engine.loaded == []
    bench.engine.door.set()
    await bench.loaded("a")


async def test_a_pin_follows_the_registry(bench: Bench) -> None:
    bench.add("a")
    await bench.loaded("a")
    job = start(bench)
    assert job.claim.adapter is not None
    bench.adapters.release(job)
    job.claim = replace(job.claim, adapter=replace(job.claim.adapter, pinned=True))
    bench.adapters.acquire(job)
    bench.adapters.release(job)
    bench.add("b", 100 - EACH)
    bench.add("c", EACH)
    await bench.loaded("a", "b")
    bench.plan(ahead_s=2.0)
    assert "a" in bench.engine.loaded, "one that is pinned goes last"
