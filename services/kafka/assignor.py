"""The group's assignor: `assignment.py` behind the library's interface.

It keeps the name of the range assignor that earlier versions used, and adds what it needs as user data, which theirs
ignores. Members of both kinds form one group during a rolling deploy, and the leader's kind decides. A second protocol
name would cost a rebalance more: aiokafka sends one JoinGroup request for every assignor that it is given.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from services.kafka.assignment import Member, assign


class StickyLaneAssignor(AbstractPartitionAssignor):  # type: ignore[misc]  # the library is untyped
    """The assignor of one consumer: an instance, not a class as in the library, because it remembers its assignment.

    The leader numbers its assignments. A member sends back what it owns and the number, so that a member that missed
    an assignment does not claim partitions that another one owns by now.
    """

    name = RangePartitionAssignor.name
    version = RangePartitionAssignor.version

    def __init__(self) -> None:
        self._owned: dict[str, list[int]] = {}
        self._epoch = 0

    def metadata(self, topics: Iterable[str]) -> Any:
        """What this member sends when it joins."""
        return ConsumerProtocolMemberMetadata(self.version, list(topics), _encode(self._epoch, self._owned))

    def assign(self, cluster: ClusterMetadata, members: Mapping[str, Any]) -> dict[str, Any]:
        """The leader's part: the partitions of every member."""
        known = {name: _member(metadata) for name, metadata in members.items()}
        topics = frozenset[str]().union(*(member.topics for member in known.values()))
        counts = {topic: len(cluster.partitions_for_topic(topic) or ()) for topic in topics}
        epoch = 1 + max((member.epoch for member in known.values()), default=0)
        return {
            name: ConsumerProtocolMemberAssignment(self.version, sorted(partitions.items()), _encode(epoch, {}))
            for name, partitions in assign(counts, known).items()
        }

    def on_assignment(self, assignment: Any) -> None:
        """Remember the assignment; a leader of an earlier version does not number it."""
        epoch, _ = _decode(assignment.user_data)
        self._epoch = epoch or self._epoch + 1
        self._owned = {topic: list(numbers) for topic, numbers in assignment.assignment}


def _member(metadata: Any) -> Member:
    epoch, owned = _decode(metadata.user_data)
    return Member(frozenset(metadata.subscription), owned, epoch)


def _encode(epoch: int, owned: Mapping[str, list[int]]) -> bytes:
    return json.dumps({"epoch": epoch, "owned": owned}, separators=(",", ":")).encode()


def _decode(user_data: bytes | None) -> tuple[int, dict[str, list[int]]]:
    """Epoch and partitions; (0, {}) for user data of another kind, whose member then keeps nothing by preference."""
    try:
        sent = json.loads(user_data or b"{}")
        owned = {str(topic): [int(number) for number in numbers] for topic, numbers in sent["owned"].items()}
        return int(sent["epoch"]), owned
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0, {}
