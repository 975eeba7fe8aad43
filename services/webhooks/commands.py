"""`loraq webhooks list | resend`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from services.cli.output import json_option, on_database, one_tenant_option, print_json, print_rows, when
from services.errors import InputError
from services.webhooks.listing import COLUMNS, OUTCOMES, UNDELIVERED, WebhookFilter, list_webhooks
from services.webhooks.resending import ResendRequest, resend

RESENT_COLUMNS = ("tenant", "job_id", "webhook_id", "host", "attempts")
host_option = click.option("--host", metavar="HOST[:PORT]", help="Only to this host, as written in the address.")


@click.group()
def webhooks() -> None:
    """List webhooks that were not delivered, and resend them."""


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
    help="Outcome of the newest attempt; repeatable.",
)
@click.option("--since", type=when, help="Of jobs that ended since this time (ISO 8601) or age (2h).")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Maximum number of webhooks."
)
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
    """List undelivered webhooks, newest first, with the result of the newest attempt.

    Webhooks are listed and can be resent for LORAQ_OUTBOX_RETENTION_DAYS after their last attempt. The table
    loraq.webhook_deliveries holds all attempts.
    """
    matching = WebhookFilter(frozenset(outcomes), tenant, job_id, host, since)
    rows = on_database(lambda connection: list_webhooks(connection, matching, limit))
    if as_json:
        for row in rows:
            print_json(row)
    else:
        print_rows(rows, COLUMNS, "No matching webhooks.")


@webhooks.command("resend")
@click.argument("job_ids", type=click.UUID, metavar="[JOB_ID]…", nargs=-1)
@one_tenant_option
@host_option
@click.option("--all", "everything", is_flag=True, help="All undelivered webhooks of all tenants.")
@click.option("--again", is_flag=True, help="Include delivered webhooks.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Maximum number of webhooks."
)
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
    """Resend the undelivered webhooks of these jobs, of a tenant, or to a host.

    They become due immediately, including those that wait for a retry, and start a new retry schedule. Each keeps its
    webhook-id, so that the receiver can recognise duplicates. Exit status 1 if one of the jobs has nothing to resend.
    """
    if not (job_ids or tenant or host or everything):
        raise click.UsageError("Select webhooks by JOB_ID, --tenant or --host, or give --all.")
    request = ResendRequest(job_ids, tenant, host, again, limit)
    resent, skipped = on_database(lambda connection: resend(connection, request))
    _show(resent, as_json=as_json)
    if skipped:
        raise InputError("; ".join(skipped))


def _show(resent: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in resent:
            print_json(row)
        return
    if resent:
        print_rows(resent, RESENT_COLUMNS, "")
    click.echo(f"Webhooks due now: {len(resent)}; `loraq dispatcher` sends them.", err=True)
