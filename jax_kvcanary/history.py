"""What the host's own page tables said at each step: which slot held which position of which request. Host side, NumPy only.

Optional evidence: with it a monitor tells an entry that changed from a slot that was overwritten, and names the requests on a slot.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from jax_kvcanary import validation

_NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotEntry:
    """What the tables say of one position of a request, as of a step.

    slot: of the position. since: the step from which the table named it. written_step: the step in which the request itself had to
    write the position last, None if it took it over already written. previous_slot: what the table named before, None if nothing.
    announced: the change from previous_slot was announced as a copy, or the position was written again since.
    """

    slot: int
    since: int
    written_step: int | None
    previous_slot: int | None
    announced: bool


class AskedHistory(Protocol):
    """What a classification asks of a history of tables, see :class:`TableHistory`."""

    def entry(self, request: int, position: int, *, step: int) -> SlotEntry | None: ...
    def finished(self, request: int) -> int | None: ...
    def copied_into(self, slot: int, *, step: int) -> tuple[int, int] | None: ...
    def holders(self, slots: Iterable[int], *, step: int) -> dict[int, list[tuple[int, int]]]: ...


class Answers:
    """What a history answered, question by question: the same questions get the same answers later, and in another process.

    of: the history that is asked where an answer is not known yet; None: then nothing is known of it.
    """

    __slots__ = ("copied", "ended", "entries", "of")

    def __init__(self, of: AskedHistory | None = None) -> None:
        self.of = of
        self.entries: dict[tuple[int, int, int], SlotEntry | None] = {}
        self.ended: dict[int, int | None] = {}
        self.copied: dict[tuple[int, int], tuple[int, int] | None] = {}

    def entry(self, request: int, position: int, *, step: int) -> SlotEntry | None:
        key = request, position, step
        if key not in self.entries and self.of is not None:
            self.entries[key] = self.of.entry(request, position, step=step)
        return self.entries.get(key)

    def finished(self, request: int) -> int | None:
        if request not in self.ended and self.of is not None:
            self.ended[request] = self.of.finished(request)
        return self.ended.get(request)

    def copied_into(self, slot: int, *, step: int) -> tuple[int, int] | None:
        key = slot, step
        if key not in self.copied and self.of is not None:
            self.copied[key] = self.of.copied_into(slot, step=step)
        return self.copied.get(key)

    def holders(self, slots: Iterable[int], *, step: int) -> dict[int, list[tuple[int, int]]]:
        """Not remembered: who holds a slot is handed to a classification with its rows."""
        return {slot: [] for slot in slots} if self.of is None else self.of.holders(slots, step=step)

    def to_lists(self) -> dict[str, list[list[Any]]]:
        """All answers as plain lists and numbers."""
        return {
            "entries": [[*key, None if entry is None else list(dataclasses.astuple(entry))] for key, entry in self.entries.items()],
            "ended": [[key, step] for key, step in self.ended.items()],
            "copied": [[*key, None if found is None else list(found)] for key, found in self.copied.items()],
        }

    @classmethod
    def from_lists(cls, lists: dict[str, list[list[Any]]]) -> Answers:
        """What :meth:`to_lists` returned, as answers without a history."""
        out = cls()
        names = [field.name for field in dataclasses.fields(SlotEntry)]
        for request, position, step, entry in lists["entries"]:
            out.entries[request, position, step] = None if entry is None else SlotEntry(**dict(zip(names, entry, strict=True)))
        out.ended = dict(lists["ended"])
        for slot, step, found in lists["copied"]:
            out.copied[slot, step] = None if found is None else (found[0], found[1])
        return out


class _Request:
    """The table row of one request: page, first step and last own write of every place, and the entries that were replaced."""

    __slots__ = ("changes", "ended", "length", "pages", "seen", "since", "written")

    def __init__(self) -> None:
        self.pages = np.zeros(0, np.int32)  # [places]
        self.since = np.zeros(0, np.int32)  # [places]
        self.written = np.zeros(0, np.int32)  # [tokens], the step, -1: not by this request
        self.length = 0
        self.seen = -1
        self.ended: int | None = None
        self.changes: collections.deque[tuple[int, int, int, int]] = collections.deque(maxlen=1024)  # place, old page, its since, until


def _grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    if size <= len(array):
        return array
    out = np.full(max(size, 2 * len(array), 64), fill, np.int32)
    out[: len(array)] = array
    return out


class TableHistory:
    """Bounded history of the tables of one group of layers.

    Args:
      page_size: slots a table entry; 1 for tables of tokens.
      max_requests: requests that are remembered; those seen longest ago go first.
      max_moves: announced copies and releases that are remembered.

    Example:
      >>> history = TableHistory(page_size=4)
      >>> history.record(1, request_ids=[7], tables=np.array([[3, 5]]), lengths=[6])
      >>> history.entry(7, 5, step=1).slot
      21
    """

    def __init__(self, *, page_size: int = 1, max_requests: int = 1024, max_moves: int = 1024) -> None:
        self.page_size = validation.static_int("page_size", page_size, minimum=1)
        self.max_requests = validation.static_int("max_requests", max_requests, minimum=1)
        self._requests: collections.OrderedDict[int, _Request] = collections.OrderedDict()
        self._copies: collections.deque[tuple[int, np.ndarray, np.ndarray]] = collections.deque(maxlen=max_moves)
        self._finished: collections.OrderedDict[int, int] = collections.OrderedDict()
        self.first_step: int | None = None
        self.last_step: int | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def record(
        self,
        step: int,
        *,
        request_ids: Any,
        tables: Any,
        lengths: Any,
        prefix_lengths: Any = None,
        copies: Iterable[tuple[Any, Any]] | tuple[Any, Any] | None = None,
        finished: Any = (),
    ) -> None:
        """Remember the tables of a step.

        Args:
          step: the number that records and violation rows of the step carry: 0 for the first after ``init``, then one more each.
          request_ids: ``[bs]`` the engine's ids, not 0; rows with id 0 are left out.
          tables: integers ``[bs, places]``, a row a request: slots, or pages if ``page_size`` is not 1. Copied.
          lengths: ``[bs]`` tokens of each request, those of this step included.
          prefix_lengths: ``[bs]`` tokens that stood in the cache before the step; None: those recorded last, 0 for new requests.
          copies: (src, dst) slots (not pages), each ``[n]``, that were copied and announced since the last record.
          finished: ids of requests that ended before this step: their slots may serve others.
        """
        step = validation.static_int("step", step, minimum=0, maximum=_NEVER - 1)
        if self.last_step is not None and step < self.last_step:
            raise validation.error(f"record_batch takes steps in ascending order, got step {step} after {self.last_step}")
        ids = [int(i) for i in np.asarray(request_ids).reshape(-1)]
        table, ends = np.asarray(tables), np.asarray(lengths).reshape(-1)
        if table.ndim != 2 or len(table) != len(ids) or len(ends) != len(ids):
            raise validation.error(
                f"record_batch takes one row of tables and one length a request, got {len(ids)} request_ids, "
                f"tables of shape {table.shape}, lengths of shape {ends.shape}"
            )
        starts = None if prefix_lengths is None else np.asarray(prefix_lengths).reshape(-1)
        if starts is not None and len(starts) != len(ids):
            raise validation.error(f"record_batch takes one prefix length a request, got {len(starts)} for {len(ids)} requests")
        if copies is not None:
            src, dst = copies
            pair = np.array(src, np.int64).reshape(-1), np.array(dst, np.int64).reshape(-1)
            if len(pair[0]) != len(pair[1]):
                raise validation.error(f"record_batch takes copies as (src, dst) of one length, got {len(pair[0])} and {len(pair[1])}")
            self._copies.append((step, *pair))
        for i in np.asarray(finished, dtype=object).reshape(-1):
            self._finished[int(i)] = step
            if (ended := self._requests.get(int(i))) is not None:
                ended.ended = step
        for row, request in enumerate(ids):
            if request:
                self._record_row(step, request, table[row], int(ends[row]), None if starts is None else int(starts[row]))
        while len(self._requests) > self.max_requests:
            self._requests.popitem(last=False)
        while len(self._finished) > 4 * self.max_requests:
            self._finished.popitem(last=False)
        self.first_step = step if self.first_step is None else self.first_step
        self.last_step = step

    def _record_row(self, step: int, request: int, row: np.ndarray, length: int, prefix: int | None) -> None:
        held = self._requests.get(request)
        if held is None:
            held = self._requests[request] = _Request()
        else:
            self._requests.move_to_end(request)
        self._finished.pop(request, None)
        if held.ended is not None:  # it is back: nothing of it is left in the cache but what it says
            held.ended, held.length = None, 0
            held.changes.clear()
        length = max(0, min(length, len(row) * self.page_size))
        prefix = held.length if prefix is None else max(0, prefix)
        old, new = -(-held.length // self.page_size), -(-length // self.page_size)
        both = min(old, new)
        differs = held.pages[:both] != row[:both]
        if new > both or differs.any():
            changed = np.flatnonzero(differs)
            if len(changed) and self.last_step is not None and held.seen < self.last_step:
                # It was out of the batch, perhaps preempted: what it holds now may be given anew, and is no change of an entry.
                held.changes.clear()
                for place in changed.tolist():
                    held.written[place * self.page_size : (place + 1) * self.page_size] = -1
                held.since[changed], held.pages[changed] = step, row[changed]
                changed = changed[:0]
            for place in changed.tolist():
                held.changes.append((place, int(held.pages[place]), int(held.since[place]), step))
            held.pages, held.since = _grown(held.pages, new, -1), _grown(held.since, new, _NEVER)
            held.written = _grown(held.written, new * self.page_size, -1)
            held.since[changed] = step
            held.since[both:new] = step
            held.pages[:new] = row[:new]
        if prefix > held.length or held.seen < 0:
            held.written[held.length : prefix] = -1
        held.written[prefix:length] = step
        held.length, held.seen = length, step

    def covers(self, step: int) -> bool:
        """Whether tables up to ``step`` are known."""
        return self.first_step is not None and self.last_step is not None and self.first_step <= step

    def finished(self, request: int) -> int | None:
        """The step before which a request was said to have ended."""
        return self._finished.get(request)

    def entry(self, request: int, position: int, *, step: int) -> SlotEntry | None:
        """What the table said of a position as of ``step``; None if that is not known."""
        held = self._requests.get(request)
        if held is None or not self.covers(step) or not 0 <= position < held.length:
            return None
        place, within = position // self.page_size, position % self.page_size
        pages = [(int(held.pages[place]), int(held.since[place]))]
        pages += [(page, since) for at, page, since, _ in reversed(held.changes) if at == place]
        while pages and pages[0][1] > step:
            pages.pop(0)
        if not pages:
            return None
        slot = pages[0][0] * self.page_size + within
        previous = pages[1][0] * self.page_size + within if len(pages) > 1 else None
        written = int(held.written[position])
        since = pages[0][1]
        own = written if 0 <= written <= step else None
        announced = previous is None or (own is not None and own >= since) or self._copied(previous, slot, since, step)
        return SlotEntry(slot=slot, since=since, written_step=own, previous_slot=previous, announced=announced)

    def length(self, request: int) -> int:
        """Tokens of a request when it was last recorded; 0 if it is not known."""
        held = self._requests.get(request)
        return 0 if held is None else held.length

    def _copied(self, src: int, dst: int, since: int, step: int) -> bool:
        """Whether a copy into ``dst`` was announced around the step in which the entry changed."""
        return any(since - 1 <= at <= step and bool(np.any((a == src) & (b == dst))) for at, a, b in self._copies)

    def copied_into(self, slot: int, *, step: int) -> tuple[int, int] | None:
        """(step, source slot) of the last announced copy into a slot up to ``step``."""
        for at, src, dst in reversed(self._copies):
            found = np.flatnonzero(dst == slot)
            if at <= step and len(found):
                return at, int(src[found[-1]])
        return None

    def holders(self, slots: Iterable[int], *, step: int) -> dict[int, list[tuple[int, int]]]:
        """(request, position) of all requests that hold each slot, by the tables recorded last; requests that had ended are left out."""
        wanted = {slot for slot in slots if slot >= 0}
        out: dict[int, list[tuple[int, int]]] = {slot: [] for slot in wanted}
        if not wanted:
            return out
        pages = np.array(sorted(wanted), np.int64) // self.page_size
        marked = np.zeros(int(pages[-1]) + 2, bool)  # the last one stands for all pages that are out of it
        marked[pages] = True
        for request, held in self._requests.items():
            if held.ended is not None and held.ended <= step:
                continue
            row = held.pages[: -(-held.length // self.page_size)]
            hit = np.flatnonzero(marked[np.clip(row, -1, len(marked) - 1)])
            for place in hit.tolist():
                for within in range(self.page_size):
                    slot, position = int(row[place]) * self.page_size + within, place * self.page_size + within
                    if slot in out and position < held.length and held.since[place] <= step:
                        out[slot].append((request, position))
        return out
