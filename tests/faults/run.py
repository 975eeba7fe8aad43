"""One run: a database and topics of its own on the stack, its traffic, its processes, and what it left behind."""

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
from tests.faults.clock import Clock, compiled
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
LOOK_S = 0.2
PATIENT = {"database_pool_size": 8, "database_timeout_s": 60.0, "lease_s": 60.0}
"""The harness's own connections: on busy cores it may stand still for longer than a worker of the suite should."""


class Run:
    """The hands of an experiment. `expect` collects what was not as the experiment says it must be."""

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

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong, and go on: the checker has more to say."""
        if not holds:
            self.problems.append(otherwise)

    def expect_no_rerun(self, before: int, ended: set[Key]) -> None:
        """None of the jobs that had ended when there had been `before` engine calls reached an engine after that."""
        again = {call.key for call in self.calls()[before:]} & ended
        self.expect(not again, f"{len(again)} jobs ran again that had ended")

    def start(self, kind: str, clock: Clock | None = None, **switches: Any) -> Service:
        """A new process of the product, not yet ready; `switches` are settings. It ends with the run."""
        number = self._names[kind] = self._names.get(kind, 0) + 1
        name = f"{kind}-{number}"
        settings = self.settings.model_copy(update={"worker_id": name} | switches)
        nursery = self.stack.nursery if clock is None else self.stack.clocked_nursery()
        service = Service(nursery, name, kind, settings, self.directory, clock)
        self._services.append(service)
        return service

    async def clock(self) -> Clock:
        """A clock for processes of this run. The first one of a stack waits for the nursery that can give it."""
        await asyncio.to_thread(self.stack.clocked_nursery().wait_ready)
        return Clock(compiled(self.stack.directory), self.directory)

    @asynccontextmanager
    async def running(
        self, kind: str, *, clock: Clock | None = None, wait: bool = True, **switches: Any
    ) -> AsyncIterator[Service]:
        """A process, ready unless told not to `wait`. It gets SIGTERM at the end if it still runs."""
        service = self.start(kind, clock, **switches)
        if wait:
            await service.ready()
        yield service
        if service.alive:
            await service.stop()

    def end(self) -> None:
        """Kill what still runs."""
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
        """The database's URL by way of a proxy."""
        direct = self.settings.database_url.get_secret_value()
        return direct.replace(f":{self.stack.postgres.port}/", f":{proxy.port}/")

    def wanted(self) -> set[Key]:
        """The jobs that a broker acknowledged."""
        sent = self.traffic.sent
        return {each.key for each in sent if each.place is not None and each.fate == "job" and not each.exempt}

    def calls(self) -> tuple[Call, ...]:
        """The requests that reached an engine so far."""
        return calls(self.directory / "journal")

    async def ended(self, at_least: int, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Until so many jobs are terminal."""

        async def enough() -> bool:
            return await self.tables.number(reading.ENDED) >= at_least

        await self.until(enough, f"{at_least} jobs to end", timeout_s)

    async def called(self, at_least: int, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Until so many requests reached an engine."""

        async def enough() -> bool:
            return len(self.calls()) >= at_least

        await self.until(enough, f"{at_least} engine calls", timeout_s)

    async def until(self, check: Any, what: str, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Until `check` holds; a server that is away counts as not yet. Raises AssertionError when the time is over."""
        give_up_at, newest = time.monotonic() + timeout_s, ""
        while True:
            try:
                if await check():
                    return
            except (ServiceError, KafkaError, OSError) as error:
                newest = f": {error}"
            if time.monotonic() > give_up_at:
                raise AssertionError(f"waited {timeout_s:g} s in vain for {what}{newest}")
            await asyncio.sleep(LOOK_S)

    async def holds_within(self, timeout_s: float, check: Any) -> bool:
        """Whether `check` holds before the time is over."""
        try:
            await self.until(check, "a condition", timeout_s)
        except AssertionError:
            return False
        return True

    async def settled(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Until every job has ended, every offset is committed and every effect is done; being late is a problem."""
        try:
            await self.until(self._is_settled, "everything to end", timeout_s)
        except AssertionError as error:
            self.problems.append(str(error))
            for service in self._services:
                if service.alive:
                    service.process.send_signal(signal.SIGUSR1)  # its log then says what it holds

    async def _is_settled(self) -> bool:
        """Asked in the order in which things come about, so that nothing slips through in between; first what is cheap
        and most often says no."""
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
        """What there is now, from every table and topic."""
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
            sightings=tuple(self.watch.sightings.values()),
            uncommitted=tuple(await self.uncommitted()),
        )

    async def dead_letters(self) -> list[DeadLetter]:
        """Those that stand in the topic now."""
        return [reading.dead_letter_of(record) for record in await self._records(self.settings.dead_topic)]

    async def _records(self, topic: str) -> list[Any]:
        async with reading.reader(self.settings, topic) as consumer:
            return await reading.read_to_end(consumer)

    def exempt(self, gone: Any) -> None:
        """The fault itself deletes these records: they are not the product's to serve."""
        self.traffic.sent[:] = [
            replace(sent, exempt=True) if sent.place is not None and gone(sent.place) else sent
            for sent in self.traffic.sent
        ]


@asynccontextmanager
async def open_run(stack: Stack, what: str, seed: int, count: int, **settings: Any) -> AsyncIterator[Run]:
    """Everything of one run but its processes. Its topics and its database go at the end, its logs stay.

    What is drawn at random follows from `what` and the seed, so that a run can be made again.
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
    await configure(own, own.events_topic, "message.timestamp.type", "LogAppendTime")  # no process's own clock
    async with AsyncExitStack() as exits:
        pool = await exits.enter_async_context(open_pool(own.model_copy(update=PATIENT)))
        recorder = await exits.enter_async_context(Recorder(stack.webhook_secrets))
        traffic = await exits.enter_async_context(open_traffic(own, random, recorder))
        tables = reading.Tables(pool)
        watch = Watch(own, tables, lambda: traffic.sent)
        await exits.enter_async_context(watch.looking())
        run = Run(stack, own, seed, count, directory, tables, recorder, traffic, watch)
        exits.callback(run.end)
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
