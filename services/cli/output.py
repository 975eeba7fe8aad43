"""Shared by all commands: options, a database connection for one action, and output as a table or JSON lines."""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from services.postgres.pool import Connection, open_pool, transaction
from services.process.settings import MAX_S, Settings, load_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
T = TypeVar("T")

CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and those that change the text direction."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON lines on stdout.")
tenant_option = click.option("--tenant", required=True, help="The owner.")
one_tenant_option = click.option("--tenant", help="Only those of this tenant.")


class Real(click.FloatRange):
    """A number within bounds that is not `nan`, which click's ranges accept."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; raises BadParameter if it is not a number or out of bounds."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


DURATION_S = Real(0, MAX_S)
"""An option's duration in seconds, with the same upper bound as durations in settings."""


def moment(text: str) -> datetime:
    """An option's time: ISO 8601, in UTC unless it has a time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time like 2026-12-01T08:30:00Z") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def when(text: str) -> datetime:
    """An option's time: ISO 8601 (in UTC unless it has a time zone), or an age like 90s, 15m, 2h or 7d."""
    if (age := re.fullmatch(r"(\d{1,6})([smhd])", text)) is not None:
        try:
            return datetime.now(UTC) - timedelta(**{UNITS[age[2]]: int(age[1])})
        except OverflowError as error:
            raise click.BadParameter(
                f"{text!r} reaches back before the year 1; omit the option for all times"
            ) from error
    try:
        return moment(text)
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message}, nor an age like 15m, 2h or 7d") from error


def on_database(action: Callable[[Connection], Awaitable[T]], settings: Settings | None = None) -> T:
    """Run `action` in one transaction, in a new event loop."""
    chosen = settings or load_settings()

    async def run() -> T:
        async with open_pool(chosen) as pool, transaction(pool) as connection:
            return await action(connection)

    return asyncio.run(run())


def print_json(row: "DataclassInstance | Mapping[str, Any]") -> None:
    """Print one line of JSON on stdout; times in ISO 8601."""
    fields = row if isinstance(row, Mapping) else asdict(row)
    click.echo(json.dumps(fields, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], nothing: str) -> None:
    """A table on stdout, its headings the names of the fields, as in JSON; `nothing` on stderr if there are no rows."""
    if not rows:
        click.echo(nothing, err=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell(row[column]) for column in columns))
    _console().print(table)


def print_fields(row: Mapping[str, Any]) -> None:
    """Print one row as a list of fields and values."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for field, value in row.items():
        table.add_row(field, cell(value))
    _console().print(table)


def cell(value: Any) -> str:
    """A value as readable text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value)):
        return visible(json.dumps(value, default=_plain, ensure_ascii=False))
    if isinstance(value, list):
        return visible(" ".join(str(item) for item in value)) or "-"
    return visible(str(value))


def visible(text: str) -> str:
    """The text with control characters escaped: tenants write it, and an operator's terminal would execute them."""
    return CONTROL_CHARACTERS.sub(lambda found: _picture(ord(found[0])), text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def _console() -> Console:
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 1000  # do not fold lines in a pipe
    return console
