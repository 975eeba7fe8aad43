"""The loaded adapters: checked directories, in pages while there is room, read again when they are needed."""

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
    """A checked adapter under its name, and its slot; `num_pages` is what it takes while it is in the pool."""

    info: AdapterInfo
    checked: CheckedAdapter
    slot: int
    num_pages: int

    @property
    def layout(self) -> AdapterLayout:
        """Where everything lies in its pages."""
        return self.checked.layout


class AdapterStore(Mapping[AdapterName, LoadedAdapter]):
    """Adapters by name. Which of them are in the pool is the residency's to say."""

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
        """Keep a checked adapter, outside the pool; an idle one of that name gives way.

        No file is read. Raises AdapterError when its pages would never fit; nothing has changed then.
        """
        num_pages = self._num_pages(name, checked)
        self.remove(name)
        info = replace(checked.info, name=name, num_bytes=num_pages * self._storage.bytes_per_page_id)
        self._loaded[name] = LoadedAdapter(info, checked, self.tables.open(checked.layout), num_pages)

    def _num_pages(self, name: AdapterName, checked: CheckedAdapter) -> int:
        num_pages, page = self._storage.pages_for(checked.layout.num_tiles), self._storage.bytes_per_page_id
        if num_pages > self._storage.num_pages:
            raise AdapterError(
                f"adapter {name!r} takes {num_pages * page} bytes, but the pool has {self._storage.num_pages * page}; "
                "raise pool_bytes"
            )
        if num_pages > (most := self._loader.max_pages):
            raise AdapterError(
                f"adapter {name!r} takes {num_pages * page} bytes; the host tier has {most * page}: raise host_bytes"
            )
        return num_pages

    def fill(self, name: AdapterName) -> None:
        """Read an adapter that was just added into the pool, where idle pages allow, and wait for it.

        Raises AdapterError if it cannot be read; it is forgotten then.
        """
        adapter, owner = self._loaded[name], AdapterPages(name)
        if adapter.num_pages > self._residency.num_available:
            return
        self._residency.allocate(owner, adapter.num_pages)
        self._residency.admit(owner)
        try:
            self._loader.load_and_wait(self._load_of(name))
        except AdapterError:
            self._residency.release(owner)
            self.remove(name)
            raise
        self._place(name)
        self._residency.release(owner)

    def remove(self, name: AdapterName) -> None:
        """Forget an idle adapter and give its pages back."""
        adapter = self._loaded.pop(name, None)
        if adapter is not None:
            self.evict(name)
            self._loader.discard(name)
            self.tables.close(adapter.slot)

    def move(self, name: AdapterName, checked: CheckedAdapter) -> None:
        """The same content lies in another directory now, or was written anew."""
        self._loaded[name] = replace(self._loaded[name], checked=checked)

    def evict(self, name: AdapterName) -> None:
        """Give an idle adapter's pages back; it stays loaded."""
        self._residency.discard(AdapterPages(name))

    def start(self, name: AdapterName) -> None:
        """Send an adapter on its way into the pages that were taken for it."""
        self._loader.start(self._load_of(name))

    def _load_of(self, name: AdapterName) -> AdapterLoad:
        adapter, pages = self._loaded[name], tuple(self._pool.pages_of(AdapterPages(name)))
        assert len(pages) == adapter.num_pages
        return AdapterLoad(name, pages, partial(adapter.checked.write, name))

    def finished_loads(self) -> list[LoadResult]:
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
