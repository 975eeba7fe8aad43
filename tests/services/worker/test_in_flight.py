"""Jobs in flight in this worker, and which of them belong to another worker."""

from datetime import date

from schemas.common import Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.worker.in_flight import InFlight
from services.worker.jobs import Candidate, Claim, Job, JobKey, Phase, Record
from services.worker.offsets.ledger import Partition, Place

P, Q = Partition("jobs", 0), Partition("jobs", 1)


def job(*places: Place) -> Job:
    record = Record(Place(P, 0), Lane.STANDARD, None, b"", (), 0)
    candidate = Candidate(JobKey("acme", uuid7()), JobRequest(tenant="acme", prompt="x"), b"", record, None, 0.0, 0)
    return Job(candidate, Claim(1, date(2026, 11, 29), 0.0, 0, None, None), 0.0, list(places))


def in_flight_with(*jobs: Job) -> InFlight:
    in_flight = InFlight()
    for each in jobs:
        in_flight.add(each)
    return in_flight


def test_reassigned_jobs_wait_and_have_records_only_in_other_workers_partitions() -> None:
    ours, theirs, both, parked = job(Place(P, 0)), job(Place(Q, 0)), job(Place(P, 1), Place(Q, 1)), job()
    running = job(Place(Q, 2))
    running.phase = Phase.RUNNING
    assert in_flight_with(ours, theirs, both, parked, running).reassigned({P}) == [theirs]


def test_running_in_a_partition_excludes_waiting_jobs() -> None:
    waiting, running, completing = job(Place(P, 0)), job(Place(P, 1)), job(Place(P, 2))
    elsewhere = job(Place(Q, 3))
    running.phase = elsewhere.phase = Phase.RUNNING
    completing.phase = Phase.COMPLETING
    assert in_flight_with(waiting, running, completing, elsewhere).running_in({P}) == [running, completing]


def test_forgetting_a_partition_removes_its_places_from_jobs() -> None:
    one = job(Place(P, 0), Place(Q, 0))
    in_flight_with(one).forget_places(P)
    assert one.places == [Place(Q, 0)]


def test_records_that_joined_a_job_are_counted_until_it_is_removed() -> None:
    one, two = job(Place(P, 0)), job(Place(P, 1), Place(P, 2))
    in_flight = in_flight_with(one, two)
    assert in_flight.num_joined(Lane.STANDARD) == 1
    in_flight.join(one, Place(P, 3))
    in_flight.join(one, Place(Q, 3))
    assert (in_flight.num_joined(Lane.STANDARD), in_flight.num_joined(Lane.BATCH)) == (3, 0)
    in_flight.forget_places(P)
    assert in_flight.num_joined(Lane.STANDARD) == 0
    in_flight.remove(one)
    in_flight.remove(two)
    assert in_flight.num_joined(Lane.STANDARD) == 0
