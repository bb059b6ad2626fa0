"""The host side of sweeps: a cache's tree as arrays, the portions of a round, what was really checked, and how long ago."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from jax_kvcanary import validation
from jax_kvcanary.canary import Canary
from jax_kvcanary.canary_state import SweepPortion
from jax_kvcanary.spec import INT32_MAX, Verdict

UNREACHABLE: Final = -2
"""As ``prev_slots`` of an entry: it has a predecessor, whose slot is gone. Its position, token and bytes are checked, its chain is not."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SweepEntries:
    """Cached slots to check, in NumPy arrays ``[n]`` of one order, parents before children or not.

    slots, positions: int64. prev_slots: int64 slot of the position before, -1 for the head of a chain, :data:`UNREACHABLE`.
    tokens: int64, -1 is unknown. namespaces: uint64. nodes: int64, which entries belong together; -1 is unknown.
    """

    slots: np.ndarray
    positions: np.ndarray
    prev_slots: np.ndarray
    tokens: np.ndarray
    namespaces: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(
        cls, *, slots: Any, positions: Any, prev_slots: Any, tokens: Any = None, namespaces: Any = None, nodes: Any = None
    ) -> SweepEntries:
        """Entries of any sequences of integers; what is None is unknown, namespaces are 0.

        Raises:
          ValueError: sequences of other lengths than that of ``slots``.

        Example:
          >>> len(SweepEntries.of(slots=[8, 9], positions=[0, 1], prev_slots=[-1, 8]))
          2
        """
        count = len(slots)

        def column(name: str, values: Any, missing: int) -> np.ndarray:
            out = np.full(count, missing, np.int64) if values is None else np.asarray(values, np.int64).reshape(-1)
            if len(out) != count:
                raise validation.error(f"sweep entries need one of {name} a slot, got {len(out)} for {count} slots")
            return out

        spaces = np.zeros(count, np.uint64) if namespaces is None else _unsigned(namespaces)
        if len(spaces) != count:
            raise validation.error(f"sweep entries need one of namespaces a slot, got {len(spaces)} for {count} slots")
        return cls(
            slots=column("slots", slots, -1),
            positions=column("positions", positions, -1),
            prev_slots=column("prev_slots", prev_slots, UNREACHABLE),
            tokens=column("tokens", tokens, -1),
            namespaces=spaces,
            nodes=column("nodes", nodes, -1),
        )

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, index: Any) -> SweepEntries:
        """The entries at ``index``, an integer or bool array or a slice."""
        return SweepEntries(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})


def entries_of_nodes(
    *, parents: Sequence[int] | np.ndarray, slots: Sequence[Any], tokens: Sequence[Any] | None = None, namespaces: Any = None
) -> SweepEntries:
    """The entries of a tree (or a forest) of runs of tokens, such as a radix cache. No recursion; any depth, and nodes in any order.

    Args:
      parents: ``[n]`` number of each node's parent, -1 for one that begins a sequence.
      slots: of each node, the slots of its tokens; -1 where a token's KV is gone (evicted, out of the window), for which there
        is no entry and whose successor's chain is not checked. All of a node may be gone; its children's positions count it.
      tokens: of each node, as many as slots; None: unknown.
      namespaces: ``[n]`` of each node, None: 0.

    Raises:
      ValueError: a parent that there is not, nodes that are their own ancestors, tokens of another length than the slots.

    Example:
      >>> entries = entries_of_nodes(parents=[-1, 0], slots=[[4, 5], [9]], tokens=[[11, 12], [13]])
      >>> entries.positions.tolist(), entries.prev_slots.tolist(), entries.nodes.tolist()
      ([0, 1, 2], [-1, 4, 5], [0, 0, 1])
    """
    up = np.asarray(parents, np.int64).reshape(-1)
    count = len(up)
    if len(slots) != count or (tokens is not None and len(tokens) != count):
        raise validation.error(f"there must be slots and tokens of each of the {count} nodes, got {len(slots)} of slots")
    if count and (up.min() < -1 or up.max() >= count):
        raise validation.error(f"parents must be -1 or the number of one of {count} nodes, got {up.min()} to {up.max()}")
    spaces = np.zeros(count, np.uint64) if namespaces is None else _unsigned(namespaces)
    if len(spaces) != count:
        raise validation.error(f"there must be one of namespaces a node, got {len(spaces)} for {count} nodes")
    runs = [np.asarray(run, np.int64).reshape(-1) for run in slots]
    sizes = np.array([len(run) for run in runs], np.int64)
    starts = _starts(up, sizes)
    node = np.repeat(np.arange(count), sizes)
    all_slots = np.concatenate([*runs, np.zeros(0, np.int64)])
    first = np.cumsum(sizes) - sizes
    within = np.arange(len(all_slots)) - first[node]
    before = np.full(len(all_slots), -1, np.int64)
    before[1:] = all_slots[:-1]
    heads = np.flatnonzero(within == 0)
    before[heads] = _ends(up, runs)[node[heads]]
    known = np.full(len(all_slots), -1, np.int64)
    if tokens is not None:
        held = [np.asarray(run, np.int64).reshape(-1) for run in tokens]
        wrong = next((number for number in range(count) if len(held[number]) != sizes[number]), None)
        if wrong is not None:
            raise validation.error(f"node {wrong} has {sizes[wrong]} slots and {len(held[wrong])} tokens")
        known = np.concatenate([*held, np.zeros(0, np.int64)])
    positions = starts[node] + within
    before = np.where(positions == 0, -1, np.where(before < 0, UNREACHABLE, before))
    entries = SweepEntries(slots=all_slots, positions=positions, prev_slots=before, tokens=known, namespaces=spaces[node], nodes=node)
    return entries.take(all_slots >= 0)


def _starts(parents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Position of the first token of every node, by doubling: each round a node's known way up is twice as long."""
    length = np.where(parents >= 0, sizes[parents], 0) if len(parents) else np.zeros(0, np.int64)
    up = parents.copy()
    for _ in range(len(parents).bit_length() + 1):
        if not np.any(up >= 0):
            return length
        length = length + np.where(up >= 0, length[up], 0)
        up = np.where(up >= 0, up[up], -1)
    raise validation.error("nodes must not be their own ancestors")


def _ends(parents: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """The slot before the first of every node: the last of its nearest ancestor with a token, -1 if that is gone or there is none."""
    if not runs:
        return np.zeros(0, np.int64)
    own = np.array([run[-1] if len(run) else UNREACHABLE for run in runs], np.int64)
    nearest = np.where((own == UNREACHABLE) & (parents >= 0), parents, np.arange(len(runs)))
    while not np.array_equal(further := nearest[nearest], nearest):
        nearest = further
    return np.where(parents >= 0, np.maximum(own[nearest[parents]], -1), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFinding:
    """A cached slot that a sweep found bad, with the tokens and slots of its whole node as far as the sweeper knows them."""

    slot: int
    position: int
    token: int
    namespace: int
    node: int
    node_tokens: tuple[int, ...]
    node_slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SweepResult:
    """A sweep whose verdicts were read.

    step: when it was handed out. round: of which round. entries: what it checked. verdicts: int32 of each. bad: what was found.
    unattested: entries that were never stamped, which a canary that is not strict does not check.
    """

    step: int
    round: int
    entries: SweepEntries
    verdicts: np.ndarray
    bad: tuple[SweepFinding, ...]
    unattested: int

    @property
    def succeeded(self) -> bool:
        """Whether every entry was checked and is right."""
        return not self.bad and not self.unattested

    @property
    def bad_slots(self) -> np.ndarray:
        """int64."""
        return self.entries.slots[self.verdicts == Verdict.BAD]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepHealth:
    """How far sweeps have come, by results that were read.

    rounds: that were finished. coverage: share of the tree that this round has checked, None where the tree's size is unknown.
    tree: slots of this round. age: steps since the slot that waits longest was checked (or, if it never was, since it was first
    seen), None without a tree. sweeps: handed out and launched; succeeded: read, complete and right; bad: slots found bad. waiting:
    results that were not read yet. skipped: portions that were not made because too many results waited.
    """

    rounds: int
    coverage: float | None
    tree: int
    age: int | None
    sweeps: int
    succeeded: int
    bad: int
    waiting: int
    skipped: int

    def pairs(self) -> dict[str, Any]:
        """For a line of ``key=value`` pairs."""
        return {
            "sweeps": self.succeeded,
            "sweep_rounds": self.rounds,
            "sweep_coverage": "-" if self.coverage is None else f"{self.coverage:.3f}",
            "sweep_age": "-" if self.age is None else self.age,
        }


class _Places:
    """Where each value stands in an array of small numbers, most of which occur once; negative ones do not count."""

    def __init__(self, values: np.ndarray, bound: int) -> None:
        index = np.arange(len(values), dtype=np.int32)
        used = np.flatnonzero(values >= 0)
        self.place = np.full(bound, -1, np.int32)
        self.place[values[used]] = index[used]
        self.more = used[self.place[values[used]] != index[used]]  # places of values that occur again
        self.more_values = values[self.more]

    def of(self, wanted: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """All places of ``wanted``; ``mark``: bool, true for them alone."""
        places = self.place[wanted]
        return np.concatenate([places[places >= 0], self.more[mark[self.more_values]]])


@dataclasses.dataclass(slots=True)
class _Round:
    """entries: of the whole tree, None if portions come one by one. left: which of them are still wanted. at: the next one."""

    number: int
    entries: SweepEntries | None
    left: np.ndarray
    at: int = 0
    handed: int = 0
    checked: int = 0
    waiting: int = 0
    exhausted: bool = False
    counted: bool = False
    found: tuple[_Places, _Places] | None = None  # entries by slot and by predecessor, once they are asked for

    @property
    def done(self) -> bool:
        return self.exhausted and not self.waiting


@dataclasses.dataclass(slots=True)
class _Waiting:
    verdicts: Any
    entries: SweepEntries
    step: int
    round: _Round


class Sweeper:
    """Walks over cached slots in portions, round after round. Not for several threads at once.

    Every portion that :meth:`next_portion` gives goes to :meth:`Canary.sweep`, and the verdicts that come back to :meth:`launched`.
    A slot counts as checked once these verdicts were read. A tree is looked at when a round begins: **slots that the cache gives up
    until the round ends must be named to** :meth:`evicted` **before the next portion, or what is written there next looks like a fault.**
    Slots that running requests hold as well may stay; only those still being written must not be in the tree.

    Args:
      canary: whose config has a sweep_capacity.
      tree: returns the entries of all cached slots, see :func:`entries_of_nodes`; called when a round begins.
      portions: or returns the next at most ``n`` entries of an endless walk, None or none at the end of a round; of these nothing is
        known beyond what is handed out, and none is given up between the call and the launch.
      group: whose slots they are; None if there is one.
      max_waiting: results that may wait to be read; then no portion is made.

    Raises:
      ValueError: neither or both of tree and portions, or a canary without sweeps.

    Example:
      >>> sweeper = Sweeper(canary, tree=cache.entries)  # doctest: +SKIP
      >>> portion = sweeper.next_portion(step)  # doctest: +SKIP
      >>> if portion is not None:  # doctest: +SKIP
      ...     state, verdicts = sweep(kv, state, portion)
      ...     sweeper.launched(verdicts)
      >>> for result in sweeper.poll():  # doctest: +SKIP
      ...     quarantine(result.bad_slots)
    """

    def __init__(
        self,
        canary: Canary,
        *,
        tree: Callable[[], SweepEntries] | None = None,
        portions: Callable[[int], SweepEntries | None] | None = None,
        group: str | None = None,
        max_waiting: int = 4,
    ) -> None:
        if (tree is None) == (portions is None):
            raise validation.error("a Sweeper takes one of tree and portions")
        self.capacity = canary.config.sweep_capacity
        if self.capacity < 1:
            raise validation.error("the canary's config has sweep_capacity 0: there are no sweeps")
        self.canary, self.group = canary, group
        self.max_waiting = validation.static_int("max_waiting", max_waiting, minimum=1)
        self._tree, self._portions = tree, portions
        held = canary._named(group)
        self._slots, self._padding = held.slots, held.padding_slot
        self._checked_at = np.full(self._slots, -1, np.int64)  # step, -1: not in the tree
        self._seen_in = np.full(self._slots if tree is None else 0, -1, np.int64)  # round of portions
        self._mark = np.zeros(self._slots, bool)  # all False between calls
        self._round: _Round | None = None
        self._out: SweepEntries | None = None
        self._out_step = self._step = 0
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._counts = collections.Counter[str]()
        self._last_total: int | None = None

    # ------------------------------------------------------------------------------------------ what a loop calls

    def blank(self) -> SweepPortion:
        """A portion of padding alone, to compile with."""
        return self._padded(SweepEntries.of(slots=[], positions=[], prev_slots=[]))

    def next_portion(self, step: int) -> SweepPortion | None:
        """The next slots to check, padded to the config's sweep_capacity; NumPy arrays, fresh every time.

        A portion that was not launched is handed out again. None: nothing is cached, or ``max_waiting`` results wait to be read.

        Args:
          step: a number that grows with the engine's steps, in which ages are counted.
        """
        self._step = max(self._step, validation.static_int("step", step, minimum=0))
        if len(self._waiting) >= self.max_waiting:
            self._counts["skipped"] += 1
            return None
        if self._out is not None and not len(self._out):
            self._close_portion()
        if self._out is None:
            self._out = self._next()
        if self._out is None:
            return None
        self._out_step = self._step
        return self._padded(self._out)

    def launched(self, verdicts: Any) -> None:
        """The portion that was handed out last is being checked: ``verdicts``, as :meth:`Canary.sweep` returned them, not donated.

        Raises:
          ValueError: no portion is out, or verdicts of another shape.
        """
        if self._out is None or self._round is None:
            raise validation.error("launched without a portion: next_portion must be called first, and launched once for each")
        if tuple(np.shape(verdicts)) != (self.capacity,):
            raise validation.error(f"verdicts must have shape ({self.capacity},), got {tuple(np.shape(verdicts))}")
        entries, held = self._out, self._round
        held.handed += len(entries)
        held.waiting += 1
        self._close_portion()
        self._counts["sweeps"] += 1
        self._waiting.append(_Waiting(verdicts, entries, self._out_step, held))
        if hasattr(verdicts, "copy_to_host_async"):
            verdicts.copy_to_host_async()

    def evicted(self, slots: Any) -> None:
        """The cache has given up these slots: they, and chains that lead through them, are no longer checked in this round."""
        gone = np.asarray(slots, np.int64).reshape(-1)
        gone = gone[(gone >= 0) & (gone < self._slots)]
        if not len(gone):
            return
        self._checked_at[gone] = -1
        self._mark[gone] = True
        held = self._round
        if held is not None and held.entries is not None:
            entries = held.entries
            if held.found is None:
                held.found = _Places(entries.slots, self._slots), _Places(entries.prev_slots, self._slots)
            by_slot, by_previous = (places.of(gone, self._mark) for places in held.found)
            self._strike(by_slot, by_previous, entries.prev_slots, held.left)
        if (out := self._out) is not None:
            left = np.ones(len(out), bool)
            orphans = np.flatnonzero((out.prev_slots >= 0) & self._mark[out.prev_slots])
            self._strike(np.flatnonzero(self._mark[out.slots]), orphans, out.prev_slots, left)
            self._out = out.take(left)
        self._mark[gone] = False

    def _strike(self, gone: np.ndarray, orphans: np.ndarray, previous: np.ndarray, left: np.ndarray) -> None:
        """Entries that are gone or have lost their predecessor, in place."""
        left[gone] = False
        previous[orphans] = UNREACHABLE
        if self._padding is None:
            left[orphans] = False

    def poll(self) -> list[SweepResult]:
        """Results that are on the host by now, in order. Never waits for the device."""
        out = []
        while self._waiting and getattr(self._waiting[0].verdicts, "is_ready", _always)():
            out.append(self._read())
        return out

    def flush(self) -> list[SweepResult]:
        """All results that are outstanding, in order; waits for them."""
        out = []
        while self._waiting:
            out.append(self._read())
        return out

    def health(self, step: int | None = None) -> SweepHealth:
        """How far the sweeps have come; ``step``: now, None is that of the last portion."""
        self._step = self._step if step is None else max(self._step, step)
        held, known = self._round, self._checked_at[self._checked_at >= 0]
        tree = self._total(held)
        checked = 0 if held is None else held.checked
        return SweepHealth(
            rounds=self._counts["rounds"],
            coverage=None if tree is None else 1.0 if tree == 0 else min(1.0, checked / tree),
            tree=tree or 0,
            age=int(self._step - known.min()) if len(known) else None,
            sweeps=self._counts["sweeps"],
            succeeded=self._counts["succeeded"],
            bad=self._counts["bad"],
            waiting=len(self._waiting),
            skipped=self._counts["skipped"],
        )

    # ------------------------------------------------------------------------------------------ rounds

    def _total(self, held: _Round | None) -> int | None:
        """Slots of a round: those checked, those on their way and those left."""
        if held is None:
            return None
        if held.entries is not None:
            return held.handed + int(np.count_nonzero(held.left[held.at :]))
        return held.handed if held.exhausted else None if self._last_total is None else max(self._last_total, held.handed)

    def _next(self) -> SweepEntries | None:
        """The entries of the next portion, not launched yet; a new round begins where one ends."""
        fresh = False
        while not fresh:
            if fresh := self._round is None or self._round.exhausted:
                self._begin()
            assert self._round is not None
            entries = self._walk(self._round)
            if entries is not None and len(entries):
                return entries
            self._end(self._round)
        return None

    def _begin(self) -> None:
        number = 0 if self._round is None else self._round.number + 1
        entries = None if self._tree is None else self._usable(self._tree())
        self._round = _Round(number, entries, np.ones(0 if entries is None else len(entries), bool))
        if entries is not None:
            before = self._checked_at[entries.slots]
            self._checked_at[:] = -1
            self._checked_at[entries.slots] = np.where(before < 0, self._step, before)

    def _walk(self, held: _Round) -> SweepEntries | None:
        if held.entries is None:
            assert self._portions is not None
            found = self._portions(self.capacity)
            if found is None or not len(found):
                return None
            if len(found) > self.capacity:
                raise validation.error(f"portions returned {len(found)} entries, the config's sweep_capacity is {self.capacity}")
            entries = self._usable(found)
            self._seen_in[entries.slots] = held.number
            before = self._checked_at[entries.slots]
            self._checked_at[entries.slots] = np.where(before < 0, self._step, before)
            return entries
        index = _next_true(held.left, held.at, self.capacity)
        return held.entries.take(index) if len(index) else None

    def _close_portion(self) -> None:
        """Go past the entries of the portion that is out."""
        held, entries = self._round, self._out
        self._out = None
        if held is None or held.entries is None or entries is None:
            return
        index = _next_true(held.left, held.at, len(entries))
        held.at = int(index[-1]) + 1 if len(index) else held.at
        if not held.left[held.at :].any():
            self._end(held)

    def _end(self, held: _Round) -> None:
        if not held.exhausted:
            held.exhausted = True
            self._last_total = held.handed
            if held.entries is None:  # what the walk did not come by is no longer there
                self._checked_at[self._seen_in != held.number] = -1
            self._finish(held)

    def _finish(self, held: _Round) -> None:
        if held.done and held.handed and not held.counted:
            held.counted = True
            self._counts["rounds"] += 1

    def _usable(self, entries: SweepEntries) -> SweepEntries:
        """Copies, without entries that cannot be checked: the padding slot's, and orphans where no predecessor stands for a lost one."""
        if not isinstance(entries, SweepEntries):
            raise validation.type_error(f"tree and portions must return SweepEntries, got {type(entries).__name__}")
        if len(entries) and (entries.slots.min() < 0 or entries.slots.max() >= self._slots):
            least, most = entries.slots.min(), entries.slots.max()
            raise validation.error(f"sweep entries must have slots in [0, {self._slots}), got {least} to {most}")
        if len(entries) and entries.prev_slots.max() >= self._slots:
            raise validation.error(f"sweep entries must have prev_slots below {self._slots}, got {entries.prev_slots.max()}")
        keep = entries.prev_slots != UNREACHABLE if self._padding is None else entries.slots != self._padding
        return entries.take(np.flatnonzero(keep & _first_of_each(entries)))

    def _padded(self, entries: SweepEntries) -> SweepPortion:
        previous = entries.prev_slots
        if self._padding is not None:  # stands for a predecessor that cannot be read
            previous = np.where(previous == UNREACHABLE, self._padding, previous)

        def column(values: np.ndarray, padding: int) -> np.ndarray:
            out = np.full(self.capacity, padding, np.int32)
            out[: len(values)] = values
            return out

        spaces = np.zeros((self.capacity, 2), np.uint32)
        spaces[: len(entries), 0] = entries.namespaces & np.uint64(0xFFFFFFFF)
        spaces[: len(entries), 1] = entries.namespaces >> np.uint64(32)
        tokens = np.where((entries.tokens >= 0) & (entries.tokens <= INT32_MAX), entries.tokens, -1)
        return SweepPortion(
            slots=column(entries.slots, -1),
            positions=column(entries.positions, 0),
            prev_slots=column(previous, -1),
            tokens=column(tokens, -1),
            namespaces=spaces,
        )

    # ------------------------------------------------------------------------------------------ results

    def _read(self) -> SweepResult:
        waiting = self._waiting.popleft()
        held, entries = waiting.round, waiting.entries
        verdicts = np.asarray(waiting.verdicts)[: len(entries)]
        checked = verdicts != Verdict.NOT_CHECKED
        slots = entries.slots[checked]
        in_tree = self._checked_at[slots] >= 0  # those that were given up since are of no interest
        slots = slots[in_tree]
        self._checked_at[slots] = np.maximum(self._checked_at[slots], waiting.step)
        held.checked += int(np.count_nonzero(checked))
        held.waiting -= 1
        bad = tuple(self._finding(held, entries, int(place)) for place in np.flatnonzero(verdicts == Verdict.BAD))
        result = SweepResult(
            step=waiting.step,
            round=held.number,
            entries=entries,
            verdicts=verdicts,
            bad=bad,
            unattested=int(np.count_nonzero(~checked)),
        )
        self._counts["succeeded"] += result.succeeded
        self._counts["bad"] += len(bad)
        self._finish(held)
        return result

    @staticmethod
    def _finding(held: _Round, entries: SweepEntries, place: int) -> SweepFinding:
        node = int(entries.nodes[place])
        known = entries if held.entries is None else held.entries
        of_node = np.flatnonzero(known.nodes == node) if node >= 0 else np.zeros(0, np.int64)
        return SweepFinding(
            slot=int(entries.slots[place]),
            position=int(entries.positions[place]),
            token=int(entries.tokens[place]),
            namespace=int(entries.namespaces[place]),
            node=node,
            node_tokens=tuple(known.tokens[of_node].tolist()),
            node_slots=tuple(known.slots[of_node].tolist()),
        )


def _first_of_each(entries: SweepEntries) -> np.ndarray:
    """Whether an entry is the first of those that say the same of a slot: nodes that share it are checked once."""
    shared = np.flatnonzero(np.bincount(entries.slots)[entries.slots] > 1) if len(entries) else np.zeros(0, np.int64)
    out = np.ones(len(entries), bool)
    if len(shared):
        of = entries.take(shared)
        said = [of.slots, of.positions, of.prev_slots, of.tokens, of.namespaces.view(np.int64)]
        _, first = np.unique(np.stack(said, axis=1), axis=0, return_index=True)
        out[np.delete(shared, first)] = False
    return out


def _next_true(mask: np.ndarray, start: int, count: int) -> np.ndarray:
    """Indices of the first ``count`` that are true from ``start`` on; looks no further than it must."""
    found: list[np.ndarray] = []
    while count > 0 and start < len(mask):
        stop = start + max(2 * count, 1024)
        index = start + np.flatnonzero(mask[start:stop])[:count]
        found.append(index)
        count -= len(index)
        start = stop
    return np.concatenate([*found, np.zeros(0, np.int64)])


def _unsigned(values: Iterable[Any]) -> np.ndarray:
    """64-bit numbers of any sign as uint64."""
    return np.array([int(value) & 0xFFFFFFFFFFFFFFFF for value in values], np.uint64)


def _always() -> bool:
    return True
