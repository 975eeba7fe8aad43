"""Which jobs may displace which others in a full engine."""

from collections import Counter
from datetime import date

from hypothesis import given
from hypothesis import strategies as st

from schemas.common import Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.worker.execution.express import Express
from services.worker.jobs import Candidate, Claim, Job, JobKey, Record
from services.worker.offsets.ledger import Partition, Place
from services.worker.queue.backlog import WEIGHTS, Demand

BATCH, INTERACTIVE, STANDARD = Lane.BATCH, Lane.INTERACTIVE, Lane.STANDARD


def running(tenant: str, lane: Lane = STANDARD) -> Job:
    request = JobRequest(tenant=tenant, prompt="x")
    record = Record(Place(Partition("jobs", 0), 0), lane, None, b"", (), 0)
    candidate = Candidate(JobKey(tenant, uuid7()), request, b"", record, None, 0.0, 0)
    return Job(candidate, Claim(1, date(2026, 12, 7), 0.0, 0, None, None), 0.0)


def asking(tenant: str, lane: Lane = STANDARD) -> Demand:
    return Demand(lane, tenant, "")


def test_a_newcomer_displaces_the_youngest_job_of_the_pair_with_the_largest_excess() -> None:
    jobs = [running("acme"), *(running("globex") for _ in range(7))]
    express = Express(8, jobs, frozenset())
    assert express.allows(asking("initech"))
    assert express.victim(asking("initech")) is jobs[-1]
    assert express.allows(asking("acme"))
    assert not express.allows(asking("globex")), "it has more than its part"


def test_a_heavier_lane_displaces_a_lighter_one_and_not_the_reverse() -> None:
    jobs = [running("acme", BATCH) for _ in range(8)]
    assert Express(8, jobs, frozenset()).allows(asking("acme", INTERACTIVE))
    jobs = [running("acme", INTERACTIVE) for _ in range(8)]
    assert not Express(8, jobs, frozenset()).allows(asking("acme", BATCH)), "its part is less than one place"


def test_a_job_is_displaced_once_and_a_quarter_of_the_places_at_a_time() -> None:
    jobs = [running("globex") for _ in range(8)]
    first = Express(8, jobs, frozenset({jobs[-1].key}))
    assert first.victim(asking("acme")) is jobs[-2]
    assert first.room == 1
    assert Express(8, jobs, frozenset({jobs[-1].key, jobs[-2].key})).room == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(list(Lane))), min_size=1, max_size=12),
    st.sampled_from("abcd"),
    st.sampled_from(list(Lane)),
)
def test_no_pair_gets_more_than_its_share_and_no_victim_falls_below_its_own(
    present: list[tuple[str, Lane]], tenant: str, lane: Lane
) -> None:
    jobs = [running(*each) for each in present]
    express = Express(len(jobs), jobs, frozenset())
    demand = asking(tenant, lane)
    if not express.allows(demand):
        return
    victim = express.victim(demand)
    assert victim is not None
    held = Counter((job.lane, job.key.tenant) for job in jobs)
    weights = {pair: WEIGHTS[pair[0]] for pair in {*held, (lane, tenant)}}
    fair = {pair: len(jobs) * weight / sum(weights.values()) for pair, weight in weights.items()}
    assert held[lane, tenant] + 1 <= fair[lane, tenant]
    loser = (victim.lane, victim.key.tenant)
    assert held[loser] - 1 >= fair[loser] - 1e-9
