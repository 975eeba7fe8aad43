"""`loraq submit` and `loraq jobs`."""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any, TextIO
from uuid import UUID

import click

from schemas.common import JobState, Lane
from services.cli.output import DURATION_S, moment
from services.parsing.assignments import name_and_value
from services.process.settings import load_settings

WAIT_S = 600.0
COLUMNS = (
    "accepted_at",
    "tenant",
    "job_id",
    "adapter",
    "adapter_version",
    "lane",
    "state",
    "completion_tokens",
    "total_ms",
    "error_code",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable lines on stdout.")


def metadata_entry(text: str) -> tuple[str, Any]:
    """An option's `KEY=VALUE` as key and value."""
    try:
        return name_and_value(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; for instance ticket=17") from error


@click.command()
@click.option("--tenant", help="Owner; with --file, the default for lines without one.")
@click.option("--adapter", help="NAME or NAME@VERSION; default: the base model. With --file, the default.")
@click.option("--prompt", help="The prompt of one job.")
@click.option("--message", help="A user message for one job, rendered with the base model's chat template.")
@click.option("--file", type=click.File(encoding="utf-8"), help="Job requests, one JSON object per line; - is stdin.")
@click.option("--lane", type=click.Choice([str(lane) for lane in Lane]), default="standard", show_default=True)
@click.option("--webhook", metavar="URL|ENDPOINT", help="Where to send the signed outcome.")
@click.option("--max-tokens", type=int, help="Maximum number of tokens to generate.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
@click.option("--top-p", type=float, help="Nucleus sampling.")
@click.option("--seed", type=int, help="Seed for reproducible sampling.")
@click.option("--stop", multiple=True, help="Stop sequence, not part of the output; repeatable.")
@click.option("--timeout-ms", type=int, help="Maximum running time, milliseconds.")
@click.option("--job-id", type=click.UUID, help="Id of the job; a job sent twice under one id runs once.")
@click.option("--deadline", type=moment, metavar="TIME", help="The job expires unless started by then (ISO 8601).")
@click.option(
    "--metadata",
    type=metadata_entry,
    metavar="KEY=VALUE",
    multiple=True,
    help="Copied to the job's row and webhook; VALUE is JSON, or else text; repeatable.",
)
@click.option("--wait", is_flag=True, help="Wait until all jobs have ended; exit status 1 unless all succeeded.")
@click.option(
    "--wait-timeout", "wait_s", type=DURATION_S, default=WAIT_S, show_default=True, help="Maximum wait, seconds."
)
@json_option
def submit(
    file: TextIO | None,
    prompt: str | None,
    message: str | None,
    lane: str,
    wait: bool,
    wait_s: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit one job, or a file of jobs; nothing is sent unless all are valid."""
    from services.jobs.requests import one_request, requests_of  # Kafka's client is slow to import
    from services.jobs.submitting import submit_jobs

    if sum(each is not None for each in (file, prompt, message)) != 1:
        raise click.UsageError("Give exactly one of --prompt, --message and --file.")
    if file is not None and options["job_id"] is not None:
        raise click.UsageError("--job-id is for one job; in a --file, each line has its own.")
    fields = _fields(**options)
    if file is not None:
        requests = requests_of(file, file.name, fields)
    else:
        messages = [{"role": "user", "content": message}] if message is not None else None
        requests = [one_request(fields | {"prompt": prompt, "messages": messages})]
    asyncio.run(submit_jobs(load_settings(), requests, Lane(lane), wait_s if wait else None, as_json=as_json))


def _fields(
    *,
    tenant: str | None,
    adapter: str | None,
    webhook: str | None,
    timeout_ms: int | None,
    job_id: UUID | None,
    deadline: datetime | None,
    metadata: tuple[tuple[str, Any], ...],
    stop: tuple[str, ...],
    **sampling: Any,
) -> dict[str, Any]:
    """The fields of a request from the options."""
    from services.jobs.requests import webhook_of

    given = {name: value for name, value in sampling.items() if value is not None}
    return {
        "tenant": tenant,
        "adapter": adapter,
        "webhook": webhook_of(webhook),
        "timeout_ms": timeout_ms,
        "job_id": str(job_id) if job_id else None,
        "deadline": deadline.isoformat() if deadline else None,
        "metadata": dict(metadata),
        "sampling": given | ({"stop": list(stop)} if stop else {}),
    }


class ShowFirst(click.Group):
    """A group whose default command is `show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `show` unless the first argument is a command or a help option."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ShowFirst)
def jobs() -> None:
    """List and show jobs: `loraq jobs` lists the newest, `loraq jobs JOB_ID` shows one with its output and webhooks.

    Both take the options of `loraq jobs show --help`, for instance --tenant, --state and --json.
    `loraq jobs cancel JOB_ID --tenant T` cancels a job, `loraq jobs replay JOB_ID` resends one that did not succeed.
    """


def list_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that select the listed jobs."""
    for option in (
        json_option,
        click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Maximum number."),
        click.option("--state", type=click.Choice([str(each) for each in JobState]), help="Only jobs in this state."),
        click.option("--tenant", help="Only this tenant's."),
    ):
        command = option(command)
    return command


@jobs.command("list")
@list_options
def list_(tenant: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List the newest jobs."""
    from services.cli.output import on_database, print_json, print_rows
    from services.jobs.rows import list_jobs

    rows = on_database(lambda connection: list_jobs(connection, tenant, state, limit))
    if not as_json:
        print_rows(rows, COLUMNS, "No matching jobs; a job is listed once a worker has consumed its record.")
        return
    for row in rows:
        print_json(row)


@jobs.command()
@click.argument("job_id", type=click.UUID, required=False)
@list_options
@click.pass_context
def show(
    context: click.Context, job_id: UUID | None, tenant: str | None, state: str | None, limit: int, as_json: bool
) -> None:
    """List the newest jobs, or show JOB_ID with its output and the state of its webhooks."""
    from services.cli.output import on_database, print_fields, print_json, print_rows
    from services.jobs.deliveries import COLUMNS as WEBHOOK_COLUMNS
    from services.jobs.rows import show_job

    if job_id is None:
        context.invoke(list_, tenant=tenant, state=state, limit=limit, as_json=as_json)
        return
    if state is not None:
        raise click.UsageError("--state filters the list and cannot be combined with JOB_ID.")
    for row in on_database(lambda connection: show_job(connection, job_id, tenant)):
        if as_json:
            print_json(row)
            continue
        webhooks = row.pop("webhooks")
        print_fields(row)
        if webhooks:
            click.echo()
            print_rows(webhooks, WEBHOOK_COLUMNS, "No webhooks.")


@jobs.command()
@click.argument("job_id", type=click.UUID)
@click.option("--tenant", required=True, help="Owner of the job.")
@click.option("--wait", is_flag=True, help="Wait until the job has ended; exit status 1 unless it is cancelled.")
@click.option(
    "--wait-timeout", "wait_s", type=DURATION_S, default=60.0, show_default=True, help="Maximum wait, seconds."
)
@json_option
def cancel(job_id: UUID, tenant: str, wait: bool, wait_s: float, as_json: bool) -> None:
    """Cancel JOB_ID, whether it is running or waiting. A job that ends first keeps its outcome.

    If the database has no such job of this tenant, the cancellation is remembered in case the job arrives. Exit status
    1 then, and if the job has already ended in another state.
    """
    from services.jobs.cancelling import cancel_job

    asyncio.run(cancel_job(load_settings(), tenant, job_id, wait_s if wait else None, as_json=as_json))


@jobs.command()
@click.argument("job_id", type=click.UUID)
@click.option("--tenant", help="Owner of the job, if several tenants have a job of that id.")
@click.option(
    "--lane", type=click.Choice([str(lane) for lane in Lane]), help="Lane of the new job [default: the same]."
)
@click.option(
    "--deadline", type=moment, metavar="TIME", help="New deadline (ISO 8601) [default: the old, if not past]."
)
@click.option("--again", is_flag=True, help="Allow a job that was replayed before.")
@click.option("--force", is_flag=True, help="Allow a job that succeeded.")
@json_option
def replay(
    job_id: UUID,
    tenant: str | None,
    lane: str | None,
    deadline: datetime | None,
    again: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Resend the request of JOB_ID, which failed, expired or was cancelled, as a new job with a new id.

    The request is read from its topic, as long as Kafka retains it. The row of the new job names the old one in
    `replay_of`.
    """
    from services.jobs.replaying import ReplayRequest, replay_job
    from services.jobs.submitting import show_sent

    request = ReplayRequest(job_id, tenant, Lane(lane) if lane else None, deadline, again, force)
    show_sent([asyncio.run(replay_job(load_settings(), request))], as_json=as_json)
