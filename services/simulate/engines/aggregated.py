"""The engine from one completion to the next, for fleets: no step is planned on its own. Pure.

What is coarser than `stepwise.py`: a job's KV pages are reserved whole when it starts, so nothing is preempted; a
prompt is computed in a step of its own together with the rows that decode; and idle adapters are evicted least recently
used first, those that no waiting job needs before the others, whichever of these is needed soonest.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Set

from services.simulate.engines.costs import Work
from services.simulate.engines.model import Counts, EngineModel, SimulatedJob
from services.simulate.engines.tiers import Tiers

LOOK_AHEAD = 64
"""Waiting jobs considered at once, and how often others may start before one that has no room for its adapter."""


class _Adapter:
    __slots__ = ("num_pages", "ready_at", "rows", "users")

    def __init__(self, num_pages: int, ready_at: float) -> None:
        self.num_pages = num_pages
        self.ready_at = ready_at
        self.users = 0
        self.rows = 0


class AggregatedEngine:
    """`is_wanted` is whether the worker's queue has a job of that adapter."""

    def __init__(self, model: EngineModel, tiers: Tiers, is_wanted: Callable[[str], bool]) -> None:
        self._model, self._is_wanted = model, is_wanted
        self.tiers = tiers
        self._free = model.num_pages
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()
        self._waiting: deque[SimulatedJob] = deque()
        self._loading: list[tuple[float, int, SimulatedJob]] = []
        self._rows: list[tuple[int, int, SimulatedJob]] = []
        self._step = 0
        self._context = 0.0
        self._row_adapters = 0
        self._row_pages = 0
        self._passed = 0
        self.running: dict[str, int] = {}
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loading) + len(self._rows)

    def resident(self) -> Set[str]:
        """See `SimulatedEngine.resident`."""
        return self._adapters.keys()

    def expect(self, adapters: Iterable[str]) -> None:
        """See `SimulatedEngine.expect`: `is_wanted` takes its place."""

    def add(self, job: SimulatedJob) -> None:
        """See `SimulatedEngine.add`."""
        self.running[job.group] = self.running.get(job.group, 0) + 1
        self._waiting.append(job)

    def is_loaded(self, name: str, now: float) -> bool:
        """Whether an adapter is in its pages."""
        adapter = self._adapters.get(name)
        return adapter is not None and adapter.ready_at <= now

    def advance(self, now: float, until: float) -> tuple[float, list[SimulatedJob]]:
        """See `SimulatedEngine.advance`."""
        prompts = self._start_loaded(now)
        prompts += self._start_waiting(now)
        if prompts:
            return self._prefill(now, prompts)
        if not self._rows:
            assert self._loading or until < math.inf, "the engine's jobs wait for nothing"
            return max(now, min(until, self._loading[0][0] if self._loading else until)), []
        return self._decode(now, until)

    def _start_loaded(self, now: float) -> int:
        """Start the jobs whose adapters have arrived; returns their prompt tokens."""
        tokens = 0
        while self._loading and self._loading[0][0] <= now and len(self._rows) < self._model.batch:
            tokens += self._start(heapq.heappop(self._loading)[2])
        return tokens

    def _start_waiting(self, now: float) -> int:
        """Start waiting jobs, oldest first, and the loads of those whose adapters are missing."""
        tokens = 0
        skipped: list[SimulatedJob] = []
        while self._waiting and len(skipped) < LOOK_AHEAD and len(self._rows) < self._model.batch:
            job = self._waiting.popleft()
            if not self._reserve(job, now):
                skipped.append(job)
                if self._passed > LOOK_AHEAD:
                    break
                continue
            self._passed = self._passed + 1 if skipped else 0
            adapter = self._adapters.get(job.group)
            if adapter is None or adapter.ready_at <= now:
                tokens += self._start(job)
            else:
                heapq.heappush(self._loading, (adapter.ready_at, job.index, job))
        self._waiting.extendleft(reversed(skipped))
        return tokens

    def _kv_pages(self, job: SimulatedJob) -> int:
        return self._model.pages.pages_for(job.prompt + job.output)

    def _reserve(self, job: SimulatedJob, now: float) -> bool:
        """Take pages for a job and its adapter; False if jobs inside leave no room."""
        group, kv_pages = job.group, self._kv_pages(job)
        adapter = self._adapters.get(group) if group else None
        missing = kv_pages + (job.num_pages if group and adapter is None else 0) - self._free
        if missing > 0 and not self._evict(missing, group):
            return False
        self._free -= kv_pages
        if not group:
            return True
        if adapter is None:
            num_bytes = job.num_pages * self._model.pages.bytes_per_page
            adapter = self._adapters[group] = _Adapter(job.num_pages, self.tiers.fetch(group, num_bytes, now))
            self._free -= job.num_pages
            self.counts.loads += 1
            self.counts.load_bytes += num_bytes
        adapter.users += 1
        self._adapters.move_to_end(group)
        return True

    def _evict(self, missing: int, keep: str) -> bool:
        """Free pages of idle adapters, those first that no waiting job needs."""
        idle = [name for name, adapter in self._adapters.items() if not adapter.users and name != keep]
        victims: list[str] = []
        for name in sorted(idle, key=lambda each: each in self.running or self._is_wanted(each)):
            victims.append(name)
            missing -= self._adapters[name].num_pages
            if missing <= 0:
                break
        if missing > 0:
            return False
        for name in victims:
            self._free += self._adapters.pop(name).num_pages
        return True

    def _start(self, job: SimulatedJob) -> int:
        """The job decodes from the next step on; returns its prompt tokens."""
        heapq.heappush(self._rows, (self._step + job.output, job.index, job))
        self._context += job.prompt
        adapter = self._adapters.get(job.group)
        if adapter is not None:
            adapter.rows += 1
            if adapter.rows == 1:
                self._row_adapters += 1
                self._row_pages += adapter.num_pages
        return job.prompt

    def _prefill(self, now: float, tokens: int) -> tuple[float, list[SimulatedJob]]:
        """Steps that compute these prompt tokens, while the other rows decode one token each."""
        num_steps = max(1, math.ceil(tokens / self._model.batch_tokens))
        rows = len(self._rows)
        each = Work(tokens // num_steps, rows, self._adapter_bytes, self._context)
        return self._elapsed(now, num_steps, 1, each)

    @property
    def _adapter_bytes(self) -> float:
        return self._row_pages * self._model.pages.bytes_per_page

    def _decode(self, now: float, until: float) -> tuple[float, list[SimulatedJob]]:
        """Steps until a row ends, or until something else happens."""
        rows = len(self._rows)
        num_steps = self._rows[0][0] - self._step
        work = Work(0, rows, self._adapter_bytes, self._context + rows * num_steps / 2)
        seconds = self._model.costs.seconds(work)
        if self._loading and rows < self._model.batch:
            until = min(until, self._loading[0][0])
        if until < now + num_steps * seconds:
            num_steps = max(1, math.ceil((until - now) / seconds))
        return self._elapsed(now, num_steps, num_steps, work)

    def _elapsed(self, now: float, num_steps: int, decoded: int, work: Work) -> tuple[float, list[SimulatedJob]]:
        """Count steps of the same work, of which `decoded` gave every row a token."""
        seconds = num_steps * self._model.costs.seconds(work)
        counts, tokens = self.counts, decoded * work.rows
        counts.steps += num_steps
        counts.busy_s += seconds
        counts.prefill_tokens += num_steps * work.prefill_tokens
        counts.decode_tokens += tokens
        counts.adapters += num_steps * self._row_adapters
        counts.adapter_bytes += num_steps * work.adapter_bytes
        if not work.prefill_tokens:
            counts.decode_only_s += seconds
            counts.decode_only_tokens += tokens
        self._step += decoded
        self._context += tokens
        finished: list[SimulatedJob] = []
        while self._rows and self._rows[0][0] <= self._step:
            finished.append(self._finish(heapq.heappop(self._rows)[2]))
        return now + seconds, finished

    def _finish(self, job: SimulatedJob) -> SimulatedJob:
        self._free += self._kv_pages(job)
        self._context -= job.prompt + job.output
        self.running[job.group] -= 1
        if not self.running[job.group]:
            del self.running[job.group]
        if (adapter := self._adapters.get(job.group)) is not None:
            adapter.users -= 1
            adapter.rows -= 1
            if not adapter.rows:
                self._row_adapters -= 1
                self._row_pages -= adapter.num_pages
        return job
