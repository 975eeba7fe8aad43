"""The finished offsets of a partition, and their encoding in a commit's metadata. Pure.

A commit at a position means that every offset below it is finished. Its metadata adds what is finished above: all
offsets below a frontier except those listed. The list is bounded by the number of jobs in memory.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_METADATA_CHARS = 4096
"""The broker's default for `offset.metadata.max.bytes`; the text is ASCII."""
PREFIX = "loraq1:"
MAX_LISTED = 1_000_000
_PLAIN, _PACKED = 0, 1


@dataclass(frozen=True, slots=True)
class FinishedOffsets:
    """Every offset below `frontier` is finished except the `unfinished` ones."""

    frontier: int
    unfinished: frozenset[int]

    def __contains__(self, offset: int) -> bool:
        return offset < self.frontier and offset not in self.unfinished

    @property
    def position(self) -> int:
        """The lowest offset that is not finished."""
        return min(self.unfinished, default=self.frontier)

    def union(self, other: "FinishedOffsets") -> "FinishedOffsets":
        """The union: offsets that are finished in either."""
        low, high = sorted((self, other), key=lambda each: each.frontier)
        return FinishedOffsets(high.frontier, frozenset(offset for offset in high.unfinished if offset not in low))


def encode(position: int, frontier: int, unfinished: Sequence[int]) -> str:
    """The metadata of a commit at `position`; `unfinished` is ascending. Empty if nothing above is finished."""
    if not unfinished:
        return ""
    offsets = (position, *unfinished)
    gaps = [later - earlier for earlier, later in zip(offsets, unfinished, strict=False)]
    body = b"".join(_varint(value) for value in (frontier - position, *gaps))
    packed = zlib.compress(body, level=9)
    smallest = bytes([_PACKED]) + packed if len(packed) < len(body) else bytes([_PLAIN]) + body
    return PREFIX + base64.b64encode(smallest).decode()


def fit(
    position: int, frontier: int, unfinished: Sequence[int], max_chars: int = MAX_METADATA_CHARS
) -> tuple[str, bool]:
    """The metadata within `max_chars`, and whether it is complete; otherwise its frontier is lowered."""
    text = encode(position, frontier, unfinished)
    if len(text) <= max_chars:
        return text, True
    count = len(unfinished)
    while len(text) > max_chars:
        count //= 2
        text = encode(position, unfinished[count], unfinished[:count])
    return text, False


def decode(position: int, text: str | None) -> FinishedOffsets | None:
    """The finished offsets in a commit's metadata; None if it is not ours. Raises ValueError if it is damaged."""
    if not text or not text.startswith(PREFIX):
        return None
    try:
        frame = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        values = list(_values(_unpacked(frame)))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the metadata of a commit cannot be decoded: {error}") from error
    if not values:
        raise ValueError("the metadata of a commit is empty after its prefix")
    offset, unfinished = position, []
    for gap in values[1:]:
        offset += gap
        unfinished.append(offset)
    return FinishedOffsets(position + values[0], frozenset(unfinished))


def _unpacked(frame: bytes) -> bytes:
    match frame[:1]:
        case b"\x00":
            return frame[1:]
        case b"\x01":
            return zlib.decompressobj().decompress(frame[1:], 10 * MAX_LISTED)
        case _:
            raise ValueError("the metadata of a commit has an unknown encoding; a newer version wrote it")


def _varint(value: int) -> bytes:
    """Seven bits per byte, lowest first; the top bit is set if more bytes follow."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _values(body: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in body:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0
    if shift:
        raise ValueError("the metadata of a commit ends in the middle of a number")
