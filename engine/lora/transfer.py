"""Adapters on their way into the pool, while steps go on.

    file ──read, in a thread──► host tier ──a stream of its own, through a bounded ring──► pages of the device
    file ──read, in a thread──► pages                                                      where both are one memory

Policy: nothing here waits but `wait` and `load_now`. The engine calls `advance` between steps, computes sequences whose
adapters have arrived, and lets the others wait; before a step `use` orders it after the transfers of its own adapters
alone.
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
"""So that a ring filled once a step keeps up with a bus of 50 GB/s at steps of 3 ms and more."""


@dataclass(frozen=True, slots=True)
class Cargo:
    """An adapter and the pages taken for it. `write` lays it out in pages of tiles; it raises AdapterError."""

    name: AdapterName
    pages: Sequence[PageId]
    write: Callable[[Tensor, Sequence[PageId]], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The adapter is there, or with `error` never will be."""

    name: AdapterName
    error: AdapterError | None = None


class Loader(Protocol):
    """Brings adapters into their pages. One of more than `most_pages` would never arrive."""

    most_pages: int

    def start(self, cargo: Cargo) -> None:
        """Send it on its way; returns at once."""

    def advance(self) -> list[Arrival]:
        """Move everything on as far as it goes without waiting; what has arrived since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Hold the caller until there may be something to advance, or no longer than that."""

    def load_now(self, cargo: Cargo) -> None:
        """Send it, and wait for it. Raises AdapterError."""

    def use(self, names: Collection[AdapterName]) -> None:
        """The next step uses these adapters, and waits for the events of no others."""

    def forget(self, name: AdapterName) -> None:
        """The adapter is unloaded or has changed."""


class DirectLoader:
    """Where the pool is the host's memory: a thread writes straight into the pages."""

    def __init__(self, reader: Reader, storage: Storage) -> None:
        self._reader, self._storage = reader, storage
        self.most_pages = storage.num_pages
        self._reading: dict[AdapterName, Task] = {}

    def start(self, cargo: Cargo) -> None:
        """See `Loader.start`."""
        tiles = self._storage.tiles
        self._reading[cargo.name] = self._reader.start(lambda: cargo.write(tiles, cargo.pages))

    def advance(self) -> list[Arrival]:
        """See `Loader.advance`."""
        ended = [name for name, task in self._reading.items() if task.done()]
        return [Arrival(name, error_of(self._reading.pop(name))) for name in ended]

    def wait(self, timeout_s: float) -> None:
        """See `Loader.wait`."""
        if self._reading:
            self._reader.wait(timeout_s)

    def load_now(self, cargo: Cargo) -> None:
        """See `Loader.load_now`: by the caller itself."""
        cargo.write(self._storage.tiles, cargo.pages)

    def use(self, names: Collection[AdapterName]) -> None:
        """See `Loader.use`: what has arrived is there."""

    def forget(self, name: AdapterName) -> None:
        """See `Loader.forget`: nothing is kept."""


def error_of(task: Task) -> AdapterError | None:
    """What made a reading fail."""
    try:
        task.result()
    except AdapterError as error:
        return error
    return None


def words(pages: Tensor) -> Tensor:
    """Bytes of pages as 64-bit words, by which a scatter moves them faster."""
    return pages.view(torch.int64)


def neighbours(pages: Sequence[PageId]) -> Iterator[tuple[int, int]]:
    """The longest runs [first, last) of ids that follow each other: each is one copy."""
    first = 0
    for last in range(1, len(pages) + 1):
        if last == len(pages) or pages[last] != pages[last - 1] + 1:
            yield first, last
            first = last


@dataclass(slots=True)
class _Slot:
    """Room on the device for some pages' images and the rows of the pool that they go to.

    `copied` is when they have left it.
    """

    images: Tensor
    rows: Tensor
    rows_here: Tensor
    copied: Event | None = None


@dataclass(slots=True)
class _Journey:
    """Where a cargo is: without a task not begun, then being read, then with `left` pages to send, then under way."""

    cargo: Cargo
    task: Task | None = None
    is_read: bool = False
    left: deque[tuple[PageId, PageId]] = field(default_factory=deque)
    arrival: Event | None = None


class StagedLoader:
    """By way of the host tier and a ring of slots on the device, all of them taken once.

    A slot is filled by copies of whole pages and emptied into the pool by one scatter, both on the transfer stream; it
    is used again when its event says so. So no more than the ring is under way, and nothing queues behind much.
    """

    def __init__(self, device: Device, reader: Reader, storage: Storage, host: HostTier) -> None:
        self._device, self._reader, self.host = device, reader, host
        self.most_pages = host.num_pages
        # One index over layers and pages: torch cuts a scatter whose strides reach over 2 GiB into many launches.
        self._pool = words(storage.pool).flatten(0, 1)
        self._first_rows = page_ids([PageId(layer * storage.num_pages) for layer in range(len(storage.pool))])
        per_slot = min(max(SLOT_BYTES // host.bytes_per_page_id, 1), storage.num_pages)
        self._ring = deque(self._make_slot(storage, per_slot) for _ in range(RING_SLOTS))
        self._journeys: deque[_Journey] = deque()
        self._events: dict[AdapterName, Event] = {}
        self._arrived: list[Arrival] = []

    def _make_slot(self, storage: Storage, num_pages: int) -> _Slot:
        layers = len(storage.pool)
        images = self._device.zeros(num_pages * storage.bytes_per_page_id)
        num_bytes = num_pages * layers * self._first_rows.itemsize
        rows, here = (make(num_bytes).view(self._first_rows.dtype) for make in (self._device.zeros, self._device.host))
        return _Slot(images.view(num_pages, layers, storage.page_bytes), rows, here)

    def start(self, cargo: Cargo) -> None:
        """See `Loader.start`."""
        self._journeys.append(_Journey(cargo))
        self._advance_reading()

    def advance(self) -> list[Arrival]:
        """See `Loader.advance`."""
        self._advance_reading()
        self._advance_copies()
        for journey in [j for j in self._journeys if j.arrival is not None and j.arrival.is_done()]:
            assert journey.arrival is not None
            self._events[journey.cargo.name] = journey.arrival
            self.host.let_go(journey.cargo.name)
            self._end(journey)
        arrived, self._arrived = self._arrived, []
        return arrived

    def _advance_reading(self) -> None:
        for journey in list(self._journeys):
            if journey.task is None and not journey.is_read:
                self._begin(journey)
            if journey.task is not None and not journey.is_read and journey.task.done():
                self._finish_reading(journey, journey.task)

    def _begin(self, journey: _Journey) -> None:
        """From the host tier, or from the file once the tier has room."""
        cargo = journey.cargo
        if cargo.name in self.host:
            self.host.hold(cargo.name)
            self._send(journey)
        elif self.host.take(cargo.name, len(cargo.pages)):
            pages = self.host.pages_of(cargo.name)
            journey.task = self._reader.start(lambda: cargo.write(self.host.tiles, pages))

    def _finish_reading(self, journey: _Journey, task: Task) -> None:
        error = error_of(task)
        if error is None:
            self._send(journey)
            return
        self.host.let_go(journey.cargo.name)
        self.host.forget(journey.cargo.name)
        self._end(journey, error)

    def _send(self, journey: _Journey) -> None:
        journey.is_read = True
        journey.left.extend(zip(self.host.pages_of(journey.cargo.name), journey.cargo.pages, strict=True))

    def _end(self, journey: _Journey, error: AdapterError | None = None) -> None:
        self._journeys.remove(journey)
        self._arrived.append(Arrival(journey.cargo.name, error))

    def _advance_copies(self) -> None:
        """Fill free slots with the pages of the oldest first."""
        for journey in self._journeys:
            while journey.left:
                slot = self._ring[0]
                if slot.copied is not None and not slot.copied.is_done():
                    return
                self._ring.rotate(-1)
                self._copy(slot, [journey.left.popleft() for _ in range(min(len(slot.images), len(journey.left)))])
                if not journey.left:
                    journey.arrival = slot.copied

    def _copy(self, slot: _Slot, pages: Sequence[tuple[PageId, PageId]]) -> None:
        """What the pages held until now may still be read by a step under way."""
        stream, images = self._device.transfers, slot.images[: len(pages)]
        stream.follow(self._device.compute.mark())
        for first, last in neighbours([here for here, _ in pages]):
            here = pages[first][0]
            stream.copy(images[first:last], self.host.images[here : here + last - first])
        rows = (page_ids([there for _, there in pages])[:, None] + self._first_rows).flatten()
        slot.rows_here[: len(rows)] = rows
        stream.copy(slot.rows[: len(rows)], slot.rows_here[: len(rows)])
        stream.scatter(self._pool, slot.rows[: len(rows)], words(images).flatten(0, 1))
        slot.copied = stream.mark()

    def wait(self, timeout_s: float) -> None:
        """See `Loader.wait`: a copy is a matter of milliseconds, a file is not."""
        slot = next((slot for slot in self._ring if slot.copied is not None and not slot.copied.is_done()), None)
        if slot is not None and slot.copied is not None:
            slot.copied.wait()
        elif self._journeys and not any(j.arrival is not None or j.left for j in self._journeys):
            self._reader.wait(timeout_s)

    def load_now(self, cargo: Cargo) -> None:
        """See `Loader.load_now`; others that arrive meanwhile are told of by the next `advance`."""
        self.start(cargo)
        others: list[Arrival] = []
        while True:
            for arrival in self.advance():
                if arrival.name != cargo.name:
                    others.append(arrival)
                elif arrival.error is not None:
                    self._arrived += others
                    raise arrival.error
                else:
                    self._arrived += others
                    return
            self.wait(1.0)

    def use(self, names: Collection[AdapterName]) -> None:
        """See `Loader.use`."""
        for name in names:
            event = self._events.pop(name, None)
            if event is not None:
                self._device.compute.follow(event)

    def forget(self, name: AdapterName) -> None:
        """See `Loader.forget`."""
        self._events.pop(name, None)
        self.host.forget(name)


def make_loader(backend: Backend, reader: Reader, storage: Storage, host_bytes: int) -> Loader:
    """The loader of a backend; raises ConfigurationError when `host_bytes` would not hold a page."""
    if backend.is_remote:
        host = HostTier(storage, backend.device, host_bytes)
        return StagedLoader(backend.device, reader, storage, host)
    return DirectLoader(reader, storage)
