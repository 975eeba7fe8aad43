"""From waiting jobs to outcomes: feeds the engine, bounds running times, and survives the engine's loss."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from engine import EngineError, Request
from schemas.common import ErrorCode
from services.adapters.versions import AdapterVersion
from services.process import telemetry
from services.worker.adapters.loads import Adapters
from services.worker.engine.bridge import EngineBridge
from services.worker.engine.protocol import Done, Refused
from services.worker.execution.limits import Limits
from services.worker.execution.meters import count_started
from services.worker.execution.request import engine_request
from services.worker.execution.suspects import Suspects
from services.worker.jobs import BASE_GROUP, NO_TRIAL, Job, JobKey, Outcome, Phase, expired, failed
from services.worker.queue.backlog import Backlog
from services.worker.store.decisions import MayStart

TICK_S = 0.1
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Desk:
    """Whom the runner asks and tells: mark jobs as started, take an outcome, take a job that is another worker's, bring
    a job back for its next attempt after a while."""

    start: Callable[[Sequence[Job]], Awaitable[dict[JobKey, int]]]
    finish: Callable[[Outcome], None]
    stale: Callable[[Job], None]
    retry: Callable[[Job], None]


class Runner:
    """Owner of the jobs in the engine. Which of them ended it is found by `suspects`, in trials without others."""

    def __init__(
        self, limits: Limits, backlog: Backlog[Job], engine: EngineBridge, adapters: Adapters, desk: Desk
    ) -> None:
        self._limits = limits
        self._backlog = backlog
        self._engine = engine
        self._adapters = adapters
        self._desk = desk
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
        """Jobs that the engine has, or is about to get."""
        return len(self._running) + self._starting

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue jobs that were just taken."""
        now = time.monotonic()
        for job in jobs:
            self._set_apart(job)
            self._backlog.add(job, job.lane, job.group, now)
        self._adapters.plan(now)
        self._wake.set()

    def wake(self) -> None:
        """Something changed that may let jobs start."""
        self._wake.set()

    def starter(self) -> MayStart:
        """Answers for one job after another whether it would start at once: for as many as fit with those that wait."""
        fits = self._limits.capacity - self.num_running - len(self._backlog)
        room = iter(range(fits if self._may_take() and not self.suspects else 0))

        def may_start(adapter: AdapterVersion | None) -> bool:
            group = adapter.digest if adapter else BASE_GROUP
            return self._backlog.is_open(group) and next(room, None) is not None

        return may_start

    async def drain(self) -> None:
        """Start no more jobs, and wait until the engine has none."""
        self._draining = True
        while self.num_running:
            self._left.clear()
            await self._left.wait()

    def _notify(self) -> None:
        """There may be room for another job, or none left to wait for."""
        self._wake.set()
        self._left.set()

    async def feed(self) -> None:
        """Hand jobs to the engine as it has room, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while jobs := self._take():
                await self._start(jobs)

    def _take(self) -> list[Job]:
        """What the engine can start now; suspects wait until it is empty, and have it for themselves."""
        if not self._may_take():
            return []
        if not self.suspects and (jobs := self._backlog.take(self._limits.capacity - len(self._running))):
            for job in jobs:
                self._adapters.use(job)
            self.suspects.add([job for job in jobs if job.trial])
            if neighbours := [job for job in jobs if not job.trial]:
                return neighbours
        self._on_trial = bool(self.suspects) and not self._running
        return self.suspects.next_trial() if self._on_trial else []

    def _may_take(self) -> bool:
        on_trial = self._on_trial and self.num_running
        return self._engine.ready and not self._draining and not on_trial

    async def _start(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.phase = Phase.RUNNING
        generation, self._starting = self._generation, len(jobs)
        uncounted = [job for job in jobs if not job.counted or job.request.deadline is not None]
        started = await self._desk.start(uncounted) if uncounted else {}
        self._starting = 0
        ready: list[Job] = []
        for job in jobs:
            if job.phase is not Phase.RUNNING:  # dropped meanwhile
                if generation == self._generation:
                    self._adapters.leave(job)
            elif job.key in started:
                job.attempts, job.counted = started[job.key], False
                ready.append(job)
            elif job.counted and job.request.deadline is None:
                ready.append(job)
            else:
                if generation == self._generation:
                    self._adapters.leave(job)
                self._not_started(job)
        if generation == self._generation:
            self._hand_over(ready)
        else:
            for job in ready:
                _excuse(job)
            self._put_back(ready, "engine_lost")
        self._left.set()

    def _not_started(self, job: Job) -> None:
        """Its deadline passed by the database's clock, or it is another worker's: the fenced write will tell."""
        if job.request.deadline is not None:
            self._desk.finish(expired(job))
        else:
            self._desk.stale(job)

    def _hand_over(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        requests: list[Request] = []
        for job in jobs:
            if job.phase is not Phase.RUNNING:
                self._adapters.leave(job)
                continue
            job.started_at = now
            if job.counted:
                job.attempts, job.counted = job.attempts + 1, False
            request_id = f"{next(self._ids)}"
            try:
                requests.append(engine_request(job, request_id))
            except EngineError as error:
                self._end(job, failed(job, ErrorCode.INVALID_MESSAGE, str(error)))
            else:
                self._running[request_id] = job
        count_started((job.lane, job.queue_s()) for job in jobs if job.started_at == now)
        if requests and self._engine.ready:
            self._engine.add(requests)  # otherwise it was lost just now, and `lost` will find them

    def _end(self, job: Job, outcome: Outcome) -> None:
        self._adapters.leave(job)
        self._desk.finish(outcome)

    def done(self, message: Done) -> None:
        """A step's results; those of jobs that were dropped meanwhile are ignored."""
        for finished in message.finished:
            if (job := self._running.pop(finished.request_id, None)) is not None:
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
                if not self._ended(job, refused.reason):
                    self._put_back([job], "engine_failed")
            case "failed":
                self._adapters.leave(job)
                if not self._ended(job, refused.reason):
                    telemetry.JOBS_REQUEUED.labels(reason="engine_failed").inc()
                    self._desk.retry(job)

    def _ended(self, job: Job, reason: str) -> bool:
        """End a job whose attempts are spent; False while some are left."""
        if (outcome := self._limits.spent(job, reason)) is None:
            return False
        self._desk.finish(outcome)
        return True

    def _put_back(self, jobs: Sequence[Job], reason: str) -> None:
        now = time.monotonic()
        for job in reversed(jobs):
            if job.phase is not Phase.COMPLETING:
                telemetry.JOBS_REQUEUED.labels(reason=reason).inc()
                job.phase = Phase.WAITING
                self._set_apart(job)
                self._backlog.put_back(job, job.lane, job.group, now)
        self._adapters.plan(now)
        self._notify()

    def _set_apart(self, job: Job) -> None:
        """The last of several attempts is spent alone: whatever ended the others may happen again."""
        if job.trial == NO_TRIAL and self._limits.last_of_several_is_next(job):
            job.trial = self.suspects.fresh()

    def up(self) -> None:
        """An engine is up, empty."""
        self._adapters.plan(time.monotonic())
        self._notify()

    def lost(self, reason: str) -> None:
        """The engine is gone with everything in it."""
        self._generation += 1
        self._adapters.lost()
        jobs, self._running = list(self._running.values()), {}
        self._put_back(self.suspects.remove(lambda _job: True), "engine_lost")
        if jobs:
            self._judge(jobs, reason)

    def _judge(self, jobs: Sequence[Job], reason: str) -> None:
        """Charge the one that was alone; the others are excused, and come back in halves."""
        verdict = self.suspects.judge(jobs)
        for trial, half in reversed(verdict.again):
            for job in half:
                job.trial = trial
                _excuse(job)
            self._put_back(half, "engine_lost")
        if verdict.charged is not None and not self._ended(verdict.charged, reason):
            verdict.charged.trial = self.suspects.fresh()
            telemetry.JOBS_REQUEUED.labels(reason="engine_failed").inc()
            self._desk.retry(verdict.charged)

    def drop(self, jobs: Iterable[Job]) -> None:
        """Forget jobs that are not ours any more, wherever they are. What is taken from the engine spent no attempt."""
        jobs = list(jobs)
        for job in jobs:
            job.phase = Phase.COMPLETING
        gone = {id(job) for job in jobs}
        self._backlog.remove(lambda job: id(job) in gone)
        self._drop_suspects(gone)
        cancelled = [request_id for request_id, job in self._running.items() if id(job) in gone]
        for request_id in cancelled:
            job = self._running.pop(request_id)
            self._adapters.leave(job)
            _excuse(job)
        if cancelled:
            self._engine.cancel(cancelled)
            self._notify()

    def _drop_suspects(self, gone: set[int]) -> None:
        for job in self.suspects.remove(lambda job: id(job) in gone):
            self._adapters.leave(job)

    async def tick(self) -> None:
        """Bound running times and waits for adapters, for ever."""
        while True:
            now = time.monotonic()
            self._stop_late(now)
            self._adapters.plan(now)
            telemetry.BACKLOG_JOBS.set(len(self._backlog))
            telemetry.RUNNING_JOBS.set(len(self._running))
            await asyncio.sleep(TICK_S)

    def _stop_late(self, now: float) -> None:
        late = {request_id: job for request_id, job in self._running.items() if self._limits.is_late(job, now)}
        if not late:
            return
        self._engine.cancel(late)
        for request_id, job in late.items():
            del self._running[request_id]
            self._end(job, self._limits.timed_out(job))
        self._notify()


def _excuse(job: Job) -> None:
    """Its newest attempt does not count against it: the database's count stands for the next one."""
    if not job.counted:
        job.attempts, job.counted = job.attempts - 1, True
