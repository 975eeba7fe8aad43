"""Which job goes next: lanes by weight, oldest first, only with a loaded adapter, and nobody starves."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.common import Lane
from services.worker.jobs import BASE_GROUP
from services.worker.queue.backlog import Backlog

INTERACTIVE, STANDARD, BATCH = Lane.INTERACTIVE, Lane.STANDARD, Lane.BATCH


def test_jobs_of_one_lane_run_oldest_first_whatever_their_adapters() -> None:
    backlog = Backlog[str](10)
    backlog.open("a")
    backlog.open("b")
    for number, group in enumerate(["b", "a", "b", BASE_GROUP]):
        backlog.add(f"job {number}", STANDARD, group, now=float(number))
    assert backlog.pop(10) == ["job 0", "job 1", "job 2", "job 3"]
    assert len(backlog) == 0


def test_a_cold_adapter_holds_up_nobody() -> None:
    backlog = Backlog[str](10)
    backlog.add("cold", INTERACTIVE, "a", now=0.0)
    backlog.add("warm", BATCH, BASE_GROUP, now=1.0)
    assert backlog.pop(2) == ["warm"]
    assert backlog.closed_groups(now=2.0) == [("a", 0.0)]
    backlog.open("a")
    assert backlog.pop(2) == ["cold"]


def test_a_closed_group_waits_again() -> None:
    backlog = Backlog[str](10)
    backlog.open("a")
    backlog.add("job", STANDARD, "a", now=0.0)
    backlog.close("a")
    assert backlog.pop(1) == []
    backlog.open("a")
    assert backlog.pop(1) == ["job"]


def test_lanes_share_by_weight_and_none_starves() -> None:
    backlog = Backlog[Lane](1000)
    for lane in (BATCH, STANDARD, INTERACTIVE):
        for _ in range(300):
            backlog.add(lane, lane, BASE_GROUP, now=0.0)
    popped = backlog.pop(210)
    assert popped[0] == INTERACTIVE
    assert Counter(popped) == {INTERACTIVE: 160, STANDARD: 40, BATCH: 10}


def test_a_lane_cannot_save_up_its_share() -> None:
    backlog = Backlog[Lane](1000)
    for _ in range(200):
        backlog.add(BATCH, BATCH, BASE_GROUP, now=0.0)
    backlog.pop(100)
    for _ in range(200):
        backlog.add(INTERACTIVE, INTERACTIVE, BASE_GROUP, now=1.0)
    assert BATCH in backlog.pop(40), "a lane that came late took everything"


def test_what_is_put_back_goes_first() -> None:
    backlog = Backlog[str](10)
    for name in ("first", "second", "third"):
        backlog.add(name, STANDARD, BASE_GROUP, now=0.0)
    popped = backlog.pop(2)
    for job in reversed(popped):
        backlog.requeue(job, STANDARD, BASE_GROUP, now=1.0)
    assert backlog.pop(3) == ["first", "second", "third"]


def test_the_adapter_to_load_next_is_the_one_waited_for_longest_by_weight() -> None:
    backlog = Backlog[str](10)
    backlog.add("old batch job", BATCH, "a", now=0.0)
    backlog.add("young interactive job", INTERACTIVE, "b", now=9.0)
    assert [group for group, _ in backlog.closed_groups(now=10.0)] == ["b", "a"]
    backlog.remove(lambda job: job.startswith("young"))
    backlog.add("younger interactive job", INTERACTIVE, "b", now=9.9)
    assert [group for group, _ in backlog.closed_groups(now=10.0)] == ["a", "b"]


def test_removing_keeps_the_order_of_the_rest() -> None:
    backlog = Backlog[int](10)
    for number in range(6):
        backlog.add(number, STANDARD, BASE_GROUP, now=0.0)
    assert backlog.remove(lambda job: job % 2 == 0) == [0, 2, 4]
    assert backlog.pop(6) == [1, 3, 5]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(list(Lane)), st.sampled_from(["", "a", "b", "c"])),
        st.tuples(st.just("pop"), st.integers(1, 4)),
        st.tuples(st.just("open"), st.sampled_from(["a", "b", "c"])),
        st.tuples(st.just("close"), st.sampled_from(["a", "b", "c"])),
        st.tuples(st.just("remove"), st.sampled_from(["", "a", "b", "c"])),
        st.tuples(st.just("requeue")),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_no_job_is_lost_or_taken_twice_or_taken_while_closed(actions: list[tuple[object, ...]]) -> None:
    backlog = Backlog[tuple[int, Lane, str]](1000)
    waiting: set[tuple[int, Lane, str]] = set()
    is_open = {""}
    last: list[tuple[int, Lane, str]] = []
    for number, (action, *arguments) in enumerate(actions):
        match action, arguments:
            case "add", [lane, group]:
                job = (number, lane, group)
                backlog.add(job, lane, group, now=float(number))
                waiting.add(job)
            case "pop", [limit]:
                last = backlog.pop(limit)
                assert all(job[2] in is_open for job in last)
                assert len(last) == min(limit, sum(job[2] in is_open for job in waiting))
                waiting -= set(last)
            case "open", [group]:
                backlog.open(group)
                is_open.add(group)
            case "close", [group]:
                backlog.close(group)
                is_open.discard(group)
            case "remove", [group]:
                removed = backlog.remove(lambda job, group=group: job[2] == group)
                assert set(removed) == {job for job in waiting if job[2] == group}
                waiting -= set(removed)
            case "requeue", []:
                for job in reversed(last):
                    backlog.requeue(job, job[1], job[2], now=float(number))
                waiting |= set(last)
                last = []
        assert len(backlog) == len(waiting)
        assert {group for group, _ in backlog.closed_groups(float(number))} == {job[2] for job in waiting} - is_open
