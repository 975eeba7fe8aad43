"""One worker in simulated time: arrivals, backlog, staging and engine. Pure: no clock, no I/O."""

import math
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from schemas.common import Lane
from services.simulate.engines.aggregated import AggregatedEngine
from services.simulate.engines.model import EngineModel, SimulatedEngine, SimulatedJob
from services.simulate.engines.stepwise import StepwiseEngine
from services.simulate.engines.tiers import Tier, Tiers
from services.simulate.overtakes import PassedTokens
from services.simulate.policies import Policy
from services.simulate.staging import Staging, StagingModel
from services.worker.queue.backlog import Backlog, Demand, EngineView, Waiting

LANES = tuple(Lane)
MAX_EXPECTED = 256
READER_THREADS = 2
PACE_STEPS = 64
"""Steps after which the pace is looked at again."""


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker. `window` is LORAQ_MAX_BACKLOG_JOBS; `tiers` are those of adapters, the last of which has everything.

    Without `staging` every group is open, as in an engine that knows all adapters.
    """

    engine: EngineModel
    tiers: tuple[Tier, ...]
    window: int = 512
    staging: StagingModel | None = None
    is_aggregated: bool = False


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of one worker in order of arrival; `group` is empty for the base model."""

    at_s: Sequence[float]
    group: Sequence[str]
    tenant: Sequence[str]
    lane: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(slots=True)
class Served:
    """What became of one worker's jobs, by their place in the order of arrival; times in seconds.

    `passed_tokens` is the most that a job was passed by while its group was open, by lane.
    """

    handed_at: list[float]
    finished_at: list[float]
    was_cold: list[bool]
    end_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    rows: int = 0
    adapters: int = 0
    adapter_bytes: float = 0.0
    prefill_tokens: int = 0
    loads: int = 0
    load_bytes: float = 0.0
    tier_hits: dict[str, int] = field(default_factory=dict)
    tier_bytes: dict[str, float] = field(default_factory=dict)
    passed_tokens: dict[str, float] = field(default_factory=dict)


class Worker:
    """Serves all its jobs; `rank_of` gives an adapter's rank."""

    def __init__(self, model: WorkerModel, policy: Policy, jobs: Jobs, rank_of: dict[str, int]) -> None:
        self._model, self._policy, self._jobs = model, policy, jobs
        shape, pages = model.engine.shape, model.engine.pages
        self._pages = {group: shape.adapter_pages(rank, pages) for group, rank in rank_of.items()}
        tiers = Tiers(model.tiers, READER_THREADS)
        self._pace = policy.pace()
        rules = policy.rules if self._pace is None else self._pace.rules()
        self._backlog = Backlog[SimulatedJob](model.window + len(LANES), rules)
        self._waiting_groups: dict[str, int] = {}
        self._engine: SimulatedEngine = (
            AggregatedEngine(model.engine, tiers, self._waiting_groups.__contains__)
            if model.is_aggregated
            else StepwiseEngine(model.engine, tiers)
        )
        self._staging = self._make_staging(tiers)
        self._passed = PassedTokens()
        self._inside: dict[int, Waiting[SimulatedJob]] = {}
        self._queues = self._by_lane()
        self._room = {lane: max(1, model.window // max(1, len(self._queues))) for lane in self._queues}
        self._paced_steps = 0
        self._served = Served([0.0] * len(jobs), [0.0] * len(jobs), [False] * len(jobs))

    def _make_staging(self, tiers: Tiers) -> Staging | None:
        if self._model.staging is None:
            for group in self._pages:
                self._backlog.open(group)
            return None
        page = self._model.engine.pages.bytes_per_page
        return Staging(
            self._model.staging, tiers, self._backlog, {group: count * page for group, count in self._pages.items()}
        )

    def _by_lane(self) -> dict[int, deque[int]]:
        queues: dict[int, deque[int]] = {}
        for index, lane in enumerate(self._jobs.lane):
            queues.setdefault(lane, deque()).append(index)
        return queues

    def run(self) -> Served:
        """Serve every job; returns what became of them."""
        now = 0.0
        for now, finished in self._turns():
            for job in finished:
                self._settle(job, now)
        return self._report(now)

    def _turns(self) -> Iterator[tuple[float, list[SimulatedJob]]]:
        now = 0.0
        while True:
            self._accept(now)
            if self._staging is not None:
                self._stage(self._staging, now)
            self._hand_over(now)
            until = self._next_event(now)
            if self._inside:
                now, finished = self._engine.advance(now, until)
                yield now, finished
            elif until == math.inf:
                assert not len(self._backlog), "jobs wait and nothing can change that"
                return
            else:
                now = until
                yield now, []

    def _accept(self, now: float) -> None:
        """Move the jobs that have arrived into the backlog, each lane within its bound."""
        jobs = self._jobs
        for lane, queue in self._queues.items():
            while queue and self._room[lane] and jobs.at_s[queue[0]] <= now:
                self._add(queue.popleft(), lane, now)

    def _add(self, index: int, lane: int, now: float) -> None:
        jobs = self._jobs
        group, prompt, output = jobs.group[index], jobs.prompt[index], jobs.output[index]
        job = SimulatedJob(index, group, lane, prompt, output, self._pages[group] if group else 0)
        cost = None if self._pace is None else self._pace.prefill_weight * prompt + output
        self._backlog.add(job, Demand(LANES[lane], jobs.tenant[index], group, prompt + output, cost), now)
        self._waiting_groups[group] = self._waiting_groups.get(group, 0) + 1
        self._room[lane] -= 1
        self._passed.arrive(LANES[lane], jobs.tenant[index], index, is_open=self._backlog.is_open(group))

    def _stage(self, staging: Staging, now: float) -> None:
        staging.plan(now)
        for group in staging.closed:
            for waiting in self._backlog.waiting_in(group):
                self._passed.exempt(waiting.demand.lane, waiting.demand.tenant, waiting.job.index)
        staging.closed.clear()

    def _hand_over(self, now: float) -> None:
        engine = self._engine
        room = self._model.engine.capacity - len(engine)
        if room <= 0 or not len(self._backlog):
            return
        resident = engine.resident()
        for waiting in self._backlog.pop(room, self._view(resident), now):
            job, demand = waiting.job, waiting.demand
            job.handed_at = now
            job.was_cold = bool(job.group) and job.group not in resident
            self._inside[job.index] = waiting
            self._room[job.lane] += 1
            self._forget_waiting(job.group)
            self._passed.admit(demand.lane, demand.tenant, job.index, demand.tokens)
            if self._staging is not None:
                self._staging.acquire(job.group)
            engine.add(job)
        if self._policy.looks_ahead and not self._model.is_aggregated:
            engine.expect([group for group in self._backlog.wanted() if group][:MAX_EXPECTED])

    def _view(self, resident: Set[str]) -> EngineView:
        """What is where, as far as a waiting job could use it."""
        if not self._policy.affine:
            return EngineView()
        return EngineView(self._engine.running, resident & self._waiting_groups.keys())

    def _forget_waiting(self, group: str) -> None:
        self._waiting_groups[group] -= 1
        if not self._waiting_groups[group]:
            del self._waiting_groups[group]

    def _next_event(self, now: float) -> float:
        """When something happens that the engine has to stop for: an arrival that could start, a staged adapter."""
        if len(self._engine) >= self._model.engine.capacity:
            return math.inf
        arrivals = (self._jobs.at_s[queue[0]] for lane, queue in self._queues.items() if queue and self._room[lane])
        staged = self._staging.next_at if self._staging is not None else math.inf
        return max(now, min(min(arrivals, default=math.inf), staged))

    def _settle(self, job: SimulatedJob, now: float) -> None:
        waiting = self._inside.pop(job.index)
        self._backlog.correct(waiting, waiting.demand.tokens, waiting.demand.cost)
        if self._staging is not None:
            self._staging.release(job.group)
        served = self._served
        served.handed_at[job.index], served.finished_at[job.index] = job.handed_at, now
        served.was_cold[job.index] = job.was_cold
        if self._pace is not None and self._engine.counts.steps - self._paced_steps >= PACE_STEPS:
            self._paced_steps = self._engine.counts.steps
            if self._pace.observe(self._engine.counts.stats()):
                self._backlog.follow(self._pace.rules())

    def _report(self, now: float) -> Served:
        served, counts, tiers = self._served, self._engine.counts, self._engine.tiers
        served.end_s, served.busy_s, served.steps = now, counts.busy_s, counts.steps
        served.rows, served.adapters, served.adapter_bytes = counts.decode_tokens, counts.adapters, counts.adapter_bytes
        served.prefill_tokens = counts.prefill_tokens
        served.loads, served.load_bytes = counts.loads, counts.load_bytes
        served.tier_hits, served.tier_bytes = tiers.hits, tiers.num_bytes
        served.passed_tokens = self._passed.most()
        return served
