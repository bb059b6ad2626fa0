"""The arrays of a canary as pytrees: violation log, plans, results, and their allocation."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.export
import jax.numpy as jnp

from jax_kvcanary import spec, validation

_T = TypeVar("_T")

Array = Any
"""A jax.Array, a NumPy array or a tracer: state containers hold whichever the caller works with."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree_dataclass(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass whose fields are all pytree children, also across ``jax.export``."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
    jax.export.register_pytree_node_serialization(
        cls, serialized_name=f"jax_kvcanary.{cls.__name__}", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
    )
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

    @classmethod
    def allocate(cls, *, ring_capacity: int) -> ViolationLog:
        """An empty log with room for ``ring_capacity`` rows; with 0 rows violations are counted and not stored."""
        rows = validation.static_capacity("ring_capacity", ring_capacity)
        return cls(
            ring=jnp.zeros((rows, spec.RING_WORDS), jnp.uint32),
            write_index=jnp.zeros((1,), jnp.int32),
            slot_run_counter=jnp.zeros((spec.NUM_LAUNCH_TAGS, 2), jnp.uint32),
            kernel_run_counter=jnp.zeros((spec.NUM_LAUNCH_TAGS, 2), jnp.uint32),
        )


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

    @classmethod
    def allocate(cls, *, verify_capacity: int, bs: int = 0) -> VerifyPlan:
        """A plan that checks nothing, with room for ``verify_capacity`` entries of ``bs`` batch rows."""
        capacity = _positive_capacity("VerifyPlan verify_capacity", verify_capacity)
        rows = validation.static_capacity("bs", bs)
        validation.validate_plan_statics(
            bs=rows, write_offsets_len=rows + 1, write_req_capacity=rows, verify_capacity=capacity, lut_len=0, has_swa_lut=False
        )
        # One array a field: state that is donated must not share buffers.
        entries = [jnp.full((capacity,), fill, jnp.int32) for fill in (0, -1, 0, -1, -1)]
        return cls(
            slot_indices=entries[0],
            expected_tokens=entries[1],
            expected_positions=entries[2],
            prev_slot_indices=entries[3],
            batch_rows=entries[4],
            num_valid=jnp.zeros((1,), jnp.int32),
            enable=jnp.ones((1,), jnp.int32),
            row_status=jnp.zeros((rows,), jnp.int32),
            req_pool_indices=jnp.full((rows,), -1, jnp.int32),
        )

    @classmethod
    def from_entries(
        cls,
        *,
        slot_indices: Array,
        expected_positions: Array,
        prev_slot_indices: Array,
        expected_tokens: Array | None = None,
        num_valid: Array | None = None,
    ) -> VerifyPlan:
        """A plan of hand-made entries that belong to no batch row, for sweeps and tests.

        Args:
          slot_indices: ``[n]`` slots to check: int32, int64, uint32 ``[n, 2]``, NumPy integers or a list.
          expected_positions: ``[n]`` position of each.
          prev_slot_indices: ``[n]`` slot of its predecessor; -1: it heads a chain; the padding slot: its predecessor cannot be reached.
          expected_tokens: ``[n]``, -1 is not compared; None compares none.
          num_valid: int32 ``[1]`` leading entries that count; None is all.
        """
        slots = validation.int_array("slot_indices", slot_indices, (None,), pairs=True)
        n = slots.shape[0]
        validation.fits_int32("verify_capacity", n)
        return cls(
            slot_indices=slots,
            expected_tokens=jnp.full((n,), -1, jnp.int32)
            if expected_tokens is None
            else validation.int_array("expected_tokens", expected_tokens, (n,), pairs=True),
            expected_positions=validation.int_array("expected_positions", expected_positions, (n,), pairs=True),
            prev_slot_indices=validation.int_array("prev_slot_indices", prev_slot_indices, (n,), pairs=True),
            batch_rows=jnp.zeros((0,), jnp.int32),
            num_valid=jnp.full((1,), n, jnp.int32) if num_valid is None else validation.count_array("num_valid", num_valid),
            enable=jnp.ones((1,), jnp.int32),
            row_status=jnp.zeros((0,), jnp.int32),
            req_pool_indices=jnp.zeros((0,), jnp.int32),
        )


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

    @classmethod
    def allocate(cls, *, write_req_capacity: int) -> WritePlan:
        """A plan that stamps nothing, with room for ``write_req_capacity`` requests."""
        capacity = _positive_capacity("WritePlan write_req_capacity", write_req_capacity)
        validation.validate_plan_statics(
            bs=0, write_offsets_len=capacity + 1, write_req_capacity=capacity, verify_capacity=0, lut_len=0, has_swa_lut=False
        )
        return cls(
            write_offsets=jnp.zeros((capacity + 1,), jnp.int32),
            write_seed_slot_indices=jnp.full((capacity,), -1, jnp.int32),
            write_num_valid_reqs=jnp.zeros((1,), jnp.int32),
            req_pool_indices=jnp.zeros((0,), jnp.int32),
        )


@pytree_dataclass
class Plan:
    """The two plans of a step."""

    verify: VerifyPlan
    write: WritePlan


@pytree_dataclass
class VerifyResult:
    """What a verify launch returns.

    log: the log to thread on. verdict, first_bad_position: int32 [bs].
    unattested, first_unattested_position: int32 [bs], with ``strict=False`` how many entries of a batch row were left unchecked since
      nobody wrote their slots, and the smallest position among them (-1: none); else 0 and -1.
    real_kv_buffers: the pool handed through with ``pass_through=True``, else an empty tuple.
    """

    log: ViolationLog
    verdict: Array
    first_bad_position: Array
    unattested: Array
    first_unattested_position: Array
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


def allocate_records(*, slots: int, provenance: bool = False) -> jax.Array:
    """Fresh records, uint32 ``[slots, 8]``, or ``[slots, 16]`` with room for who wrote a slot and when.

    Example:
      >>> allocate_records(slots=4, provenance=True).shape
      (4, 16)
    """
    rows = validation.static_capacity("slots", slots)
    words = spec.PROVENANCE_RECORD_WORDS if validation.static_bool("provenance", provenance) else spec.RECORD_WORDS
    return jnp.zeros((rows, words), jnp.uint32)


def allocate_source_tags(*, slots: int, sources: int) -> jax.Array:
    """Fresh source tags, uint32 ``[slots, sources]``.

    Example:
      >>> allocate_source_tags(slots=4, sources=2).shape
      (4, 2)
    """
    shape = (validation.static_capacity("slots", slots), validation.static_capacity("sources", sources))
    return jnp.zeros(shape, jnp.uint32)


def _positive_capacity(name: str, value: Any) -> int:
    capacity = validation.static_int(name, value)
    if capacity <= 0:
        raise validation.error(f"{name} must be positive, got {capacity}")
    return validation.fits_int32(name, capacity)
