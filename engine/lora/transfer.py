"""Loads adapters into the pool while steps run.

    file ──read, in a thread──► host tier ──transfer stream, through a bounded ring──► pages on the device
    file ──read, in a thread──► pages                                                  on the CPU

Only `wait` and `load_and_wait` block. The engine calls `advance` between steps and computes only sequences whose
adapters are loaded. Before a step, `use` makes the compute stream wait for the transfers of that step's adapters and of
no others.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.device import Device, Event
from engine.device.backend import Backend
from engine.errors import AdapterError
from engine.lora.reading import Reader, Task
from engine.memory.host import HostTier, page_ids
from engine.memory.storage import Storage
from engine.types import AdapterName, PageId

RING_SLOTS = 4
SLOT_BYTES = 32 << 20
"""Large enough that a ring refilled once a step saturates a 50 GB/s bus with steps of 3 ms or more."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter and the pages allocated for it. `write` fills pages of tiles with it, or raises AdapterError."""

    name: AdapterName
    pages: Sequence[PageId]
    write: Callable[[Tensor, Sequence[PageId]], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A finished load; `error` is set if it failed."""

    name: AdapterName
    error: AdapterError | None = None


class Loader(Protocol):
    """Loads adapters into their pages. It cannot load an adapter of more than `max_pages`."""

    max_pages: int

    def start(self, load: AdapterLoad) -> None:
        """Start a load; returns immediately."""

    def advance(self) -> list[LoadResult]:
        """Make progress without blocking; returns the loads that finished since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Block until `advance` may make progress, at most `timeout_s`."""

    def load_and_wait(self, load: AdapterLoad) -> None:
        """Start a load and block until it finishes. Raises AdapterError."""

    def use(self, names: Collection[AdapterName]) -> None:
        """Order the next step after the transfers of these adapters, and of no others."""

    def discard(self, name: AdapterName) -> None:
        """Drop cached data of an adapter that was unloaded or replaced."""


class DirectLoader:
    """For a pool in host memory: a reader thread writes directly into the pages."""

    def __init__(self, reader: Reader, storage: Storage) -> None:
        self._reader, self._storage = reader, storage
        self.max_pages = storage.num_pages
        self._reading: dict[AdapterName, Task] = {}

    def start(self, load: AdapterLoad) -> None:
        """See `Loader.start`."""
        tiles = self._storage.tiles
        self._reading[load.name] = self._reader.start(lambda: load.write(tiles, load.pages))

    def advance(self) -> list[LoadResult]:
        """See `Loader.advance`."""
        ended = [name for name, task in self._reading.items() if task.done()]
        return [LoadResult(name, error_of(self._reading.pop(name))) for name in ended]

    def wait(self, timeout_s: float) -> None:
        """See `Loader.wait`."""
        if self._reading:
            self._reader.wait(timeout_s)

    def load_and_wait(self, load: AdapterLoad) -> None:
        """See `Loader.load_and_wait`: runs in the caller's thread."""
        load.write(self._storage.tiles, load.pages)

    def use(self, names: Collection[AdapterName]) -> None:
        """See `Loader.use`: a finished load needs no ordering."""

    def discard(self, name: AdapterName) -> None:
        """See `Loader.discard`: nothing is cached."""


def error_of(task: Task) -> AdapterError | None:
    """The error of a finished read, if it failed."""
    try:
        task.result()
    except AdapterError as error:
        return error
    return None


def words(pages: Tensor) -> Tensor:
    """Pages viewed as 64-bit words, which a scatter moves faster than bytes."""
    return pages.view(torch.int64)


def consecutive_runs(pages: Sequence[PageId]) -> Iterator[tuple[int, int]]:
    """The maximal runs [first, last) of consecutive page ids; each run is one copy."""
    first = 0
    for last in range(1, len(pages) + 1):
        if last == len(pages) or pages[last] != pages[last - 1] + 1:
            yield first, last
            first = last


@dataclass(slots=True)
class _Slot:
    """Staging memory on the device for page images and the pool rows they belong to.

    `copied` is the event after which the slot can be reused.
    """

    images: Tensor
    rows: Tensor
    host_rows: Tensor
    copied: Event | None = None


@dataclass(slots=True)
class _Transfer:
    """The state of a load: queued, read by `task`, copied (`left` pages remain), and done after event `completed`."""

    load: AdapterLoad
    task: Task | None = None
    is_read: bool = False
    left: deque[tuple[PageId, PageId]] = field(default_factory=deque)
    completed: Event | None = None


class StagedLoader:
    """For a pool in device memory: loads through the host tier and a ring of device slots, allocated once.

    Copies fill a slot with whole pages and one scatter moves them into the pool, both on the transfer stream. A slot is
    reused after its event. At most one ring is in flight, so no transfer queues behind a long backlog.
    """

    def __init__(self, device: Device, reader: Reader, storage: Storage, host: HostTier) -> None:
        self._device, self._reader, self.host = device, reader, host
        self.max_pages = host.num_pages
        # One index over layers and pages: torch splits a scatter with strides over 2 GiB into many launches.
        self._pool = words(storage.pool).flatten(0, 1)
        self._first_rows = page_ids([PageId(layer * storage.num_pages) for layer in range(len(storage.pool))])
        per_slot = min(max(SLOT_BYTES // host.bytes_per_page_id, 1), storage.num_pages)
        self._ring = deque(self._make_slot(storage, per_slot) for _ in range(RING_SLOTS))
        self._transfers: deque[_Transfer] = deque()
        self._events: dict[AdapterName, Event] = {}
        self._finished: list[LoadResult] = []

    def _make_slot(self, storage: Storage, num_pages: int) -> _Slot:
        layers = len(storage.pool)
        images = self._device.zeros(num_pages * storage.bytes_per_page_id)
        num_bytes = num_pages * layers * self._first_rows.itemsize
        device = self._device
        rows, host_rows = (make(num_bytes).view(self._first_rows.dtype) for make in (device.zeros, device.host))
        return _Slot(images.view(num_pages, layers, storage.page_bytes), rows, host_rows)

    def start(self, load: AdapterLoad) -> None:
        """See `Loader.start`."""
        self._transfers.append(_Transfer(load))
        self._advance_reading()

    def advance(self) -> list[LoadResult]:
        """See `Loader.advance`."""
        self._advance_reading()
        self._advance_copies()
        for transfer in [t for t in self._transfers if t.completed is not None and t.completed.is_done()]:
            assert transfer.completed is not None
            self._events[transfer.load.name] = transfer.completed
            self.host.release(transfer.load.name)
            self._end(transfer)
        finished, self._finished = self._finished, []
        return finished

    def _advance_reading(self) -> None:
        for transfer in list(self._transfers):
            if transfer.task is None and not transfer.is_read:
                self._begin(transfer)
            if transfer.task is not None and not transfer.is_read and transfer.task.done():
                self._finish_reading(transfer, transfer.task)

    def _begin(self, transfer: _Transfer) -> None:
        """Load from the host tier, or from the file once the tier has room."""
        load = transfer.load
        if load.name in self.host:
            self.host.acquire(load.name)
            self._send(transfer)
        elif self.host.try_allocate(load.name, len(load.pages)):
            pages = self.host.pages_of(load.name)
            transfer.task = self._reader.start(lambda: load.write(self.host.tiles, pages))

    def _finish_reading(self, transfer: _Transfer, task: Task) -> None:
        error = error_of(task)
        if error is None:
            self._send(transfer)
            return
        self.host.release(transfer.load.name)
        self.host.discard(transfer.load.name)
        self._end(transfer, error)

    def _send(self, transfer: _Transfer) -> None:
        transfer.is_read = True
        transfer.left.extend(zip(self.host.pages_of(transfer.load.name), transfer.load.pages, strict=True))

    def _end(self, transfer: _Transfer, error: AdapterError | None = None) -> None:
        self._transfers.remove(transfer)
        self._finished.append(LoadResult(transfer.load.name, error))

    def _advance_copies(self) -> None:
        """Fill free slots with pages, oldest load first."""
        for transfer in self._transfers:
            while transfer.left:
                slot = self._ring[0]
                if slot.copied is not None and not slot.copied.is_done():
                    return
                self._ring.rotate(-1)
                self._copy(slot, [transfer.left.popleft() for _ in range(min(len(slot.images), len(transfer.left)))])
                if not transfer.left:
                    transfer.completed = slot.copied

    def _copy(self, slot: _Slot, pages: Sequence[tuple[PageId, PageId]]) -> None:
        """Copy (host page, device page) pairs through a slot, after all steps that may still read the device pages."""
        stream, images = self._device.transfers, slot.images[: len(pages)]
        stream.wait_for(self._device.compute.record_event())
        for first, last in consecutive_runs([host_page for host_page, _ in pages]):
            host_page = pages[first][0]
            stream.copy(images[first:last], self.host.images[host_page : host_page + last - first])
        rows = (page_ids([page for _, page in pages])[:, None] + self._first_rows).flatten()
        slot.host_rows[: len(rows)] = rows
        stream.copy(slot.rows[: len(rows)], slot.host_rows[: len(rows)])
        stream.scatter(self._pool, slot.rows[: len(rows)], words(images).flatten(0, 1))
        slot.copied = stream.record_event()

    def wait(self, timeout_s: float) -> None:
        """See `Loader.wait`: waits for a copy without the timeout, since copies take only milliseconds."""
        slot = next((slot for slot in self._ring if slot.copied is not None and not slot.copied.is_done()), None)
        if slot is not None and slot.copied is not None:
            slot.copied.wait()
        elif self._transfers and not any(t.completed is not None or t.left for t in self._transfers):
            self._reader.wait(timeout_s)

    def load_and_wait(self, load: AdapterLoad) -> None:
        """See `Loader.load_and_wait`; the next `advance` returns other loads that finish meanwhile."""
        self.start(load)
        others: list[LoadResult] = []
        while True:
            for result in self.advance():
                if result.name != load.name:
                    others.append(result)
                elif result.error is not None:
                    self._finished += others
                    raise result.error
                else:
                    self._finished += others
                    return
            self.wait(1.0)

    def use(self, names: Collection[AdapterName]) -> None:
        """See `Loader.use`."""
        for name in names:
            event = self._events.pop(name, None)
            if event is not None:
                self._device.compute.wait_for(event)

    def discard(self, name: AdapterName) -> None:
        """See `Loader.discard`."""
        self._events.pop(name, None)
        self.host.discard(name)


def make_loader(backend: Backend, reader: Reader, storage: Storage, host_bytes: int) -> Loader:
    """The loader for a backend; raises ConfigurationError if `host_bytes` cannot hold a page."""
    if backend.is_remote:
        host = HostTier(storage, backend.device, host_bytes)
        return StagedLoader(backend.device, reader, storage, host)
    return DirectLoader(reader, storage)
