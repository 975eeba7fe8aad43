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
COLUMNS = {
    "accepted_at": "accepted",
    "tenant": "tenant",
    "job_id": "job",
    "adapter": "adapter",
    "adapter_version": "version",
    "lane": "lane",
    "state": "state",
    "completion_tokens": "tokens",
    "total_ms": "ms",
    "error_code": "error",
}
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable lines on stdout.")


def metadata_entry(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` as key and content."""
    try:
        return name_and_value(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; for instance ticket=17") from error


@click.command()
@click.option("--tenant", help="Owner; with --file, of lines that name none.")
@click.option("--adapter", help="NAME or NAME@VERSION; the base model without it. With --file, of lines without one.")
@click.option("--prompt", help="The prompt of one job.")
@click.option("--message", help="The user's message of one job, rendered with the base model's chat template.")
@click.option("--file", type=click.File(encoding="utf-8"), help="Job requests, one JSON object per line; - is stdin.")
@click.option("--lane", type=click.Choice([str(lane) for lane in Lane]), default="standard", show_default=True)
@click.option("--webhook", metavar="URL|ENDPOINT", help="Where the signed completion goes.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--top-p", type=float, help="Nucleus sampling.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Text before which the output ends; may be given again.")
@click.option("--timeout-ms", type=int, help="Longest running time, milliseconds.")
@click.option("--job-id", type=click.UUID, help="Id of the one job: sent twice under it, it runs once.")
@click.option("--deadline", type=moment, metavar="TIME", help="Not started by then: expired (ISO 8601).")
@click.option(
    "--metadata",
    type=metadata_entry,
    metavar="KEY=VALUE",
    multiple=True,
    help="Echoed in row and webhook; JSON, or text where it is none; may be given again.",
)
@click.option("--wait", is_flag=True, help="Wait until all have ended; exit status 1 unless all succeeded.")
@click.option(
    "--wait-timeout", "wait_s", type=DURATION_S, default=WAIT_S, show_default=True, help="Longest wait, seconds."
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
    """Submit one job, or a file of them; nothing is sent unless everything is valid."""
    from services.jobs.requests import one_request, requests_of  # Kafka's client is slow to import
    from services.jobs.submitting import submit_jobs

    if sum(each is not None for each in (file, prompt, message)) != 1:
        raise click.UsageError("Give exactly one of --prompt, --message and --file.")
    if file is not None and options["job_id"] is not None:
        raise click.UsageError("--job-id is of one job; in a --file each line has its own.")
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
    """Fields of a request that the options give."""
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
    """A group whose plain use, with or without a job id, is its command `show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `show` in front unless a command, or help, is asked for."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ShowFirst)
def jobs() -> None:
    """Look at jobs: `loraq jobs` lists the newest, `loraq jobs JOB_ID` shows one with its output and its webhooks.

    Both take the options of `loraq jobs show --help`, for instance --tenant, --state and --json.
    `loraq jobs cancel JOB_ID --tenant T` cancels one, `loraq jobs replay JOB_ID` sends one anew that did not succeed.
    """


def list_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which jobs are listed."""
    for option in (
        json_option,
        click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Newest so many."),
        click.option("--state", type=click.Choice([str(each) for each in JobState]), help="Only those in this state."),
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
        nothing = "There is no such job; one is listed once a worker has taken its record (is `loraq worker` running?)."
        print_rows(rows, COLUMNS, nothing)
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
    """List the newest jobs, or show everything about JOB_ID, its output and the state of its webhooks included."""
    from services.cli.output import on_database, print_fields, print_json, print_rows
    from services.jobs.deliveries import COLUMNS as WEBHOOK_COLUMNS
    from services.jobs.rows import show_job

    if job_id is None:
        context.invoke(list_, tenant=tenant, state=state, limit=limit, as_json=as_json)
        return
    if state is not None:
        raise click.UsageError("--state chooses from the list; it does not go with JOB_ID.")
    for row in on_database(lambda connection: show_job(connection, job_id, tenant)):
        if as_json:
            print_json(row)
            continue
        webhooks = row.pop("webhooks")
        print_fields(row)
        if webhooks:
            click.echo()
            print_rows(webhooks, WEBHOOK_COLUMNS, "There is no webhook.")


@jobs.command()
@click.argument("job_id", type=click.UUID)
@click.option("--tenant", required=True, help="Owner of the job.")
@click.option("--wait", is_flag=True, help="Wait until it has ended; exit status 1 unless it ended as cancelled.")
@click.option(
    "--wait-timeout", "wait_s", type=DURATION_S, default=60.0, show_default=True, help="Longest wait, seconds."
)
@json_option
def cancel(job_id: UUID, tenant: str, wait: bool, wait_s: float, as_json: bool) -> None:
    """Cancel JOB_ID, be it running, waiting or not even seen yet. One that ends first stays as it ended."""
    from services.jobs.cancelling import cancel_job

    asyncio.run(cancel_job(load_settings(), tenant, job_id, wait_s if wait else None, as_json=as_json))


@jobs.command()
@click.argument("job_id", type=click.UUID)
@click.option("--tenant", help="Owner of the job, where several have one of that id.")
@click.option("--lane", type=click.Choice([str(lane) for lane in Lane]), help="Another lane than its own.")
@click.option(
    "--deadline", type=moment, metavar="TIME", help="New deadline (ISO 8601); one that has passed is left out."
)
@click.option("--again", is_flag=True, help="Also a job that was replayed before.")
@click.option("--force", is_flag=True, help="Also a job that succeeded.")
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
    """Send the request of JOB_ID, which failed, expired or was cancelled, anew under an id of its own.

    The request is read from its topic, as long as Kafka keeps it. The row of the new job says `replay_of`.
    """
    from services.jobs.replaying import Wish, replay_job
    from services.jobs.submitting import show_sent

    wish = Wish(job_id, tenant, Lane(lane) if lane else None, deadline, again, force)
    show_sent([asyncio.run(replay_job(load_settings(), wish))], as_json=as_json)
