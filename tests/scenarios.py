"""A small serving engine in the terms of fault scenarios: pages, requests, writes, moves, frees, with a canary on every pool.

The pool has 64 slots in pages of 16, page 0 is reserved. A node is one pool with its canary: a rank, a prefill or a decode worker,
a draft model. The model writes rows that depend on token, position, request and layer, so that what it wrote is known.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import (
    Canary,
    CanaryBatch,
    CanaryConfig,
    CanaryLaunchTag,
    FailReason,
    Layout,
    PoolGroup,
    SweepPortion,
    ViolationLog,
    check_rank_digests,
    decode_log,
    per_layer,
    rank_digest,
)
from jax_kvcanary.events import Event
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.report_header import header_fields

SLOTS, PAGE, WIDTH = 64, 16, 48
LAYERS, HEADS, DIM = 3, 2, 8
ROWS, BATCH, TOKENS = 4, 3, 32
WINDOW = 16
PERIOD = 4
"""Steps after which all bytes of a prefix were checked."""
BUFFERS = {"kv": (2 * HEADS, DIM), "scale": (2,), "index": (8,)}
"""Bytes of a slot in each layer: K and V heads by turns, their scales, the keys of an indexer."""


def _layout(place: str) -> Any:
    return per_layer(
        {
            "kv": Layout.from_axes(f"{place} head dim", interleaved="head"),
            "scale": Layout.from_axes(f"{place} dim", half="scale"),
            "index": Layout.from_axes(f"{place} dim", half="index"),
        }
    )


def _shapes(slots: int, paged: bool) -> list[dict[str, jax.ShapeDtypeStruct]]:
    lead = (slots // PAGE, PAGE) if paged else (slots,)
    return [{name: jax.ShapeDtypeStruct((*lead, *tail), np.float32) for name, tail in BUFFERS.items()} for _ in range(LAYERS)]


CONFIG = CanaryConfig(strict=True, verify_every=PERIOD, ring_capacity=128, sweep_capacity=PAGE)


@functools.lru_cache
def plain(strict: bool = True) -> Canary:
    """One group of all layers."""
    return Canary(_shapes(SLOTS, True), _layout("page slot"), config=dataclasses.replace(CONFIG, strict=strict), name="target")


@functools.lru_cache
def draft(strict: bool = True) -> Canary:
    """The pool of a draft model: the record of a position has the token after it."""
    config = dataclasses.replace(CONFIG, strict=strict)
    return Canary(_shapes(SLOTS, True), _layout("page slot"), config=config, name="draft", kv_token_id_vs_position_offset=1)


@functools.lru_cache
def hybrid() -> Canary:
    """Layers 0 and 2 with full attention, layer 1 with a window and slots of its own."""
    groups = (PoolGroup(name="full", layers=(0, 2)), PoolGroup(name="swa", layers=(1,), swa_window_size=WINDOW))
    return Canary(_shapes(SLOTS, True), _layout("page slot"), config=CONFIG, groups=groups, name="hybrid")


@functools.lru_cache
def small() -> Canary:
    """A rank with two slots less."""
    return Canary(_shapes(SLOTS - 2, False), _layout("slot"), config=CONFIG, name="small")


# ---------------------------------------------------------------------------------------------- the device's program


def rows_of(tokens: Any, positions: Any, who: Any) -> list[dict[str, Any]]:
    """What the model writes, by layer and buffer, ``[n, ...]`` float32: small integers, exact in any order of evaluation."""
    out = []
    for layer in range(LAYERS):
        of_layer = {}
        for number, (name, tail) in enumerate(BUFFERS.items()):
            size = int(np.prod(tail))
            base = tokens * 31 + who * 101 + layer * 13 + number * 17
            place = np.arange(size, dtype=np.int32)
            values = base[:, None] + place * 3 + positions[:, None] * 7 * ((place // DIM + 1) % 2)  # K is rotated by its position
            of_layer[name] = (values % 251).astype(np.float32).reshape(-1, *tail)
        out.append(of_layer)
    return out


@functools.lru_cache
def _step(canary: Canary) -> Any:
    slots = canary.slots(canary.group_names[0])

    def step(kv: Any, state: Any, batch: CanaryBatch, writer: jax.Array, who: jax.Array, attention: jax.Array) -> Any:
        kv, state, verdict = canary.head(kv, state, batch)
        # Attention reads by a table of its own, -1 past the length.
        read = kv[0]["kv"].reshape(slots, -1)[jnp.maximum(attention, 0)].sum(axis=-1)
        out = jnp.where(attention >= 0, read, 0).sum(axis=-1)
        rows = rows_of(batch.input_ids, batch.positions, who)
        for layer, of_layer in enumerate(rows):
            for name, new in of_layer.items():
                buffer = kv[layer][name]
                flat = buffer.reshape(slots, *new.shape[1:])
                kv[layer][name] = flat.at[writer[layer]].set(new, mode="drop").reshape(buffer.shape)
        state, verdict, report = canary.tail(kv, state, batch, verdict, new_kv=rows, new_kv_layout=_layout("slot"))
        return kv, state, verdict, report, out

    return jax.jit(step)


@functools.lru_cache
def _import(canary: Canary, group: str, version: int, shape: tuple[int, ...]) -> Any:
    def take(state: Any, kv: Any, arrays: dict[str, Any], slots: jax.Array) -> Any:
        exported = arrays | {"version": np.array(version), "shape": np.array(shape)}
        return canary.import_(state, kv, exported, slots=slots, page_size=1, group=group)

    return jax.jit(take)


@functools.lru_cache
def _adopt(canary: Canary) -> Any:
    return jax.jit(canary.adopt)


@functools.lru_cache
def _sweep(canary: Canary) -> Any:
    return jax.jit(canary.sweep)


@functools.lru_cache
def _digests() -> Any:
    """Compare what two ranks hold: records ``[ranks, slots, 16]``, lengths ``[ranks, bs]``, capacities ``[ranks]``."""

    def of_rank(records: jax.Array, lens: jax.Array, capacity: jax.Array, rows: jax.Array, table: jax.Array) -> Any:
        mine = rank_digest(records=records, req_pool_indices=rows, prefix_lens=lens, req_to_token=table, capacity=capacity, page_size=1)
        return check_rank_digests(
            digest=mine,
            log=ViolationLog.allocate(ring_capacity=BATCH),
            verdict=jnp.ones((BATCH,), jnp.int32),
            axis_names="ranks",
            launch_tag=CanaryLaunchTag.HEAD_K_FULL,
        ).disagree

    return jax.jit(jax.vmap(of_rank, in_axes=(0, 0, 0, None, None), axis_name="ranks"))


# ---------------------------------------------------------------------------------------------- requests and what was seen


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A sequence with all its tokens, those to come too. salt: what its KV depends on beside tokens: adapter, weights, image."""

    id: int
    row: int
    tokens: np.ndarray
    namespace: int = 0

    @classmethod
    def make(cls, row: int, *, prefix: Request | None = None, shared: int = PAGE, namespace: int = 0) -> Request:
        """A request with tokens of its own, after ``shared`` tokens of another's."""
        tokens = np.arange(WIDTH + 1, dtype=np.int32) + 1000 * row
        if prefix is not None:
            tokens[:shared] = prefix.tokens[:shared]
        return cls(100 + row, row, tokens, namespace)


@dataclasses.dataclass
class Seat:
    """A request on a node: its row of the host's table and the tokens that are in the pool."""

    request: Request
    slots: np.ndarray
    length: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A violation. by: "head", "tail", "load" (an import's status) or "digest". steps: that ran since the fault, this one included."""

    by: str
    node: str
    group: str
    steps: int
    reasons: FailReason
    slot: int
    position: int
    request: int
    source: str | None = None


@dataclasses.dataclass
class Block:
    """KV of some slots on its way: bytes by layer and buffer ``[n, ...]``, and the records that travel with them."""

    kv: list[dict[str, np.ndarray]]
    records: dict[str, np.ndarray]

    def part(self, places: slice | Sequence[int]) -> Block:
        return Block(
            [{name: values[places].copy() for name, values in layer.items()} for layer in self.kv],
            {name: values[places].copy() for name, values in self.records.items()},
        )

    @staticmethod
    def join(*blocks: Block) -> Block:
        return Block(
            [{name: np.concatenate([block.kv[layer][name] for block in blocks]) for name in BUFFERS} for layer in range(LAYERS)],
            {name: np.concatenate([block.records[name] for block in blocks]) for name in blocks[0].records},
        )


class World:
    """Nodes, and whether the scenario's fault happens in it. ahead: steps that a node has run before, by its name: clocks differ."""

    def __init__(self, fault: bool, strict: bool = True, ahead: Mapping[str, int] | None = None) -> None:
        self.fault, self.strict, self.ahead = fault, strict, ahead or {}
        self.nodes: dict[str, Node] = {}
        self.seen: list[Seen] = []
        self.outputs: list[list[float]] = []
        self.fault_at: dict[str, int] | None = None

    def broken(self) -> bool:
        """Whether to do it wrong here; each node counts its steps from the first time on."""
        if self.fault and self.fault_at is None:
            self.fault_at = {name: node.number for name, node in self.nodes.items()}
        return self.fault

    def node(self, name: str = "node", canary: Canary | None = None) -> Node:
        if name not in self.nodes:
            made = self.nodes[name] = Node(self, name, plain(self.strict) if canary is None else canary)
            for _ in range(self.ahead.get(name, 0)):
                made.step()
        return self.nodes[name]

    def draft(self) -> Node:
        return self.node("draft", draft(self.strict))

    def digest(self, ranks: Sequence[Node], *, capacity: Sequence[int] | None = None) -> None:
        """Compare the ranks' digests of the first one's running requests."""
        seats = ranks[0].live
        records = np.zeros((len(ranks), SLOTS, 16), np.uint32)
        for number, rank in enumerate(ranks):
            held = np.asarray(rank.state.records["full"])
            records[number, : len(held)] = held
        lens = np.zeros((len(ranks), BATCH), np.int32)
        rows = np.full((BATCH,), -1, np.int32)
        table = np.zeros((ROWS, WIDTH), np.int32)
        for number, seat in enumerate(seats):
            rows[number], lens[:, number], table[seat.request.row] = seat.request.row, seat.length, seat.slots
        sizes = [rank.size for rank in ranks] if capacity is None else capacity
        disagree = np.asarray(_digests()(records, lens, np.array(sizes, np.int32), rows, table))[0]
        for number, seat in enumerate(seats):
            if disagree[number]:
                self.note(
                    by="digest", node="ranks", group="full", reasons=FailReason.RANK_DIGEST, slot=-1, position=seat.length - 1,
                    request=seat.request.id, steps=self.since(ranks[-1]),
                )  # fmt: skip

    def since(self, node: Node) -> int:
        """Steps of a node since the fault."""
        return node.number - (self.fault_at or {}).get(node.name, 0)

    def note(self, **fields: Any) -> None:
        self.seen.append(Seen(**fields))

    @property
    def unattested(self) -> int:
        return sum(node.unattested for node in self.nodes.values())

    def events(self) -> list[tuple[str, Event]]:
        """Of monitors without ("bare") and with the host's tables ("told")."""
        return [(which, event) for node in self.nodes.values() for which, monitor in node.monitors.items() for event in monitor.events]

    def fingerprint(self) -> str:
        """Of everything that the fault could change: bytes, tables, maps, free pages, what attention read."""
        digest = hashlib.sha256(repr(self.outputs).encode())
        for name, node in sorted(self.nodes.items()):
            tables = [(seat.request.id, seat.slots.tolist(), seat.length) for seat in node.live]
            digest.update(repr((name, tables, sorted(node.free), node.mapping.tolist())).encode())
            for layer in node.kv:
                for values in layer.values():
                    digest.update(values.tobytes())
        return digest.hexdigest()


class Node:
    """A pool with its canary and two monitors, one of which is told the host's tables."""

    def __init__(self, world: World, name: str, canary: Canary) -> None:
        self.world, self.name, self.canary = world, name, canary
        self.size = canary.slots(canary.group_names[0])
        self.paged = self.size % PAGE == 0
        self.windowed = "swa" in canary.group_names
        self.kv = [{name: np.zeros((self.size, *tail), np.float32) for name, tail in BUFFERS.items()} for _ in range(LAYERS)]
        self.state = canary.init()
        self.monitors = {which: Monitor(canary, mode="log", page_size=PAGE) for which in ("bare", "told")}
        self.live: list[Seat] = []
        self.free = {1, 2, 3}
        self.mapping = np.arange(SLOTS, dtype=np.int32)
        """Slot in the window's pool of each slot of the full one."""
        self.ended: list[int] = []
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        self.number = 0
        self.unattested = 0
        self.clears = True
        """Whether the log is cleared when it was read."""

    # ------------------------------------------------------------------------------------------ requests

    def seat(self, request: Request) -> Seat:
        return next(seat for seat in self.live if seat.request is request)

    def admit(self, request: Request, pages: Sequence[int] = (), *, length: int = 0, slots: Iterable[int] | None = None) -> Seat:
        """Give a request pages (or slots); ``length`` tokens are in them already: a hit, or a load."""
        seat = Seat(request, np.zeros(WIDTH, np.int32), length)
        given = slots_of(pages) if slots is None else np.array(list(slots), np.int32)
        seat.slots[: len(given)] = given
        self.free -= set(pages)
        self.live.append(seat)
        return seat

    def finish(self, request: Request, *, release: Sequence[int]) -> Seat:
        """End a request and give pages back."""
        seat = self.seat(request)
        self.live.remove(seat)
        self.ended.append(request.id)
        self.give_back(release)
        return seat

    def give_back(self, pages: Sequence[int]) -> None:
        padded = np.full((3,), -1, np.int32)
        padded[: len(pages)] = pages
        for group in self.canary.group_names[:1]:  # pages of the full pool; the window's slots go by the map
            self.state = self.canary.release(self.state, slots=padded, page_size=PAGE if self.paged else 1, group=group)
        self.free |= set(pages)

    # ------------------------------------------------------------------------------------------ a step

    def step(
        self,
        new: Mapping[Request, int] | None = None,
        *,
        stale: Sequence[Seat] = (),
        positions: Mapping[Request, int] | None = None,
        tokens: Mapping[Request, Mapping[int, int]] | None = None,
        writer: Callable[[np.ndarray], None] | None = None,
        out: Callable[[np.ndarray], None] | None = None,
        table: Mapping[Request, np.ndarray] | None = None,
        attention: Mapping[Request, np.ndarray] | None = None,
        mapping: np.ndarray | None = None,
    ) -> None:
        """Run a step over the live requests.

        Args:
          new: tokens that each one writes.
          stale: seats of requests that ended, and are in the batch all the same.
          positions: first position that the model is given, where it is not the next one.
          tokens: by position, what the model is given instead of the request's own.
          writer: changes the slots that the model writes, ``[layers, tokens]``; ``size`` writes nothing.
          out: changes the slots that the step says it writes, ``[tokens]``.
          table, attention: rows of the canary's and of attention's table on the device, where they are not the host's.
          mapping: of this step, where it is not the node's.
        """
        canary, offset = self.canary, self.canary.kv_token_id_vs_position_offset
        seats, new = [*self.live, *stale], dict(new or {})
        lut = self.mapping if mapping is None else mapping
        host, expected = np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH + 1), np.int32)
        rows, prefix, extend = (np.full((BATCH,), fill, np.int32) for fill in (-1, 0, 0))
        ids, valid, spaces = np.zeros((BATCH,), np.int32), np.zeros((BATCH,), np.int32), np.zeros((BATCH,), np.int32)
        read = np.full((BATCH, WIDTH), -1, np.int32)
        given, believed = np.zeros((TOKENS,), np.int32), np.zeros((TOKENS,), np.int32)
        places, who, said = np.zeros((TOKENS,), np.int32), np.zeros((TOKENS,), np.int32), np.full((TOKENS,), -1, np.int32)
        at = 0
        for number, seat in enumerate(seats):
            request, start, count = seat.request, seat.length, new.get(seat.request, 0)
            rows[number], prefix[number], extend[number] = request.row, start, count
            ids[number], valid[number], spaces[number] = request.id, WIDTH + 1, request.namespace
            host[request.row], expected[request.row] = seat.slots, request.tokens
            looked = np.asarray((attention or {}).get(request, seat.slots))[:start]
            read[number, :start] = np.minimum(looked, self.size - 1)
            span = slice(at, at + count)
            own = request.tokens[start + offset : start + offset + count]
            given[span] = believed[span] = own
            for position, token in (tokens or {}).get(request, {}).items():
                given[at + position - start] = token
            places[span] = np.arange(count) + (positions or {}).get(request, start)
            who[span], said[span] = request.id, seat.slots[start : start + count]
            at += count
            seat.length += count
        device = host.copy()
        for request, row in (table or {}).items():
            device[request.row, : len(row)] = row
        if out is not None:
            out(said)
        into = np.full((LAYERS, TOKENS), self.size, np.int32)
        for layer in range(LAYERS):
            inside = lut[np.clip(said, 0, SLOTS - 1)] if self.windowed and layer == 1 else said
            into[layer, :at] = inside[:at]
        if writer is not None:
            writer(into)
        batch = CanaryBatch(
            req_pool_indices=rows,
            prefix_lens=prefix,
            extend_seq_lens=extend,
            req_to_token=device,
            input_ids=given,
            positions=places,
            out_cache_loc=said,
            request_ids=ids,
            namespaces=spaces,
            full_to_swa_index_mapping=lut if self.windowed else None,
            expected_tokens=expected,
            expected_valid_lens=valid,
            expected_input_tokens=believed,
        )
        self._record(seats, host, prefix, extend)
        self.number += 1
        kv, self.state, _, report, read_out = _step(canary)(self._pool(), self.state, batch, into, who, read)
        for before, after in zip(self.kv, kv, strict=True):
            for name, values in after.items():
                before[name] = np.array(values).reshape(before[name].shape)
        self.world.outputs.append(np.asarray(read_out).tolist())
        self._look(report, ids)

    def verify(self) -> None:
        """As many steps without new tokens as it takes to check all bytes."""
        for _ in range(PERIOD):
            self.step()

    def sweep(self, request: Request, slots: np.ndarray) -> None:
        """Check the idle cached slots of a request's first page."""
        before = np.concatenate([[-1], slots[:-1]]).astype(np.int32)
        tokens, positions = request.tokens[: len(slots)], np.arange(len(slots), dtype=np.int32)
        portion = SweepPortion(slots=slots, positions=positions, prev_slots=before, tokens=tokens)
        self.state, _ = _sweep(self.canary)(self._pool(), self.state, portion)

    # ------------------------------------------------------------------------------------------ bytes and moves

    def raw(self, slots: Iterable[int], request: Request, positions: Iterable[int], *, layers: Sequence[int] = range(LAYERS)) -> None:
        """Bytes of another request land in slots, and nothing is stamped."""
        at = np.array(list(positions), np.int32)
        rows = rows_of(request.tokens[at], at, np.full(at.shape, request.id, np.int32))
        for layer in layers:
            for name, values in rows[layer].items():
                self.kv[layer][name][list(slots)] = values

    def save(self, slots: Iterable[int], *, group: str = "full") -> Block:
        """Bytes and records of slots, as they leave the pool."""
        index = np.array(list(slots), np.int32)
        padded = np.full((WIDTH,), -1, np.int32)
        padded[: len(index)] = index
        exported = self.canary.export(self.state, slots=padded, page_size=1, group=group)
        records = {name: exported[name][: len(index)] for name in ("records", "source_tags", "taken", "status")}
        return Block([{name: values[index] for name, values in layer.items()} for layer in self.kv], records)

    def put(self, block: Block, slots: Iterable[int], *, layers: Sequence[int] = range(LAYERS)) -> None:
        """Bytes of a block arrive in slots."""
        for layer in layers:
            for name, values in block.kv[layer].items():
                self.kv[layer][name][list(slots)] = values

    def load(self, block: Block, slots: Iterable[int], *, group: str = "full", layers: Sequence[int] | None = None) -> None:
        """Bytes and records arrive in slots, and are checked there."""
        index = np.array(list(slots), np.int32)
        of_group = (range(LAYERS) if not self.windowed else (1,) if group == "swa" else (0, 2)) if layers is None else layers
        self.put(block, index, layers=of_group)
        self.take_records(block, index, group=group)

    def take_records(self, block: Block, slots: Iterable[int], *, group: str = "full") -> None:
        """The records of a block, for bytes that arrived."""
        index = np.array(list(slots), np.int32)
        padded = np.full((WIDTH,), -1, np.int32)
        padded[: len(index)] = index
        arrays = {name: np.zeros((WIDTH, *values.shape[1:]), values.dtype) for name, values in block.records.items()}
        for name, values in block.records.items():
            arrays[name][: len(index)] = values
        shape = (WIDTH, 1, block.records["records"].shape[1], block.records["source_tags"].shape[1])
        self.state, status = _import(self.canary, group, 1, shape)(self.state, self._pool(), arrays, padded)
        for place, bits in enumerate(np.asarray(status)[: len(index)].tolist()):
            if bits:
                position = int(block.records["records"][place, 2])
                reader = next((seat.request.id for seat in self.live if index[place] in seat.slots), 0)
                self.world.note(
                    by="load", node=self.name, group=group, reasons=FailReason(bits), slot=int(index[place]), position=position,
                    request=reader, steps=self.world.since(self),
                )  # fmt: skip

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Pages move together with their records."""
        for one, other in zip(src, dst, strict=True):
            for layer in self.kv:
                for values in layer.values():
                    values[other * PAGE : (other + 1) * PAGE] = values[one * PAGE : (one + 1) * PAGE]
        pair = [np.full((3,), -1, np.int32) for _ in range(2)]
        pair[0][: len(src)], pair[1][: len(dst)] = src, dst
        self.state = self.canary.copy(self.state, src=pair[0], dst=pair[1], page_size=PAGE)
        self.copies.append((slots_of(src), slots_of(dst)))

    def restamp(self, seat: Seat) -> None:
        """Stamp what stands in a request's slots, whatever it is."""
        length = seat.length
        tokens, said = np.zeros((TOKENS,), np.int32), np.full((TOKENS,), -1, np.int32)
        tokens[:length], said[:length] = seat.request.tokens[:length], seat.slots[:length]
        table = np.zeros((ROWS, WIDTH), np.int32)
        table[seat.request.row] = seat.slots
        batch = CanaryBatch(
            req_pool_indices=np.array([seat.request.row], np.int32),
            prefix_lens=np.zeros((1,), np.int32),
            extend_seq_lens=np.array([length], np.int32),
            req_to_token=table,
            input_ids=tokens,
            out_cache_loc=said,
            request_ids=np.array([seat.request.id], np.int32),
        )
        self.state = _adopt(self.canary)(self.state, self._pool(), batch)

    # ------------------------------------------------------------------------------------------ parts

    def _pool(self) -> Any:
        if not self.paged:
            return copy.deepcopy(self.kv)
        return [
            {name: values.reshape(SLOTS // PAGE, PAGE, *values.shape[1:]).copy() for name, values in layer.items()} for layer in self.kv
        ]

    def _record(self, seats: Sequence[Seat], host: np.ndarray, prefix: np.ndarray, extend: np.ndarray) -> None:
        if not seats:
            return
        here = [seat.request.id for seat in seats]
        stale = [seat.request.id for seat in seats if seat not in self.live]
        finished = [request for request in self.ended if request not in stale]
        self.ended = stale
        tables = host[[seat.request.row for seat in seats]]
        count = len(seats)
        src, dst = ([pair[side] for pair in self.copies] for side in (0, 1))
        copies = (np.concatenate(src), np.concatenate(dst)) if self.copies else None
        self.copies = []
        for group in self.canary.group_names:
            mapped = self.mapping[np.clip(tables, 0, SLOTS - 1)] if group == "swa" else tables
            self.monitors["told"].record_batch(
                self.number,
                request_ids=here,
                tables=mapped,
                lengths=(prefix + extend)[:count],
                prefix_lengths=prefix[:count],
                copies=copies if group == "full" else None,
                finished=finished,
                group=group,
            )

    def _look(self, report: Any, ids: np.ndarray) -> None:
        canary, header = self.canary, header_fields(report.header, self.canary)
        self.unattested = header.unattested
        for monitor in self.monitors.values():
            monitor.observe(report)
            monitor.flush()
        if not any(header.write_index.values()):
            return
        for tag in canary.parts:
            group = canary.group_of_part(tag)
            log = decode_log(self.state.log[tag], source_names=canary.source_labels(tag))
            assert log.lost == 0 or not self.clears, f"{self.name}: the ring is too small for this scenario"
            for row in log.violations:
                self.world.note(
                    by=CanaryLaunchTag(tag).name.split("_")[0].lower(),
                    node=self.name,
                    group=group,
                    reasons=row.reasons,
                    slot=row.slot,
                    position=row.expected_position,
                    request=int(ids[row.batch_row]) if 0 <= row.batch_row < BATCH else 0,
                    source=row.source_name,
                    steps=self.world.since(self),
                )
        if self.clears:
            self.state = canary.clear_log(self.state)


def slots_of(pages: Iterable[int]) -> np.ndarray:
    """Slots of pages, in order.

    Example:
      >>> slots_of([2])[:3].tolist()
      [32, 33, 34]
    """
    return np.array([slot for page in pages for slot in range(page * PAGE, (page + 1) * PAGE)], np.int32)
