"""Encoding of finished offsets in commit metadata: exact, within the broker's limit, and safe to decode."""

import base64
import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.offsets.finished import MAX_METADATA_CHARS, PREFIX, FinishedOffsets, decode, encode, fit


@st.composite
def commit_states(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """A position, a frontier and the unfinished offsets between them, the first of which is the position."""
    position = draw(st.integers(0, 2**62))
    gaps = draw(st.lists(st.integers(1, 2**20), max_size=60))
    unfinished = [position]
    for gap in gaps:
        unfinished.append(unfinished[-1] + gap)
    return position, unfinished[-1] + draw(st.integers(1, 2**40)), unfinished


@given(commit_states())
def test_metadata_round_trips(state: tuple[int, int, list[int]]) -> None:
    position, frontier, unfinished = state
    assert decode(position, encode(position, frontier, unfinished)) == FinishedOffsets(frontier, frozenset(unfinished))


@given(commit_states(), st.integers(20, 200))
def test_metadata_that_does_not_fit_says_less_and_nothing_false(
    state: tuple[int, int, list[int]], max_chars: int
) -> None:
    position, frontier, unfinished = state
    text, complete = fit(position, frontier, unfinished, max_chars)
    decoded = decode(position, text)
    assert len(text) <= max_chars
    assert complete == (decoded == FinishedOffsets(frontier, frozenset(unfinished)))
    if decoded is not None:
        assert decoded.frontier <= frontier
        assert not any(offset in decoded for offset in unfinished)


def test_metadata_is_empty_if_nothing_above_the_position_is_finished() -> None:
    assert encode(7, 7, []) == ""
    assert decode(7, "") is None
    assert decode(7, None) is None
    assert decode(7, "another program's remark") is None


def test_thousands_of_unfinished_records_among_millions_fit() -> None:
    chance = random.Random(5)
    unfinished = sorted(chance.sample(range(100_000), 2000))
    text, complete = fit(unfinished[0], 5_000_000, unfinished)
    assert complete
    assert len(text) <= MAX_METADATA_CHARS


@pytest.mark.parametrize(
    "damaged",
    [
        PREFIX,
        PREFIX + "*",
        PREFIX + base64.b64encode(b"\x07").decode(),
        PREFIX + base64.b64encode(b"\x00\x80").decode(),
    ],
)
def test_damaged_metadata_is_rejected(damaged: str) -> None:
    with pytest.raises(ValueError, match="the metadata of a commit"):
        decode(0, damaged)


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_at_most_rejected(frame: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(3, PREFIX + base64.b64encode(frame).decode())


@given(st.integers(0, 30), st.sets(st.integers(0, 29)), st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_a_union_contains_what_either_contains(
    frontier: int, unfinished: set[int], other_frontier: int, other_unfinished: set[int]
) -> None:
    one = FinishedOffsets(frontier, frozenset(offset for offset in unfinished if offset < frontier))
    other = FinishedOffsets(other_frontier, frozenset(offset for offset in other_unfinished if offset < other_frontier))
    union = one.union(other)
    assert [offset in union for offset in range(35)] == [offset in one or offset in other for offset in range(35)]
