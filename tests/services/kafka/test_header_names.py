"""Batches with header names of any bytes can be read; all others are read as the library reads them."""

from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.memory_records import MemoryRecords

from services.kafka.header_names import _Records

HEADERS = [("plain", b"\xff"), ("ümlaut", None)]


class InvalidName(str):
    """A name that is sent as bytes that are not UTF-8."""

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"na\xffme"


def built(names: list[str], compression: int = 0) -> bytes:
    builder = _DefaultRecordBatchBuilderPy(2, compression, 0, -1, -1, -1, 1 << 20)
    for offset, name in enumerate(names):
        builder.append(offset, timestamp=5, key=b"k", value=b"v", headers=[(name, b"x"), *HEADERS])
    return bytes(builder.build())


def records(kind: type[Any], content: bytes) -> Iterator[tuple[object, ...]]:
    batches = kind(content)
    while batches.has_next():
        for each in batches.next_batch():
            yield each.offset, each.timestamp, each.key, each.value, each.headers


@pytest.mark.parametrize("compression", [0, 1])
def test_an_invalid_name_is_escaped_and_the_other_records_are_read(compression: int) -> None:
    content = built(["a", InvalidName(), "b"], compression)
    with pytest.raises(UnicodeDecodeError):
        list(records(MemoryRecords, content))
    names = [found[-1][0][0] for found in records(_Records, content)]  # type: ignore[index]  # headers
    assert names == ["a", "na\\xffme", "b"]


@pytest.mark.parametrize("compression", [0, 1])
def test_other_batches_are_read_as_the_library_reads_them(compression: int) -> None:
    content = built(["a", "b"], compression) + built(["c"], compression)
    assert list(records(_Records, content)) == list(records(MemoryRecords, content))
    assert list(records(_Records, content[:-1])) == list(records(MemoryRecords, content[:-1]))
