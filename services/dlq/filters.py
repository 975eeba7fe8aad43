"""Which dead letters a command selects. Pure."""

from dataclasses import dataclass
from datetime import datetime

from services.dlq.dead_letters import DeadLetter, DeadLetterPosition


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Conditions that all must hold; None or empty matches everything. Times are those of dead-lettering."""

    positions: frozenset[DeadLetterPosition] = frozenset()
    codes: frozenset[str] = frozenset()
    tenant: str | None = None
    adapter: str | None = None
    message: str | None = None
    source_topic: str | None = None
    source_partition: int | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def matches_all(self) -> bool:
        """Whether no condition is set."""
        return self == DeadLetterFilter()

    @property
    def partitions(self) -> frozenset[int] | None:
        """The partitions of the dead-letter topic to read; None for all."""
        return frozenset(position.partition for position in self.positions) or None

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the dead letter meets all conditions."""
        return (
            (not self.positions or letter.position in self.positions)
            and (not self.codes or letter.code in self.codes)
            and (self.tenant is None or letter.tenant == self.tenant)
            and (self.adapter is None or _adapter_matches(letter.adapter, self.adapter))
            and (self.message is None or self.message.lower() in letter.message.lower())
            and (self.since is None or letter.dead_lettered_at >= self.since)
            and (self.until is None or letter.dead_lettered_at < self.until)
            and self._matches_source(letter)
        )

    def _matches_source(self, letter: DeadLetter) -> bool:
        wanted = (self.source_topic, self.source_partition, self.from_offset, self.to_offset)
        if all(each is None for each in wanted):
            return True
        source = letter.source
        return (
            source is not None
            and (self.source_topic is None or source.topic == self.source_topic)
            and (self.source_partition is None or source.partition == self.source_partition)
            and (self.from_offset is None or source.offset >= self.from_offset)
            and (self.to_offset is None or source.offset <= self.to_offset)
        )


def _adapter_matches(adapter: str | None, wanted: str) -> bool:
    """A name without a version matches all versions."""
    return adapter is not None and wanted in (adapter, adapter.split("@")[0])
