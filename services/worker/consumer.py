"""Records in, positions out: polls without pause, pauses partitions under pressure, commits the finished prefix."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, ConsumerStoppedError, IllegalStateError, KafkaError

from schemas.common import Lane
from services import kafka, telemetry
from services.errors import ServiceError
from services.settings import Settings
from services.worker import header_names
from services.worker.jobs import Record
from services.worker.ledger import Ledger, Partition
from services.worker.records import record_of

POLL_MS = 100
MAX_RECORDS = 500
COMMIT_EVERY_S = 0.2
COMMIT_TIMEOUT_S = 10.0
ERROR_PAUSE_S = 1.0
_log = telemetry.get_logger()


class Pressure:
    """Which lanes are paused. A lane that reached its bound is paused until it is down to half of it."""

    def __init__(self, bound: int) -> None:
        self._widest = bound
        self.bound = bound
        self._full: set[Lane] = set()
        self._reasons: set[str] = set()

    def pause(self, reason: str) -> None:
        """Pause every lane for as long as the reason stands."""
        self._reasons.add(reason)

    def resume(self, reason: str) -> None:
        """The reason no longer stands."""
        self._reasons.discard(reason)

    def narrow(self, bound: int | None) -> None:
        """Let a lane hold no more than that many jobs for now; None for as many as ever."""
        self.bound = self._widest if bound is None else max(1, min(bound, self._widest))

    def paused(self, lane: Lane, num_held: int) -> bool:
        """Whether the lane, with that many jobs in memory, takes no more."""
        if num_held >= self.bound:
            self._full.add(lane)
        elif num_held <= self.bound // 2:
            self._full.discard(lane)
        return bool(self._reasons) or lane in self._full

    def room(self, num_held: int) -> int:
        """How many more records a lane may take."""
        return max(0, self.bound - num_held)


class JobConsumer(ConsumerRebalanceListener):  # type: ignore[misc]  # the library is untyped
    """Owner of the Kafka consumer. `receive` gets fresh records; `assigned` hears of a new assignment."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        num_held: Callable[[Lane], int],
        receive: Callable[[list[Record]], None],
        assigned: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._num_held = num_held
        self._receive = receive
        self._assigned = assigned
        self._lanes = {settings.jobs_topic(lane): lane for lane in settings.lanes}
        self.pressure = Pressure(max(1, settings.max_backlog_jobs // len(self._lanes)))
        self._kafka = kafka.job_consumer(settings)
        self._commit_lock = asyncio.Lock()
        self.settled = False

    async def start(self) -> None:
        """Join the group; raises RetryableError or ConfigError saying why not."""
        self._kafka.subscribe(topics=list(self._lanes), listener=self)
        try:
            with kafka.starting(self._settings):
                await self._kafka.start()
        except ServiceError:
            await self._kafka.stop()
            raise

    async def stop(self) -> None:
        """Leave the group; uncommitted records go to whoever is next."""
        await kafka.leave(self._kafka)

    async def poll(self) -> None:
        """Take records for ever. Polling never stops, so that a long job costs no membership."""
        while True:
            self._apply_pressure()
            try:
                batches = await self._kafka.getmany(timeout_ms=POLL_MS, max_records=self._room())
            except ConsumerStoppedError:
                return
            except (KafkaError, OSError, UnicodeDecodeError) as error:
                await self._recover(error)
                continue
            for messages in batches.values():
                self._take(messages)

    async def _recover(self, error: Exception) -> None:
        """Say what went wrong, and take again what the library had in hand: it forgets that when it fails."""
        if isinstance(error, UnicodeDecodeError):
            header_names.tolerate()
            _log.warning("A header's name is not UTF-8", action="header_name_mended", reason=str(error))
        else:
            reason = str(kafka.translated(error, self._settings))
            telemetry.alarm(_log, "Records cannot be taken", action="poll_failed", reason=reason)
            await asyncio.sleep(ERROR_PAUSE_S)
        while True:
            if await self._rewound():
                return
            await asyncio.sleep(ERROR_PAUSE_S)

    async def _rewound(self) -> bool:
        """Go back to the newest record that was handed out of each partition; False if that must be tried again."""
        try:
            for partition in self._kafka.assignment():
                offset = self._ledger.next_offset(Partition(*partition))
                if offset is None:
                    offset = await self._kafka.committed(partition)
                if offset is None:
                    await self._kafka.seek_to_beginning(partition)
                else:
                    self._kafka.seek(partition, offset)
        except IllegalStateError:
            return False  # a rebalance came in between
        except (KafkaError, OSError) as error:
            _log.warning("Positions not found", action="rewind_failed", reason=str(error))
            return False
        return True

    def _take(self, messages: Iterable[Any]) -> None:
        records = [record_of(message, self._lanes) for message in messages]
        fresh = [record for record in records if self._ledger.receive(record.place)]
        for record in fresh:
            telemetry.MESSAGES_CONSUMED.labels(lane=record.lane).inc()
        if fresh:
            self._receive(fresh)

    def _held(self, lane: Lane) -> int:
        return max(self._num_held(lane), self._ledger.num_open(self._settings.jobs_topic(lane)))

    def _room(self) -> int:
        """Records that no open lane would choke on; the library wants at least one even if every lane is paused."""
        rooms = [self.pressure.room(self._held(lane)) for lane in self._lanes.values()]
        return max(1, min([MAX_RECORDS, *[room for room in rooms if room]]))

    def _apply_pressure(self) -> None:
        """Pause and resume partitions as lanes fill and empty; a rebalance has un-paused them all."""
        assigned, paused = self._kafka.assignment(), self._kafka.paused()
        full = {topic for topic, lane in self._lanes.items() if self.pressure.paused(lane, self._held(lane))}
        wanted = {partition for partition in assigned if partition.topic in full}
        if wanted - paused:
            self._kafka.pause(*(wanted - paused))
        if paused - wanted:
            self._kafka.resume(*(paused - wanted))
        telemetry.PARTITIONS_PAUSED.set(len(wanted))

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Commit what is finished while these are still ours, then forget them."""
        await self.commit()
        self.settled = False
        self._ledger.revoke(Partition(*partition) for partition in revoked)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start afresh with these; their uncommitted records come again."""
        partitions = [Partition(*partition) for partition in assigned]
        self._ledger.assign(partitions)
        self.settled = True
        self._apply_pressure()
        telemetry.REBALANCES.inc()
        telemetry.PARTITIONS_ASSIGNED.set(len(partitions))
        _log.info("Partitions assigned", action="assigned", partitions=len(partitions))
        self._assigned()

    async def commit_often(self) -> None:
        """Commit the finished prefix for ever."""
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            await self.commit()
            self._measure_lag()

    def _measure_lag(self) -> None:
        for partition in self._kafka.assignment():
            end, position = self._kafka.highwater(partition), self._ledger.position(Partition(*partition))
            if end is not None and position is not None:
                gauge = telemetry.CONSUMER_LAG.labels(topic=partition.topic, partition=str(partition.partition))
                gauge.set(end - position)

    async def commit(self) -> bool:
        """Commit what is due, with a bounded wait; False if it could not be done now and will be tried again."""
        async with self._commit_lock:
            assigned = self._kafka.assignment()
            due = {place: position for place, position in self._ledger.due().items() if place in assigned}
            if not due:
                return True
            offsets = {TopicPartition(*partition): position for partition, position in due.items()}
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await self._kafka.commit(offsets)
            except (CommitFailedError, IllegalStateError):
                return False  # a rebalance came first: the records come again, and are known
            except (KafkaError, OSError, TimeoutError) as error:
                reason = str(kafka.translated(error, self._settings))
                _log.warning("Positions not committed", action="commit_failed", reason=reason)
                return False
            self._ledger.committed(due)
            return True
