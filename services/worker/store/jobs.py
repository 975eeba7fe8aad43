"""The worker's writes: every one conditional on the job's fence, every one a batch in one transaction."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from asyncpg import Record as Row

from schemas.common import ErrorCode
from schemas.events import JobError
from services.adapters.versions import AdapterVersion
from services.parsing.names import is_name
from services.postgres.pool import Connection, Pool, pooled, transaction
from services.worker.jobs import Candidate, Grant, Job, JobKey
from services.worker.store import statements as sql
from services.worker.store.decisions import Decision, MayStart, Taken, early_decision, never
from services.worker.store.effects import Completion, metadata_json
from services.worker.store.prerequisites import (
    Means,
    adapter_doom,
    adapter_name,
    adapter_ref,
    look_up,
    version_of,
    webhook_doom,
)
from services.worker.store.rows import effect_columns, ended_columns, fenced, key_columns, keys_of, spare


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the worker must know of a tenant; `producer_key` as it lies in the database, sealed."""

    producer_key: bytes
    disabled: bool


class _Outlook:
    """What a job nobody has seen before can expect; the same for all that ask for the same."""

    def __init__(self, adapter: AdapterVersion | None, url: str | None, doom: JobError | None) -> None:
        self.adapter = adapter
        self.url = url
        self.doom = doom
        self._taken: dict[bool, Taken] = {}

    def taken(self, row: Row, *, counted: bool) -> Taken:
        """What taking such a job means, given what all inserted rows have in common."""
        if counted not in self._taken:
            grant = Grant(row["fence"], row["accepted_on"], row["age_s"], row["attempts"], self.adapter, self.url)
            self._taken[counted] = Taken(grant, self.doom, counted)
        return self._taken[counted]


def _starts(candidate: Candidate, outlook: _Outlook, may_start: MayStart) -> bool:
    """Whether the job is started with its taking. One with a deadline is not: that may pass before its turn."""
    return candidate.request.deadline is None and outlook.doom is None and may_start(outlook.adapter)


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
        """Those of the named tenants that exist; the names may be anything that a record said."""
        async with pooled(self._pool, "look up tenants") as connection:
            rows = await connection.fetch(sql.TENANTS, list(filter(is_name, names)))
        return {row["tenant"]: Tenant(row["producer_key"], row["disabled"]) for row in rows}

    async def producer_keys(self) -> list[bytes]:
        """Every tenant's producer key, sealed."""
        async with pooled(self._pool, "look up producer keys") as connection:
            return [row["producer_key"] for row in await connection.fetch(sql.PRODUCER_KEYS)]

    async def any_tenant(self) -> bool:
        """Whether any tenant is registered and not disabled."""
        async with pooled(self._pool, "look up tenants") as connection:
            return bool(await connection.fetchval(sql.ANY_TENANT))

    async def accept(self, candidates: Sequence[Candidate], may_start: MayStart = never) -> list[Decision]:
        """Decide for each candidate and take those that nobody holds. No two may have the same key.

        Those nobody has seen before that the engine would take at once, as `may_start` says of their adapter, are
        marked as running in the same write, with their first attempt counted.
        """
        assert len({candidate.key for candidate in candidates}) == len(candidates), "a batch holds each job once"
        refs = {candidate.key: candidate.request.adapter for candidate in candidates}
        async with pooled(self._pool, "accept jobs") as connection:
            means = await look_up(connection, candidates, refs)
            outlooks = self._outlooks(candidates, refs, means)
            starts = [_starts(each, outlook, may_start) for each, outlook in zip(candidates, outlooks, strict=True)]
            row = await self._take_fresh(connection, candidates, outlooks, starts)
        decisions: list[Decision] = [
            outlook.taken(row, counted=start) for outlook, start in zip(outlooks, starts, strict=True)
        ]
        for place in row["called_off"]:
            decisions[place - 1] = replace(outlooks[place - 1].taken(row, counted=False), cancelled=True)
        if known := row["known"]:
            again = await self._accept_known([candidates[place - 1] for place in known])
            for place, decision in zip(known, again, strict=True):
                decisions[place - 1] = decision
        return decisions

    async def _take_fresh(
        self,
        connection: Connection,
        candidates: Sequence[Candidate],
        outlooks: Sequence[_Outlook],
        starts: Sequence[bool],
    ) -> Row:
        """Claim the ids that nobody has used and insert their jobs; returns what all of them have in common, and the
        places, counted from 1, of those that are known already and of those that were cancelled before they came."""
        [row] = await connection.fetch(
            sql.TAKE_FRESH,
            *key_columns(candidate.key for candidate in candidates),
            [candidate.fingerprint for candidate in candidates],
            spare([adapter_name(candidate) for candidate in candidates]),
            spare([version_of(outlook.adapter) for outlook in outlooks]),
            [candidate.record.lane for candidate in candidates],
            [metadata_json(candidate.request.metadata) for candidate in candidates],
            spare([candidate.replay_of for candidate in candidates]),
            starts,
            self._pool_name,
            self._worker,
            self._lease,
        )
        return row

    async def _accept_known(self, candidates: Sequence[Candidate]) -> list[Decision]:
        """Decide about jobs that have a row, and take those whose lease has run out."""
        async with transaction(self._pool, "accept jobs") as connection:
            rows = await connection.fetch(sql.KNOWN_JOBS, *key_columns(candidate.key for candidate in candidates))
            known = {JobKey(row["tenant"], row["job_id"]): row for row in rows}
            early = [early_decision(candidate, known.get(candidate.key)) for candidate in candidates]
            taking = [candidate for candidate, decision in zip(candidates, early, strict=True) if decision is None]
            taken = await self._retake(connection, taking, known) if taking else {}
        return [decision or taken[candidate.key] for candidate, decision in zip(candidates, early, strict=True)]

    async def _retake(
        self, connection: Connection, candidates: Sequence[Candidate], known: dict[JobKey, Row]
    ) -> dict[JobKey, Taken]:
        keys = key_columns(candidate.key for candidate in candidates)
        cancelled = keys_of(await connection.fetch(sql.CANCELLED_AMONG, *keys))
        refs = {candidate.key: adapter_ref(candidate, known[candidate.key]) for candidate in candidates}
        means = await look_up(connection, candidates, refs)
        days = [known[candidate.key]["accepted_on"] for candidate in candidates]
        wanted = [version_of(means.adapter_of(each, refs[each.key])) for each in candidates]
        rows = await connection.fetch(sql.TAKE_JOBS, days, *keys, wanted, self._worker, self._lease)
        by_key = {JobKey(row["tenant"], row["job_id"]): row for row in rows}
        taken = {each.key: self._taken(each, by_key[each.key], refs[each.key], means) for each in candidates}
        return taken | {key: replace(taken[key], cancelled=True) for key in cancelled}

    async def resume(
        self, connection: Connection, candidates: Sequence[Candidate], rows: Mapping[JobKey, Row]
    ) -> dict[JobKey, Taken]:
        """What taking means for jobs whose rows were taken in the same transaction, elsewhere (`parking_store.py`)."""
        refs = {candidate.key: adapter_ref(candidate, rows[candidate.key]) for candidate in candidates}
        means = await look_up(connection, candidates, refs)
        return {each.key: self._taken(each, rows[each.key], refs[each.key], means) for each in candidates}

    def _outlooks(
        self, candidates: Sequence[Candidate], refs: dict[JobKey, str | None], means: Means
    ) -> list[_Outlook]:
        """What is ahead of each; those that ask for the same share one."""
        alike: dict[tuple[object, ...], _Outlook] = {}
        outlooks = []
        for candidate in candidates:
            ref, webhook = refs[candidate.key], candidate.request.webhook
            kind = (candidate.key.tenant, ref, webhook)
            if (outlook := alike.get(kind)) is None:
                adapter, url = means.adapter_of(candidate, ref), means.webhook_url(candidate)
                outlook = alike[kind] = _Outlook(adapter, url, self._doom(candidate, ref, adapter, url))
            outlooks.append(outlook)
        return outlooks

    def _taken(self, candidate: Candidate, row: Row, ref: str | None, means: Means) -> Taken:
        adapter = means.adapter_of(candidate, ref)
        url = means.webhook_url(candidate)
        grant = Grant(row["fence"], row["accepted_on"], row["age_s"], row["attempts"], adapter, url)
        doom = self._too_often(grant) or self._doom(candidate, ref, adapter, url)
        return Taken(grant, doom)

    def _doom(
        self, candidate: Candidate, ref: str | None, adapter: AdapterVersion | None, url: str | None
    ) -> JobError | None:
        """Why the job cannot run, whatever its attempts."""
        return adapter_doom(candidate, ref, adapter) or self._base_doom(adapter) or webhook_doom(candidate, url)

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
        """Mark jobs as running and count the attempt, unless it is; returns the attempts of those started.

        Missing ones have passed their deadline, or belong to another worker by now.
        """
        deadlines = [job.request.deadline for job in jobs]
        async with transaction(self._pool, "start jobs") as connection:
            attempts = [job.attempts + 1 for job in jobs]
            rows = await connection.fetch(sql.START_JOBS, *fenced(jobs), deadlines, attempts, self._worker, self._lease)
        return {JobKey(row["tenant"], row["job_id"]): row["attempts"] for row in rows}

    async def renew(self, jobs: Sequence[Job]) -> set[JobKey]:
        """Prolong the leases of jobs; returns those that are still ours."""
        async with transaction(self._pool, "renew leases") as connection:
            return keys_of(await connection.fetch(sql.RENEW_LEASES, *fenced(jobs), self._lease))

    async def release(self, jobs: Sequence[Job]) -> None:
        """Give jobs up unfinished, so that another worker may take them at once."""
        async with transaction(self._pool, "release jobs") as connection:
            await connection.execute(sql.RELEASE_JOBS, *fenced(jobs), [job.attempts for job in jobs])
            await connection.execute(sql.HURRY_JOBS, *key_columns(job.key for job in jobs))

    async def complete(self, completions: Sequence[Completion]) -> set[JobKey]:
        """Write states, results, usage and outbox rows in one transaction; returns the jobs that were still ours, also
        where that was written before.

        The output of the others is discarded, and only its tokens are recorded, as wasted.
        """
        async with pooled(self._pool, "complete jobs") as connection:
            [row] = await connection.fetch(
                sql.COMPLETE_JOBS, *ended_columns(completions), *effect_columns(completions), self._pool_name
            )
        return {completions[place - 1].job.key for place in row["ours"]}
