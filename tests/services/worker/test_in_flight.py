"""What this worker holds, and what of it belongs to another by now."""

from datetime import date

from schemas.common import Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.worker.in_flight import Held
from services.worker.jobs import Candidate, Grant, Job, JobKey, Phase, Record
from services.worker.offsets.ledger import Partition, Place

P, Q = Partition("jobs", 0), Partition("jobs", 1)


def job(*places: Place) -> Job:
    record = Record(Place(P, 0), Lane.STANDARD, None, b"", (), 0)
    candidate = Candidate(JobKey("acme", uuid7()), JobRequest(tenant="acme", prompt="x"), b"", record, None, 0.0, 0)
    return Job(candidate, Grant(1, date(2026, 11, 29), 0.0, 0, None, None), 0.0, list(places))


def held_of(*jobs: Job) -> Held:
    held = Held()
    for each in jobs:
        held.add(each)
    return held


def test_strays_wait_and_stand_in_others_partitions_alone() -> None:
    ours, theirs, both, parked = job(Place(P, 0)), job(Place(Q, 0)), job(Place(P, 1), Place(Q, 1)), job()
    running = job(Place(Q, 2))
    running.phase = Phase.RUNNING
    assert held_of(ours, theirs, both, parked, running).strays({P}) == [theirs]


def test_what_runs_of_a_partition_is_what_is_past_waiting() -> None:
    waiting, running, completing = job(Place(P, 0)), job(Place(P, 1)), job(Place(P, 2))
    elsewhere = job(Place(Q, 3))
    running.phase = elsewhere.phase = Phase.RUNNING
    completing.phase = Phase.COMPLETING
    assert held_of(waiting, running, completing, elsewhere).running_in({P}) == [running, completing]


def test_where_offsets_mean_other_records_no_job_stands_any_more() -> None:
    one = job(Place(P, 0), Place(Q, 0))
    held_of(one).displace(P)
    assert one.places == [Place(Q, 0)]


def test_records_that_joined_a_job_are_counted_until_it_goes() -> None:
    one, two = job(Place(P, 0)), job(Place(P, 1), Place(P, 2))
    held = held_of(one, two)
    assert held.num_joined(Lane.STANDARD) == 1
    held.join(one, Place(P, 3))
    held.join(one, Place(Q, 3))
    assert (held.num_joined(Lane.STANDARD), held.num_joined(Lane.BATCH)) == (3, 0)
    held.displace(P)
    assert held.num_joined(Lane.STANDARD) == 0
    held.remove(one)
    held.remove(two)
    assert held.num_joined(Lane.STANDARD) == 0
