"""Offsets on a real broker: finished records are not processed again, and no position is lost silently."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from schemas.common import Lane
from services.kafka import clients as kafka
from services.process import telemetry
from services.process.settings import Settings
from services.worker.intake.consumer import JOINED_PER_JOB, ConsumerCallbacks, Counts, JobConsumer
from services.worker.jobs import Record
from services.worker.offsets.ledger import Ledger, Partition, Place
from tests.topics import recreate_topic
from tests.waiting import eventually


class Reader:
    """A consumer of the standard lane that collects records and runs no job."""

    def __init__(self, settings: Settings) -> None:
        self.records: list[Record] = []
        self.displaced: list[Partition] = []
        self.ledger = Ledger()
        self.assignments = 0
        self.num_joined = 0
        callbacks = ConsumerCallbacks(self.records.extend, self._assigned, self._drained, self.displaced.append)
        counts = Counts(lambda _lane: 0, lambda _lane: self.num_joined)
        self.consumer = JobConsumer(settings, self.ledger, counts, callbacks)

    def _assigned(self) -> None:
        self.assignments += 1

    async def _drained(self, partitions: frozenset[Partition]) -> None:
        assert partitions <= self.ledger.partitions

    def offsets(self, partition: Partition) -> list[int]:
        return [record.place.offset for record in self.records if record.place.partition == partition]

    async def has(self, partition: Partition, offsets: list[int]) -> None:
        await eventually(lambda: self.offsets(partition) == offsets, what=f"{offsets}, not {self.offsets(partition)}")


def standard(settings: Settings) -> Settings:
    return settings.model_copy(update={"lanes": (Lane.STANDARD,), "kafka_session_timeout_s": 6.0})


@asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator[Reader]:
    reader = Reader(standard(settings))
    await reader.consumer.start()
    tasks = [asyncio.create_task(work) for work in (reader.consumer.poll(), reader.consumer.watch_topics())]
    try:
        yield reader
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await reader.consumer.stop()


async def produce(settings: Settings, partition: Partition, count: int) -> None:
    producer = kafka.producer(settings)
    await producer.start()
    try:
        for number in range(count):
            await producer.send_and_wait(partition.topic, f"{number}".encode(), partition=partition.number)
    finally:
        await producer.stop()


@pytest.fixture
async def place(broker_settings: Settings) -> Partition:
    await kafka.ensure_topics(broker_settings)
    return Partition(broker_settings.jobs_topic(Lane.STANDARD), 0)


async def leave_finished(settings: Settings, place: Partition, *offsets: int) -> None:
    """Produce ten records; a worker finishes these offsets, commits and leaves."""
    await kafka.ensure_topics(settings)
    await produce(settings, place, 10)
    async with reading(settings) as reader:
        await reader.has(place, list(range(10)))
        for offset in offsets:
            reader.ledger.finish(Place(place, offset))
        assert await reader.consumer.commit(urgent=True)


@pytest.mark.kafka
async def test_finished_records_above_the_position_are_not_redelivered(apache_settings: Settings) -> None:
    place = Partition(apache_settings.jobs_topic(Lane.STANDARD), 0)
    await leave_finished(apache_settings, place, 0, 2, 3, 5, 9)
    async with reading(apache_settings) as reader:
        await produce(apache_settings, place, 1)
        await reader.has(place, [1, 4, 6, 7, 8, 10])


async def test_a_broker_without_commit_metadata_redelivers_everything_above_the_position(
    settings: Settings,
) -> None:
    """As the embedded broker: finished jobs are then recognised by their rows."""
    place = Partition(settings.jobs_topic(Lane.STANDARD), 0)
    await leave_finished(settings, place, 0, 2)
    async with reading(settings) as reader:
        await reader.has(place, list(range(1, 10)))


@pytest.mark.kafka
async def test_after_a_rebalance_finished_records_are_not_processed_again(apache_settings: Settings) -> None:
    """An eager rebalance: the new owner of a partition fetches every uncommitted record again."""
    await kafka.ensure_topics(apache_settings)
    place = Partition(apache_settings.jobs_topic(Lane.STANDARD), 0)
    await produce(apache_settings, place, 6)
    async with reading(apache_settings) as reader:
        await reader.has(place, list(range(6)))
        for offset in (1, 2, 4):
            reader.ledger.finish(Place(place, offset))
        async with reading(apache_settings) as other:
            await eventually(lambda: other.assignments, what="the other to have partitions")

            def again() -> list[int]:
                return reader.offsets(place)[6:] + other.offsets(place)

            await eventually(lambda: len(again()) >= 3, what="the unfinished ones")
            assert set(again()) == {0, 3, 5}


async def test_metadata_that_does_not_fit_pauses_only_its_partition(
    broker_settings: Settings, place: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "services.worker.offsets.commits.fit", lambda position, frontier, unfinished, _max: ("", not unfinished)
    )
    await produce(broker_settings, place, 4)
    async with reading(broker_settings) as reader:
        await reader.has(place, [0, 1, 2, 3])
        reader.ledger.finish(Place(place, 2))
        await reader.consumer.commit(urgent=True)
        paused = reader.consumer._kafka.paused  # the library's own state
        await eventually(lambda: paused() == {TopicPartition(*place)}, what="the partition to be paused")
        for offset in (0, 1, 3):
            reader.ledger.finish(Place(place, offset))
        await reader.consumer.commit(urgent=True)
        await eventually(lambda: not paused(), what="the partition to resume")


@pytest.mark.kafka
@pytest.mark.parametrize("position", [2, 1000], ids=["before the earliest", "beyond the end"])
async def test_a_position_that_no_longer_exists_is_counted_and_reading_restarts_at_the_earliest_record(
    apache_settings: Settings, position: int
) -> None:
    await kafka.ensure_topics(apache_settings)
    place = Partition(apache_settings.jobs_topic(Lane.STANDARD), 0)
    await produce(apache_settings, place, 8)
    await commit(apache_settings, place, position)
    async with kafka.admin(apache_settings) as admin:
        await admin.delete_records({TopicPartition(*place): RecordsToDelete(before_offset=5)})
    before = telemetry.OFFSETS_OUT_OF_RANGE._value.get()  # the library has no other way to read one
    async with reading(apache_settings) as reader:
        await reader.has(place, [5, 6, 7])
        assert reader.displaced == [place]
        assert await reader.consumer.commit()
    assert telemetry.OFFSETS_OUT_OF_RANGE._value.get() == before + 1
    async with reading(apache_settings) as reader:
        await reader.has(place, [5, 6, 7])
        assert reader.displaced == []


async def commit(settings: Settings, place: Partition, position: int) -> None:
    """Commit as a member of the group, and leave."""
    consumer = kafka.job_consumer(standard(settings))
    consumer.subscribe([place.topic])
    await consumer.start()
    try:
        await consumer.commit({TopicPartition(*place): position})
    finally:
        await kafka.leave_group(consumer)


async def test_repeats_of_a_job_in_memory_leave_room_for_others(broker_settings: Settings, place: Partition) -> None:
    async with reading(broker_settings.model_copy(update={"max_backlog_jobs": 4})) as reader:
        reader.num_joined = JOINED_PER_JOB
        await produce(broker_settings, place, 4 + JOINED_PER_JOB)
        await reader.has(place, list(range(3 + JOINED_PER_JOB)))  # the weight of three jobs, and one for repeats


async def test_a_partition_whose_commit_is_gone_is_read_from_the_beginning(
    broker_settings: Settings, place: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a topic was recreated or a broker lost its data: offsets refer to other records."""
    async with reading(broker_settings) as reader:
        await produce(broker_settings, place, 3)
        await reader.has(place, [0, 1, 2])
        for offset in range(3):
            reader.ledger.finish(Place(place, offset))
        assert await reader.consumer.commit()

        async def no_commits(*_: object) -> dict[TopicPartition, tuple[int, str]]:
            return {}

        monkeypatch.setattr(kafka, "committed_offsets", no_commits)
        assigned = [TopicPartition(*each) for each in reader.ledger.partitions]
        await reader.consumer.on_partitions_revoked(assigned)
        await reader.consumer.on_partitions_assigned(assigned)
        await reader.has(place, [0, 1, 2, 0, 1, 2])
        assert place in reader.displaced


async def test_a_recreated_topic_is_read_from_its_beginning(
    broker_settings: Settings, place: Partition, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds more than the old one did when the worker looks: the old position would pass over the first three."""
    async with reading(broker_settings) as reader:
        await produce(broker_settings, place, 3)
        await reader.has(place, [0, 1, 2])
        for offset in range(3):
            reader.ledger.finish(Place(place, offset))
        assert await reader.consumer.commit()
        await eventually(lambda: place.topic in reader.consumer._topics.names, what="the topic's id")
        await recreate_topic(broker_settings, place.topic)
        await produce(broker_settings, place, 5)
        await eventually(lambda: place in reader.displaced, what="what is known of the old topic to be forgotten")
        await eventually(lambda: {0, 1, 2, 3, 4} == set(reader.offsets(place)[3:]), what="all of the new topic")

        async def is_committed() -> bool:  # a rebalance may come in between: the library sees that the topic was away
            reader.ledger.finish(Place(place, 0))
            await reader.consumer.commit()
            return await reader.consumer._kafka.committed(TopicPartition(*place)) == 1

        await eventually(is_committed, what="a position in the new topic")
    async with reading(broker_settings) as reader:
        await reader.has(place, [1, 2, 3, 4])
