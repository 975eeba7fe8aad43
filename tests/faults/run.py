"""One run: its own database and topics on the stack, its traffic, its processes, and a snapshot of the result."""

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from schemas.common import Lane
from services.errors import ServiceError
from services.kafka import clients as kafka
from services.postgres.pool import open_pool
from services.worker.offsets.ledger import Partition, Place
from tests.faults import reading
from tests.faults.clock import Clock, compile_library
from tests.faults.engine import calls
from tests.faults.entry import FaultSettings
from tests.faults.proxy import Proxy
from tests.faults.recorder import Recorder
from tests.faults.service import Service
from tests.faults.snapshot import Call, DeadLetter, Key, Snapshot
from tests.faults.stack import TEMPLATE, Stack
from tests.faults.traffic import Traffic, open_traffic
from tests.faults.watch import Watch

SETTLE_TIMEOUT_S = 120.0
POLL_S = 0.2
HARNESS_SETTINGS = {"database_pool_size": 8, "database_timeout_s": 60.0, "lease_s": 60.0}
"""For the harness's own connections: on busy cores the harness may stall for longer than a worker is allowed to."""


class Run:
    """The interface of an experiment body to its run. `expect` collects failed expectations."""

    def __init__(
        self,
        stack: Stack,
        settings: FaultSettings,
        seed: int,
        count: int,
        directory: Path,
        tables: reading.Tables,
        recorder: Recorder,
        traffic: Traffic,
        watch: Watch,
    ) -> None:
        self.stack = stack
        self.settings = settings
        self.seed = seed
        self.count = count
        self.tables = tables
        self.recorder = recorder
        self.traffic = traffic
        self.watch = watch
        self.random = traffic.random
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.directory = directory
        self._names: dict[str, int] = {}
        self._services: list[Service] = []

    def expect(self, holds: bool, problem: str) -> None:
        """Record the problem if the condition does not hold, and continue: the checker still has to run."""
        if not holds:
            self.problems.append(problem)

    def expect_no_rerun(self, before: int, ended: set[Key]) -> None:
        """Expect that no job in `ended` reached an engine after the first `before` engine calls."""
        again = {call.key for call in self.calls()[before:]} & ended
        self.expect(not again, f"{len(again)} jobs ran again after they had ended")

    def start(self, kind: str, clock: Clock | None = None, **switches: Any) -> Service:
        """Start a process of the product without waiting until it is ready. It ends with the run."""
        number = self._names[kind] = self._names.get(kind, 0) + 1
        name = f"{kind}-{number}"
        settings = self.settings.model_copy(update={"worker_id": name} | switches)
        server = self.stack.fork_server if clock is None else self.stack.clocked_fork_server()
        service = Service(server, name, kind, settings, self.directory, clock)
        self._services.append(service)
        return service

    async def clock(self) -> Clock:
        """A clock for processes of this run. The first call on a stack waits for the fork server that preloads it."""
        await asyncio.to_thread(self.stack.clocked_fork_server().wait_ready)
        return Clock(compile_library(self.stack.directory), self.directory)

    @asynccontextmanager
    async def running(
        self, kind: str, *, clock: Clock | None = None, wait: bool = True, **switches: Any
    ) -> AsyncIterator[Service]:
        """Run a process; `wait` until it is ready. It gets SIGTERM at the end if it still runs."""
        service = self.start(kind, clock, **switches)
        if wait:
            await service.wait_ready()
        yield service
        if service.alive:
            await service.stop()

    def kill_services(self) -> None:
        """Kill the processes that still run."""
        for service in self._services:
            if service.alive:
                service.process.kill()

    def worker(self, **switches: Any) -> Any:
        """A running worker."""
        return self.running("worker", **switches)

    def dispatcher(self, **switches: Any) -> Any:
        """A running dispatcher."""
        return self.running("dispatcher", **switches)

    def through(self, proxy: Proxy) -> str:
        """The database URL through a proxy."""
        direct = self.settings.database_url.get_secret_value()
        return direct.replace(f":{self.stack.postgres.port}/", f":{proxy.port}/")

    def acknowledged_jobs(self) -> set[Key]:
        """Keys of the jobs that a broker acknowledged."""
        sent = self.traffic.sent
        return {each.key for each in sent if each.place is not None and each.fate == "job" and not each.exempt}

    def calls(self) -> tuple[Call, ...]:
        """The requests that have reached an engine so far."""
        return calls(self.directory / "journal")

    async def wait_ended(self, at_least: int, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until at least that many jobs are terminal."""

        async def enough() -> bool:
            return await self.tables.number(reading.ENDED) >= at_least

        await self.wait_until(enough, f"{at_least} jobs to end", timeout_s)

    async def wait_called(self, at_least: int, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until at least that many requests have reached an engine."""

        async def enough() -> bool:
            return len(self.calls()) >= at_least

        await self.wait_until(enough, f"{at_least} engine calls", timeout_s)

    async def wait_until(self, check: Any, what: str, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until `check` holds; retries while a server is down. Raises AssertionError after `timeout_s`."""
        give_up_at, last_error = time.monotonic() + timeout_s, ""
        while True:
            try:
                if await check():
                    return
            except (ServiceError, KafkaError, OSError) as error:
                last_error = f": {error}"
            if time.monotonic() > give_up_at:
                raise AssertionError(f"timed out after {timeout_s:g} s waiting for {what}{last_error}")
            await asyncio.sleep(POLL_S)

    async def holds_within(self, timeout_s: float, check: Any) -> bool:
        """Whether `check` holds before the timeout."""
        try:
            await self.wait_until(check, "a condition", timeout_s)
        except AssertionError:
            return False
        return True

    async def wait_settled(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until all jobs have ended, all offsets are committed and no outbox row is pending; records a timeout."""
        try:
            await self.wait_until(self._is_settled, "everything to end", timeout_s)
        except AssertionError as error:
            self.problems.append(str(error))
            for service in self._services:
                if service.alive:
                    service.process.send_signal(signal.SIGUSR1)  # logs its jobs in flight

    async def _is_settled(self) -> bool:
        """Checks in the order in which the states are reached, so that a late change cannot slip between two checks;
        the cheapest and most selective check comes first."""
        if await self.tables.number(reading.UNFINISHED):
            return False
        if await self.uncommitted() or await self.tables.number(reading.UNFINISHED):
            return False
        return not await self.tables.number(reading.PENDING)

    async def uncommitted(self) -> list[Place]:
        """The first record of each partition whose offset is not committed."""
        lanes = [self.settings.jobs_topic(lane) for lane in Lane]
        places = [TopicPartition(topic, number) for topic in lanes for number in range(self.settings.partitions)]
        ends = await self._ends(places)
        async with kafka.admin(self.settings) as admin:
            committed = await reading.committed_offsets(admin, self.settings, places)
        return [Place(Partition(*place), committed[place]) for place in places if committed[place] < ends[place]]

    async def _ends(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        consumer = AIOKafkaConsumer(**kafka.client_options(self.settings))
        await consumer.start()
        try:
            return dict(await consumer.end_offsets(places))
        finally:
            await consumer.stop()

    async def snapshot(self) -> Snapshot:
        """Read every table and topic as they are now."""
        events = await self._records(self.settings.events_topic)
        tables = self.tables
        return Snapshot(
            sent=tuple(self.traffic.sent),
            jobs=await tables.jobs(),
            results=await tables.results(),
            outbox=await tables.outbox(),
            deliveries=await tables.deliveries(),
            usage=await tables.usage(),
            events=tuple(reading.event_of(record) for record in events),
            webhooks=tuple(self.recorder.webhooks),
            dead_letters=tuple(dict.fromkeys([*self.watch.dead_letters, *await self.dead_letters()])),
            calls=self.calls(),
            early_commits=tuple(self.watch.early_commits.values()),
            uncommitted=tuple(await self.uncommitted()),
        )

    async def dead_letters(self) -> list[DeadLetter]:
        """The records that are in the dead-letter topic now."""
        return [reading.dead_letter_of(record) for record in await self._records(self.settings.dead_topic)]

    async def _records(self, topic: str) -> list[Any]:
        async with reading.reader(self.settings, topic) as consumer:
            return await reading.read_to_end(consumer)

    def exempt(self, gone: Any) -> None:
        """Exempt the records that the fault itself deleted: the product cannot serve them."""
        self.traffic.sent[:] = [
            replace(sent, exempt=True) if sent.place is not None and gone(sent.place) else sent
            for sent in self.traffic.sent
        ]


@asynccontextmanager
async def open_run(stack: Stack, what: str, seed: int, count: int, **settings: Any) -> AsyncIterator[Run]:
    """Create everything of one run except its processes. Topics and database are dropped at the end; logs are kept.

    `what` and the seed determine every random choice, so a run can be repeated.
    """
    name = f"{what}-{seed}-{int(time.time())}"
    database = name.replace("-", "_")
    stack.postgres.sql(f"create database {database} template {TEMPLATE}")
    own = stack.settings(name, database).model_copy(update=settings)
    directory = stack.directory / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    random = Random(f"{what} {seed}")
    await kafka.ensure_topics(own)
    await configure(
        own, own.events_topic, "message.timestamp.type", "LogAppendTime"
    )  # independent of the processes' clocks
    async with AsyncExitStack() as exits:
        pool = await exits.enter_async_context(open_pool(own.model_copy(update=HARNESS_SETTINGS)))
        recorder = await exits.enter_async_context(Recorder(stack.webhook_secrets))
        traffic = await exits.enter_async_context(open_traffic(own, random, recorder))
        tables = reading.Tables(pool)
        watch = Watch(own, tables, lambda: traffic.sent)
        await exits.enter_async_context(watch.running())
        run = Run(stack, own, seed, count, directory, tables, recorder, traffic, watch)
        exits.callback(run.kill_services)
        yield run
    await _remove(stack, own, database)


async def configure(settings: FaultSettings, topic: str, name: str, value: str) -> None:
    """Set one option of a topic."""
    async with kafka.admin(settings) as admin:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})])


async def _remove(stack: Stack, settings: FaultSettings, database: str) -> None:
    stack.postgres.sql(f"drop database {database} with (force)")
    async with kafka.admin(settings) as admin:
        await admin.delete_topics([topic.name for topic in kafka.pool_topics(settings)])
