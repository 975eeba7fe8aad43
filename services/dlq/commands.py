"""`loraq dlq`."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from schemas.common import Lane
from services.cli.output import json_option, print_fields, print_json, print_rows, visible
from services.dlq.dead_letters import DeadLetter, DeadLetterPosition
from services.dlq.edits import Edit
from services.dlq.filters import DeadLetterFilter
from services.dlq.options import assignment, filter_of, filters, position
from services.errors import InputError
from services.process.settings import Settings, load_settings

REPORT_COLUMNS = ("letter", "outcome", "to", "reason")
OUTCOMES = {
    "replayed": "replayed",
    "would_replay": "would be replayed",
    "already_replayed": "already replayed",
    "refused": "refused",
}


@click.group()
def dlq() -> None:
    """List, show and replay dead letters.

    The dead-letter topic holds records that could not become jobs, unchanged. Reading it does not use a consumer group
    and commits no offsets.
    """


@dlq.command("list")
@filters
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Maximum number.")
@json_option
def list_(limit: int, as_json: bool, **options: Any) -> None:
    """List dead letters, newest first, and count them by error code. With --json, each line holds the whole record."""
    from services.dlq.listing import COLUMNS, fields, marks_if_available, newest, table_row

    settings, matching = load_settings(), filter_of(**options)

    async def read() -> Any:
        letters, counts = await newest(settings, matching, limit)
        return letters, counts, await marks_if_available(settings, letters)

    letters, counts, marks = asyncio.run(read())
    if as_json:
        for letter in letters:
            print_json(fields(letter, marks.get(letter.position)))
    else:
        rows = [table_row(letter, marks.get(letter.position)) for letter in letters]
        print_rows(rows, COLUMNS, f"No matching dead letters in {settings.dead_topic}.")
    if letters:
        click.echo(_summary(counts, len(letters)), err=True)


def _summary(counts: Counter[str], shown: int) -> str:
    kinds = ", ".join(f"{count} {visible(code)}" for code, count in counts.most_common())
    rest = f"; only the newest {shown} are shown (--limit)" if counts.total() > shown else ""
    return f"{counts.total()} dead letters: {kinds}{rest}."


@dlq.command()
@click.argument("letter", type=position, metavar="LETTER")
@json_option
def show(letter: DeadLetterPosition, as_json: bool) -> None:
    """Show one dead letter with its value and headers. LETTER is PARTITION:OFFSET."""
    from services.dlq.listing import fields, marks_if_available, newest

    settings = load_settings()

    async def read() -> tuple[DeadLetter, Any]:
        letters, _ = await newest(settings, DeadLetterFilter(positions=frozenset([letter])), 1)
        if not letters:
            raise InputError(f"no such dead letter in {settings.dead_topic}: {letter}; see `loraq dlq list`")
        return letters[0], (await marks_if_available(settings, letters)).get(letter)

    shown = fields(*asyncio.run(read()))
    if as_json:
        print_json(shown)
    else:
        print_fields(shown)


@dlq.command()
@filters
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@click.option("--lane", type=click.Choice([str(lane) for lane in Lane]), help="Send to this lane [default: the same].")
@click.option(
    "--set",
    "sets",
    type=assignment,
    metavar="FIELD=VALUE",
    multiple=True,
    help="Set a field of the request; repeatable.",
)
@click.option("--unset", "unsets", metavar="FIELD", multiple=True, help="Remove a field; repeatable.")
@click.option(
    "--edit",
    "file",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="File with a new value, for one dead letter.",
)
@click.option("--sign", is_flag=True, help="Sign edited records with the tenant's producer key: you vouch for them.")
@click.option("--force", is_flag=True, help="Include records that are invalid or would be dead-lettered again.")
@click.option("--again", is_flag=True, help="Include dead letters that were replayed before.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="Maximum number.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent where; send nothing.")
@json_option
def replay(
    everything: bool,
    lane: str | None,
    sets: Sequence[tuple[str, Any]],
    unsets: Sequence[str],
    file: Path | None,
    sign: bool,
    force: bool,
    again: bool,
    limit: int,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send dead letters back to their source topic, unchanged with key and headers.

    Dead letters that were replayed before are skipped. Exit status 1 if one was refused.
    """
    from services.dlq.replay import ReplayRequest

    matching = filter_of(**options)
    if matching.matches_all and not everything:
        raise click.UsageError("Select dead letters with --letter, --code, --tenant and so on, or give --all.")
    if file is not None and (sets or unsets):
        raise click.UsageError("--edit replaces the whole value; it cannot be combined with --set or --unset.")
    edit = Edit(file.read_bytes() if file else None, tuple(sets), tuple(unsets))
    request = ReplayRequest(matching, edit, Lane(lane) if lane else None, limit, force, sign, again, dry_run)
    settings = load_settings()
    counts = asyncio.run(_replay(settings, request, as_json=as_json))
    summary = ", ".join(f"{counts[key]} {OUTCOMES[key]}" for key in OUTCOMES if counts[key])
    click.echo(summary or "No matching dead letters.", err=True)
    if matching.positions and not counts:
        raise InputError(f"no such dead letters in {settings.dead_topic}; see `loraq dlq list`")
    if counts["refused"]:
        raise InputError(f"{counts['refused']} of {counts.total()} dead letters were not replayed")


async def _replay(settings: Settings, request: Any, *, as_json: bool) -> Counter[str]:
    from services.dlq.replay import replay as run

    counts: Counter[str] = Counter()
    async for reports in run(settings, request):
        counts.update(report.outcome for report in reports)
        rows = [
            {"letter": str(each.letter.position), "outcome": each.outcome, "to": each.to, "reason": each.reason}
            for each in reports
        ]
        if as_json:
            for row in rows:
                print_json(row)
        else:
            print_rows(rows, REPORT_COLUMNS, "")
    return counts
