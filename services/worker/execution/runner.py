"""Runs waiting jobs: feeds the engine, enforces timeouts, and recovers from an engine crash."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial

from engine import EngineError, Request
from schemas.common import ErrorCode, Lane, OverLimit, WaitReason
from services.adapters.versions import AdapterVersion
from services.process import telemetry
from services.worker.adapters.loads import Adapters
from services.worker.engine.bridge import EngineBridge
from services.worker.engine.protocol import Done, Finished, Refused, Status
from services.worker.execution.express import Express
from services.worker.execution.limits import Limits
from services.worker.execution.meters import count_started
from services.worker.execution.request import engine_request
from services.worker.execution.suspects import Suspects
from services.worker.jobs import BASE_GROUP, NO_TRIAL, Job, JobKey, Outcome, Phase, expired, failed
from services.worker.queue.backlog import Backlog, Demand, EngineView, Waiting
from services.worker.queue.demand import demand_of
from services.worker.queue.pace import Pace
from services.worker.queue.tenant_limits import Admission, LimitedTenants
from services.worker.store.decisions import MayStart

TICK_S = 0.1
CHECK_LIMITS_S = 1.0
MAX_EXPECTED = 256
"""How many adapters, needed next, are announced to the engine before their jobs."""
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class RunnerCallbacks:
    """`start` marks jobs as started and returns their attempts; `finish` accepts an outcome, `stale` a job that another
    worker owns, `retry` a job to run again after a delay, `park` a job that waits for its tenant's limit; `unpark` asks
    for such jobs."""

    start: Callable[[Sequence[Job]], Awaitable[dict[JobKey, int]]]
    finish: Callable[[Outcome], None]
    stale: Callable[[Job], None]
    retry: Callable[[Job], None]
    park: Callable[[Job], None]
    unpark: Callable[[], None]


class Runner:
    """Owns the jobs in the engine. `suspects` finds the job that crashed it, in trials without other jobs."""

    def __init__(
        self,
        limits: Limits,
        backlog: Backlog[Job],
        engine: EngineBridge,
        adapters: Adapters,
        pace: Pace,
        tenants: LimitedTenants,
        callbacks: RunnerCallbacks,
    ) -> None:
        self._limits = limits
        self._backlog = backlog
        self._engine = engine
        self._adapters = adapters
        self._pace = pace
        self._tenants = tenants
        self._callbacks = callbacks
        self._tickets: dict[JobKey, Waiting[Job]] = {}
        self._displaced: set[JobKey] = set()
        self._displaces: dict[JobKey, JobKey] = {}
        self._resident: Set[str] = frozenset()
        self._expected: Sequence[str] = ()
        self._running: dict[str, Job] = {}
        self._starting = 0
        self.suspects = Suspects[Job](lambda job: job.trial)
        self._on_trial = False
        self._generation = 0
        self._ids = itertools.count(1)
        self._wake = asyncio.Event()
        self._draining = False
        self._left = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Number of jobs in the engine or about to be submitted."""
        return len(self._running) + self._starting

    @property
    def resident(self) -> Set[str]:
        """Digests of the adapters in the engine's pages."""
        return self._resident

    @property
    def saturated(self) -> bool:
        """Whether as many jobs wait as the engine takes: a further one would wait for long."""
        return not self._engine.ready or len(self._backlog) >= self._limits.capacity

    def running_jobs(self) -> list[Job]:
        """The jobs in the engine."""
        return list(self._running.values())

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue newly claimed jobs."""
        now, wall = time.monotonic(), time.time()
        jobs = list(jobs)
        self._count_claimed(jobs)
        for job in jobs:
            self._isolate_last_attempt(job)
            self._admit(job, demand_of(job, self._pace.prefill_weight, now, wall), now)
        self._adapters.plan(now)
        self._wake.set()

    def _admit(self, job: Job, demand: Demand, now: float) -> None:
        """Queue a job, unless its tenant's limits leave no room for it in memory."""
        match self._tenants.admit(demand, now, was_parked=not job.places):
            case Admission.QUEUE:
                self._backlog.add(job, demand, now)
            case Admission.PARK:
                self._callbacks.park(job)
            case Admission.REFUSE:
                self._refuse_over_limit(job)

    def _refuse_over_limit(self, job: Job) -> None:
        self._callbacks.finish(failed(job, ErrorCode.LIMIT_EXCEEDED, self._tenants.refusal(job.key.tenant)))

    def _count_claimed(self, jobs: Sequence[Job]) -> None:
        for group, count in Counter(job.group for job in jobs).items():
            kind = "base" if group == BASE_GROUP else "warm" if self._adapters.is_loaded(group) else "cold"
            telemetry.JOBS_CLAIMED.labels(adapter=kind).inc(count)

    def wake(self) -> None:
        """Check whether jobs can start."""
        self._wake.set()

    def start_predicate(self) -> MayStart:
        """A predicate that is called once per job: whether it would start immediately, counting the jobs that wait."""
        fits = self._limits.capacity - self.num_running - len(self._backlog)
        room = iter(range(fits if self._may_start() and not self.suspects else 0))

        def may_start(tenant: str, adapter: AdapterVersion | None) -> bool:
            group = adapter.digest if adapter else BASE_GROUP
            may = self._tenants.starts_at_once(tenant) and self._backlog.is_open(group)
            return may and next(room, None) is not None

        return may_start

    async def drain(self) -> None:
        """Start no more jobs, and wait until the engine is empty."""
        self._draining = True
        while self.num_running:
            self._left.clear()
            await self._left.wait()

    def _notify(self) -> None:
        """Wake `feed` and `drain`: the number of running jobs may have changed."""
        self._wake.set()
        self._left.set()

    async def feed(self) -> None:
        """Start jobs as the engine has room, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while jobs := self._next_jobs():
                await self._start(jobs)
            self._expect()

    def _next_jobs(self) -> list[Job]:
        """The jobs to start now; suspects wait until the engine is empty and run alone."""
        if not self._may_start():
            return []
        if not self.suspects and (jobs := self._pop()):
            for job in jobs:
                self._adapters.acquire(job)
            self.suspects.add([job for job in jobs if job.trial])
            if others := [job for job in jobs if not job.trial]:
                return others
        self._on_trial = bool(self.suspects) and not self._running
        return self.suspects.next_trial() if self._on_trial else []

    def _pop(self) -> list[Job]:
        room = self._limits.capacity - len(self._running)
        if not self._backlog:
            return []
        if room <= 0:
            return self._pop_express()
        running = Counter(job.group for job in self._running.values())
        prefixes = {ticket.demand.prefix for ticket in self._tickets.values() if ticket.demand.prefix is not None}
        view = EngineView(running, self._resident, prefixes)
        now = time.monotonic()
        popped = self._backlog.pop(room, view, now, self._tenants.allows(now), partial(self._tenants.started, now=now))
        self._tickets.update((waiting.job.key, waiting) for waiting in popped)
        return [waiting.job for waiting in popped]

    def _pop_express(self) -> list[Job]:
        """A job that displaces a running one in a full engine, if there is one."""
        running = list(self._running.values())
        express = Express(self._limits.places, running, self._displaced, self._backlog.weight_of)
        if express.room <= 0:
            return []
        now = time.monotonic()
        within_limits = self._tenants.allows(now)
        popped = self._backlog.pop(
            1,
            now=now,
            allows=lambda demand: express.allows(demand) and within_limits(demand),
            started=partial(self._tenants.started, now=now),
        )
        for waiting in popped:
            victim = express.victim(waiting.demand)
            assert victim is not None, "`allows` checks that there is a job to displace"
            self._displaced.add(victim.key)
            self._displaces[waiting.job.key] = victim.key
            self._tickets[waiting.job.key] = waiting
        return [waiting.job for waiting in popped]

    def _victim_of(self, job: Job) -> str | None:
        """Id of the request whose place the job takes."""
        if (key := self._displaces.pop(job.key, None)) is None:
            return None
        return next((request_id for request_id, running in self._running.items() if running.key == key), None)

    def _settle(self, job: Job, finished: Finished | None = None) -> None:
        """Correct the charges of a job that left the engine to what it used; to 0 if it did not finish."""
        self._displaced.discard(job.key)
        self._displaces.pop(job.key, None)
        if (ticket := self._tickets.pop(job.key, None)) is None:
            return
        if finished is None:
            self._backlog.correct(ticket, 0.0)
            self._ended(ticket.demand, 0)
            return
        computed = finished.prompt_tokens - finished.cached_tokens
        cost = self._pace.prefill_weight * computed + finished.completion_tokens
        tokens = finished.prompt_tokens + finished.completion_tokens
        self._backlog.correct(ticket, tokens, cost)
        self._ended(ticket.demand, tokens)

    def _ended(self, demand: Demand, tokens: int) -> None:
        """Count a job that left the engine in its tenant's limits, and ask for the next one if it is parked."""
        now = time.monotonic()
        self._tenants.ended(demand, tokens, now)
        if self._tenants.wants_parked(demand.tenant, now):
            self._callbacks.unpark()

    def status(self, message: Status) -> None:
        """The engine reports its counts and the adapters in its pages."""
        self._resident = message.resident
        if self._pace.observe(message.stats):
            self._backlog.follow(self._pace.rules())

    def _expect(self) -> None:
        """Announce the adapters that waiting jobs need to the engine, so that it keeps them."""
        expected = [group for group in self._backlog.wanted() if group != BASE_GROUP][:MAX_EXPECTED]
        if expected != self._expected:
            self._expected = expected
            self._engine.expect(expected)

    def _may_start(self) -> bool:
        on_trial = self._on_trial and self.num_running
        return self._engine.ready and not self._draining and not on_trial

    async def _start(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.phase = Phase.RUNNING
        generation, self._starting = self._generation, len(jobs)
        uncounted = [job for job in jobs if not job.counted or job.request.deadline is not None]
        started = await self._callbacks.start(uncounted) if uncounted else {}
        self._starting = 0
        ready: list[Job] = []
        for job in jobs:
            if job.phase is not Phase.RUNNING:  # dropped meanwhile
                if generation == self._generation:
                    self._adapters.release(job)
            elif job.key in started:
                job.attempts, job.counted = started[job.key], False
                ready.append(job)
            elif job.counted and job.request.deadline is None:
                ready.append(job)
            else:
                if generation == self._generation:
                    self._adapters.release(job)
                self._not_started(job)
        if generation == self._generation:
            self._submit(ready)
        else:
            for job in ready:
                _uncharge(job)
            self._requeue(ready, "engine_lost")
        self._left.set()

    def _not_started(self, job: Job) -> None:
        """Its deadline passed by the database's clock, or another worker owns it: the fenced write decides."""
        self._settle(job)
        if job.request.deadline is not None:
            self._callbacks.finish(expired(job))
        else:
            self._callbacks.stale(job)

    def _submit(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        requests: list[Request] = []
        for job in jobs:
            if job.phase is not Phase.RUNNING:
                self._adapters.release(job)
                continue
            job.started_at = now
            if job.counted:
                job.attempts, job.counted = job.attempts + 1, False
            request_id = f"{next(self._ids)}"
            try:
                requests.append(engine_request(job, request_id, self._victim_of(job)))
            except EngineError as error:
                self._end(job, failed(job, ErrorCode.INVALID_MESSAGE, str(error)))
            else:
                self._running[request_id] = job
        count_started((job.lane, job.queue_s()) for job in jobs if job.started_at == now)
        if requests and self._engine.ready:
            self._engine.add(requests)  # otherwise the engine was just lost, and `lost` requeues them

    def _end(self, job: Job, outcome: Outcome) -> None:
        self._settle(job)
        self._adapters.release(job)
        self._callbacks.finish(outcome)

    def done(self, message: Done) -> None:
        """Process a step's results; those of dropped jobs are ignored."""
        for finished in message.finished:
            if (job := self._running.pop(finished.request_id, None)) is not None:
                self._settle(job, finished)
                self._end(job, self._limits.outcome(job, finished))
        for refused in message.refused:
            if (job := self._running.pop(refused.request_id, None)) is not None:
                self._refuse(job, refused)
        self._notify()

    def _refuse(self, job: Job, refused: Refused) -> None:
        match refused.why:
            case "prompt_too_long":
                self._end(job, failed(job, ErrorCode.PROMPT_TOO_LONG, refused.reason))
            case "invalid_request":
                self._end(job, failed(job, ErrorCode.INVALID_MESSAGE, refused.reason))
            case "unknown_adapter":
                self._adapters.forget(job.group)
                if not self._fail_if_exhausted(job, refused.reason):
                    self._requeue([job], "engine_failed")
            case "failed":
                self._settle(job)
                self._adapters.release(job)
                if not self._fail_if_exhausted(job, refused.reason):
                    telemetry.JOBS_REQUEUED.labels(reason="engine_failed").inc()
                    self._callbacks.retry(job)

    def _fail_if_exhausted(self, job: Job, reason: str) -> bool:
        """Fail a job whose attempts are exhausted; returns False while some are left."""
        if (outcome := self._limits.exhausted(job, reason)) is None:
            return False
        self._callbacks.finish(outcome)
        return True

    def _requeue(self, jobs: Sequence[Job], reason: str) -> None:
        now, wall = time.monotonic(), time.time()
        for job in reversed(jobs):
            self._settle(job)
            if job.phase is not Phase.COMPLETING:
                telemetry.JOBS_REQUEUED.labels(reason=reason).inc()
                job.phase = Phase.WAITING
                self._isolate_last_attempt(job)
                self._backlog.requeue(job, demand_of(job, self._pace.prefill_weight, now, wall), now)
        self._adapters.plan(now)
        self._notify()

    def _isolate_last_attempt(self, job: Job) -> None:
        """Run the last of several attempts alone: the job may have crashed the engine before."""
        if job.trial == NO_TRIAL and self._limits.last_of_several_is_next(job):
            job.trial = self.suspects.new_trial()

    def up(self) -> None:
        """An engine is ready, and empty."""
        self._resident, self._expected = frozenset(), ()
        self._pace.restart()
        self._adapters.plan(time.monotonic())
        self._notify()

    def lost(self, reason: str) -> None:
        """The engine has exited: requeue its jobs."""
        self._generation += 1
        self._adapters.lost()
        jobs, self._running = list(self._running.values()), {}
        self._requeue(self.suspects.remove(lambda _job: True), "engine_lost")
        if jobs:
            self._judge(jobs, reason)

    def _judge(self, jobs: Sequence[Job], reason: str) -> None:
        """Charge a job that ran alone; otherwise charge none and requeue the jobs in halves."""
        verdict = self.suspects.judge(jobs)
        for trial, half in reversed(verdict.again):
            for job in half:
                job.trial = trial
                _uncharge(job)
            self._requeue(half, "engine_lost")
        if verdict.charged is not None:
            self._settle(verdict.charged)
        if verdict.charged is not None and not self._fail_if_exhausted(verdict.charged, reason):
            verdict.charged.trial = self.suspects.new_trial()
            telemetry.JOBS_REQUEUED.labels(reason="engine_failed").inc()
            self._callbacks.retry(verdict.charged)

    def drop(self, jobs: Iterable[Job]) -> None:
        """Remove jobs from the backlog and the engine. Those removed from the engine are not charged an attempt."""
        jobs = list(jobs)
        for job in jobs:
            job.phase = Phase.COMPLETING
        gone = {id(job) for job in jobs}
        for job in jobs:
            self._settle(job)
        self._backlog.remove(lambda job: id(job) in gone)
        self._drop_suspects(gone)
        cancelled = [request_id for request_id, job in self._running.items() if id(job) in gone]
        for request_id in cancelled:
            job = self._running.pop(request_id)
            self._adapters.release(job)
            _uncharge(job)
        if cancelled:
            self._engine.cancel(cancelled)
            self._notify()

    def _drop_suspects(self, gone: set[int]) -> None:
        for job in self.suspects.remove(lambda job: id(job) in gone):
            self._adapters.release(job)

    async def tick(self) -> None:
        """Enforce timeouts and plan adapter loads periodically, until cancelled."""
        checked_at = time.monotonic()
        while True:
            now = time.monotonic()
            self._stop_overdue(now)
            self._adapters.plan(now)
            if self._tenants and self._backlog:
                self._wake.set()  # a limit may have room again
                if now - checked_at >= CHECK_LIMITS_S:
                    checked_at = now
                    self._check_limits(now)
            telemetry.BACKLOG_JOBS.set(len(self._backlog))
            telemetry.RUNNING_JOBS.set(len(self._running))
            await asyncio.sleep(TICK_S)

    def _check_limits(self, now: float) -> None:
        """End the wait in memory of jobs that their tenant's limit has held for long."""
        held: dict[tuple[str, Lane], list[Waiting[Job]]] = defaultdict(list)
        for reason, waiting in self._backlog.reasons(self._tenants.allows(now)):
            if reason is WaitReason.TENANT_LIMIT:
                held[waiting[0].demand.tenant, waiting[0].demand.lane] += waiting
        for (tenant, _), waiting in held.items():
            if overdue := self._tenants.overdue(tenant, waiting, now):
                self._give_up_waiting(tenant, {each.job.key for each in overdue})

    def _give_up_waiting(self, tenant: str, keys: Set[JobKey]) -> None:
        refuses = self._tenants.limits_of(tenant).over_limit is OverLimit.REFUSE
        for job in self._backlog.remove(lambda job: job.key in keys):
            self._refuse_over_limit(job) if refuses else self._callbacks.park(job)

    def _stop_overdue(self, now: float) -> None:
        overdue = {request_id: job for request_id, job in self._running.items() if self._limits.is_overdue(job, now)}
        if not overdue:
            return
        self._engine.cancel(overdue)
        for request_id, job in overdue.items():
            del self._running[request_id]
            self._end(job, self._limits.timed_out(job))
        self._notify()


def _uncharge(job: Job) -> None:
    """Do not charge the latest attempt: the one that the database counted becomes the next one."""
    if not job.counted:
        job.attempts, job.counted = job.attempts - 1, True
