"""Command-line options that select dead letters."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from schemas.common import ErrorCode
from services.cli.output import when
from services.dlq.dead_letters import DeadLetterPosition
from services.dlq.filters import DeadLetterFilter
from services.parsing.assignments import name_and_value
from services.parsing.validation import shown

DEAD_CODES = (ErrorCode.INVALID_MESSAGE, ErrorCode.ID_CONFLICT, ErrorCode.UNAUTHENTICATED)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def position(text: str) -> DeadLetterPosition:
    """A dead letter's position, as `list` shows it."""
    try:
        return DeadLetterPosition.parsed(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not PARTITION:OFFSET, for instance 2:17") from error


def assignment(text: str) -> tuple[str, Any]:
    """`FIELD=VALUE` as path and value."""
    try:
        path, content = name_and_value(text)
        if not all(path.split(".")):
            raise ValueError(f"{shown(path)} is not a path of names joined by dots")
    except ValueError as error:
        raise click.BadParameter(f"{error}; for instance adapter=support-tone or sampling.max_tokens=64") from error
    return path, content


FILTERS: Sequence[Decorator] = (
    click.option(
        "--letter",
        "positions",
        type=position,
        metavar="PARTITION:OFFSET",
        multiple=True,
        help="This dead letter; repeatable.",
    ),
    click.option("--code", "codes", type=click.Choice([str(c) for c in DEAD_CODES]), multiple=True, help="Error code."),
    click.option("--tenant", help="Only records that name this tenant."),
    click.option("--adapter", help="NAME for all its versions, or NAME@VERSION."),
    click.option("--message", help="Part of the error message, ignoring case."),
    click.option("--source-topic", metavar="TOPIC", help="Source topic."),
    click.option("--source-partition", type=click.IntRange(min=0), help="Source partition."),
    click.option("--from-offset", type=click.IntRange(min=0), help="Lowest source offset."),
    click.option("--to-offset", type=click.IntRange(min=0), help="Highest source offset."),
    click.option("--since", type=when, help="Dead-lettered since this time (ISO 8601) or age (2h)."),
    click.option("--until", type=when, help="Dead-lettered before this time or age."),
)


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select dead letters."""
    for option in reversed(FILTERS):
        command = option(command)
    return command


def filter_of(*, positions: Sequence[DeadLetterPosition], codes: Sequence[str], **options: Any) -> DeadLetterFilter:
    """The filter of the options."""
    return DeadLetterFilter(positions=frozenset(positions), codes=frozenset(codes), **options)
