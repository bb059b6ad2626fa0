"""What the property tests share: tables of static settings, strategies for the values of every operand, comparison, and an engine.

A setting fixes what a compiled program depends on (shapes, dtypes, static arguments), so that few programs serve many examples. Values
start from a valid state of pool, records and tables, and single ones are replaced by anything that the operand's type can hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import vectors_io as io
from hypothesis import strategies as st
from numpy.typing import NDArray

from jax_kvcanary import reference
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.spec import INT32_MAX, NUM_LAUNCH_TAGS, RING_WORDS, RealKvHashMode, TableKind
from jax_kvcanary.state import Plan, VerifyPlan, ViolationLog, WritePlan
from jax_kvcanary.tables import BlockTable, FlatTable, IdentityTable, RowTable

Setting = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

SLOTS = 24
REQUESTS = 3
TOKENS = 5
"""A world holds three requests of five tokens each in a pool of 24 slots."""

MANY = 64
"""Operands longer than this are made from a palette of drawn values: a draw for each would take too long."""


# ---------------------------------------------------------------------------------------------- settings


def covering(
    axes: dict[str, Sequence[Any]], *, strength: int, keep: Callable[[Setting], bool] = lambda setting: True, most: int = 1000
) -> list[Setting]:
    """Few settings in which every value (``strength`` 1) or every pair of values (2) of the axes occurs that ``keep`` allows.

    most: how many settings at most; those that bring the most new pairs come first.
    """
    rng, names = random.Random(0), list(axes)
    groups = list(itertools.combinations(names, strength))
    wanted: dict[Any, None] = {}  # an ordered set
    for group in groups:
        for values in itertools.product(*(axes[name] for name in group)):
            wanted[group, values] = None
    settings: list[Setting] = []
    while wanted and len(settings) < most:
        first = next(iter(wanted))
        base, best, best_found = dict(zip(*first, strict=True)), None, []
        for _ in range(60):
            setting = {name: base[name] if name in base else rng.choice(axes[name]) for name in names}
            if keep(setting):
                found = [pair for group in groups if (pair := (group, tuple(setting[name] for name in group))) in wanted]
                if len(found) > len(best_found):
                    best, best_found = setting, found
        if best is None:  # hardly a setting has this pair
            wanted.pop(first)
            continue
        settings.append(best)
        for pair in best_found:
            wanted.pop(pair)
    return settings


USUAL: dict[str, Sequence[Any]] = {
    "slots": (24,),
    "entries": (14,),
    "tokens": (14,),
    "bs": (3,),
    "rows": (3,),
    "capacity": ("ample",),
    "expected": (True,),
    "offset": (0, 1, -2),
    "ring": (64, 3),
    "sources": ("three", "row", "shared", "short", "bits", "none"),
    "table": ("rows", "blocks", "flat", "identity", "blocks-huge", "identity-huge"),
    "padding_req": (0, None, -1),
    "pool": ((4, 6),),
}
"""Values with which an operation has something to do: an empty axis hides what the others could show."""


def settings_of(axes: dict[str, Sequence[Any]], *, usual: int, keep: Callable[[Setting], bool] = lambda setting: True) -> list[Setting]:
    """Every value of every axis once, empty ones included, and up to ``usual`` settings with pairs of usual values."""
    busy = {name: tuple(value for value in values if value in USUAL.get(name, values)) for name, values in axes.items()}
    return covering(busy, strength=2, keep=keep, most=usual) + covering(axes, strength=1, keep=keep)


FORMS = ("i32", "i32+x64", "i64", "pairs", "pairs+x64", "mixed")
"""Integer operands: int32, int64, uint32 pairs, or one after the other; int64 needs x64, the others run under both."""

PLAN_FORMS = ("i32", "i32+x64", "i64", "mixed")
"""Operands of a plan have no pairs."""

PADDING = (0, None, -1, 5, 2_000_000)


def needs_x64(form: str) -> bool:
    return form in ("i64", "mixed") or form.endswith("+x64")


def kind_of(form: str, name: str, *, pairs: bool = True) -> str:
    """i32, i64 or pairs for the operand of this name."""
    if form != "mixed":
        return form.removesuffix("+x64")
    return ("i32", "i64", "pairs")[len(name) % (3 if pairs else 2)]


# ---------------------------------------------------------------------------------------------- integers


@functools.cache
def wild(kind: str, near: tuple[int, ...] = ()) -> st.SearchStrategy[int]:
    """Anything that an operand of this kind holds: values near ``near``, edges, values that wrap to near ones, and the whole range."""
    bits = 32 if kind == "i32" else 64
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    close = [value + step for value in near for step in (0, 1, -1)]
    edges = [0, 1, -1, -2, low, low + 1, high, high - 1]
    aliases = []
    if bits == 64:
        edges += [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, -(2**32), 2**62, 2**61]
        aliases = [base + value for value in near for base in (2**32, 2**31, -(2**32), 2**62)]
    lists = [[value for value in values if low <= value <= high] for values in (close, close, edges, aliases)]
    return st.one_of(*(st.sampled_from(values) for values in lists if values), st.integers(low, high))


def as_operand(values: Sequence[int], kind: str) -> NDArray[Any]:
    """Values as an operand of this kind."""
    if kind == "i32":
        return np.array(values, np.int64).astype(np.int32)
    wide = np.array(values, np.int64)
    return wide if kind == "i64" else np.ascontiguousarray(wide).view(np.uint32).reshape(-1, 2)


@functools.cache
def _lists(strategy: st.SearchStrategy[int], n: int) -> st.SearchStrategy[list[int]]:
    return st.lists(strategy, min_size=n, max_size=n)


@functools.cache
def _changes(n: int, strategy: st.SearchStrategy[int]) -> st.SearchStrategy[dict[int, int]]:
    return st.dictionaries(st.integers(0, n - 1), strategy, min_size=1, max_size=4)


_SEEDS = st.integers(0, 2**32 - 1)
_HOSTILE = st.sampled_from((False, True, True, True))
_PART = st.sampled_from(("none", "some", "some", "all"))
_STATUS = st.sampled_from((0, 128, -1, INT32_MAX))


class Values:
    """The values of one example. hostile: whether any are replaced; each operand by itself draws whether some or all of its own are."""

    def __init__(self, draw: Draw, form: str, *, pairs: bool = True) -> None:
        self.draw, self.form, self.pairs = draw, form, pairs
        self.hostile = draw(_HOSTILE)
        self.rng = np.random.default_rng(draw(_SEEDS))

    def replaced(self, base: Sequence[int], strategy: st.SearchStrategy[int]) -> list[int]:
        """``base``, of which some elements are replaced."""
        values, n = [int(value) for value in base], len(base)
        part = "none" if n == 0 or not self.hostile else self.draw(_PART)
        if part == "none":
            return values
        if n <= MANY:
            if part == "all":
                return self.draw(_lists(strategy, n))
            for index, value in self.draw(_changes(n, strategy)).items():
                values[index] = value
            return values
        palette = self.draw(_lists(strategy, 12))
        share = 0.5 if part == "all" else 0.01
        for index in np.flatnonzero(self.rng.random(n) < share):
            values[index] = palette[self.rng.integers(len(palette))]
        return values

    def operand(self, name: str, base: Sequence[int], near: tuple[int, ...] = ()) -> NDArray[Any]:
        """An integer operand in the example's form."""
        kind = kind_of(self.form, name, pairs=self.pairs)
        return as_operand(self.replaced(base, wild(kind, near)), kind)

    def table(self, name: str, base: NDArray[np.int64], near: tuple[int, ...] = ()) -> NDArray[Any]:
        """The same of any rank."""
        kind = kind_of(self.form, name, pairs=False)
        return as_operand(self.replaced(base.reshape(-1).tolist(), wild(kind, near)), kind).reshape(base.shape)

    def count(self, base: int, near: tuple[int, ...] = ()) -> NDArray[np.int32]:
        """An int32 ``[1]`` operand; mostly ``base``, so that most launches do something."""
        if not self.hostile or self.draw(st.integers(0, 3)):
            return np.array([base], np.int32)
        return np.array([self.draw(wild("i32", near))], np.int32)

    def bits(self, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        return self.rng.integers(0, 2**32, shape, np.uint32)

    def log(self, rows: int) -> ViolationLog:
        """A log in use: old rows, counters about to carry, and a write index that may be anything."""
        index = self.draw(st.one_of(st.just(0), wild("i32", (rows, INT32_MAX - 2)))) if self.hostile else 0
        counters = [self.bits((NUM_LAUNCH_TAGS, 2)) | np.uint32(self.draw(st.sampled_from((0, 2**32 - 1)))) for _ in range(2)]
        return ViolationLog(
            ring=self.bits((rows, RING_WORDS)),
            write_index=np.array([index], np.int32),
            slot_run_counter=counters[0],
            kernel_run_counter=counters[1],
        )

    def word(self) -> np.uint32:
        """A step or a shard."""
        return np.uint32(self.draw(st.sampled_from((0, 7, 2**31, 2**32 - 1))))


# ---------------------------------------------------------------------------------------------- pools


SOURCES = ("none", "row", "three", "shared", "short", "pageless", "bits")


@functools.cache
def sources_of(name: str, slots: int) -> tuple[tuple[RealKvSource, ...], tuple[tuple[tuple[int, ...], str], ...]]:
    """Sources of a pool of ``slots`` slots, and (shape, dtype) of their buffers."""
    if name == "none":
        return (), ()
    if name in ("row", "short"):  # one slot a row; short: fewer slots than records
        shape = (max(slots - 3, 0) if name == "short" else slots, 3, 8)
        return (RealKvSource(shape=shape, dtype="bfloat16", page_size=1, num_bytes_per_token=48, read_bytes=32),), ((shape, "bfloat16"),)
    if name == "bits":  # two elements a byte, two slots a row
        shape = (-(-slots // 2), 2, 64)
        return (RealKvSource(shape=shape, dtype="int4", page_size=2, num_bytes_per_token=32, read_bytes=32),), ((shape, "int4"),)
    if name == "pageless":
        return (RealKvSource(shape=(0, 64), dtype="uint8", page_size=4, num_bytes_per_token=16, read_bytes=16),), (((0, 64), "uint8"),)
    if name == "three":  # packed with a gap at the end of each row, strided runs whose bytes fill no whole word, and one slot a row
        packed, strided, row = (-(-slots // 4), 144), (2, slots, 3, 4), (slots, 8)
        sources = (
            RealKvSource(shape=packed, dtype="int8", page_size=4, num_bytes_per_token=32, read_bytes=16),
            RealKvSource.general(
                buffer_shape=strided,
                buffer_dtype="float32",
                pages=slots,
                page_size=1,
                page_stride=48,
                token_stride=0,
                run_counts=(2, 3),
                run_strides=(slots * 48, 16),
                run_bytes=8,
                read_bytes=44,
            ),
            RealKvSource(shape=row, dtype="float16", page_size=1, num_bytes_per_token=16, read_bytes=16),
        )
        return sources, ((packed, "int8"), (strided, "float32"), (row, "float16"))
    assert name == "shared"  # two layers of one buffer with an offset, and a source that reads nothing
    shape = (2, slots, 24)
    layer = {"buffer_shape": shape, "buffer_dtype": "uint8", "pages": slots, "page_size": 1, "page_stride": 24, "token_stride": 0}
    sources = (
        RealKvSource.general(**layer, run_bytes=16, buffer_index=0),
        RealKvSource.general(**layer, run_bytes=16, read_bytes=0, buffer_index=0),
        RealKvSource.general(**layer, run_bytes=23, offset=slots * 24 + (1 if slots else 0), buffer_index=0),
    )
    return sources, ((shape, "uint8"),)


def random_buffer(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """A buffer of any bits (NaNs and all); elements of four bits hold one a byte here."""
    import ml_dtypes

    if dtype == "int4":
        return rng.integers(-8, 8, shape).astype(ml_dtypes.int4)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return rng.integers(0, 256, size, np.uint8).view(kind).reshape(shape)


@dataclasses.dataclass(frozen=True)
class World:
    """A valid state. chains: slots of each request by position. entries: (slot, token, position, previous slot, batch row) of all."""

    records: NDArray[np.uint32]
    tags: NDArray[np.uint32] | None
    buffers: tuple[NDArray[Any], ...]
    chains: tuple[tuple[int, ...], ...]
    tokens: NDArray[np.int64]  # [requests, positions]
    namespaces: NDArray[np.int64]  # [requests]

    @functools.cached_property
    def entries(self) -> list[tuple[int, int, int, int, int]]:
        return [
            (slot, int(self.tokens[r, p]), p, chain[p - 1] if p else -1, r)
            for r, chain in enumerate(self.chains)
            for p, slot in enumerate(chain)
        ]


@functools.lru_cache(maxsize=512)
def world(
    *, slots: int, words: int, sources: str, mode: int, tags: bool, narrow: bool, chains: tuple[tuple[int, ...], ...], seed: int
) -> World:
    """A pool whose requests were written by the reference. narrow: tokens and namespaces fit int32."""
    rng = np.random.default_rng(seed)
    descriptors, shapes = sources_of(sources, slots)
    buffers = tuple(random_buffer(rng, shape, dtype) for shape, dtype in shapes)
    top = 2**31 if narrow else 2**63
    tokens = rng.integers(-top, top - 1, (max(len(chains), 1), TOKENS), np.int64)
    namespaces = rng.integers(-top, top - 1, len(chains), np.int64)
    locations = [slot for chain in chains for slot in chain]
    written = reference.write(
        records=np.zeros((slots, words), np.uint32),
        log=io.empty_log(0),
        plan=WritePlan(
            write_offsets=np.cumsum([0, *map(len, chains)]),
            write_seed_slot_indices=np.full(len(chains), -1),
            write_num_valid_reqs=np.array([len(chains)], np.int32),
            req_pool_indices=np.zeros(0, np.int32),
        ),
        input_ids=np.array([token for r, chain in enumerate(chains) for token in tokens[r, : len(chain)]], np.int64),
        positions=np.array([p for chain in chains for p in range(len(chain))], np.int64),
        out_cache_loc=np.array(locations, np.int64),
        launch_tag=0,
        real_kv_hash_mode=mode,
        real_kv_sources=descriptors,
        real_kv_buffers=buffers,
        source_tags=np.zeros((slots, len(descriptors)), np.uint32) if tags else None,
        request_ids=np.arange(100, 100 + len(chains)),
        namespaces=namespaces,
        padding_slot=None,
        step=3,
    )
    return World(written.records, written.source_tags, buffers, chains, tokens, namespaces)


def permutation(slots: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(slots).tolist()


def loose_chains(slots: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Requests in slots of no particular order; none in a pool that is too small."""
    if slots < SLOTS:
        return ()
    order = permutation(slots, seed)
    return tuple(tuple(order[r * TOKENS : (r + 1) * TOKENS]) for r in range(REQUESTS))


# ---------------------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True)
class Case:
    """One example of an operation: keyword arguments in NumPy, and the static ones, which are hashable."""

    op: str
    arrays: dict[str, Any]
    static: dict[str, Any]
    x64: bool

    def replaced(self, **arrays: Any) -> Case:
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})

    def run_reference(self) -> Any:
        return getattr(reference, self.op)(**reference_arguments(self.arrays), **self.static)


def reference_arguments(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the library as the reference takes them: a table is an array and some numbers there."""
    table = arrays.get("req_to_token")
    out = {name: value for name, value in arrays.items() if name != "req_to_token"}
    if isinstance(table, RowTable):
        out.update(req_to_token=table.table)
    elif isinstance(table, BlockTable):
        out.update(req_to_token=table.table, table_kind=TableKind.BLOCKS, table_page_size=table.page_size)
    elif isinstance(table, FlatTable):
        out.update(req_to_token=table.table, table_kind=TableKind.FLAT, table_starts=table.starts)
    elif isinstance(table, IdentityTable):
        numbers = {"table_rows": table.rows, "table_width": table.width}
        out.update(req_to_token=np.zeros(0, np.int32), table_kind=TableKind.IDENTITY, **numbers)
    return out


def plain_log(case: Case) -> Case:
    """The case with an empty log that has room for every row."""
    tokens = case.arrays["input_ids"].shape[0] if case.op == "write" else 0
    rows = 64 + 3 * tokens
    if case.op == "write":
        # Segments may overlap: every request can visit every token.
        rows += 3 * tokens * min(case.arrays["plan"].write_seed_slot_indices.shape[0], REQUESTS + 1)
        rows += 3 * case.arrays["plan"].write_seed_slot_indices.shape[0]
    elif case.op == "verify":
        rows += case.arrays["plan"].slot_indices.shape[0] + case.arrays["plan"].row_status.shape[0]
    else:
        rows += (1 + 2 * SLOTS) * case.arrays["req_pool_indices"].shape[0]
    return case.replaced(log=io.empty_log(rows))


# ---------------------------------------------------------------------------------------------- comparison


def launch_rows(case: Case) -> list[io.Row]:
    """All rows that a launch reports, by the reference."""
    log = plain_log(case).run_reference().log
    index = int(log.write_index[0])
    assert index <= log.ring.shape[0], "plain_log gives too few rows"
    return io.rows_of(log.ring, 0, index)


def assert_log(before: ViolationLog, got: ViolationLog, wanted: ViolationLog, rows: list[io.Row]) -> None:
    for name in ("slot_run_counter", "kernel_run_counter"):
        assert io.counters_of(getattr(got, name)) == io.counters_of(getattr(wanted, name)), name
    np.testing.assert_array_equal(got.write_index, wanted.write_index, err_msg="write_index")
    capacity, start, end = before.ring.shape[0], int(before.write_index[0]), int(got.write_index[0])
    assert got.ring.shape == before.ring.shape and got.ring.dtype == np.uint32 and got.write_index.dtype == np.int32
    first, last = max(0, min(start, capacity)), max(0, min(end, capacity))
    for kept in (slice(0, first), slice(last, None)):
        np.testing.assert_array_equal(got.ring[kept], before.ring[kept], err_msg="rows that are not the launch's")
    stored = io.rows_of(got.ring, first, last)
    if max(start, 0) + len(rows) <= capacity:
        io.assert_same_rows(stored, rows)
    else:
        assert len(stored) == capacity - first
        io.assert_among(stored, rows)
    assert end in (start, min(max(start, 0) + len(rows), INT32_MAX))


def assert_arrays(got: Any, wanted: Any, names: str) -> None:
    for name in names.split():
        a, b = getattr(got, name), getattr(wanted, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def assert_plan(got: Any, wanted: Any) -> None:
    """The specified part of a plan: entries only below num_valid, and none where the plan overflowed."""
    assert_arrays(got.verify, wanted.verify, "num_valid enable row_status req_pool_indices")
    assert_arrays(got.write, wanted.write, "write_offsets write_seed_slot_indices write_num_valid_reqs req_pool_indices")
    live = int(wanted.verify.num_valid[0]) * int(wanted.verify.enable[0])
    for name in ("slot_indices", "expected_tokens", "expected_positions", "prev_slot_indices", "batch_rows"):
        a, b = getattr(got.verify, name), getattr(wanted.verify, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        np.testing.assert_array_equal(a[:live], b[:live], err_msg=name)


def assert_same_verify(case: Case, got: Any, wanted: Any, rows: list[io.Row]) -> None:
    assert_log(case.arrays["log"], got.log, wanted.log, rows)
    assert_arrays(got, wanted, "verdict first_bad_position unattested first_unattested_position")
    buffers = case.arrays["real_kv_buffers"] if case.static["pass_through"] else ()
    assert len(got.real_kv_buffers) == len(buffers)
    for a, b in zip(got.real_kv_buffers, buffers, strict=True):
        assert a.tobytes() == b.tobytes()


def assert_same(case: Case, got: Any) -> None:
    """``got`` is what the reference gives for the case."""
    wanted = case.run_reference()
    if case.op == "plan":
        assert_plan(got, wanted)
    elif case.op == "scatter_req_token_ids":
        assert_arrays(got, wanted, "pool status")
    elif case.op == "write":
        assert_arrays(got, wanted, "records verdict")
        assert (got.source_tags is None) == (wanted.source_tags is None)
        if wanted.source_tags is not None:
            assert_arrays(got, wanted, "source_tags")
        assert_log(case.arrays["log"], got.log, wanted.log, launch_rows(case))
    else:
        assert_same_verify(case, got, wanted, launch_rows(case))


# ---------------------------------------------------------------------------------------------- batches and plans


TABLES: dict[str, tuple[Any, ...]] = {
    "rows": ("rows", 4, 8),
    "blocks": ("blocks", 4, 2, 4),  # rows, blocks a row, slots a block
    "flat": ("flat", 17),
    "identity": ("identity", 4, 6),
    "rows-none": ("rows", 0, 8),
    "rows-narrow": ("rows", 4, 0),
    "flat-none": ("flat", 0),
    "identity-none": ("identity", 0, 1),
    "blocks-huge": ("blocks", 2, 1, 2**30),
    "identity-huge": ("identity", 1, INT32_MAX),
}
HUGE_TABLES = ("blocks-huge", "identity-huge")
"""Tables whose positions are too many to visit: for plans with a capacity only."""

CONTEXT = 7
"""Columns of the expected tokens, in five rows."""


def table_chains(table: str, slots: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Slots of the requests in a pool of a table's layout, before an index mapping."""
    kind = TABLES[table][0]
    if slots < SLOTS or table in HUGE_TABLES:
        return ()
    if kind == "blocks":
        size = TABLES[table][3]
        pages = permutation(slots // size, seed)
        return tuple(tuple(pages[2 * r + p // size] * size + p % size for p in range(TOKENS)) for r in range(REQUESTS))
    if kind == "identity":
        return tuple(tuple((r + 1) * 6 + p for p in range(TOKENS)) for r in range(REQUESTS))
    return loose_chains(slots, seed)


BATCH_AXES: dict[str, Sequence[Any]] = {
    "bs": (3, 1, 0),
    "form": PLAN_FORMS,
    "table": tuple(TABLES),
    "mapping": (False, True),
    "window": (0, 3, INT32_MAX),
    "expected": (False, True),
    "offset": (0, 1, -2, INT32_MAX),
    "padding_req": PADDING,
}


def can_batch(setting: Setting) -> bool:
    return setting["mapping"] or setting["window"] == 0


def _batch(values: Values, setting: Setting, seed: int, tokens: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that plan and the fused verify share."""
    bs, rng = setting["bs"], values.rng
    kind, *sizes = TABLES[setting["table"]]
    chains = table_chains(setting["table"], SLOTS, seed)
    rows = bs if kind == "flat" else sizes[0]
    width = {"rows": lambda: sizes[1], "blocks": lambda: sizes[1] * sizes[2], "flat": lambda: TOKENS, "identity": lambda: sizes[1]}[kind]()
    first_row = 0 if rows == 1 else 1

    def table_of(base: NDArray[np.int64], fill: Callable[[int, tuple[int, ...]], None]) -> NDArray[Any]:
        for r, chain in enumerate(chains):
            fill(r, chain)
        return values.table("table", base, (SLOTS, 2**30, 2**31) if kind == "blocks" else (SLOTS,))

    if kind == "rows":
        base = rng.integers(0, SLOTS, sizes)

        def fill(r: int, chain: tuple[int, ...]) -> None:
            if min(sizes) > 0:
                base[r + 1, :TOKENS] = chain

        table: Any = RowTable(table_of(base, fill))
    elif kind == "blocks":
        base = rng.integers(0, SLOTS // min(sizes[2], SLOTS), sizes[:2])

        def fill(r: int, chain: tuple[int, ...]) -> None:
            base[r + 1] = [chain[0] // sizes[2], chain[sizes[2]] // sizes[2]]

        table = BlockTable(table_of(base, fill), sizes[2])
    elif kind == "flat":
        base = rng.integers(0, SLOTS, sizes[0])

        def fill(r: int, chain: tuple[int, ...]) -> None:
            if sizes[0]:
                base[r * TOKENS : (r + 1) * TOKENS] = chain

        starts = np.minimum(np.arange(bs + 1) * TOKENS, sizes[0])
        table = FlatTable(table_of(base, fill), values.operand("table", starts, (sizes[0],)))
    else:
        table = IdentityTable(rows=sizes[0], width=sizes[1])

    longest = width + 2 * (kind == "identity")  # a ring
    lengths = np.minimum(rng.choice([TOKENS, TOKENS, 2, 0, longest] if bs <= MANY else [1, 0], bs), longest).astype(np.int64)
    row_near = (rows, rows, setting["padding_req"] or 0)
    arrays = {
        "req_pool_indices": values.operand("req_pool_indices", first_row + np.arange(bs) % REQUESTS, row_near),
        "prefix_lens": values.operand("prefix_lens", lengths, (width, width + 2)),
        "req_to_token": table,
    }
    static = {
        "swa_window_size": setting["window"],
        "kv_token_id_vs_position_offset": setting["offset"],
        "padding_req": setting["padding_req"],
    }
    if setting["mapping"]:
        arrays["full_to_swa_index_mapping"] = values.operand("mapping", permutation(SLOTS, seed + 1), (SLOTS,))
    if setting["expected"]:
        expected, offset = rng.integers(0, 1000, (5, CONTEXT)), setting["offset"]
        for r in range(REQUESTS):
            for p in range(TOKENS):
                if 0 <= p + offset < CONTEXT:
                    expected[r + first_row, p + offset] = tokens[r % len(tokens), p]
        arrays["req_to_verify_expected_tokens"] = values.table("expected", expected, (0,))
        valid = rng.choice([max(0, min(TOKENS + offset, CONTEXT)), CONTEXT, CONTEXT + 3], bs)
        arrays["req_to_verify_expected_tokens_valid_lens"] = values.operand("valid_lens", valid, (CONTEXT,))
    return arrays, static


PLAN_AXES = {**BATCH_AXES, "more_rows": (0, 2), "capacity": ("ample", "tight", "none")}


@st.composite
def plan_cases(draw: Draw, setting: Setting) -> Case:
    values = Values(draw, setting["form"], pairs=False)
    arrays, static = _batch(values, setting, draw(st.integers(0, 3)), np.arange(100, 100 + REQUESTS * TOKENS).reshape(REQUESTS, TOKENS))
    bs = setting["bs"]
    extends = values.rng.choice([0, 1, 2, 3, INT32_MAX // 2], bs)
    arrays["extend_seq_lens"] = values.operand("extend_seq_lens", extends, (INT32_MAX // 2, INT32_MAX, 2**62))
    static["write_req_capacity"] = bs + setting["more_rows"]
    static["verify_capacity"] = {"ample": max(MANY, 12 * bs), "tight": 5, "none": 0}[setting["capacity"]]
    return Case("plan", arrays, static, needs_x64(setting["form"]))


# ---------------------------------------------------------------------------------------------- verify


POOL_AXES: dict[str, Sequence[Any]] = {
    "slots": (SLOTS, 1, 0),
    "words": (8, 9, 12, 16, 20),
    "sources": SOURCES,
    "mode": tuple(RealKvHashMode)[::-1],
    "tags": (False, True),
    "padding_slot": PADDING,
    "extended": (True, False),
    "strict": (True, False),
    "ring": (64, 3, 0),
    "launch_tag": (0, 5, 11),
}

CHECK_AXES: dict[str, Sequence[Any]] = {
    **POOL_AXES,
    "rotate": (False, True),
    "check_token": (True, False),
    "namespaces": (True, False),
    "pass_through": (False, True),
}


def can_rotate(setting: Setting) -> bool:
    """A part of the sources needs several, and their tags."""
    return not setting["rotate"] or (setting["tags"] and setting["sources"] in ("three", "shared"))


def _world(setting: Setting, chains: tuple[tuple[int, ...], ...], seed: int) -> World:
    return world(
        slots=setting["slots"],
        words=setting["words"],
        sources=setting["sources"],
        mode=int(setting["mode"]),
        tags=setting["tags"],
        narrow=setting["form"] not in ("i64", "pairs", "pairs+x64"),
        chains=chains,
        seed=seed,
    )


def near_slots(setting: Setting) -> tuple[int, ...]:
    """Where slots become something else: the ends of the pool, and the padding slot."""
    padding = setting["padding_slot"]
    return (setting["slots"], SLOTS - 3, *(() if padding is None else (padding, padding)))


def _pool(values: Values, setting: Setting, there: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that every launch on records takes; bits of records and tags may be flipped."""
    records, tags = there.records.copy(), None if there.tags is None else there.tags.copy()
    if values.hostile:
        for array in (records, tags):
            if array is not None and array.size:
                flips = st.lists(st.tuples(st.integers(0, array.size - 1), st.integers(0, 31)), max_size=3)
                for word, bit in values.draw(flips):
                    array.reshape(-1)[word] ^= np.uint32(1 << bit)
        # Never written, all of it or but for the provenance: one slot of a chain or, from there on, all.
        blank = [(chain, int(values.rng.integers(TOKENS))) for chain in there.chains]
        for slot in (slot for chain, p in blank for slot in chain[p : TOKENS if values.draw(st.booleans()) else p + 1]):
            records[slot, : values.draw(st.sampled_from((0, 0, 8, setting["words"])))] = 0
            if tags is not None and values.draw(st.booleans()):
                tags[slot] = values.bits(tags[slot].shape)
    arrays = {
        "records": records,
        "log": values.log(setting["ring"]),
        "real_kv_buffers": there.buffers,
        "step": values.word(),
        "shard": values.word(),
    }
    if tags is not None:
        arrays["source_tags"] = tags
    static = {
        "launch_tag": setting["launch_tag"],
        "real_kv_hash_mode": int(setting["mode"]),
        "real_kv_sources": sources_of(setting["sources"], setting["slots"])[0],
        "padding_slot": setting["padding_slot"],
        "extended_checks": setting["extended"],
        "strict": setting.get("strict", True),
    }
    return arrays, static


def _check(values: Values, setting: Setting, there: World, bs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that both forms of verify take."""
    arrays, static = _pool(values, setting, there)
    if setting["namespaces"]:
        base = [int(there.namespaces[r % REQUESTS]) if len(there.namespaces) else 0 for r in range(bs)]
        arrays["namespaces"] = values.operand("namespaces", base)
    if setting["rotate"]:
        window = values.rng.integers(0, 4, 2).tolist()
        arrays["source_window"] = as_operand(values.replaced(window, wild("i32", (len(static["real_kv_sources"]),))), "i32")
    static["check_verify_expected_token"] = setting["check_token"]
    static["pass_through"] = setting["pass_through"]
    return arrays, static


VERIFY_AXES = {**CHECK_AXES, "form": FORMS, "bs": (3, 1, 0), "entries": (14, 1, 0), "rows_known": (True, False)}


@st.composite
def verify_cases(draw: Draw, setting: Setting) -> Case:
    values = Values(draw, setting["form"])
    seed = draw(st.integers(0, 3))
    there = _world(setting, loose_chains(setting["slots"], seed), seed)
    bs, n = setting["bs"], setting["entries"]
    arrays, static = _check(values, setting, there, bs)
    some = there.entries or [(0, 5, 0, -1, 0)]
    picked = [some[k] for k in values.rng.integers(0, len(some), n)]
    slots, tokens, positions, previous, rows = ([entry[k] for entry in picked] for k in range(5))
    near = near_slots(setting)
    status = values.replaced([0] * bs, _STATUS)
    arrays["plan"] = VerifyPlan(
        slot_indices=values.operand("slot_indices", slots, near),
        expected_tokens=values.operand("expected_tokens", [t if values.rng.integers(3) else -1 for t in tokens], (0,)),
        expected_positions=values.operand("expected_positions", positions, (TOKENS,)),
        prev_slot_indices=values.operand("prev_slot_indices", previous, near),
        batch_rows=values.operand("batch_rows", rows if setting["rows_known"] else [], (bs,)),
        num_valid=values.count(n, (n,)),
        enable=values.count(1),
        row_status=np.array(status, np.int32),
        req_pool_indices=values.operand("req_pool_indices", range(1, bs + 1)),
    )
    return Case("verify", arrays, static, needs_x64(setting["form"]))


FUSED_AXES = {
    **CHECK_AXES,
    **BATCH_AXES,
    "stride": (1, 2, 3, INT32_MAX),
    "table": tuple(name for name in TABLES if name not in HUGE_TABLES),
}


def can_fuse(setting: Setting) -> bool:
    return can_rotate(setting) and can_batch(setting)


@st.composite
def fused_cases(draw: Draw, setting: Setting) -> Case:
    values = Values(draw, setting["form"], pairs=False)
    seed = draw(st.integers(0, 3))
    chains = table_chains(setting["table"], setting["slots"], seed)
    if setting["mapping"]:
        mapping = permutation(SLOTS, seed + 1)
        chains = tuple(tuple(mapping[slot] for slot in chain) for chain in chains)
    there = _world(setting, chains, seed)
    arrays, static = _check(values, setting, there, setting["bs"])
    batch, batch_static = _batch(values, setting, seed, there.tokens)
    static = {**static, **batch_static, "position_stride": setting.get("stride", 1)}
    return Case("verify_fused", {**arrays, **batch}, static, needs_x64(setting["form"]))


# ---------------------------------------------------------------------------------------------- write and scatter


GIVEN = ("all", "some", "none")
"""How many requests have a value of an optional operand of a write."""

WRITE_AXES = {
    **POOL_AXES,
    "form": FORMS,
    "rows": (3, 1, 0),
    "tokens": (14, 1, 0),
    "asserts": (True, False),
    "chain_assert": (True, False),
    "req_pool": GIVEN,
    "request_ids": GIVEN,
    "namespaces": GIVEN,
    "flags": (0, 2, 2**32 - 1),
}


@st.composite
def write_cases(draw: Draw, setting: Setting, *, in_order: bool, cuts: bool = True) -> Case:
    """in_order: requests of the launch run one after the other, so that they may touch each other's slots. cuts: of a large batch."""
    values = Values(draw, setting["form"])
    rng, seed = values.rng, draw(st.integers(0, 3))
    there = _world(setting, loose_chains(setting["slots"], seed), seed)
    arrays, static = _pool(values, setting, there)
    rows, n, slots = setting["rows"], setting["tokens"], setting["slots"]
    near = near_slots(setting)

    bounds = np.sort(rng.integers(0, n + 1, rows + 1)) if rows > MANY else np.linspace(0, n, rows + 1).astype(np.int64)
    last = [chain[-1] for chain in there.chains]
    seeds = [int(last[r % len(last)]) if last and r % 3 < 2 else -1 for r in range(rows)]
    kind = kind_of(setting["form"], "write_offsets")
    if rows > MANY:  # one cut is enough: each makes a request visit many tokens
        offsets = bounds.tolist()
        for index, value in draw(st.dictionaries(st.integers(0, rows), wild(kind, (n,)), max_size=2)).items():
            offsets[index] = value if values.hostile and cuts else offsets[index]
    else:
        offsets = values.replaced(bounds, wild(kind, (n,)))
    busy = {slot for chain in there.chains for slot in chain}
    free = [slot for slot in permutation(slots, seed + 5) if slot not in busy]
    locations = [free[i] if i < len(free) else int(rng.integers(-1, max(slots, 1))) for i in range(n)]
    locations = values.replaced(locations, wild(kind_of(setting["form"], "out_cache_loc"), near))
    begins = np.repeat(bounds[:-1], np.diff(bounds))
    positions = TOKENS + np.arange(n) - np.concatenate([begins, np.zeros(n - begins.size, np.int64)])
    tokens = rng.integers(-(2**31), 2**31, n)
    input_ids = values.operand("input_ids", tokens)
    written = values.operand("positions", positions, (TOKENS,))
    seed_slots = values.replaced(seeds, wild(kind_of(setting["form"], "seeds"), near))
    num_valid = values.count(rows, (rows,))
    if not in_order:
        locations, seed_slots = separated(locations, seed_slots, offsets, int(num_valid[0]), slots)

    def given(name: str, base: Sequence[int]) -> NDArray[Any] | None:
        counts = {"all": rows, "some": max(rows - 1, 0), "none": 0}
        some = max(counts[setting[name]], counts[setting["req_pool"]])  # every request of the batch has its values
        return None if setting[name] == "none" else values.operand(name, list(base)[:some])

    named = given("req_pool", range(1, rows + 1))
    arrays["plan"] = WritePlan(
        write_offsets=as_operand(offsets, kind),
        write_seed_slot_indices=as_operand(seed_slots, kind_of(setting["form"], "seeds")),
        write_num_valid_reqs=num_valid,
        req_pool_indices=np.zeros(0, np.int32) if named is None else named,
    )
    arrays["input_ids"], arrays["positions"] = input_ids, written
    arrays["out_cache_loc"] = as_operand(locations, kind_of(setting["form"], "out_cache_loc"))
    if setting["asserts"]:
        arrays["expected_input_tokens"] = values.operand("expected_input_tokens", tokens)
        arrays["expected_input_positions"] = values.operand("expected_input_positions", positions, (TOKENS,))
    if setting["chain_assert"]:
        arrays["enable_chain_position_assert"] = values.count(1)
    for name, base in (("request_ids", range(40, 40 + rows)), ("namespaces", [0] * rows)):
        operand = given(name, base)
        if operand is not None:
            arrays[name] = operand
    static["enable_write_input_assert"] = setting["asserts"]
    static["record_flags"] = setting["flags"]
    return Case("write", arrays, static, needs_x64(setting["form"]))


def segments(offsets: Sequence[int], valid: int, tokens: int) -> list[range]:
    """The tokens that each request of a write launch visits."""
    rows = max(0, min(valid, len(offsets) - 1))
    return [range(max(offsets[r], 0), max(max(offsets[r], 0), min(offsets[r + 1], tokens))) for r in range(rows)]


def separated(
    locations: Sequence[int], seeds: Sequence[int], offsets: Sequence[int], valid: int, slots: int
) -> tuple[list[int], list[int]]:
    """Slots and seeds of a write launch in which no request touches a slot of another."""
    locations, seeds = list(locations), list(seeds)
    owner: dict[int, int] = {}
    visited: dict[int, int] = {}
    parts = segments(offsets, valid, len(locations))
    for r, part in enumerate(parts):
        if len(part) and 0 <= seeds[r] < slots and owner.setdefault(seeds[r], r) != r:
            seeds[r] = -1
    for r, part in enumerate(parts):
        for i in part:
            if 0 <= locations[i] < slots and (visited.setdefault(i, r) != r or owner.setdefault(locations[i], r) != r):
                locations[i] = -1
    return locations, seeds


SCATTER_AXES: dict[str, Sequence[Any]] = {
    "tokens": (14, 1, 0),
    "bs": (3, 1, 0),
    "pool": ((4, 6), (4, 0), (0, 6), (1, 1)),
    "form": FORMS,
}


@st.composite
def scatter_cases(draw: Draw, setting: Setting, *, in_order: bool) -> Case:
    values = Values(draw, setting["form"])
    n, bs, (rows, width) = setting["tokens"], setting["bs"], setting["pool"]
    bounds = np.sort(values.rng.integers(0, n + 1, bs + 1))
    base = values.rng.integers(-1, max(rows, 1), bs)
    named = values.replaced(base, wild(kind_of(setting["form"], "req_pool_indices"), (rows,)))
    if not in_order:  # no row twice
        named = [row if row not in named[:r] else -1 for r, row in enumerate(named)]
    arrays = {
        "flat_in": values.operand("flat_in", values.rng.integers(-(2**31), 2**31, n)),
        "offsets": values.operand("offsets", bounds, (n,)),
        "req_pool_indices": as_operand(named, kind_of(setting["form"], "req_pool_indices")),
        "pool_out": values.bits((rows, width)).view(np.int32),
    }
    return Case("scatter_req_token_ids", arrays, {}, needs_x64(setting["form"]))


# ---------------------------------------------------------------------------------------------- traffic


@dataclasses.dataclass
class Request:
    """slots: of the full pool, by position. tokens: the whole prompt, and what was decoded. checked: slots written before this step."""

    tokens: list[int]
    slots: list[int]
    namespace: int
    checked: int = 0


class Engine:
    """A small serving engine with a canary: two pools (full attention, and a window), shared prefixes, chunks, decoding, reuse of slots.

    A slot belongs to as many requests as hold it. A slot of the window pool is given up when its pool runs short and no request has it
    in its window; the mapping is 0, the padding slot, then.
    """

    SLOTS, WINDOW_SLOTS, BS, WIDTH, WINDOW, CHUNK = 40, 26, 4, 12, 4, 4
    LAYER, PAGE = (40, 2, 8), 4

    def __init__(self, run: Callable[[Case], Any], seed: int) -> None:
        self.run = run
        self.rng = rng = np.random.default_rng(seed)
        self.free = {"full": list(range(1, self.SLOTS)), "window": list(range(1, self.WINDOW_SLOTS))}
        self.live: list[Request | None] = [None] * self.BS
        self.cached: list[Request] = []
        self.mapping = np.zeros(self.SLOTS, np.int32)
        self.expected = np.zeros((self.BS + 1, self.WIDTH), np.int32)
        full, window = sources_of_engine()
        self.sources = {"full": full, "window": window}
        self.buffers = {
            "full": [
                random_buffer(rng, self.LAYER, "bfloat16"),
                random_buffer(rng, self.LAYER, "bfloat16"),
                random_buffer(rng, (self.SLOTS // self.PAGE, self.PAGE * 16 + 16), "int8"),
            ],
            "window": [random_buffer(rng, (self.WINDOW_SLOTS, 16), "uint8")],
        }
        self.records = {"full": np.zeros((self.SLOTS, 16), np.uint32), "window": np.zeros((self.WINDOW_SLOTS, 8), np.uint32)}
        self.tags: np.ndarray | None = np.zeros((self.SLOTS, 3), np.uint32)
        self.log = {"full": io.empty_log(64), "window": io.empty_log(64)}
        self.number = 0

    # ------------------------------------------------------------------------------------------ slots

    def _holders(self) -> list[Request]:
        return [request for request in [*self.live, *self.cached] if request is not None]

    def _give_up(self, slot: int) -> None:
        if self.mapping[slot]:
            self.free["window"].append(int(self.mapping[slot]))
            self.mapping[slot] = 0

    def _collect(self) -> None:
        """Free what no request holds."""
        held = {slot for request in self._holders() for slot in request.slots}
        for slot in set(range(1, self.SLOTS)) - held - set(self.free["full"]):
            self._give_up(slot)
            self.free["full"].append(slot)

    def _make_room(self, pool: str, count: int) -> bool:
        if pool == "window" and len(self.free[pool]) < count:
            needed = {slot for request in self._holders() for slot in request.slots[max(0, request.checked - self.WINDOW) :]}
            for request in self._holders():
                for slot in request.slots:
                    if slot not in needed:
                        self._give_up(slot)
        while len(self.free[pool]) < count and self.cached:
            self.cached.pop(0)
            self._collect()
        return len(self.free[pool]) >= count

    def _take(self, pool: str) -> int:
        return self.free[pool].pop(int(self.rng.integers(len(self.free[pool]))))

    # ------------------------------------------------------------------------------------------ a step

    def _start(self, amount: int) -> Request:
        """A new request, which may share a prefix with one that is there."""
        length = 1 + amount % (self.WIDTH - 2)
        donors = self._holders()
        if donors and amount % 3:
            donor = donors[int(self.rng.integers(len(donors)))]
            shared = min(len(donor.slots), length, 1 + amount // 2)
            if shared and all(self.mapping[slot] for slot in donor.slots[max(0, shared - self.WINDOW) : shared]):
                tokens = donor.tokens[:shared] + self.rng.integers(0, 50, max(1, length - shared)).tolist()
                return Request(tokens, donor.slots[:shared], donor.namespace)
        return Request(self.rng.integers(0, 50, length).tolist(), [], int(self.rng.integers(0, 2)) * 2**40)

    def step(self, actions: Sequence[int]) -> None:
        """One step: check, let each batch row do what its action says, stamp, check again."""
        starts, new = [0] * self.BS, [0] * self.BS
        for r, action in enumerate(actions):
            request = self.live[r]
            if request is not None and len(request.slots) == len(request.tokens):
                if action % 7 == 0 or len(request.tokens) == self.WIDTH:
                    self.live[r] = None
                    if action % 2:
                        self.cached.append(request)
                    self._collect()
                    continue
                if action % 7 > 1:
                    request.tokens.append(int(self.rng.integers(0, 50)))
            elif request is None and action % 4:
                self.live[r] = request = self._start(action)
        for request in self._holders():
            request.checked = len(request.slots)
        for r, action in enumerate(actions):
            request = self.live[r]
            if request is None:
                continue
            starts[r] = request.checked
            wanted = min(len(request.tokens) - starts[r], 1 + action % self.CHUNK)
            if self._make_room("full", wanted) and self._make_room("window", wanted):
                new[r] = wanted
                for _ in range(wanted):
                    slot = self._take("full")
                    self.mapping[slot] = self._take("window")
                    request.slots.append(slot)

        self.scatter()
        self.check([request.slots[: request.checked] if request else [] for request in self.live])
        for request, start in zip(self.live, starts, strict=True):
            for slot in request.slots[start:] if request else []:
                self.fill(slot)
        for pool in ("full", "window"):
            self._stamp(pool, starts, new)
        self.check([request.slots if request else [] for request in self.live])
        self.number += 1

    def fill(self, slot: int) -> None:
        """What the model does: new bytes for a slot of both pools."""
        for buffer in self.buffers["full"][:2]:
            buffer[slot] = random_buffer(self.rng, self.LAYER[1:], "bfloat16")
        packed = self.buffers["full"][2]
        page, token = divmod(slot, self.PAGE)
        packed[page, token * 16 : token * 16 + 16] = self.rng.integers(-128, 128, 16)
        self.buffers["window"][0][self.mapping[slot]] = self.rng.integers(0, 256, 16)

    # ------------------------------------------------------------------------------------------ launches

    def _rows(self) -> NDArray[np.int32]:
        return np.array([0 if request is None else r + 1 for r, request in enumerate(self.live)], np.int32)

    def table(self) -> NDArray[np.int32]:
        table = np.zeros((self.BS + 1, self.WIDTH), np.int32)
        for r, request in enumerate(self.live):
            if request is not None:
                table[r + 1, : len(request.slots)] = request.slots
        return table

    def scatter(self) -> None:
        tokens = [[] if request is None else request.tokens for request in self.live]
        flat = np.zeros(self.BS * self.WIDTH, np.int32)
        joined = [token for part in tokens for token in part]
        flat[: len(joined)] = joined
        arrays = {
            "flat_in": flat,
            "offsets": np.cumsum([0, *map(len, tokens)]).astype(np.int32),
            "req_pool_indices": self._rows(),
            "pool_out": self.expected,
        }
        result = self.run(Case("scatter_req_token_ids", arrays, {}, False))
        assert not result.status.any()
        self.expected = np.asarray(result.pool)

    def _batch(self, pool: str, prefixes: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {
            "req_pool_indices": self._rows(),
            "prefix_lens": np.array(prefixes, np.int32),
            "req_to_token": RowTable(self.table()),
            "req_to_verify_expected_tokens": self.expected,
            "req_to_verify_expected_tokens_valid_lens": np.array(prefixes, np.int32),
        }
        if pool == "window":
            arrays["full_to_swa_index_mapping"] = self.mapping
        return arrays, {"swa_window_size": self.WINDOW if pool == "window" else 0}

    def _plan(self, pool: str, prefixes: Sequence[int], new: Sequence[int]) -> Plan:
        arrays, static = self._batch(pool, prefixes)
        arrays["extend_seq_lens"] = np.array(new, np.int32)
        static.update(verify_capacity=self.BS * self.WIDTH, write_req_capacity=self.BS)
        return self.run(Case("plan", arrays, static, False))

    def _launch(self, pool: str, tag: int) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {
            "records": self.records[pool],
            "log": self.log[pool],
            "real_kv_buffers": tuple(self.buffers[pool]),
            "namespaces": as_operand([request.namespace if request else 0 for request in self.live], "pairs"),
            "step": np.uint32(self.number),
        }
        if pool == "full":
            arrays["source_tags"] = self.tags
        static = {"launch_tag": tag, "real_kv_hash_mode": int(RealKvHashMode.ALL), "real_kv_sources": self.sources[pool]}
        return arrays, static

    def check(self, slots: Sequence[Sequence[int]]) -> None:
        """Verify what the batch has written so far: the full pool by a plan, the window pool without one."""
        prefixes = [len(part) for part in slots]
        self.verdicts = {}
        for pool, tag in (("full", 0), ("window", 6)):
            arrays, static = self._launch(pool, tag)
            static.update(check_verify_expected_token=True)
            if pool == "full":
                arrays["plan"] = self._plan(pool, prefixes, [0] * self.BS).verify
                result = self.run(Case("verify", arrays, static, False))
            else:
                batch, batch_static = self._batch(pool, prefixes)
                result = self.run(Case("verify_fused", {**arrays, **batch}, {**static, **batch_static}, False))
            self.log[pool] = result.log
            self.verdicts[pool] = [int(verdict) for verdict in result.verdict]

    def _stamp(self, pool: str, starts: Sequence[int], new: Sequence[int]) -> None:
        arrays, static = self._launch(pool, 2 if pool == "full" else 8)
        arrays["plan"] = self._plan(pool, starts, new).write
        tokens, positions, slots = (np.zeros(self.BS * self.CHUNK, np.int32) for _ in range(3))
        at = 0
        for request, start, count in zip(self.live, starts, new, strict=True):
            for p in range(start, start + count):
                assert request is not None
                slot = request.slots[p]
                tokens[at], positions[at], slots[at] = request.tokens[p], p, slot if pool == "full" else self.mapping[slot]
                at += 1
        arrays.update(input_ids=tokens, positions=positions, out_cache_loc=slots)
        arrays.update(expected_input_tokens=tokens, expected_input_positions=positions)
        arrays.update(enable_chain_position_assert=np.ones(1, np.int32), request_ids=np.arange(self.BS, dtype=np.int32))
        result = self.run(Case("write", arrays, {**static, "enable_write_input_assert": True}, False))
        self.log[pool], self.records[pool] = result.log, np.asarray(result.records)
        if pool == "full":
            self.tags = np.asarray(result.source_tags)

    # ------------------------------------------------------------------------------------------ faults

    @property
    def reported(self) -> int:
        return sum(int(log.write_index[0]) for log in self.log.values())

    def in_use(self, pool: str) -> list[int]:
        """Slots that a check reads."""
        if pool == "full":
            return sorted({slot for request in self.live if request for slot in request.slots})
        return sorted({int(self.mapping[slot]) for request in self.live if request for slot in request.slots[-self.WINDOW :]})

    def check_all(self) -> int:
        """Verify everything that is in use; the number of rows reported."""
        self.log = {"full": io.empty_log(64), "window": io.empty_log(64)}
        self.check([request.slots if request else [] for request in self.live])
        return self.reported

    def bytes_of(self, pool: str, slot: int) -> list[NDArray[np.uint8]]:
        """Views of the bytes of a slot that are hashed, a view a source."""
        if pool == "window":
            return [self.buffers[pool][0][slot].view(np.uint8)]
        page, token = divmod(slot, self.PAGE)
        packed = self.buffers[pool][2][page, token * 16 : token * 16 + 16].view(np.uint8)
        return [*(buffer[slot].reshape(-1).view(np.uint8) for buffer in self.buffers[pool][:2]), packed]


@functools.cache
def sources_of_engine() -> tuple[tuple[RealKvSource, ...], tuple[RealKvSource, ...]]:
    """Two layers with a slot a row, and one packed in pages with a gap; and one row a slot of the window pool."""
    layer = RealKvSource(shape=Engine.LAYER, dtype="bfloat16", page_size=1, num_bytes_per_token=32, read_bytes=32)
    pages = (Engine.SLOTS // Engine.PAGE, Engine.PAGE * 16 + 16)
    packed = RealKvSource(shape=pages, dtype="int8", page_size=Engine.PAGE, num_bytes_per_token=16, read_bytes=16)
    row = RealKvSource(shape=(Engine.WINDOW_SLOTS, 16), dtype="uint8", page_size=1, num_bytes_per_token=16, read_bytes=16)
    return (layer, layer, packed), (row,)


def traffic(steps: int) -> st.SearchStrategy[list[list[int]]]:
    """Actions of a few steps."""
    return st.lists(st.lists(st.integers(0, 27), min_size=Engine.BS, max_size=Engine.BS), min_size=steps // 2, max_size=steps)
