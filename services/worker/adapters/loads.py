"""Loads adapters into the engine while jobs run: which to load next, which to evict, which jobs fail with them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from schemas.common import ErrorCode
from services.adapters.versions import AdapterVersion
from services.errors import PermanentError, RetryableError
from services.process import telemetry
from services.worker.adapters.residency import Residency
from services.worker.engine.bridge import EngineLostError
from services.worker.jobs import BASE_GROUP, Job, Outcome, failed
from services.worker.queue.backlog import Backlog, Waiting
from services.worker.queue.parking_store import ParkRequest
from services.worker.queue.retry_policy import recheck_delay_s

MAX_LOADS = 4
MAX_FETCHES = 4
"""Downloads at once of adapters whose load has to wait for room."""
MAX_FETCHED_AHEAD = 32
MIN_STAY_S = 2.0
URGENT_AFTER_S = 1.0
RETRY_DELAYS_S = (0.2, 1.0, 2.0, 5.0)
_log = telemetry.get_logger()


class AdapterStager(Protocol):
    """The part of the stager that this module uses."""

    def hold(self, digest: str, uri: str, size_bytes: int) -> AbstractAsyncContextManager[Path]:
        """The adapter's directory, which stays on disk inside the block."""


class AdapterLoader(Protocol):
    """The part of the engine bridge that this module uses."""

    ready: bool

    async def load(self, digest: str, path: Path) -> int:
        """Load an adapter from a directory; returns its bytes in memory."""

    def unload(self, digest: str) -> None:
        """Unload an adapter."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long a job waits for its adapter: in memory during a load, and in total, in seconds."""

    park_after_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AdapterCallbacks:
    """`finish` accepts an outcome and `park` a job with a long wait; `known` is called when a load ended, `opened` when
    jobs of another group may start, `crashed` with an unexpected error."""

    finish: Callable[[Outcome], None]
    park: Callable[[ParkRequest], None]
    load_ended: Callable[[str], None]
    opened: Callable[[], None]
    crashed: Callable[[BaseException], None]


class Adapters:
    """Owns the adapters in the engine."""

    def __init__(
        self,
        stager: AdapterStager,
        engine: AdapterLoader,
        backlog: Backlog[Job],
        budget_bytes: int,
        waits: WaitLimits,
        callbacks: AdapterCallbacks,
    ) -> None:
        self._stager = stager
        self._engine = engine
        self._backlog = backlog
        self._residency = Residency(budget_bytes, MIN_STAY_S)
        self._waits = waits
        self._callbacks = callbacks
        self._began: dict[str, float] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._fetched: dict[str, None] = {}
        self._cold_since: dict[str, float] = {}
        self._last_error: dict[str, str] = {}
        self._draining: set[str] = set()
        self._on_disk: dict[str, AsyncExitStack] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def loaded(self) -> list[str]:
        """Digests of the adapters with which jobs may start."""
        return [digest for digest in self._residency.digests() if self._residency.is_loaded(digest)]

    def is_loaded(self, digest: str) -> bool:
        """Whether the adapter is in the engine."""
        return self._residency.is_loaded(digest)

    def acquire(self, job: Job) -> None:
        """Count a job that goes to the engine as a user of its adapter."""
        if (adapter := job.claim.adapter) is not None:
            self._residency.acquire(job.group)
            self._residency.pin(job.group, pinned=adapter.pinned)

    def release(self, job: Job) -> None:
        """Count a job that left the engine."""
        if job.group != BASE_GROUP:
            self._residency.release(job.group)

    def plan(self, now: float) -> None:
        """Start loads, make room for them, and fail or park jobs that have waited too long."""
        if not self._engine.ready:
            return
        cold = [group for group, _ in self._backlog.closed_groups(now) if not self._residency.is_loaded(group)]
        self._cold_since = {group: self._cold_since.get(group, now) for group in cold}
        drain: set[str] = set()
        for group in cold:
            self._fail_overdue(group, now)
            self._park_waiting(group, now)
            if group not in self._residency and len(self._loads) < MAX_LOADS:
                drain |= self._begin(group, now)
        self._drain(drain)
        self._fetch_ahead(cold)

    def _fetch_ahead(self, cold: Sequence[str]) -> None:
        """Download adapters whose load waits for room, in the order in which the queue wants them."""
        self._fetched = {group: None for group in self._fetched if group in self._cold_since}
        for group in cold[:MAX_FETCHED_AHEAD]:
            if len(self._fetches) >= MAX_FETCHES:
                return
            waiting = next(self._backlog.waiting_in(group), None)
            if waiting is None or group in self._residency or group in self._fetches or group in self._fetched:
                continue
            adapter = waiting.job.claim.adapter
            assert adapter is not None
            self._fetched[group] = None
            task = asyncio.create_task(self._fetch(adapter), name=f"fetch ahead {group[:12]}")
            task.add_done_callback(self._on_load_done)
            self._fetches[group] = task

    async def _fetch(self, adapter: AdapterVersion) -> None:
        """Download an adapter to disk; the load that follows reports a failed download."""
        try:
            async with self._stager.hold(adapter.digest, adapter.uri, adapter.size_bytes):
                pass
        except RetryableError as error:
            self._last_error[adapter.digest] = str(error)
            self._fetched.pop(adapter.digest, None)
        except PermanentError as error:
            self._last_error[adapter.digest] = str(error)
        finally:
            del self._fetches[adapter.digest]

    def _begin(self, group: str, now: float) -> set[str]:
        """Start loading an adapter if there is room; returns the adapters to drain for it."""
        waiting = next(self._backlog.waiting_in(group), None)
        if waiting is None:
            return set()
        adapter = waiting.job.claim.adapter
        assert adapter is not None
        if adapter.size_bytes > self._residency.budget_bytes:
            budget = f"LORAQ_HOST_CACHE_BYTES, {self._residency.budget_bytes}"
            self._fail(adapter, f"it has {adapter.size_bytes} bytes, more than {budget}")
            return set()
        reservation = self._residency.reserve(
            group,
            adapter.size_bytes,
            self._needed(),
            urgent=now - self._cold_since[group] > URGENT_AFTER_S,
            pinned=adapter.pinned,
            now=now,
        )
        for victim in reservation.evict:
            self._evict(victim)
        if reservation.granted:
            task = asyncio.create_task(self._load(adapter), name=f"load {group[:12]}")
            task.add_done_callback(self._on_load_done)
            self._loads[group] = task
            self._began[group] = now
        return set(reservation.drain)

    def _needed(self) -> list[str]:
        """Adapters with waiting jobs, the one needed first first; those being drained are needed last."""
        needed = self._backlog.wanted()
        return needed + sorted(self._backlog.groups().difference(needed))

    def _on_load_done(self, task: asyncio.Task[None]) -> None:
        """Report an error that `_load` did not handle: it is a defect."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._callbacks.crashed(error)

    def _evict(self, digest: str) -> None:
        telemetry.ADAPTER_EVICTIONS.labels(tier="host").inc()
        self._backlog.close(digest)
        self._draining.discard(digest)
        self._engine.unload(digest)
        self._release_directory(digest)

    def _drain(self, drain: set[str]) -> None:
        """Start no more jobs with these adapters; reopen those that no longer need to be drained."""
        for digest in drain - self._draining:
            self._backlog.close(digest)
        for digest in self._draining - drain:
            if self._residency.is_loaded(digest):
                self._open(digest)
        self._draining = drain

    async def _load(self, adapter: AdapterVersion) -> None:
        began = time.monotonic()
        try:
            num_bytes = await self._load_with_retries(adapter)
        except PermanentError as error:
            self._residency.drop(adapter.digest)
            self._fail(adapter, str(error))
        except EngineLostError:
            self._residency.drop(adapter.digest)
        else:
            telemetry.ADAPTER_LOAD_SECONDS.observe(time.monotonic() - began)
            self._loaded(adapter.digest, num_bytes)
        finally:
            if self._loads.get(adapter.digest) is asyncio.current_task():
                del self._loads[adapter.digest]
                del self._began[adapter.digest]
                self._callbacks.load_ended(adapter.digest)

    async def _load_with_retries(self, adapter: AdapterVersion) -> int:
        """Fetch and load, with retries until it succeeds or no job waits for the adapter."""
        attempt = 0
        while True:
            try:
                return await self._hold_and_load(adapter)
            except EngineLostError:
                raise
            except RetryableError as error:
                self._last_error[adapter.digest] = str(error)
                if next(self._backlog.waiting_in(adapter.digest), None) is None:
                    raise PermanentError(str(error)) from error
            await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)])
            attempt += 1

    async def _hold_and_load(self, adapter: AdapterVersion) -> int:
        """Keep the directory on disk while the engine has the adapter: the engine may read it again."""
        async with AsyncExitStack() as stack:
            holding = self._stager.hold(adapter.digest, adapter.uri, adapter.size_bytes)
            num_bytes = await self._engine.load(adapter.digest, await stack.enter_async_context(holding))
            self._release_directory(adapter.digest)
            self._on_disk[adapter.digest] = stack.pop_all()
        return num_bytes

    def _release_directory(self, digest: str) -> None:
        if (stack := self._on_disk.pop(digest, None)) is not None:
            task = asyncio.create_task(stack.aclose(), name=f"release {digest[:12]}")
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def _loaded(self, digest: str, num_bytes: int) -> None:
        self._residency.loaded(digest, num_bytes)
        telemetry.ADAPTER_BYTES.labels(tier="host").set(self._residency.used_bytes)
        self._last_error.pop(digest, None)
        now, cold_since = time.monotonic(), self._cold_since.pop(digest, 0.0)
        for waiting in self._backlog.waiting_in(digest):
            waiting.job.load_s += now - max(waiting.since, cold_since)
        self._open(digest)

    def _open(self, digest: str) -> None:
        self._backlog.open(digest)
        self._callbacks.opened()

    def _fail(self, adapter: AdapterVersion, reason: str) -> None:
        """Fail every job that waits for the adapter; the next job starts a new load."""
        reason = f"adapter '{adapter.name}@{adapter.version}' cannot be loaded: {reason}"
        _log.warning("Adapter cannot be loaded", action="adapter_load_failed", digest=adapter.digest, reason=reason)
        for job in self._backlog.remove(lambda job: job.group == adapter.digest):
            self._callbacks.finish(failed(job, ErrorCode.ADAPTER_LOAD_FAILED, reason))

    def _fail_overdue(self, group: str, now: float) -> None:
        waiting_in = self._backlog.waiting_in(group)
        overdue = {each.job.key for each in waiting_in if self._cold_for(each, now) > self._waits.timeout_s}
        if not overdue:
            return
        last_error = self._last_error.get(group)
        for job in self._backlog.remove(lambda job: job.key in overdue):
            adapter = job.claim.adapter
            assert adapter is not None
            bound = f"{self._waits.timeout_s:g} s (LORAQ_ADAPTER_LOAD_TIMEOUT_S)"
            message = f"adapter '{adapter.name}@{adapter.version}' was not loaded within {bound}"
            code = ErrorCode.ADAPTER_LOAD_TIMEOUT
            self._callbacks.finish(failed(job, code, f"{message}: {last_error}" if last_error else message))

    def _cold_for(self, waiting: Waiting[Job], now: float) -> float:
        """Seconds that a job has waited for its adapter, parked time included."""
        job = waiting.job
        return now - (max(waiting.since, self._cold_since[job.group]) if job.cold_since is None else job.cold_since)

    def _park_waiting(self, group: str, now: float) -> None:
        """Park the jobs of a slow load. Jobs whose load has not begun wait in memory for their turn."""
        began = self._began.get(group)
        if began is None or now - began < self._waits.park_after_s:
            return
        cold_for_s = {each.job.key: self._cold_for(each, now) for each in self._backlog.waiting_in(group)}
        for job in self._backlog.remove(lambda job: job.group == group):
            waited_s = cold_for_s[job.key]
            delay_s = recheck_delay_s(waited_s, self._waits.timeout_s)
            self._callbacks.park(ParkRequest(job, "adapter", delay_s, waited_s))

    def forget(self, digest: str) -> None:
        """Load an adapter again for its waiting jobs: the engine reported that it does not have it."""
        self._residency.drop(digest)
        self._backlog.close(digest)
        self._release_directory(digest)

    def lost(self) -> None:
        """Forget all adapters: the engine was lost. Waiting times start again."""
        for task in self._loads.values():
            task.cancel()
        self._loads.clear()
        self._began.clear()
        for digest in self._residency.digests():
            self._backlog.close(digest)
            self._release_directory(digest)
        self._residency.clear()
        self._cold_since.clear()
        self._draining.clear()

    async def close(self) -> None:
        """Cancel running loads and release every directory."""
        running = [*self._loads.values(), *self._fetches.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for digest in list(self._on_disk):
            self._release_directory(digest)
        await asyncio.gather(*self._releases)
