"""The worker's writes to jobs: each conditional on the job's fence, each batch in one transaction."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from asyncpg import Record as Row

from schemas.common import ErrorCode
from schemas.events import JobError
from services.adapters.versions import AdapterVersion
from services.parsing.names import is_name
from services.postgres.pool import Connection, Pool, autocommit, transaction
from services.worker.jobs import Candidate, Claim, Job, JobKey
from services.worker.store import statements as sql
from services.worker.store.decisions import Claimed, Decision, MayStart, early_decision, never_start
from services.worker.store.effects import Completion, metadata_json
from services.worker.store.prerequisites import (
    Prerequisites,
    adapter_failure,
    adapter_name,
    adapter_ref,
    look_up,
    version_of,
    webhook_failure,
)
from services.worker.store.rows import effect_columns, empty_if_null, ended_columns, fenced, key_columns, keys_of


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the worker needs to know about a tenant; `producer_key` is encrypted, as stored."""

    producer_key: bytes
    disabled: bool


class _Resolved:
    """Prerequisites of new jobs, shared by all with the same tenant, adapter and webhook."""

    def __init__(self, adapter: AdapterVersion | None, url: str | None, failure: JobError | None) -> None:
        self.adapter = adapter
        self.url = url
        self.failure = failure
        self._claimed: dict[bool, Claimed] = {}

    def claimed(self, row: Row, *, counted: bool) -> Claimed:
        """The claim of such a job, given the values that all inserted rows share."""
        if counted not in self._claimed:
            claim = Claim(row["fence"], row["accepted_on"], row["age_s"], row["attempts"], self.adapter, self.url)
            self._claimed[counted] = Claimed(claim, self.failure, counted)
        return self._claimed[counted]


def _starts_at_once(candidate: Candidate, resolved: _Resolved, may_start: MayStart) -> bool:
    """Whether the claim also starts the job. Not with a deadline, which may pass before the job's turn."""
    return (
        candidate.request.deadline is None
        and resolved.failure is None
        and may_start(candidate.key.tenant, resolved.adapter)
    )


class JobStore:
    """Writes the jobs of one pool for one worker. All waits are bounded; driver errors are translated."""

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
        """The named tenants that exist; names come from records unchecked."""
        async with autocommit(self._pool, "look up tenants") as connection:
            rows = await connection.fetch(sql.TENANTS, list(filter(is_name, names)))
        return {row["tenant"]: Tenant(row["producer_key"], row["disabled"]) for row in rows}

    async def producer_keys(self) -> list[bytes]:
        """Every tenant's producer key, encrypted."""
        async with autocommit(self._pool, "look up producer keys") as connection:
            return [row["producer_key"] for row in await connection.fetch(sql.PRODUCER_KEYS)]

    async def any_tenant(self) -> bool:
        """Whether any registered tenant is enabled."""
        async with autocommit(self._pool, "look up tenants") as connection:
            return bool(await connection.fetchval(sql.ANY_TENANT))

    async def accept(self, candidates: Sequence[Candidate], may_start: MayStart = never_start) -> list[Decision]:
        """Decide about each candidate and claim those that no worker holds. No two may have the same key.

        New jobs for which `may_start` returns True are marked as running in the same write, with their first attempt
        counted.
        """
        assert len({candidate.key for candidate in candidates}) == len(candidates), "a batch contains each job once"
        refs = {candidate.key: candidate.request.adapter for candidate in candidates}
        async with autocommit(self._pool, "accept jobs") as connection:
            prerequisites = await look_up(connection, candidates, refs)
            shared = self._resolve(candidates, refs, prerequisites)
            starts = [
                _starts_at_once(each, resolved, may_start) for each, resolved in zip(candidates, shared, strict=True)
            ]
            row = await self._insert_new(connection, candidates, shared, starts)
        decisions: list[Decision] = [
            resolved.claimed(row, counted=start) for resolved, start in zip(shared, starts, strict=True)
        ]
        for place in row["cancelled"]:
            decisions[place - 1] = replace(shared[place - 1].claimed(row, counted=False), cancelled=True)
        if known := row["known"]:
            again = await self._accept_known([candidates[place - 1] for place in known])
            for place, decision in zip(known, again, strict=True):
                decisions[place - 1] = decision
        return decisions

    async def _insert_new(
        self,
        connection: Connection,
        candidates: Sequence[Candidate],
        shared: Sequence[_Resolved],
        starts: Sequence[bool],
    ) -> Row:
        """Insert the jobs whose ids are new; returns the values that all inserted rows share, and the places, counted
        from 1, of known jobs and of jobs that were cancelled before they arrived."""
        [row] = await connection.fetch(
            sql.INSERT_NEW,
            *key_columns(candidate.key for candidate in candidates),
            [candidate.fingerprint for candidate in candidates],
            empty_if_null([adapter_name(candidate) for candidate in candidates]),
            empty_if_null([version_of(resolved.adapter) for resolved in shared]),
            [candidate.record.lane for candidate in candidates],
            [metadata_json(candidate.request.metadata) for candidate in candidates],
            empty_if_null([candidate.replay_of for candidate in candidates]),
            starts,
            self._pool_name,
            self._worker,
            self._lease,
        )
        return row

    async def _accept_known(self, candidates: Sequence[Candidate]) -> list[Decision]:
        """Decide about known jobs, and claim those whose lease has expired."""
        async with transaction(self._pool, "accept jobs") as connection:
            rows = await connection.fetch(sql.KNOWN_JOBS, *key_columns(candidate.key for candidate in candidates))
            known = {JobKey(row["tenant"], row["job_id"]): row for row in rows}
            early = [early_decision(candidate, known.get(candidate.key)) for candidate in candidates]
            claimable = [candidate for candidate, decision in zip(candidates, early, strict=True) if decision is None]
            claimed = await self._reclaim(connection, claimable, known) if claimable else {}
        return [decision or claimed[candidate.key] for candidate, decision in zip(candidates, early, strict=True)]

    async def _reclaim(
        self, connection: Connection, candidates: Sequence[Candidate], known: dict[JobKey, Row]
    ) -> dict[JobKey, Claimed]:
        keys = key_columns(candidate.key for candidate in candidates)
        cancelled = keys_of(await connection.fetch(sql.CANCELLED_AMONG, *keys))
        refs = {candidate.key: adapter_ref(candidate, known[candidate.key]) for candidate in candidates}
        prerequisites = await look_up(connection, candidates, refs)
        days = [known[candidate.key]["accepted_on"] for candidate in candidates]
        wanted = [version_of(prerequisites.adapter_of(each, refs[each.key])) for each in candidates]
        rows = await connection.fetch(sql.CLAIM_JOBS, days, *keys, wanted, self._worker, self._lease)
        by_key = {JobKey(row["tenant"], row["job_id"]): row for row in rows}
        claimed = {
            each.key: self._claimed(each, by_key[each.key], refs[each.key], prerequisites) for each in candidates
        }
        return claimed | {key: replace(claimed[key], cancelled=True) for key in cancelled}

    async def resume(
        self, connection: Connection, candidates: Sequence[Candidate], rows: Mapping[JobKey, Row]
    ) -> dict[JobKey, Claimed]:
        """The claims of jobs whose rows `parking_store.py` claimed in the same transaction."""
        refs = {candidate.key: adapter_ref(candidate, rows[candidate.key]) for candidate in candidates}
        prerequisites = await look_up(connection, candidates, refs)
        return {each.key: self._claimed(each, rows[each.key], refs[each.key], prerequisites) for each in candidates}

    def _resolve(
        self, candidates: Sequence[Candidate], refs: dict[JobKey, str | None], prerequisites: Prerequisites
    ) -> list[_Resolved]:
        """The prerequisites of each candidate; candidates that ask for the same share one object."""
        alike: dict[tuple[object, ...], _Resolved] = {}
        shared = []
        for candidate in candidates:
            ref, webhook = refs[candidate.key], candidate.request.webhook
            kind = (candidate.key.tenant, ref, webhook)
            if (resolved := alike.get(kind)) is None:
                adapter, url = prerequisites.adapter_of(candidate, ref), prerequisites.webhook_url(candidate)
                resolved = alike[kind] = _Resolved(adapter, url, self._failure(candidate, ref, adapter, url))
            shared.append(resolved)
        return shared

    def _claimed(self, candidate: Candidate, row: Row, ref: str | None, prerequisites: Prerequisites) -> Claimed:
        adapter = prerequisites.adapter_of(candidate, ref)
        url = prerequisites.webhook_url(candidate)
        claim = Claim(row["fence"], row["accepted_on"], row["age_s"], row["attempts"], adapter, url)
        failure = self._attempts_exhausted(claim) or self._failure(candidate, ref, adapter, url)
        return Claimed(claim, failure)

    def _failure(
        self, candidate: Candidate, ref: str | None, adapter: AdapterVersion | None, url: str | None
    ) -> JobError | None:
        """Why the job cannot run, apart from its attempts."""
        return (
            adapter_failure(candidate, ref, adapter) or self._base_mismatch(adapter) or webhook_failure(candidate, url)
        )

    def _attempts_exhausted(self, claim: Claim) -> JobError | None:
        if claim.attempts < self._max_attempts:
            return None
        message = f"the worker or its engine ended during each of {claim.attempts} attempts (LORAQ_MAX_ATTEMPTS)"
        return JobError(code=ErrorCode.ENGINE_ERROR, message=message)

    def _base_mismatch(self, adapter: AdapterVersion | None) -> JobError | None:
        ours, theirs = self._base_fingerprint, adapter.base_fingerprint if adapter else None
        if adapter is None or ours is None or theirs is None or ours == theirs:
            return None
        message = (
            f"adapter '{adapter.name}@{adapter.version}' was admitted for another base model"
            f" (fingerprint {theirs[:12]}) than the one that pool {self._pool_name!r} serves (fingerprint {ours[:12]})"
        )
        return JobError(code=ErrorCode.ADAPTER_NOT_READY, message=message)

    async def start(self, jobs: Sequence[Job]) -> dict[JobKey, int]:
        """Mark jobs as running and count the attempt unless it is counted; returns the attempts of the started jobs.

        A missing job has passed its deadline or belongs to another worker.
        """
        deadlines = [job.request.deadline for job in jobs]
        async with transaction(self._pool, "start jobs") as connection:
            attempts = [job.attempts + 1 for job in jobs]
            rows = await connection.fetch(sql.START_JOBS, *fenced(jobs), deadlines, attempts, self._worker, self._lease)
        return {JobKey(row["tenant"], row["job_id"]): row["attempts"] for row in rows}

    async def renew(self, jobs: Sequence[Job]) -> set[JobKey]:
        """Renew the leases of jobs; returns the jobs that this worker still owns."""
        async with transaction(self._pool, "renew leases") as connection:
            return keys_of(await connection.fetch(sql.RENEW_LEASES, *fenced(jobs), self._lease))

    async def release(self, jobs: Sequence[Job]) -> None:
        """Give up unfinished jobs, so that another worker can claim them immediately."""
        async with transaction(self._pool, "release jobs") as connection:
            await connection.execute(sql.RELEASE_JOBS, *fenced(jobs), [job.attempts for job in jobs])
            await connection.execute(sql.MAKE_JOBS_DUE, *key_columns(job.key for job in jobs))

    async def complete(self, completions: Sequence[Completion]) -> set[JobKey]:
        """Write states, results, usage and outbox rows in one transaction; returns the jobs that this worker owned,
        including those that an earlier call already completed.

        The output of the others is discarded; only its tokens are recorded, as wasted.
        """
        async with autocommit(self._pool, "complete jobs") as connection:
            [row] = await connection.fetch(
                sql.COMPLETE_JOBS, *ended_columns(completions), *effect_columns(completions), self._pool_name
            )
        return {completions[place - 1].job.key for place in row["ours"]}
