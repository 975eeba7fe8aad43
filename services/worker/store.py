"""The worker's writes: every one conditional on the job's fence, every one a batch in one transaction."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from asyncpg import Record as Row

from schemas.common import TERMINAL_STATES, AdapterStatus, ErrorCode, JobState
from schemas.events import JobError
from services.database import Connection, Pool, storable, transaction
from services.registry.adapters import AdapterVersion, resolve
from services.registry.endpoints import resolve_endpoints
from services.worker import statements as sql
from services.worker.effects import Completion, Used, logprobs_json, usage_by_adapter
from services.worker.jobs import Candidate, Grant, Job, JobKey


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the worker must know of a tenant; `producer_key` as it lies in the database, sealed."""

    producer_key: bytes
    disabled: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The job is ours. With `doom` it cannot run, and ends as failed for that reason."""

    grant: Grant
    doom: JobError | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is terminal already: the delivery is a duplicate."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id belongs to another request of the tenant."""


@dataclass(frozen=True, slots=True)
class Leased:
    """Another worker holds the job for that many seconds, unless it renews."""

    left_s: float


Decision: TypeAlias = Taken | Ended | Conflict | Leased


@dataclass(frozen=True, slots=True)
class Means:
    """What the registry knows about what a batch asks for."""

    adapters: dict[tuple[str, str], AdapterVersion]
    endpoints: dict[tuple[str, str], str]

    def adapter_of(self, candidate: Candidate, ref: str | None) -> AdapterVersion | None:
        """The adapter version that `ref` names for the candidate's tenant, whatever its status."""
        return self.adapters.get((candidate.key.tenant, ref)) if ref else None

    def webhook_url(self, candidate: Candidate) -> str | None:
        """Where the job's webhook goes."""
        webhook = candidate.request.webhook
        if webhook is None:
            return None
        if webhook.url is not None:
            return str(webhook.url)
        assert webhook.endpoint is not None
        return self.endpoints.get((candidate.key.tenant, webhook.endpoint))


class JobStore:
    """Jobs of one pool as one worker writes them. All waits are bounded; foreign errors come out translated."""

    def __init__(
        self,
        pool: Pool,
        *,
        pool_name: str,
        worker: str,
        lease_s: float,
        max_attempts: int,
        base_fingerprint: str | None = None,
    ) -> None:
        self._pool = pool
        self._base_fingerprint = base_fingerprint
        self._pool_name = pool_name
        self._worker = worker
        self._lease = timedelta(seconds=lease_s)
        self._max_attempts = max_attempts

    async def tenants(self, names: Collection[str]) -> dict[str, Tenant]:
        """Those of the named tenants that exist."""
        async with transaction(self._pool, "look up tenants") as connection:
            rows = await connection.fetch(sql.TENANTS, list(names))
        return {row["tenant"]: Tenant(row["producer_key"], row["disabled"]) for row in rows}

    async def any_tenant(self) -> bool:
        """Whether any tenant is registered and not disabled."""
        async with transaction(self._pool, "look up tenants") as connection:
            return bool(await connection.fetchval(sql.ANY_TENANT))

    async def accept(self, candidates: Sequence[Candidate]) -> list[Decision]:
        """Decide for each candidate and take those that nobody holds. No two may have the same key."""
        keys = [candidate.key for candidate in candidates]
        assert len(set(keys)) == len(keys), "a batch holds each job once"
        async with transaction(self._pool, "accept jobs") as connection:
            known = await self._claim(connection, candidates)
            early = [_early_decision(candidate, known.get(candidate.key)) for candidate in candidates]
            taking = [candidate for candidate, decision in zip(candidates, early, strict=True) if decision is None]
            taken = await self._take(connection, taking, known)
        return [decision or taken[candidate.key] for candidate, decision in zip(candidates, early, strict=True)]

    async def _claim(self, connection: Connection, candidates: Sequence[Candidate]) -> dict[JobKey, Row]:
        """Claim the ids nobody has used; returns what is known of the others."""
        tenants, job_ids = _key_columns(candidate.key for candidate in candidates)
        fingerprints = [candidate.fingerprint for candidate in candidates]
        fresh = _keys(await connection.fetch(sql.CLAIM_KEYS, tenants, job_ids, fingerprints))
        old = [candidate.key for candidate in candidates if candidate.key not in fresh]
        if not old:
            return {}
        rows = await connection.fetch(sql.KNOWN_JOBS, *_key_columns(old))
        return {JobKey(row["tenant"], row["job_id"]): row for row in rows}

    async def _take(
        self, connection: Connection, candidates: Sequence[Candidate], known: dict[JobKey, Row]
    ) -> dict[JobKey, Taken]:
        if not candidates:
            return {}
        refs = {candidate.key: _adapter_ref(candidate, known.get(candidate.key)) for candidate in candidates}
        means = await _look_up(connection, candidates, refs)
        versions = {each.key: _version(means.adapter_of(each, refs[each.key])) for each in candidates}
        fresh = [candidate for candidate in candidates if candidate.key not in known]
        again = [candidate for candidate in candidates if candidate.key in known]
        rows = await self._insert(connection, fresh, versions) if fresh else []
        rows += await self._retake(connection, again, known, versions) if again else []
        by_key = {JobKey(row["tenant"], row["job_id"]): row for row in rows}
        return {each.key: self._taken(each, by_key[each.key], refs[each.key], means) for each in candidates}

    async def _insert(
        self, connection: Connection, candidates: Sequence[Candidate], versions: dict[JobKey, int | None]
    ) -> list[Row]:
        tenants, job_ids = _key_columns(candidate.key for candidate in candidates)
        return await connection.fetch(
            sql.INSERT_JOBS,
            tenants,
            job_ids,
            [_adapter_name(candidate) for candidate in candidates],
            [versions[candidate.key] for candidate in candidates],
            [str(candidate.record.lane) for candidate in candidates],
            self._pool_name,
            self._worker,
            self._lease,
            [json.dumps(candidate.request.metadata, allow_nan=False) for candidate in candidates],
            [candidate.replay_of for candidate in candidates],
        )

    async def _retake(
        self,
        connection: Connection,
        candidates: Sequence[Candidate],
        known: dict[JobKey, Row],
        versions: dict[JobKey, int | None],
    ) -> list[Row]:
        tenants, job_ids = _key_columns(candidate.key for candidate in candidates)
        days = [known[candidate.key]["accepted_on"] for candidate in candidates]
        wanted = [versions[candidate.key] for candidate in candidates]
        return await connection.fetch(sql.TAKE_JOBS, days, tenants, job_ids, wanted, self._worker, self._lease)

    def _taken(self, candidate: Candidate, row: Row, ref: str | None, means: Means) -> Taken:
        adapter = means.adapter_of(candidate, ref)
        url = means.webhook_url(candidate)
        grant = Grant(row["fence"], row["accepted_on"], row["age_s"], row["attempts"], adapter, url)
        doom = (
            self._too_often(grant)
            or _adapter_doom(candidate, ref, adapter)
            or self._base_doom(adapter)
            or _webhook_doom(candidate, url)
        )
        return Taken(grant, doom)

    def _too_often(self, grant: Grant) -> JobError | None:
        if grant.attempts < self._max_attempts:
            return None
        message = f"its worker or engine ended during each of {grant.attempts} attempts (LORAQ_MAX_ATTEMPTS)"
        return JobError(code=ErrorCode.ENGINE_ERROR, message=message)

    def _base_doom(self, adapter: AdapterVersion | None) -> JobError | None:
        ours, theirs = self._base_fingerprint, adapter.base_fingerprint if adapter else None
        if adapter is None or ours is None or theirs is None or ours == theirs:
            return None
        message = (
            f"adapter '{adapter.name}@{adapter.version}' was admitted for another base model than that of pool"
            f" {self._pool_name!r} (fingerprint {theirs[:12]}, the pool's is {ours[:12]})"
        )
        return JobError(code=ErrorCode.ADAPTER_NOT_READY, message=message)

    async def start(self, jobs: Sequence[Job]) -> dict[JobKey, int]:
        """Mark jobs as running and count the attempt; returns the attempts of those started.

        Missing ones have passed their deadline, or belong to another worker by now.
        """
        deadlines = [job.request.deadline for job in jobs]
        async with transaction(self._pool, "start jobs") as connection:
            rows = await connection.fetch(sql.START_JOBS, *_fenced(jobs), deadlines, self._worker, self._lease)
        return {JobKey(row["tenant"], row["job_id"]): row["attempts"] for row in rows}

    async def renew(self, jobs: Sequence[Job]) -> set[JobKey]:
        """Prolong the leases of jobs; returns those that are still ours."""
        async with transaction(self._pool, "renew leases") as connection:
            return _keys(await connection.fetch(sql.RENEW_LEASES, *_fenced(jobs), self._lease))

    async def release(self, jobs: Sequence[Job]) -> None:
        """Give jobs up unfinished, so that another worker may take them at once."""
        async with transaction(self._pool, "release jobs") as connection:
            await connection.execute(sql.RELEASE_JOBS, *_fenced(jobs))

    async def complete(self, completions: Sequence[Completion]) -> set[JobKey]:
        """Write states, results, usage and outbox rows in one transaction; returns the jobs that were still ours.

        The output of the others is discarded, and only its tokens are recorded, as wasted.
        """
        async with transaction(self._pool, "complete jobs") as connection:
            ours = await self._finish(connection, completions)
            committed = [each for each in completions if each.job.key in ours]
            succeeded = [each for each in committed if each.outcome.state is JobState.SUCCEEDED]
            stale = [each for each in completions if each.job.key not in ours]
            if succeeded:
                await connection.execute(sql.INSERT_RESULTS, *_result_columns(succeeded))
            await _add_usage(connection, committed, stale)
            if committed:
                await connection.execute(sql.INSERT_OUTBOX, *_outbox_columns(committed), self._pool_name)
                await connection.execute(sql.WAKE_DISPATCHERS)
        return ours

    async def _finish(self, connection: Connection, completions: Sequence[Completion]) -> set[JobKey]:
        outcomes = [each.outcome for each in completions]
        states = [str(outcome.state) for outcome in outcomes]
        codes = [str(outcome.error.code) if outcome.error else None for outcome in outcomes]
        messages = [storable(outcome.error.message) if outcome.error else None for outcome in outcomes]
        jobs = [each.job for each in completions]
        return _keys(await connection.fetch(sql.FINISH_JOBS, *_fenced(jobs), states, codes, messages))


def _early_decision(candidate: Candidate, row: Row | None) -> Decision | None:
    """What can be said without taking the job; None when it may be taken."""
    if row is None:
        return None
    if row["fingerprint"] != candidate.fingerprint:
        return Conflict()
    if JobState(row["state"]) in TERMINAL_STATES:
        return Ended()
    return Leased(row["lease_left_s"]) if row["lease_left_s"] else None


def _adapter_name(candidate: Candidate) -> str | None:
    ref = candidate.request.adapter
    return ref.split("@")[0] if ref else None


def _adapter_ref(candidate: Candidate, row: Row | None) -> str | None:
    """What to resolve: the reference as sent, or the version that was fixed when the job was first taken."""
    if row is None or row["adapter_version"] is None:
        return candidate.request.adapter
    return f"{_adapter_name(candidate)}@{row['adapter_version']}"


def _version(adapter: AdapterVersion | None) -> int | None:
    return adapter.version if adapter else None


async def _look_up(connection: Connection, candidates: Sequence[Candidate], refs: dict[JobKey, str | None]) -> Means:
    wanted = {(key.tenant, ref) for key, ref in refs.items() if ref is not None}
    endpoints = {
        (candidate.key.tenant, webhook.endpoint)
        for candidate in candidates
        if (webhook := candidate.request.webhook) is not None and webhook.endpoint is not None
    }
    adapters = await resolve(connection, wanted) if wanted else {}
    return Means(adapters, await resolve_endpoints(connection, endpoints) if endpoints else {})


def _adapter_doom(candidate: Candidate, ref: str | None, adapter: AdapterVersion | None) -> JobError | None:
    if ref is None:
        return None
    tenant = candidate.key.tenant
    if adapter is None:
        message = f"tenant {tenant!r} has no adapter {candidate.request.adapter!r}; push it with `loraq adapters push`"
        return JobError(code=ErrorCode.UNKNOWN_ADAPTER, message=message)
    if adapter.status is AdapterStatus.READY:
        return None
    reason = f": {adapter.status_reason}" if adapter.status_reason else ""
    message = f"adapter '{adapter.name}@{adapter.version}' of tenant {tenant!r} is {adapter.status}{reason}"
    return JobError(code=ErrorCode.ADAPTER_NOT_READY, message=message)


def _webhook_doom(candidate: Candidate, url: str | None) -> JobError | None:
    webhook = candidate.request.webhook
    if webhook is None or url is not None:
        return None
    message = (
        f"field 'webhook.endpoint': tenant {candidate.key.tenant!r} has no active endpoint {webhook.endpoint!r};"
        " add it with `loraq endpoints add`"
    )
    return JobError(code=ErrorCode.INVALID_MESSAGE, message=message)


async def _add_usage(connection: Connection, committed: list[Completion], stale: list[Completion]) -> None:
    used = usage_by_adapter(committed)
    for key, lost in usage_by_adapter(stale).items():
        used.setdefault(key, Used()).wasted_tokens += lost.completion_tokens + lost.wasted_tokens
    if not used:
        return
    rows = [
        (*key, each.jobs, each.prompt_tokens, each.cached_tokens, each.completion_tokens, each.wasted_tokens)
        for key, each in used.items()
    ]
    await connection.execute(sql.ADD_USAGE, *_columns(rows, 8))


def _result_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    return _columns([_result_row(each) for each in completions], 15)


def _result_row(each: Completion) -> tuple[Any, ...]:
    finished, timings, job = each.outcome.finished, each.timings, each.job
    assert finished is not None
    return (
        job.grant.accepted_on,
        *job.key,
        storable(finished.text) if each.output_url is None else None,
        each.output_url,
        ",".join(map(str, finished.token_ids)),
        logprobs_json(finished.logprobs),
        finished.finish_reason,
        finished.prompt_tokens,
        finished.cached_tokens,
        finished.completion_tokens,
        timings.queue_ms,
        timings.load_ms,
        timings.first_token_ms,
        timings.total_ms,
    )


def _outbox_columns(completions: Sequence[Completion]) -> list[list[Any]]:
    rows = [
        (effect.event_id, effect.kind, *each.job.key, effect.type, effect.body, effect.target, each.traceparent)
        for each in completions
        for effect in each.effects
    ]
    return _columns(rows, 8)


def _fenced(jobs: Iterable[Job]) -> list[list[Any]]:
    return _columns([(job.grant.accepted_on, *job.key, job.grant.fence) for job in jobs], 4)


def _columns(rows: Collection[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as one list per column, as `unnest` wants them."""
    return [[row[column] for row in rows] for column in range(width)]


def _key_columns(keys: Iterable[JobKey]) -> list[list[Any]]:
    return _columns(list(keys), 2)


def _keys(rows: Iterable[Row]) -> set[JobKey]:
    return {JobKey(row["tenant"], row["job_id"]) for row in rows}
