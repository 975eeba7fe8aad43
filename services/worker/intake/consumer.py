"""The Kafka consumer: polls, pauses partitions under back-pressure, commits the offsets of finished records."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    ConsumerStoppedError,
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    OffsetMetadataTooLargeError,
    OffsetOutOfRangeError,
)

from schemas.common import Lane
from services.errors import ServiceError
from services.kafka import clients as kafka
from services.kafka import header_names
from services.kafka.topic_ids import KnownTopics, topic_ids
from services.process import telemetry
from services.process.settings import Settings
from services.process.watchdog import Part
from services.worker.intake.pressure import Pressure
from services.worker.intake.records import record_of
from services.worker.jobs import Record
from services.worker.offsets.commits import Commits
from services.worker.offsets.ledger import Ledger, Partition
from services.worker.offsets.positions import Positions

POLL_MS = 100
# No record of a paused lane wakes a poll, so this bounds the delay until a full lane resumes.
FULL_POLL_MS = 10
MAX_RECORDS = 500
# A delivery that joined a job in memory costs one offset; this many weigh as much as one job.
JOINED_PER_JOB = 64
COMMIT_EVERY_S = 0.2
COMMIT_TIMEOUT_S = 10.0
ERROR_PAUSE_S = 1.0
WATCH_TOPICS_S = 1.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class ConsumerCallbacks:
    """`receive` accepts new records, `assigned` is called after an assignment, `drain` waits a bounded time for the
    running jobs of revoked partitions, `forget_places` drops the places of jobs in a partition."""

    receive: Callable[[list[Record]], None]
    assigned: Callable[[], None]
    drain: Callable[[frozenset[Partition]], Awaitable[None]]
    forget_places: Callable[[Partition], None]


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a lane: the number of jobs in memory, and of records that joined one of them as another delivery."""

    jobs: Callable[[Lane], int]
    joined: Callable[[Lane], int]


class JobConsumer(ConsumerRebalanceListener):  # type: ignore[misc]  # the library is untyped
    """Owns the Kafka consumer."""

    def __init__(self, settings: Settings, ledger: Ledger, counts: Counts, callbacks: ConsumerCallbacks) -> None:
        self._settings = settings
        self._ledger = ledger
        self._num_jobs, self._num_joined = counts.jobs, counts.joined
        self._callbacks = callbacks
        self._lanes = {settings.jobs_topic(lane): lane for lane in settings.lanes}
        self.pressure = Pressure(max(1, settings.max_backlog_jobs // len(self._lanes)))
        self._kafka = kafka.job_consumer(settings)
        self._positions = Positions(self._kafka, ledger)
        self._commits = Commits(ledger)
        self._topics = KnownTopics()
        self._commit_lock = asyncio.Lock()
        self._polls = 0
        self.stable = False

    async def start(self) -> None:
        """Join the group; raises RetryableError or ConfigError with the reason if that fails."""
        self._kafka.subscribe(topics=list(self._lanes), listener=self)
        try:
            with kafka.starting(self._settings):
                await self._kafka.start()
        except ServiceError:
            await self._kafka.stop()
            raise

    async def stop(self) -> None:
        """Leave the group; uncommitted records are redelivered to another worker."""
        await kafka.leave_group(self._kafka)

    async def poll(self) -> None:
        """Poll until cancelled. Polling never stops, so that a long job does not cost the group membership."""
        while True:
            wait_ms = FULL_POLL_MS if self._apply_pressure() else POLL_MS
            try:
                batches = await self._kafka.getmany(timeout_ms=wait_ms, max_records=self._max_records())
            except ConsumerStoppedError:
                return
            except (KafkaError, OSError, UnicodeDecodeError) as error:
                await self._recover(error)
                continue
            self._polls += 1
            for partition, messages in batches.items():
                self._receive(partition, messages)
            await asyncio.sleep(0)  # the library returns buffered records without yielding

    async def _recover(self, error: Exception) -> None:
        """Log the error, and fetch again the records that the library dropped from its buffer on failure."""
        match error:
            case UnicodeDecodeError():
                header_names.tolerate()
                _log.warning("A header's name is not UTF-8", action="header_name_mended", reason=str(error))
            case OffsetOutOfRangeError():
                for partition in await self._positions.restart(error.args[0]):
                    self._callbacks.forget_places(partition)
            case NoOffsetForPartitionError():
                pass  # a new pool starts at the earliest record
            case _:
                reason = str(kafka.translated(error, self._settings))
                telemetry.alarm(_log, "Records cannot be fetched", action="poll_failed", reason=reason)
                await asyncio.sleep(ERROR_PAUSE_S)
        while True:
            if await self._positions.rewind():
                return
            await asyncio.sleep(ERROR_PAUSE_S)

    def _receive(self, partition: TopicPartition, messages: Sequence[Any]) -> None:
        if Partition(*partition) not in self._ledger.partitions:
            self._seek_back(partition, messages)
            return
        records = [record_of(message, self._lanes) for message in messages]
        new = [record for record in records if self._ledger.receive(record.place)]
        if new:
            telemetry.MESSAGES_CONSUMED.labels(lane=new[0].lane).inc(len(new))
            self._callbacks.receive(new)

    def _seek_back(self, partition: TopicPartition, messages: Sequence[Any]) -> None:
        """Fetch these records again: it is not known yet which of them are finished."""
        try:
            self._kafka.seek(partition, messages[0].offset)
        except IllegalStateError:
            return  # the partition was revoked meanwhile

    def room_for_parked(self) -> tuple[list[Lane], int]:
        """The lanes that have room for parked jobs, and the number of jobs that each can claim."""
        room = {lane: self.pressure.room_for_parked(self._num_jobs(lane)) for lane in self._lanes.values()}
        lanes = [lane for lane, count in room.items() if count]
        return lanes, min((room[lane] for lane in lanes), default=0)

    def _weight(self, lane: Lane) -> int:
        """Records in memory; one that joined a job weighs little, so that repeats of a job leave room for others."""
        joined = self._num_joined(lane)
        num_open = self._ledger.num_open(self._settings.jobs_topic(lane))
        return max(self._num_jobs(lane), num_open - joined + joined // JOINED_PER_JOB)

    def _max_records(self) -> int:
        """Records that fit into every open lane; the library requires at least one even if every lane is paused."""
        rooms = [self.pressure.room(self._weight(lane)) for lane in self._lanes.values()]
        return max(1, min([MAX_RECORDS, *[room for room in rooms if room]]))

    def _apply_pressure(self) -> bool:
        """Pause and resume partitions as lanes fill and empty; a rebalance resumes them all.

        Returns whether any lane is full.
        """
        assigned, paused = self._kafka.assignment(), self._kafka.paused()
        full = {topic for topic, lane in self._lanes.items() if self.pressure.paused(lane, self._weight(lane))}
        open_to = self._ledger.partitions - self._commits.crowded
        wanted = {each for each in assigned if each.topic in full or Partition(*each) not in open_to}
        if wanted - paused:
            self._kafka.pause(*(wanted - paused))
        if paused - wanted:
            self._kafka.resume(*(paused - wanted))
        telemetry.PARTITIONS_PAUSED.set(len(wanted))
        return bool(full)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Wait a bounded time for running jobs, commit while the partitions are still assigned, and revoke them."""
        partitions = frozenset(Partition(*partition) for partition in revoked)
        await self._callbacks.drain(partitions)
        await self.commit(urgent=True)
        self.stable = False
        self._ledger.revoke(partitions)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start the partitions from their committed offsets; records known to be finished are skipped."""
        self._apply_pressure()  # pause first: it is not known yet which records are finished
        assigned = list(assigned)
        start = await self._positions.begin(assigned)
        for partition in start.uncommitted:
            self._forget_uncommitted(partition)
        self._ledger.assign([Partition(*partition) for partition in assigned], start.finished)
        self.stable = True
        self._apply_pressure()
        telemetry.REBALANCES.inc()
        telemetry.PARTITIONS_ASSIGNED.set(len(assigned))
        _log.info("Partitions assigned", action="assigned", partitions=len(assigned))
        self._callbacks.assigned()

    def _forget_uncommitted(self, partition: Partition) -> None:
        """Forget a partition without a committed offset: its topic may have been recreated, with other records at the
        same offsets. If it was not, redelivered jobs are recognised by their ids."""
        committed = self._ledger.forget(partition)
        if committed is None:
            return  # new to this worker
        if committed:
            _log.warning(
                "The committed offset is gone; reading from the earliest record",
                action="commits_gone",
                topic=partition.topic,
                partition=partition.number,
            )
        self._callbacks.forget_places(partition)

    async def commit_periodically(self) -> None:
        """Commit periodically until cancelled."""
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            await self.commit()
            self._measure_lag()

    async def watch_topics(self) -> None:
        """Detect topics that are deleted and recreated, until cancelled, and read them from the beginning.

        Without this, a broker may continue silently from the old offset and skip records of the new topic.
        """
        while True:
            await asyncio.sleep(WATCH_TOPICS_S)
            try:
                if recreated := self._topics.recreated(await topic_ids(self._kafka, list(self._lanes))):
                    await self._read_recreated(recreated)
            except (KafkaError, OSError, IllegalStateError) as error:
                _log.warning("Topic ids cannot be read", action="topics_not_watched", reason=str(error))

    async def _read_recreated(self, topics: set[str]) -> None:
        telemetry.alarm(
            _log,
            "A topic was deleted and recreated; reading it from the beginning",
            action="topic_recreated",
            topics=sorted(topics),
        )
        kafka.refresh_metadata(self._kafka)  # the library may have cached that they are missing, for half a minute
        while True:
            try:
                partitions = await self._positions.restart_recreated(topics)
            except (KafkaError, OSError, IllegalStateError) as error:
                _log.warning("Offsets cannot be read", action="rewind_failed", reason=str(error))
                await asyncio.sleep(ERROR_PAUSE_S)
            else:
                break
        for partition in partitions:
            self._callbacks.forget_places(partition)

    def _measure_lag(self) -> None:
        for partition in self._kafka.assignment():
            end, position = self._kafka.highwater(partition), self._ledger.position(Partition(*partition))
            if end is not None and position is not None:
                gauge = telemetry.CONSUMER_LAG.labels(topic=partition.topic, partition=str(partition.partition))
                gauge.set(end - position)

    async def commit(self, *, urgent: bool = False) -> bool:
        """Commit what is due, with a timeout; returns False if it failed and will be retried."""
        async with self._commit_lock:
            due = self._commits.due(time.monotonic(), self._kafka.assignment(), urgent=urgent)
            if not due:
                return True
            offsets = {TopicPartition(*place): (commit.position, commit.metadata) for place, commit in due.items()}
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await self._kafka.commit(offsets)
            except OffsetMetadataTooLargeError:
                self._commits.halve_metadata()
                _log.warning("The broker accepts less commit metadata", action="metadata_narrowed")
                return False
            except (CommitFailedError, IllegalStateError):
                return False  # a rebalance came first: the records are redelivered and recognised
            except (KafkaError, OSError, TimeoutError) as error:
                reason = str(kafka.translated(error, self._settings))
                _log.warning("Offsets cannot be committed", action="commit_failed", reason=reason)
                return False
            self._commits.acknowledged(due, time.monotonic())
            return True

    def progress(self) -> dict[str, Part]:
        """Progress of polling and of each partition, for the watchdog."""
        parts = {"polling": Part(has_work=True, progress=self._polls)}
        paused = self._kafka.paused()
        for partition in self._kafka.assignment():
            position, end = kafka.position_and_end(self._kafka, partition)
            has_work = partition not in paused and position is not None and end is not None and position < end
            parts[f"partition {partition.topic}/{partition.partition}"] = Part(has_work, position)
        return parts
