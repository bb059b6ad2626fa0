"""What violations look like: rows of one request in one step, read together, give a likely cause with its evidence in words.

A wrong cause misleads, an unknown one does not: whatever the evidence leaves open is UNKNOWN, and the words say what is left.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from jax_kvcanary.history import Answers, AskedHistory, SlotEntry
from jax_kvcanary.report_header import RowFacts
from jax_kvcanary.spec import CHAIN_ANCHOR, SPLITMIX_MULTIPLIERS, SPLITMIX_SHIFTS, FailReason, RecordFlag

_CHAIN, _POSITION, _TOKEN = (
    int(FailReason.VERIFY_CHAIN_HASH),
    int(FailReason.VERIFY_POSITION),
    int(FailReason.VERIFY_TOKEN),
)
_LANDING = int(FailReason.LANDING)
_BYTES, _UNWRITTEN = int(FailReason.VERIFY_REAL_KV_HASH), int(FailReason.UNWRITTEN)
_WRITE_TOKEN, _WRITE_POSITION = int(FailReason.WRITE_TOKEN), int(FailReason.WRITE_POSITION)
_WRITE = _WRITE_TOKEN | _WRITE_POSITION
_TABLE_RANGE, _RANK = int(FailReason.TABLE_OUT_OF_RANGE), int(FailReason.RANK_DIGEST)
_RANGE = int(FailReason.SLOT_OUT_OF_RANGE) | _TABLE_RANGE
RECORD_BITS: Final = _CHAIN | _POSITION | _TOKEN | _UNWRITTEN
"""Reason bits that speak of a slot's record: its successor cannot chain to it."""


class Cause(enum.StrEnum):
    """What a violation looks like."""

    OVERWRITTEN = "overwritten"
    NEVER_WRITTEN = "never_written"
    SHIFTED = "shifted"
    BYTES_CHANGED = "bytes_changed"
    TABLE_ENTRY = "table_entry"
    STALE_PAGE = "stale_page"
    MOVED = "moved_without_notice"
    WRITE_NOT_LANDED = "write_not_landed"
    OUT_OF_RANGE = "out_of_range"
    WRONG_INPUT = "wrong_input"
    NAMESPACE = "namespace"
    RANK = "rank_divergence"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """In words."""
        return _WORDS[self]

    @property
    def first_look(self) -> str:
        """Where to look first."""
        return _FIRST_LOOK[self]


_WORDS = {
    Cause.OVERWRITTEN: "overwritten by another sequence",
    Cause.NEVER_WRITTEN: "never written",
    Cause.SHIFTED: "stamped with shifted positions",
    Cause.BYTES_CHANGED: "bytes changed after the stamp",
    Cause.TABLE_ENTRY: "page table entry swapped, or pointing elsewhere",
    Cause.STALE_PAGE: "stale page of a finished request",
    Cause.MOVED: "moved without notice",
    Cause.WRITE_NOT_LANDED: "the write did not land",
    Cause.OUT_OF_RANGE: "a slot or table row out of range",
    Cause.WRONG_INPUT: "the step's input is not what the scheduler believes",
    Cause.NAMESPACE: "the chain of another namespace",
    Cause.RANK: "ranks disagree",
    Cause.UNKNOWN: "unknown",
}
_FIRST_LOOK = {
    Cause.OVERWRITTEN: "when this request's pages were freed or given out again, and whether a write was still in flight then",
    Cause.NEVER_WRITTEN: "whether the prefill, load or copy of this position ran, and which slots it was given",
    Cause.SHIFTED: "the positions of the step that stamped the slot: chunk starts, offsets of draft tokens",
    Cause.BYTES_CHANGED: "who writes KV without stamping it: transfers, padding rows, other streams, a write past its slots",
    Cause.TABLE_ENTRY: "where the table row is built and when it is copied to the device",
    Cause.STALE_PAGE: "which page the prefix cache or the allocator gave, and whether this request ever wrote it",
    Cause.MOVED: "copies, compaction and loads of pages that are not announced to the canary",
    Cause.WRITE_NOT_LANDED: "the kernel that writes KV: slots, masks, dropped indices, 32-bit offsets",
    Cause.OUT_OF_RANGE: "the capacity that the allocator believes in, and how padding is marked",
    Cause.WRONG_INPUT: "the tokens and positions handed to the step: stale buffers, tokens of an earlier step",
    Cause.NAMESPACE: "the key of the prefix cache: adapter, weights version, image, tenant",
    Cause.RANK: "per-rank capacity, loads that run on one rank only, tables of each rank",
    Cause.UNKNOWN: "a history of tables (Monitor.record_batch) would tell a changed entry from changed content",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The likely cause of one row.

    evidence: sentences. root: number of the row that this one follows from, None for a fault of its own. run: number of the
    row that begins the run of slots with one fault, its own number for the first. position: of the bad slot, that of the
    predecessor if this row only shows it; None is unknown. writer, writer_step: who wrote the bad slot, 0 is unknown.
    """

    cause: Cause
    evidence: tuple[str, ...]
    root: int | None = None
    run: int
    position: int | None
    writer: int
    writer_step: int


Crossings = dict[tuple[int, int, int, int], RowFacts]
"""Rows by reader, writer, position of the record, and position where it is read: a request in the slot of another."""


def crossings(rows: Iterable[RowFacts]) -> Crossings:
    """Rows that show a request the record of another one, for many calls of :func:`classify` on one step, group and shard."""
    return {
        (row.reader, row.writer, row.position, row.expected_position): row
        for row in rows
        if row.reasons & RECORD_BITS and row.reader and row.writer and row.writer != row.reader
    }


def classify(
    rows: Sequence[RowFacts],
    *,
    others: Iterable[RowFacts] | Crossings = (),
    history: AskedHistory | None = None,
    holders: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    complete: bool = True,
) -> list[Finding]:
    """The likely causes of rows of one request, group and shard in one step.

    Args:
      rows: all of them together: what a row means depends on its neighbours.
      others: rows of other requests in that step, rows of these may be among them; or :func:`crossings` of all.
      history: the host's tables of the group.
      holders: who holds a slot by ``history``, as :meth:`TableHistory.holders` returns it; None asks it.
      complete: no row of the step is missing. Without it, a row that may go on with the fault of one before it stays UNKNOWN.

    Returns:
      A finding a row, in their order.
    """
    return _Reader(rows, others, history, holders, complete).findings()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What :func:`classify` was given about one request in one step, kept so that it can be read again. Fields as its arguments."""

    rows: Sequence[RowFacts]
    others: Crossings
    history: Answers | None
    holders: Mapping[int, Sequence[tuple[int, int]]]
    complete: bool

    @classmethod
    def of(
        cls,
        rows: Sequence[RowFacts],
        *,
        others: Crossings,
        history: AskedHistory | None,
        holders: Mapping[int, Sequence[tuple[int, int]]],
        complete: bool,
    ) -> tuple[Case, list[Finding]]:
        """The case and its findings; later changes of the history do not reach it."""
        answers = None if history is None else Answers(history)
        wanted = [(row.writer, row.reader, row.expected_position, row.position) for row in rows]
        case = cls(
            rows,
            {key: others[key] for key in wanted if key in others},
            answers,
            {row.slot: tuple(holders[row.slot]) for row in rows if row.slot in holders},
            complete,
        )
        found = case.findings()
        if answers is not None:
            answers.of = None
        return case, found

    def findings(self) -> list[Finding]:
        """The likely causes of the rows."""
        return classify(self.rows, others=self.others, history=self.history, holders=self.holders, complete=self.complete)


def _splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    for shift, factor in zip(SPLITMIX_SHIFTS, (*SPLITMIX_MULTIPLIERS, 1), strict=True):
        x = (x ^ x >> shift) * factor & mask
    return x


class _Reader:
    """Reads the rows of one request together."""

    def __init__(
        self,
        rows: Sequence[RowFacts],
        others: Iterable[RowFacts] | Crossings,
        history: AskedHistory | None,
        holders: Mapping[int, Sequence[tuple[int, int]]] | None,
        complete: bool,
    ) -> None:
        self.rows = rows
        self.complete = complete
        self.history = history
        self.holders = holders
        self.at: dict[int, int] = {}  # expected position: number of the row with a bad record
        for number, row in enumerate(rows):
            # A slot can be met by several launches of a step: the row with most to say about the record stands for it.
            if row.reasons & (RECORD_BITS | _RANGE) and row.expected_position >= 0:
                before = self.at.get(row.expected_position)
                if before is None or (row.reasons & RECORD_BITS).bit_count() > (rows[before].reasons & RECORD_BITS).bit_count():
                    self.at[row.expected_position] = number
        self.others = others if isinstance(others, dict) else crossings(others)
        self.order = sorted(self.at)
        self.done: dict[int, Finding] = {}

    def findings(self) -> list[Finding]:
        for position in self.order:  # roots before what follows from them
            self.done[self.at[position]] = self._read(self.at[position])
        out = []
        for number, row in enumerate(self.rows):
            finding = self.done.get(number)
            if finding is None:
                same = self.at.get(row.expected_position)
                twin = self.done[same] if same is not None and row.reasons & RECORD_BITS else None
                finding = self._read(number) if twin is None else dataclasses.replace(twin)
            out.append(finding)
        return out

    # ---------------------------------------------------------------------------------------- one row

    def _read(self, number: int) -> Finding:
        row = self.rows[number]
        reasons = row.reasons
        if reasons & _RANK:
            return self._own(number, Cause.RANK, "ranks that must hold the same chain report different digests")
        if reasons & _LANDING:
            return self._own(number, Cause.WRITE_NOT_LANDED, "the bytes handed to the writer are not those in the pool")
        if reasons & _RANGE:
            return self._out_of_range(number)
        if reasons & _UNWRITTEN:
            return self._unwritten(number)
        if reasons & _WRITE:
            return self._input(number)
        if not reasons & RECORD_BITS:
            return self._bytes(number) if reasons & _BYTES else self._own(number, Cause.UNKNOWN, "no reason that is known")
        return self._record(number)

    def _own(self, number: int, cause: Cause, *evidence: str) -> Finding:
        row = self.rows[number]
        return Finding(
            cause=cause,
            evidence=evidence,
            run=number,
            position=row.expected_position if row.expected_position >= 0 else None,
            writer=row.writer,
            writer_step=row.writer_step,
        )

    def _follows(self, number: int, root: int, evidence: str) -> Finding:
        found = self.done[root]
        first = found.run if found.root is None else found.root
        return dataclasses.replace(self.done[first], evidence=(evidence,), root=first)

    def _out_of_range(self, number: int) -> Finding:
        row = self.rows[number]
        if row.reasons & _TABLE_RANGE:
            return self._own(number, Cause.OUT_OF_RANGE, "the table row, the length or the segment of the request is out of range")
        before = self.at.get(row.expected_position - 1)
        if row.slot >= 0 and before is not None and before in self.done and self.rows[before].reasons & _RANGE:
            return self._follows(number, before, f"its predecessor (position {row.expected_position - 1}) is out of range")
        if row.slot >= 0 and row.written:
            return self._own(number, Cause.OUT_OF_RANGE, "the table's entry before it leads outside the pool")
        return self._own(number, Cause.OUT_OF_RANGE, f"the table leads to slot {row.slot}, which the pool does not have")

    def _unwritten(self, number: int) -> Finding:
        row = self.rows[number]
        entry = self._entry(row)
        if entry is not None and (changed := self._elsewhere(number, entry)) is not None:
            return changed
        if entry is not None and not entry.announced:
            if held := self._held_by_others(row):
                return self._own(
                    number,
                    Cause.TABLE_ENTRY,
                    f"the table named slot {entry.previous_slot} until step {entry.since}, slot {row.slot} belongs to {_holders(held)}, "
                    "and nothing was ever stamped there",
                )
            return self._own(
                number,
                Cause.MOVED,
                f"the table named slot {entry.previous_slot} until step {entry.since}, no copy to slot {row.slot} was announced, "
                "and nothing was ever stamped there",
            )
        return self._own(number, Cause.NEVER_WRITTEN, "its record is still all zero: nothing was stamped there since the canary began")

    def _input(self, number: int) -> Finding:
        row = self.rows[number]
        if not row.reasons & _WRITE_TOKEN:  # what was due may have been told by the record of the predecessor
            for p in (row.position - 1, row.expected_position - 1):
                before = self.at.get(p)
                if before is not None and self.rows[before].reasons & (_POSITION | _UNWRITTEN):
                    return self._follows(number, before, f"it was compared with its predecessor (position {p}), which is bad")
            at_place = self._entry_at(row, row.position)
            if at_place is not None and at_place.slot == row.slot:
                return self._own(
                    number,
                    Cause.UNKNOWN,
                    f"the host's table names slot {row.slot} for position {row.position}, as it was given to the step: what stands before "
                    f"it says that {row.expected_position} was due",
                )
            if not self.complete:
                return self._own(
                    number, Cause.UNKNOWN, "rows of this step were not at hand, what was due may come from a record that is bad"
                )
        words = []
        if row.reasons & _WRITE_TOKEN:
            words.append(f"token {row.token} was given to the step, the scheduler has {row.expected_token}")
        if row.reasons & _WRITE_POSITION:
            shift = row.position - row.expected_position
            words.append(f"position {row.position} was given to the step, {row.expected_position} was due ({shift:+d})")
        return self._own(number, Cause.WRONG_INPUT, *words)

    def _bytes(self, number: int) -> Finding:
        row = self.rows[number]
        words = ["token, position and chain of the record are right, only the bytes are others than those stamped"]
        if row.flags & RecordFlag.FREE:
            words.append("the slot is marked free: whoever got it next may have written without stamping")
        return self._own(number, Cause.BYTES_CHANGED, *words)

    # ---------------------------------------------------------------------------------------- records

    def _record(self, number: int) -> Finding:
        row = self.rows[number]
        p, record = row.expected_position, row.reasons & RECORD_BITS
        before = self.at.get(p - 1)
        if record == _CHAIN and before is not None and before in self.done:
            return self._follows(
                number, before, f"its own record fits; it cannot chain to its predecessor (position {p - 1}), which is bad"
            )
        if before is not None and before in self.done and self._continues(self.rows[before], row):
            found = self.done[before]
            if found.root is None:
                return dataclasses.replace(found, run=found.run, position=p, writer=row.writer, writer_step=row.writer_step)
        if record == _CHAIN and (start := self._run_start(row)) is not None:
            return self._follows(
                number, start, f"its own record fits; its predecessor is the last of those that request {row.previous_writer} wrote"
            )
        entry = self._entry(row)
        if entry is not None and (changed := self._elsewhere(number, entry)) is not None:
            return changed
        if not self.complete and not record & _CHAIN and p > 0 and before is None:
            return self._own(number, Cause.UNKNOWN, "rows of this step were not stored, the one that begins this fault may be among them")
        for read in (self._swapped, self._shifted, self._namespace, self._tokens):
            if (found_now := read(number, entry)) is not None:
                return found_now
        mine = row.written and row.reader != 0 and row.writer == row.reader
        if record == _CHAIN and (mine or row.writer == 0 or self._came_before(row, entry)):
            return self._predecessor(number)
        if mine:
            return self._own_record(number, entry)
        if not row.reader or not row.writer:
            return self._own(number, Cause.UNKNOWN, "without request ids, what wrote the slot cannot be told from its reader")
        if row.writer_step > row.step:
            return self._own(number, Cause.UNKNOWN, self._who(row), _OTHER_CLOCK)
        return self._foreign(number, entry) if entry is not None else self._foreign_alone(number)

    @staticmethod
    def _continues(before: RowFacts, row: RowFacts) -> bool:
        """Whether a row goes on with the fault of the one before: same writer, same distance, chained to it."""
        if row.reasons & _UNWRITTEN or before.reasons & _UNWRITTEN or row.reasons & _CHAIN:
            return False
        return (
            row.writer == before.writer
            and row.position - row.expected_position == before.position - before.expected_position
            and bool(row.reasons & RECORD_BITS)
        )

    def _run_start(self, row: RowFacts) -> int | None:
        """The row that begins the run of another writer which ends before ``row``."""
        if not row.previous_known or row.previous_writer in (0, row.reader, row.writer):
            return None
        for position in reversed([position for position in self.order if position < row.expected_position]):
            number = self.at[position]
            if number in self.done and self.rows[number].writer == row.previous_writer:
                return self.done[number].run if self.done[number].root is None else None
        return None

    def _run_end(self, row: RowFacts) -> RowFacts | None:
        """The first row after the run of ``row``'s writer: stamped by someone else, and not chained to it."""
        for position in self.order:
            if position <= row.expected_position:
                continue
            after = self.rows[self.at[position]]
            if after.reasons & _CHAIN and after.written and after.writer != row.writer:
                return after if after.previous_known and after.previous_writer == row.writer else None
        return None

    def _entry(self, row: RowFacts) -> SlotEntry | None:
        return self._entry_at(row, row.expected_position)

    def _entry_at(self, row: RowFacts, position: int) -> SlotEntry | None:
        if self.history is None or not row.reader:
            return None
        return self.history.entry(row.reader, position, step=row.step)

    def _held_by_others(self, row: RowFacts) -> list[tuple[int, int]]:
        assert self.history is not None
        known = self.holders.get(row.slot) if self.holders is not None else None
        held = self.history.holders([row.slot], step=row.step)[row.slot] if known is None and row.slot >= 0 else (known or ())
        return [holder for holder in held if holder != (row.reader, row.expected_position)]

    def _elsewhere(self, number: int, entry: SlotEntry) -> Finding | None:
        """The step read another slot than the host's table names."""
        row = self.rows[number]
        if entry.slot == row.slot:
            return None
        return self._own(
            number, Cause.TABLE_ENTRY, f"the step read slot {row.slot}, the host's table names slot {entry.slot} since step {entry.since}"
        )

    def _came_before(self, row: RowFacts, entry: SlotEntry | None) -> bool:
        """Whether a shared record stood there when the request took it over, and its predecessor was written since."""
        before = self._entry_at(row, row.expected_position - 1)
        if entry is None or before is None or not row.previous_known or row.previous_writer in (row.reader, row.writer):
            return False
        return entry.written_step is None and row.writer_step <= entry.since and row.previous_step > _held(before)

    def _swapped(self, number: int, entry: SlotEntry | None) -> Finding | None:
        """Two slots whose records stand at each other's place, of one request or of two."""
        row = self.rows[number]
        if not row.reasons & (_CHAIN | _POSITION) or not row.written:
            return None
        partner: RowFacts | None = None
        if row.reasons & _POSITION and row.position in self.at:
            at_place = self.rows[self.at[row.position]]
            if at_place.position == row.expected_position and at_place.reasons & _POSITION and at_place.slot != row.slot:
                partner = at_place
        if partner is None and row.reader and row.writer not in (0, row.reader):
            other = self.others.get((row.writer, row.reader, row.expected_position, row.position))
            if other is not None and other.slot != row.slot:
                partner = other
        if partner is None:
            return None
        whose = "" if partner.request == row.request else f" of request {partner.reader}"
        words = (
            f"slot {row.slot} holds what belongs at position {row.position}{whose}, and slot {partner.slot}, read there, holds what "
            f"belongs at position {row.expected_position}"
        )
        if self._at_home(row):
            return self._own(number, Cause.TABLE_ENTRY, words, f"slot {row.slot} is where request {row.writer} had to write it")
        if entry is not None and entry.previous_slot is None:  # the host's table names this slot, and never named another
            return self._own(number, Cause.MOVED, words, "the host's table names the same slots as before: their contents changed places")
        return self._own(number, Cause.TABLE_ENTRY, words)

    def _at_home(self, row: RowFacts) -> bool:
        """Whether the record stands where the host's tables had its writer put it: neither its place nor its position is wrong."""
        if self.history is None or not row.writer:
            return False
        theirs = self.history.entry(row.writer, row.position, step=row.writer_step)
        return theirs is not None and theirs.slot == row.slot and theirs.written_step == row.writer_step

    def _shifted(self, number: int, entry: SlotEntry | None) -> Finding | None:
        row = self.rows[number]
        if not row.reasons & _POSITION or row.reasons & _CHAIN or not row.written:
            return None
        if self._at_home(row) or (row.reasons & _TOKEN and not row.reader):
            return None
        foreign = row.reader and row.writer not in (0, row.reader)
        if foreign and (row.reasons & _TOKEN or (row.previous_known and row.previous_writer != row.writer)):
            return None  # another request went on from what stands before this slot
        shift = row.position - row.expected_position
        return self._own(
            number,
            Cause.SHIFTED,
            f"its chain is whole, and its position is {row.position} where {row.expected_position} was due ({shift:+d})",
        )

    def _namespace(self, number: int, entry: SlotEntry | None) -> Finding | None:
        row = self.rows[number]
        if row.expected_position != 0 or not row.reasons & _CHAIN or row.reasons & (_POSITION | _TOKEN) or not row.written:
            return None
        if row.batch_row < 0 or row.writer_namespace == row.reader_namespace:
            return None
        if row.chain_hash != _splitmix(CHAIN_ANCHOR ^ row.writer_namespace) or self._run_end(row) is not None:
            return None
        if entry is not None and row.writer_step > _held(entry):
            return None  # written after this request had the slot: more than a key that is too short
        return self._own(
            number,
            Cause.NAMESPACE,
            f"it is the head of a chain of namespace {row.writer_namespace:#x}, the request runs under {row.reader_namespace:#x}",
        )

    def _tokens(self, number: int, entry: SlotEntry | None) -> Finding | None:
        """Only the token differs: position and chain fit."""
        row = self.rows[number]
        if row.reasons & RECORD_BITS != _TOKEN:
            return None
        words = f"it was stamped with token {row.token} in an unbroken chain, the scheduler has {row.expected_token}"
        if row.reader and row.writer == row.reader:
            return self._own(number, Cause.WRONG_INPUT, words)
        neighbours = [self.at.get(row.expected_position + 1), self.at.get(row.expected_position - 1)]
        more = any(other is not None and self.rows[other].reasons & RECORD_BITS == _TOKEN for other in neighbours)
        if entry is not None and row.writer:
            held = _held(entry)
            if (copied := self._copied_over(number, entry)) is not None:
                return copied
            if row.step >= row.writer_step > held:
                return self._own(
                    number,
                    Cause.OVERWRITTEN,
                    f"request {row.writer} wrote the slot in step {row.writer_step}, this request has it since {held}",
                )
        if more or row.expected_position == 0:
            return self._own(
                number,
                Cause.UNKNOWN,
                words,
                "the prefix is a whole chain of other tokens: found under a wrong key, or overwritten as a whole",
            )
        if entry is not None and entry.written_step is None:
            return self._own(
                number,
                Cause.UNKNOWN,
                words,
                f"this request took it over, as already written, in step {entry.since}: one token too many, or a wrong input of then",
            )
        return self._own(number, Cause.WRONG_INPUT, words)

    def _copied_over(self, number: int, entry: SlotEntry) -> Finding | None:
        """A copy into the slot was announced after the request had it."""
        row = self.rows[number]
        copy = None if self.history is None else self.history.copied_into(row.slot, step=row.step)
        if copy is None or copy[0] <= _held(entry):
            return None
        words = f"a copy from slot {copy[1]} was announced in step {copy[0]}, when this request held the slot"
        return self._own(number, Cause.OVERWRITTEN, self._who(row), words)

    def _predecessor(self, number: int) -> Finding:
        """The record itself fits: what of the one before it?"""
        row = self.rows[number]
        p = row.expected_position
        if p <= 0 or not row.previous_known:
            return self._own(number, Cause.UNKNOWN, "token and position are right, the chain is not, and the predecessor is out of reach")
        whom, when = row.previous_writer, row.previous_step

        def about(cause: Cause, *evidence: str) -> Finding:
            return Finding(cause=cause, evidence=evidence, run=number, position=p - 1, writer=whom, writer_step=when)

        own = "its own record fits"
        if when > row.step:
            return about(Cause.UNKNOWN, own, _OTHER_CLOCK)
        entry = self._entry_at(row, p - 1)
        if entry is not None:
            held = _held(entry)
            theirs = self.history.entry(whom, p - 1, step=row.step) if self.history is not None else None
            if theirs is not None and theirs.slot != entry.slot and whom != row.reader:
                words = f"{own}; its predecessor is by request {whom}, which has its position {p - 1} in slot {theirs.slot}"
                if theirs.written_step == when and entry.written_step != when:
                    return about(Cause.TABLE_ENTRY, words, f"the host's table of this request names slot {entry.slot} there")
                return about(Cause.UNKNOWN, words)
            if whom not in (0, row.reader) and when > held:
                return about(
                    Cause.OVERWRITTEN,
                    f"{own}; position {p - 1} (slot {entry.slot} in the host's table) was written by request {whom} in step {when}, "
                    f"this request has it since step {held}",
                )
            if whom not in (0, row.reader) and not entry.announced:
                return about(
                    Cause.UNKNOWN, f"{own}; the table named slot {entry.previous_slot} for position {p - 1} until step {entry.since}"
                )
        elif whom not in (0, row.reader, row.writer) and row.written and when > row.writer_step:
            return about(
                Cause.OVERWRITTEN,
                f"{own} (step {row.writer_step}); its predecessor was written later, by request {whom} in step {when}",
                "without a history of tables, an entry that points at that request's slot looks the same",
            )
        return about(Cause.UNKNOWN, f"{own} in token and position; the chain is broken between it and position {p - 1}")

    def _own_record(self, number: int, entry: SlotEntry | None) -> Finding:
        """The request's own record, of another position."""
        row = self.rows[number]
        p, q = row.expected_position, row.position
        what = f"the slot holds this request's own position {q}, stamped in step {row.writer_step}"
        if p == q:
            if entry is not None and entry.written_step is not None and row.writer_step > entry.written_step:
                return self._own(
                    number, Cause.UNKNOWN, f"{what}: written again after step {entry.written_step}, with another token or predecessor"
                )
            return self._own(number, Cause.UNKNOWN, f"{what}, with another token or predecessor")
        if entry is not None:
            if not entry.announced:
                other = any(holder[0] == row.reader for holder in self._held_by_others(row))
                cause = Cause.TABLE_ENTRY if other else Cause.UNKNOWN
                return self._own(number, cause, what, f"the table named slot {entry.previous_slot} until step {entry.since}")
            at_q = self._entry_at(row, q)
            if at_q is not None and at_q.slot == row.slot and at_q.since <= row.step:
                return self._own(number, Cause.OVERWRITTEN, what, f"the table names the slot at both positions, {p} and {q}")
            if entry.written_step is not None and row.writer_step > entry.written_step:
                return self._own(number, Cause.OVERWRITTEN, what, f"position {p} was written before, in step {entry.written_step}")
            return self._own(number, Cause.UNKNOWN, what)
        return self._own(number, Cause.UNKNOWN, what, "the entry points at it, or the slot was given out twice")

    def _foreign(self, number: int, entry: SlotEntry) -> Finding:
        """Another request's record in a slot that the host's table names."""
        row = self.rows[number]
        who = self._who(row)
        held = self._held_by_others(row)
        if not entry.announced:
            words = f"the table named slot {entry.previous_slot} until step {entry.since}, without a copy to slot {row.slot}"
            if row.writer_step > entry.since:
                return self._own(number, Cause.UNKNOWN, who, words, "the slot was written after that")
            if held:
                return self._own(number, Cause.TABLE_ENTRY, who, words, f"the slot belongs to {_holders(held)}")
            if row.flags & RecordFlag.FREE and not row.reasons & _BYTES:
                return self._own(number, Cause.UNKNOWN, who, words, "nothing was copied to the page, or only without notice")
            return self._own(number, Cause.MOVED, who, words)
        if (copied := self._copied_over(number, entry)) is not None:
            return copied
        also = f"; it is also held by {_holders(held)}" if held else ""
        if entry.written_step is not None:
            if row.writer_step > entry.written_step:
                return self._own(number, Cause.OVERWRITTEN, who, f"this request had written it in step {entry.written_step}{also}")
            if row.writer_step == entry.written_step:
                return self._own(number, Cause.OVERWRITTEN, who, f"this request had to write it in the same step{also}")
            older = f"this request should have written it in step {entry.written_step}, its stamp is not there{also}"
            if self._run_end(row) is not None:  # moved there with its record, after this request had gone on from its own content
                taken = any(request == row.writer for request, _ in held)
                return self._own(number, Cause.OVERWRITTEN if taken else Cause.UNKNOWN, who, older)
            return self._own(number, Cause.STALE_PAGE if row.flags & RecordFlag.FREE else Cause.UNKNOWN, who, older)
        if row.writer_step > entry.since:
            return self._own(number, Cause.OVERWRITTEN, who, f"this request holds it since step {entry.since}{also}")
        ended = self.history.finished(row.writer) if self.history is not None else None
        if row.writer_step < entry.since and (row.flags & RecordFlag.FREE or (ended is not None and not held)):
            return self._own(number, Cause.STALE_PAGE, who, f"this request took it over, as already written, in step {entry.since}")
        return self._own(
            number,
            Cause.UNKNOWN,
            who,
            f"this request took it over, as already written, in step {entry.since}: a wrong page of the cache, or overwritten before",
        )

    def _foreign_alone(self, number: int) -> Finding:
        """Another request's record, without the host's tables."""
        row = self.rows[number]
        who = self._who(row)
        step, free = row.writer_step, bool(row.flags & RecordFlag.FREE)
        own_before = row.previous_known and row.previous_writer == row.reader
        caveat = "without a history of tables, an entry that points at that request's slot looks the same"
        if (end := self._run_end(row)) is not None:
            if step >= end.writer_step:
                return self._own(
                    number,
                    Cause.OVERWRITTEN,
                    who,
                    f"position {end.expected_position} was stamped in step {end.writer_step} on what stood here before",
                    caveat,
                )
            return self._own(
                number,
                Cause.UNKNOWN,
                who,
                f"position {end.expected_position} was stamped later, in step {end.writer_step}, on something else: the entry was changed, "
                "or the content was moved without notice",
            )
        if own_before and step > row.previous_step and not free:
            return self._own(
                number, Cause.OVERWRITTEN, who, f"this request had stamped the position before it in step {row.previous_step}", caveat
            )
        if free and row.previous_known and step <= row.previous_step and row.previous_writer != row.writer:
            return self._own(
                number, Cause.STALE_PAGE, who, f"it is older than the position before it (step {row.previous_step}), and marked free"
            )
        if row.previous_known and row.previous_writer == row.writer:
            return self._own(number, Cause.UNKNOWN, who, "so was its predecessor: a shared prefix whose chain is broken")
        return self._own(number, Cause.UNKNOWN, who, "its content changed, its entry changed, or this request never wrote it")

    @staticmethod
    def _who(row: RowFacts) -> str:
        words = f"the slot holds position {row.position} of request {row.writer}, written in step {row.writer_step}"
        if row.writer_namespace != row.reader_namespace:
            words += f" under namespace {row.writer_namespace:#x}"
        return words + (", and released since" if row.flags & RecordFlag.FREE else "")


_OTHER_CLOCK = "that step is still to come here: the record was brought from elsewhere, and its step tells nothing"


def _held(entry: SlotEntry) -> int:
    """The step from which the slot's content was settled for the request: its own write, else when it took the slot over."""
    return entry.since if entry.written_step is None else entry.written_step


def _holders(held: Sequence[tuple[int, int]]) -> str:
    words = ", ".join(f"request {request} (position {position})" for request, position in held[:4])
    return words + (f" and {len(held) - 4} more" if len(held) > 4 else "")
