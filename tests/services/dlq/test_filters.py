"""Which dead letters the options select."""

from datetime import timedelta

import click
import pytest

from services.cli.output import when
from services.dlq.dead_letters import DeadLetterPosition
from services.dlq.filters import DeadLetterFilter
from services.dlq.options import assignment, position
from tests.services.dlq.dead_letters import TOPIC, dead_lettered, request

LETTER = dead_lettered(request(adapter="tone@3"))
AT = LETTER.dead_lettered_at
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("matching", "matches"),
    [
        (DeadLetterFilter(), True),
        (DeadLetterFilter(positions=frozenset([DeadLetterPosition(2, 17), DeadLetterPosition(0, 0)])), True),
        (DeadLetterFilter(positions=frozenset([DeadLetterPosition(2, 18)])), False),
        (DeadLetterFilter(codes=frozenset(["invalid_message"])), True),
        (DeadLetterFilter(codes=frozenset(["unauthenticated"])), False),
        (DeadLetterFilter(tenant="acme"), True),
        (DeadLetterFilter(tenant="globex"), False),
        (DeadLetterFilter(adapter="tone"), True),
        (DeadLetterFilter(adapter="tone@3"), True),
        (DeadLetterFilter(adapter="tone@4"), False),
        (DeadLetterFilter(message="COLOUR"), True),
        (DeadLetterFilter(message="number"), False),
        (DeadLetterFilter(source_topic=TOPIC, source_partition=1, from_offset=7, to_offset=7), True),
        (DeadLetterFilter(source_topic="other"), False),
        (DeadLetterFilter(source_partition=2), False),
        (DeadLetterFilter(from_offset=8), False),
        (DeadLetterFilter(to_offset=6), False),
        (DeadLetterFilter(since=AT, until=AT + SECOND), True),
        (DeadLetterFilter(since=AT + SECOND), False),
        (DeadLetterFilter(until=AT), False),
        (DeadLetterFilter(tenant="acme", adapter="other"), False),
    ],
)
def test_all_conditions_must_hold(matching: DeadLetterFilter, matches: bool) -> None:
    assert matching.matches(LETTER) is matches
    assert matching.matches_all is (matching == DeadLetterFilter())


def test_only_selected_partitions_are_read() -> None:
    assert DeadLetterFilter(positions=frozenset([DeadLetterPosition(2, 17), DeadLetterPosition(2, 1)])).partitions == {
        2
    }
    assert DeadLetterFilter(tenant="acme").partitions is None


def test_times_are_datetimes_or_ages() -> None:
    assert when("2026-12-01T08:30:00").isoformat() == "2026-12-01T08:30:00+00:00"
    assert when("2026-12-01T08:30:00+02:00").isoformat() == "2026-12-01T08:30:00+02:00"
    assert timedelta(hours=1) < when("30m") - when("2h") < timedelta(hours=2)
    for text in ("yesterday", "5w", ""):
        with pytest.raises(click.BadParameter, match=r"is not a time like .* nor an age like"):
            when(text)
    with pytest.raises(click.BadParameter, match=r"'999999d' reaches back before the year 1"):
        when("999999d")


def test_an_invalid_position_or_assignment_is_refused_with_an_example() -> None:
    assert position("2:17") == DeadLetterPosition(2, 17)
    with pytest.raises(click.BadParameter, match="for instance 2:17"):
        position("17")
    assert assignment("sampling.max_tokens=64") == ("sampling.max_tokens", 64)
    assert assignment("adapter=tone") == ("adapter", "tone")
    assert assignment("adapter=null") == ("adapter", None)
    assert assignment("prompt=a=b") == ("prompt", "a=b")
    with pytest.raises(click.BadParameter, match=r"the value of metadata\.a is nested too deeply"):
        assignment("metadata.a=" + "[" * 100_000)
    for text in ("adapter", "=x", "a..b=1"):
        with pytest.raises(click.BadParameter, match=r"is not NAME=VALUE|is not a path of names"):
            assignment(text)
