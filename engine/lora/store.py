"""The loaded adapters: checked directories, in pages while there is room, read again when they are needed."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from engine.digest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.errors import AdapterError
from engine.lora.layout import AdapterLayout, lay_out, write_adapter
from engine.lora.peft import read_adapter
from engine.lora.tables import SlotTables
from engine.lora.transfer import Arrival, Cargo, Loader
from engine.memory.pool import AdapterPages, PagePool
from engine.memory.residency import Residency
from engine.memory.storage import Storage
from engine.model.config import ModelConfig
from engine.types import AdapterInfo, AdapterName, PageId

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A checked adapter and its slot; `num_pages` is what it takes while it is in the pool."""

    info: AdapterInfo
    directory: Path
    signature: Signature
    layout: AdapterLayout
    slot: int
    num_pages: int


class AdapterStore(Mapping[AdapterName, LoadedAdapter]):
    """Adapters by name. Which of them are in the pool is the residency's to say."""

    def __init__(
        self,
        model: ModelConfig,
        storage: Storage,
        pool: PagePool,
        residency: Residency,
        tables: SlotTables,
        loader: Loader,
    ) -> None:
        self._model, self._storage, self._pool, self._residency = model, storage, pool, residency
        self.tables, self._loader = tables, loader
        self._loaded: dict[AdapterName, LoadedAdapter] = {}

    def __getitem__(self, name: AdapterName) -> LoadedAdapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[AdapterName]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def check(self, name: AdapterName, directory: Path) -> LoadedAdapter:
        """Check a directory against the base model; nothing changes. Raises AdapterError."""
        signature = _signature(directory)
        adapter = read_adapter(directory, self._model, name)
        layout = lay_out(adapter, self._model)
        num_pages, page = self._storage.pages_for(layout.num_tiles), self._storage.bytes_per_page_id
        if num_pages > self._storage.num_pages:
            raise AdapterError(
                f"adapter {name!r} takes {num_pages * page} bytes, but the pool has {self._storage.num_pages * page}; "
                "raise pool_bytes"
            )
        if num_pages > (most := self._loader.most_pages):
            raise AdapterError(
                f"adapter {name!r} takes {num_pages * page} bytes; the host tier has {most * page}: raise host_bytes"
            )
        info = adapter.info
        held = AdapterInfo(info.name, info.digest, info.rank, info.target_modules, num_pages * page, info.base_model)
        return LoadedAdapter(held, directory, signature, layout, -1, num_pages)

    def add(self, adapter: LoadedAdapter) -> None:
        """Keep a checked adapter, in the pool at once where idle pages allow; raises AdapterError if it cannot be read.

        An idle adapter of that name gives way.
        """
        name = AdapterName(adapter.info.name)
        self.remove(name)
        slot = self.tables.open(adapter.layout)
        self._loaded[name] = replace(adapter, slot=slot)
        owner = AdapterPages(name)
        if adapter.num_pages <= self._residency.num_available:
            self._residency.take(owner, adapter.num_pages)
            self._residency.admit(owner)
            try:
                self._loader.load_now(self._cargo(name))
            except AdapterError:
                self._residency.let_go(owner)
                self.remove(name)
                raise
            self._place(name)
            self._residency.let_go(owner)

    def remove(self, name: AdapterName) -> None:
        """Forget an idle adapter and give its pages back."""
        adapter = self._loaded.pop(name, None)
        if adapter is not None:
            self.evict(name)
            self._loader.forget(name)
            self.tables.close(adapter.slot)

    def move(self, name: AdapterName, adapter: LoadedAdapter) -> None:
        """The same content lies in another directory now, or was written anew."""
        slot = self._loaded[name].slot
        self._loaded[name] = replace(adapter, slot=slot)

    def evict(self, name: AdapterName) -> None:
        """Give an idle adapter's pages back; it stays loaded."""
        self._residency.forget(AdapterPages(name))

    def start(self, name: AdapterName) -> None:
        """Send an adapter on its way into the pages that were taken for it."""
        self._loader.start(self._cargo(name))

    def _cargo(self, name: AdapterName) -> Cargo:
        adapter, pages = self._loaded[name], tuple(self._pool.pages_of(AdapterPages(name)))
        assert len(pages) == adapter.num_pages
        return Cargo(name, pages, partial(_write, adapter))

    def arrivals(self) -> list[Arrival]:
        """Adapters that are in their pages since the last call, or failed to get there; never waits."""
        arrived = self._loader.advance()
        for arrival in arrived:
            if arrival.error is None:
                self._place(arrival.name)
        return arrived

    def _place(self, name: AdapterName) -> None:
        self.tables.place(self._loaded[name].slot, self._pool.pages_of(AdapterPages(name)))

    def wait(self, timeout_s: float) -> None:
        """Hold the caller until an adapter may have arrived, or no longer than that."""
        self._loader.wait(timeout_s)

    def use(self, names: Collection[AdapterName]) -> None:
        """The next step computes with these adapters."""
        self._loader.use(names)


def _write(adapter: LoadedAdapter, tiles: Tensor, pages: Sequence[PageId]) -> None:
    """Lay an adapter's file out in pages; raises AdapterError when it has changed since it was checked."""
    name, directory = adapter.info.name, adapter.directory
    try:
        if _signature(directory) != adapter.signature:
            raise AdapterError(f"the files of adapter {name!r} in {directory} have changed; load it again")
        write_adapter(adapter.layout, directory / ADAPTER_WEIGHTS, tiles, pages)
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter {name!r} cannot be read from {directory}: {error}") from error


def _signature(directory: Path) -> Signature:
    """Tells whether a file was replaced or written since, without reading it."""
    try:
        found = [(directory / name).stat() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except OSError:
        return ()
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
