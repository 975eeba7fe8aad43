"""Collects what the worker reports about itself, and sets the metrics that routers read."""

import time
from collections.abc import Iterable

from services.process import telemetry
from services.routing.load import LoadMeter, Name
from services.routing.status import TIERS, Report, Tier
from services.worker.adapters.loads import Adapters
from services.worker.engine.bridge import EngineBridge
from services.worker.execution.runner import Runner
from services.worker.jobs import Job, Outcome
from services.worker.offsets.ledger import Ledger
from services.worker.queue.backlog import Backlog

MAX_NAMES = 256
"""Adapters that a metric names."""


class SelfReport:
    """Reads the parts of one worker; `ended` counts the tokens of a job."""

    def __init__(
        self,
        runner: Runner,
        backlog: Backlog[Job],
        adapters: Adapters,
        engine: EngineBridge,
        ledger: Ledger,
        lanes: Iterable[str],
        max_batch_size: int,
    ) -> None:
        self._runner = runner
        self._backlog = backlog
        self._adapters = adapters
        self._engine = engine
        self._ledger = ledger
        self._lanes = tuple(lanes)
        self._max_batch_size = max_batch_size
        self._began = time.monotonic()
        self._meter = LoadMeter(self._began)

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run."""
        return self._runner.num_running + len(self._backlog)

    def ended(self, outcome: Outcome) -> None:
        """Count the tokens of a job that ran."""
        if (finished := outcome.finished) is not None:
            tokens = finished.prompt_tokens + finished.completion_tokens
            self._meter.ended(_name(outcome.job), tokens, time.monotonic())

    def collect(self, on_disk: frozenset[str]) -> Report:
        """The report of this moment."""
        now = time.monotonic()
        report = Report(
            uptime_s=now - self._began,
            engine_ready=self._engine.ready,
            running=self._runner.num_running,
            waiting=len(self._backlog),
            waiting_bytes=self._backlog.num_bytes,
            tokens_per_s=self._meter.tokens_per_s(now),
            saturated=self._runner.saturated,
            lanes=self._lanes,
            partitions=len(self._ledger.partitions),
            adapters=self._tiers(on_disk),
            tokens=self._meter.tokens(now),
            busiest=self._meter.busiest(now),
        )
        self._set_metrics(report)
        return report

    def _tiers(self, on_disk: frozenset[str]) -> dict[str, Tier]:
        """The fastest tier of each adapter."""
        tiers: dict[str, Tier] = dict.fromkeys(on_disk, "disk")
        resident = self._runner.resident
        for digest in self._adapters.loaded():
            tiers[digest] = "device" if digest in resident else "host"
        return tiers

    def _set_metrics(self, report: Report) -> None:
        for tier in TIERS:
            telemetry.ADAPTERS.labels(tier=tier).set(report.count(tier))
        telemetry.VLLM_RUNNING.set(report.running)
        telemetry.VLLM_WAITING.set(report.waiting)
        running = _names(self._runner.running_jobs())
        waiting = _names(each.job for each in self._backlog)
        telemetry.VLLM_LORAS.clear()
        telemetry.VLLM_LORAS.labels(
            max_lora=self._max_batch_size, running_lora_adapters=running, waiting_lora_adapters=waiting
        ).set_to_current_time()


def _name(job: Job) -> Name | None:
    adapter = job.request.adapter
    return None if adapter is None else (job.key.tenant, adapter.partition("@")[0])


def _names(jobs: Iterable[Job]) -> str:
    """The adapters of the jobs, as a label: tenant/name, sorted, separated by commas."""
    names = sorted({name for job in jobs if (name := _name(job)) is not None})
    return ",".join(f"{tenant}/{adapter}" for tenant, adapter in names[:MAX_NAMES])
