"""Composition root of one worker: creates its parts and connects them by callbacks."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from schemas.common import Lane
from services.adapters.staging import Stager
from services.postgres.pool import Pool
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.s3.store import ObjectStore
from services.tenants.secrets import SecretBox
from services.worker.adapters.loads import AdapterCallbacks, Adapters, WaitLimits
from services.worker.engine.bridge import EngineBridge, EngineCallbacks, EngineSpec
from services.worker.engine.config import engine_config
from services.worker.engine.protocol import Done, Status
from services.worker.execution.limits import Limits
from services.worker.execution.runner import Runner, RunnerCallbacks
from services.worker.in_flight import InFlight
from services.worker.intake.acceptor import Acceptor, AcceptorCallbacks
from services.worker.intake.consumer import ConsumerCallbacks, Counts, JobConsumer
from services.worker.intake.control import ControlReader
from services.worker.intake.dead_letters import DeadLetters
from services.worker.intake.drain import PartitionDrain
from services.worker.intake.tenant_keys import TenantKeys
from services.worker.jobs import Job, JobKey, Outcome, Rejection
from services.worker.offsets.ledger import Ledger
from services.worker.queue.backlog import Backlog
from services.worker.queue.cancellation import CancellationCallbacks, Cancellations
from services.worker.queue.pace import Pace
from services.worker.queue.parking import Parking, ParkingCallbacks
from services.worker.queue.parking_store import ParkingStore, ParkRequest
from services.worker.queue.preference import Standpoint, is_least_loaded
from services.worker.queue.retry_policy import retry_delay_s
from services.worker.queue.tenant_limits import LimitedTenants
from services.worker.results.completer import Completer
from services.worker.store.cancellations import CancellationStore
from services.worker.store.jobs import JobStore
from services.worker.store.persistence import Persistence
from services.worker.supervision.breaker import BreakerLimits
from services.worker.supervision.guard import Guard
from services.worker.supervision.leases import LeaseKeeper
from services.worker.supervision.limits import LimitsReader
from services.worker.supervision.reporter import Reporter
from services.worker.supervision.self_report import SelfReport

DATABASE_PAUSE = "database"
WINDOWS = 8
"""A limited tenant's waiting jobs take at most one in so many of the places in memory."""


def worker_name(settings: Settings) -> str:
    """The worker's name in database rows and logs."""
    return settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"


class Worker:
    """The parts of one worker, connected."""

    def __init__(
        self,
        life: Lifecycle,
        settings: Settings,
        pool: Pool,
        objects: ObjectStore,
        stager: Stager,
        *,
        cluster_id: str,
        base_fingerprint: str | None,
        engine_factory: str,
    ) -> None:
        self._life = life
        self._settings = settings
        name = worker_name(settings)
        self.ledger, self.in_flight = Ledger(), InFlight()
        self.store = JobStore(
            pool,
            pool_name=settings.pool,
            worker=name,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            base_fingerprint=base_fingerprint,
        )
        self.persistence = Persistence(life.health, self._on_database)
        pace = Pace(_overtake_tokens(settings))
        capacity = 2 * (settings.max_backlog_jobs + len(settings.lanes))
        self.backlog = Backlog[Job](capacity, pace.rules(), self._weight_of)
        self.tenants = LimitedTenants(
            self.backlog,
            settings.max_backlog_jobs // WINDOWS,
            settings.max_backlog_jobs // len(settings.lanes) // 2,
            settings.park_after_s,
        )
        spec = EngineSpec(engine_config(settings), engine_factory, settings.engine_start_timeout_s)
        self.engine_up = asyncio.Event()
        callbacks = EngineCallbacks(self._on_engine_up, self._on_done, self._on_engine_lost, self._on_engine_status)
        self.engine = EngineBridge(spec, callbacks)
        self.adapters = Adapters(
            stager,
            self.engine,
            self.backlog,
            settings.host_cache_bytes,
            WaitLimits(settings.park_after_s, settings.adapter_load_timeout_s),
            AdapterCallbacks(self._finish, self._park, self._on_load_ended, self._wake_runner, life.fail),
        )
        self.runner = Runner(
            _limits(settings),
            self.backlog,
            self.engine,
            self.adapters,
            pace,
            self.tenants,
            RunnerCallbacks(
                self._start, self._finish, self._stale, self._retry, self._park_over_limit, self._wake_parking
            ),
        )
        self.dead_letters = DeadLetters(settings, self.ledger, life.health, self._on_rejected)
        box = SecretBox(settings.secret_key) if settings.require_signed_jobs else None
        keys = TenantKeys(self.store, box)
        requested = CancellationStore(pool)
        self.cancellations = Cancellations(
            requested,
            self.persistence,
            self.in_flight,
            CancellationCallbacks(self.runner.drop, self._finish),
            settings.poll_interval_s,
            timedelta(days=settings.cancellation_retention_days),
        )
        self.control = ControlReader(settings, requested, self.persistence, keys.of, self.on_control)
        self.parking = Parking(
            ParkingStore(pool, self.store, settings.pool, name, settings.lease_s),
            self.persistence,
            self.ledger,
            self.in_flight,
            ParkingCallbacks(
                self._run_parked,
                self._finish,
                self._stale,
                self.runner.drop,
                self.runner.suspects.new_trial,
                self._places_over_limit,
            ),
            lambda: self.consumer.room_for_parked() if self.engine.ready else ([], 0),
            self._standpoint,
            settings.poll_interval_s,
            settings.park_after_s,
        )
        self.acceptor = Acceptor(
            self.store,
            self.persistence,
            keys,
            self.ledger,
            self.in_flight,
            self.dead_letters,
            AcceptorCallbacks(self.runner.add, self._finish, self.runner.start_predicate, self.parking.park_delivery),
            cluster_id=cluster_id,
            require_signature=settings.require_signed_jobs,
        )
        self.completer = Completer(
            self.store, self.persistence, objects, self.ledger, self.in_flight, settings.pool, self._stale
        )
        drain = PartitionDrain(self.in_flight, settings.revoke_drain_s)
        self.consumer = JobConsumer(
            settings,
            self.ledger,
            Counts(self._num_jobs, self.in_flight.num_joined),
            ConsumerCallbacks(self.acceptor.receive, self._on_assigned, drain.drained, self.in_flight.forget_places),
        )
        self.limits = LimitsReader(pool, self.persistence, self.tenants.follow, settings.poll_interval_s)
        self.guard = Guard(
            _breaker_limits(settings),
            keys.of,
            self.store.any_tenant,
            self.persistence,
            life.health,
            self.consumer.pressure,
            require_signature=settings.require_signed_jobs,
        )
        self.report = SelfReport(
            self.runner,
            self.backlog,
            self.adapters,
            self.engine,
            self.ledger,
            settings.lanes,
            settings.max_batch_size,
        )
        self.reporter = Reporter(pool, settings.pool, name, self.report.collect, stager.cache.digests)
        self.leases = LeaseKeeper(
            self.store,
            self.persistence,
            self.ledger,
            self.in_flight,
            self.runner,
            self.acceptor,
            settings.lease_s,
            stable=lambda: self.consumer.stable,
        )

    def _num_jobs(self, lane: Lane) -> int:
        """Jobs of a lane in memory, including those that the acceptor is looking up in the database."""
        return self.in_flight.count(lane) + self.acceptor.num_undecided(lane)

    def _on_database(self, failing: bool) -> None:
        pressure = self.consumer.pressure
        pressure.pause(DATABASE_PAUSE) if failing else pressure.resume(DATABASE_PAUSE)

    def _on_engine_up(self) -> None:
        self._life.health.set("engine", None)
        self.engine_up.set()
        self.runner.up()

    def _on_engine_lost(self, reason: str) -> None:
        self._life.health.set("engine", reason)
        self.runner.lost(reason)

    def _on_engine_status(self, message: Status) -> None:
        self.runner.status(message)

    def _on_done(self, message: Done) -> None:
        self.runner.done(message)

    def _on_assigned(self) -> None:
        self._life.health.set("kafka", None)
        self.leases.check_now()

    def _wake_runner(self) -> None:
        self.runner.wake()

    async def _start(self, jobs: Sequence[Job]) -> dict[JobKey, int]:
        return await self.persistence.retry_until_done(partial(self.store.start, jobs))

    def _on_rejected(self, rejection: Rejection) -> None:
        self.guard.rejected(rejection)

    def _finish(self, outcome: Outcome) -> None:
        self.guard.ended(outcome)
        self.report.ended(outcome)
        self.completer.submit(outcome)

    def _standpoint(self) -> Standpoint:
        reported = self.reporter.reported
        recent = [digest for digest in self.adapters.loaded() if reported.get(digest, "disk") == "disk"]
        least_loaded = is_least_loaded(self.report.num_jobs, self.reporter.loads_of_others)
        return Standpoint(recent, self.runner.saturated, least_loaded)

    def _park(self, request: ParkRequest) -> None:
        self.parking.park(request)

    def _on_load_ended(self, digest: str) -> None:
        self.parking.make_due(digest)

    def _retry(self, job: Job) -> None:
        delay_s = retry_delay_s(job.attempts, self._settings.retry_delay_s)
        self.parking.park(ParkRequest(job, "retry", delay_s))

    def _weight_of(self, tenant: str) -> float:
        return self.tenants.weight_of(tenant)

    def _park_over_limit(self, job: Job) -> None:
        self.parking.park(ParkRequest(job, "limit", None))

    def _places_over_limit(self, parked: Sequence[tuple[str, Lane]]) -> list[tuple[str, Lane, int]]:
        return self.tenants.places(parked, time.monotonic())

    def _wake_parking(self) -> None:
        self.parking.wake()

    async def _run_parked(self, jobs: Sequence[Job]) -> None:
        self.runner.add(await self.cancellations.screen(jobs))

    def on_control(self) -> None:
        """A control record or a database notification arrived: read the database now."""
        self.cancellations.wake()
        self.limits.wake()
        self.parking.wake()

    def _stale(self, job: Job) -> None:
        self.leases.give_up(job)


def _limits(settings: Settings) -> Limits:
    return Limits(
        places=settings.max_batch_size,
        capacity=settings.max_batch_size + max(1, settings.max_batch_size // 4),
        default_timeout_s=settings.default_timeout_s,
        max_attempts=settings.max_attempts,
        max_result_bytes=settings.max_result_bytes,
    )


def _overtake_tokens(settings: Settings) -> dict[Lane, int | None]:
    return {
        Lane.INTERACTIVE: settings.overtake_tokens_interactive,
        Lane.STANDARD: settings.overtake_tokens_standard,
        Lane.BATCH: settings.overtake_tokens_batch,
    }


def _breaker_limits(settings: Settings) -> BreakerLimits:
    return BreakerLimits(
        window_s=settings.breaker_window_s,
        min_jobs=settings.breaker_min_jobs,
        min_tenants=settings.breaker_min_tenants,
        ratio=settings.breaker_ratio,
        probe_after_s=settings.breaker_probe_s,
    )
