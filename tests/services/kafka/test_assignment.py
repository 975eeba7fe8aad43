"""The group's assignment: balanced, lanes together, and as few numbers as possible change owner."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kafka.assignment import Assignment, Member, assign

LANES = ("batch", "interactive", "standard")
NAMES = st.sets(st.sampled_from("abcdefgh"), min_size=1)


def members(names: set[str], before: Assignment | None = None, epoch: int = 1) -> dict[str, Member]:
    before = before or {}
    return {name: Member(frozenset(LANES), before.get(name, {}), epoch if name in before else 0) for name in names}


def counts(num_partitions: int) -> dict[str, int]:
    return dict.fromkeys(LANES, num_partitions)


def owners(assignment: Assignment, topic: str = LANES[0]) -> dict[int, str]:
    return {number: name for name, topics in assignment.items() for number in topics.get(topic, ())}


def check(assignment: Assignment, num_partitions: int) -> None:
    """Every partition has one owner, lanes are together, and members differ by one number at most."""
    for topics in assignment.values():
        assert len({tuple(topics.get(lane, ())) for lane in LANES}) == 1, "the lanes of a number are apart"
    assert sorted(owners(assignment)) == list(range(num_partitions))
    sizes = [len(topics.get(LANES[0], ())) for topics in assignment.values()]
    assert sum(sizes) == num_partitions, "a partition has two owners"
    assert max(sizes) - min(sizes) <= 1


def moved(before: Assignment, after: Assignment) -> int:
    old, new = owners(before), owners(after)
    return sum(old[number] != new[number] for number in old)


def fewest_moves(before: dict[int, str], names: set[str]) -> int:
    """Over all balanced assignments, by trying them."""
    numbers = sorted(before)
    balanced = (
        each
        for each in product(sorted(names), repeat=len(numbers))
        if max(map(each.count, names)) - min(map(each.count, names)) <= 1
    )
    return min(sum(before[number] != owner for number, owner in zip(numbers, each, strict=True)) for each in balanced)


@given(st.integers(1, 40), st.lists(NAMES, min_size=1, max_size=8))
def test_however_members_come_and_go_it_is_balanced_and_lanes_stay_together(
    num_partitions: int, history: list[set[str]]
) -> None:
    assignment: Assignment = {}
    for epoch, names in enumerate(history):
        assignment = assign(counts(num_partitions), members(names, assignment, epoch))
        assert set(assignment) == names
        check(assignment, num_partitions)


@given(
    st.integers(1, 5),
    st.sets(st.sampled_from("abc"), min_size=1),
    st.sets(st.sampled_from("abc"), min_size=1),
)
def test_no_balanced_assignment_moves_fewer(num_partitions: int, first: set[str], then: set[str]) -> None:
    before = assign(counts(num_partitions), members(first))
    after = assign(counts(num_partitions), members(then, before))
    assert moved(before, after) == fewest_moves(owners(before), then)


@pytest.mark.parametrize(("num_partitions", "num_members"), [(6, 2), (12, 2), (12, 3), (64, 5), (100, 7)])
def test_a_member_that_joins_gets_its_share_and_nothing_else_moves(num_partitions: int, num_members: int) -> None:
    names = {f"m{number}" for number in range(num_members)}
    before = assign(counts(num_partitions), members(names))
    after = assign(counts(num_partitions), members(names | {"new"}, before))
    assert moved(before, after) == len(after["new"][LANES[0]]) == num_partitions // (num_members + 1)


@given(st.integers(1, 40), st.sets(st.sampled_from("abcdefgh"), min_size=2), st.data())
def test_when_a_member_leaves_only_its_own_numbers_move(
    num_partitions: int, names: set[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    before = assign(counts(num_partitions), members(names))
    after = assign(counts(num_partitions), members(names - {gone}, before))
    assert moved(before, after) == len(before[gone].get(LANES[0], ()))


def test_a_member_that_missed_an_assignment_claims_nothing_that_another_owns_by_now() -> None:
    owned = {lane: [0, 1] for lane in LANES}
    current, late = Member(frozenset(LANES), owned, epoch=7), Member(frozenset(LANES), owned, epoch=6)
    assert assign(counts(2), {"a": late, "b": current, "c": Member(frozenset(LANES))})["b"][LANES[0]] == [0]
    assert assign(counts(4), {"a": late, "b": current})["b"][LANES[0]] == [0, 1]


@given(
    st.integers(1, 12),
    st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(LANES), min_size=1), min_size=1),
)
def test_workers_that_serve_some_lanes_share_each_lane_with_those_that_serve_it(
    num_partitions: int, lanes: dict[str, set[str]]
) -> None:
    group = {name: Member(frozenset(topics)) for name, topics in lanes.items()}
    assignment = assign(counts(num_partitions), group)
    for lane in LANES:
        sizes = [len(assignment[name].get(lane, ())) for name, topics in lanes.items() if lane in topics]
        assert sum(sizes) == (num_partitions if sizes else 0)
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert all(lane in lanes[name] for name, topics in assignment.items() if topics.get(lane))


def test_topics_that_grow_keep_what_they_had() -> None:
    before = assign(counts(4), members({"a", "b"}))
    after = assign(counts(8), members({"a", "b"}, before))
    check(after, 8)
    assert moved(before, after) == 0


def test_a_topic_without_partitions_or_subscribers_is_left_out() -> None:
    assert assign({"batch": 0, "interactive": 2, "other": 3}, members({"a"})) == {"a": {"interactive": [0, 1]}}
