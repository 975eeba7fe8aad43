"""The engine step by step: its own scheduler, page pool and residency, with seconds of a cost model. Pure."""

import heapq
from collections.abc import Iterable
from typing import cast

from engine.memory.pool import AdapterPages, PagePool
from engine.memory.residency import Residency
from engine.scheduling.scheduler import Scheduler, Slice
from engine.scheduling.sequence import Sequence
from engine.types import AdapterName, RequestId, SamplingParams
from services.simulate.engines.costs import Work
from services.simulate.engines.model import Counts, EngineModel, SimulatedJob
from services.simulate.engines.tiers import Tiers


class StepwiseEngine:
    """Every step is planned by the engine's scheduler."""

    def __init__(self, model: EngineModel, tiers: Tiers) -> None:
        self._model = model
        self.tiers = tiers
        pool = PagePool(model.num_pages)
        self._residency = Residency(pool)
        tokens = model.pages.tokens_per_page
        self._scheduler = Scheduler(pool, self._residency, tokens, model.batch, model.batch_tokens, prefix_cache=False)
        self._jobs: dict[RequestId, SimulatedJob] = {}
        self._num_pages: dict[str, int] = {}
        self._loading: list[tuple[float, AdapterName]] = []
        self.running: dict[str, int] = {}
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._jobs)

    def resident(self) -> set[str]:
        """See `SimulatedEngine.resident`."""
        return {owner.name for owner in self._residency.adapters}

    def expect(self, adapters: Iterable[str]) -> None:
        """See `SimulatedEngine.expect`."""
        self._scheduler.expect(map(AdapterName, adapters))

    def add(self, job: SimulatedJob) -> None:
        """See `SimulatedEngine.add`."""
        request_id = RequestId(str(job.index))
        sequence = Sequence(
            request_id,
            cast("tuple[int, ...]", range(job.prompt)),  # only its length is used: there is no prefix cache
            SamplingParams(max_tokens=job.output),
            AdapterName(job.group) if job.group else None,
            seed=0,
            adapter_num_pages=job.num_pages,
        )
        self._jobs[request_id] = job
        self._num_pages[job.group] = job.num_pages
        self.running[job.group] = self.running.get(job.group, 0) + 1
        self._scheduler.add(sequence)

    def advance(self, now: float, until: float) -> tuple[float, list[SimulatedJob]]:
        """See `SimulatedEngine.advance`: one step, or the wait for a load."""
        self._receive(now)
        plan = self._scheduler.plan()
        num_bytes = sum(self._load(name, now) for name in plan.loads)
        if not plan.slices:
            assert self._loading or until < float("inf"), "the engine's jobs wait for nothing"
            return max(now, min(until, self._loading[0][0] if self._loading else until)), []
        return self._compute(now, plan.slices, num_bytes)

    def _receive(self, now: float) -> None:
        while self._loading and self._loading[0][0] <= now:
            self._scheduler.load_finished(heapq.heappop(self._loading)[1])

    def _load(self, name: AdapterName, now: float) -> float:
        num_bytes = self._num_pages[name] * self._model.pages.bytes_per_page
        heapq.heappush(self._loading, (self.tiers.fetch(name, num_bytes, now), name))
        self.counts.loads += 1
        self.counts.load_bytes += num_bytes
        return num_bytes

    def _compute(self, now: float, slices: list[Slice], load_bytes: float) -> tuple[float, list[SimulatedJob]]:
        work = self._work(slices, load_bytes)
        seconds = self._model.costs.seconds(work)
        finished: list[SimulatedJob] = []
        for part in slices:
            is_last = part.is_last
            self._scheduler.computed(part)
            if is_last:
                part.sequence.output_ids.append(0)
                if part.sequence.num_tokens == part.sequence.max_tokens:
                    finished.append(self._finish(part.sequence))
        self._count(work, seconds, len({part.sequence.adapter for part in slices} - {None}))
        return now + seconds, finished

    def _work(self, slices: list[Slice], load_bytes: float) -> Work:
        rows = sum(part.num_tokens == 1 for part in slices)
        pages = {part.sequence.adapter: part.sequence.adapter_num_pages for part in slices}
        return Work(
            sum(part.num_tokens for part in slices) - rows,
            rows,
            sum(pages.values()) * self._model.pages.bytes_per_page,
            sum(part.sequence.num_computed for part in slices),
            load_bytes,
        )

    def _count(self, work: Work, seconds: float, num_adapters: int) -> None:
        counts = self.counts
        counts.steps += 1
        counts.busy_s += seconds
        counts.prefill_tokens += work.prefill_tokens
        counts.decode_tokens += work.rows
        counts.adapters += num_adapters
        counts.adapter_bytes += work.adapter_bytes
        if not work.prefill_tokens:
            counts.decode_only_s += seconds
            counts.decode_only_tokens += work.rows

    def _finish(self, sequence: Sequence) -> SimulatedJob:
        self._scheduler.remove(sequence)
        job = self._jobs.pop(sequence.request_id)
        self.running[job.group] -= 1
        if not self.running[job.group]:
            del self.running[job.group]
        return job

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free or owned once, and only adapters have pages when idle."""
        assert self._jobs or self._residency.num_available == self._model.num_pages or self._loading

    def is_loaded(self, name: str) -> bool:
        """Whether an adapter is in its pages."""
        owner = AdapterPages(AdapterName(name))
        return owner in self._residency and owner.name not in self._scheduler.loading
