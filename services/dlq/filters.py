"""Which dead letters a person means. Pure."""

from dataclasses import dataclass
from datetime import datetime

from services.dlq.dead_letters import Letter, LetterPlace


@dataclass(frozen=True, slots=True)
class Choice:
    """All conditions must hold; one that is None or empty holds always. Times are when a letter was put aside."""

    places: frozenset[LetterPlace] = frozenset()
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
    def is_everything(self) -> bool:
        """Whether nothing was asked for in particular."""
        return self == Choice()

    @property
    def partitions(self) -> frozenset[int] | None:
        """The only partitions of the dead-letter topic that need reading; None for all."""
        return frozenset(place.partition for place in self.places) or None

    def takes(self, letter: Letter) -> bool:
        """Whether the letter is meant."""
        return (
            (not self.places or letter.place in self.places)
            and (not self.codes or letter.code in self.codes)
            and (self.tenant is None or letter.tenant == self.tenant)
            and (self.adapter is None or _names(letter.adapter, self.adapter))
            and (self.message is None or self.message.lower() in letter.message.lower())
            and (self.since is None or letter.put_aside_at >= self.since)
            and (self.until is None or letter.put_aside_at < self.until)
            and self._takes_source(letter)
        )

    def _takes_source(self, letter: Letter) -> bool:
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


def _names(adapter: str | None, wanted: str) -> bool:
    """A name without a version means all of them."""
    return adapter is not None and wanted in (adapter, adapter.split("@")[0])
