"""The page pool: which page is free and who holds which. Policy only; the bytes lie elsewhere."""

from collections.abc import Sequence

from engine.types import PageId, RequestId


class PagePool:
    """A fixed number of pages and one free list. A page has at most one owner.

    `take` is only called for pages that `num_free` shows to be there.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._free = [PageId(page) for page in reversed(range(num_pages))]
        self._held: dict[RequestId, list[PageId]] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def pages_of(self, owner: RequestId) -> Sequence[PageId]:
        """The owner's pages in the order in which they were taken; empty when it has none."""
        return self._held.get(owner, ())

    def take(self, owner: RequestId, count: int) -> Sequence[PageId]:
        """Give `count` more pages to an owner and return these."""
        assert 0 <= count <= self.num_free
        taken = [self._free.pop() for _ in range(count)]
        self._held.setdefault(owner, []).extend(taken)
        return taken

    def release(self, owner: RequestId) -> None:
        """Take all pages back from an owner, who may have none."""
        self._free.extend(reversed(self._held.pop(owner, [])))

    def check_integrity(self) -> None:
        """Prove that every page is free or held exactly once; AssertionError otherwise."""
        pages = [*self._free, *(page for held in self._held.values() for page in held)]
        assert sorted(pages) == list(range(self.num_pages)), f"{len(pages)} pages accounted for, {self.num_pages} exist"
