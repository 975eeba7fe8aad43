"""Where to start reading each partition, and which records above that are finished."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from services.kafka import clients as kafka
from services.process import telemetry
from services.worker.offsets.finished import FinishedOffsets, decode
from services.worker.offsets.ledger import Ledger, Partition

TIMEOUT_S = 10.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class StartPositions:
    """Finished offsets from the commits' metadata, and the partitions without a commit."""

    finished: Mapping[Partition, FinishedOffsets]
    uncommitted: Sequence[Partition]


class Positions:
    """Seeks a consumer. The library never resets a position on its own (`auto_offset_reset` is `none`)."""

    def __init__(self, consumer: Any, ledger: Ledger) -> None:
        self._kafka = consumer
        self._ledger = ledger

    async def begin(self, partitions: Iterable[TopicPartition]) -> StartPositions:
        """Seek partitions without a commit to the earliest record; returns what is known about the others.

        If the broker does not answer in time, the result is empty: finished jobs are then recognised by their ids.
        """
        partitions = list(partitions)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                commits = await kafka.committed_offsets(self._kafka, partitions)
                uncommitted = [each for each in partitions if each not in commits]
                await self._to_earliest(uncommitted)
        except (KafkaError, OSError, TimeoutError, IllegalStateError) as error:
            _log.warning(
                "Committed offsets cannot be read", action="commits_not_read", reason=str(error) or type(error).__name__
            )
            return StartPositions({}, ())
        decoded = {Partition(*each): _decoded(each, position, text) for each, (position, text) in commits.items()}
        return StartPositions(
            {partition: finished for partition, finished in decoded.items() if finished is not None},
            tuple(Partition(*each) for each in uncommitted),
        )

    async def _to_earliest(self, partitions: list[TopicPartition]) -> None:
        for partition, offset in (await self._earliest(partitions)).items():
            self._kafka.seek(partition, offset)

    async def _earliest(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict(await self._kafka.beginning_offsets(partitions)) if partitions else {}

    async def rewind(self) -> bool:
        """Seek each partition to the record after the last one received; returns False if that must be retried."""
        try:
            for partition in self._kafka.assignment():
                offset = self._ledger.next_offset(Partition(*partition))
                if offset is None:
                    offset = await self._kafka.committed(partition)
                if offset is None:
                    await self._to_earliest([partition])
                else:
                    self._kafka.seek(partition, offset)
        except IllegalStateError:
            return False  # a rebalance came in between
        except (KafkaError, OSError) as error:
            _log.warning("Offsets cannot be read", action="rewind_failed", reason=str(error))
            return False
        return True

    async def restart_recreated(self, topics: Collection[str]) -> list[Partition]:
        """Seek recreated topics to their earliest record: offsets of the old topics are void.

        Returns the partitions whose offsets now denote other records; raises the library's errors.
        """
        partitions = [each for each in self._kafka.assignment() if each.topic in topics]
        earliest = await self._earliest(partitions)
        for partition, offset in earliest.items():
            self._kafka.seek(partition, offset)
            self._ledger.restart(Partition(*partition), offset)
        return [Partition(*partition) for partition in earliest]

    async def restart(self, lost: Mapping[TopicPartition, int]) -> list[Partition]:
        """Seek partitions whose position no longer exists to the earliest retained record.

        `lost` maps each partition to that position. Returns the partitions whose offsets now denote other records.
        """
        try:
            earliest = await self._earliest(list(lost))
        except (KafkaError, OSError) as error:
            _log.warning("Offsets cannot be read", action="rewind_failed", reason=str(error))
            return []
        for partition, offset in earliest.items():
            telemetry.OFFSETS_OUT_OF_RANGE.inc()
            telemetry.alarm(
                _log,
                "The position of a partition no longer exists; reading from its earliest record",
                action="offset_out_of_range",
                topic=partition.topic,
                partition=partition.partition,
                position=lost[partition],
                earliest=offset,
                records_lost=max(0, offset - lost[partition]),
            )
            self._ledger.restart(Partition(*partition), offset)
        return [Partition(*partition) for partition in earliest]


def _decoded(partition: TopicPartition, position: int, text: str) -> FinishedOffsets | None:
    try:
        return decode(position, text)
    except ValueError as error:
        _log.warning(
            "The metadata of a commit cannot be decoded",
            action="metadata_not_understood",
            topic=partition.topic,
            partition=partition.partition,
            reason=str(error),
        )
        return None
