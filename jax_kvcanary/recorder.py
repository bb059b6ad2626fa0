"""The flight recorder: the tables, lengths, ids, frees and moves of the last steps in bounded host memory. NumPy only."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_kvcanary import validation

BLOCK = 256
"""Table entries that are kept together: a block that did not change since the step before is kept once."""

_BLOCK_OVERHEAD = 112
_ROW_OVERHEAD = 120
_BATCH_OVERHEAD = 600


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecordedBatch:
    """One step of one group of layers, as the host had it.

    request_ids: of the rows. lengths, prefix_lengths: int64 ``[bs]`` tokens after and before the step, prefix -1 unknown.
    rows: a tuple of blocks a request, int32, the used part of its table. copies: (src, dst) slots. finished: requests that ended
    before the step. released: table entries that were given back before it.
    """

    step: int
    group: str
    page_size: int
    request_ids: tuple[int, ...]
    lengths: np.ndarray
    prefix_lengths: np.ndarray
    rows: tuple[tuple[np.ndarray, ...], ...]
    copies: tuple[np.ndarray, np.ndarray]
    finished: tuple[int, ...]
    released: np.ndarray

    def slots(self, row: int) -> np.ndarray:
        """int64 slots of all positions of a row."""
        entries = np.concatenate([*self.rows[row], np.zeros(0, np.int32)]).astype(np.int64)
        within = np.arange(self.page_size, dtype=np.int64)
        return (entries[:, None] * self.page_size + within).reshape(-1)[: int(self.lengths[row])]


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a slot. what: "wrote", "held", "lost", "ended", "copied_in", "copied_out" or "released".

    request, position: of whom, 0 and -1 where nobody is named. other: the other slot of a copy, else -1.
    """

    step: int
    what: str
    request: int = 0
    position: int = -1
    other: int = -1

    @property
    def words(self) -> str:
        """In words.

        Example:
          >>> Moment(3, "wrote", request=7, position=12).words
          'step 3: request 7 wrote its position 12 there'
        """
        who, at = f"request {self.request}", f"position {self.position}"
        said = {
            "wrote": f"{who} wrote its {at} there",
            "held": f"{who} has it as its {at}, already written",
            "lost": f"the table of {who} no longer names it for {at}",
            "ended": f"{who} ended, which had it as its {at}",
            "copied_in": f"copied there from slot {self.other}",
            "copied_out": f"copied from there to slot {self.other}",
            "released": "given back",
        }
        return f"step {self.step}: {said[self.what]}"


class FlightRecorder:
    """Remembers the last batches, fed by :meth:`Monitor.record_batch`. Not for several threads at once.

    Args:
      max_batches: steps that are remembered.
      max_bytes: of host memory for them; the oldest steps go first. Table blocks that did not change are counted once.

    Example:
      >>> recorder = FlightRecorder(max_batches=8)
      >>> recorder.record(0, request_ids=[7], tables=np.array([[3, 5]]), lengths=[6], prefix_lengths=[0], page_size=4)
      >>> recorder.record(1, request_ids=[], tables=np.zeros((0, 2), np.int32), lengths=[], finished=[7], released=[3, 5], page_size=4)
      >>> [moment.words for moment in recorder.biography(21)]
      ['step 0: request 7 wrote its position 5 there', 'step 1: request 7 ended, which had it as its position 5', 'step 1: given back']
    """

    def __init__(self, *, max_batches: int = 64, max_bytes: int = 32 << 20) -> None:
        self.max_batches = validation.static_int("max_batches", max_batches, minimum=1)
        self.max_bytes = validation.static_int("max_bytes", max_bytes, minimum=0)
        self.forgotten = 0
        self.bytes = 0
        self._batches: collections.deque[RecordedBatch] = collections.deque()
        self._uses: dict[int, int] = {}  # id of a block: batches' rows that hold it
        self._last: dict[str, dict[int, tuple[np.ndarray, ...]]] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def batches(self) -> tuple[RecordedBatch, ...]:
        """What is remembered, oldest first."""
        return tuple(self._batches)

    def record(
        self,
        step: int,
        *,
        request_ids: Any,
        tables: Any,
        lengths: Any,
        prefix_lengths: Any = None,
        copies: tuple[Any, Any] | None = None,
        finished: Any = (),
        released: Any = (),
        page_size: int = 1,
        group: str = "",
    ) -> None:
        """Remember a step; arguments as :meth:`Monitor.record_batch` takes them. Copies what it keeps.

        Args:
          released: table entries (pages, if page_size is not 1) that were given back since the last record.
        """
        ids = [int(i) for i in np.asarray(request_ids).reshape(-1)]
        table, ends = np.asarray(tables), np.asarray(lengths, np.int64).reshape(-1)
        if table.ndim != 2 or len(table) != len(ids) or len(ends) != len(ids):
            raise validation.error(
                f"record takes one row of tables and one length a request, got {len(ids)} request_ids, tables of shape {table.shape}, "
                f"lengths of shape {ends.shape}"
            )
        starts = np.full(len(ids), -1) if prefix_lengths is None else np.asarray(prefix_lengths, np.int64).reshape(-1)
        if len(starts) != len(ids):
            raise validation.error(f"record takes one prefix length a request, got {len(starts)} for {len(ids)} requests")
        page_size = validation.static_int("page_size", page_size, minimum=1)
        before, rows, kept = self._last.get(group, {}), [], []
        now: dict[int, tuple[np.ndarray, ...]] = {}
        for number, request in enumerate(ids):
            if not request:
                continue
            length = max(0, min(int(ends[number]), table.shape[1] * page_size))
            now[request] = _blocks(table[number, : -(-length // page_size)], before.get(request, ()))
            rows.append(now[request])
            kept.append((request, length, int(starts[number])))
        self._last[group] = now
        src, dst = ((), ()) if copies is None else copies
        batch = RecordedBatch(
            step=validation.static_int("step", step, minimum=0),
            group=group,
            page_size=page_size,
            request_ids=tuple(request for request, _, _ in kept),
            lengths=np.array([length for _, length, _ in kept], np.int64),
            prefix_lengths=np.array([start for _, _, start in kept], np.int64),
            rows=tuple(rows),
            copies=(np.array(src, np.int64).reshape(-1), np.array(dst, np.int64).reshape(-1)),
            finished=tuple(int(i) for i in np.asarray(finished, dtype=object).reshape(-1)),
            released=np.array(released, np.int64).reshape(-1),
        )
        if len(batch.copies[0]) != len(batch.copies[1]):
            raise validation.error(
                f"record takes copies as (src, dst) of one length, got {len(batch.copies[0])} and {len(batch.copies[1])}"
            )
        self._add(batch)
        while self._batches and (len(self._batches) > self.max_batches or self.bytes > self.max_bytes):
            self._forget()

    def _add(self, batch: RecordedBatch) -> None:
        self._batches.append(batch)
        self.bytes += _own_bytes(batch)
        for block in _blocks_of(batch):
            uses = self._uses.get(id(block), 0)
            self.bytes += 0 if uses else block.nbytes + _BLOCK_OVERHEAD
            self._uses[id(block)] = uses + 1

    def _forget(self) -> None:
        batch = self._batches.popleft()
        self.forgotten += 1
        self.bytes -= _own_bytes(batch)
        for block in _blocks_of(batch):
            uses = self._uses.pop(id(block)) - 1
            if uses:
                self._uses[id(block)] = uses
            else:
                self.bytes -= block.nbytes + _BLOCK_OVERHEAD
        if not self._batches:
            self._last.clear()  # blocks in it are counted by no batch

    # ------------------------------------------------------------------------------------------ what it tells

    def slots_of(self, request: int, *, group: str | None = None, step: int | None = None) -> np.ndarray | None:
        """int64 slots of all positions of a request, as last recorded up to ``step``; None if it is in no batch."""
        for batch in reversed(self._batches):
            if (group is None or batch.group == group) and (step is None or batch.step <= step) and request in batch.request_ids:
                return batch.slots(batch.request_ids.index(request))
        return None

    def biography(self, slot: int, *, group: str | None = None) -> list[Moment]:
        """Who held a slot when, and its copies and frees, in order; as far as it was recorded. group: None is that of the first batch."""
        group = self._batches[0].group if group is None and self._batches else group
        out: list[Moment] = []
        held: dict[int, int] = {}  # request: position
        found: dict[int, np.ndarray] = {}  # id of a block: where it names the page
        for batch in self._batches:
            if batch.group != group:
                continue
            page, within = divmod(slot, batch.page_size)
            for request in batch.finished:
                if request in held:
                    out.append(Moment(batch.step, "ended", request=request, position=held.pop(request)))
            if np.any(batch.released == page):
                out.append(Moment(batch.step, "released"))
            for place in np.flatnonzero(batch.copies[1] == slot).tolist():
                out.append(Moment(batch.step, "copied_in", other=int(batch.copies[0][place])))
            for place in np.flatnonzero(batch.copies[0] == slot).tolist():
                out.append(Moment(batch.step, "copied_out", other=int(batch.copies[1][place])))
            for row, request in enumerate(batch.request_ids):
                position = _position(batch, row, page, within, found)
                if request in held and held[request] != position:
                    out.append(Moment(batch.step, "lost", request=request, position=held.pop(request)))
                if position is None:
                    continue
                start = int(batch.prefix_lengths[row])
                if 0 <= start <= position:
                    out.append(Moment(batch.step, "wrote", request=request, position=position))
                elif request not in held:
                    out.append(Moment(batch.step, "held", request=request, position=position))
                held[request] = position
        return out

    # ------------------------------------------------------------------------------------------ to and from a file

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything as flat arrays; :meth:`from_arrays` reads them."""
        blocks: dict[int, tuple[int, np.ndarray]] = {}
        heads: list[list[int]] = []
        rows: list[list[int]] = []
        row_blocks: list[int] = []
        moves: list[np.ndarray] = []
        groups: list[str] = []
        for batch in self._batches:
            if batch.group not in groups:
                groups.append(batch.group)
            for block in _blocks_of(batch):
                blocks.setdefault(id(block), (len(blocks), block))
            src, dst = batch.copies
            finished = np.array([i & _MASK for i in batch.finished], np.uint64).view(np.int64)
            counts = [len(batch.rows), len(src), len(finished), len(batch.released)]
            heads.append([batch.step, groups.index(batch.group), batch.page_size, *counts])
            moves += [src, dst, finished, batch.released]
            for request, length, start, held in zip(
                batch.request_ids, batch.lengths.tolist(), batch.prefix_lengths.tolist(), batch.rows, strict=True
            ):
                rows.append([_signed(request), length, start, len(held)])
                row_blocks += [blocks[id(block)][0] for block in held]
        ordered = [block for _, block in blocks.values()]
        return {
            "heads": np.array(heads, np.int64).reshape(-1, 7),
            "rows": np.array(rows, np.int64).reshape(-1, 4),
            "row_blocks": np.array(row_blocks, np.int32),
            "block_sizes": np.array([len(block) for block in ordered], np.int32),
            "blocks": np.concatenate([*ordered, np.zeros(0, np.int32)]),
            "moves": np.concatenate([*moves, np.zeros(0, np.int64)]),
            "groups": np.frombuffer("\n".join(groups).encode(), np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> FlightRecorder:
        """A recorder that holds what :meth:`to_arrays` returned."""
        out = cls(max_batches=max(1, len(arrays["heads"])), max_bytes=np.iinfo(np.int64).max)
        groups = bytes(arrays["groups"]).decode().split("\n")
        blocks = np.split(arrays["blocks"], np.cumsum(arrays["block_sizes"])[:-1])
        row_blocks, moves = _Reader(arrays["row_blocks"]), _Reader(arrays["moves"])
        rows = _Reader(arrays["rows"])
        for step, group, page_size, bs, copies, finished, released in arrays["heads"].tolist():
            held = rows.take(bs)
            src, dst = moves.take(copies), moves.take(copies)
            out._add(
                RecordedBatch(
                    step=step,
                    group=groups[group],
                    page_size=page_size,
                    request_ids=tuple(i & _MASK for i in held[:, 0].tolist()),
                    lengths=held[:, 1],
                    prefix_lengths=held[:, 2],
                    rows=tuple(tuple(blocks[i] for i in row_blocks.take(n).tolist()) for n in held[:, 3].tolist()),
                    copies=(src, dst),
                    finished=tuple(i & _MASK for i in moves.take(finished).tolist()),
                    released=moves.take(released),
                )
            )
        return out


_MASK = (1 << 64) - 1


class _Reader:
    """Takes parts off the front of an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.at = array, 0

    def take(self, count: int) -> np.ndarray:
        part = self.array[self.at : self.at + count]
        if len(part) != count:
            raise validation.error(f"recorded batches end early: {count} values are due, {len(part)} are left")
        self.at += count
        return part


def _signed(value: int) -> int:
    """64 bits as a signed number."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _blocks(row: np.ndarray, before: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """A row in blocks; those equal to the blocks before are the same objects."""
    out = []
    for number, start in enumerate(range(0, len(row), BLOCK)):
        piece = row[start : start + BLOCK]
        old = before[number] if number < len(before) else None
        if old is not None and len(old) == len(piece) and np.array_equal(old, piece):
            out.append(old)
        else:
            out.append(np.array(piece, np.int32))
    return tuple(out)


def _blocks_of(batch: RecordedBatch) -> Iterator[np.ndarray]:
    for row in batch.rows:
        yield from row


def _own_bytes(batch: RecordedBatch) -> int:
    """Bytes of a batch without its blocks."""
    arrays: Iterable[np.ndarray] = (batch.lengths, batch.prefix_lengths, *batch.copies, batch.released)
    pointers = 8 * sum(len(row) for row in batch.rows) + 8 * len(batch.finished)
    return _BATCH_OVERHEAD + sum(array.nbytes for array in arrays) + _ROW_OVERHEAD * len(batch.rows) + pointers


def _position(batch: RecordedBatch, row: int, page: int, within: int, found: dict[int, np.ndarray]) -> int | None:
    """The last position at which a row names a slot, or None."""
    for number in range(len(batch.rows[row]) - 1, -1, -1):
        block = batch.rows[row][number]
        if id(block) not in found:
            found[id(block)] = np.flatnonzero(block == page)
        for place in reversed(found[id(block)].tolist()):
            position = (number * BLOCK + place) * batch.page_size + within
            if position < batch.lengths[row]:
                return int(position)
    return None
