"""Options by which a person says which dead letters are meant."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from schemas.common import ErrorCode
from services.cli.output import when
from services.dlq.dead_letters import LetterPlace
from services.dlq.filters import Choice
from services.parsing.assignments import name_and_value
from services.parsing.validation import shown

DEAD_CODES = (ErrorCode.INVALID_MESSAGE, ErrorCode.ID_CONFLICT, ErrorCode.UNAUTHENTICATED)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def place(text: str) -> LetterPlace:
    """Where a dead letter lies, as `list` shows it."""
    try:
        return LetterPlace.parsed(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not PARTITION:OFFSET, for instance 2:17") from error


def assignment(text: str) -> tuple[str, Any]:
    """`FIELD=VALUE` as path and content."""
    try:
        path, content = name_and_value(text)
        if not all(path.split(".")):
            raise ValueError(f"{shown(path)} is no path of names joined by dots")
    except ValueError as error:
        raise click.BadParameter(f"{error}; for instance adapter=support-tone or sampling.max_tokens=64") from error
    return path, content


FILTERS: Sequence[Decorator] = (
    click.option(
        "--letter",
        "places",
        type=place,
        metavar="PLACE",
        multiple=True,
        help="This one, as listed; may be given again.",
    ),
    click.option("--code", "codes", type=click.Choice([str(c) for c in DEAD_CODES]), multiple=True, help="Error code."),
    click.option("--tenant", help="Only what names this tenant."),
    click.option("--adapter", help="NAME, whatever its version, or NAME@VERSION."),
    click.option("--message", help="Part of the error message, in any case."),
    click.option("--source-topic", metavar="TOPIC", help="Topic that it came from."),
    click.option("--source-partition", type=click.IntRange(min=0), help="Partition that it came from."),
    click.option("--from-offset", type=click.IntRange(min=0), help="Lowest offset there."),
    click.option("--to-offset", type=click.IntRange(min=0), help="Highest offset there."),
    click.option("--since", type=when, help="Put aside then or later: a time (ISO 8601), or an age like 2h."),
    click.option("--until", type=when, help="Put aside before then."),
)


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which letters are meant."""
    for option in reversed(FILTERS):
        command = option(command)
    return command


def choice_of(*, places: Sequence[LetterPlace], codes: Sequence[str], **options: Any) -> Choice:
    """What the options say."""
    return Choice(places=frozenset(places), codes=frozenset(codes), **options)
