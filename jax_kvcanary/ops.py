"""The operations of the canary: plan, verify, fused verify, write, adopt and scatter. All arguments are keyword-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import lowering, spec, validation
from jax_kvcanary.sources import Descriptor, RealKvSource
from jax_kvcanary.state import Array, Plan, ScatterResult, VerifyPlan, VerifyResult, ViolationLog, WritePlan, WriteResult
from jax_kvcanary.tables import ResolvedTable, Table, resolve_table

_ANY = None


def plan(
    *,
    req_pool_indices: Array,
    prefix_lens: Array,
    extend_seq_lens: Array,
    req_to_token: Array | Table,
    verify_capacity: int,
    write_req_capacity: int,
    swa_window_size: int = 0,
    full_to_swa_index_mapping: Array | None = None,
    req_to_verify_expected_tokens: Array | None = None,
    req_to_verify_expected_tokens_valid_lens: Array | None = None,
    kv_token_id_vs_position_offset: int = 0,
    padding_req: int | None = 0,
    implementation: str = "auto",
) -> Plan:
    """Lay out one step: which slots a verify checks and where a write continues each request's chain.

    Args:
      req_pool_indices: ``[bs]`` table row of each batch row; -1 and ``padding_req`` are padding.
      prefix_lens: ``[bs]`` tokens already written; negative counts as 0.
      extend_seq_lens: ``[bs]`` tokens written in this step; negative counts as 0.
      req_to_token: ``[rows, width]`` slots, or a table of :mod:`jax_kvcanary.tables`.
      verify_capacity: static, entries that the verify plan has room for. With more, ``enable`` is 0 and the step's verify is skipped.
      write_req_capacity: static, rows that the write plan has room for, at least ``bs``.
      swa_window_size: static, tokens; 0 is full attention.
      full_to_swa_index_mapping: ``[n]`` slot of the window pool for each slot of the full pool.
      req_to_verify_expected_tokens: ``[rows, context]`` tokens that a verify compares with.
      req_to_verify_expected_tokens_valid_lens: ``[bs]`` tokens of the batch row's context that are valid.
      kv_token_id_vs_position_offset: static, 0; 1 for a draft pool.
      padding_req: static, table row of padding requests; None: there is none.
      implementation: "auto", "ffi" (the custom call or an error) or "jax".

    All arrays are int32, or int64 with x64 on; 64-bit NumPy values must fit int32 with x64 off.

    Returns:
      The verify plan and the write plan; index arrays are int64 if any input is, else int32.

    Raises:
      ValueError: a shape, dtype or static size that breaks a rule. TypeError: a static argument of the wrong type.

    Example:
      >>> step = plan(
      ...     req_pool_indices=jnp.array([1], jnp.int32), prefix_lens=jnp.array([2], jnp.int32), extend_seq_lens=jnp.array([1], jnp.int32),
      ...     req_to_token=jnp.array([[0, 0, 0], [4, 5, 6]], jnp.int32), verify_capacity=8, write_req_capacity=1,
      ... )
      >>> step.verify.slot_indices[:2].tolist(), step.write.write_seed_slot_indices.tolist()
      ([4, 5], [5])
    """
    verify_capacity = validation.static_int("verify_capacity", verify_capacity)
    write_req_capacity = validation.static_int("write_req_capacity", write_req_capacity)
    request_rows = validation.int_array("req_pool_indices", req_pool_indices, (_ANY,), pairs=False)
    (bs,) = request_rows.shape
    validation.validate_plan_statics(
        bs=bs,
        write_offsets_len=write_req_capacity + 1 if write_req_capacity >= 0 else 0,
        write_req_capacity=write_req_capacity,
        verify_capacity=verify_capacity,
        lut_len=_lut_len(full_to_swa_index_mapping),
        has_swa_lut=full_to_swa_index_mapping is not None,
    )
    prefixes = validation.int_array("prefix_lens", prefix_lens, (bs,), pairs=False)
    extends = validation.int_array("extend_seq_lens", extend_seq_lens, (bs,), pairs=False)
    layout = _Layout.check(
        bs=bs,
        req_to_token=req_to_token,
        swa_window_size=swa_window_size,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        padding_req=padding_req,
    )
    operands = (request_rows, prefixes, extends, *layout.operands)
    out = lowering.bind(
        "plan",
        operands,
        verify_capacity=verify_capacity,
        write_req_capacity=write_req_capacity,
        extended_checks=True,
        wide=any(x.dtype == jnp.int64 for x in operands),
        implementation=validation.implementation(implementation),
        **layout.params,
    )
    slots, tokens, positions, previous, batch_rows, num_valid, enable, offsets, seeds, num_requests, row_status, _ = out
    return Plan(
        verify=VerifyPlan(
            slot_indices=slots,
            expected_tokens=tokens,
            expected_positions=positions,
            prev_slot_indices=previous,
            batch_rows=batch_rows,
            num_valid=num_valid,
            enable=enable,
            row_status=row_status,
            req_pool_indices=request_rows,
        ),
        write=WritePlan(
            write_offsets=offsets,
            write_seed_slot_indices=seeds,
            write_num_valid_reqs=num_requests,
            req_pool_indices=request_rows,
        ),
    )


def verify(
    *,
    records: Array,
    log: ViolationLog,
    plan: VerifyPlan,
    launch_tag: int | spec.CanaryLaunchTag,
    real_kv_hash_mode: int | spec.RealKvHashMode = spec.RealKvHashMode.NONE,
    real_kv_sources: Sequence[RealKvSource] = (),
    real_kv_buffers: Sequence[Array] = (),
    source_tags: Array | None = None,
    source_window: Array | tuple[Any, Any] | None = None,
    check_verify_expected_token: bool = False,
    namespaces: Array | None = None,
    step: int | Array = 0,
    shard: int | Array = 0,
    padding_slot: int | None = 0,
    extended_checks: bool = True,
    strict: bool = True,
    pass_through: bool = False,
    implementation: str = "auto",
) -> VerifyResult:
    """Check the planned slots against their records and report what differs.

    **Use the returned log, or jit removes the check.**

    Args:
      records: ``[slots, 8]`` uint32 or wider; only read.
      log: where violations go.
      plan: the verify half of :func:`plan`, or :meth:`VerifyPlan.from_entries`.
      launch_tag: static, which launch of the step this is.
      real_kv_hash_mode: static, the mode in which the records were stamped.
      real_kv_sources: static, where a slot's bytes are; the ones the records were stamped with.
      real_kv_buffers: one pool array a source (or as ``buffer_index`` says), of the source's shape and dtype.
      source_tags: ``[slots, sources]`` uint32; with them a violation names the first bad source.
      source_window: ``(start, count)`` of a rotated check over some of the sources, ints or int32 ``[2]``; needs ``source_tags``.
      check_verify_expected_token: static, compare tokens with the plan's expected ones.
      namespaces: ``[bs]`` 64-bit namespace of each batch row: int32, int64, or uint32 ``[bs, 2]``; None is 0.
      step, shard: what violation rows say about when and where: a Python int below 2**32, or a traced integer scalar.
      padding_slot: static, the slot of dummy writes, never checked; None: there is none.
      extended_checks: static; False gives the plain canary's rows and bits only.
      strict: static; False, with ``extended_checks``: a slot whose record was never written is counted as unattested and not checked,
        and a predecessor whose record is all zero is one that cannot be reached.
      pass_through: static, hand the buffers through (aliased): use it where the step updates the pool after this call, and go on
        with ``real_kv_buffers`` of the result; otherwise XLA may copy the pool.
      implementation: "auto", "ffi" (the custom call or an error) or "jax".

    Returns:
      The log, a verdict, the first bad position, the number of unattested entries and the first of them per batch row, and the buffers
      if passed through.

    Raises:
      ValueError: a shape, dtype, pairing or static value that breaks a rule. TypeError: a static argument of the wrong type.

    Example:
      >>> records, log = allocate_records(slots=4), ViolationLog.allocate(ring_capacity=8)
      >>> entries = VerifyPlan.from_entries(slot_indices=[2], expected_positions=[0], prev_slot_indices=[-1])
      >>> result = verify(records=records, log=log, plan=entries, launch_tag=CanaryLaunchTag.HEAD_K_FULL)
      >>> FailReason(int(result.log.ring[0, 14]))
      <FailReason.VERIFY_CHAIN_HASH|UNWRITTEN: 257>
    """
    common = _Common.check(
        records=records,
        log=log,
        launch_tag=launch_tag,
        real_kv_hash_mode=real_kv_hash_mode,
        real_kv_sources=real_kv_sources,
        real_kv_buffers=real_kv_buffers,
        source_tags=source_tags,
        step=step,
        shard=shard,
        padding_slot=padding_slot,
        extended_checks=extended_checks,
        strict=strict,
        implementation=implementation,
    )
    validation.instance("plan", plan, VerifyPlan)
    slots = validation.int_array("plan.slot_indices", plan.slot_indices, (_ANY,), pairs=True)
    entries = slots.shape[0]
    batch_rows = validation.int_array("plan.batch_rows", plan.batch_rows, (_ANY,), pairs=True)
    if batch_rows.shape[0] not in (0, entries):
        raise validation.error(f"plan.batch_rows length must be {entries}, got {batch_rows.shape[0]}")
    row_status = validation.exact_array("plan.row_status", plan.row_status, (_ANY,), np.int32)
    (bs,) = row_status.shape
    rotate, window = _window(source_window, source_tags)
    out = lowering.bind(
        "verify",
        (
            *common.state,
            slots,
            validation.int_array("plan.expected_tokens", plan.expected_tokens, (entries,), pairs=True),
            validation.int_array("plan.expected_positions", plan.expected_positions, (entries,), pairs=True),
            validation.int_array("plan.prev_slot_indices", plan.prev_slot_indices, (entries,), pairs=True),
            batch_rows,
            validation.count_array("plan.num_valid", plan.num_valid),
            validation.count_array("plan.enable", plan.enable),
            row_status,
            validation.int_array("plan.req_pool_indices", plan.req_pool_indices, (bs,), pairs=True),
            _per_row("namespaces", namespaces, bs),
            common.context,
            window,
            *common.buffers,
        ),
        check_expected_token=validation.static_bool("check_verify_expected_token", check_verify_expected_token),
        rotate=rotate,
        pass_through=validation.static_bool("pass_through", pass_through),
        **common.params,
    )
    return common.verify_result(out)


def verify_fused(
    *,
    records: Array,
    log: ViolationLog,
    req_pool_indices: Array,
    prefix_lens: Array,
    req_to_token: Array | Table,
    launch_tag: int | spec.CanaryLaunchTag,
    swa_window_size: int = 0,
    position_stride: int = 1,
    full_to_swa_index_mapping: Array | None = None,
    req_to_verify_expected_tokens: Array | None = None,
    req_to_verify_expected_tokens_valid_lens: Array | None = None,
    kv_token_id_vs_position_offset: int = 0,
    padding_req: int | None = 0,
    real_kv_hash_mode: int | spec.RealKvHashMode = spec.RealKvHashMode.NONE,
    real_kv_sources: Sequence[RealKvSource] = (),
    real_kv_buffers: Sequence[Array] = (),
    source_tags: Array | None = None,
    source_window: Array | tuple[Any, Any] | None = None,
    check_verify_expected_token: bool = False,
    namespaces: Array | None = None,
    step: int | Array = 0,
    shard: int | Array = 0,
    padding_slot: int | None = 0,
    extended_checks: bool = True,
    strict: bool = True,
    pass_through: bool = False,
    implementation: str = "auto",
) -> VerifyResult:
    """Check every written slot of a batch straight from tables and lengths: :func:`plan` and :func:`verify` in one, with no
    capacity to overflow and nothing materialised.

    **Use the returned log, or jit removes the check.**

    Args:
      records, log, launch_tag: as in :func:`verify`.
      req_pool_indices, prefix_lens, req_to_token: ``[bs]``, ``[bs]`` and the table, as in :func:`plan`.
      swa_window_size, full_to_swa_index_mapping, req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset, padding_req: as in :func:`plan`.
      position_stride: static; with N only the positions p with ``p % N == step % N`` are checked: each one once in N steps.
      real_kv_hash_mode and all further arguments: as in :func:`verify`.

    Returns:
      What :func:`verify` returns.

    Raises:
      ValueError: a shape, dtype, pairing or static value that breaks a rule. TypeError: a static argument of the wrong type.

    Example:
      >>> result = verify_fused(
      ...     records=allocate_records(slots=4), log=ViolationLog.allocate(ring_capacity=8), launch_tag=CanaryLaunchTag.HEAD_K_FULL,
      ...     req_pool_indices=jnp.array([1], jnp.int32), prefix_lens=jnp.array([1], jnp.int32),
      ...     req_to_token=jnp.array([[0, 0], [2, 3]], jnp.int32),
      ... )
      >>> Verdict(int(result.verdict[0]))
      <Verdict.BAD: 2>
    """
    common = _Common.check(
        records=records,
        log=log,
        launch_tag=launch_tag,
        real_kv_hash_mode=real_kv_hash_mode,
        real_kv_sources=real_kv_sources,
        real_kv_buffers=real_kv_buffers,
        source_tags=source_tags,
        step=step,
        shard=shard,
        padding_slot=padding_slot,
        extended_checks=extended_checks,
        strict=strict,
        implementation=implementation,
    )
    request_rows = validation.int_array("req_pool_indices", req_pool_indices, (_ANY,), pairs=False)
    (bs,) = request_rows.shape
    validation.validate_plan_statics(
        bs=bs,
        write_offsets_len=bs + 1,
        write_req_capacity=bs,
        verify_capacity=0,
        lut_len=_lut_len(full_to_swa_index_mapping),
        has_swa_lut=full_to_swa_index_mapping is not None,
    )
    layout = _Layout.check(
        bs=bs,
        req_to_token=req_to_token,
        swa_window_size=swa_window_size,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        padding_req=padding_req,
    )
    stride = validation.fits_int32("position_stride", validation.static_int("position_stride", position_stride))
    if stride < 1:
        raise validation.error(f"position_stride must be at least 1, got {stride}")
    rotate, window = _window(source_window, source_tags)
    out = lowering.bind(
        "verify_fused",
        (
            *common.state,
            request_rows,
            validation.int_array("prefix_lens", prefix_lens, (bs,), pairs=False),
            *layout.operands,
            _per_row("namespaces", namespaces, bs),
            common.context,
            window,
            *common.buffers,
        ),
        check_expected_token=validation.static_bool("check_verify_expected_token", check_verify_expected_token),
        rotate=rotate,
        pass_through=validation.static_bool("pass_through", pass_through),
        position_stride=stride,
        **layout.params,
        **common.params,
    )
    return common.verify_result(out)


def write(
    *,
    records: Array,
    log: ViolationLog,
    plan: WritePlan,
    input_ids: Array,
    positions: Array,
    out_cache_loc: Array,
    launch_tag: int | spec.CanaryLaunchTag,
    real_kv_hash_mode: int | spec.RealKvHashMode = spec.RealKvHashMode.NONE,
    real_kv_sources: Sequence[RealKvSource] = (),
    real_kv_buffers: Sequence[Array] = (),
    source_tags: Array | None = None,
    enable_write_input_assert: bool = False,
    expected_input_tokens: Array | None = None,
    expected_input_positions: Array | None = None,
    enable_chain_position_assert: bool | Array | None = None,
    request_ids: Array | None = None,
    namespaces: Array | None = None,
    record_flags: int | spec.RecordFlag = spec.RecordFlag.NONE,
    step: int | Array = 0,
    shard: int | Array = 0,
    padding_slot: int | None = 0,
    extended_checks: bool = True,
    strict: bool = True,
    implementation: str = "auto",
) -> WriteResult:
    """Stamp the slots that the step has written, continuing each request's chain.

    **Use the returned records, tags and log, or jit removes the stamps and the checks.**

    Args:
      records: ``[slots, 8]`` uint32 or wider; with 16 words a record also says who wrote it and when.
      log: where violations go.
      plan: the write half of :func:`plan`.
      input_ids, positions, out_cache_loc: ``[tokens]`` token, position and slot of each written token (slots of a window pool
        already translated; -1 is skipped): int32, int64, or uint32 ``[tokens, 2]``.
      launch_tag: static, which launch of the step this is.
      real_kv_hash_mode, real_kv_sources, real_kv_buffers: as in :func:`verify`, read after the model has written.
      source_tags: ``[slots, sources]`` uint32, stamped along with the records.
      enable_write_input_assert: static, compare inputs with the expected ones; needs both, and they need it.
      expected_input_tokens, expected_input_positions: ``[tokens]``.
      enable_chain_position_assert: device flag, bool or int32 ``[1]``: positions must count up from the predecessor's.
      request_ids: ``[requests]`` 64-bit id of each request, for provenance; None is 0. At least one a request of the plan.
      namespaces: ``[requests]`` 64-bit namespace of each request, in the head's hash; None is 0. At least one a request of the plan.
      record_flags: static, flags stamped into records of width 16.
      step, shard, padding_slot, extended_checks, implementation: as in :func:`verify`; dummy writes are stamped like any other.
      strict: static; False, with ``extended_checks``: a seed whose record is all zero says nothing about the position of the first token.

    Returns:
      Records, source tags (None if none were given), log, and a verdict per request row.

    Raises:
      ValueError: a shape, dtype, pairing or static value that breaks a rule. TypeError: a static argument of the wrong type.

    Example:
      >>> row = jnp.array([[0, 0], [2, 3]], jnp.int32)
      >>> one = jnp.array([1], jnp.int32)
      >>> step = plan(req_pool_indices=one, prefix_lens=one * 0, extend_seq_lens=one, req_to_token=row, verify_capacity=1,
      ...             write_req_capacity=1)
      >>> result = write(records=allocate_records(slots=4), log=ViolationLog.allocate(ring_capacity=8), plan=step.write,
      ...                input_ids=one * 101, positions=one * 0, out_cache_loc=one * 2, launch_tag=CanaryLaunchTag.TAIL_K_FULL)
      >>> hex(int(result.records[2, 5]))
      '0xde7fae23'
    """
    common = _Common.check(
        records=records,
        log=log,
        launch_tag=launch_tag,
        real_kv_hash_mode=real_kv_hash_mode,
        real_kv_sources=real_kv_sources,
        real_kv_buffers=real_kv_buffers,
        source_tags=source_tags,
        step=step,
        shard=shard,
        padding_slot=padding_slot,
        extended_checks=extended_checks,
        strict=strict,
        implementation=implementation,
    )
    validation.instance("plan", plan, WritePlan)
    asserts = validation.static_bool("enable_write_input_assert", enable_write_input_assert)
    expected = {"expected_input_tokens": expected_input_tokens, "expected_input_positions": expected_input_positions}
    for name, value in expected.items():
        if asserts and value is None:
            raise validation.error(f"{name} is required when enable_write_input_assert is True")
        if not asserts and value is not None:
            raise validation.error(f"{name} must be None when enable_write_input_assert is False")
    seeds = validation.int_array("plan.write_seed_slot_indices", plan.write_seed_slot_indices, (_ANY,), pairs=True)
    rows = seeds.shape[0]
    tokens = validation.int_array("input_ids", input_ids, (_ANY,), pairs=True)
    count = tokens.shape[0]
    flags = validation.static_int("record_flags", record_flags, minimum=0, maximum=2**32 - 1)
    request_rows = _row_values("plan.req_pool_indices", plan.req_pool_indices, at_least=0, at_most=rows)
    requests = request_rows.shape[0]
    out = lowering.bind(
        "write",
        (
            *common.state,
            validation.int_array("plan.write_offsets", plan.write_offsets, (rows + 1,), pairs=True),
            seeds,
            validation.count_array("plan.write_num_valid_reqs", plan.write_num_valid_reqs),
            tokens,
            validation.int_array("positions", positions, (count,), pairs=True),
            validation.int_array("out_cache_loc", out_cache_loc, (count,), pairs=True),
            *(_none() if value is None else validation.int_array(name, value, (count,), pairs=True) for name, value in expected.items()),
            validation.flag_array("enable_chain_position_assert", enable_chain_position_assert),
            request_rows,
            _row_values("request_ids", request_ids, at_least=requests, at_most=rows),
            _row_values("namespaces", namespaces, at_least=requests, at_most=rows),
            common.context,
            *common.buffers,
        ),
        enable_write_input_assert=asserts,
        record_flags=flags,
        **common.params,
    )
    new_records, tags, ring, write_index, slot_runs, kernel_runs, verdict, _ = out
    return WriteResult(
        records=new_records,
        source_tags=None if source_tags is None else tags,
        log=ViolationLog(ring=ring, write_index=write_index, slot_run_counter=slot_runs, kernel_run_counter=kernel_runs),
        verdict=verdict,
    )


def adopt(*, record_flags: int | spec.RecordFlag = spec.RecordFlag.NONE, **arguments: Any) -> WriteResult:
    """Stamp what is in the slots already and flag it: for pages whose history the canary has not seen.

    **Use the returned records, tags and log, or jit removes the stamps.**

    Args:
      record_flags: static, further flags; ADOPTED is always set. It shows in records of 16 words.
      arguments: those of :func:`write`.

    Returns:
      What :func:`write` returns.
    """
    flags = validation.static_int("record_flags", record_flags, minimum=0, maximum=2**32 - 1)
    return write(record_flags=flags | spec.RecordFlag.ADOPTED, **arguments)


def scatter_req_token_ids(
    *,
    flat_in: Array,
    offsets: Array,
    req_pool_indices: Array,
    pool_out: Array,
    implementation: str = "auto",
) -> ScatterResult:
    """Copy each request's tokens into its row of the token pool.

    **Use the returned pool, or jit removes the copy.**

    Args:
      flat_in: ``[n]`` tokens of all requests, one after the other.
      offsets: ``[bs + 1]`` where each request's segment of ``flat_in`` begins.
      req_pool_indices: ``[bs]`` row of each request; -1 is padding.
      pool_out: ``[rows, width]`` int32; segments are cut at the width, values wrap to int32.
      implementation: "auto", "ffi" (the custom call or an error) or "jax".

    Integer operands are int32, int64 (x64 on) or uint32 ``[n, 2]``.

    Returns:
      The pool and a status per request: 0, or 128 where a row or segment is out of range and nothing was copied.

    Raises:
      ValueError: a shape or dtype that breaks a rule.

    Example:
      >>> result = scatter_req_token_ids(
      ...     flat_in=jnp.array([7, 8, 9], jnp.int32), offsets=jnp.array([0, 3], jnp.int32),
      ...     req_pool_indices=jnp.array([1], jnp.int32), pool_out=jnp.zeros((2, 2), jnp.int32),
      ... )
      >>> result.pool.tolist(), result.status.tolist()
      ([[0, 0], [7, 8]], [0])
    """
    request_rows = validation.int_array("req_pool_indices", req_pool_indices, (_ANY,), pairs=True)
    pool, status = lowering.bind(
        "scatter",
        (
            validation.int_array("flat_in", flat_in, (_ANY,), pairs=True),
            validation.int_array("offsets", offsets, (request_rows.shape[0] + 1,), pairs=True),
            request_rows,
            validation.exact_array("pool_out", pool_out, (_ANY, _ANY), np.int32),
        ),
        implementation=validation.implementation(implementation),
    )
    return ScatterResult(pool=pool, status=status)


# ---------------------------------------------------------------------------------------------- shared checks


@dataclasses.dataclass(frozen=True)
class _Common:
    """What every launch on records takes, checked."""

    state: tuple[jax.Array, ...]  # records, source_tags, ring, write_index, slot_run_counter, kernel_run_counter
    context: jax.Array
    buffers: tuple[jax.Array, ...]  # without repeats
    places: tuple[int, ...]  # of each given buffer among them
    params: dict[str, Any]

    @classmethod
    def check(
        cls,
        *,
        records: Array,
        log: ViolationLog,
        launch_tag: Any,
        real_kv_hash_mode: Any,
        real_kv_sources: Sequence[RealKvSource],
        real_kv_buffers: Sequence[Array],
        source_tags: Array | None,
        step: Any,
        shard: Any,
        padding_slot: Any,
        extended_checks: Any,
        strict: Any,
        implementation: Any,
    ) -> _Common:
        tag = validation.static_enum("launch_tag", launch_tag, spec.CanaryLaunchTag)
        mode = validation.static_enum("real_kv_hash_mode", real_kv_hash_mode, spec.RealKvHashMode)
        has_padding_slot, padding = validation.optional_slot("padding_slot", padding_slot)
        checked_records = check_records(records)
        sources, buffers, places = _pair_sources(real_kv_sources, real_kv_buffers)
        return cls(
            state=(checked_records, check_source_tags(source_tags, checked_records, len(sources)), *_check_log(log)),
            context=validation.context_array(step, shard),
            buffers=buffers,
            places=places,
            params={
                "launch_tag": int(tag),
                "real_kv_hash_mode": int(mode),
                "sources": sources,
                "has_padding_slot": has_padding_slot,
                "padding_slot": padding,
                "extended_checks": validation.static_bool("extended_checks", extended_checks),
                "strict": validation.static_bool("strict", strict),
                "implementation": validation.implementation(implementation),
            },
        )

    def verify_result(self, out: Sequence[jax.Array]) -> VerifyResult:
        ring, write_index, slot_runs, kernel_runs, verdict, first_bad_position, unattested, first_unattested_position, _, *passed = out
        return VerifyResult(
            log=ViolationLog(ring=ring, write_index=write_index, slot_run_counter=slot_runs, kernel_run_counter=kernel_runs),
            verdict=verdict,
            first_bad_position=first_bad_position,
            unattested=unattested,
            first_unattested_position=first_unattested_position,
            real_kv_buffers=tuple(passed[place] for place in self.places) if passed else (),
        )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The table, the window and the expected tokens of a batch, checked."""

    table: ResolvedTable
    mapping: jax.Array
    expected_tokens: jax.Array
    valid_lens: jax.Array
    params: dict[str, Any]

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return (self.table.table, self.table.starts, self.mapping, self.expected_tokens, self.valid_lens)

    @classmethod
    def check(
        cls,
        *,
        bs: int,
        req_to_token: Any,
        swa_window_size: Any,
        full_to_swa_index_mapping: Array | None,
        req_to_verify_expected_tokens: Array | None,
        req_to_verify_expected_tokens_valid_lens: Array | None,
        kv_token_id_vs_position_offset: Any,
        padding_req: Any,
    ) -> _Layout:
        window = validation.static_capacity("swa_window_size", swa_window_size)
        offset = validation.static_int(
            "kv_token_id_vs_position_offset", kv_token_id_vs_position_offset, minimum=-(2**31), maximum=spec.INT32_MAX
        )
        has_padding_req, padding = validation.optional_slot("padding_req", padding_req)
        table = resolve_table(req_to_token, bs=bs)
        if window > 0 and full_to_swa_index_mapping is None:
            raise validation.error("full_to_swa_index_mapping is required when swa_window_size > 0")
        tokens, valid_lens = req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens
        if tokens is not None and valid_lens is None:
            raise validation.error("req_to_verify_expected_tokens_valid_lens is required when req_to_verify_expected_tokens is set")
        if tokens is None and valid_lens is not None:
            raise validation.error("req_to_verify_expected_tokens is required when req_to_verify_expected_tokens_valid_lens is set")
        return cls(
            table=table,
            mapping=_none()
            if full_to_swa_index_mapping is None
            else validation.int_array("full_to_swa_index_mapping", full_to_swa_index_mapping, (_ANY,), pairs=False),
            expected_tokens=jnp.zeros((0, 0), jnp.int32)
            if tokens is None
            else validation.int_array("req_to_verify_expected_tokens", tokens, (_ANY, _ANY), pairs=False),
            valid_lens=_none()
            if valid_lens is None
            else validation.int_array("req_to_verify_expected_tokens_valid_lens", valid_lens, (bs,), pairs=False),
            params={
                "swa_window_size": window,
                "kv_token_id_vs_position_offset": offset,
                "has_padding_req": has_padding_req,
                "padding_req": padding,
                "has_mapping": full_to_swa_index_mapping is not None,
                "has_expected": tokens is not None,
                **table.params,
            },
        )


def check_records(records: Array) -> jax.Array:
    """``records`` as a JAX array, uint32 ``[slots, 8 or more]``."""
    array = validation.exact_array("records", records, (_ANY, _ANY), np.uint32)
    if array.shape[1] < spec.RECORD_WORDS:
        raise validation.error(f"records must have at least {spec.RECORD_WORDS} words a slot, got shape {array.shape}")
    validation.fits_int32("records length", array.shape[0])
    return array


def check_source_tags(source_tags: Array | None, records: jax.Array, num_sources: int | None) -> jax.Array:
    """Source tags beside their records, or an empty array for None."""
    if source_tags is None:
        return jnp.zeros((0, 0), jnp.uint32)
    array = validation.exact_array("source_tags", source_tags, (_ANY, _ANY), np.uint32)
    wanted = (records.shape[0], array.shape[1] if num_sources is None else num_sources)
    if array.shape != wanted:
        raise validation.error(f"source_tags must have shape {wanted} (slots, sources), got {array.shape}")
    return array


def _check_log(log: ViolationLog) -> tuple[jax.Array, ...]:
    validation.instance("log", log, ViolationLog)
    return (
        validation.exact_array("log.ring", log.ring, (_ANY, spec.RING_WORDS), np.uint32),
        validation.exact_array("log.write_index", log.write_index, (1,), np.int32),
        validation.exact_array("log.slot_run_counter", log.slot_run_counter, (spec.NUM_LAUNCH_TAGS, 2), np.uint32),
        validation.exact_array("log.kernel_run_counter", log.kernel_run_counter, (spec.NUM_LAUNCH_TAGS, 2), np.uint32),
    )


def _pair_sources(
    sources: Sequence[RealKvSource], buffers: Sequence[Array]
) -> tuple[tuple[Descriptor, ...], tuple[jax.Array, ...], tuple[int, ...]]:
    """Descriptors of the sources, the buffers without repeats, and each given buffer's place among them."""
    sources = validation.sequence_of("real_kv_sources", sources, RealKvSource)
    buffers = validation.sequence("real_kv_buffers", buffers, "arrays")
    if len(sources) != len(buffers) and (not sources or any(source.buffer_index is None for source in sources)):
        raise validation.error(f"real_kv_buffers must hold one array a source, got {len(buffers)} for {len(sources)} sources")
    unique: list[jax.Array] = []
    seen: dict[int, int] = {}
    places = []
    for i, buffer in enumerate(buffers):
        validation.operand_dtype(f"real_kv_buffers[{i}]", buffer)
        if id(buffer) not in seen:
            seen[id(buffer)] = len(unique)
            unique.append(jnp.asarray(buffer))
        places.append(seen[id(buffer)])
        if unique[places[i]].dtype != buffer.dtype:
            raise validation.error(
                f"real_kv_buffers[{i}] has dtype {buffer.dtype}, which JAX converts while jax_enable_x64 is off; pass it as a JAX array"
            )
    descriptors = []
    for i, source in enumerate(sources):
        index = i if source.buffer_index is None else source.buffer_index
        if index >= len(buffers):
            raise validation.error(f"real_kv_sources[{i}] reads buffer {index}, but there are {len(buffers)} real_kv_buffers")
        shape, dtype = tuple(buffers[index].shape), np.dtype(buffers[index].dtype)
        if shape != source.buffer_shape:
            raise validation.error(
                f"real_kv_buffers[{index}] must have shape {source.buffer_shape} as real_kv_sources[{i}] says, got {shape}"
            )
        if dtype != source.buffer_dtype:
            raise validation.error(
                f"real_kv_buffers[{index}] must have dtype {source.buffer_dtype.name} as real_kv_sources[{i}] says, got {dtype.name}"
            )
        descriptors.append((places[index], *source.descriptor(index)[1:]))
    return tuple(descriptors), tuple(unique), tuple(places)


def _window(source_window: Any, source_tags: Array | None) -> tuple[bool, jax.Array]:
    if source_window is None:
        return False, jnp.zeros((2,), jnp.int32)
    if source_tags is None:
        raise validation.error("source_window needs source_tags: without them a part of the sources cannot be verified")
    return True, validation.window_array(source_window)


def _lut_len(mapping: Array | None) -> int:
    if mapping is None:
        return 0
    shape = validation.shape_of(mapping, "full_to_swa_index_mapping")
    if len(shape) != 1:
        raise validation.error(f"full_to_swa_index_mapping must be 1-D, got shape {shape}")
    return shape[0]


def _per_row(name: str, value: Array | None, rows: int) -> jax.Array:
    return _none() if value is None else validation.int_array(name, value, (rows,), pairs=True)


def _row_values(name: str, value: Array | None, *, at_least: int, at_most: int) -> jax.Array:
    """One value a request row, for every request of the batch; rows past it may go without."""
    if value is None:
        return _none()
    array = validation.int_array(name, value, (_ANY,), pairs=True)
    if array.shape[0] > at_most:
        raise validation.error(f"{name} length must be at most {at_most}, got {array.shape[0]}")
    if array.shape[0] < at_least:
        raise validation.error(f"{name} length must be at least {at_least}, that of plan.req_pool_indices, got {array.shape[0]}")
    return array


def _none() -> jax.Array:
    return jnp.zeros((0,), jnp.int32)
