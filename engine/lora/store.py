"""The registered adapters. They occupy pages while there is room and are read again when needed."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from engine.errors import AdapterError
from engine.lora.checked import CheckedAdapter
from engine.lora.layout import AdapterLayout
from engine.lora.tables import SlotTables
from engine.lora.transfer import AdapterLoad, Loader, LoadResult
from engine.memory.pool import AdapterPages, PagePool
from engine.memory.residency import Residency
from engine.memory.storage import Storage
from engine.types import AdapterInfo, AdapterName


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A registered adapter and its slot; `num_pages` is the number of pages it occupies while it is in the pool."""

    info: AdapterInfo
    checked: CheckedAdapter
    slot: int
    num_pages: int

    @property
    def layout(self) -> AdapterLayout:
        """The location of its matrices in its pages."""
        return self.checked.layout


class AdapterStore(Mapping[AdapterName, LoadedAdapter]):
    """Adapters by name. `Residency` tracks which of them are in the pool."""

    def __init__(
        self, storage: Storage, pool: PagePool, residency: Residency, tables: SlotTables, loader: Loader
    ) -> None:
        self._storage, self._pool, self._residency = storage, pool, residency
        self.tables, self._loader = tables, loader
        self._loaded: dict[AdapterName, LoadedAdapter] = {}

    def __getitem__(self, name: AdapterName) -> LoadedAdapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[AdapterName]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def add(self, name: AdapterName, checked: CheckedAdapter) -> None:
        """Register a checked adapter, replacing an idle one of that name. It is not loaded into the pool yet.

        Reads no file. Raises AdapterError if its pages can never fit; nothing has changed then.
        """
        num_pages = self._num_pages(name, checked)
        self.remove(name)
        info = replace(checked.info, name=name, num_bytes=num_pages * self._storage.bytes_per_page_id)
        self._loaded[name] = LoadedAdapter(info, checked, self.tables.add(checked.layout), num_pages)

    def _num_pages(self, name: AdapterName, checked: CheckedAdapter) -> int:
        num_pages, page = self._storage.pages_for(checked.layout.num_tiles), self._storage.bytes_per_page_id
        if num_pages > self._storage.num_pages:
            raise AdapterError(
                f"adapter {name!r} takes {num_pages * page} bytes, but the pool has {self._storage.num_pages * page}; "
                "raise pool_bytes"
            )
        if num_pages > (limit := self._loader.max_pages):
            raise AdapterError(
                f"adapter {name!r} takes {num_pages * page} bytes, but the host tier has {limit * page}; "
                "raise host_bytes"
            )
        return num_pages

    def load_now(self, name: AdapterName) -> None:
        """Load an adapter that was just added, if evicting idle pages makes room for it, and block until it is loaded.

        Raises AdapterError if it cannot be read; it is then removed.
        """
        adapter, owner = self._loaded[name], AdapterPages(name)
        if adapter.num_pages > self._residency.num_available:
            return
        self._residency.allocate(owner, adapter.num_pages)
        self._residency.admit(owner)
        try:
            self._loader.load_and_wait(self._new_load(name))
        except AdapterError:
            self._residency.release(owner)
            self.remove(name)
            raise
        self._set_pages(name)
        self._residency.release(owner)

    def remove(self, name: AdapterName) -> None:
        """Remove an idle adapter and free its pages."""
        adapter = self._loaded.pop(name, None)
        if adapter is not None:
            self.evict(name)
            self._loader.discard(name)
            self.tables.remove(adapter.slot)

    def set_source(self, name: AdapterName, checked: CheckedAdapter) -> None:
        """Read an adapter from another directory, or rewritten files, with the same content from now on."""
        self._loaded[name] = replace(self._loaded[name], checked=checked)

    def evict(self, name: AdapterName) -> None:
        """Free an idle adapter's pages; it stays registered."""
        self._residency.discard(AdapterPages(name))

    def start_load(self, name: AdapterName) -> None:
        """Start loading an adapter into the pages allocated for it."""
        self._loader.start(self._new_load(name))

    def _new_load(self, name: AdapterName) -> AdapterLoad:
        adapter, pages = self._loaded[name], tuple(self._pool.pages_of(AdapterPages(name)))
        assert len(pages) == adapter.num_pages
        return AdapterLoad(name, pages, partial(adapter.checked.write, name))

    def finished_loads(self) -> list[LoadResult]:
        """Loads that finished or failed since the last call; never blocks."""
        results = self._loader.advance()
        for result in results:
            if result.error is None:
                self._set_pages(result.name)
        return results

    def _set_pages(self, name: AdapterName) -> None:
        self.tables.set_pages(self._loaded[name].slot, self._pool.pages_of(AdapterPages(name)))

    def wait(self, timeout_s: float) -> None:
        """Block until a load may have finished, at most `timeout_s`."""
        self._loader.wait(timeout_s)

    def use(self, names: Collection[AdapterName]) -> None:
        """Order the next step after the transfers of the adapters it uses."""
        self._loader.use(names)
