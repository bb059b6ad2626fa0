"""The plain JAX implementation against the NumPy reference on random and hostile operands, and what its compiled steps copy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_kvcanary import pure, reference
from jax_kvcanary.pure import hashing, target, words
from jax_kvcanary.pure.source import SourceHasher
from jax_kvcanary.spec import INT32_MAX, RealKvHashMode, TableKind
from jax_kvcanary.state import VerifyPlan, ViolationLog, WritePlan

plan_module, scatter_module, source_module = (sys.modules[f"jax_kvcanary.pure.{name}"] for name in ("plan", "scatter", "source"))
EXTREMES = {
    "int32": [-(2**31), -(2**31) + 1, -3, -2, -1, 0, 1, INT32_MAX - 1, INT32_MAX],
    "int64": [-(2**63), -(2**32) - 1, -(2**31) - 1, -2, -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 3, 2**62, 2**63 - 1],
}
EXTREMES["pairs"] = EXTREMES["int64"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few entries, so that small launches have several."""
    monkeypatch.setattr(source_module, "_MAX_LANES", 16)
    monkeypatch.setattr(plan_module, "_CHUNK", 16)
    monkeypatch.setattr(scatter_module, "_BLOCK", 4)


@contextlib.contextmanager
def integer_width(form: str) -> Iterator[None]:
    """int64 needs x64, the other forms run without."""
    with jax.enable_x64(form == "int64"):
        yield


def as_form(values: Any, form: str) -> np.ndarray:
    """Python integers in one of the forms of an integer operand."""
    wide = np.array([int(v) for v in values], np.int64)
    if form == "int32":
        return wide.astype(np.int32)
    if form == "int64":
        return wide
    raw = wide.view(np.uint64)
    return np.stack([raw & np.uint64(2**32 - 1), raw >> np.uint64(32)], axis=-1).astype(np.uint32)


class Chaos:
    """Random values, some of them hostile."""

    def __init__(self, seed: int, form: str, share: float = 0.2) -> None:
        self.rng = np.random.default_rng(seed)
        self.form = form
        self.share = share

    def ints(self, n: int, low: int, high: int) -> list[int]:
        """``n`` values, most of them in ``[low, high)``."""
        values = self.rng.integers(low, high, n).tolist()
        hostile = [*EXTREMES[self.form], high, high + 1, low - 1]
        hostile = [v for v in hostile if self.form != "int32" or -(2**31) <= v <= INT32_MAX]
        return [int(self.rng.choice(np.array(hostile, object))) if self.rng.random() < self.share else v for v in values]

    def one(self, low: int, high: int) -> int:
        return self.ints(1, low, high)[0]

    def records(self, slots: int, width: int) -> np.ndarray:
        records = self.rng.integers(0, 2**32, (slots, width), dtype=np.uint32)
        records[self.rng.random(slots) < 0.1] = 0
        return records

    def log(self, rows: int) -> ViolationLog:
        rng = self.rng
        index = int(rng.choice([0, 0, 3, rows - 1, rows, -5, INT32_MAX - 2, INT32_MAX]))
        return ViolationLog(
            ring=rng.integers(0, 2**32, (rows, 32), dtype=np.uint32),
            write_index=np.array([index], np.int32),
            slot_run_counter=rng.integers(0, 2**32, (12, 2), dtype=np.uint32),
            kernel_run_counter=np.full((12, 2), 2**32 - 1, np.uint32),
        )

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Any bits at all, NaNs included."""
        dtype = np.dtype(dtype)
        if dtype == np.bool_:
            return self.rng.integers(0, 2, shape).astype(bool)
        if dtype.name in ("int4", "uint4"):
            return self.rng.integers(0, 8, shape).astype(dtype)
        return self.rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


@functools.cache
def jitted(op: str, pairs: bool, x64: bool, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    del x64  # traced in it
    launch = getattr(pure, op)
    return jax.jit(functools.partial(launch.__wrapped__ if pairs else launch, **dict(params)))


def run(op: str, operands: Sequence[Any], *, pairs: bool = False, **params: Any) -> list[np.ndarray]:
    """A launch; with ``pairs`` as accelerators get it."""
    call = jitted(op, pairs, jax.config.jax_enable_x64, tuple(sorted(params.items())))
    return [np.asarray(x) for x in call(*operands)]


def log_operands(log: ViolationLog) -> list[np.ndarray]:
    return [log.ring, log.write_index, log.slot_run_counter, log.kernel_run_counter]


def assert_log(got: Sequence[np.ndarray], wanted: ViolationLog) -> None:
    """Everything, the order of rows included: plain JAX runs requests and entries in order."""
    for name, array in zip(("write_index", "slot_run_counter", "kernel_run_counter"), got[1:], strict=True):
        np.testing.assert_array_equal(array, getattr(wanted, name), err_msg=name)
    np.testing.assert_array_equal(got[0].view("<u8"), wanted.ring.view("<u8"), err_msg="ring")


# ---------------------------------------------------------------------------------------------- sources


@dataclasses.dataclass(frozen=True)
class Pool:
    """A buffer and the sources in it; a source is a descriptor without its buffer number."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sources: tuple[tuple[Any, ...], ...]


def described(
    pages: int,
    page_size: int,
    page_stride: int,
    token_stride: int,
    run: int,
    runs: tuple[tuple[int, int], ...] = (),
    *,
    offset: int = 0,
    read: int = 0,
) -> tuple[Any, ...]:
    """A descriptor without its buffer number. runs: (count, stride) of the loops, outermost first. read: 0 is all."""
    counts = (1,) * (4 - len(runs)) + tuple(n for n, _ in runs)
    strides = (0,) * (4 - len(runs)) + tuple(s for _, s in runs)
    return (offset, pages, page_size, page_stride, token_stride, counts, strides, run, read or run * math.prod(counts))


BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e5m2
KEYS, VALUES = (described(5, 4, 512, 128, 32, ((2, 64),), offset=offset) for offset in (0, 32))
POOLS = (
    # [pages, 4, 2 heads x 2, 16]: all of a slot, and keys and values that alternate by head
    Pool("paged", (5, 4, 4, 16), BF16, (described(5, 4, 512, 128, 128), KEYS, VALUES)),
    Pool("heads first", (5, 2, 4, 16), np.float16, (described(5, 4, 256, 32, 32, ((2, 128),)),)),
    Pool("layers", (3, 5, 4, 2, 16), BF16, tuple(described(5, 4, 256, 64, 64, offset=1280 * k) for k in range(3))),
    Pool("packed 1-D", (640,), np.uint8, (described(1, 20, 640, 32, 32),)),
    Pool("packed rows", (5, 144), np.int8, (described(5, 4, 144, 32, 32, read=16),)),
    Pool("rows", (20, 3, 8), np.float32, (described(20, 1, 96, 96, 96), described(20, 1, 96, 96, 96, read=42))),
    Pool("slots over two axes", (4, 5, 24), BF16, (described(20, 1, 48, 0, 48),)),
    Pool("runs over two axes", (20, 3, 5, 4), np.int16, (described(20, 1, 120, 0, 120), described(20, 1, 120, 0, 72, offset=8, read=50))),
    Pool("short runs", (4, 20, 8), np.int8, (described(20, 1, 8, 0, 2, ((4, 160), (3, 2))),)),
    Pool("transposed runs", (2, 20, 3, 4), np.uint16, (described(20, 1, 24, 0, 2, ((4, 2), (3, 8), (2, 480))),)),
    Pool("eight bits", (5, 4, 4, 16), F8, (described(5, 4, 256, 64, 64), described(5, 4, 256, 64, 64, read=16))),
    Pool("eight bits, another kind", (20, 32), ml_dtypes.float8_e4m3fn, (described(20, 1, 32, 0, 32),)),
    Pool("four bits", (20, 64), ml_dtypes.int4, (described(20, 1, 32, 0, 32), described(20, 1, 32, 0, 16, offset=16))),
    Pool("flags", (20, 16), np.bool_, (described(20, 1, 16, 0, 16),)),
    Pool("nothing read", (20, 16), np.uint8, ((*described(20, 1, 16, 0, 16)[:-1], 0),)),
    Pool("long", (20, 8, 129), BF16, (described(20, 1, 2064, 0, 2064),)),
)
SLOTS = 20


def descriptors(pools: Sequence[Pool]) -> tuple[tuple[Any, ...], ...]:
    return tuple((buffer, *source) for buffer, pool in enumerate(pools) for source in pool.sources)


@pytest.mark.parametrize("mode", [RealKvHashMode.ALL, RealKvHashMode.PARTIAL])
@pytest.mark.parametrize("pairs", [False, True], ids=["cpu", "pairs"])
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_source(pool: Pool, pairs: bool, mode: RealKvHashMode) -> None:
    """Every layout and dtype, all at once and one source at a time."""
    if pairs and jnp.issubdtype(pool.dtype, jnp.floating) and np.dtype(pool.dtype).itemsize < 4:
        pytest.skip("XLA:CPU changes the bits of NaNs of narrow floats where they are gathered as elsewhere")
    buffers = [Chaos(1, "int32").array(pool.shape, pool.dtype)]
    sources = descriptors([pool])

    def launch(pool: jax.Array, slots: jax.Array) -> list[jax.Array]:
        hasher = SourceHasher(sources, int(mode), [pool])
        n = slots.shape[0]

        def body(i: jax.Array, out: list[jax.Array]) -> list[jax.Array]:
            here = slots + i
            own = hasher.own_hashes(here)
            single = [hashing.unpack(hasher.hash_one(jnp.int32(k) + i, here)).lo for k in range(len(sources))]
            return [jnp.stack(hasher.combined(own, n)), hasher.tags(own, n), jnp.stack(single)]

        return words.repeat(1, body, [jnp.zeros((k, n), jnp.uint32) for k in (2, len(sources), len(sources))])

    slots = np.arange(SLOTS, dtype=np.int32)[::-1]
    combined, tags, single = (np.asarray(x) for x in jax.jit(launch if pairs else target.per_platform(launch))(buffers[0], slots))
    wanted = reference.SourceReader(sources, buffers, mode).hashes(slots.tolist())
    assert [int(lo) | int(hi) << 32 for lo, hi in combined.T] == [wanted[s].combined for s in slots.tolist()]
    np.testing.assert_array_equal(tags.T, [wanted[s].tags for s in slots.tolist()])
    np.testing.assert_array_equal(single, tags)


def test_source_that_reaches_past_its_buffer() -> None:
    with pytest.raises(ValueError, match="source 0 reaches past its buffer"):
        SourceHasher(((0, *described(20, 1, 16, 0, 32)),), RealKvHashMode.ALL, [jax.ShapeDtypeStruct((20, 16), np.uint8)])


def test_source_between_elements() -> None:
    with pytest.raises(ValueError, match="offset of source 0 must be whole elements of float32, got 2 bytes"):
        SourceHasher(((0, *described(4, 1, 16, 0, 16, offset=2)),), RealKvHashMode.ALL, [jax.ShapeDtypeStruct((20, 4), np.float32)])


def test_source_of_complex_numbers() -> None:
    with pytest.raises(NotImplementedError, match="complex64"):
        SourceHasher(((0, *described(4, 1, 16, 0, 16)),), RealKvHashMode.ALL, [jax.ShapeDtypeStruct((20, 2), np.complex64)])


# ---------------------------------------------------------------------------------------------- plan


@dataclasses.dataclass(frozen=True)
class Table:
    """A table's static numbers, the shape of its array and how its entries are drawn."""

    kind: TableKind
    shape: tuple[int, ...]
    page_size: int = 1
    rows: int = 0
    width: int = 0
    mapping: int | None = None
    expected: tuple[int, int] | None = None
    window: int = 0
    offset: int = 0
    padding_req: int | None = 0

    @property
    def params(self) -> dict[str, Any]:
        return {
            "swa_window_size": self.window,
            "kv_token_id_vs_position_offset": self.offset,
            "has_padding_req": self.padding_req is not None,
            "padding_req": 0 if self.padding_req is None else self.padding_req,
            "table_kind": int(self.kind),
            "table_page_size": self.page_size,
            "table_rows": self.rows,
            "table_width": self.width,
            "has_mapping": self.mapping is not None,
            "has_expected": self.expected is not None,
        }

    def draw(self, chaos: Chaos, bs: int) -> dict[str, Any]:
        """What the reference takes; the operands are the same arrays."""
        form, rng = chaos.form, chaos.rng
        most = {TableKind.ROWS: self.shape[-1], TableKind.BLOCKS: self.shape[-1] * self.page_size, TableKind.FLAT: 12}.get(self.kind, 40)
        starts = []
        if self.kind == TableKind.FLAT:
            starts = np.sort(rng.integers(0, self.shape[0] + 1, bs + 1)).tolist()
            starts = [chaos.one(0, self.shape[0] + 1) if rng.random() < chaos.share / 2 else v for v in starts]
        slots = chaos.ints(math.prod(self.shape), -1, SLOTS)
        if self.kind == TableKind.BLOCKS:
            slots = [min(slot, INT32_MAX) for slot in slots]
        expected = self.expected or (0, 0)
        return {
            "req_pool_indices": as_form(chaos.ints(bs, -1, max(self.rows, self.shape[0], 1)), form),
            "prefix_lens": as_form(chaos.ints(bs, 0, min(most, INT32_MAX - 1) + 1), form),
            "req_to_token": as_form(slots, form).reshape(self.shape),
            "table_starts": as_form(starts, form),
            "full_to_swa_index_mapping": None if self.mapping is None else as_form(chaos.ints(self.mapping, -1, SLOTS), form),
            "req_to_verify_expected_tokens": None
            if self.expected is None
            else as_form(chaos.ints(math.prod(expected), -1, 50), form).reshape(expected),
            "req_to_verify_expected_tokens_valid_lens": None if self.expected is None else as_form(chaos.ints(bs, 0, 12), form),
            "swa_window_size": self.window,
            "kv_token_id_vs_position_offset": self.offset,
            "padding_req": self.padding_req,
            "table_kind": self.kind,
            "table_page_size": self.page_size,
            "table_rows": self.rows,
            "table_width": self.width,
        }


def table_operands(drawn: dict[str, Any], form: str) -> list[np.ndarray]:
    """table, table_starts, mapping, expected_tokens, valid_lens."""
    names = ("req_to_token", "table_starts", "full_to_swa_index_mapping")
    expected = drawn["req_to_verify_expected_tokens"]
    none = as_form([], form)
    return [
        *(none if drawn[name] is None else drawn[name] for name in names),
        none.reshape(0, 0) if expected is None else expected,
        none if expected is None else drawn["req_to_verify_expected_tokens_valid_lens"],
    ]


TABLES = {
    "rows": Table(TableKind.ROWS, (6, 14), expected=(5, 9), offset=1),
    "rows, window": Table(TableKind.ROWS, (6, 14), mapping=17, window=5, padding_req=None),
    "rows, nothing": Table(TableKind.ROWS, (0, 0), expected=(0, 0)),
    "blocks": Table(TableKind.BLOCKS, (5, 4), page_size=3, padding_req=2),
    "blocks, huge": Table(TableKind.BLOCKS, (5, 4), page_size=INT32_MAX, mapping=9, window=6),
    "flat": Table(TableKind.FLAT, (40,), expected=(6, 12)),
    "identity": Table(TableKind.IDENTITY, (0,), rows=4, width=7, offset=-2, expected=(5, 9)),
    "identity, window": Table(TableKind.IDENTITY, (0,), rows=4, width=7, window=3, mapping=25),
    "identity, nothing": Table(TableKind.IDENTITY, (0,), rows=4, width=0),
}


def saturated(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.clip(values, np.iinfo(dtype).min, np.iinfo(dtype).max)


@pytest.mark.parametrize("form", ["int32", "int64"])
@pytest.mark.parametrize(
    ("table", "sizes"),
    [*((name, (7, 40, 9)) for name in TABLES), ("rows", (7, 200, 7)), ("rows", (0, 5, 2)), ("rows", (7, 0, 7)), ("blocks", (1, 1, 1))],
    ids=str,
)
def test_plan(table: str, sizes: tuple[int, int, int], form: str) -> None:
    bs, verify_capacity, write_capacity = sizes
    chosen, wide = TABLES[table], form == "int64"
    for seed in range(12):
        chaos = Chaos(seed, form, share=0.15 * (seed % 3))
        drawn = chosen.draw(chaos, bs)
        if chosen.page_size > 1000 and seed % 2:  # positions past 2**32
            drawn["prefix_lens"] = as_form([(2**33 - 5 if wide else INT32_MAX) - k for k in range(bs)], form)
        extends = as_form(chaos.ints(bs, 0, 5), form)
        capacities = {"verify_capacity": verify_capacity, "write_req_capacity": write_capacity}
        operands = [drawn["req_pool_indices"], drawn["prefix_lens"], extends, *table_operands(drawn, form)]
        with integer_width(form):
            got = run("plan", operands, **chosen.params, **capacities, extended_checks=True, wide=wide)
        assert got[0].dtype == (np.int64 if wide else np.int32)
        # All in 64 bits, saturated where the plan is narrow.
        wanted = reference.plan(extend_seq_lens=extends.astype(np.int64), **drawn, **capacities)
        wanted = jax.tree.map(functools.partial(saturated, dtype=got[0].dtype), wanted)
        for k, name in ((5, "num_valid"), (6, "enable"), (10, "row_status")):
            np.testing.assert_array_equal(got[k], getattr(wanted.verify, name), err_msg=name)
        if int(got[6][0]):
            live = int(got[5][0])
            for k, name in enumerate(("slot_indices", "expected_tokens", "expected_positions", "prev_slot_indices", "batch_rows")):
                np.testing.assert_array_equal(got[k][:live], getattr(wanted.verify, name)[:live], err_msg=name)
        for k, name in ((7, "write_offsets"), (8, "write_seed_slot_indices"), (9, "write_num_valid_reqs")):
            np.testing.assert_array_equal(got[k], getattr(wanted.write, name), err_msg=name)


# ---------------------------------------------------------------------------------------------- verify


@dataclasses.dataclass(frozen=True)
class Launch:
    """Static facts of a verify or write launch, and which of its optional operands there are."""

    form: str
    pairs: bool = False
    width: int = 16
    slots: int = SLOTS
    ring: int = 24
    mode: RealKvHashMode = RealKvHashMode.NONE
    pools: tuple[str, ...] = ()
    tags: bool = False
    rotate: bool = False
    padding_slot: int | None = 0
    extended: bool = True
    strict: bool = True
    stride: int = 1  # of a fused verify
    check: bool = False  # tokens of a verify, inputs of a write
    namespaces: bool = False
    entries: int = 40
    bs: int = 5
    rows: bool = True  # batch rows of a verify, rows and ids of the requests of a write
    pass_through: bool = False

    @property
    def buffers(self) -> list[Pool]:
        return [pool for pool in POOLS if pool.name in self.pools]

    @property
    def sources(self) -> tuple[tuple[Any, ...], ...]:
        return descriptors(self.buffers)

    @property
    def params(self) -> dict[str, Any]:
        return {
            "launch_tag": 3,
            "real_kv_hash_mode": int(self.mode),
            "sources": self.sources,
            "has_padding_slot": self.padding_slot is not None,
            "padding_slot": self.padding_slot or 0,
            "extended_checks": self.extended,
            "strict": self.strict,
        }

    @property
    def verify_params(self) -> dict[str, Any]:
        return {"check_expected_token": self.check, "rotate": self.rotate, "pass_through": self.pass_through}

    def draw(self, chaos: Chaos) -> dict[str, Any]:
        """What verify and write have in common, as the reference takes it."""
        rng = chaos.rng
        tags = rng.integers(0, 2**32, (self.slots, len(self.sources)), dtype=np.uint32) if self.tags else None
        return {
            "records": chaos.records(self.slots, self.width),
            "log": chaos.log(self.ring),
            "launch_tag": 3,
            "real_kv_hash_mode": self.mode,
            "real_kv_sources": self.sources,
            "real_kv_buffers": tuple(chaos.array(pool.shape, pool.dtype) for pool in self.buffers),
            "source_tags": tags,
            "namespaces": as_form(chaos.ints(self.bs, 0, 9), self.form) if self.namespaces else None,
            "step": int(rng.integers(2**32)),
            "shard": int(rng.integers(2**32)),
            "padding_slot": self.padding_slot,
            "extended_checks": self.extended,
            "strict": self.strict,
        }

    def state(self, drawn: dict[str, Any]) -> list[np.ndarray]:
        tags = drawn["source_tags"]
        return [drawn["records"], np.zeros((0, 0), np.uint32) if tags is None else tags, *log_operands(drawn["log"])]

    def context(self, drawn: dict[str, Any]) -> list[np.ndarray]:
        namespaces = drawn["namespaces"]
        context = np.array([drawn["step"], drawn["shard"]], np.uint32)
        return [as_form([], self.form) if namespaces is None else namespaces, context]


ALL, PARTIAL, NONE = RealKvHashMode.ALL, RealKvHashMode.PARTIAL, RealKvHashMode.NONE
MANY = ("paged", "layers", "rows", "eight bits", "nothing read")
VERIFIES = {
    "plain": Launch("int32", width=8, extended=False, check=True),
    "narrow": Launch("pairs", strict=False, width=11, check=True, namespaces=True, padding_slot=None),
    "hostile": Launch("int64", check=True, namespaces=True, mode=ALL, pools=("paged", "rows"), tags=True),
    "hostile, plain": Launch("int64", check=True, mode=PARTIAL, pools=("rows", "long"), extended=False, padding_slot=-7),
    "many": Launch("pairs", mode=ALL, pools=MANY, tags=True, pass_through=True),
    "rotated": Launch("int32", strict=False, mode=ALL, pools=MANY, tags=True, rotate=True, namespaces=True),
    "rotated, nothing": Launch("int32", tags=True, rotate=True, pools=("rows",), entries=9),
    "tags of nothing": Launch("pairs", tags=True, pools=("rows",), entries=9),
    "no rows": Launch("int64", rows=False, bs=0, entries=9),
    "no entries": Launch("int32", entries=0),
    "no ring": Launch("pairs", ring=0, entries=20),
    "no slots": Launch("int32", slots=0),
    "one": Launch("int64", slots=1, entries=1, bs=1, ring=1),
    "pairs": Launch(
        "pairs", strict=False, pairs=True, check=True, namespaces=True, mode=ALL, pools=("rows", "runs over two axes"), tags=True
    ),
    "pairs, rotated": Launch("int64", pairs=True, mode=ALL, pools=("rows", "packed rows"), tags=True, rotate=True, pass_through=True),
}


def good_records(chaos: Chaos, drawn: dict[str, Any], plan: VerifyPlan) -> None:
    """Make about half of the entries agree with their records, so that single faults show."""
    records = drawn["records"]
    reader = reference.SourceReader(drawn["real_kv_sources"], drawn["real_kv_buffers"], drawn["real_kv_hash_mode"])
    integers = reference.integers.integers
    slots, prevs, positions = (integers(x) for x in (plan.slot_indices, plan.prev_slot_indices, plan.expected_positions))
    tokens, rows = integers(plan.expected_tokens), integers(plan.batch_rows)
    namespaces = integers(drawn["namespaces"])
    limit = reader.slots(records.shape[0])
    for i, (slot, prev) in enumerate(zip(slots, prevs, strict=True)):
        if not 0 <= slot < limit or chaos.rng.random() < 0.4:
            continue
        row = rows[i] if rows else -1
        link = reference.hashing.head_hash(namespaces[row] if 0 <= row < len(namespaces) else 0)
        if 0 <= prev < limit:
            link = reference.record.read_record(records, prev).chain_hash
        hashes = reader.hashes([slot])[slot]
        records[slot, :8] = reference.integers.words_of([tokens[i], positions[i], link, hashes.combined])
        if drawn["source_tags"] is not None:
            tags = np.array(hashes.tags, np.uint32)
            drawn["source_tags"][slot] = np.where(chaos.rng.random(tags.size) < 0.1, tags ^ np.uint32(1), tags)


@pytest.mark.parametrize("name", VERIFIES)
def test_verify(name: str) -> None:
    launch = VERIFIES[name]
    form, n, bs = launch.form, launch.entries, launch.bs
    params = {**launch.params, **launch.verify_params}
    for seed in range(16):
        chaos = Chaos(seed, form, share=0.1 * (seed % 4))
        drawn = launch.draw(chaos)
        plan = VerifyPlan(
            slot_indices=as_form(chaos.ints(n, 0, max(launch.slots, 1)), form),
            expected_tokens=as_form(chaos.ints(n, -1, 50), form),
            expected_positions=as_form(chaos.ints(n, 0, 50), form),
            prev_slot_indices=as_form(chaos.ints(n, -1, max(launch.slots, 1)), form),
            batch_rows=as_form(chaos.ints(n, 0, max(bs, 1)) if launch.rows else [], form),
            num_valid=np.array([Chaos(seed, "int32", 0.2).one(0, n + 1) if seed % 2 else n], np.int32),
            enable=np.array([chaos.rng.choice([1, 1, 1, -4, 0])], np.int32),
            row_status=chaos.rng.choice([0, 0, 128], bs).astype(np.int32),
            req_pool_indices=as_form(chaos.ints(bs, 0, 9), form),
        )
        good_records(chaos, drawn, plan)
        window = np.array(Chaos(seed, "int32", 0.3).ints(2, 0, len(launch.sources) + 2), np.int32)
        operands = [
            *launch.state(drawn),
            *(getattr(plan, field.name) for field in dataclasses.fields(plan)),
            *launch.context(drawn),
            window,
            *drawn["real_kv_buffers"],
        ]
        with integer_width(form):
            got = run("verify", operands, pairs=launch.pairs, **params)
        rotated = {"source_window": window} if launch.rotate else {}
        assert_verify(got, reference.verify(plan=plan, check_verify_expected_token=launch.check, **rotated, **drawn), drawn, launch)


def assert_verify(got: list[np.ndarray], wanted: Any, drawn: dict[str, Any], launch: Launch) -> None:
    assert_log(got[:4], wanted.log)
    np.testing.assert_array_equal(got[4], wanted.verdict)
    np.testing.assert_array_equal(got[5], wanted.first_bad_position)
    np.testing.assert_array_equal(got[6], wanted.unattested)
    np.testing.assert_array_equal(got[7], wanted.first_unattested_position)
    passed = drawn["real_kv_buffers"] if launch.pass_through else ()
    for out, buffer in zip(got[9:], passed, strict=True):
        assert out.tobytes() == buffer.tobytes()


FUSED = {
    "rows": ("rows", Launch("int32", strict=False, stride=2, check=True, namespaces=True, mode=ALL, pools=("paged",), tags=True)),
    "rows, window": ("rows, window", Launch("int64", width=8, extended=False)),
    "rows, nothing": ("rows, nothing", Launch("int32")),
    "blocks": ("blocks", Launch("int32", mode=PARTIAL, pools=("layers",), rotate=True, tags=True, pass_through=True)),
    "blocks, huge": ("blocks, huge", Launch("int64")),
    "blocks, huge, strided": ("blocks, huge", Launch("int64", stride=INT32_MAX)),
    "flat": ("flat", Launch("int64", stride=3, check=True, slots=12)),
    "identity": ("identity", Launch("int32", strict=False, stride=2, slots=40)),
    "identity, pairs": ("identity, window", Launch("int64", pairs=True, slots=0)),
    "pairs": ("rows", Launch("int64", pairs=True, check=True, mode=ALL, pools=("rows",), namespaces=True)),
    "empty batch": ("rows", Launch("int32", bs=0)),
}


@pytest.mark.parametrize("name", FUSED)
def test_verify_fused(name: str) -> None:
    table_name, launch = FUSED[name]
    table, form = TABLES[table_name], launch.form
    params = {**launch.params, **table.params, **launch.verify_params, "position_stride": launch.stride}
    for seed in range(12):
        chaos = Chaos(seed, form, share=0.1 * (seed % 3))
        drawn, batch = launch.draw(chaos), table.draw(chaos, launch.bs)
        if table.page_size > 1000:
            batch["prefix_lens"] = as_form([2**33 - 5 - k for k in range(launch.bs)], form)
        planned = reference.plan(extend_seq_lens=np.zeros(launch.bs, np.int64), verify_capacity=400, write_req_capacity=launch.bs, **batch)
        good_records(chaos, drawn, planned.verify)
        window = np.array(chaos.rng.integers(0, len(launch.sources) + 2, 2), np.int32)
        operands = [
            *launch.state(drawn),
            batch["req_pool_indices"],
            batch["prefix_lens"],
            *table_operands(batch, form),
            *launch.context(drawn),
            window,
            *drawn["real_kv_buffers"],
        ]
        with integer_width(form):
            got = run("verify_fused", operands, pairs=launch.pairs, **params)
        rotated = {"source_window": window} if launch.rotate else {}
        more = {"check_verify_expected_token": launch.check, "position_stride": launch.stride}
        wanted = reference.verify_fused(**more, **rotated, **batch, **drawn)
        assert_verify(got, wanted, drawn, launch)


# ---------------------------------------------------------------------------------------------- write


WRITES = {
    "plain": Launch("int32", width=8, extended=False, check=True),
    "narrow": Launch("pairs", strict=False, width=11, check=True, namespaces=True, padding_slot=None),
    "hostile": Launch("int64", strict=False, check=True, namespaces=True, mode=ALL, pools=("paged", "rows"), tags=True),
    "hostile, plain": Launch("int64", check=True, mode=PARTIAL, pools=("rows", "long"), extended=False, padding_slot=-7),
    "many": Launch("pairs", mode=ALL, pools=MANY, tags=True, rows=False),
    "decode": Launch("int32", entries=12, bs=12, ring=7, padding_slot=25),
    "tags of nothing": Launch("pairs", tags=True, pools=("rows",), entries=9),
    "no requests": Launch("int32", bs=0),
    "no entries": Launch("int64", entries=0),
    "no ring": Launch("pairs", ring=0, entries=20, check=True),
    "no slots": Launch("int32", slots=0),
    "one": Launch("int64", slots=1, entries=1, bs=1, ring=1, check=True),
    "pairs": Launch("pairs", pairs=True, check=True, namespaces=True, mode=ALL, pools=("rows", "runs over two axes"), tags=True),
    "pairs, decode": Launch("int64", pairs=True, entries=9, bs=9, width=19),
}


@pytest.mark.parametrize("name", WRITES)
def test_write(name: str) -> None:
    """Also requests that start from what an earlier one of the launch writes, slots written twice, and segments that overlap."""
    launch = WRITES[name]
    form, total, requests = launch.form, launch.entries, launch.bs
    params = {**launch.params, "enable_write_input_assert": launch.check, "record_flags": 2**31 + 1}
    for seed in range(24):
        chaos = Chaos(seed, form, share=(0.0, 0.05, 0.2)[seed % 3])
        rng, drawn = chaos.rng, launch.draw(chaos)
        offsets = [0, *np.sort(rng.integers(0, total + 1, requests)).tolist()]
        if seed % 4 == 3:
            offsets = chaos.ints(requests + 1, 0, total + 1)
        locations = chaos.ints(total, -1, max(launch.slots, 1))
        if seed % 4 == 1:  # every slot once
            locations = (rng.permutation(max(total, launch.slots))[:total]).tolist()
        positions = chaos.ints(total, 0, 50)
        if seed % 2:  # mostly a chain
            positions = [p if rng.random() < 0.1 else i for i, p in enumerate(positions)]
        tokens = chaos.ints(total, 0, 50)
        plan = WritePlan(
            write_offsets=as_form(offsets, form),
            write_seed_slot_indices=as_form(chaos.ints(requests, -1, max(launch.slots, 1)), form),
            write_num_valid_reqs=np.array([Chaos(seed, "int32", 0.3).one(0, requests + 1) if seed % 5 == 4 else requests], np.int32),
            req_pool_indices=as_form(chaos.ints(requests, 0, 9)[: requests - 1] if launch.rows else [], form),
        )
        inputs = {name: as_form(v, form) for name, v in (("input_ids", tokens), ("positions", positions), ("out_cache_loc", locations))}
        expected = {}
        if launch.check:
            for name_, values in (("expected_input_tokens", tokens), ("expected_input_positions", positions)):
                expected[name_] = as_form([v if rng.random() < 0.8 else chaos.one(0, 50) for v in values], form)
        ids = as_form(chaos.ints(requests, 0, 99)[:3], form) if launch.rows else None
        chain_assert = np.array([rng.choice([0, 1, -8])], np.int32)
        namespaces, context = launch.context(drawn)
        none = as_form([], form)
        operands = [
            *launch.state(drawn),
            *(getattr(plan, name_) for name_ in ("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs")),
            *inputs.values(),
            *(expected.values() if expected else [none, none]),
            chain_assert,
            plan.req_pool_indices,
            none if ids is None else ids,
            namespaces,
            context,
            *drawn["real_kv_buffers"],
        ]
        with integer_width(form):
            got = run("write", operands, pairs=launch.pairs, **params)
        wanted = reference.write(
            plan=plan,
            enable_write_input_assert=launch.check,
            enable_chain_position_assert=chain_assert,
            request_ids=ids,
            record_flags=2**31 + 1,
            **inputs,
            **expected,
            **drawn,
        )
        assert_log(got[2:6], wanted.log)
        np.testing.assert_array_equal(got[0], wanted.records)
        np.testing.assert_array_equal(got[1], operands[1] if wanted.source_tags is None else wanted.source_tags)
        np.testing.assert_array_equal(got[6], wanted.verdict)


# ---------------------------------------------------------------------------------------------- scatter


@pytest.mark.parametrize("form", ["int32", "int64", "pairs"])
@pytest.mark.parametrize("sizes", [(30, 6, 5, 7), (0, 3, 5, 7), (30, 0, 5, 7), (30, 6, 0, 0), (9, 4, 3, 1)], ids=str)
def test_scatter(sizes: tuple[int, int, int, int], form: str) -> None:
    total, bs, rows, width = sizes
    for seed in range(12):
        chaos = Chaos(seed, form, share=0.15 * (seed % 3))
        offsets = [0, *np.sort(chaos.rng.integers(0, total + 1, bs)).tolist()]
        if seed % 3:
            offsets = [chaos.one(0, total + 1) if chaos.rng.random() < 0.2 else v for v in offsets]
        operands = {
            "flat_in": as_form(chaos.ints(total, 0, 99), form),
            "offsets": as_form(offsets, form),
            "req_pool_indices": as_form(chaos.ints(bs, 0, max(rows, 1)), form),
            "pool_out": chaos.rng.integers(-99, 99, (rows, width)).astype(np.int32),
        }
        with integer_width(form):
            pool, status = run("scatter", list(operands.values()))
        wanted = reference.scatter_req_token_ids(**operands)
        np.testing.assert_array_equal(pool, wanted.pool)
        np.testing.assert_array_equal(status, wanted.status)


# ---------------------------------------------------------------------------------------------- how launches are traced and compiled


def launch_shapes(op: str, *, slots: int, entries: int, bs: int, tags: int = 0, ring: int = 64) -> list[jax.ShapeDtypeStruct]:
    """Operands of a verify, fused verify or write of int32 arrays, without its buffers."""
    shape = jax.ShapeDtypeStruct
    state = [((slots, 16), "uint32"), ((slots if tags else 0, tags), "uint32"), ((ring, 32), "uint32"), ((1,), "int32")]
    state += [((12, 2), "uint32")] * 2
    rows, one, none = ((bs,), "int32"), ((1,), "int32"), ((0,), "int32")
    last = [none, ((2,), "uint32"), ((2,), "int32")]
    rest = {
        "verify": [((entries,), "int32")] * 5 + [one, one, rows, rows, *last],
        "verify_fused": [rows, rows, ((bs, entries // bs), "int32"), none, none, ((0, 0), "int32"), none, *last],
        "write": [((bs + 1,), "int32"), rows, one] + [((entries,), "int32")] * 3 + [none, none, one, rows, none, none, ((2,), "uint32")],
    }[op]
    return [shape(*x) for x in (*state, *rest)]


COMMON = {
    "launch_tag": 0, "real_kv_hash_mode": int(ALL), "has_padding_slot": True, "padding_slot": 0, "extended_checks": True, "strict": True,
}  # fmt: skip
STATICS = {
    "verify": {**COMMON, "check_expected_token": True, "rotate": False, "pass_through": False},
    "write": {**COMMON, "enable_write_input_assert": False, "record_flags": 0},
}
STATICS["verify_fused"] = {**STATICS["verify"], **TABLES["rows"].params, "has_expected": False, "position_stride": 1}


def layers_of(count: int, pages: int, page_size: int, heads: int, dim: int, *, stacked: bool) -> tuple[tuple[Any, ...], list[Any]]:
    """All layers of a bf16 pool ``[pages, page_size, heads, dim]``, in one array or one array each, as sources."""
    token = heads * dim * 2
    layer = pages * page_size * token
    source = functools.partial(described, pages, page_size, page_size * token, token, token)
    sources = [(0 if stacked else k, *source(offset=layer * k if stacked else 0)) for k in range(count)]
    shape = (pages, page_size, heads, dim)
    buffers = [jax.ShapeDtypeStruct((count, *shape), BF16)] if stacked else [jax.ShapeDtypeStruct(shape, BF16)] * count
    return tuple(sources), buffers


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("op", ["plan", "verify", "verify_fused", "write", "scatter"])
def test_promotion_settings_of_the_caller(op: str, x64: bool) -> None:
    """Launches are traced while a program is lowered, under whatever the program has configured."""
    sources, buffers = layers_of(2, 3, 4, 2, 8, stacked=False)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        if op == "plan":
            rows, none = jax.ShapeDtypeStruct((3,), np.int32), jax.ShapeDtypeStruct((0,), np.int32)
            operands = [rows, rows, rows, jax.ShapeDtypeStruct((4, 5), np.int32), none, none, jax.ShapeDtypeStruct((4, 6), np.int32), rows]
            params = {**TABLES["rows"].params, "verify_capacity": 9, "write_req_capacity": 4, "extended_checks": True, "wide": x64}
        elif op == "scatter":
            operands = [jax.ShapeDtypeStruct((n,), np.int32) for n in (9, 4, 3)] + [jax.ShapeDtypeStruct((4, 5), np.int32)]
            params = {}
        else:
            operands = launch_shapes(op, slots=12, entries=30, bs=3, tags=2) + buffers
            params = {**STATICS[op], "sources": sources}
            if op != "write":
                params.update(pass_through=True, rotate=x64)
            params["strict"] = x64
        for launch in {getattr(pure, op), getattr(getattr(pure, op), "__wrapped__", getattr(pure, op))}:
            jax.jit(functools.partial(launch, **params)).trace(*operands)


def test_without_jit() -> None:
    """Eagerly, and for several platforms in one export."""
    flat, offsets, rows = (jnp.array(values, jnp.int32) for values in ([7, 8, 9], [0, 3], [1]))
    assert pure.scatter(flat, offsets, rows, jnp.zeros((2, 2), jnp.int32))[0].tolist() == [[0, 0], [7, 8]]
    operands = [np.zeros(x.shape, x.dtype) for x in launch_shapes("verify", slots=4, entries=3, bs=1)]
    operands[9] = np.full(3, -1, np.int32)
    operands[11:13] = [np.array([3], np.int32), np.array([1], np.int32)]
    operands[6] = np.array([1, 2, 9], np.int32)
    launch = functools.partial(pure.verify, **STATICS["verify"], sources=())
    eager = launch(*map(jnp.asarray, operands))
    assert int(eager[1][0]) == 3
    exported = jax.export.export(jax.jit(launch), platforms=("cpu", "cuda", "tpu"))(*operands)
    for got, wanted in zip(exported.call(*operands), eager, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("rotate", [False, True], ids=["all", "rotated"])
def test_many_sources_make_no_long_program(rotate: bool, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def lines(count: int) -> int:
        sources, buffers = layers_of(count, 8, 4, 4, 64, stacked=stacked)
        operands = launch_shapes("verify", slots=32, entries=64, bs=4, tags=count) + buffers
        launch = functools.partial(pure.verify, **{**STATICS["verify"], "rotate": rotate}, sources=sources)
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.jit(launch).lower(*operands).as_text().count("\n")

    assert lines(64) - lines(4) < (200 if stacked else 60 * 80)


SMALL = 2**22 if jax.default_backend() == "cpu" else 2**23
"""Bytes of temporary memory that a launch may have: accelerators gather more of the pool at a time."""


@pytest.mark.parametrize("op", ["verify", "verify_fused"])
def test_temporary_memory_of_large_launches(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 2 GiB, three plan entries a slot."""
    monkeypatch.undo()
    slots = 2**20
    sources, buffers = layers_of(1, slots // 16, 16, 8, 128, stacked=False)
    operands = launch_shapes(op, slots=slots, entries=3 * slots, bs=256) + buffers
    compiled = jax.jit(functools.partial(getattr(pure, op), **STATICS[op], sources=sources)).lower(*operands).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < SMALL


# ---------------------------------------------------------------------------------------------- copies of the pool


def step_facts(*, stacked: bool, canary: bool, pages: int, heads: int, dim: int, sharding: Any = None) -> dict[str, int]:
    """Temporary memory and copies of the pool of a step: head verify, update of the pool in place, tail verify, write."""
    count, page_size, bs = 4, 16, 64
    slots = pages * page_size
    sources, buffers = layers_of(count, pages, page_size, heads, dim, stacked=stacked)

    def update(pools: list[jax.Array], page: jax.Array, values: jax.Array) -> list[jax.Array]:
        zero = jnp.int32(0)
        for layer in range(count):
            if stacked:
                pools = [jax.lax.dynamic_update_slice(pools[0], values[None], (jnp.int32(layer), page, zero, zero, zero))]
            else:
                pools[layer] = jax.lax.dynamic_update_slice(pools[layer], values, (page, zero, zero, zero))
        return pools

    def step(pools: list[jax.Array], page: jax.Array, values: jax.Array, checks: list[jax.Array], segments: list[jax.Array]) -> Any:
        if not canary:
            return update(pools, page, values)
        launch = functools.partial(pure.verify, sources=sources)
        head = launch(*checks, *pools, **{**STATICS["verify"], "pass_through": True})
        pools = update(head[9:], page, values)
        tail = launch(*checks[:2], *head[:4], *checks[6:], *pools, **STATICS["verify"])
        written = pure.write(*segments[:2], *tail[:4], *segments[6:], *pools, **STATICS["write"], sources=sources)
        return pools, written[:7], head[4:8], tail[4:8]

    operands = [
        buffers,
        jax.ShapeDtypeStruct((), np.int32),
        jax.ShapeDtypeStruct((1, page_size, heads, dim), BF16),
        launch_shapes("verify", slots=slots, entries=2048, bs=bs),
        launch_shapes("write", slots=slots, entries=bs, bs=bs),
    ]
    operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    compiled = jax.jit(step, donate_argnums=0).lower(*operands).compile()
    shape = ",".join(map(str, buffers[0].shape))
    copies = re.findall(rf"= \(?bf16\[{shape}\]\S* (?:copy|copy-start)\(", compiled.as_text())
    pool = sum(math.prod(buffer.shape) * 2 for buffer in buffers)
    return {"temp": compiled.memory_analysis().temp_size_in_bytes, "copies": len(copies), "pool": pool}


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_no_copy_of_the_pool(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    size = {"pages": 256, "heads": 16, "dim": 64, "stacked": stacked}
    without, with_canary = (step_facts(**size, canary=canary) for canary in (False, True))
    assert with_canary["copies"] == without["copies"] == 0
    assert with_canary["pool"] == 2**25
    assert with_canary["temp"] - without["temp"] < SMALL, (without, with_canary)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_no_copy_of_the_pool_on_tpu(stacked: bool) -> None:
    """Compiled ahead of time for TPU v5e, in a process of its own: a compiler that fails takes its process along."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    environment = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, __file__, "stacked" if stacked else "list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["copies"] == 0
    assert facts["pool"] == 2**28
    assert facts["temp"] < 2**23


def main(arrangement: str) -> None:
    """Print the facts of a step on TPU v5e."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    facts = step_facts(
        stacked=arrangement == "stacked", canary=True, pages=2048, heads=8, dim=128, sharding=SingleDeviceSharding(devices[0])
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
