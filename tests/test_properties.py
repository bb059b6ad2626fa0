"""Properties of the operations: every implementation gives what the reference gives, on ordinary and on hostile input, and no
fault goes unseen while untouched data never alarms.

KVCANARY_EXAMPLES multiplies the number of examples (default 1), and with more than 1 all settings run; examples are the same in every run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import strategies
import vectors_io as io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Case, Setting, assert_arrays, assert_same

import jax_kvcanary
from jax_kvcanary import FailReason, backend_info, pure
from jax_kvcanary.spec import INT32_MAX, RECORD_WORDS, Column, RealKvHashMode, Verdict
from jax_kvcanary.state import ViolationLog, WritePlan

EXAMPLES = int(os.environ.get("KVCANARY_EXAMPLES", "1"))


def examples(count: int) -> Callable[[Any], Any]:
    """The profile of this file: so many examples, the same ones each time."""
    return settings(
        max_examples=count * EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


# ---------------------------------------------------------------------------------------------- implementations


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to run an operation. choice: the ``implementation`` argument, None for the reference. platform: where its arrays are."""

    name: str
    choice: str | None
    platform: str = "cpu"

    @property
    def in_order(self) -> bool:
        """Whether requests of a launch run one after the other."""
        return self.platform == "cpu"

    def require(self, op: str) -> None:
        """Skip, saying why, where an operation cannot run."""
        if self.platform == "gpu" and not _devices("gpu"):
            pytest.skip("no CUDA device")
        if self.choice == "jax" and not hasattr(pure, {"scatter_req_token_ids": "scatter"}.get(op, op)):
            pytest.skip(f"jax_kvcanary.pure has no {op}")
        if self.choice == "ffi":
            info = backend_info()["cuda" if self.platform == "gpu" else "cpu"]
            if not info.compiled:
                pytest.skip(info.detail)

    def run(self, case: Case) -> Any:
        """The operation's result in NumPy arrays."""
        if self.choice is None:
            return case.run_reference()
        with jax.enable_x64(case.x64), jax.default_device(_devices(self.platform)[0]):
            run = _jitted(case.op, tuple(sorted(case.static.items())), self.choice)
            return jax.tree.map(np.asarray, run(**case.arrays))


@functools.cache
def _jitted(op: str, static: tuple[tuple[str, Any], ...], choice: str) -> Callable[..., Any]:
    return jax.jit(functools.partial(getattr(jax_kvcanary, op), **dict(static), implementation=choice))


@functools.cache
def _devices(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


REFERENCE = Implementation("reference", None)
JAX = Implementation("jax", "jax")
FFI = Implementation("ffi", "ffi")
CUDA = Implementation("cuda", "ffi", platform="gpu")


def every_implementation(*, reference: bool = False) -> Any:
    chosen = [REFERENCE] * reference + [JAX, FFI]
    gpu = pytest.param(CUDA, id=CUDA.name, marks=pytest.mark.gpu)
    return pytest.mark.parametrize("implementation", [*(pytest.param(x, id=x.name) for x in chosen), gpu])


@functools.cache
def _settings(op: str, usual: int) -> list[Setting]:
    axes, keep = {
        "plan": (strategies.PLAN_AXES, strategies.can_batch),
        "verify": (strategies.VERIFY_AXES, strategies.can_rotate),
        "verify_fused": (strategies.FUSED_AXES, strategies.can_fuse),
        "write": (strategies.WRITE_AXES, lambda setting: True),
        "scatter_req_token_ids": (strategies.SCATTER_AXES, lambda setting: True),
    }[op]
    return strategies.settings_of(axes, usual=usual if EXAMPLES == 1 else 1000, keep=keep)


def over_settings(op: str) -> Any:
    """Each implementation over its settings; fewer for plain JAX, which compiles for long."""

    def runs() -> Iterator[Any]:
        for implementation in (JAX, FFI, CUDA):
            marks = [pytest.mark.gpu] if implementation.platform == "gpu" else []
            for number, setting in enumerate(_settings(op, 3 if implementation is JAX else 24)):
                yield pytest.param(implementation, setting, id=f"{implementation.name}-{number}", marks=marks)

    return pytest.mark.parametrize(("implementation", "setting"), list(runs()))


# ---------------------------------------------------------------------------------------------- the same everywhere


@over_settings("plan")
@examples(24)
@given(data=st.data())
def test_plan(implementation: Implementation, setting: Setting, data: st.DataObject) -> None:
    implementation.require("plan")
    case = data.draw(strategies.plan_cases(setting))
    assert_same(case, implementation.run(case))


@over_settings("verify")
@examples(16)
@given(data=st.data())
def test_verify(implementation: Implementation, setting: Setting, data: st.DataObject) -> None:
    implementation.require("verify")
    case = data.draw(strategies.verify_cases(setting))
    assert_same(case, implementation.run(case))


@over_settings("verify_fused")
@examples(16)
@given(data=st.data())
def test_verify_fused(implementation: Implementation, setting: Setting, data: st.DataObject) -> None:
    implementation.require("verify_fused")
    case = data.draw(strategies.fused_cases(setting))
    assert_same(case, implementation.run(case))


@over_settings("write")
@examples(16)
@given(data=st.data())
def test_write(implementation: Implementation, setting: Setting, data: st.DataObject) -> None:
    implementation.require("write")
    case = data.draw(strategies.write_cases(setting, in_order=implementation.in_order))
    assert_same(case, implementation.run(case))


@over_settings("scatter_req_token_ids")
@examples(40)
@given(data=st.data())
def test_scatter(implementation: Implementation, setting: Setting, data: st.DataObject) -> None:
    implementation.require("scatter_req_token_ids")
    case = data.draw(strategies.scatter_cases(setting, in_order=implementation.in_order))
    assert_same(case, implementation.run(case))


# ---------------------------------------------------------------------------------------------- large batches


MANY_REQUESTS = 10_000
LARGE: dict[str, Setting] = {
    "plan": {
        "bs": MANY_REQUESTS, "form": "i32", "table": "rows", "mapping": True, "window": 3, "expected": True, "offset": 1, "padding_req": 0,
        "more_rows": 2, "capacity": "ample",
    },
    "verify": {
        "slots": strategies.SLOTS, "words": 16, "sources": "row", "mode": RealKvHashMode.ALL, "tags": True, "padding_slot": 0,
        "extended": True, "ring": 64, "launch_tag": 0, "rotate": False, "check_token": True, "namespaces": True, "pass_through": False,
        "form": "i32", "bs": MANY_REQUESTS, "entries": 2 * MANY_REQUESTS, "rows_known": True,
    },
    "scatter_req_token_ids": {"tokens": 2 * MANY_REQUESTS, "bs": MANY_REQUESTS, "pool": (MANY_REQUESTS + 1, 2), "form": "i32"},
}  # fmt: skip
LARGE["verify_fused"] = {**LARGE["plan"], **LARGE["verify"], "form": "i32"}
LARGE["write"] = {
    **LARGE["verify"], "rows": MANY_REQUESTS, "tokens": 2 * MANY_REQUESTS, "asserts": True, "chain_assert": True, "req_pool": "all",
    "request_ids": "all", "namespaces": "all", "flags": 2,
}  # fmt: skip


@pytest.mark.parametrize("op", LARGE)
@every_implementation()
@examples(2)
@given(data=st.data())
def test_large_batch(implementation: Implementation, op: str, data: st.DataObject) -> None:
    implementation.require(op)
    setting, in_order = LARGE[op], {"in_order": implementation.in_order}
    case = data.draw(
        {
            "plan": lambda: strategies.plan_cases(setting),
            "verify": lambda: strategies.verify_cases(setting),
            "verify_fused": lambda: strategies.fused_cases(setting),
            # Plain JAX serves requests whose segments overlap one after the other: right, but slow for so many.
            "write": lambda: strategies.write_cases(setting, **in_order, cuts=implementation is not JAX),
            "scatter_req_token_ids": lambda: strategies.scatter_cases(setting, **in_order),
        }[op]()
    )
    assert_same(case, implementation.run(case))


# ---------------------------------------------------------------------------------------------- fused is planned


def as_int64(operand: Any) -> np.ndarray:
    """An integer operand of any form."""
    array = np.asarray(operand)
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array).view(np.int64)[..., 0]
    return array.astype(np.int64)


def planned(implementation: Implementation, case: Case) -> tuple[Any, bool]:
    """plan and verify instead of the fused verify; and whether the plan was wide."""
    names = ("req_pool_indices", "prefix_lens", "req_to_token", "full_to_swa_index_mapping", "req_to_verify_expected_tokens")
    names += ("req_to_verify_expected_tokens_valid_lens",)
    statics = ("swa_window_size", "kv_token_id_vs_position_offset", "padding_req", "position_stride")
    arrays = {name: case.arrays[name] for name in names if name in case.arrays}
    static = {name: case.static[name] for name in statics if name != "position_stride"}
    bs = arrays["req_pool_indices"].shape[0]
    static.update(verify_capacity=strategies.SLOTS * max(bs, 1), write_req_capacity=bs)
    arrays["extend_seq_lens"] = np.zeros(bs, np.int32)
    plan = implementation.run(Case("plan", arrays, static, case.x64)).verify
    assert int(plan.enable[0]) == 1
    if (stride := case.static["position_stride"]) > 1:  # a plan has no stride: keep the entries of the step
        live = np.arange(plan.slot_indices.shape[0]) < int(plan.num_valid[0])
        mine = live & (as_int64(plan.expected_positions) % stride == int(case.arrays["step"]) % stride)
        order = np.argsort(~mine, kind="stable")
        columns = ("slot_indices", "expected_tokens", "expected_positions", "prev_slot_indices", "batch_rows")
        moved = {name: np.asarray(getattr(plan, name))[order] for name in columns}
        plan = dataclasses.replace(plan, **moved, num_valid=np.array([mine.sum()], np.int32))
    checks = {name: value for name, value in case.arrays.items() if name not in names}
    ask = {name: value for name, value in case.static.items() if name not in statics}
    return implementation.run(Case("verify", {**checks, "plan": plan}, ask, case.x64)), plan.slot_indices.dtype == np.int64


@pytest.mark.parametrize("number", range(8))
@every_implementation(reference=True)
@examples(16)
@given(data=st.data())
def test_fused_is_planned(implementation: Implementation, number: int, data: st.DataObject) -> None:
    """The same rows, counters and verdicts; in a plan of 32 bits a slot beyond them is the largest or smallest of those."""
    if implementation is JAX and number >= 3:
        pytest.skip("plain JAX compiles for long: three settings are enough")
    implementation.require("verify_fused")
    case = strategies.plain_log(data.draw(strategies.fused_cases(_settings("verify_fused", 8)[number])))
    fused, (checked, wide) = implementation.run(case), planned(implementation, case)
    assert_arrays(fused, checked, "verdict first_bad_position unattested first_unattested_position")
    assert_arrays(fused.log, checked.log, "write_index slot_run_counter kernel_run_counter")

    def rows(log: ViolationLog) -> list[io.Row]:
        ring = np.array(log.ring)
        slots = as_int64(ring[:, 2 * Column.SLOT : 2 * Column.SLOT + 2])
        if not wide:
            ring[:, 2 * Column.SLOT : 2 * Column.SLOT + 2] = io.pairs(np.clip(slots, -(2**31), INT32_MAX))
        return io.rows_of(ring)

    io.assert_same_rows(rows(fused.log), rows(checked.log))


# ---------------------------------------------------------------------------------------------- every position, once in so many steps


def strided(stride: int, step: int, *, table: str = "rows", mapping: bool = False, window: int = 0) -> Case:
    """A pool of valid chains and a fused verify of its step; records of nobody in it."""
    setting = {**ONCE_FUSED, "sources": "row", "table": table, "mapping": mapping, "window": window, "padding_slot": None, "words": 8}
    chains = strategies.table_chains(table, strategies.SLOTS, 1)
    if mapping:
        moved = strategies.permutation(strategies.SLOTS, 2)
        chains = tuple(tuple(moved[slot] for slot in chain) for chain in chains)
    there = strategies._world({**setting, "tags": False}, chains, 1)
    slots = np.arange(24).reshape(4, 6)
    tables = {
        "rows": lambda rows: strategies.RowTable(rows),
        "flat": lambda rows: strategies.FlatTable(rows[1:4, :5].reshape(-1), np.arange(4, dtype=np.int32) * 5),
        "identity": lambda rows: strategies.IdentityTable(rows=4, width=6),
    }
    rows = slots.astype(np.int32)
    for r, chain in enumerate(strategies.table_chains(table, strategies.SLOTS, 1)):
        rows[r + 1, :5] = chain
    arrays = {
        "records": there.records, "log": io.empty_log(64), "real_kv_buffers": there.buffers, "step": np.uint32(step),
        "namespaces": there.namespaces.astype(np.int32), "req_pool_indices": np.arange(1, 4, dtype=np.int32),
        "prefix_lens": np.array([5, 4, 1], np.int32), "req_to_token": tables[table](rows),
    }  # fmt: skip
    if mapping:
        arrays["full_to_swa_index_mapping"] = np.array(moved, np.int32)
    static = {
        "launch_tag": 0, "real_kv_hash_mode": 2, "real_kv_sources": strategies.sources_of("row", strategies.SLOTS)[0],
        "padding_slot": None, "padding_req": None, "swa_window_size": window, "position_stride": stride, "strict": False,
    }  # fmt: skip
    return Case("verify_fused", arrays, static, False)


@pytest.mark.parametrize("table", ["rows", "flat", "identity"])
@pytest.mark.parametrize(("mapping", "window"), [(False, 0), (True, 0), (True, 3)])
@every_implementation(reference=True)
def test_each_position_is_visited_once(implementation: Implementation, table: str, mapping: bool, window: int) -> None:
    """A record that is wrong is reported in one step of so many: by its own position or, for the chain, by the next one's."""
    implementation.require("verify_fused")
    for stride in (2, 3):
        runs, counted = [strided(stride, step, table=table, mapping=mapping, window=window) for step in range(7, 7 + stride)], 0
        for case in runs:
            result = implementation.run(case)
            counted += io.counters_of(result.log.slot_run_counter)[0]
            assert int(result.log.write_index[0]) == 0 and 2 not in result.verdict.tolist(), table
        full = implementation.run(strided(1, 7, table=table, mapping=mapping, window=window))
        assert counted == io.counters_of(full.log.slot_run_counter)[0] == (3 + 3 + 1 if window else 10)


@every_implementation(reference=True)
def test_what_nobody_wrote(implementation: Implementation) -> None:
    """Counted, not checked, and no predecessor; nor does it hide what else is wrong."""
    implementation.require("verify_fused")
    case = strided(1, 0)
    rows, records = case.arrays["req_to_token"].table, case.arrays["records"].copy()
    records[rows[1, 1:3]] = 0
    records[rows[2, :4]] = 0
    case = case.replaced(records=records)
    result = implementation.run(case)
    assert result.verdict.tolist() == [Verdict.OK, Verdict.NOT_CHECKED, Verdict.OK] and int(result.log.write_index[0]) == 0
    assert result.unattested.tolist() == [2, 4, 0] and result.first_unattested_position.tolist() == [1, 0, -1]
    assert io.counters_of(result.log.slot_run_counter)[0] == 10
    records[rows[1, 4], 2] ^= 1  # the position of the last record, behind one whose predecessor is unknown
    result = implementation.run(case.replaced(records=records))
    assert result.verdict.tolist() == [Verdict.BAD, Verdict.NOT_CHECKED, Verdict.OK] and result.first_bad_position.tolist() == [4, -1, -1]
    strict = implementation.run(dataclasses.replace(case, static={**case.static, "strict": True}))
    assert strict.verdict.tolist() == [Verdict.BAD, Verdict.BAD, Verdict.OK]
    assert strict.unattested.tolist() == [0, 0, 0] and strict.first_unattested_position.tolist() == [-1, -1, -1]


@every_implementation(reference=True)
@pytest.mark.parametrize("strict", [True, False])
def test_a_seed_that_nobody_wrote(implementation: Implementation, strict: bool) -> None:
    """Its position is unknown, so the first token may have any; the second must follow it."""
    implementation.require("write")
    arrays = {
        "records": np.zeros((8, 8), np.uint32), "log": io.empty_log(8), "input_ids": np.arange(3, dtype=np.int32),
        "positions": np.array([9, 10, 12], np.int32), "out_cache_loc": np.array([3, 4, 5], np.int32),
        "enable_chain_position_assert": np.ones(1, np.int32), "real_kv_buffers": (),
        "plan": WritePlan(
            write_offsets=np.array([0, 3], np.int32), write_seed_slot_indices=np.array([2], np.int32),
            write_num_valid_reqs=np.ones(1, np.int32), req_pool_indices=np.zeros(0, np.int32),
        ),
    }  # fmt: skip
    result = implementation.run(Case("write", arrays, {"launch_tag": 2, "strict": strict}, False))
    rows = np.ascontiguousarray(result.log.ring[: int(result.log.write_index[0])]).view(np.int64)
    wanted = [(9, 1), (12, 11)] if strict else [(12, 11)]
    assert sorted((int(row[Column.POSITION]), int(row[Column.AUX])) for row in rows) == wanted


# ---------------------------------------------------------------------------------------------- every entry out of range, once


def rows_with(log: ViolationLog, reason: FailReason, *columns: Column) -> collections.Counter[tuple[int, ...]]:
    """How often a log has rows of a reason, by some of their columns."""
    index = int(log.write_index[0])
    assert 0 <= index <= log.ring.shape[0]
    rows = np.ascontiguousarray(log.ring[:index]).view(np.int64)
    return collections.Counter(tuple(row[list(columns)].tolist()) for row in rows if int(row[Column.REASON]) & reason)


def outside(values: np.ndarray, slots: int) -> np.ndarray:
    return (values < 0) | (values >= slots)


ONCE: Setting = {
    "slots": strategies.SLOTS, "words": 16, "sources": "short", "mode": RealKvHashMode.ALL, "tags": True, "padding_slot": 5,
    "extended": True, "ring": 64, "launch_tag": 0, "rotate": False, "check_token": True, "namespaces": True, "pass_through": False,
    "form": "pairs", "bs": 3, "entries": 14, "rows_known": True,
}  # fmt: skip
ONCE_WRITE: Setting = {
    **ONCE, "rows": 3, "tokens": 14, "asserts": True, "chain_assert": True, "req_pool": "all", "request_ids": "none", "namespaces": "none",
    "flags": 0,
}  # fmt: skip
ONCE_FUSED: Setting = {
    **ONCE, "form": "i32", "table": "rows", "mapping": True, "window": 0, "expected": False, "offset": 0, "padding_req": 0,
}  # fmt: skip
ONCE_SLOTS = strategies.SLOTS - 3
"""Slots of the smallest source in the settings above."""


@every_implementation(reference=True)
@examples(25)
@given(data=st.data())
def test_verify_reports_each_entry_out_of_range_once(implementation: Implementation, data: st.DataObject) -> None:
    implementation.require("verify")
    case = strategies.plain_log(data.draw(strategies.verify_cases(ONCE)))
    log, plan = implementation.run(case).log, case.arrays["plan"]
    live = max(0, min(int(plan.num_valid[0]), 14)) if int(plan.enable[0]) else 0
    slots, previous, positions = (as_int64(x)[:live] for x in (plan.slot_indices, plan.prev_slot_indices, plan.expected_positions))
    bad_slot = outside(slots, ONCE_SLOTS)
    bad_previous = ~bad_slot & outside(previous, ONCE_SLOTS) & (previous != -1) & (previous != 5)
    bad = (slots != 5) & (bad_slot | bad_previous)
    entries = collections.Counter(zip(slots[bad].tolist(), positions[bad].tolist(), strict=True))
    assert rows_with(log, FailReason.SLOT_OUT_OF_RANGE, Column.SLOT, Column.EXPECTED_POSITION) == entries
    failed = np.flatnonzero(plan.row_status) if int(plan.enable[0]) else []
    assert rows_with(log, FailReason.TABLE_OUT_OF_RANGE, Column.BATCH_ROW) == collections.Counter((int(r),) for r in failed)


@every_implementation(reference=True)
@examples(25)
@given(data=st.data())
def test_fused_reports_each_entry_out_of_range_once(implementation: Implementation, data: st.DataObject) -> None:
    implementation.require("verify_fused")
    case = strategies.plain_log(data.draw(strategies.fused_cases(ONCE_FUSED)))
    log, arrays = implementation.run(case).log, case.arrays
    table, mapping = as_int64(arrays["req_to_token"].table), as_int64(arrays["full_to_swa_index_mapping"])
    mapped = np.where(table < 0, table, -2)
    mapped[~outside(table, mapping.size)] = mapping[table[~outside(table, mapping.size)]]
    entries: collections.Counter[tuple[int, ...]] = collections.Counter()
    failed: collections.Counter[tuple[int, ...]] = collections.Counter()
    pairs = zip(as_int64(arrays["req_pool_indices"]).tolist(), as_int64(arrays["prefix_lens"]).tolist(), strict=True)
    for r, (row, prefix) in enumerate(pairs):
        if row in (0, -1):
            continue
        if not 0 <= row < table.shape[0] or prefix > table.shape[1]:
            failed[(r,)] += 1
            continue
        slots = mapped[row, : max(prefix, 0)]
        previous = np.concatenate([[-1], slots[:-1]])[: slots.size]
        bad = outside(slots, ONCE_SLOTS) | (outside(previous, ONCE_SLOTS) & (previous != -1) & (previous != 5))
        entries.update((int(slots[p]), p) for p in np.flatnonzero(bad & (slots != 5)))
    assert rows_with(log, FailReason.SLOT_OUT_OF_RANGE, Column.SLOT, Column.EXPECTED_POSITION) == entries
    assert rows_with(log, FailReason.TABLE_OUT_OF_RANGE, Column.BATCH_ROW) == failed


@every_implementation(reference=True)
@examples(25)
@given(data=st.data())
def test_write_reports_each_entry_out_of_range_once(implementation: Implementation, data: st.DataObject) -> None:
    implementation.require("write")
    case = strategies.plain_log(data.draw(strategies.write_cases(ONCE_WRITE, in_order=implementation.in_order)))
    log, plan = implementation.run(case).log, case.arrays["plan"]
    slots, offsets, seeds = as_int64(case.arrays["out_cache_loc"]), as_int64(plan.write_offsets), as_int64(plan.write_seed_slot_indices)
    entries: collections.Counter[tuple[int, ...]] = collections.Counter()
    cut: collections.Counter[tuple[int, ...]] = collections.Counter()
    for r in range(max(0, min(int(plan.write_num_valid_reqs[0]), seeds.size))):
        begin, end = int(offsets[r]), int(offsets[r + 1])
        if not 0 <= begin <= end <= slots.size:
            cut[(r,)] += 1
        part = slots[max(begin, 0) : max(0, min(end, slots.size))]
        entries.update((int(slot), r) for slot in part[outside(part, ONCE_SLOTS) & (part != -1)])
        if part.size and outside(seeds[r], ONCE_SLOTS) and seeds[r] != -1:
            entries[int(seeds[r]), r] += 1
    assert rows_with(log, FailReason.SLOT_OUT_OF_RANGE, Column.SLOT, Column.BATCH_ROW) == entries
    assert rows_with(log, FailReason.TABLE_OUT_OF_RANGE, Column.BATCH_ROW) == cut


@every_implementation(reference=True)
@examples(25)
@given(data=st.data())
def test_scatter_reports_each_request_out_of_range_once(implementation: Implementation, data: st.DataObject) -> None:
    implementation.require("scatter_req_token_ids")
    setting = {"tokens": 14, "bs": 3, "pool": (4, 6), "form": "pairs"}
    case = data.draw(strategies.scatter_cases(setting, in_order=implementation.in_order))
    rows, offsets = as_int64(case.arrays["req_pool_indices"]), as_int64(case.arrays["offsets"])
    begin, end = offsets[:-1], offsets[1:]
    bad = (rows != -1) & ((rows < 0) | (rows >= 4) | (begin < 0) | (end > 14) | (end < begin))
    result = implementation.run(case)
    np.testing.assert_array_equal(result.status, np.where(bad, 128, 0))
    named = set(rows[~bad & (rows != -1)].tolist())
    kept = [row for row in range(4) if row not in named]
    np.testing.assert_array_equal(result.pool[kept], case.arrays["pool_out"][kept])


# ---------------------------------------------------------------------------------------------- traffic and faults


def served(implementation: Implementation, seed: int, steps: list[list[int]]) -> strategies.Engine:
    engine = strategies.Engine(implementation.run, seed)
    for actions in steps:
        engine.step(actions)
        assert engine.reported == 0, [io.rows_of(log.ring, 0, int(log.write_index[0])) for log in engine.log.values()]
        for verdicts in engine.verdicts.values():
            assert verdicts == [Verdict.OK if request and request.slots else Verdict.NOT_CHECKED for request in engine.live]
    return engine


SEEDS = st.integers(0, 2**32 - 1)


@every_implementation(reference=True)
@examples(15)
@given(seed=SEEDS, steps=strategies.traffic(14))
def test_untouched_data_never_alarms(implementation: Implementation, seed: int, steps: list[list[int]]) -> None:
    """Prefill at once and in chunks, decoding, shared prefixes, slots used again, and a window pool that evicts."""
    implementation.require("verify_fused")
    served(implementation, seed, steps)


@every_implementation(reference=True)
@examples(15)
@given(seed=SEEDS, steps=strategies.traffic(6), data=st.data())
def test_any_flipped_bit_is_seen(implementation: Implementation, seed: int, steps: list[list[int]], data: st.DataObject) -> None:
    """A bit of a record or of K/V bytes that are in use; a bit that nothing reads is not seen."""
    implementation.require("verify_fused")
    engine = served(implementation, seed, steps)
    for _ in range(4):
        pool = data.draw(st.sampled_from(("full", "window")))
        ends = [request.slots[-1] for request in engine.live if request and request.slots]
        if not ends:
            return
        if pool == "window":
            ends = [int(engine.mapping[slot]) for slot in ends]
        slot = data.draw(st.sampled_from([*engine.in_use(pool), *ends, *ends]))  # no later record covers an end
        views = [np.array(engine.records[pool]).view(np.uint8), *engine.bytes_of(pool, slot)]
        engine.records[pool] = views[0].view(np.uint32)
        views[0] = views[0][slot, : 4 * RECORD_WORDS]
        view = data.draw(st.sampled_from(views))
        bit = data.draw(st.integers(0, 8 * view.size - 1))
        view[bit // 8] ^= np.uint8(1 << bit % 8)
        assert engine.check_all() > 0, "the flipped bit was not seen"
        view[bit // 8] ^= np.uint8(1 << bit % 8)
        gap = engine.buffers["full"][2][:, engine.PAGE * 16 :].view(np.uint8)
        gap ^= np.uint8(1 << bit % 8)
        assert engine.check_all() == 0, "bytes that no source reads were seen"


@every_implementation(reference=True)
@examples(15)
@given(seed=SEEDS, steps=strategies.traffic(8), data=st.data())
def test_any_swap_is_seen(implementation: Implementation, seed: int, steps: list[list[int]], data: st.DataObject) -> None:
    """Two slots (their bytes, their records, or both), two pages, or two layers of different content."""
    implementation.require("verify_fused")
    engine = served(implementation, seed, steps)
    slots = engine.in_use("full")
    if len(slots) < 2:
        return
    records, buffers = np.array(engine.records["full"]), [buffer.copy() for buffer in engine.buffers["full"]]
    for _ in range(4):
        a, b = data.draw(st.lists(st.sampled_from(slots), min_size=2, max_size=2, unique=True))
        what = data.draw(st.sampled_from(("bytes", "records", "both", "pages", "layers")))
        engine.records["full"], engine.buffers["full"] = records.copy(), [buffer.copy() for buffer in buffers]
        now = engine.records["full"]
        if what in ("bytes", "both"):
            for x, y in zip(engine.bytes_of("full", a), engine.bytes_of("full", b), strict=True):
                x[:], y[:] = y.copy(), x.copy()
        if what in ("records", "both"):
            now[[a, b]] = now[[b, a]]
        if what == "pages":
            packed, pages = engine.buffers["full"][2], [a // engine.PAGE, b // engine.PAGE]
            packed[pages] = packed[pages[::-1]]
        if what == "layers":
            engine.buffers["full"][:2] = engine.buffers["full"][1::-1]
        changed = any(
            (before.view(np.uint8) != after.view(np.uint8)).any()
            for slot in slots
            for before, after in zip(_bytes(buffers, slot), engine.bytes_of("full", slot), strict=True)
        )
        if what == "both":  # with its bytes a record may trade places with one of the same token and history
            differ = (records[a, :6] != records[b, :6]).any()
        elif what == "records":
            differ = (records[a, :RECORD_WORDS] != records[b, :RECORD_WORDS]).any()
        else:
            differ = changed
        assert (engine.check_all() > 0) == differ, f"{what} of slots {a} and {b}"


def _bytes(buffers: list[np.ndarray], slot: int) -> list[np.ndarray]:
    page, token = divmod(slot, strategies.Engine.PAGE)
    return [*(buffer[slot].reshape(-1).view(np.uint8) for buffer in buffers[:2]), buffers[2][page, token * 16 : token * 16 + 16]]


@every_implementation()
def test_every_bit_of_a_short_chain_is_seen(implementation: Implementation) -> None:
    """Without luck: all bits of three records and of their bytes, one after the other."""
    implementation.require("verify_fused")
    engine = served(implementation, 0, [[2, 0, 0, 0]])
    (request,) = [request for request in engine.live if request]
    assert len(request.slots) == 3
    engine.records["full"] = np.array(engine.records["full"])
    for slot in request.slots:
        for view in (engine.records["full"].view(np.uint8)[slot, : 4 * RECORD_WORDS], *engine.bytes_of("full", slot)):
            for bit in range(8 * view.size):
                view[bit // 8] ^= np.uint8(1 << bit % 8)
                assert engine.check_all() > 0, f"bit {bit} of slot {slot}"
                view[bit // 8] ^= np.uint8(1 << bit % 8)
    assert engine.check_all() == 0
