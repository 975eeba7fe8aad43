"""`loraq dlq`."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from schemas.common import Lane
from services.cli.output import json_option, print_fields, print_json, print_rows, visible
from services.dlq.dead_letters import Letter, LetterPlace
from services.dlq.edits import Edit
from services.dlq.filters import Choice
from services.dlq.options import assignment, choice_of, filters, place
from services.errors import InputError
from services.process.settings import Settings, load_settings

REPORT_COLUMNS = {"letter": "letter", "outcome": "outcome", "to": "to", "reason": "why"}
OUTCOMES = {
    "replayed": "sent back",
    "would_replay": "would be sent back",
    "already_replayed": "sent back before",
    "refused": "refused",
}


@click.group()
def dlq() -> None:
    """Look at the dead-letter topic, and send records back where they came from.

    The dead-letter topic holds records that no job could be made of, as they came. Looking takes no part in any
    consumer group and moves no offset.
    """


@dlq.command("list")
@filters
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Newest so many.")
@json_option
def list_(limit: int, as_json: bool, **options: Any) -> None:
    """List dead letters, newest first, and count them by error code. With --json each line holds the whole record."""
    from services.dlq.listing import COLUMNS, fields, marks_if_there, newest, table_row

    settings, choice = load_settings(), choice_of(**options)

    async def read() -> Any:
        letters, counts = await newest(settings, choice, limit)
        return letters, counts, await marks_if_there(settings, letters)

    letters, counts, marks = asyncio.run(read())
    if as_json:
        for letter in letters:
            print_json(fields(letter, marks.get(letter.place)))
    else:
        rows = [table_row(letter, marks.get(letter.place)) for letter in letters]
        print_rows(rows, COLUMNS, f"No such dead letter in {settings.dead_topic}.")
    if letters:
        click.echo(_summary(counts, len(letters)), err=True)


def _summary(counts: Counter[str], shown: int) -> str:
    kinds = ", ".join(f"{count} {visible(code)}" for code, count in counts.most_common())
    rest = f"; the newest {shown} are shown (--limit)" if counts.total() > shown else ""
    return f"{counts.total()} dead letters: {kinds}{rest}."


@dlq.command()
@click.argument("letter", type=place, metavar="LETTER")
@json_option
def show(letter: LetterPlace, as_json: bool) -> None:
    """Show everything about one dead letter, its value and headers included. LETTER is PARTITION:OFFSET."""
    from services.dlq.listing import fields, marks_if_there, newest

    settings = load_settings()

    async def read() -> tuple[Letter, Any]:
        letters, _ = await newest(settings, Choice(places=frozenset([letter])), 1)
        if not letters:
            raise InputError(f"there is no dead letter {letter} in {settings.dead_topic}; see `loraq dlq list`")
        return letters[0], (await marks_if_there(settings, letters)).get(letter)

    everything = fields(*asyncio.run(read()))
    if as_json:
        print_json(everything)
    else:
        print_fields(everything)


@dlq.command()
@filters
@click.option("--all", "everything", is_flag=True, help="Every dead letter, where no other option chooses.")
@click.option("--lane", type=click.Choice([str(lane) for lane in Lane]), help="To this lane, not where it came from.")
@click.option(
    "--set",
    "sets",
    type=assignment,
    metavar="FIELD=VALUE",
    multiple=True,
    help="Set a field of the request; may be given again.",
)
@click.option("--unset", "unsets", metavar="FIELD", multiple=True, help="Remove a field; may be given again.")
@click.option(
    "--edit",
    "file",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="File with the value to send instead, for one letter.",
)
@click.option("--sign", is_flag=True, help="Sign what is edited in its tenant's name; you vouch for it.")
@click.option("--force", is_flag=True, help="Also what would be put aside again, or is no valid request.")
@click.option("--again", is_flag=True, help="Also what was sent back before.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="At most so many.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent where; send nothing.")
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
    """Send dead letters back to the topic that they came from, byte for byte, with their key and headers.

    What was sent back before is left alone. Exit status 1 if a letter was refused.
    """
    from services.dlq.replay import Wish

    choice = choice_of(**options)
    if choice.is_everything and not everything:
        raise click.UsageError("Say which letters (--letter, --code, --tenant, …), or --all.")
    if file is not None and (sets or unsets):
        raise click.UsageError("--edit gives the whole value: it goes neither with --set nor with --unset.")
    edit = Edit(file.read_bytes() if file else None, tuple(sets), tuple(unsets))
    wish = Wish(choice, edit, Lane(lane) if lane else None, limit, force, sign, again, dry_run)
    settings = load_settings()
    counts = asyncio.run(_replay(settings, wish, as_json=as_json))
    click.echo(
        ", ".join(f"{counts[key]} {OUTCOMES[key]}" for key in OUTCOMES if counts[key]) or "No such dead letter.",
        err=True,
    )
    if choice.places and not counts:
        raise InputError(f"none of the letters named is in {settings.dead_topic}; see `loraq dlq list`")
    if counts["refused"]:
        raise InputError(f"{counts['refused']} of {counts.total()} dead letters were not sent back")


async def _replay(settings: Settings, wish: Any, *, as_json: bool) -> Counter[str]:
    from services.dlq.replay import replay as run

    counts: Counter[str] = Counter()
    async for reports in run(settings, wish):
        counts.update(report.outcome for report in reports)
        rows = [
            {"letter": str(each.letter.place), "outcome": each.outcome, "to": each.to, "reason": each.reason}
            for each in reports
        ]
        if as_json:
            for row in rows:
                print_json(row)
        else:
            print_rows(rows, REPORT_COLUMNS, "")
    return counts
