"""Wrong programs that go around the library: custom calls built by hand from a call that is right. Each must end in a clean error.

A call is the flat operands, results and attributes of a target, by name and in order. A handler that crashes ends this process.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.ffi
import numpy as np
import pytest
import strategies
import vectors_io as io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Case

from jax_kvcanary import backend_info, reference
from jax_kvcanary.sources import flatten_descriptor
from jax_kvcanary.spec import INT32_MAX, TARGET_VERSION, TARGETS, RealKvHashMode, TableKind
from jax_kvcanary.state import Plan, ScatterResult, VerifyPlan, VerifyResult, ViolationLog, WritePlan, WriteResult

ERROR = jax.errors.JaxRuntimeError
STATE = ("records", "source_tags", "ring", "write_index", "slot_run_counter", "kernel_run_counter")
BS, CAPACITY, REQUESTS, TOKENS, SLOTS = 3, 8, 4, 6, strategies.SLOTS
I32, U32 = np.dtype(np.int32), np.dtype(np.uint32)
NOTHING = np.zeros(0, np.int32)

Shape = tuple[tuple[int, ...], np.dtype]


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call. aliases: operand to result, for those that repeat a state."""

    target: str
    operands: dict[str, Any]
    results: dict[str, Shape]
    attributes: dict[str, Any]
    aliases: dict[str, str]

    def run(self, *, aliased: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Its results; ``aliased`` operands share memory with their result."""
        names = list(self.operands)
        outs = list(self.results)
        pairs = {names.index(name): outs.index(self.aliases[name]) for name in aliased}
        call = jax.ffi.ffi_call(
            self.target,
            [jax.ShapeDtypeStruct(*shape) for shape in self.results.values()],
            input_output_aliases=pairs,
            has_side_effect=not outs,  # a call without results would be removed
        )
        got = jax.jit(lambda *operands: call(*operands, **self.attributes))(*self.operands.values())
        return {name: np.asarray(value) for name, value in zip(outs, got, strict=True)}

    def with_operand(self, name: str, value: Any) -> Call:
        return dataclasses.replace(self, operands={**self.operands, name: value})

    def with_result(self, name: str, shape: tuple[int, ...], dtype: Any) -> Call:
        return dataclasses.replace(self, results={**self.results, name: (shape, np.dtype(dtype))})

    def with_attributes(self, **attributes: Any) -> Call:
        return dataclasses.replace(self, attributes={**self.attributes, **attributes})

    def without(self, field: str, name: str) -> Call:
        return dataclasses.replace(self, **{field: {key: value for key, value in getattr(self, field).items() if key != name}})


def shape_of(value: Any) -> Shape:
    return tuple(value.shape), np.dtype(value.dtype)


# ---------------------------------------------------------------------------------------------- calls that are right


@functools.cache
def pool() -> strategies.World:
    return strategies.world(
        slots=SLOTS, words=16, sources="three", mode=2, tags=True, narrow=True, chains=strategies.loose_chains(SLOTS, 0), seed=0
    )


def numbers(**values: int | bool) -> dict[str, Any]:
    return {name: np.int64(value) for name, value in values.items()}


def launch(log: ViolationLog) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """State operands, the buffers, and the attributes that launches on records share."""
    there = pool()
    state = dict(zip(STATE, (there.records, there.tags, *dataclasses.astuple(log)), strict=True))
    buffers = {f"buffer{k}": buffer for k, buffer in enumerate(there.buffers)}
    sources = strategies.sources_of("three", SLOTS)[0]
    table = [number for k, source in enumerate(sources) for number in flatten_descriptor(source.descriptor(k))]
    attributes = {
        **numbers(abi=TARGET_VERSION, launch_tag=2, real_kv_hash_mode=2, extended_checks=True, strict=False, num_sources=3),
        **numbers(has_padding_slot=True, padding_slot=0),
        "source_table": np.array(table, np.int64),
    }
    return state, buffers, attributes


def used_log() -> ViolationLog:
    log = io.empty_log(16)
    log.write_index[0] = 2
    return log


CONTEXT = np.array([7, 1], np.uint32)
BATCH_NAMES = ("req_pool_indices", "prefix_lens")
TABLE_NAMES = ("table", "table_starts", "mapping", "expected_tokens", "valid_lens")


def batch() -> tuple[dict[str, Any], dict[str, Any]]:
    """Three requests in a table of rows, with a mapping and expected tokens; one entry leads nowhere."""
    there = pool()
    table = np.zeros((BS + 1, 6), np.int32)
    for r, chain in enumerate(there.chains):
        table[r + 1, :5] = chain
    table[2, 1] = SLOTS + 3
    expected = np.zeros((BS + 1, 6), np.int32)
    expected[1:, :5] = there.tokens
    operands = {
        "req_pool_indices": np.array([1, 2, 3], np.int32),
        "prefix_lens": np.array([2, 3, 0], np.int32),
        "extend_seq_lens": np.array([2, 0, 2], np.int32),
        "table": table,
        "table_starts": NOTHING,
        "mapping": np.arange(SLOTS, dtype=np.int32),
        "expected_tokens": expected,
        "valid_lens": np.array([2, 3, 0], np.int32),
    }
    attributes = numbers(
        swa_window_size=0,
        kv_token_id_vs_position_offset=0,
        has_padding_req=True,
        padding_req=0,
        table_kind=TableKind.ROWS,
        table_page_size=1,
        table_rows=BS + 1,
        table_width=6,
        has_mapping=True,
        has_expected=True,
    )
    return operands, attributes


def plan_call() -> Call:
    operands, attributes = batch()
    entries = ("slot_indices", "entry_tokens", "entry_positions", "prev_slot_indices", "batch_rows")
    results = {
        **dict.fromkeys(entries, ((CAPACITY,), I32)),
        "num_valid": ((1,), I32),
        "enable": ((1,), I32),
        "write_offsets": ((REQUESTS + 1,), I32),
        "seeds": ((REQUESTS,), I32),
        "num_valid_reqs": ((1,), I32),
        "row_status": ((BS,), I32),
        "scratch": ((BS + 1, 2), U32),
    }
    more = numbers(abi=TARGET_VERSION, verify_capacity=CAPACITY, write_req_capacity=REQUESTS, extended_checks=True, wide=False)
    return Call(TARGETS["plan"], operands, results, {**attributes, **more}, {})


def _check_call(op: str, operands: dict[str, Any], attributes: dict[str, Any], scratch: int) -> Call:
    state, buffers, shared = launch(used_log())
    operands = {**state, **operands, "namespaces": pool().namespaces.astype(np.int32), "context": CONTEXT}
    operands.update(source_window=np.array([0, 3], np.int32), **buffers)
    results = {
        **{name: shape_of(state[name]) for name in STATE[2:]},
        "verdict": ((BS,), I32),
        "first_bad_position": ((BS,), I32),
        "unattested": ((BS,), I32),
        "first_unattested_position": ((BS,), I32),
        "scratch": ((scratch + 32 * 3,), U32),
        **{f"{name}_out": shape_of(buffer) for name, buffer in buffers.items()},
    }
    attributes = {**shared, **attributes, **numbers(check_expected_token=True, rotate=False, pass_through=True)}
    aliases = {**{name: name for name in STATE[2:]}, **{name: f"{name}_out" for name in buffers}}
    return Call(TARGETS[op], operands, results, attributes, aliases)


def verify_call() -> Call:
    there = pool()
    entries = [*there.entries[: CAPACITY - 1], (SLOTS + 5, 4, 1, -1, 2)]
    columns = np.array(entries, np.int64).astype(np.int32).T
    operands = {
        "slot_indices": columns[0],
        "entry_tokens": columns[1],
        "entry_positions": columns[2],
        "prev_slot_indices": columns[3],
        "batch_rows": columns[4],
        "num_valid": np.array([CAPACITY], np.int32),
        "enable": np.ones(1, np.int32),
        "row_status": np.array([0, 128, 0], np.int32),
        "req_pool_indices": np.array([1, 2, 3], np.int32),
    }
    return _check_call("verify", operands, {}, 0)


def verify_fused_call() -> Call:
    operands, attributes = batch()
    operands.pop("extend_seq_lens")
    return _check_call("verify_fused", operands, {**attributes, **numbers(position_stride=1)}, 2 * (BS + 1))


def write_call() -> Call:
    state, buffers, shared = launch(used_log())
    free = [slot for slot in range(SLOTS) if slot not in {slot for chain in pool().chains for slot in chain}]
    tokens = np.arange(100, 100 + TOKENS, dtype=np.int32)
    positions = np.array([5, 6, 5, 6, 0, 1], np.int32)
    operands = {
        **state,
        "write_offsets": np.array([0, 2, 4, 6, 6], np.int32),
        "seeds": np.array([pool().chains[0][-1], pool().chains[1][-1], -1, SLOTS + 9], np.int32),
        "num_valid_reqs": np.array([REQUESTS], np.int32),
        "input_ids": tokens,
        "positions": positions,
        "out_cache_loc": np.array([*free[:4], SLOTS, free[4]], np.int32),
        "expected_input_tokens": tokens + np.arange(TOKENS, dtype=np.int32) % 2,
        "expected_input_positions": positions,
        "enable_chain_position_assert": np.ones(1, np.int32),
        "req_pool_indices": np.arange(1, 5, dtype=np.int32),
        "request_ids": np.arange(40, 44, dtype=np.int32),
        "namespaces": np.arange(REQUESTS, dtype=np.int32),
        "context": CONTEXT,
        **buffers,
    }
    results = {
        **{name: shape_of(state[name]) for name in STATE},
        "verdict": ((REQUESTS,), I32),
        "scratch": ((4 * math.ceil((TOKENS * 5 + 1 + math.ceil(TOKENS / 32)) / 4) + 32 * 3,), U32),
    }
    attributes = {**shared, **numbers(enable_write_input_assert=True, record_flags=2)}
    return Call(TARGETS["write"], operands, results, attributes, {name: name for name in STATE})


def scatter_call() -> Call:
    before = np.arange(20, dtype=np.int32).reshape(4, 5)
    operands = {
        "flat_in": np.arange(50, 58, dtype=np.int32),
        "offsets": np.array([0, 3, 8, 9], np.int32),
        "req_pool_indices": np.array([2, 0, 1], np.int32),
        "pool_out": before,
    }
    results = {"pool": shape_of(before), "status": ((BS,), I32)}
    return Call(TARGETS["scatter"], operands, results, numbers(abi=TARGET_VERSION), {"pool_out": "pool"})


CALLS = {
    "plan": plan_call, "verify": verify_call, "verify_fused": verify_fused_call, "write": write_call, "scatter": scatter_call,
}  # fmt: skip

every_call = pytest.mark.parametrize("op", CALLS)


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device that calls run on."""
    info = backend_info()["cuda" if request.param == "gpu" else "cpu"]
    if not info.compiled:
        pytest.skip(info.detail)
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def refused(call: Call, what: str, text: str = "") -> None:
    """The call ends in an error of the library."""
    with pytest.raises(ERROR) as caught:
        call.run()
    message = str(caught.value)
    assert "kv-canary: " in message and text in message, f"{what}: {message}"


# ---------------------------------------------------------------------------------------------- state that is not aliased


def log_of(values: dict[str, Any]) -> ViolationLog:
    return ViolationLog(**{name: values[name] for name in STATE[2:]})


def case_of(op: str, call: Call) -> Case:
    """The call as the library and the reference take it."""
    x = call.operands
    if op == "scatter":
        return Case("scatter_req_token_ids", x, {}, False)
    layout = {}
    if op in ("plan", "verify_fused"):
        layout = {name: x[name] for name in BATCH_NAMES}
        layout.update(
            req_to_token=strategies.RowTable(x["table"]),
            full_to_swa_index_mapping=x["mapping"],
            req_to_verify_expected_tokens=x["expected_tokens"],
            req_to_verify_expected_tokens_valid_lens=x["valid_lens"],
        )
    if op == "plan":
        layout["extend_seq_lens"] = x["extend_seq_lens"]
        return Case("plan", layout, {"verify_capacity": CAPACITY, "write_req_capacity": REQUESTS}, False)
    arrays = {
        "records": x["records"],
        "source_tags": x["source_tags"],
        "log": log_of(x),
        "real_kv_buffers": pool().buffers,
        "namespaces": x["namespaces"],
        "step": CONTEXT[0],
        "shard": CONTEXT[1],
        **layout,
    }
    static: dict[str, Any] = {
        "launch_tag": 2,
        "real_kv_hash_mode": int(RealKvHashMode.ALL),
        "real_kv_sources": strategies.sources_of("three", SLOTS)[0],
        "strict": False,
    }
    if op == "write":
        arrays["plan"] = WritePlan(
            write_offsets=x["write_offsets"],
            write_seed_slot_indices=x["seeds"],
            write_num_valid_reqs=x["num_valid_reqs"],
            req_pool_indices=x["req_pool_indices"],
        )
        names = ("input_ids", "positions", "out_cache_loc", "expected_input_tokens", "expected_input_positions", "request_ids")
        arrays.update({name: x[name] for name in (*names, "enable_chain_position_assert")})
        static.update(enable_write_input_assert=True, record_flags=2)
        return Case("write", arrays, static, False)
    static.update(check_verify_expected_token=True, pass_through=True)
    if op == "verify":
        arrays["plan"] = VerifyPlan(
            slot_indices=x["slot_indices"],
            expected_tokens=x["entry_tokens"],
            expected_positions=x["entry_positions"],
            prev_slot_indices=x["prev_slot_indices"],
            batch_rows=x["batch_rows"],
            num_valid=x["num_valid"],
            enable=x["enable"],
            row_status=x["row_status"],
            req_pool_indices=x["req_pool_indices"],
        )
    else:
        static["position_stride"] = 1
    return Case(op, arrays, static, False)


def result_of(op: str, call: Call, got: dict[str, np.ndarray]) -> Any:
    """Flat results as the library returns them."""
    if op == "scatter":
        return ScatterResult(pool=got["pool"], status=got["status"])
    if op == "plan":
        return Plan(
            verify=VerifyPlan(
                slot_indices=got["slot_indices"],
                expected_tokens=got["entry_tokens"],
                expected_positions=got["entry_positions"],
                prev_slot_indices=got["prev_slot_indices"],
                batch_rows=got["batch_rows"],
                num_valid=got["num_valid"],
                enable=got["enable"],
                row_status=got["row_status"],
                req_pool_indices=call.operands["req_pool_indices"],
            ),
            write=WritePlan(
                write_offsets=got["write_offsets"],
                write_seed_slot_indices=got["seeds"],
                write_num_valid_reqs=got["num_valid_reqs"],
                req_pool_indices=call.operands["req_pool_indices"],
            ),
        )
    if op == "write":
        return WriteResult(records=got["records"], source_tags=got["source_tags"], log=log_of(got), verdict=got["verdict"])
    buffers = tuple(got[f"buffer{k}_out"] for k in range(3))
    rows = {name: got[name] for name in ("verdict", "first_bad_position", "unattested", "first_unattested_position")}
    return VerifyResult(log=log_of(got), **rows, real_kv_buffers=buffers)


@every_call
@pytest.mark.parametrize("aliased", ["none", "all", "some"])
def test_aliases_are_the_callers_choice(op: str, aliased: str) -> None:
    """The calls that the others are made from are right, whether state operands share memory with their results or not."""
    call = CALLS[op]()
    names = {"none": (), "all": tuple(call.aliases), "some": tuple(call.aliases)[::2]}[aliased]
    case = case_of(op, call)
    strategies.assert_same(case, result_of(op, call, call.run(aliased=names)))
    if op not in ("plan", "scatter"):
        assert int(case.run_reference().log.write_index[0]) > 2, "the call should have something to report"


# ---------------------------------------------------------------------------------------------- wrong operands and results


@every_call
def test_operands_missing_or_too_many(op: str) -> None:
    call = CALLS[op]()
    for name in call.operands:
        refused(call.without("operands", name), f"without {name}")
    refused(dataclasses.replace(call, operands={}), "no operands", "missing")
    if op in ("plan", "scatter"):  # elsewhere it would be one more buffer, which is fine
        refused(call.with_operand("one more", NOTHING), "one more", "too many")


@every_call
def test_operands_in_another_order(op: str) -> None:
    call = CALLS[op]()
    names = list(call.operands)
    refused(dataclasses.replace(call, operands={name: call.operands[name] for name in reversed(names)}), "reversed")


@every_call
def test_operands_of_another_type(op: str) -> None:
    call = CALLS[op]()
    for name, value in call.operands.items():
        if not name.startswith("buffer"):
            for dtype in (np.float32, np.int16, np.uint32 if value.dtype != np.uint32 else np.int32):
                refused(call.with_operand(name, value.astype(dtype)), f"{name} of {np.dtype(dtype)}")


@every_call
def test_operands_of_another_rank(op: str) -> None:
    call = CALLS[op]()
    for name, value in call.operands.items():
        if not name.startswith("buffer"):
            refused(call.with_operand(name, value.reshape(*value.shape, 1)), f"{name} with an axis more")
            refused(call.with_operand(name, np.zeros((), value.dtype)), f"{name} as a scalar")
            refused(call.with_operand(name, np.zeros((0, 0, 0), value.dtype)), f"{name} empty")


ANY_LENGTH = {"table", "table_starts", "mapping", "expected_tokens", "flat_in"}
"""Operands whose length nothing else follows."""

SHORTER = {"batch_rows", "req_pool_indices", "request_ids", "namespaces"}
"""Operands that may be shorter: those of a write, and batch rows and namespaces of a verify."""


@every_call
def test_operands_of_another_length(op: str) -> None:
    call = CALLS[op]()
    for name, value in call.operands.items():
        if name in ANY_LENGTH:
            continue
        if name.startswith("buffer"):
            refused(call.with_operand(name, value[:-1]), f"{name} shorter")
            continue
        refused(call.with_operand(name, np.concatenate([value, value[-1:]])), f"{name} longer")
        if name not in SHORTER or (name == "req_pool_indices" and op != "write"):
            refused(call.with_operand(name, value[:-1]), f"{name} shorter")
            refused(call.with_operand(name, value[:0]), f"{name} empty")


@every_call
def test_operands_that_may_be_of_any_length(op: str) -> None:
    """Nothing is read past them: a run, and no error."""
    call = CALLS[op]()
    for name, value in call.operands.items():
        if name in ANY_LENGTH:
            for changed in (np.concatenate([value, value[-1:]]), value[:-1], value[:0]):
                call.with_operand(name, changed).run()
        elif name in SHORTER and (name != "req_pool_indices" or op == "write"):
            for changed in (value[:-1], value[:0]):
                call.with_operand(name, changed).run()


@every_call
def test_results(op: str, platform: str) -> None:
    call = CALLS[op]()
    for name, (shape, dtype) in call.results.items():
        refused(call.without("results", name), f"without result {name}")
        refused(call.with_result(name, shape, np.float32 if dtype != np.float32 else np.float64), f"result {name} of another type")
        refused(call.with_result(name, (*shape, 2), np.int16), f"result {name} of another rank")
        if name == "scratch":
            refused(call.with_result(name, (0,), dtype), "no scratch") if op != "scatter" else None
            call.with_result(name, (5000,), dtype).run()  # more is fine
            continue
        for n in (shape[0] + 1, max(shape[0] - 1, 0)):
            refused(call.with_result(name, (n, *shape[1:]), dtype), f"result {name} of length {n}")
    refused(call.with_result("one more", (1,), np.int32), "one more result", "too many")
    if platform == "cpu":  # elsewhere nothing waits for a call without results, so nobody hears of its error
        refused(dataclasses.replace(call, results={}), "no results")


# ---------------------------------------------------------------------------------------------- wrong attributes


HUGE = (-(2**63), 2**31, 2**63 - 1)
FLAGS = (
    "has_padding_slot has_padding_req has_mapping has_expected extended_checks strict wide check_expected_token rotate "
    "pass_through enable_write_input_assert"
).split()
OUT_OF_RANGE: dict[str, tuple[int, ...]] = {
    "abi": (0, 2, -1, *HUGE),
    "launch_tag": (-1, 12, *HUGE),
    "real_kv_hash_mode": (-1, 3, *HUGE),
    "num_sources": (-1, 2, 4, *HUGE),
    "verify_capacity": (-1, CAPACITY + 1, *HUGE),
    "write_req_capacity": (-1, 0, REQUESTS + 1, *HUGE),
    "swa_window_size": (-1, *HUGE),
    "kv_token_id_vs_position_offset": (-(2**31) - 1, *HUGE),
    "position_stride": (-1, 0, *HUGE),
    "table_kind": (-1, 4, *HUGE),
    "table_page_size": (-1, 0, *HUGE),
    "table_rows": (-1, *HUGE),
    "table_width": (-1, *HUGE),
    "record_flags": (-1, 2**32, -(2**63), 2**63 - 1),
    **dict.fromkeys(FLAGS, (-1, 2, *HUGE)),
}
UNREAD = {("plan", "extended_checks")}
"""Attributes that a handler does not look at."""

ANY_VALUE = ("padding_slot", "padding_req")


@every_call
def test_attributes_missing_or_of_another_type(op: str) -> None:
    call = CALLS[op]()
    for name, value in call.attributes.items():
        if (op, name) in UNREAD:
            continue
        refused(call.without("attributes", name), f"without {name}", name)
        others = (np.array([1.5]), "text") if name == "source_table" else (np.int32(value), float(value), bool(value))
        for other in others:
            refused(call.with_attributes(**{name: other}), f"{name} as {type(other).__name__}", name)


@every_call
def test_attributes_out_of_range(op: str) -> None:
    call = CALLS[op]()
    known = set(OUT_OF_RANGE) | set(ANY_VALUE) | {"source_table"}
    assert set(call.attributes) <= known
    for name in set(call.attributes) & set(OUT_OF_RANGE):
        for value in OUT_OF_RANGE[name]:
            if (op, name) not in UNREAD:
                refused(call.with_attributes(**{name: np.int64(value)}), f"{name}={value}")
    for name in set(call.attributes) & set(ANY_VALUE):
        for value in HUGE:
            call.with_attributes(**{name: np.int64(value)}).run()


@every_call
def test_attributes_that_disagree_with_the_operands(op: str) -> None:
    call = CALLS[op]()
    if op in ("plan", "verify_fused"):
        flat = call.with_attributes(table_kind=np.int64(TableKind.FLAT))
        refused(flat, "a table of two dimensions as a flat one")
        refused(flat.with_operand("table", np.zeros(8, np.int32)), "no starts", "table_starts")
        starts = flat.with_operand("table_starts", np.array([0, 4, 8, 9], np.int32))
        refused(starts, "a table of two dimensions as a flat one", "1-D")
        starts.with_operand("table", np.zeros(8, np.int32)).run()
        for kind in (TableKind.ROWS, TableKind.BLOCKS):
            one = call.with_attributes(table_kind=np.int64(kind)).with_operand("table", np.zeros(8, np.int32))
            refused(one, "a table of one dimension", "2-D")
        ring = call.with_attributes(table_kind=np.int64(TableKind.IDENTITY), table_rows=np.int64(2**16), table_width=np.int64(2**16))
        refused(ring, "slots past int32", "int32")
        refused(call.with_operand("valid_lens", NOTHING), "expected tokens without lengths", "valid_lens")
        refused(call.with_operand("expected_tokens", np.zeros(6, np.int32)), "expected tokens of one dimension", "2-D")
        call.with_operand("mapping", NOTHING).run()  # every slot is out of range
    if op in ("verify", "verify_fused"):
        none = call.with_operand("source_tags", np.zeros((0, 0), np.uint32))
        none.run()
        refused(none.with_attributes(rotate=np.int64(1)), "rotation without tags", "source_tags")
        refused(call.with_attributes(pass_through=np.int64(0)), "buffers nobody asked for", "too many results")
    if op in ("verify", "verify_fused", "write"):
        refused(call.with_operand("source_tags", np.zeros((SLOTS, 2), np.uint32)), "a tag too few", "source_tags")
        refused(call.with_operand("source_tags", np.zeros((SLOTS - 1, 3), np.uint32)), "tags of other slots", "source_tags")
        few = np.zeros((SLOTS, 7), np.uint32)
        refused(call.with_operand("records", few).with_result("records", *shape_of(few)), "records of seven words", "records")
    if op == "write":
        refused(call.with_operand("write_offsets", NOTHING), "no offsets", "write_offsets")
        refused(call.with_operand("expected_input_tokens", NOTHING), "an assert without tokens", "expected_input_tokens")
    if op == "plan":
        refused(call.with_attributes(wide=np.int64(1)), "64-bit results that are not there")


# ---------------------------------------------------------------------------------------------- source tables


def test_source_table_of_another_length(op: str = "write") -> None:
    call = CALLS[op]()
    table = call.attributes["source_table"]
    for changed in (table[:-1], np.concatenate([table, table[:1]]), table[:16], np.zeros(1, np.int64)):
        refused(call.with_attributes(source_table=changed), f"{changed.size} numbers", "source_table")


BYTES = 640
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2, 15, 16, 2**31 - 1, 2**31, 2**32, 2**58, 2**58 + 1, 2**62, 2**63 - 1)


def source_rows() -> st.SearchStrategy[list[int]]:
    """A source that fits a buffer of 640 bytes, of which a few numbers are replaced."""
    good = st.sampled_from(
        (
            [0, 0, 10, 4, 64, 16, 1, 1, 1, 1, 0, 0, 0, 0, 16, 16],
            [0, 3, 20, 1, 30, 0, 1, 1, 2, 3, 0, 0, 12, 4, 3, 17],
            [0, 0, 5, 8, 128, 16, 2, 2, 2, 2, 8, 4, 2, 1, 1, 16],
            [0, 0, 40, 1, 16, 0, 1, 1, 1, 1, 0, 0, 0, 0, 16, 0],
            [0, 0, 0, 7, 16, 0, 1, 1, 1, 1, 0, 0, 0, 0, 16, 16],
        )
    )
    change = st.dictionaries(st.integers(0, 15), st.one_of(st.sampled_from(EXTREMES), st.integers(-3, 700)), max_size=3)
    return st.builds(lambda row, new: [new.get(i, value) for i, value in enumerate(row)], good, change)


def fits(row: list[int]) -> bool:
    """Whether every byte that the source may name lies in its buffer."""
    buffer, offset, pages, page_size, page_stride, token_stride, *rest = row
    counts, strides, run_bytes, read_bytes = rest[:4], rest[4:8], rest[8], rest[9]
    if buffer != 0 or min(offset, pages, page_stride, token_stride, read_bytes, *strides) < 0 or min(page_size, run_bytes, *counts) < 1:
        return False
    if max(pages, page_size, *counts) > INT32_MAX or read_bytes > run_bytes * math.prod(counts):
        return False
    end = offset + run_bytes + sum((n - 1) * stride for n, stride in zip(counts, strides, strict=True))
    end += (pages - 1) * page_stride + (page_size - 1) * token_stride
    # Without pages nothing is read; numbers past any memory are refused all the same.
    return end <= BYTES if pages > 0 else max(offset, page_stride, token_stride, run_bytes, end, *strides) <= 2**40


def unclear(row: list[int]) -> bool:
    """A source with sizes past any memory that nothing multiplies: a handler may refuse it or read what there is."""
    unused = row[2] == 0 or fits(row)
    return unused and max(*row, row[14] * math.prod(row[6:10])) > 2**40


@settings(
    max_examples=80, derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(row=source_rows(), mode=st.sampled_from((1, 2)))
def test_source_tables(row: list[int], mode: int) -> None:
    """A source that does not fit its buffer is refused; one that does is read as the reference reads it."""
    slots = 48
    buffer = np.random.default_rng(1).integers(0, 256, BYTES, np.uint8)
    base = CALLS["write"]()
    fresh = {"records": np.zeros((slots, 8), np.uint32), "source_tags": np.zeros((0, 0), np.uint32)}
    every = np.arange(slots, dtype=np.int32)
    operands = {
        **base.operands,
        **fresh,
        "write_offsets": np.array([0, slots, slots, slots, slots], np.int32),
        "seeds": np.full(REQUESTS, -1, np.int32),
        "input_ids": every,
        "positions": every,
        "out_cache_loc": every,
        "expected_input_tokens": every,
        "expected_input_positions": every,
        "buffer0": buffer,
    }
    operands.pop("buffer1"), operands.pop("buffer2")
    results = {**base.results, **{name: shape_of(value) for name, value in fresh.items()}, "scratch": ((4 * slots,), U32)}
    attributes = {**base.attributes, "source_table": np.array(row, np.int64), "num_sources": np.int64(1)}
    attributes["real_kv_hash_mode"] = np.int64(mode)
    call = dataclasses.replace(base, operands=operands, results=results, attributes=attributes)
    if unclear(row):
        return
    if not fits(row):
        refused(call, f"source {row}")
        return
    descriptor = (*row[:6], tuple(row[6:10]), tuple(row[10:14]), row[14], row[15])
    hashes = reference.SourceReader([descriptor], [buffer], mode)
    count = hashes.slots(slots) if row[15] else slots  # a source that reads nothing limits nothing
    got = call.run()["records"]
    stored = io.counters_of(got[:, 6:8])
    assert stored[:count] == [hashes.hashes([slot])[slot].combined for slot in range(count)]
    assert not got[count:].any()
