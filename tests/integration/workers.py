"""Workers in the test's process, each with its own engine process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.worker.app import serve
from tests.waiting import eventually

FAULTY_ENGINE = "tests.integration.stub_engine:faulty_engine"
ECHO_ENGINE = "services.worker.engine.echo:echo_engine"


@asynccontextmanager
async def running_worker(settings: Settings, engine: str = ECHO_ENGINE) -> AsyncIterator[Lifecycle]:
    """A ready worker; stopped at the end as by SIGTERM."""
    life = Lifecycle()
    task = asyncio.create_task(serve(life, settings, engine))
    try:
        await eventually(lambda: life.health.ready is None or task.done(), what="the worker to be ready")
        if task.done():
            await task
        yield life
    finally:
        life.stop.set()
        await task
