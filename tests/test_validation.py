"""Static checks: every message, at call time and under jit, and what becomes of 64-bit values."""
# ruff: noqa: E501 - tables of cases, a case a line

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import (
    BlockTable,
    CanaryLaunchCapacities,
    CanaryLaunchTag,
    FlatTable,
    IdentityTable,
    RealKvHashMode,
    RealKvSource,
    RecordFlag,
    VerifyPlan,
    ViolationLog,
    WritePlan,
    adopt,
    allocate_records,
    allocate_source_tags,
    backend,
    make_row_source,
    plan,
    scatter_req_token_ids,
    validate_plan_statics,
    verify,
    verify_fused,
    write,
)

SLOTS, BS, ENTRIES, TOKENS = 12, 2, 4, 3
i32 = functools.partial(np.asarray, dtype=np.int32)


def statics(**changes: Any) -> None:
    good = {"bs": 2, "write_offsets_len": 4, "write_req_capacity": 3, "verify_capacity": 8, "lut_len": 0, "has_swa_lut": False}
    validate_plan_statics(**(good | changes))


def call_plan(**changes: Any) -> Any:
    good: dict[str, Any] = {
        "req_pool_indices": i32([1, 2]),
        "prefix_lens": i32([1, 2]),
        "extend_seq_lens": i32([1, 2]),
        "req_to_token": np.zeros((3, 5), np.int32),
        "verify_capacity": 8,
        "write_req_capacity": 2,
    }
    return plan(**(good | changes))


def entries(**changes: Any) -> VerifyPlan:
    good: dict[str, Any] = {
        "slot_indices": i32([1] * ENTRIES),
        "expected_tokens": i32([-1] * ENTRIES),
        "expected_positions": i32([0] * ENTRIES),
        "prev_slot_indices": i32([-1] * ENTRIES),
        "batch_rows": i32([0] * ENTRIES),
        "num_valid": i32([ENTRIES]),
        "enable": i32([1]),
        "row_status": i32([0] * BS),
        "req_pool_indices": i32([1] * BS),
    }
    return VerifyPlan(**(good | changes))


def log(**changes: Any) -> ViolationLog:
    good: dict[str, Any] = {
        "ring": np.zeros((4, 32), np.uint32),
        "write_index": i32([0]),
        "slot_run_counter": np.zeros((12, 2), np.uint32),
        "kernel_run_counter": np.zeros((12, 2), np.uint32),
    }
    return ViolationLog(**(good | changes))


def call_verify(**changes: Any) -> Any:
    good: dict[str, Any] = {"records": np.zeros((SLOTS, 8), np.uint32), "log": log(), "plan": entries(), "launch_tag": 0}
    return verify(**(good | changes))


def call_verify_fused(**changes: Any) -> Any:
    good: dict[str, Any] = {
        "records": np.zeros((SLOTS, 8), np.uint32),
        "log": log(),
        "req_pool_indices": i32([1, 2]),
        "prefix_lens": i32([1, 2]),
        "req_to_token": np.zeros((3, 5), np.int32),
        "launch_tag": 0,
    }
    return verify_fused(**(good | changes))


def write_plan(**changes: Any) -> WritePlan:
    good: dict[str, Any] = {
        "write_offsets": i32([0, 1, 3]),
        "write_seed_slot_indices": i32([-1, -1]),
        "write_num_valid_reqs": i32([2]),
        "req_pool_indices": i32([1, 2]),
    }
    return WritePlan(**(good | changes))


def call_write(**changes: Any) -> Any:
    good: dict[str, Any] = {
        "records": np.zeros((SLOTS, 8), np.uint32),
        "log": log(),
        "plan": write_plan(),
        "input_ids": i32([1, 2, 3]),
        "positions": i32([0, 0, 1]),
        "out_cache_loc": i32([1, 2, 3]),
        "launch_tag": 0,
    }
    return write(**(good | changes))


def call_scatter(**changes: Any) -> Any:
    good: dict[str, Any] = {
        "flat_in": i32([1, 2, 3]),
        "offsets": i32([0, 1, 3]),
        "req_pool_indices": i32([0, 1]),
        "pool_out": np.zeros((2, 4), np.int32),
    }
    return scatter_req_token_ids(**(good | changes))


CALLS: dict[str, Callable[..., Any]] = {
    "plan": call_plan,
    "verify": call_verify,
    "verify_fused": call_verify_fused,
    "write": call_write,
    "scatter": call_scatter,
}


def source(**changes: Any) -> RealKvSource:
    good: dict[str, Any] = {"shape": (SLOTS, 32), "dtype": np.uint8, "page_size": 1, "num_bytes_per_token": 32, "read_bytes": 16}
    return RealKvSource(**(good | changes))


POOL = np.zeros((SLOTS, 32), np.uint8)

# ------------------------------------------------------------------------------------------------ plan statics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bs": -1}, "bs must be non-negative, got -1"),
        ({"write_req_capacity": -1}, "write_req_capacity must be non-negative, got -1"),
        ({"verify_capacity": -1}, "verify_capacity must be non-negative, got -1"),
        ({"write_offsets_len": 0}, "write_offsets_len must be positive, got 0"),
        ({"lut_len": -1}, "lut_len must be non-negative, got -1"),
        ({"has_swa_lut": 1}, "has_swa_lut must be bool, got int"),
        ({"has_swa_lut": None}, "has_swa_lut must be bool, got NoneType"),
        ({"has_swa_lut": True}, "lut_len must be positive when has_swa_lut is True"),
        ({"lut_len": 1}, "lut_len must be 0 when has_swa_lut is False"),
        ({"write_offsets_len": 5}, "write_offsets_len must equal write_req_capacity + 1, got 5 and 3"),
        ({"bs": 4}, "bs=4 exceeds write_req_capacity=3"),
        ({"verify_capacity": sys.maxsize}, f"verify_capacity must fit in int32 (at most 2147483647), got {sys.maxsize}"),
        ({"write_offsets_len": 2**31 + 1, "write_req_capacity": 2**31}, "write_req_capacity must fit in int32 (at most 2147483647), got 2147483648"),
    ],
)  # fmt: skip
def test_plan_statics(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        statics(**changes)
    assert str(caught.value) == f"kv-canary: {message}"


def test_plan_statics_in_order() -> None:
    """With everything wrong, one repair at a time reveals the next rule."""
    wrong: dict[str, Any] = {
        "bs": -1, "write_req_capacity": -1, "verify_capacity": -1, "write_offsets_len": 0, "lut_len": -1, "has_swa_lut": "x"
    }  # fmt: skip
    repairs: list[tuple[str, dict[str, Any]]] = [
        ("bs must be non-negative", {"bs": 9}),
        ("write_req_capacity must be non-negative", {"write_req_capacity": 3}),
        ("verify_capacity must be non-negative", {"verify_capacity": 0}),
        ("write_offsets_len must be positive", {"write_offsets_len": 1}),
        ("lut_len must be non-negative", {"lut_len": 0}),
        ("has_swa_lut must be bool", {"has_swa_lut": True}),
        ("lut_len must be positive when", {"lut_len": 5, "has_swa_lut": False}),
        ("lut_len must be 0 when", {"lut_len": 0}),
        ("write_offsets_len must equal", {"write_offsets_len": 4}),
        ("bs=9 exceeds write_req_capacity=3", {"bs": 3}),
    ]
    for message, repair in repairs:
        with pytest.raises(ValueError, match=message):
            validate_plan_statics(**wrong)
        wrong |= repair
    validate_plan_statics(**wrong)


@pytest.mark.parametrize("name", ["bs", "write_offsets_len", "write_req_capacity", "verify_capacity", "lut_len"])
@pytest.mark.parametrize("value", [True, 1.0, None, "1", np.float64(1), np.array(1)])
def test_plan_statics_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^kv-canary: {name} must be an int, got {type(value).__name__.rstrip('_')}"):
        statics(**{name: value})


def test_any_batch_size_and_numpy_integers_are_served() -> None:
    statics(bs=np.int64(100_000), write_req_capacity=np.uint32(100_000), write_offsets_len=100_001, verify_capacity=0)
    assert call_plan(verify_capacity=0).verify.slot_indices.shape == (0,)


# ------------------------------------------------------------------------------------------------ operands

MAPPING = np.arange(9, dtype=np.int32)
CONTEXT = np.zeros((3, 5), np.int32)
TAGS = np.zeros((SLOTS, 0), np.uint32)

ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("plan", {"verify_capacity": -1}, "verify_capacity must be non-negative, got -1"),
    ("plan", {"write_req_capacity": -1}, "write_req_capacity must be non-negative, got -1"),
    ("plan", {"write_req_capacity": 1}, "bs=2 exceeds write_req_capacity=1"),
    ("plan", {"full_to_swa_index_mapping": i32([])}, "lut_len must be positive when has_swa_lut is True"),
    ("plan", {"verify_capacity": sys.maxsize}, "verify_capacity must fit in int32"),
    ("plan", {"swa_window_size": 4}, "full_to_swa_index_mapping is required when swa_window_size > 0"),
    ("plan", {"swa_window_size": -1}, "swa_window_size must be non-negative, got -1"),
    ("plan", {"swa_window_size": sys.maxsize, "full_to_swa_index_mapping": MAPPING}, "swa_window_size must fit in int32"),
    ("plan", {"full_to_swa_index_mapping": MAPPING[None]}, "full_to_swa_index_mapping must be 1-D, got shape (1, 9)"),
    ("plan", {"full_to_swa_index_mapping": MAPPING.astype(np.float32)}, "full_to_swa_index_mapping must have dtype int32 or int64, got float32"),
    ("plan", {"req_to_verify_expected_tokens": CONTEXT}, "req_to_verify_expected_tokens_valid_lens is required when req_to_verify_expected_tokens is set"),
    ("plan", {"req_to_verify_expected_tokens_valid_lens": i32([1, 1])}, "req_to_verify_expected_tokens is required when"),
    ("plan", {"req_to_verify_expected_tokens": CONTEXT[0], "req_to_verify_expected_tokens_valid_lens": i32([1, 1])}, "req_to_verify_expected_tokens must be 2-D, got shape (5,)"),
    ("plan", {"req_to_verify_expected_tokens": CONTEXT, "req_to_verify_expected_tokens_valid_lens": i32([1])}, "req_to_verify_expected_tokens_valid_lens length must be 2, got 1"),
    ("plan", {"req_pool_indices": i32([[1, 2]])}, "req_pool_indices must be 1-D, got shape (1, 2)"),
    ("plan", {"req_pool_indices": i32(1)}, "req_pool_indices must be 1-D, got shape ()"),
    ("plan", {"prefix_lens": i32([1])}, "prefix_lens length must be 2, got 1"),
    ("plan", {"extend_seq_lens": i32([1, 2, 3])}, "extend_seq_lens length must be 2, got 3"),
    ("plan", {"prefix_lens": [[1], [1, 2]]}, "prefix_lens must be an array or a list whose rows have one length, got shapes [(1,), (2,)] in it"),
    ("plan", {"req_to_token": [[1, 2], 3]}, "req_to_token must be an array or a list whose rows have one length, got shapes [(), (2,)] in it"),
    ("plan", {"full_to_swa_index_mapping": [[1], [1, 2]]}, "full_to_swa_index_mapping must be an array or a list whose rows have one length"),
    ("verify_fused", {"full_to_swa_index_mapping": [1, [2]]}, "full_to_swa_index_mapping must be an array or a list whose rows have one length"),
    ("plan", {"prefix_lens": np.zeros(2, np.float32)}, "prefix_lens must have dtype int32 or int64, got float32"),
    ("plan", {"prefix_lens": np.zeros(2, bool)}, "prefix_lens must have dtype int32 or int64, got bool"),
    ("plan", {"prefix_lens": jnp.zeros(2, jnp.uint32)}, "prefix_lens must have dtype int32 or int64, got uint32"),
    ("plan", {"prefix_lens": jnp.zeros(2, jnp.int16)}, "prefix_lens must have dtype int32 or int64, got int16"),
    ("plan", {"req_to_token": i32([1, 2])}, "req_to_token must be 2-D, got shape (2,)"),
    ("plan", {"req_to_token": np.zeros((2, 2), np.float32)}, "req_to_token must have dtype int32 or int64, got float32"),
    ("plan", {"req_to_token": BlockTable(np.zeros((2, 2), np.int32), 0)}, "page_size must be >= 1, got 0"),
    ("plan", {"req_to_token": FlatTable(np.zeros(9, np.int32), i32([0, 1]))}, "req_to_token starts length must be 3, got 2"),
    ("plan", {"req_to_token": IdentityTable(3, 0)}, "width must be >= 1, got 0"),
    ("plan", {"req_to_token": IdentityTable(2**16, 2**16)}, "rows x width must fit in int32"),
    ("plan", {"implementation": "jaxx"}, "implementation must be one of 'auto', 'ffi', 'jax', got 'jaxx'"),
    ("plan", {"padding_req": 2**63}, "padding_req must be <= 9223372036854775807"),
    ("verify", {"launch_tag": 12}, "launch_tag must be one of HEAD_K_FULL=0, "),
    ("verify", {"launch_tag": -1}, "launch_tag must be one of HEAD_K_FULL=0, "),
    ("verify", {"real_kv_hash_mode": 3}, "real_kv_hash_mode must be one of NONE=0, PARTIAL=1, ALL=2, got 3"),
    ("verify", {"records": np.zeros((SLOTS, 7), np.uint32)}, "records must have at least 8 words a slot, got shape (12, 7)"),
    ("verify", {"records": np.zeros((SLOTS,), np.uint32)}, "records must be 2-D, got shape (12,)"),
    ("verify", {"records": np.zeros((SLOTS, 8), np.int32)}, "records must have dtype uint32, got int32"),
    ("verify", {"log": log(ring=np.zeros((4, 16), np.uint32))}, "log.ring axis 1 must be 32, got 16 (shape (4, 16))"),
    ("verify", {"log": log(ring=np.zeros((4, 32), np.int32))}, "log.ring must have dtype uint32, got int32"),
    ("verify", {"log": log(ring=np.zeros((4, 16, 2), np.uint32))}, "log.ring must be 2-D, got shape (4, 16, 2)"),
    ("verify", {"log": log(write_index=i32([0, 0]))}, "log.write_index length must be 1, got 2"),
    ("verify", {"log": log(write_index=np.zeros(1, np.uint32))}, "log.write_index must have dtype int32, got uint32"),
    ("verify", {"log": log(slot_run_counter=np.zeros((12, 1), np.uint32))}, "log.slot_run_counter axis 1 must be 2, got 1"),
    ("verify", {"log": log(kernel_run_counter=np.zeros((11, 2), np.uint32))}, "log.kernel_run_counter axis 0 must be 12, got 11"),
    ("verify", {"plan": entries(expected_tokens=i32([1]))}, "plan.expected_tokens length must be 4, got 1"),
    ("verify", {"plan": entries(expected_positions=i32([1]))}, "plan.expected_positions length must be 4, got 1"),
    ("verify", {"plan": entries(prev_slot_indices=i32([1] * 5))}, "plan.prev_slot_indices length must be 4, got 5"),
    ("verify", {"plan": entries(batch_rows=i32([1] * 5))}, "plan.batch_rows length must be 4, got 5"),
    ("verify", {"plan": entries(num_valid=i32([1, 2]))}, "plan.num_valid length must be 1, got 2"),
    ("verify", {"plan": entries(enable=i32(1))}, "plan.enable must be 1-D, got shape ()"),
    ("verify", {"plan": entries(slot_indices=np.zeros(4, np.float32))}, "plan.slot_indices must have dtype int32 or int64, or uint32 [n, 2] pairs, got float32"),
    ("verify", {"plan": entries(slot_indices=np.zeros((4, 3), np.uint32))}, "plan.slot_indices must be 1-D, got shape (4, 3)"),
    ("verify", {"plan": entries(row_status=i32([0, 0, 0]))}, "plan.req_pool_indices length must be 3, got 2"),
    ("verify", {"plan": entries(row_status=np.zeros(2, np.uint32))}, "plan.row_status must have dtype int32, got uint32"),
    ("verify", {"namespaces": i32([1])}, "namespaces length must be 2, got 1"),
    ("verify", {"source_window": (0, 1)}, "source_window needs source_tags"),
    ("verify", {"source_window": (0, 1, 2), "source_tags": np.zeros((SLOTS, 0), np.uint32)}, "source_window must be (start, count), got 3 values"),
    ("verify", {"source_window": (0, 0), "source_tags": TAGS}, "source_window must have a count of at least 1, got 0"),
    ("verify", {"source_window": [1, -3], "source_tags": TAGS}, "source_window must have a count of at least 1, got -3"),
    ("verify_fused", {"source_window": (0, np.int32(0)), "source_tags": TAGS}, "source_window must have a count of at least 1, got 0"),
    ("verify", {"source_window": (np.array(2**32 + 1), 1), "source_tags": TAGS}, "source_window[0] must be <= 2147483647, got 4294967297"),
    ("verify", {"source_window": (0, np.array([2**40])), "source_tags": TAGS}, "source_window[1] must be <= 2147483647, got 1099511627776"),
    ("verify", {"source_window": np.array([0, 2**40]), "source_tags": TAGS}, "source_window must fit in int32"),
    ("verify", {"source_window": i32([0]), "source_tags": np.zeros((SLOTS, 0), np.uint32)}, "source_window length must be 2, got 1"),
    ("verify", {"source_tags": np.zeros((SLOTS, 1), np.uint32)}, "source_tags must have shape (12, 0) (slots, sources), got (12, 1)"),
    ("verify", {"source_tags": np.zeros((SLOTS - 1, 0), np.uint32)}, "source_tags must have shape (12, 0) (slots, sources), got (11, 0)"),
    ("verify", {"source_tags": np.zeros((SLOTS, 0), np.int32)}, "source_tags must have dtype uint32, got int32"),
    ("verify", {"real_kv_sources": (source(),)}, "real_kv_buffers must hold one array a source, got 0 for 1 sources"),
    ("verify", {"real_kv_buffers": (POOL,)}, "real_kv_buffers must hold one array a source, got 1 for 0 sources"),
    ("verify_fused", {"real_kv_buffers": (POOL, POOL)}, "real_kv_buffers must hold one array a source, got 2 for 0 sources"),
    ("write", {"real_kv_buffers": (POOL,)}, "real_kv_buffers must hold one array a source, got 1 for 0 sources"),
    ("verify", {"real_kv_sources": (source(), source()), "real_kv_buffers": (POOL, POOL[:3])}, "real_kv_buffers[1] must have shape (12, 32) as real_kv_sources[1] says, got (3, 32)"),
    ("verify", {"real_kv_sources": (source(),), "real_kv_buffers": (POOL.astype(np.int8),)}, "real_kv_buffers[0] must have dtype uint8 as real_kv_sources[0] says, got int8"),
    ("verify", {"real_kv_sources": (RealKvSource.general(buffer_shape=(SLOTS, 32), buffer_dtype="uint8", pages=SLOTS, page_size=1, page_stride=32, token_stride=0, run_bytes=32, buffer_index=1),), "real_kv_buffers": (POOL,)}, "real_kv_sources[0] reads buffer 1, but there are 1 real_kv_buffers"),
    ("verify", {"step": -1}, "step must be >= 0, got -1"),
    ("verify", {"step": 2**32}, "step must be <= 4294967295, got 4294967296"),
    ("verify", {"shard": 2**32}, "shard must be <= 4294967295, got 4294967296"),
    ("verify", {"step": np.int64(2**32)}, "step must be <= 4294967295, got 4294967296"),
    ("verify", {"step": np.array(2**32)}, "step must be <= 4294967295, got 4294967296"),
    ("verify", {"step": np.array([-1])}, "step must be >= 0, got -1"),
    ("verify", {"shard": np.array(2**40 + 3, np.uint64)}, "shard must be <= 4294967295, got 1099511627779"),
    ("verify", {"step": np.zeros(2, np.int32)}, "step must be a scalar, got shape (2,)"),
    ("verify", {"step": np.zeros((), np.float32)}, "step must have an integer dtype, got float32"),
    ("verify_fused", {"swa_window_size": 2}, "full_to_swa_index_mapping is required when swa_window_size > 0"),
    ("verify_fused", {"full_to_swa_index_mapping": i32([])}, "lut_len must be positive when has_swa_lut is True"),
    ("verify_fused", {"position_stride": 0}, "position_stride must be at least 1, got 0"),
    ("verify_fused", {"position_stride": -3}, "position_stride must be at least 1, got -3"),
    ("verify_fused", {"position_stride": 2**31}, "position_stride must fit in int32 (at most 2147483647), got 2147483648"),
    ("verify_fused", {"prefix_lens": i32([1])}, "prefix_lens length must be 2, got 1"),
    ("verify_fused", {"namespaces": i32([1, 2, 3])}, "namespaces length must be 2, got 3"),
    ("verify_fused", {"source_window": (0, 1)}, "source_window needs source_tags"),
    ("verify_fused", {"req_to_verify_expected_tokens": CONTEXT}, "req_to_verify_expected_tokens_valid_lens is required when"),
    ("write", {"enable_write_input_assert": True}, "expected_input_tokens is required when enable_write_input_assert is True"),
    ("write", {"enable_write_input_assert": True, "expected_input_tokens": i32([1, 2, 3])}, "expected_input_positions is required when enable_write_input_assert is True"),
    ("write", {"expected_input_tokens": i32([1, 2, 3])}, "expected_input_tokens must be None when enable_write_input_assert is False"),
    ("write", {"expected_input_positions": i32([1, 2, 3])}, "expected_input_positions must be None when enable_write_input_assert is False"),
    ("write", {"enable_write_input_assert": True, "expected_input_tokens": i32([1]), "expected_input_positions": i32([1])}, "expected_input_tokens length must be 3, got 1"),
    ("write", {"positions": i32([1])}, "positions length must be 3, got 1"),
    ("write", {"out_cache_loc": i32([1] * 4)}, "out_cache_loc length must be 3, got 4"),
    ("write", {"input_ids": i32([[1]])}, "input_ids must be 1-D, got shape (1, 1)"),
    ("write", {"plan": write_plan(write_offsets=i32([0, 1]))}, "plan.write_offsets length must be 3, got 2"),
    ("write", {"plan": write_plan(write_num_valid_reqs=i32([0, 1]))}, "plan.write_num_valid_reqs length must be 1, got 2"),
    ("write", {"request_ids": i32([1, 2, 3])}, "request_ids length must be at most 2, got 3"),
    ("write", {"namespaces": i32([1, 2, 3])}, "namespaces length must be at most 2, got 3"),
    ("write", {"request_ids": i32([1])}, "request_ids length must be at least 2, that of plan.req_pool_indices, got 1"),
    ("write", {"namespaces": i32([])}, "namespaces length must be at least 2, that of plan.req_pool_indices, got 0"),
    ("write", {"plan": write_plan(req_pool_indices=i32([1, 2, 3]))}, "plan.req_pool_indices length must be at most 2, got 3"),
    ("write", {"record_flags": -1}, "record_flags must be >= 0, got -1"),
    ("write", {"record_flags": 2**32}, "record_flags must be <= 4294967295"),
    ("write", {"enable_chain_position_assert": i32([1, 1])}, "enable_chain_position_assert must be a scalar or have shape (1,), got shape (2,)"),
    ("write", {"enable_chain_position_assert": np.zeros(1, np.float32)}, "enable_chain_position_assert must have dtype int32 or bool, got float32"),
    ("scatter", {"offsets": i32([0, 1])}, "offsets length must be 3, got 2"),
    ("scatter", {"pool_out": np.zeros((2, 4), np.int64)}, "pool_out must have dtype int32, got int64"),
    ("scatter", {"pool_out": np.zeros(4, np.int32)}, "pool_out must be 2-D, got shape (4,)"),
    ("scatter", {"flat_in": np.zeros(3, np.float32)}, "flat_in must have dtype int32 or int64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "message"), ERRORS, ids=[f"{op}-{'-'.join(changes)}" for op, changes, _ in ERRORS])
@pytest.mark.parametrize("jit", [False, True], ids=["call", "jit"])
def test_value_errors(op: str, changes: dict[str, Any], message: str, jit: bool) -> None:
    """While tracing or before: no device ever sees the call."""
    with pytest.raises(ValueError) as caught:
        if jit:
            jax.jit(lambda: jax.tree.leaves(CALLS[op](**changes)))()
        else:
            CALLS[op](**changes)
    assert str(caught.value).startswith(f"kv-canary: {message}")


@pytest.mark.parametrize("op", CALLS)
def test_shapes_are_checked_on_traced_operands(op: str) -> None:
    """The same message when the wrong operand is a tracer."""
    name, shape = {
        "plan": ("prefix_lens", (3,)),
        "verify": ("namespaces", (3,)),
        "verify_fused": ("prefix_lens", (3,)),
        "write": ("positions", (4,)),
        "scatter": ("offsets", (2,)),
    }[op]
    with pytest.raises(ValueError, match=f"^kv-canary: {name} length must be"):
        jax.jit(lambda x: jax.tree.leaves(CALLS[op](**{name: x})))(jnp.zeros(shape, jnp.int32))


STATIC_INTS = [
    ("plan", "verify_capacity"),
    ("plan", "write_req_capacity"),
    ("plan", "swa_window_size"),
    ("plan", "kv_token_id_vs_position_offset"),
    ("plan", "padding_req"),
    ("verify", "launch_tag"),
    ("verify", "real_kv_hash_mode"),
    ("verify", "padding_slot"),
    ("verify_fused", "swa_window_size"),
    ("verify_fused", "position_stride"),
    ("write", "launch_tag"),
    ("write", "record_flags"),
]
STATIC_BOOLS = [
    ("verify", "check_verify_expected_token"),
    ("verify", "extended_checks"),
    ("verify", "strict"),
    ("verify_fused", "strict"),
    ("write", "strict"),
    ("verify", "pass_through"),
    ("write", "enable_write_input_assert"),
]


@pytest.mark.parametrize(("op", "name"), STATIC_INTS)
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_static_integers(op: str, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^kv-canary: {name} must be an int, got {type(value).__name__}"):
        CALLS[op](**{name: value})


@pytest.mark.parametrize(("op", "name"), STATIC_INTS + STATIC_BOOLS)
def test_static_values_are_not_traced(op: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"^kv-canary: {name} must be a static Python (integer|bool), got a traced value"):
        jax.jit(lambda x: jax.tree.leaves(CALLS[op](**{name: x})))(1)


@pytest.mark.parametrize(("op", "name"), STATIC_BOOLS)
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_static_bools(op: str, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^kv-canary: {name} must be a bool, got {type(value).__name__}"):
        CALLS[op](**{name: value})


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("verify", {"launch_tag": RealKvHashMode.ALL}, "launch_tag must be a CanaryLaunchTag, got RealKvHashMode"),
        ("verify", {"real_kv_hash_mode": None}, "real_kv_hash_mode must be an int, got NoneType"),
        ("verify_fused", {"position_stride": None}, "position_stride must be an int, got NoneType"),
        ("verify", {"log": None}, "log must be a ViolationLog, got NoneType"),
        ("verify", {"plan": write_plan()}, "plan must be a VerifyPlan, got WritePlan"),
        ("write", {"plan": entries()}, "plan must be a WritePlan, got VerifyPlan"),
        ("verify", {"records": [[0] * 8]}, "records must be an array, got list"),
        ("verify", {"real_kv_sources": source()}, "real_kv_sources must be a tuple of RealKvSource, got RealKvSource"),
        ("verify", {"real_kv_sources": (POOL,)}, "real_kv_sources must be a tuple of RealKvSource, got a ndarray in it"),
        ("verify", {"real_kv_sources": (source(),), "real_kv_buffers": POOL}, "real_kv_buffers must be a tuple of arrays, got ndarray"),
        ("verify", {"real_kv_sources": (source(),), "real_kv_buffers": (3,)}, r"real_kv_buffers\[0\] must be an array, got int"),
        ("verify", {"step": 1.0}, "step must be an int, got float"),
        ("verify", {"shard": True}, "shard must be an int, got bool"),
        ("verify", {"shard": None}, "shard must be an int, got NoneType"),
        ("verify", {"implementation": None}, "implementation must be a str, got NoneType"),
        ("write", {"enable_chain_position_assert": 1.0}, "enable_chain_position_assert must be a bool, an int or an array"),
        ("plan", {"prefix_lens": None}, "prefix_lens must be an array, got None"),
        ("plan", {"prefix_lens": [1, 2.5]}, "prefix_lens element must be an int, got float"),
        ("plan", {"prefix_lens": [1, True]}, "prefix_lens element must be an int, got bool"),
        ("plan", {"prefix_lens": [jnp.int32(1), jnp.int32(1)]}, "prefix_lens must be an array or a list of Python ints"),
        *[
            (op, {name: value}, f"{name} must {message}")
            for op, name in (
                ("plan", "prefix_lens"),
                ("plan", "req_to_token"),
                ("plan", "full_to_swa_index_mapping"),
                ("verify", "records"),
                ("verify", "namespaces"),
                ("verify", "step"),
                ("write", "input_ids"),
                ("write", "request_ids"),
                ("write", "enable_chain_position_assert"),
                ("scatter", "pool_out"),
            )
            for value, message in (
                (jax.ShapeDtypeStruct((2,), jnp.int32), "be .*, got ShapeDtypeStruct"),
                (jax.random.split(jax.random.key(0), 2), "have a dtype of numbers, got key<fry>"),
                (np.ma.array(i32([1, 2])), "be .* without a mask, got MaskedArray"),
            )
        ],
        *[
            ("verify", {"real_kv_sources": (source(),), "real_kv_buffers": (value,)}, rf"real_kv_buffers\[0\] must {message}")
            for value, message in (
                (jax.ShapeDtypeStruct((SLOTS, 32), jnp.uint8), "be an array, got ShapeDtypeStruct"),
                (jax.random.split(jax.random.key(0), 2), "have a dtype of numbers, got key<fry>"),
                (np.ma.array(POOL), "be an array without a mask, got MaskedArray"),
                (None, "be an array, got NoneType"),
            )
        ],
        ("plan", {"prefix_lens": 3}, "prefix_lens must be an array, got int"),
    ],
)
def test_type_errors(op: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^kv-canary: {message}"):
        CALLS[op](**changes)


def test_a_list_of_traced_values_says_what_to_do() -> None:
    for op, changes in (("plan", lambda x: {"prefix_lens": [x, x]}), ("plan", lambda x: {"full_to_swa_index_mapping": [x]})):
        with pytest.raises(
            TypeError, match=r"^kv-canary: \w+ must be an array or a list of Python ints, got a list of arrays; use jnp.stack"
        ):
            jax.jit(lambda x, op=op, changes=changes: jax.tree.leaves(CALLS[op](**changes(x))))(1)


def test_a_donated_operand_is_named() -> None:
    gone = jnp.zeros((SLOTS, 8), jnp.uint32)
    gone.delete()
    with pytest.raises(ValueError, match=r"^kv-canary: records was deleted \(donated to a step\); go on with what the step returned"):
        call_verify(records=gone)


def test_a_window_on_the_device_may_hold_anything() -> None:
    one = {"real_kv_sources": (source(),), "real_kv_buffers": (POOL,), "source_tags": np.zeros((SLOTS, 1), np.uint32)}
    for window in (i32([0, 0]), jnp.array([5, -3], jnp.int32), (0, jnp.int32(0))):
        assert call_verify(source_window=window, real_kv_hash_mode=2, **one).verdict.tolist() == [2, 0]


def test_values_of_requests_that_no_plan_names_may_be_fewer() -> None:
    none = write_plan(req_pool_indices=i32([]))
    out = call_write(plan=none, request_ids=i32([7]), namespaces=i32([]), records=np.zeros((SLOTS, 16), np.uint32))
    assert out.records[1:4, 8].tolist() == [7, 0, 0]


def test_only_keywords() -> None:
    for op in (plan, verify, verify_fused, write, scatter_req_token_ids):
        with pytest.raises(TypeError, match="positional"):
            op(np.zeros(1))


def test_enums_and_numbers_are_one() -> None:
    for tag, mode, flag in (
        (CanaryLaunchTag.TAIL_K_FULL, RealKvHashMode.ALL, RecordFlag.ADOPTED),
        (2, 2, 2),
        (np.int64(2), np.uint8(2), np.int8(2)),
    ):
        assert int(call_verify(launch_tag=tag, real_kv_hash_mode=mode).log.kernel_run_counter[2, 0]) == 1
        assert int(call_write(launch_tag=tag, record_flags=flag, records=np.zeros((SLOTS, 16), np.uint32)).records[1, 11]) == 2


def test_padding_may_be_absent_or_anything() -> None:
    for padding in (None, -1, 0, 2_000_000, 2**40, np.int64(3)):
        call_verify(padding_slot=padding)
        call_plan(padding_req=padding)


def test_adopt_flags() -> None:
    arguments: dict[str, Any] = {
        "records": allocate_records(slots=SLOTS, provenance=True), "log": log(), "plan": write_plan(), "input_ids": i32([1, 2, 3]),
        "positions": i32([0, 0, 1]), "out_cache_loc": i32([1, 2, 3]), "launch_tag": 0,
    }  # fmt: skip
    assert adopt(**arguments).records[1:4, 11].tolist() == [2, 2, 2]
    assert adopt(**arguments, record_flags=RecordFlag.FREE).records[1:4, 11].tolist() == [3, 3, 3]


# ------------------------------------------------------------------------------------------------ 64-bit values

BIG = [2**31, 2**40 + 5, -(2**35)]


@pytest.mark.parametrize("form", ["list", "numpy", "pairs", "x64"])
def test_64_bit_values_are_never_truncated(form: str) -> None:
    values = {"list": BIG, "numpy": np.array(BIG), "pairs": np.array(BIG).view(np.uint32).reshape(3, 2), "x64": np.array(BIG)}[form]
    with jax.enable_x64(form == "x64"):
        out = call_write(
            input_ids=values, positions=values, request_ids=values[:2], namespaces=values[1:], records=np.zeros((SLOTS, 16), np.uint32)
        )
        words = np.asarray(out.records)[1:4].view(np.int64)
    assert words[:, 0].tolist() == BIG and words[:, 1].tolist() == BIG
    assert words[:, 4].tolist() == [BIG[0], BIG[1], BIG[1]] and words[:, 6].tolist() == [BIG[1], BIG[2], BIG[2]]


@pytest.mark.parametrize("enabled", [False, True])
def test_unsigned_64_bit_ids(enabled: bool) -> None:
    ids = [2**64 - 1, 2**63]
    with jax.enable_x64(enabled):
        for given in (ids, np.array(ids, np.uint64)):
            out = call_write(request_ids=given, records=np.zeros((SLOTS, 16), np.uint32))
            assert np.asarray(out.records)[1:3].view(np.uint64)[:, 4].tolist() == ids
        if enabled:
            out = call_write(request_ids=jnp.asarray(np.array(ids, np.uint64)), records=np.zeros((SLOTS, 16), np.uint32))
            assert np.asarray(out.records)[1:3].view(np.uint64)[:, 4].tolist() == ids


@pytest.mark.parametrize("name", ["req_pool_indices", "prefix_lens", "extend_seq_lens"])
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_plan_operands_must_fit_int32(name: str, value: int) -> None:
    for given in ([0, value], np.array([0, value])):
        with pytest.raises(ValueError, match=f"^kv-canary: {name} must fit in int32 while jax_enable_x64 is off, got {value}"):
            call_plan(**{name: given})
    with jax.enable_x64(True):
        assert call_plan(**{name: np.array([0, value])}).verify.slot_indices.dtype == np.int64


def test_table_must_fit_int32() -> None:
    with pytest.raises(ValueError, match=r"^kv-canary: req_to_token must fit in int32"):
        call_plan(req_to_token=np.full((2, 2), 2**33))


@pytest.mark.parametrize(
    "name",
    ["req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token", "full_to_swa_index_mapping", "req_to_verify_expected_tokens"],
)
def test_plans_are_wide_if_any_input_is(name: str) -> None:
    arrays: dict[str, Any] = {
        "req_pool_indices": i32([1, 2]), "prefix_lens": i32([1, 2]), "extend_seq_lens": i32([1, 2]), "req_to_token": np.zeros((3, 5), np.int32),
        "full_to_swa_index_mapping": MAPPING, "req_to_verify_expected_tokens": CONTEXT, "req_to_verify_expected_tokens_valid_lens": i32([1, 1]),
    }  # fmt: skip
    with jax.enable_x64(True):
        narrow = call_plan(**arrays)
        wide = call_plan(**(arrays | {name: arrays[name].astype(np.int64)}))
    for field in ("slot_indices", "expected_tokens", "expected_positions", "prev_slot_indices", "batch_rows"):
        assert getattr(narrow.verify, field).dtype == np.int32 and getattr(wide.verify, field).dtype == np.int64
    assert (narrow.write.write_offsets.dtype, wide.write.write_offsets.dtype) == (np.int32, np.int64)
    assert wide.verify.num_valid.dtype == wide.verify.enable.dtype == wide.verify.row_status.dtype == np.int32


def test_small_numpy_integers_are_fine() -> None:
    call_plan(prefix_lens=np.array([1, 2], np.uint8), req_to_token=np.zeros((3, 5), np.int16))
    out = call_write(input_ids=np.array([1, 2, 2**32 - 1], np.uint32))
    assert np.asarray(out.records)[3].view(np.int64)[0] == 2**32 - 1


def test_step_and_shard_may_be_traced() -> None:
    bad = entries(slot_indices=i32([99] * 4))
    for step, shard in ((7, 3), (jnp.int32(7), np.uint32(3)), (jnp.array([7]), jnp.uint32(3))):
        ring = np.asarray(jax.jit(lambda step, shard: call_verify(plan=bad, step=step, shard=shard).log.ring)(step, shard))
        assert ring[0, 20] == 7 and ring[0, 30] == 3
    assert np.asarray(call_verify(plan=bad, step=2**32 - 1).log.ring)[0, 20] == 2**32 - 1


def test_chain_position_assert_forms() -> None:
    seeds = write_plan(write_seed_slot_indices=i32([5, 5]))
    for value, rows in (
        (None, 0),
        (False, 0),
        (0, 0),
        (True, 2),
        (jnp.array([1], jnp.int32), 2),
        (jnp.array(True), 2),
        (np.array([2], np.int64), 2),
        (np.array([2**32]), 2),
        (np.array(2**40, np.uint64), 2),
        (np.int64(2**32), 2),
        (np.array(0), 0),
    ):
        out = call_write(plan=seeds, enable_chain_position_assert=value, extended_checks=False)
        assert int(out.log.write_index[0]) == rows, value


# ------------------------------------------------------------------------------------------------ allocation


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: VerifyPlan.allocate(verify_capacity=0), ValueError, "VerifyPlan verify_capacity must be positive, got 0"),
        (lambda: VerifyPlan.allocate(verify_capacity=-1), ValueError, "VerifyPlan verify_capacity must be positive, got -1"),
        (lambda: VerifyPlan.allocate(verify_capacity=sys.maxsize), ValueError, "VerifyPlan verify_capacity must fit in int32"),
        (lambda: VerifyPlan.allocate(verify_capacity=True), TypeError, "VerifyPlan verify_capacity must be an int, got bool"),
        (lambda: WritePlan.allocate(write_req_capacity=0), ValueError, "WritePlan write_req_capacity must be positive, got 0"),
        (lambda: WritePlan.allocate(write_req_capacity=2**31), ValueError, "WritePlan write_req_capacity must fit in int32"),
        (lambda: ViolationLog.allocate(ring_capacity=-1), ValueError, "ring_capacity must be non-negative, got -1"),
        (lambda: ViolationLog.allocate(ring_capacity=sys.maxsize), ValueError, "ring_capacity must fit in int32"),
        (lambda: allocate_records(slots=-1), ValueError, "slots must be non-negative, got -1"),
        (lambda: allocate_records(slots=1.0), TypeError, "slots must be an int, got float"),
        (lambda: allocate_records(slots=1, provenance=1), TypeError, "provenance must be a bool, got int"),
        (lambda: allocate_source_tags(slots=1, sources=-1), ValueError, "sources must be non-negative, got -1"),
        (lambda: VerifyPlan.from_entries(slot_indices=[1], expected_positions=[], prev_slot_indices=[1]), ValueError, "expected_positions length must be 1, got 0"),
    ],
)  # fmt: skip
def test_allocation_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        make()


def test_allocated_state_does_nothing_and_shares_no_buffers() -> None:
    state = (
        allocate_records(slots=SLOTS),
        ViolationLog.allocate(ring_capacity=3),
        VerifyPlan.allocate(verify_capacity=4, bs=2),
        WritePlan.allocate(write_req_capacity=2),
    )
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]
    assert len(set(pointers)) == len(pointers)
    records, empty_log, verify_plan, no_writes = state
    checked = verify(records=records, log=empty_log, plan=verify_plan, launch_tag=0)
    out = write(records=records, log=checked.log, plan=no_writes, input_ids=[1], positions=[0], out_cache_loc=[3], launch_tag=2)
    assert not np.asarray(out.records).any() and int(out.log.write_index[0]) == 0
    assert out.log.kernel_run_counter[:, 0].tolist() == [1, 0, 1] + [0] * 9


def test_a_ring_without_rows_counts() -> None:
    out = call_verify(log=ViolationLog.allocate(ring_capacity=0))
    assert out.log.ring.shape == (0, 32) and int(out.log.write_index[0]) == ENTRIES


def test_capacities() -> None:
    sizes = CanaryLaunchCapacities.from_args(
        pool_slots=100, request_rows=8, graph_batch=16, draft_tokens=4, max_prefill_tokens=256, chunked_prefill_size=48
    )
    assert sizes == CanaryLaunchCapacities(
        per_forward_verify_capacity=300, per_forward_write_req_capacity=16, per_forward_write_entry_capacity=64
    )
    assert CanaryLaunchCapacities.from_args(pool_slots=1, request_rows=2, max_prefill_tokens=9).per_forward_write_entry_capacity == 9
    assert hash(sizes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pool_slots": 0}, ValueError, "pool_slots must be positive, got 0"),
        ({"pool_slots": -1}, ValueError, "pool_slots must be positive, got -1"),
        ({"request_rows": 0}, ValueError, "request_rows must be positive, got 0"),
        ({"max_prefill_tokens": 0}, ValueError, "max_prefill_tokens must be positive, got 0"),
        ({"chunked_prefill_size": -1}, ValueError, "chunked_prefill_size must be positive, got -1"),
        ({"draft_tokens": -1}, ValueError, "draft_tokens must be non-negative, got -1"),
        ({"pool_slots": sys.maxsize}, ValueError, "pool_slots must fit in int32"),
        ({"pool_slots": 2**30}, ValueError, "CanaryLaunchCapacities per_forward_verify_capacity must fit in int32"),
        ({"pool_slots": True}, TypeError, "pool_slots must be an int, got bool"),
        ({"chunked_prefill_size": 1.5}, TypeError, "chunked_prefill_size must be an int, got float"),
    ],
)
def test_capacity_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"pool_slots": 100, "request_rows": 8, "max_prefill_tokens": 64}
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        CanaryLaunchCapacities.from_args(**(good | changes))


def test_every_capacity_is_positive() -> None:
    with pytest.raises(ValueError, match=r"^kv-canary: CanaryLaunchCapacities per_forward_write_req_capacity must be positive, got 0"):
        CanaryLaunchCapacities(per_forward_verify_capacity=1, per_forward_write_req_capacity=0, per_forward_write_entry_capacity=1)


# ------------------------------------------------------------------------------------------------ backend


def test_an_old_jaxlib_is_refused() -> None:
    for version in ("0.9.2", "0.4.38"):
        with pytest.raises(ImportError, match=f"^kv-canary: jaxlib >= 0.10.0 is required, found {version}"):
            backend.check_jaxlib(version)
    for version in ("0.10.0", "0.12.0.1", "0.11.2.dev3", "1.0"):
        backend.check_jaxlib(version)


def test_constants_must_agree() -> None:
    backend.check_constants("m", {"RECORD_WORDS": 8, "VERIFY_TOKEN": 32, "MODE_ALL": 2, "TABLE_FLAT": 2, "FLAG_FREE": 1, "ABI": 1, "OK": 1})
    for name in ("RECORD_WORDS", "VERIFY_TOKEN", "MODE_ALL", "TABLE_FLAT", "FLAG_FREE", "ABI", "OK", "SPLITMIX_MULTIPLIER_1"):
        with pytest.raises(ImportError, match=f"^kv-canary: m was built for another version of this package: {name} is 77, expected"):
            backend.check_constants("m", {name: 77})


def test_a_module_newer_than_the_runtime_is_refused() -> None:
    backend.check_ffi_version("m", {"FFI_API_MAJOR": 0, "FFI_API_MINOR": 1})
    with pytest.raises(ImportError, match=r"^kv-canary: m was built with XLA FFI 0\.99, jaxlib .* runs 0\.\d+; upgrade jax and jaxlib"):
        backend.check_ffi_version("m", {"FFI_API_MAJOR": 0, "FFI_API_MINOR": 99})


def test_every_constant_of_the_compiled_module_is_compared() -> None:
    module = pytest.importorskip("jax_kvcanary._kvcanary_cpu", exc_type=ImportError)
    unknown = [name for name in module.constants() if backend.expected_constant(name) is None]
    assert unknown == ["FFI_API_MAJOR", "FFI_API_MINOR"]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_missing_target_is_named(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_targets", {})
    traced = jax.jit(lambda x: call_plan(prefix_lens=x, implementation="ffi")).trace(i32([1, 2]))
    with pytest.raises(
        NotImplementedError, match=f"^kv-canary: implementation='ffi' asks for .* kvcanary_plan_v1, which platform '{platform}'"
    ):
        traced.lower(lowering_platforms=(platform,))


def test_a_pool_that_jax_would_convert_is_refused() -> None:
    pool = np.zeros((SLOTS, 4), np.float64)
    arguments: dict[str, Any] = {"real_kv_sources": make_row_source(layer_buffer=pool, read_bytes=16), "real_kv_buffers": (pool,)}
    with pytest.raises(
        ValueError, match=r"^kv-canary: real_kv_buffers\[0\] has dtype float64, which JAX converts while jax_enable_x64 is off"
    ):
        call_verify(**arguments)
    with jax.enable_x64(True):
        call_verify(**arguments)


def test_sources_of_one_buffer_are_passed_once() -> None:
    pool = jnp.zeros((SLOTS, 64), jnp.uint8)
    (whole,) = make_row_source(layer_buffer=pool, read_bytes=16)
    text = jax.jit(
        lambda pool: call_verify(real_kv_sources=(whole, whole), real_kv_buffers=(pool, pool), real_kv_hash_mode=2, pass_through=True)
    ).lower(pool).as_text()  # fmt: skip
    calls = [line for line in text.splitlines() if "kvcanary_verify" in line]
    assert len(calls) == 1 and calls[0].split(" : (")[1].split(" -> ")[0].count("tensor<12x64xui8>") == 1
