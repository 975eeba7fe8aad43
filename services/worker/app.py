"""The worker's process: the order in which its parts start, run and stop."""

import asyncio
import contextlib
import gc
from collections.abc import Coroutine
from functools import partial
from typing import Any

from services.adapters.base import load_base
from services.adapters.staging import Stager
from services.kafka import clients as kafka
from services.kafka.reading import require_topics
from services.postgres.pool import listen, open_pool
from services.process import telemetry
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.s3.store import open_store
from services.worker.engine.process import REAL_ENGINE
from services.worker.store.cancellations import CHANNEL
from services.worker.supervision.progress import watch_progress
from services.worker.worker import Worker, worker_name

DRAIN_PAUSE = "drain"
LAST_WRITES_S = 5.0
GC_ALLOCATIONS = 25_000
_log = telemetry.get_logger()


async def serve(life: Lifecycle, settings: Settings, engine_factory: str = REAL_ENGINE) -> None:
    """Run one worker until `life.stop`."""
    life.health.set("process", "reading the base model")
    needs_base = engine_factory == REAL_ENGINE or settings.base_model is not None
    base = await asyncio.to_thread(load_base, settings) if needs_base else None
    cluster_id = await kafka.cluster_id(settings)
    await require_topics(settings, [*map(settings.jobs_topic, settings.lanes), settings.control_topic])
    async with open_pool(settings, fresh_plans=True) as pool, open_store(settings) as objects:
        stager = Stager(settings, objects)
        worker = Worker(
            life,
            settings,
            pool,
            objects,
            stager,
            cluster_id=cluster_id,
            base_fingerprint=base.fingerprint if base else None,
            engine_factory=engine_factory,
        )
        _log.info("Worker starts", action="worker_starts", worker=worker_name(settings), model=str(settings.base_model))
        try:
            await _run(worker, life, settings)
        finally:
            await stager.close()


async def _run(worker: Worker, life: Lifecycle, settings: Settings) -> None:
    """Serve until `life.stop`, then drain. The worker joins the group only after the engine has started once."""
    life.health.set("engine", "starting")
    life.health.set("kafka", "waiting for the engine")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.consumer.stop)
        stack.push_async_callback(worker.adapters.close)
        stack.push_async_callback(life.end_tasks, 0.0)
        life.background("engine", worker.engine.run(), endless=True)
        await first_of(worker.engine_up, life.stop)
        if not life.stop.is_set():
            await _consume(worker, life, settings, stack)


async def _consume(worker: Worker, life: Lifecycle, settings: Settings, stack: contextlib.AsyncExitStack) -> None:
    life.health.set("kafka", "joining the group")
    producer = kafka.dead_letter_producer(settings)
    stack.push_async_callback(producer.stop)
    with kafka.starting(settings):
        await producer.start()
    await worker.limits.read()
    await worker.consumer.start()
    stack.push_async_callback(life.end_tasks, 0.0)
    for name, work in _loops(worker, settings, producer).items():
        life.background(name, work, endless=True)
    _spare_the_collector()
    life.started()
    await life.stop.wait()
    life.health.set("process", "draining")
    await _drain(worker, settings.drain_s)


def _loops(worker: Worker, settings: Settings, producer: object) -> dict[str, Coroutine[Any, Any, None]]:
    return {
        "poll": worker.consumer.poll(),
        "commit": worker.consumer.commit_periodically(),
        "topics": worker.consumer.watch_topics(),
        "accept": worker.acceptor.run(),
        "dead letters": worker.dead_letters.run(producer),
        "feed": worker.runner.feed(),
        "tick": worker.runner.tick(),
        "complete": worker.completer.run(),
        "leases": worker.leases.run(),
        "limits": worker.limits.run(),
        "guard": worker.guard.run(),
        "report": worker.reporter.run(),
        "parking": worker.parking.run(),
        "cancellations": worker.cancellations.run(),
        "cancellations wake": listen(settings, CHANNEL, worker.on_control),
        "cancellations age": worker.cancellations.delete_old(),
        "control": worker.control.run(),
        "progress": watch_progress(
            worker.consumer.progress,
            partial(kafka.check_reachable, settings),
            settings.progress_timeout_s,
        ),
    }


async def _drain(worker: Worker, drain_s: float) -> None:
    """Let running jobs finish within `drain_s`, commit, and release the rest for other workers to claim."""
    worker.consumer.pressure.pause(DRAIN_PAUSE)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await worker.runner.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WRITES_S):
            await worker.completer.flushed()
            await worker.consumer.commit(urgent=True)
            await worker.leases.release(list(worker.in_flight))
            await worker.reporter.withdraw()
    _log.info("Drained", action="drained", left=len(worker.in_flight))


async def first_of(*events: asyncio.Event) -> None:
    """Return once any of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _spare_the_collector() -> None:
    """Collect garbage rarely: start-up objects stay, and reference counting frees those of jobs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 5, 5)
