"""Which letters a person means."""

from datetime import timedelta

import click
import pytest

from services.cli.output import when
from services.dlq.dead_letters import LetterPlace
from services.dlq.filters import Choice
from services.dlq.options import assignment, place
from tests.services.dlq.dead_letters import TOPIC, put_aside, request

LETTER = put_aside(request(adapter="tone@3"))
AT = LETTER.put_aside_at
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("choice", "takes"),
    [
        (Choice(), True),
        (Choice(places=frozenset([LetterPlace(2, 17), LetterPlace(0, 0)])), True),
        (Choice(places=frozenset([LetterPlace(2, 18)])), False),
        (Choice(codes=frozenset(["invalid_message"])), True),
        (Choice(codes=frozenset(["unauthenticated"])), False),
        (Choice(tenant="acme"), True),
        (Choice(tenant="globex"), False),
        (Choice(adapter="tone"), True),
        (Choice(adapter="tone@3"), True),
        (Choice(adapter="tone@4"), False),
        (Choice(message="COLOUR"), True),
        (Choice(message="number"), False),
        (Choice(source_topic=TOPIC, source_partition=1, from_offset=7, to_offset=7), True),
        (Choice(source_topic="other"), False),
        (Choice(source_partition=2), False),
        (Choice(from_offset=8), False),
        (Choice(to_offset=6), False),
        (Choice(since=AT, until=AT + SECOND), True),
        (Choice(since=AT + SECOND), False),
        (Choice(until=AT), False),
        (Choice(tenant="acme", adapter="other"), False),
    ],
)
def test_all_conditions_must_hold(choice: Choice, takes: bool) -> None:
    assert choice.takes(LETTER) is takes
    assert choice.is_everything is (choice == Choice())


def test_only_partitions_that_are_named_are_read() -> None:
    assert Choice(places=frozenset([LetterPlace(2, 17), LetterPlace(2, 1)])).partitions == {2}
    assert Choice(tenant="acme").partitions is None


def test_times_are_moments_or_ages() -> None:
    assert when("2026-12-01T08:30:00").isoformat() == "2026-12-01T08:30:00+00:00"
    assert when("2026-12-01T08:30:00+02:00").isoformat() == "2026-12-01T08:30:00+02:00"
    assert timedelta(hours=1) < when("30m") - when("2h") < timedelta(hours=2)
    for text in ("yesterday", "5w", ""):
        with pytest.raises(click.BadParameter, match=r"is not a time like .* nor an age like"):
            when(text)
    with pytest.raises(click.BadParameter, match=r"'999999d' reaches back before the year 1"):
        when("999999d")


def test_what_is_no_place_and_no_assignment_is_refused_with_an_example() -> None:
    assert place("2:17") == LetterPlace(2, 17)
    with pytest.raises(click.BadParameter, match="for instance 2:17"):
        place("17")
    assert assignment("sampling.max_tokens=64") == ("sampling.max_tokens", 64)
    assert assignment("adapter=tone") == ("adapter", "tone")
    assert assignment("adapter=null") == ("adapter", None)
    assert assignment("prompt=a=b") == ("prompt", "a=b")
    with pytest.raises(click.BadParameter, match=r"the value of metadata\.a is nested too deeply"):
        assignment("metadata.a=" + "[" * 100_000)
    for text in ("adapter", "=x", "a..b=1"):
        with pytest.raises(click.BadParameter, match=r"has no name and =|is no path of names"):
            assignment(text)
