"""Header names that are not UTF-8: librdkafka's clients can send them, but the Kafka library cannot read them.

The library decodes names strictly, so one invalid name makes every record of its batch permanently unreadable. After
`tolerate`, this process reads batches with the library's Python parser, patched to show invalid bytes as `\\xff`.
"""

from typing import Any, SupportsIndex

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy


class _Buffer(bytearray):
    """Bytes whose slices decode without errors."""

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found = super().__getitem__(place)
        return _Buffer(found) if isinstance(found, bytearray) else found

    def decode(self, encoding: str = "utf-8", errors: str = "backslashreplace") -> str:
        return super().decode(encoding, errors)


class _Batch(_DefaultRecordBatchPy):  # type: ignore[misc]  # marked final, but there is no other way to patch it
    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _Buffer(self._buffer)


class _Records(_MemoryRecordsPy):  # type: ignore[misc]  # as above
    def next_batch(self) -> Any:
        content = self._next_slice
        batch = super().next_batch()
        return _Batch(content) if content is not None and isinstance(batch, DefaultRecordBatch) else batch


def tolerate() -> None:
    """From now on, accept header names of any bytes in fetched records."""
    fetcher.MemoryRecords = _Records
