"""Checks the results of the demo's jobs: their rows, their webhooks, and whether the two agree."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from schemas.common import TERMINAL_STATES, JobState
from schemas.events import JobOutcome, WebhookBody
from services.demo.plan import Job, JobKey
from services.postgres.pool import Connection
from services.webhooks.receiver import ReceivedWebhook

OUTCOMES = """
select j.tenant, j.job_id, j.adapter, j.adapter_version, j.state, j.error_code, j.error_message, j.metadata,
       j.accepted_at, j.finished_at, r.job_id is not null as has_result, r.output_text, r.output_url, r.finish_reason,
       r.prompt_tokens, r.cached_tokens, r.completion_tokens
from loraq.jobs j
left join loraq.results r using (accepted_on, tenant, job_id)
join unnest($1::text[], $2::uuid[]) as wanted (tenant, job_id) using (tenant, job_id)
"""
FINISHED = """
select adapter, count(*) as jobs
from loraq.jobs join unnest($1::text[], $2::uuid[]) as wanted (tenant, job_id) using (tenant, job_id)
where state in ('succeeded', 'failed', 'cancelled', 'expired')
group by adapter
"""


@dataclass(frozen=True)
class Row:
    """The columns of a job's row and result that the demo reads."""

    tenant: str
    job_id: UUID
    adapter: str | None
    adapter_version: int | None
    state: JobState
    error_code: str | None
    error_message: str | None
    metadata: dict[str, Any]
    accepted_at: datetime
    finished_at: datetime | None
    has_result: bool
    output_text: str | None
    output_url: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None

    @property
    def is_terminal(self) -> bool:
        """Whether the job is in a terminal state."""
        return self.state in TERMINAL_STATES


@dataclass(frozen=True)
class CheckResult:
    """The totals of the last line, and a sentence per problem."""

    jobs: int
    succeeded: int
    lost: int
    rows: int
    webhooks_verified: int
    problems: tuple[str, ...]

    @property
    def line(self) -> str:
        """The demo's last line."""
        return (
            f"demo: {self.jobs} jobs, {self.succeeded} succeeded, {self.lost} lost, {self.rows} rows, "
            f"{self.webhooks_verified} webhooks verified"
        )


async def count_finished(connection: Connection, jobs: Sequence[Job]) -> Counter[str | None]:
    """Number of these jobs in a terminal state, by adapter."""
    found = await connection.fetch(FINISHED, [job.tenant for job in jobs], [job.job_id for job in jobs])
    return Counter({row["adapter"]: row["jobs"] for row in found})


async def read_rows(connection: Connection, jobs: Sequence[Job]) -> list[Row]:
    """Every row of these jobs, including duplicates."""
    found = await connection.fetch(OUTCOMES, [job.tenant for job in jobs], [job.job_id for job in jobs])
    return [Row(**{**row, "state": JobState(row["state"])}) for row in found]


def check(jobs: Sequence[Job], rows: Sequence[Row], webhooks: Mapping[str, Iterable[ReceivedWebhook]]) -> CheckResult:
    """Compare the jobs with their rows and with all webhooks that each tenant received, including bad ones."""
    rows_of: dict[JobKey, list[Row]] = {job.key: [] for job in jobs}
    for row in rows:
        rows_of[row.tenant, row.job_id].append(row)
    problems = [problem for job in jobs for problem in _row_problems(job, rows_of[job.key])]
    verified: set[JobKey] = set()
    for tenant, received in webhooks.items():
        for webhook in received:
            key, wrong = _read_webhook(tenant, webhook, rows_of)
            problems += wrong
            if key is not None and not wrong:
                verified.add(key)
    problems += [f"{_name(job)}: no webhook with a valid signature arrived" for job in jobs if job.key not in verified]
    return CheckResult(
        jobs=len(jobs),
        succeeded=sum(any(row.state == JobState.SUCCEEDED for row in found) for found in rows_of.values()),
        lost=sum(not any(row.is_terminal for row in found) for found in rows_of.values()),
        rows=sum(row.has_result for row in rows),
        webhooks_verified=len(verified),
        problems=tuple(problems),
    )


def _name(job: Job) -> str:
    return f"job {job.job_id} ({job.tenant}/{job.adapter or 'base'})"


def _row_problems(job: Job, rows: Sequence[Row]) -> list[str]:
    if len(rows) != 1:
        return [f"{_name(job)}: {len(rows)} rows instead of one"]
    (row,) = rows
    match row.state:
        case JobState.SUCCEEDED if row.has_result:
            return []
        case JobState.SUCCEEDED:
            return [f"{_name(job)}: it succeeded but has no result row"]
        case state if row.is_terminal:
            return [f"{_name(job)}: {state} ({row.error_code}): {row.error_message}"]
        case state:
            return [f"{_name(job)}: it is still {state}"]


def _read_webhook(
    tenant: str, webhook: ReceivedWebhook, rows_of: Mapping[JobKey, Sequence[Row]]
) -> tuple[JobKey | None, list[str]]:
    """The webhook's job and its problems. A webhook of another run has no job and no problems."""
    name = f"webhook {webhook.webhook_id} to {tenant}"
    if webhook.problem is not None:
        return None, [f"{name}: {webhook.problem}"]
    try:
        data = WebhookBody.model_validate_json(webhook.body).data
    except ValidationError as error:
        return None, [f"{name}: its body is not a WebhookBody: {error.errors()[0]['msg']}"]
    key = (data.tenant, data.job_id)
    if key not in rows_of:
        return None, []
    differing = [field for row in rows_of[key] for field in _differences(row, data)]
    return key, [f"{name}: its {field} differs from the row's" for field in differing]


def _differences(row: Row, data: JobOutcome) -> list[str]:
    """Fields of the payload that differ from the row."""
    usage = data.usage
    pairs = {
        "state": (row.state, data.state),
        "adapter": (row.adapter, data.adapter),
        "adapter_version": (row.adapter_version, data.adapter_version),
        "output_text": (row.output_text, data.output_text),
        "output_url": (row.output_url, data.output_url),
        "finish_reason": (row.finish_reason, data.finish_reason),
        "error": (row.error_code, data.error and data.error.code),
        "metadata": (json.dumps(row.metadata, sort_keys=True), json.dumps(data.metadata, sort_keys=True)),
        "usage": (
            (row.prompt_tokens, row.cached_tokens, row.completion_tokens),
            (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) if usage else (None, None, None),
        ),
    }
    return [field for field, (stored, sent) in pairs.items() if stored != sent]
