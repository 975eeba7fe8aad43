"""`loraq webhooks list | resend`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from services.cli.output import json_option, on_database, one_tenant_option, print_json, print_rows, when
from services.errors import InputError
from services.webhooks.listing import COLUMNS, OUTCOMES, UNDELIVERED, Chosen, list_webhooks
from services.webhooks.resending import Wish, resend

SENT_COLUMNS = {
    "tenant": "tenant",
    "job_id": "job",
    "webhook_id": "webhook-id",
    "host": "webhook to",
    "attempts": "attempts",
}
host_option = click.option("--host", metavar="HOST[:PORT]", help="Only to this host, as the address has it.")


@click.group()
def webhooks() -> None:
    """Look at webhooks that were not delivered, and have them sent again."""


@webhooks.command("list")
@click.option("--job", "job_id", type=click.UUID, metavar="JOB_ID", help="Only of this job.")
@one_tenant_option
@host_option
@click.option(
    "--outcome",
    "outcomes",
    type=click.Choice(OUTCOMES),
    multiple=True,
    default=UNDELIVERED,
    show_default="all but delivered",
    help="Of the newest attempt; may be given again.",
)
@click.option("--since", type=when, help="Of jobs that ended then or later: a time (ISO 8601), or an age like 2h.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Newest so many.")
@json_option
def list_(
    job_id: UUID | None,
    tenant: str | None,
    host: str | None,
    outcomes: Sequence[str],
    since: datetime | None,
    limit: int,
    as_json: bool,
) -> None:
    """List the webhooks that were not delivered, newest first, each with its newest attempt and why it failed.

    Finished ones are listed, and can be sent again, for LORAQ_OUTBOX_RETENTION_DAYS; all attempts are rows of
    loraq.webhook_deliveries.
    """
    chosen = Chosen(frozenset(outcomes), tenant, job_id, host, since)
    rows = on_database(lambda connection: list_webhooks(connection, chosen, limit))
    if as_json:
        for row in rows:
            print_json(row)
    else:
        print_rows(rows, COLUMNS, "There is no such webhook.")


@webhooks.command("resend")
@click.argument("job_ids", type=click.UUID, metavar="[JOB_ID]…", nargs=-1)
@one_tenant_option
@host_option
@click.option("--all", "everything", is_flag=True, help="Of all tenants, where nothing else chooses.")
@click.option("--again", is_flag=True, help="Also what was delivered.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="At most so many.")
@json_option
def resend_(
    job_ids: tuple[UUID, ...],
    tenant: str | None,
    host: str | None,
    everything: bool,
    again: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Send the webhooks of these jobs again, or those of a tenant or to a host that were not delivered.

    They are due at once, those that wait for their next attempt too, with all attempts and all of the time that a new
    one has. Each keeps its webhook-id, so that a receiver that remembers ids sees it once. Exit status 1 if one of the
    jobs has nothing to send.
    """
    if not (job_ids or tenant or host or everything):
        raise click.UsageError("Say which webhooks (JOB_ID, --tenant, --host), or --all.")
    wish = Wish(job_ids, tenant, host, again, limit)
    sent, left = on_database(lambda connection: resend(connection, wish))
    _show(sent, as_json=as_json)
    if left:
        raise InputError("; ".join(left))


def _show(sent: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in sent:
            print_json(row)
        return
    if sent:
        print_rows(sent, SENT_COLUMNS, "")
    click.echo(f"{len(sent)} webhooks are due now; `loraq dispatcher` sends them.", err=True)
