"""What of a partition is finished, and the text in which a commit's metadata carries it. Pure.

A commit says that everything below its position is finished. Its metadata adds what is finished above: all offsets
below a frontier save those listed. The list is bounded by the jobs in memory, however far apart they stand.
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
class Finished:
    """Every offset below `frontier` is finished, save the `unfinished` ones."""

    frontier: int
    unfinished: frozenset[int]

    def __contains__(self, offset: int) -> bool:
        return offset < self.frontier and offset not in self.unfinished

    @property
    def position(self) -> int:
        """The lowest offset that is not finished."""
        return min(self.unfinished, default=self.frontier)

    def joined(self, other: "Finished") -> "Finished":
        """What is finished by one of the two."""
        low, high = sorted((self, other), key=lambda each: each.frontier)
        return Finished(high.frontier, frozenset(offset for offset in high.unfinished if offset not in low))


def encode(position: int, frontier: int, unfinished: Sequence[int]) -> str:
    """The text for a commit at `position`; `unfinished` ascends from there. Empty where nothing above is finished."""
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
    """The text in at most `max_chars`, and whether it says everything; otherwise its frontier is drawn in."""
    text = encode(position, frontier, unfinished)
    if len(text) <= max_chars:
        return text, True
    count = len(unfinished)
    while len(text) > max_chars:
        count //= 2
        text = encode(position, unfinished[count], unfinished[:count])
    return text, False


def decode(position: int, text: str | None) -> Finished | None:
    """What a commit at `position` said; None where it said nothing of ours. Raises ValueError where it is garbled."""
    if not text or not text.startswith(PREFIX):
        return None
    try:
        frame = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        values = list(_values(_unpacked(frame)))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the metadata of a commit cannot be read: {error}") from error
    if not values:
        raise ValueError("the metadata of a commit is empty behind its prefix")
    offset, unfinished = position, []
    for gap in values[1:]:
        offset += gap
        unfinished.append(offset)
    return Finished(position + values[0], frozenset(unfinished))


def _unpacked(frame: bytes) -> bytes:
    match frame[:1]:
        case b"\x00":
            return frame[1:]
        case b"\x01":
            return zlib.decompressobj().decompress(frame[1:], 10 * MAX_LISTED)
        case _:
            raise ValueError("the metadata of a commit has an unknown form; a newer version wrote it")


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; the top bit says that more follow."""
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
