"""The page pool: which page is free and who holds which. Policy only; the bytes lie elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import AdapterName, BlockKey, PageId, RequestId


@dataclass(frozen=True, slots=True)
class SequencePages:
    """Owner of the KV pages that one sequence alone uses."""

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

    `take` is only called for pages that `num_free` shows to be there. Low ids go out first, so that memory which was
    never needed is never touched.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._num_begun = 0
        self._returned: list[PageId] = []
        self._held: dict[Owner, list[PageId]] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._returned) + self.num_pages - self._num_begun

    def pages_of(self, owner: Owner) -> Sequence[PageId]:
        """The owner's pages in the order in which they were taken; empty when it has none."""
        return self._held.get(owner, ())

    def take(self, owner: Owner, count: int) -> Sequence[PageId]:
        """Give `count` more pages to an owner and return these."""
        assert 0 <= count <= self.num_free
        if count == 0:
            return ()
        again = min(count, len(self._returned))
        taken = self._returned[len(self._returned) - again :][::-1]
        del self._returned[len(self._returned) - again :]
        first, self._num_begun = self._num_begun, self._num_begun + count - again
        taken.extend(PageId(page) for page in range(first, self._num_begun))
        self._held.setdefault(owner, []).extend(taken)
        return taken

    def hand_over(self, page: PageId, giver: Owner, taker: Owner) -> None:
        """Make a page of one owner that of another."""
        self._withdraw(page, giver)
        self._held.setdefault(taker, []).append(page)

    def give_back(self, page: PageId, owner: Owner) -> None:
        """Take one page back from an owner."""
        self._withdraw(page, owner)
        self._returned.append(page)

    def _withdraw(self, page: PageId, owner: Owner) -> None:
        held = self._held[owner]
        held.remove(page)
        if not held:
            del self._held[owner]

    def release(self, owner: Owner) -> None:
        """Take all pages back from an owner, who may have none."""
        self._returned.extend(reversed(self._held.pop(owner, [])))

    def check_integrity(self) -> None:
        """Prove that every page is free or held exactly once; AssertionError otherwise."""
        pages = [*self._returned, *(page for held in self._held.values() for page in held)]
        assert self._num_begun <= self.num_pages
        assert sorted(pages) == list(range(self._num_begun)), (
            f"{len(pages) + self.num_pages - self._num_begun} pages accounted for, {self.num_pages} exist"
        )
