"""The assignor in real groups: members join, leave, and run the range assignor of earlier versions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from schemas.common import Lane
from services.kafka import clients as kafka
from services.kafka.assignor import StickyLaneAssignor
from services.process.settings import Settings
from tests.waiting import eventually

pytestmark = pytest.mark.slow


class Cluster:
    """Two topics of four partitions."""

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(4)) if topic in ("one", "two") else None


def joined(assignor: StickyLaneAssignor, sent: Any) -> None:
    assignor.on_assignment(ConsumerProtocolMemberAssignment.decode(sent.encode()))


def sent_by(assignor: StickyLaneAssignor) -> Any:
    return ConsumerProtocolMemberMetadata.decode(assignor.metadata(["one", "two"]).encode())


def test_a_member_sends_what_it_owns_and_the_number_of_the_assignment() -> None:
    first, second, third = StickyLaneAssignor(), StickyLaneAssignor(), StickyLaneAssignor()
    for name, sent in first.assign(Cluster(), {"a": sent_by(first), "b": sent_by(second)}).items():
        joined({"a": first, "b": second}[name], sent)
    group = {"x": sent_by(second), "y": sent_by(third), "z": sent_by(first)}
    after = third.assign(Cluster(), group)
    assert {name: dict(sent.assignment)["one"] for name, sent in after.items()} == {"x": [2, 3], "y": [1], "z": [0]}


@pytest.mark.parametrize("user_data", [b"", b"\x00\x01", b"[]", b'{"epoch": 1}', b'{"epoch": 1, "owned": {"one": 3}}'])
def test_user_data_of_another_kind_is_a_member_that_owned_nothing(user_data: bytes) -> None:
    foreign = ConsumerProtocolMemberMetadata(0, ["one"], user_data)
    assignment = StickyLaneAssignor().assign(Cluster(), {"foreign": foreign})
    assert dict(assignment["foreign"].assignment) == {"one": [0, 1, 2, 3]}


def wide(settings: Settings) -> Settings:
    return settings.model_copy(update={"partitions": 12, "kafka_session_timeout_s": 6.0})


class Group:
    """Members of the pool's group, and what each has been assigned."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._polls: dict[Any, asyncio.Task[None]] = {}
        self.members: list[Any] = []

    async def join(self, *assignors: Any) -> Any:
        consumer = kafka.job_consumer(self._settings)
        if assignors:
            consumer._partition_assignment_strategy = assignors
        consumer.subscribe([self._settings.jobs_topic(lane) for lane in Lane])
        await consumer.start()
        self.members.append(consumer)
        await eventually(self.settled, what="the group to settle")
        return consumer

    async def leave(self, consumer: Any) -> None:
        self.members.remove(consumer)
        await kafka.leave_group(consumer)
        if self.members:
            await eventually(self.settled, what="the group to settle")

    def settled(self) -> bool:
        owned = [partition for member in self.members for partition in member.assignment()]
        return all(member.assignment() for member in self.members) and len(set(owned)) == len(owned) == 36

    def numbers(self, consumer: Any) -> set[int]:
        """The numbers of a member, which are the same in every lane."""
        by_lane = [
            {number for topic, number in consumer.assignment() if topic == self._settings.jobs_topic(lane)}
            for lane in Lane
        ]
        assert by_lane[0] == by_lane[1] == by_lane[2], "the lanes of a number are apart"
        return by_lane[0]


@asynccontextmanager
async def group(settings: Settings) -> AsyncIterator[Group]:
    settings = wide(settings)
    await kafka.ensure_topics(settings)
    members = Group(settings)
    async with AsyncExitStack() as stack:
        yield members
        for consumer in members.members:
            stack.push_async_callback(kafka.leave_group, consumer)


async def test_a_third_member_takes_its_share_and_gives_it_back(broker_settings: Settings) -> None:
    async with group(broker_settings) as members:
        first, second = await members.join(), await members.join()
        before = members.numbers(first), members.numbers(second)
        assert [len(numbers) for numbers in before] == [6, 6]
        third = await members.join()
        kept = members.numbers(first), members.numbers(second)
        assert [len(numbers) for numbers in (*kept, members.numbers(third))] == [4, 4, 4]
        assert kept[0] < before[0]
        assert kept[1] < before[1]
        await members.leave(third)
        assert kept[0] < members.numbers(first)
        assert kept[1] < members.numbers(second)


@pytest.mark.kafka
async def test_members_of_the_earlier_version_and_of_this_one_form_one_group(apache_settings: Settings) -> None:
    """A rolling deploy: an earlier version leads at first, and in the end only this version is left."""
    async with group(apache_settings) as members:
        old = [await members.join(RangePartitionAssignor), await members.join(RangePartitionAssignor)]
        new = [await members.join()]
        assert {len(members.numbers(each)) for each in (*old, *new)} == {4}
        await members.leave(old[0])
        new.append(await members.join())
        await members.leave(old[1])
        before = [members.numbers(each) for each in new]
        third = await members.join()
        kept = [members.numbers(each) for each in new]
        assert len(members.numbers(third)) == 4
        assert all(now < then for now, then in zip(kept, before, strict=True))


def test_partitions_are_named_as_the_library_names_them() -> None:
    assignor = StickyLaneAssignor()
    sent = assignor.assign(Cluster(), {"only": sent_by(assignor)})["only"]
    assert ConsumerProtocolMemberAssignment.decode(sent.encode()).partitions() == [
        TopicPartition(topic, number) for topic in ("one", "two") for number in range(4)
    ]
