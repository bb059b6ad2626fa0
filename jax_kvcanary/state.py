"""The arrays of a canary as pytrees: violation log, plans, results, and their allocation."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")

Array = Any
"""A jax.Array, a NumPy array or a tracer: state containers hold whichever the caller works with."""


def pytree_dataclass(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass whose fields are all pytree children."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
    return cls


@pytree_dataclass
class ViolationLog:
    """Where launches report: a ring that fills once, and what was run.

    ring: uint32 [rows, 32], sixteen 64-bit columns a row as (low, high) words.
    write_index: int32 [1], rows reported so far; beyond ``rows`` they are counted, not stored.
    slot_run_counter, kernel_run_counter: uint32 [12, 2], 64-bit counts a launch tag.
    """

    ring: Array
    write_index: Array
    slot_run_counter: Array
    kernel_run_counter: Array


@pytree_dataclass
class VerifyPlan:
    """What one verify launch checks.

    slot_indices, expected_tokens, expected_positions, prev_slot_indices, batch_rows: [verify_capacity].
    num_valid, enable: int32 [1]. row_status: int32 [bs]. req_pool_indices: [bs].
    """

    slot_indices: Array
    expected_tokens: Array
    expected_positions: Array
    prev_slot_indices: Array
    batch_rows: Array
    num_valid: Array
    enable: Array
    row_status: Array
    req_pool_indices: Array


@pytree_dataclass
class WritePlan:
    """What one write launch stamps.

    write_offsets: [write_req_capacity + 1]. write_seed_slot_indices: [write_req_capacity].
    write_num_valid_reqs: int32 [1]. req_pool_indices: at most [write_req_capacity], may be empty.
    """

    write_offsets: Array
    write_seed_slot_indices: Array
    write_num_valid_reqs: Array
    req_pool_indices: Array


@pytree_dataclass
class Plan:
    """The two plans of a step."""

    verify: VerifyPlan
    write: WritePlan


@pytree_dataclass
class VerifyResult:
    """What a verify launch returns.

    log: the log to thread on. verdict, first_bad_position: int32 [bs].
    real_kv_buffers: the pool handed through with ``pass_through=True``, else an empty tuple.
    """

    log: ViolationLog
    verdict: Array
    first_bad_position: Array
    real_kv_buffers: tuple[Array, ...]


@pytree_dataclass
class WriteResult:
    """What a write launch returns: records, source tags (or None), log, and a verdict int32 [write_req_capacity]."""

    records: Array
    source_tags: Array | None
    log: ViolationLog
    verdict: Array


@pytree_dataclass
class ScatterResult:
    """The token pool after a scatter and a status int32 [bs]: 0, or 128 where nothing was copied."""

    pool: Array
    status: Array
