"""The page pool: free pages and the owners of the others. Policy only; it holds no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import AdapterName, BlockKey, PageId, RequestId


@dataclass(frozen=True, slots=True)
class SequencePages:
    """Owner of the KV pages that only one sequence uses."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class AdapterPages:
    """Owner of an adapter's pages."""

    name: AdapterName


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Owner of the page of one KV block that sequences share."""

    key: BlockKey


Owner = SequencePages | AdapterPages | BlockPage


class PagePool:
    """A fixed number of pages and one free list. A page has at most one owner.

    `allocate` must not be called for more than `num_free` pages. Freed pages are reused before new ones, so memory that
    was never needed is never touched.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._num_touched = 0
        self._freed: list[PageId] = []
        self._pages: dict[Owner, list[PageId]] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._freed) + self.num_pages - self._num_touched

    def pages_of(self, owner: Owner) -> Sequence[PageId]:
        """The owner's pages in the order of allocation; empty if it has none."""
        return self._pages.get(owner, ())

    def allocate(self, owner: Owner, count: int) -> Sequence[PageId]:
        """Allocate `count` more pages to an owner and return them."""
        assert 0 <= count <= self.num_free
        if count == 0:
            return ()
        num_reused = min(count, len(self._freed))
        pages = self._freed[len(self._freed) - num_reused :][::-1]
        del self._freed[len(self._freed) - num_reused :]
        first, self._num_touched = self._num_touched, self._num_touched + count - num_reused
        pages.extend(PageId(page) for page in range(first, self._num_touched))
        self._pages.setdefault(owner, []).extend(pages)
        return pages

    def transfer(self, page: PageId, old: Owner, new: Owner) -> None:
        """Transfer a page from one owner to another."""
        self._remove(page, old)
        self._pages.setdefault(new, []).append(page)

    def release_page(self, page: PageId, owner: Owner) -> None:
        """Free one page of an owner."""
        self._remove(page, owner)
        self._freed.append(page)

    def _remove(self, page: PageId, owner: Owner) -> None:
        pages = self._pages[owner]
        pages.remove(page)
        if not pages:
            del self._pages[owner]

    def release(self, owner: Owner) -> None:
        """Free all pages of an owner, which may have none."""
        self._freed.extend(reversed(self._pages.pop(owner, [])))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is either free or owned exactly once."""
        pages = [*self._freed, *(page for owned in self._pages.values() for page in owned)]
        assert self._num_touched <= self.num_pages
        assert sorted(pages) == list(range(self._num_touched)), (
            f"{len(pages) + self.num_pages - self._num_touched} pages accounted for, {self.num_pages} exist"
        )
