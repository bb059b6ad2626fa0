"""Pages of the pool: who holds how many references, which are free, which are never to be used again."""

from __future__ import annotations

import collections

import numpy as np

DUMMY_PAGE = 0
"""Takes the writes of padding; never allocated."""


class PageAllocator:
    """Reference counts of the pages 1 to ``num_pages - 1``; a page whose count falls to 0 is free, unless it is in quarantine."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refcounts = np.zeros(num_pages, np.int32)
        self.allocations = np.zeros(num_pages, np.int64)  # how often each page was handed out
        self.quarantined: set[int] = set()
        self._free = collections.deque(range(DUMMY_PAGE + 1, num_pages))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """A free page with one reference, or None."""
        if not self._free:
            return None
        page = self._free.popleft()
        self.refcounts[page] = 1
        self.allocations[page] += 1
        return page

    def share(self, page: int) -> None:
        """One more holder."""
        self.refcounts[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        self.refcounts[page] -= 1
        if self.refcounts[page] == 0:
            self._to_free(page)

    def is_shared(self, page: int) -> bool:
        return bool(self.refcounts[page] > 1)

    def quarantine(self, page: int) -> None:
        """Never hand out this page again; its holders keep it until they drop it."""
        if page == DUMMY_PAGE or page in self.quarantined:
            return
        self.quarantined.add(page)
        if page in self._free:
            self._free.remove(page)

    def end_quarantine(self) -> None:
        """Take the pages of the quarantine that nobody holds back into use."""
        for page in sorted(self.quarantined):
            if self.refcounts[page] == 0:
                self._free.append(page)
        self.quarantined.clear()

    def take_released(self) -> list[int]:
        """Pages freed since the last call, which the canary has to hear of."""
        released, self._released = self._released, []
        return released

    def forget_release(self, page: int) -> None:
        """A page that got the records of another one since it was freed must not be announced as free."""
        if page in self._released:
            self._released.remove(page)

    def _to_free(self, page: int) -> None:
        self._released.append(page)
        if page not in self.quarantined:
            self._free.append(page)

    def check(self, held: dict[int, int]) -> None:
        """Compare with the references that were counted by walking over all holders; a test calls this."""
        free = list(self._free)
        assert len(set(free)) == len(free), "a page is free twice"
        assert DUMMY_PAGE not in free and self.refcounts[DUMMY_PAGE] == 0, "the dummy page was handed out"
        for page in range(DUMMY_PAGE + 1, self.num_pages):
            assert self.refcounts[page] == held.get(page, 0), f"page {page}: {self.refcounts[page]} references, {held.get(page, 0)} holders"
            idle = self.refcounts[page] == 0
            assert (page in free) == (idle and page not in self.quarantined), f"page {page}: free and used"
