"""Which worker claims a parked job that is due: one that holds its adapter, then the least loaded, then any."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from schemas.common import Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.postgres.pool import Pool, transaction
from services.routing.status import Report, Tier, replace_adapters, write_report
from services.worker.jobs import Candidate, Job, JobKey, Record
from services.worker.offsets.ledger import Partition, Place
from services.worker.queue.parking_store import ParkingStore, ParkRequest
from services.worker.queue.preference import PREFER_HOLDER_S, Standpoint, is_least_loaded
from services.worker.store.decisions import Claimed
from services.worker.store.jobs import JobStore

DIGEST = "d" * 64
FREE, FULL = Standpoint(), Standpoint(saturated=True)
LOADED = Standpoint(least_loaded=False)


def parking(pool: Pool, worker: str) -> tuple[JobStore, ParkingStore]:
    store = JobStore(pool, pool_name="default", worker=worker, lease_s=30.0, max_attempts=3)
    return store, ParkingStore(pool, store, "default", worker, 30.0)


@pytest.fixture
async def parked(pool: Pool, acme: str) -> JobKey:
    """A job that is parked for its adapter and due."""
    await pool.execute(
        "insert into loraq.adapters (tenant, name, version, status, uri, digest, size_bytes)"
        " values ($1, 'tone', 1, 'ready', 's3://b/p/', $2, 10)",
        acme,
        DIGEST,
    )
    request = JobRequest(job_id=uuid7(), tenant=acme, adapter="tone", prompt="hello")
    assert request.job_id is not None
    value = request.model_dump_json(exclude_defaults=True).encode()
    record = Record(Place(Partition("t", 0), 0), Lane.STANDARD, None, value, (), 0)
    candidate = Candidate(JobKey(acme, request.job_id), request, b"f" * 32, record, None, 1.0, 1)
    store, parked = parking(pool, "first")
    [claimed] = await store.accept([candidate])
    assert isinstance(claimed, Claimed)
    assert await parked.park([ParkRequest(Job(candidate, claimed.claim, 1.0), "adapter", 0.0, 1.0)]) == {candidate.key}
    return candidate.key


async def claims(pool: Pool, worker: str, standpoint: Standpoint) -> bool:
    """Whether the worker claims the parked job."""
    _, parked = parking(pool, worker)
    return len(await parked.claim_due([Lane.STANDARD], 10, standpoint)) == 1


async def has(pool: Pool, worker: str, adapters: Mapping[str, Tier], **fields: Any) -> None:
    state = {"engine_ready": True, "saturated": False} | fields
    report = Report(
        uptime_s=1.0,
        running=0,
        waiting=0,
        waiting_bytes=0,
        tokens_per_s=0.0,
        lanes=(),
        partitions=0,
        adapters=adapters,
        **state,
    )
    async with transaction(pool) as connection:
        await write_report(connection, "default", worker, report)
        await replace_adapters(connection, "default", worker, adapters)


@pytest.mark.usefixtures("parked")
async def test_the_holder_claims_at_once_and_others_leave_the_job_to_it(pool: Pool) -> None:
    await has(pool, "holder", {DIGEST: "host"})
    assert not await claims(pool, "other", FREE)
    assert await claims(pool, "holder", LOADED)


@pytest.mark.usefixtures("parked")
async def test_after_a_while_any_worker_claims(pool: Pool) -> None:
    await has(pool, "holder", {DIGEST: "device"})
    assert not await claims(pool, "other", LOADED)
    later = timedelta(seconds=PREFER_HOLDER_S)
    await pool.execute("update loraq.parked_jobs set due_at = due_at - $1::interval", later)
    assert await claims(pool, "other", LOADED)


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("state", [{"saturated": True}, {"engine_ready": False}])
async def test_where_the_holder_cannot_run_it_the_least_loaded_claims(pool: Pool, state: dict[str, bool]) -> None:
    await has(pool, "holder", {DIGEST: "host"}, **state)
    assert not await claims(pool, "loaded", LOADED)
    assert not await claims(pool, "holder", Standpoint(saturated=True, least_loaded=False))
    assert await claims(pool, "least loaded", FREE)


@pytest.mark.usefixtures("parked")
async def test_a_holder_that_is_silent_or_has_it_on_disk_only_is_not_waited_for(pool: Pool) -> None:
    await has(pool, "silent", {DIGEST: "host"})
    await has(pool, "disk", {DIGEST: "disk"})
    await pool.execute("update loraq.worker_status set seen_at = seen_at - interval '1 minute' where worker = 'silent'")
    assert await claims(pool, "other", FREE)


@pytest.mark.usefixtures("parked")
async def test_an_adapter_that_was_just_loaded_counts_before_it_is_reported(pool: Pool) -> None:
    await has(pool, "holder", {DIGEST: "host"})
    assert not await claims(pool, "other", LOADED)
    assert await claims(pool, "other", Standpoint(recent=[DIGEST], least_loaded=False))


def test_the_least_loaded_is_within_a_margin_of_the_smallest_load() -> None:
    assert is_least_loaded(0, [])
    assert is_least_loaded(500, [])
    assert is_least_loaded(100, [90, 400])
    assert not is_least_loaded(100, [10, 400])
