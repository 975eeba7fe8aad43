"""Run the product's worker or dispatcher with the switches of the fault suite.

python -m tests.faults.entry worker|dispatcher
"""

import functools
import gc
import signal
import sys
from collections import Counter
from datetime import timedelta
from typing import Any, Literal

from services.dispatcher import app as dispatcher_app
from services.dispatcher import events, webhooks
from services.kafka import clients as kafka
from services.process import lifecycle
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.worker import app as worker_app
from services.worker.jobs import Job
from services.worker.worker import Worker
from tests.faults import crash
from tests.faults.mutants import MUTANTS

PACED_ENGINE = "tests.faults.engine:paced_engine"


class FaultSettings(Settings):
    """The product's settings plus the switches of the suite."""

    crash_at: str | None = None
    crash_hit: int = 1
    crash_how: Literal["kill", "block", "pause"] = "kill"
    mutant: str | None = None
    engine_factory: str = PACED_ENGINE
    max_poll_interval_s: float | None = None
    blocked_after_s: float = 20.0
    claim_slack_s: float = 2.0


def apply(settings: FaultSettings) -> None:
    """Apply the switches to this process."""
    webhooks.CLAIM_SLACK = events.CLAIM_FOR = timedelta(seconds=settings.claim_slack_s)
    lifecycle.BLOCKED_AFTER_S = settings.blocked_after_s
    if settings.max_poll_interval_s is not None:
        _bound_poll_interval(settings.max_poll_interval_s)
    if settings.crash_at is not None:
        crash.arm(settings.crash_at, settings.crash_hit, settings.crash_how)
    if settings.mutant is not None:
        MUTANTS[settings.mutant]()


def _bound_poll_interval(interval_s: float) -> None:
    """Shorten the library's default of five minutes."""
    make: Any = kafka.AIOKafkaConsumer
    kafka.AIOKafkaConsumer = functools.partial(make, max_poll_interval_ms=round(interval_s * 1000))


def _dump_state_on_signal() -> None:
    """On SIGUSR1, log the jobs in flight; for debugging runs that never settle."""

    def dump(*_: object) -> None:
        for worker in [each for each in gc.get_objects() if isinstance(each, Worker)]:
            print("IN FLIGHT", Counter(_described(worker, job) for job in worker.in_flight), flush=True)
            print("RUNNER", vars(worker.runner), flush=True)

    signal.signal(signal.SIGUSR1, dump)


def _described(worker: Worker, job: Job) -> str:
    waiting = any(each.job is job for each in worker.backlog.waiting_in(job.group))
    return f"{job.phase}, group {job.group[:8]}, attempts {job.attempts}, in the backlog: {waiting}"


async def _worker(settings: FaultSettings, life: Lifecycle) -> None:
    await worker_app.serve(life, settings, settings.engine_factory)


async def _dispatcher(settings: FaultSettings, life: Lifecycle) -> None:
    await dispatcher_app.serve(life, settings)


def main(process: str) -> None:
    """Run one process as the `loraq` command would."""
    settings = FaultSettings(_env_file=None)
    apply(settings)
    _dump_state_on_signal()
    serve = {"worker": _worker, "dispatcher": _dispatcher}[process]
    lifecycle.run(process, settings, functools.partial(serve, settings))


if __name__ == "__main__":
    main(sys.argv[1])
