"""Adapter loads, evictions, failures and bounded waits while jobs run."""

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

ADAPTER_BYTES = 40


@dataclass
class FakeStager:
    """Returns directories at once, or raises the errors that the test set for a digest."""

    errors: dict[str, list[Exception]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    on_disk: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def hold(self, digest: str, _uri: str, _size_bytes: int) -> AsyncIterator[Path]:
        self.fetched.append(digest)
        if self.errors.get(digest):
            raise self.errors[digest].pop(0)
        self.on_disk.append(digest)
        try:
            yield Path(digest)
        finally:
            self.on_disk.remove(digest)


@dataclass
class FakeEngine:
    """Loads at once, unless the test clears `door` or sets an error."""

    ready: bool = True
    loaded: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    door: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self, digest: str, _path: Path) -> int:
        await self.door.wait()
        if digest in self.errors:
            raise self.errors[digest]
        self.loaded.append(digest)
        return ADAPTER_BYTES

    def unload(self, digest: str) -> None:
        self.loaded.remove(digest)


@dataclass
class Harness:
    """`Adapters` with fakes; the test passes the time to `plan`."""

    budget: int = 100
    timeout_s: float = 60.0
    park_after_s: float = 1000.0
    stager: FakeStager = field(default_factory=FakeStager)
    engine: FakeEngine = field(default_factory=FakeEngine)
    outcomes: list[Outcome] = field(default_factory=list)
    crashes: list[BaseException] = field(default_factory=list)
    parked: list[ParkRequest] = field(default_factory=list)
    ended_loads: list[str] = field(default_factory=list)

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
                load_ended=self.ended_loads.append,
                opened=lambda: None,
                crashed=self.crashes.append,
            ),
        )

    def add(self, digest: str, size_bytes: int = ADAPTER_BYTES) -> Job:
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
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.adapters.close()
    assert made.crashes == []
    assert made.stager.on_disk == []


def start(harness: Harness) -> Job:
    """Move one job to the engine."""
    [job] = harness.pop(1)
    harness.adapters.acquire(job)
    return job


async def test_jobs_start_once_their_adapter_is_loaded_and_it_is_loaded_once(harness: Harness) -> None:
    harness.engine.door.clear()
    jobs = [harness.add("a") for _ in range(3)]
    assert harness.pop(3) == []
    harness.engine.door.set()
    await harness.loaded("a")
    assert harness.pop(3) == jobs
    assert harness.stager.fetched == ["a"]
    assert jobs[0].load_s > 0


async def test_an_idle_adapter_is_evicted_for_the_next(harness: Harness) -> None:
    for digest in ("a", "b"):
        harness.add(digest)
        await harness.loaded(*"ab"[: "ab".index(digest) + 1])
        harness.adapters.release(start(harness))
    harness.add("c")
    await harness.loaded("b", "c")
    await eventually(lambda: harness.stager.on_disk == ["b", "c"], what="the directory of a to be released")


async def test_adapters_in_use_are_drained_for_an_urgent_one(harness: Harness) -> None:
    running = []
    for digest in ("a", "b"):
        harness.add(digest)
        await harness.loaded(*"ab"[: "ab".index(digest) + 1])
        running.append(start(harness))
    harness.add("a")
    harness.add("c")
    harness.plan(ahead_s=URGENT_AFTER_S / 2)
    assert [job.group for job in harness.pop(1)] == ["a"], "nothing is drained yet"
    harness.add("a")
    harness.plan(ahead_s=URGENT_AFTER_S * 2)
    assert harness.pop(1) == [], "a starts no more jobs"
    harness.adapters.release(running[0])
    harness.plan(ahead_s=URGENT_AFTER_S * 2)
    await harness.loaded("b", "c")


async def test_a_drained_adapter_reopens_when_the_room_is_not_needed(harness: Harness) -> None:
    for digest in ("a", "b"):
        harness.add(digest)
        await harness.loaded(*"ab"[: "ab".index(digest) + 1])
        start(harness)
    waiting = harness.add("c")
    harness.plan(ahead_s=URGENT_AFTER_S * 2)
    harness.add("a")
    harness.backlog.remove(lambda job: job is waiting)
    harness.plan(ahead_s=URGENT_AFTER_S * 2)
    assert [job.group for job in harness.pop(1)] == ["a"]


async def test_a_broken_adapter_fails_only_its_own_jobs(harness: Harness) -> None:
    harness.engine.errors["bad"] = AdapterRefusedError("adapter_model.safetensors is truncated")
    failed, good = harness.add("bad"), harness.add("good")
    await harness.loaded("good")
    assert harness.pop(2) == [good]
    [outcome] = harness.outcomes
    assert outcome.job is failed
    assert outcome.error is not None
    assert outcome.error.code is ErrorCode.ADAPTER_LOAD_FAILED
    assert outcome.error.message == "adapter 'bad@1' cannot be loaded: adapter_model.safetensors is truncated"
    del harness.engine.errors["bad"]
    harness.add("bad")
    await harness.loaded("good", "bad")


async def test_an_adapter_that_cannot_be_fetched_fails_its_jobs(harness: Harness) -> None:
    harness.stager.errors["gone"] = [JobError(ErrorCode.ADAPTER_LOAD_FAILED, "s3://b/gone/x does not exist")]
    harness.add("gone")
    await eventually(lambda: harness.outcomes)
    assert harness.outcomes[0].error is not None
    assert "s3://b/gone/x does not exist" in harness.outcomes[0].error.message


async def test_an_adapter_larger_than_the_budget_fails_at_once(harness: Harness) -> None:
    harness.add("huge", size_bytes=101)
    [outcome] = harness.outcomes
    assert outcome.error is not None
    assert "LORAQ_HOST_CACHE_BYTES" in outcome.error.message


async def test_a_store_error_is_retried_and_charges_no_job(harness: Harness) -> None:
    harness.stager.errors["a"] = [RetryableError("the store is busy")]
    job = harness.add("a")
    await harness.loaded("a")
    assert harness.stager.fetched == ["a", "a"]
    assert harness.pop(1) == [job]
    assert (job.attempts, harness.outcomes) == (0, [])


async def test_a_job_waits_for_its_adapter_up_to_the_timeout(harness: Harness) -> None:
    harness.stager.errors["slow"] = [RetryableError("the store is busy") for _ in range(100)]
    harness.add("slow")
    await eventually(lambda: harness.stager.fetched)
    harness.plan(ahead_s=harness.timeout_s / 2)
    assert harness.outcomes == []
    harness.plan(ahead_s=harness.timeout_s + 1)
    [outcome] = harness.outcomes
    assert outcome.error is not None
    assert outcome.error.code is ErrorCode.ADAPTER_LOAD_TIMEOUT
    assert outcome.error.message == (
        "adapter 'slow@1' was not loaded within 60 s (LORAQ_ADAPTER_LOAD_TIMEOUT_S): the store is busy"
    )


async def test_adapters_are_loaded_again_after_the_engine_is_lost(harness: Harness) -> None:
    harness.add("a")
    await harness.loaded("a")
    start(harness)
    harness.engine.ready = False
    harness.engine.loaded.clear()
    harness.adapters.lost()
    job = harness.add("a")
    assert harness.pop(1) == []
    harness.engine.ready = True
    harness.plan()
    await harness.loaded("a")
    assert harness.pop(1) == [job]


async def test_an_engine_lost_during_a_load_fails_no_job(harness: Harness) -> None:
    harness.engine.errors["a"] = EngineLostError("gone")
    job = harness.add("a")
    await eventually(lambda: harness.stager.fetched)
    harness.adapters.lost()
    del harness.engine.errors["a"]
    harness.plan()
    await harness.loaded("a")
    assert harness.pop(1) == [job]
    assert harness.outcomes == []


async def test_jobs_of_a_slow_load_are_parked_and_the_load_continues(harness: Harness) -> None:
    harness.adapters._waits = WaitLimits(500.0, 6000.0)
    harness.engine.door.clear()
    first = harness.add("slow")
    harness.plan(ahead_s=400.0)
    assert harness.parked == []
    harness.plan(ahead_s=600.0)
    [ticket] = harness.parked
    assert (ticket.job, ticket.reason) == (first, "adapter")
    assert 500.0 < ticket.cold_for_s < 700.0
    assert ticket.cold_for_s + ticket.delay_s < 6000.0
    harness.engine.door.set()
    await harness.loaded("slow")
    await eventually(lambda: harness.ended_loads == ["slow"], what="its end to be reported")
    assert harness.outcomes == []


async def test_parked_time_counts_towards_the_load_timeout(harness: Harness) -> None:
    harness.engine.door.clear()
    job = harness.add("slow")
    job.cold_since = time.monotonic() - 61.0
    harness.plan()
    [outcome] = harness.outcomes
    assert outcome.error.code is ErrorCode.ADAPTER_LOAD_TIMEOUT


async def test_adapters_that_wait_for_room_are_fetched_to_disk_meanwhile(harness: Harness) -> None:
    harness.budget = ADAPTER_BYTES
    harness.__post_init__()
    harness.engine.door.clear()
    harness.add("a")
    harness.stager.errors["b"] = [RetryableError("the store is away")]
    harness.add("b")
    harness.add("c")
    await eventually(lambda: {"b", "c"} <= set(harness.stager.fetched), what="fetches ahead of their loads")
    harness.plan()
    await eventually(lambda: harness.stager.fetched.count("b") == 2, what="another fetch of b")
    harness.plan()
    assert harness.stager.fetched.count("c") == 1
    assert harness.engine.loaded == []
    harness.engine.door.set()
    await harness.loaded("a")


async def test_a_pin_follows_the_registry(harness: Harness) -> None:
    harness.add("a")
    await harness.loaded("a")
    job = start(harness)
    assert job.claim.adapter is not None
    harness.adapters.release(job)
    job.claim = replace(job.claim, adapter=replace(job.claim.adapter, pinned=True))
    harness.adapters.acquire(job)
    harness.adapters.release(job)
    harness.add("b", 100 - ADAPTER_BYTES)
    harness.add("c", ADAPTER_BYTES)
    await harness.loaded("a", "b")
    harness.plan(ahead_s=2.0)
    assert "a" in harness.engine.loaded, "one that is pinned goes last"
