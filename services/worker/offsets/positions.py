"""Where to begin with each partition, and what is known to be finished beyond that."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from services.kafka import clients as kafka
from services.process import telemetry
from services.worker.offsets.finished import Finished, decode
from services.worker.offsets.ledger import Ledger, Partition

TIMEOUT_S = 10.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the commits' metadata says is finished, and the partitions without a commit."""

    told: Mapping[Partition, Finished]
    uncommitted: Sequence[Partition]


class Positions:
    """Moves a consumer's positions. The library never resets one by itself (`auto_offset_reset` is `none`)."""

    def __init__(self, consumer: Any, ledger: Ledger) -> None:
        self._kafka = consumer
        self._ledger = ledger

    async def begin(self, partitions: Iterable[TopicPartition]) -> Beginning:
        """Go to the earliest record where nothing is committed; returns what the commits' metadata tells, and where
        nothing is.

        Where the broker does not answer in time nothing is told: finished jobs are then recognised one by one.
        """
        partitions = list(partitions)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                commits = await kafka.commits_of(self._kafka, partitions)
                uncommitted = [each for each in partitions if each not in commits]
                await self._to_earliest(uncommitted)
        except (KafkaError, OSError, TimeoutError, IllegalStateError) as error:
            _log.warning("Commits not read", action="commits_not_read", reason=str(error) or type(error).__name__)
            return Beginning({}, ())
        told = {Partition(*each): _told(each, position, text) for each, (position, text) in commits.items()}
        return Beginning(
            {partition: finished for partition, finished in told.items() if finished is not None},
            tuple(Partition(*each) for each in uncommitted),
        )

    async def _to_earliest(self, partitions: list[TopicPartition]) -> None:
        for partition, offset in (await self._earliest(partitions)).items():
            self._kafka.seek(partition, offset)

    async def _earliest(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict(await self._kafka.beginning_offsets(partitions)) if partitions else {}

    async def rewind(self) -> bool:
        """Go back to the newest record that was handed out of each partition; False if that must be tried again."""
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
            _log.warning("Positions not found", action="rewind_failed", reason=str(error))
            return False
        return True

    async def begin_anew(self, topics: Collection[str]) -> list[Partition]:
        """Go to the earliest record of topics that were deleted and made anew: positions of the old ones mean nothing.

        Returns the partitions whose offsets mean other records from now on; raises the library's errors.
        """
        partitions = [each for each in self._kafka.assignment() if each.topic in topics]
        earliest = await self._earliest(partitions)
        for partition, offset in earliest.items():
            self._kafka.seek(partition, offset)
            self._ledger.restart(Partition(*partition), offset)
        return [Partition(*partition) for partition in earliest]

    async def restart(self, lost: Mapping[TopicPartition, int]) -> list[Partition]:
        """Go to the earliest record that is retained where the broker has none at our position.

        `lost` is that position by partition. Returns the partitions whose offsets mean other records from now on.
        """
        try:
            earliest = await self._earliest(list(lost))
        except (KafkaError, OSError) as error:
            _log.warning("Positions not found", action="rewind_failed", reason=str(error))
            return []
        for partition, offset in earliest.items():
            telemetry.OFFSETS_OUT_OF_RANGE.inc()
            telemetry.alarm(
                _log,
                "The position of a partition no longer exists; its earliest record is next",
                action="offset_out_of_range",
                topic=partition.topic,
                partition=partition.partition,
                position=lost[partition],
                earliest=offset,
                records_lost=max(0, offset - lost[partition]),
            )
            self._ledger.restart(Partition(*partition), offset)
        return [Partition(*partition) for partition in earliest]


def _told(partition: TopicPartition, position: int, text: str) -> Finished | None:
    try:
        return decode(position, text)
    except ValueError as error:
        _log.warning(
            "What a commit tells is not understood",
            action="metadata_not_understood",
            topic=partition.topic,
            partition=partition.partition,
            reason=str(error),
        )
        return None
