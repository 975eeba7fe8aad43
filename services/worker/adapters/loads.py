"""Brings adapters into the engine while others run: which to load next, which to evict, and what fails with them."""

import asyncio
import time
from collections.abc import Callable
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
from services.worker.queue.parking_store import Ticket
from services.worker.queue.retry_policy import recheck_delay_s

MAX_LOADS = 4
PATIENCE_S = 1.0
RETRY_DELAYS_S = (0.2, 1.0, 2.0, 5.0)
_log = telemetry.get_logger()


class HoldsAdapters(Protocol):
    """The part of the stager that is needed here."""

    def hold(self, digest: str, uri: str, size_bytes: int) -> AbstractAsyncContextManager[Path]:
        """The adapter's directory on disk, kept there inside the block."""


class LoadsAdapters(Protocol):
    """The part of the engine bridge that is needed here."""

    ready: bool

    async def load(self, digest: str, path: Path) -> int:
        """Load from a directory; returns bytes in memory."""

    def unload(self, digest: str) -> None:
        """Drop it."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a job waits for its adapter: in memory while it is being loaded, and in all."""

    park_after_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Whom adapters tell: a job ended; one waits too long to stay here; what became of an adapter is known; jobs of
    another group may start; a defect."""

    finish: Callable[[Outcome], None]
    park: Callable[[Ticket], None]
    known: Callable[[str], None]
    opened: Callable[[], None]
    crashed: Callable[[BaseException], None]


class Adapters:
    """Owner of the adapters in the engine."""

    def __init__(
        self,
        stager: HoldsAdapters,
        engine: LoadsAdapters,
        backlog: Backlog[Job],
        budget_bytes: int,
        waits: Waits,
        tell: Tell,
    ) -> None:
        self._stager = stager
        self._engine = engine
        self._backlog = backlog
        self._residency = Residency(budget_bytes)
        self._waits = waits
        self._tell = tell
        self._began: dict[str, float] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._cold_since: dict[str, float] = {}
        self._trouble: dict[str, str] = {}
        self._draining: set[str] = set()
        self._on_disk: dict[str, AsyncExitStack] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def use(self, job: Job) -> None:
        """The job goes to the engine."""
        if job.group != BASE_GROUP:
            self._residency.use(job.group)

    def leave(self, job: Job) -> None:
        """The job left the engine."""
        if job.group != BASE_GROUP:
            self._residency.leave(job.group)

    def plan(self, now: float) -> None:
        """Start the loads that are due, make room for them, and give up on jobs that waited too long."""
        if not self._engine.ready:
            return
        cold = [group for group, _ in self._backlog.closed_groups(now) if not self._residency.is_loaded(group)]
        self._cold_since = {group: self._cold_since.get(group, now) for group in cold}
        drain: set[str] = set()
        for group in cold:
            self._give_up_late(group, now)
            self._park_long(group, now)
            if group not in self._residency and len(self._loads) < MAX_LOADS:
                drain |= self._begin(group, now)
        self._drain(drain)

    def _begin(self, group: str, now: float) -> set[str]:
        """Start loading an adapter if there is room; returns the adapters that must be drained for it."""
        waiting = next(self._backlog.waiting_in(group), None)
        if waiting is None:
            return set()
        adapter = waiting.job.grant.adapter
        assert adapter is not None
        if adapter.size_bytes > self._residency.budget_bytes:
            budget = f"LORAQ_HOST_CACHE_BYTES, {self._residency.budget_bytes}"
            self._fail(adapter, f"it has {adapter.size_bytes} bytes, more than {budget}")
            return set()
        wanted = self._backlog.groups()
        urgent = now - self._cold_since[group] > PATIENCE_S
        room = self._residency.reserve(group, adapter.size_bytes, wanted, urgent=urgent)
        for victim in room.evict:
            self._evict(victim)
        if room.granted:
            task = asyncio.create_task(self._load(adapter), name=f"load {group[:12]}")
            task.add_done_callback(self._on_load_done)
            self._loads[group] = task
            self._began[group] = now
        return set(room.drain)

    def _on_load_done(self, task: asyncio.Task[None]) -> None:
        """A load ends by itself whatever happens to the adapter; an error that gets here is a defect."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell.crashed(error)

    def _evict(self, digest: str) -> None:
        telemetry.ADAPTER_EVICTIONS.labels(tier="host").inc()
        self._backlog.close(digest)
        self._draining.discard(digest)
        self._engine.unload(digest)
        self._release(digest)

    def _drain(self, drain: set[str]) -> None:
        """Start no more jobs with these, and again with those that are no longer in anyone's way."""
        for digest in drain - self._draining:
            self._backlog.close(digest)
        for digest in self._draining - drain:
            if self._residency.is_loaded(digest):
                self._open(digest)
        self._draining = drain

    async def _load(self, adapter: AdapterVersion) -> None:
        began = time.monotonic()
        try:
            num_bytes = await self._load_often(adapter)
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
                self._tell.known(adapter.digest)

    async def _load_often(self, adapter: AdapterVersion) -> int:
        """Fetch and load until it works or every job that wanted it has given up."""
        attempt = 0
        while True:
            try:
                return await self._hold_and_load(adapter)
            except EngineLostError:
                raise
            except RetryableError as error:
                self._trouble[adapter.digest] = str(error)
                if next(self._backlog.waiting_in(adapter.digest), None) is None:
                    raise PermanentError(str(error)) from error
            await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)])
            attempt += 1

    async def _hold_and_load(self, adapter: AdapterVersion) -> int:
        """Keep the directory on disk for as long as the engine has the adapter: it may have to read it again."""
        async with AsyncExitStack() as stack:
            holding = self._stager.hold(adapter.digest, adapter.uri, adapter.size_bytes)
            num_bytes = await self._engine.load(adapter.digest, await stack.enter_async_context(holding))
            self._release(adapter.digest)
            self._on_disk[adapter.digest] = stack.pop_all()
        return num_bytes

    def _release(self, digest: str) -> None:
        if (stack := self._on_disk.pop(digest, None)) is not None:
            task = asyncio.create_task(stack.aclose(), name=f"release {digest[:12]}")
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def _loaded(self, digest: str, num_bytes: int) -> None:
        self._residency.loaded(digest, num_bytes)
        telemetry.ADAPTER_BYTES.labels(tier="host").set(self._residency.used_bytes)
        self._trouble.pop(digest, None)
        now, cold_since = time.monotonic(), self._cold_since.pop(digest, 0.0)
        for waiting in self._backlog.waiting_in(digest):
            waiting.job.load_s += now - max(waiting.since, cold_since)
        self._open(digest)

    def _open(self, digest: str) -> None:
        self._backlog.open(digest)
        self._tell.opened()

    def _fail(self, adapter: AdapterVersion, reason: str) -> None:
        """End every job that waits for it: the next one will try again."""
        reason = f"adapter '{adapter.name}@{adapter.version}' cannot be loaded: {reason}"
        _log.warning("Adapter cannot be loaded", action="adapter_load_failed", digest=adapter.digest, reason=reason)
        for job in self._backlog.remove(lambda job: job.group == adapter.digest):
            self._tell.finish(failed(job, ErrorCode.ADAPTER_LOAD_FAILED, reason))

    def _give_up_late(self, group: str, now: float) -> None:
        waiting_in = self._backlog.waiting_in(group)
        late = {each.job.key for each in waiting_in if self._cold_for(each, now) > self._waits.timeout_s}
        if not late:
            return
        trouble = self._trouble.get(group)
        for job in self._backlog.remove(lambda job: job.key in late):
            adapter = job.grant.adapter
            assert adapter is not None
            bound = f"{self._waits.timeout_s:g} s (LORAQ_ADAPTER_LOAD_TIMEOUT_S)"
            message = f"adapter '{adapter.name}@{adapter.version}' did not arrive within {bound}"
            code = ErrorCode.ADAPTER_LOAD_TIMEOUT
            self._tell.finish(failed(job, code, f"{message}: {trouble}" if trouble else message))

    def _cold_for(self, waiting: Waiting[Job], now: float) -> float:
        """Seconds that a job has waited for its adapter, being parked included."""
        job = waiting.job
        return now - (max(waiting.since, self._cold_since[job.group]) if job.cold_since is None else job.cold_since)

    def _park_long(self, group: str, now: float) -> None:
        """While a load takes long its jobs stand in nobody's way; one that waits for room waits here for its turn."""
        began = self._began.get(group)
        if began is None or now - began < self._waits.park_after_s:
            return
        cold_for_s = {each.job.key: self._cold_for(each, now) for each in self._backlog.waiting_in(group)}
        for job in self._backlog.remove(lambda job: job.group == group):
            waited_s = cold_for_s[job.key]
            delay_s = recheck_delay_s(waited_s, self._waits.timeout_s)
            self._tell.park(Ticket(job, "adapter", delay_s, waited_s))

    def forget(self, digest: str) -> None:
        """The engine says that it does not have it: load it again for the jobs that wait."""
        self._residency.drop(digest)
        self._backlog.close(digest)
        self._release(digest)

    def lost(self) -> None:
        """The engine was lost, and everything in it; waiting for an adapter starts anew."""
        for task in self._loads.values():
            task.cancel()
        self._loads.clear()
        self._began.clear()
        for digest in self._residency.digests():
            self._backlog.close(digest)
            self._release(digest)
        self._residency.clear()
        self._cold_since.clear()
        self._draining.clear()

    async def close(self) -> None:
        """Abandon the loads that are under way and let go of every directory."""
        running = list(self._loads.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for digest in list(self._on_disk):
            self._release(digest)
        await asyncio.gather(*self._releases)
