"""Tables four ways, for plan and fused verify: same slots, harmless sentinels, padding by argument alone, rings, and wrong tables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jax_kvcanary import (
    BlockTable,
    FailReason,
    FlatTable,
    IdentityTable,
    RowTable,
    Verdict,
    ViolationLog,
    WritePlan,
    decode_log,
    plan,
    verify_fused,
    write,
)

PAGE, PAGES = 4, 16
SLOTS = PAGE * PAGES
KINDS = ("rows", "blocks", "flat", "flat by token", "identity")
SENTINELS = (-1, 0, 2_000_000, "stale")
NONE: dict[str, Any] = {"padding_slot": None, "padding_req": None}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests and where their tokens are; rows: request row of each batch row; slots: of each batch row, in order of positions."""

    rows: list[int]
    slots: list[list[int]]

    @property
    def lens(self) -> list[int]:
        return [len(slots) for slots in self.slots]

    def table(self, kind: str, sentinel: Any = -1) -> Any:
        """A table of the kind that leads to the slots; whatever stands past a length is ``sentinel``."""
        stale = itertools.cycle([slot for slots in self.slots for slot in slots] or [0])

        def fill(count: int, *, block: bool = False) -> list[int]:
            values = [next(stale) if sentinel == "stale" else sentinel for _ in range(count)]
            return [value // PAGE if block and sentinel == "stale" else value for value in values]

        width = max([*self.lens, 0]) + 5
        own = dict(zip(self.rows, self.slots, strict=True))
        if kind == "rows":
            return RowTable(
                np.array([[*own.get(row, []), *fill(width - len(own.get(row, [])))] for row in range(max(self.rows) + 2)], np.int32)
            )
        if kind == "blocks":
            blocks = [[slot // PAGE for slot in own.get(row, [])[::PAGE]] for row in range(max(self.rows) + 2)]
            width = -(-width // PAGE) + 1
            return BlockTable(np.array([[*row, *fill(width - len(row), block=True)] for row in blocks], np.int32), PAGE)
        if kind.startswith("flat"):  # page-aligned with a tail, as engines build it, or token after token
            aligned = [slots + fill(-len(slots) % PAGE if kind == "flat" else 0) for slots in self.slots]
            flat = [slot for slots in aligned for slot in slots] + fill(7)
            return FlatTable(np.array(flat, np.int32), np.cumsum([0, *map(len, aligned)], dtype=np.int32))
        assert all(slot == row * PAGE * 2 + i for row, slots in own.items() for i, slot in enumerate(slots))
        return IdentityTable(rows=PAGES // 2, width=PAGE * 2)

    @property
    def arrays(self) -> dict[str, NDArray[np.int32]]:
        return {"req_pool_indices": np.array(self.rows, np.int32), "prefix_lens": np.array(self.lens, np.int32)}

    def entries(self) -> list[tuple[int, int, int, int]]:
        """(slot, previous slot, position, batch row) of every token."""
        return [
            (slot, slots[position - 1] if position else -1, position, row)
            for row, slots in enumerate(self.slots)
            for position, slot in enumerate(slots)
        ]


PAGED = Batch([3, 0, 5], [[20, 21, 22, 23, 8, 9, 10], [0, 1, 2], [60, 61, 62, 63]])
"""Request row 0 and page 0 are real."""
CONTIGUOUS = Batch([3, 0, 5], [list(range(24, 31)), list(range(3)), list(range(40, 48))])


def batch_for(kind: str) -> Batch:
    return CONTIGUOUS if kind == "identity" else PAGED


@functools.cache
def stamped(kind: str) -> Any:
    """Records of the batch of a kind."""
    return stamp(batch_for(kind)).records


def stamp(batch: Batch) -> Any:
    count = len(batch.rows)
    written = WritePlan(
        write_offsets=np.cumsum([0, *batch.lens], dtype=np.int32),
        write_seed_slot_indices=np.full(count, -1, np.int32),
        write_num_valid_reqs=np.array([count], np.int32),
        req_pool_indices=np.array(batch.rows, np.int32),
    )
    slots = np.array([slot for slots in batch.slots for slot in slots], np.int32)
    return write(
        records=np.zeros((SLOTS, 8), np.uint32),
        log=ViolationLog.allocate(ring_capacity=1),
        plan=written,
        input_ids=slots + 100,
        positions=np.array([position for n in batch.lens for position in range(n)], np.int32),
        out_cache_loc=slots,
        launch_tag=2,
        padding_slot=None,
    )


def check(table: Any, records: Any, implementation: str, **arguments: Any) -> Any:
    log = ViolationLog.allocate(ring_capacity=32)
    return verify_fused(records=records, log=log, req_to_token=table, launch_tag=0, implementation=implementation, **arguments)


def laid_out(table: Any, implementation: str, *, capacity: int = 32, **arguments: Any) -> Any:
    bs = len(arguments["req_pool_indices"])
    return plan(
        req_to_token=table, extend_seq_lens=np.full(bs, 2, np.int32), verify_capacity=capacity, write_req_capacity=bs + 1,
        implementation=implementation, **arguments,
    )  # fmt: skip


def entries_of(out: Any) -> list[tuple[int, int, int, int]]:
    count = int(out.verify.num_valid[0])
    columns = (out.verify.slot_indices, out.verify.prev_slot_indices, out.verify.expected_positions, out.verify.batch_rows)
    return list(zip(*(np.asarray(column)[:count].tolist() for column in columns), strict=True))


# ------------------------------------------------------------------------------------------------ the same slots


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [*(("ffi", kind) for kind in KINDS), *(("jax", kind) for kind in ("blocks", "flat", "identity"))],
    indirect=["implementation"],
)
def test_every_kind_leads_to_the_same_slots(kind: str, implementation: str) -> None:
    """Plan entries and seeds are those of the requests; the fused verify checks as many and finds nothing. All sentinels alike."""
    batch = batch_for(kind)
    logs = []
    for sentinel in SENTINELS:
        table = batch.table(kind, sentinel)
        out = laid_out(table, implementation, padding_req=None, **batch.arrays)
        assert entries_of(out) == batch.entries() and int(out.verify.enable[0]) == 1
        assert out.verify.row_status.tolist() == [0, 0, 0]
        assert out.write.write_seed_slot_indices.tolist() == [*(slots[-1] for slots in batch.slots), -1]
        result = check(table, stamped(kind), implementation, **batch.arrays, **NONE)
        assert result.verdict.tolist() == [Verdict.OK] * 3 and int(result.log.write_index[0]) == 0
        assert int(result.log.slot_run_counter[0, 0]) == sum(batch.lens)
        logs.append(result.log)
    for log in logs[1:]:
        jax.tree.map(np.testing.assert_array_equal, log, logs[0])


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("sentinel", SENTINELS)
def test_a_sentinel_before_the_length_is_looked_at(kind: str, sentinel: Any) -> None:
    """Lengths alone say which entries are valid: a -1, 0, 2,000,000 or stale slot within them is reported."""
    if kind.startswith("flat"):  # the last request is said to have one token more than were filled in
        bad, lens = 2, [4, 3, 5]
        table = PAGED.table(kind, sentinel)
        table = FlatTable(table.table, table.starts + np.array([0, 0, 0, 1], np.int32))
    else:  # the second page of the first request is not there
        bad, lens = 0, [5, 3, 4]
        table = dataclasses.replace(PAGED, slots=[PAGED.slots[0][:4], *PAGED.slots[1:]]).table(kind, sentinel)
    arrays = PAGED.arrays | {"prefix_lens": np.array(lens, np.int32)}
    result = check(table, stamped(kind), "auto", **arrays, **NONE)
    (violation,) = decode_log(result.log).violations
    assert (violation.batch_row, violation.expected_position) == (bad, 4)
    outside = sentinel in (-1, 2_000_000)
    assert (FailReason.SLOT_OUT_OF_RANGE in violation.reasons) == outside == (not 0 <= violation.slot < SLOTS)
    assert result.verdict.tolist() == [Verdict.BAD if row == bad else Verdict.OK for row in range(3)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, str, Any]:
    """Any batch of up to four requests in shuffled pages, or rows of a contiguous cache."""
    kind, sentinel = draw(st.sampled_from(KINDS)), draw(st.sampled_from(SENTINELS))
    count = draw(st.integers(1, 4))
    rows = draw(st.permutations(range(6)))[:count]
    if kind == "identity":
        return Batch(rows, [list(range(row * PAGE * 2, row * PAGE * 2 + draw(st.integers(0, PAGE * 2)))) for row in rows]), kind, sentinel
    pages = iter(draw(st.permutations(range(PAGES))))
    slots = []
    for _ in rows:
        n = draw(st.integers(0, 3 * PAGE))
        slots.append([page * PAGE + i for page in itertools.islice(pages, -(-n // PAGE)) for i in range(PAGE)][:n])
    return Batch(rows, slots), kind, sentinel


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(batches())
def test_any_batch_in_any_kind(case: tuple[Batch, str, Any]) -> None:
    """Stamped, planned and verified; then one record is spoiled, and its request alone is bad, at that position."""
    batch, kind, sentinel = case
    table = batch.table(kind, sentinel)
    out = laid_out(table, "auto", capacity=4 * 3 * PAGE, padding_req=None, **batch.arrays)
    assert entries_of(out) == batch.entries()
    records = np.asarray(stamp(batch).records)
    result = check(table, records, "auto", **batch.arrays, **NONE)
    assert result.verdict.tolist() == [Verdict.OK if n else Verdict.NOT_CHECKED for n in batch.lens]
    assert int(result.log.write_index[0]) == 0 and int(result.log.slot_run_counter[0, 0]) == sum(batch.lens)
    for row, slots in enumerate(batch.slots):
        if slots:
            spoiled = records.copy()
            spoiled[slots[-1], 2] += 1
            found = check(table, spoiled, "auto", **batch.arrays, **NONE)
            (violation,) = decode_log(found.log).violations
            assert (violation.slot, violation.batch_row, violation.req_pool_idx) == (slots[-1], row, batch.rows[row])
            assert violation.reasons == FailReason.VERIFY_POSITION and int(found.first_bad_position[row]) == len(slots) - 1
            assert found.verdict.tolist() == [
                Verdict.BAD if other == row else Verdict.OK if n else Verdict.NOT_CHECKED for other, n in enumerate(batch.lens)
            ]


# ------------------------------------------------------------------------------------------------ padding, by argument alone


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows(kind: str) -> None:
    """-1 is padding everywhere, another row only if it is named; a padding row's length says nothing."""
    batch = batch_for(kind)
    table = batch.table(kind, "stale")
    arrays = batch.arrays | {
        "req_pool_indices": np.array([3, 0, -1], np.int32),
        "prefix_lens": np.array([batch.lens[0], batch.lens[1], 999], np.int32),
    }

    def both(padding_req: int | None) -> tuple[list[int], list[int]]:
        out = laid_out(table, "auto", padding_req=padding_req, **arrays)
        result = check(table, stamped(kind), "auto", padding_slot=None, padding_req=padding_req, **arrays)
        rows = [0, 0, 0]
        for *_, row in entries_of(out):
            rows[row] += 1
        assert out.write.write_offsets.tolist() == [*np.cumsum([0, *(2 if n else 0 for n in rows)]), 0]
        assert int(result.log.write_index[0]) == 0 and int(result.log.slot_run_counter[0, 0]) == sum(rows)
        return rows, result.verdict.tolist()

    assert both(None) == ([batch.lens[0], 3, 0], [1, 1, 0])
    assert both(0) == ([batch.lens[0], 0, 0], [1, 0, 0])
    assert both(3) == ([0, 3, 0], [0, 1, 0])
    assert both(999) == ([batch.lens[0], 3, 0], [1, 1, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_slots(kind: str) -> None:
    """Slot 0 is a slot like any other unless it is named: then nothing about it is reported."""
    batch = batch_for(kind)
    table = batch.table(kind, 0)
    spoiled = np.asarray(stamped(kind)).copy()
    spoiled[0] ^= 5
    for padding_slot, found in ((None, {0, 1}), (0, set()), (1, {0}), (SLOTS + 1, {0, 1})):
        result = check(table, spoiled, "auto", padding_slot=padding_slot, padding_req=None, **batch.arrays)
        assert {v.slot for v in decode_log(result.log).violations} == found, padding_slot


# ------------------------------------------------------------------------------------------------ lengths and rings


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_the_table_cannot_hold(kind: str) -> None:
    """Longer than the row, or a row that is not there: reported once for the request, and no entry of it is looked at."""
    batch = batch_for(kind)
    table = batch.table(kind)
    limit = {"rows": 12, "blocks": 16, "flat": 8, "flat by token": 7}.get(kind, 2**30)
    rows = np.array([3, 0, 5], np.int32)
    for prefix, wanted in ((limit, 0), (limit + 1, 128 if kind != "identity" else 0), (2**31 - 1, 128 if kind != "identity" else 0)):
        lens = np.array([prefix, 3, batch.lens[2]], np.int32)
        out = laid_out(table, "auto", capacity=64, req_pool_indices=rows, prefix_lens=lens, padding_req=None)
        assert out.verify.row_status.tolist() == [wanted, 0, 0]
        if wanted:
            assert {row for *_, row in entries_of(out)} == {1, 2}
            assert out.write.write_offsets.tolist() == [0, 2, 4, 6, 0] and int(out.write.write_seed_slot_indices[0]) == -1
            result = check(table, stamped(kind), "auto", req_pool_indices=rows, prefix_lens=lens, **NONE)
            (violation,) = decode_log(result.log).violations
            assert violation.reasons == FailReason.TABLE_OUT_OF_RANGE and (violation.batch_row, violation.req_pool_idx) == (0, 3)
            assert result.verdict.tolist() == [2, 1, 1]
    for row in () if kind.startswith("flat") else (-2, 2**31 - 1):
        out = laid_out(table, "auto", req_pool_indices=np.array([row, 0, 5], np.int32), prefix_lens=np.zeros(3, np.int32), padding_req=None)
        assert out.verify.row_status.tolist() == [128, 0, 0]


@pytest.mark.parametrize(("prefix", "first"), [(7, 0), (8, 0), (9, 2), (15, 8), (16, 9), (1000, 993)])
def test_a_ring_checks_what_is_still_there(prefix: int, first: int, implementation: str) -> None:
    """Position p lies at row * length + p % length; once it wraps, the oldest entry has lost its predecessor and is left out."""
    table = IdentityTable(rows=4, width=8)
    arrays = {"req_pool_indices": np.array([2], np.int32), "prefix_lens": np.array([prefix], np.int32)}
    out = laid_out(table, implementation, padding_req=None, **arrays)
    wanted = [(16 + p % 8, 16 + (p - 1) % 8 if p else -1, p, 0) for p in range(first, prefix)]
    assert entries_of(out) == wanted and int(out.write.write_seed_slot_indices[0]) == 16 + (prefix - 1) % 8
    # A ring that was filled token after token is in order, whatever it has lost.
    filled = np.zeros((32, 8), np.uint32)
    for begin in range(0, prefix, 8):
        count = min(8, prefix - begin)
        positions = np.arange(begin, begin + count, dtype=np.int32)
        segment = WritePlan(
            write_offsets=np.array([0, count], np.int32),
            write_seed_slot_indices=np.array([16 + (begin - 1) % 8 if begin else -1], np.int32),
            write_num_valid_reqs=np.array([1], np.int32),
            req_pool_indices=np.array([2], np.int32),
        )
        if begin + 8 < prefix - 16:
            continue  # long overwritten
        filled = write(
            records=filled, log=ViolationLog.allocate(ring_capacity=0), plan=segment, input_ids=positions * 3, positions=positions,
            out_cache_loc=16 + positions % 8, launch_tag=2, padding_slot=None,
        ).records  # fmt: skip
    result = check(table, filled, implementation, **arrays, **NONE)
    assert int(result.log.write_index[0]) == 0 and int(result.log.slot_run_counter[0, 0]) == len(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_mappings(kind: str) -> None:
    """A window keeps the true predecessor of its first token; every slot goes through the mapping; a hole in it is reported."""
    batch = batch_for(kind)
    table = batch.table(kind, "stale")
    mapping = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    out = laid_out(table, "auto", swa_window_size=3, full_to_swa_index_mapping=mapping, padding_req=None, **batch.arrays)
    wanted = [
        (mapping[slot], mapping[prev] if prev >= 0 else -1, p, row) for slot, prev, p, row in batch.entries() if p >= batch.lens[row] - 3
    ]
    assert entries_of(out) == wanted
    records = np.zeros((SLOTS, 8), np.uint32)
    records[mapping] = stamped(kind)
    window = {"swa_window_size": 3, "full_to_swa_index_mapping": mapping} | NONE | batch.arrays
    result = check(table, records, "auto", **window)
    assert result.verdict.tolist() == [1, 1, 1] and int(result.log.slot_run_counter[0, 0]) == 9
    last = batch.slots[2][-1]
    result = check(table, records, "auto", **(window | {"full_to_swa_index_mapping": mapping[:last]}))
    (violation,) = (v for v in decode_log(result.log).violations if v.batch_row == 2)
    assert (violation.slot, violation.reasons) == (-2, FailReason.SLOT_OUT_OF_RANGE)


def test_valid_lengths_of_expected_tokens() -> None:
    """Tokens past a row's valid length are stale and not compared, whatever they are."""
    batch, expected = PAGED, np.full((7, 12), 2_000_000, np.int32)
    for row, slots in zip(batch.rows, batch.slots, strict=True):
        expected[row, : len(slots)] = np.array(slots) + 100
    for valid, bad in ((batch.lens, None), ([7, 3, 2], None), ([7, 2, 0], None), ([7, 3, 4], 1)):
        tokens = expected.copy()
        if bad is not None:
            tokens[batch.rows[bad], 2] += 1
        result = check(
            batch.table("flat", "stale"), stamped("flat"), "auto", req_to_verify_expected_tokens=tokens, check_verify_expected_token=True,
            req_to_verify_expected_tokens_valid_lens=np.array(valid, np.int32), **batch.arrays, **NONE,
        )  # fmt: skip
        assert result.verdict.tolist() == [Verdict.BAD if row == bad else Verdict.OK for row in range(3)]


# ------------------------------------------------------------------------------------------------ forms


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_arguments_of_a_step(kind: str) -> None:
    """A table is a pytree: new values do not compile again."""
    batch = batch_for(kind)
    traces = []

    @jax.jit
    def step(table: Any, records: Any, arrays: Any) -> Any:
        traces.append(table)
        return check(table, records, "auto", **arrays, **NONE).verdict

    for sentinel in SENTINELS:
        assert step(batch.table(kind, sentinel), stamped(kind), batch.arrays).tolist() == [1, 1, 1]
    assert len(traces) == 1
    leaves, structure = jax.tree.flatten(batch.table(kind))
    assert jax.tree.unflatten(structure, leaves).__class__ is batch.table(kind).__class__
    assert len(leaves) == {"rows": 1, "blocks": 1, "identity": 0}.get(kind, 2)


def test_a_plain_array_is_a_table_of_rows() -> None:
    table = PAGED.table("rows").table
    result = check(table, stamped("rows"), "auto", **PAGED.arrays, **NONE)
    assert result.verdict.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_wide_tables(kind: str, x64: None) -> None:
    """int64 tables with x64 on: values past int32 stay out of range."""
    batch = batch_for(kind)
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.int64), batch.table(kind))
    assert check(wide, stamped(kind), "auto", **batch.arrays, **NONE).verdict.tolist() == [1, 1, 1]
    huge = dataclasses.replace(wide, table=wide.table.at[(0,) * wide.table.ndim].set(2**40))
    result = check(huge, stamped(kind), "auto", **batch.arrays, **NONE)
    first = decode_log(result.log).violations[0]
    assert FailReason.SLOT_OUT_OF_RANGE in first.reasons and result.verdict.tolist().count(2) == 1


TWO = np.zeros((2, 4), np.int32)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (np.zeros(4, np.int32), ValueError, r"req_to_token must be 2-D, got shape \(4,\)"),
    (RowTable(np.zeros((1, 2, 4), np.int32)), ValueError, r"req_to_token must be 2-D, got shape \(1, 2, 4\)"),
    (BlockTable(np.zeros(4, np.int32), 4), ValueError, r"req_to_token must be 2-D, got shape \(4,\)"),
    (BlockTable(TWO, 0), ValueError, "page_size must be >= 1, got 0"),
    (BlockTable(TWO, 4.0), TypeError, "page_size must be an int, got float"),  # type: ignore[arg-type]
    (FlatTable(TWO, np.zeros(3, np.int32)), ValueError, r"req_to_token must be 1-D, got shape \(2, 4\)"),
    (FlatTable(np.zeros(8, np.int32), np.zeros(2, np.int32)), ValueError, "req_to_token starts length must be 3, got 2"),
    (FlatTable(np.zeros(8, np.int32), np.zeros((3, 1), np.int32)), ValueError, r"req_to_token starts must be 1-D, got shape \(3, 1\)"),
    (FlatTable(np.zeros(8, np.int32), None), TypeError, "req_to_token starts must be an array, got None"),
    (IdentityTable(rows=2, width=0), ValueError, "width must be >= 1, got 0"),
    (IdentityTable(rows=-1, width=4), ValueError, "rows must be non-negative, got -1"),
    (IdentityTable(rows=2**16, width=2**16), ValueError, "rows x width must fit in int32"),
    (jnp.zeros((2, 4), jnp.float32), ValueError, "req_to_token must have dtype int32 or int64, got float32"),
    (jnp.zeros((2, 4), jnp.uint32), ValueError, "req_to_token must have dtype int32 or int64, got uint32"),
    ({"table": TWO}, TypeError, "req_to_token must be an array, got dict"),
    (None, TypeError, "req_to_token must be an array, got None"),
]


@pytest.mark.parametrize(("table", "error", "message"), WRONG, ids=[message[:50] for *_, message in WRONG])
@pytest.mark.parametrize("op", ["plan", "verify_fused"])
def test_a_table_of_the_wrong_kind(op: str, table: Any, error: type[Exception], message: str) -> None:
    arrays = {"req_pool_indices": np.array([0, 1], np.int32), "prefix_lens": np.array([1, 1], np.int32)}
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        if op == "plan":
            laid_out(table, "auto", **arrays)
        else:
            check(table, np.zeros((SLOTS, 8), np.uint32), "auto", **arrays)


def test_a_page_size_is_static() -> None:
    with pytest.raises(TypeError, match="page_size must be a static Python integer, got a traced value"):
        jax.jit(lambda n: laid_out(BlockTable(TWO, n), "auto", **PAGED.arrays))(4)
