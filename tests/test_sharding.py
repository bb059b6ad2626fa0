"""The operations on a mesh of eight devices: which shard is named, one verdict for all, what moves between devices, and bad input."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kvcanary
from jax_kvcanary import (
    BlockTable,
    FlatTable,
    IdentityTable,
    RealKvHashMode,
    RowTable,
    VerifyPlan,
    ViolationLog,
    copy_records,
    make_packed_source,
    release_records,
    reset_records,
    scatter_req_token_ids,
    take_records,
)
from jax_kvcanary.sharding import ShardedOps, merge_reports, pack_verdicts, unpack_verdicts
from jax_kvcanary.spec import INT32_MAX, CanaryLaunchTag, FailReason, RecordFlag, Verdict

TWO = np.array([1, 2], np.int32)
HEAD, TAIL = CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL
DP, TP, PAGE, LAYERS = 2, 4, 4, 2
PAGES, HEADS, DIM = 16, 8, 8  # of the whole pool
SLOTS = PAGES // DP * PAGE  # of one rank
WIDTH = 10
TABLE = np.array([[0] * WIDTH, range(4, 4 + WIDTH), range(16, 16 + WIDTH)], np.int32)  # of one rank
ROWS, LENS = np.array([1, 2] * DP, np.int32), np.array([9, 6, 10, 3], np.int32)
SPEC = P("data", None, "tensor", None)


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data", "tensor"), axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, devices=devices, axis_types=(axis_type,) * len(sizes))


def local_sources(local: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[Any, ...]:
    size = math.prod(local[0].shape[2:]) * 4
    return tuple(s for layer in local for s in make_packed_source(buffer=layer, page_size=PAGE, bytes_per_token=size, read_bytes=size))


@functools.cache
def ops_of(mesh: Any = None, spec: P = SPEC, pages: int = PAGES, **changes: Any) -> ShardedOps:
    buffers = (jax.ShapeDtypeStruct((pages, PAGE, HEADS, DIM), jnp.float32),) * LAYERS
    settings = {"data_axes": "data", "buffers": buffers, "buffer_specs": spec, "sources": local_sources, **changes}
    return ShardedOps(mesh=mesh_of(DP, TP) if mesh is None else mesh, **settings)


def new_pool(sharded: ShardedOps) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    places = [NamedSharding(sharded.mesh, spec) for spec in sharded.buffer_specs]
    return tuple(
        jax.device_put(random.standard_normal(shape).astype(np.float32), place)
        for shape, place in zip(sharded.buffer_shapes, places, strict=True)
    )


def slots_of(lens: np.ndarray) -> np.ndarray:
    """Slots of the written positions of each data rank, -1 to fill up: [DP * tokens]."""
    per_rank = []
    for rank in range(len(lens) // 2):
        mine = [TABLE[1, : lens[2 * rank]], TABLE[2, : lens[2 * rank + 1]]]
        flat = np.concatenate(mine)
        per_rank.append(np.concatenate([flat, np.full((2 * WIDTH - len(flat),), -1, np.int32)]))
    return np.concatenate(per_rank)


def positions_of(lens: np.ndarray) -> np.ndarray:
    per_rank = []
    for rank in range(len(lens) // 2):
        flat = np.concatenate([np.arange(n) for n in lens[2 * rank : 2 * rank + 2]])
        per_rank.append(np.concatenate([flat, np.zeros((2 * WIDTH - len(flat),))]))
    return np.concatenate(per_rank).astype(np.int32)


def tables(sharded: ShardedOps) -> np.ndarray:
    return np.concatenate([TABLE] * sharded.data_parallel)


@functools.cache
def prefilled(sharded: ShardedOps) -> tuple[Any, Any, Any, Any]:
    """Records, tags, log and pool after both requests of each data rank were written."""
    lens = LENS[: 2 * sharded.data_parallel]
    pool, slots = new_pool(sharded), slots_of(lens)
    laid_out = sharded.plan(
        req_pool_indices=ROWS[: len(lens)], prefix_lens=lens * 0, extend_seq_lens=lens, req_to_token=tables(sharded),
        verify_capacity=0, write_req_capacity=3,
    )  # fmt: skip
    written = sharded.write(
        records=sharded.allocate_records(provenance=True), log=sharded.allocate_log(ring_capacity=8), plan=laid_out.write,
        source_tags=sharded.allocate_source_tags(), input_ids=slots * 7, positions=positions_of(lens), out_cache_loc=slots,
        launch_tag=TAIL, real_kv_hash_mode=RealKvHashMode.ALL, real_kv_buffers=pool, request_ids=np.arange(len(lens)) + 40, step=1,
    )  # fmt: skip
    assert written.verdict.tolist() == [1, 1, 0] * sharded.data_parallel
    return written.records, written.source_tags, written.log, pool


def check(sharded: ShardedOps, state: Any, **changes: Any) -> Any:
    records, tags, log, pool = state
    lens = LENS[: 2 * sharded.data_parallel]
    ask = {
        "records": records, "log": log, "req_pool_indices": ROWS[: len(lens)], "prefix_lens": lens, "req_to_token": tables(sharded),
        "launch_tag": HEAD, "real_kv_hash_mode": RealKvHashMode.ALL, "real_kv_buffers": pool, "source_tags": tags, "step": 5,
    }  # fmt: skip
    return sharded.verify_fused(**{**ask, **changes})


def verdicts_by_device(array: jax.Array) -> dict[int, list[int]]:
    devices = list(array.sharding.mesh.devices.flat)
    return {devices.index(shard.device): np.asarray(shard.data).tolist() for shard in array.addressable_shards}


def corrupted(pool: Any, layer: int, index: tuple[int, ...]) -> tuple[Any, ...]:
    """The pool with one word changed, placed as before."""
    host = np.array(pool[layer])
    host[index] += 1
    return tuple(jax.device_put(host, buffer.sharding) if i == layer else buffer for i, buffer in enumerate(pool))


# ------------------------------------------------------------------------------------------------ faults and shards


def test_what_nobody_wrote_on_one_shard() -> None:
    """All ranks of the request return the largest count and the lowest position, in the one all-reduce of the verdict."""
    sharded = ops_of()
    records, *rest = prefilled(sharded)
    slots = [int(TABLE[2, position]) for position in (1, 2)]
    rows = np.array(records)
    rows[3 * len(rows) // 8 + np.array(slots)] = 0  # a shard of the first data rank
    state = (jax.device_put(rows, records.sharding), *rest)
    result = check(sharded, state, strict=False)
    assert result.verdict.tolist() == [1] * 4 and sharded.decode_log(result.log).reported == 0
    assert result.unattested.tolist() == [0, 2, 0, 0] and result.first_unattested_position.tolist() == [-1, 1, -1, -1]
    assert check(sharded, state).verdict.tolist() == [1, 2, 1, 1]
    half = check(sharded, state, strict=False, position_stride=2, step=6)
    assert half.unattested.tolist() == [0, 1, 0, 0] and half.first_unattested_position.tolist() == [-1, 2, -1, -1]


def test_a_fault_on_one_shard_names_that_shard_only(implementation: str) -> None:
    """TP=4 x DP=2, a fault on each of the eight in turn; all ranks of the request return the same verdict."""
    sharded = ops_of()
    state = prefilled(sharded)
    healthy = check(sharded, state, implementation=implementation)
    assert healthy.verdict.tolist() == [1] * 4 and sharded.decode_log(healthy.log).reported == 0
    for shard in range(8):
        rank, heads = sharded.data_rank(shard), shard % TP
        position, layer = 2 + rank, shard % LAYERS
        slot = int(TABLE[2, position - rank])
        where = (rank * PAGES // DP + slot // PAGE, slot % PAGE, heads * HEADS // TP, 3)
        result = check(sharded, (*state[:3], corrupted(state[3], layer, where)), implementation=implementation)
        wanted = [[1, 2] if rank == 0 else [1, 1], [1, 2] if rank == 1 else [1, 1]]
        assert result.verdict.tolist() == wanted[0] + wanted[1]
        assert verdicts_by_device(result.verdict) == {k: wanted[sharded.data_rank(k)] for k in range(8)}
        positions = [-1] * 4
        positions[2 * rank + 1] = position - rank
        assert result.first_bad_position.tolist() == positions
        report = sharded.decode_log(result.log, records=state[0])
        (row,) = report.violations
        assert (row.shard, row.slot, row.reasons) == (shard, slot, FailReason.VERIFY_REAL_KV_HASH)
        assert (row.batch_row, row.req_pool_idx, row.step, row.first_bad_source) == (1, 2, 5, layer)
        assert row.writer is not None and row.writer.request_id == 41 + 2 * rank
        assert f"step 5, shard {shard}" in row.describe()
        shards = sharded.decode_shards(result.log)
        assert [shards[k].reported for k in range(8)] == [int(k == shard) for k in range(8)]


def test_the_worst_verdict_and_the_smallest_position_win() -> None:
    sharded = ops_of()
    state = prefilled(sharded)
    pool = corrupted(state[3], 0, (TABLE[1, 7] // PAGE, TABLE[1, 7] % PAGE, 0, 0))  # shard 0, position 7
    pool = corrupted(pool, 1, (TABLE[1, 4] // PAGE, TABLE[1, 4] % PAGE, 7, 0))  # shard 3, position 4
    result = check(sharded, (*state[:3], pool))
    assert (result.verdict.tolist(), result.first_bad_position.tolist()) == ([2, 1, 1, 1], [4, -1, -1, -1])
    assert [(row.shard, row.expected_position) for row in sharded.decode_log(result.log).violations] == [(0, 7), (3, 4)]


def per_shard_reference(sharded: ShardedOps, shard: int, table: Any, lens: np.ndarray, pool: Any) -> tuple[Any, Any, Any]:
    """What one shard must hold: the plain operations on its own arrays."""
    rank = sharded.data_rank(shard)
    local = tuple(
        np.asarray(next(s.data for s in buffer.addressable_shards if s.device == sharded.mesh.devices.flat[shard])) for buffer in pool
    )
    rows = ROWS[:2]
    mine, slots = lens[2 * rank : 2 * rank + 2], slots_of(lens).reshape(-1, 2 * WIDTH)[rank]
    common = {"real_kv_hash_mode": 2, "real_kv_sources": sharded.sources, "real_kv_buffers": local, "shard": shard}
    laid_out = jax_kvcanary.plan(
        req_pool_indices=rows, prefix_lens=mine * 0, extend_seq_lens=mine, req_to_token=table, verify_capacity=32, write_req_capacity=2
    )
    written = jax_kvcanary.write(
        records=jax_kvcanary.allocate_records(slots=SLOTS), log=ViolationLog.allocate(ring_capacity=4), plan=laid_out.write,
        input_ids=slots * 3, positions=positions_of(lens).reshape(-1, 2 * WIDTH)[rank], out_cache_loc=slots, launch_tag=TAIL, **common,
    )  # fmt: skip
    swapped = np.asarray(written.records)[::-1].copy()
    swapped[: SLOTS // 2] = np.asarray(written.records)[: SLOTS // 2]  # half of the records are wrong
    laid_out = jax_kvcanary.plan(
        req_pool_indices=rows, prefix_lens=mine, extend_seq_lens=mine, req_to_token=table, verify_capacity=32, write_req_capacity=2
    )
    checked = jax_kvcanary.verify(records=swapped, log=written.log, plan=laid_out.verify, launch_tag=HEAD, **common)
    return swapped, checked.log, (checked.verdict, checked.first_bad_position)


@pytest.mark.parametrize("kind", ["rows", "blocks", "flat", "identity"])
@pytest.mark.parametrize("fused", [False, True], ids=["planned", "fused"])
def test_every_shard_does_what_it_would_do_alone(kind: str, fused: bool) -> None:
    sharded = ops_of()
    blocks = np.array([[0, 0, 0], [1, 2, 3], [4, 5, 6]], np.int32)
    flat, starts = np.concatenate([TABLE[1], TABLE[2]]), np.array([0, WIDTH, 2 * WIDTH], np.int32)
    one = {
        "rows": RowTable(TABLE),
        "blocks": BlockTable(blocks, PAGE),
        "flat": FlatTable(flat, starts),
        "identity": IdentityTable(3, WIDTH),
    }[kind]
    every = jax.tree.map(lambda x: np.concatenate([x] * DP), one)
    pool, slots = new_pool(sharded), slots_of(LENS)
    ask = {"req_pool_indices": ROWS, "req_to_token": every}
    common = {"real_kv_hash_mode": 2, "real_kv_buffers": pool}
    laid_out = sharded.plan(**ask, prefix_lens=LENS * 0, extend_seq_lens=LENS, verify_capacity=32, write_req_capacity=2)
    written = sharded.write(
        records=sharded.allocate_records(), log=sharded.allocate_log(ring_capacity=4), plan=laid_out.write, input_ids=slots * 3,
        positions=positions_of(LENS), out_cache_loc=slots, launch_tag=TAIL, **common,
    )  # fmt: skip
    records = np.array(written.records).reshape(8, SLOTS, 8)
    records = np.concatenate([records[:, : SLOTS // 2], records[:, ::-1][:, SLOTS // 2 :]], axis=1).reshape(-1, 8)
    if fused:
        checked = sharded.verify_fused(records=records, log=written.log, launch_tag=HEAD, prefix_lens=LENS, **ask, **common)
    else:
        laid_out = sharded.plan(**ask, prefix_lens=LENS, extend_seq_lens=LENS, verify_capacity=32, write_req_capacity=2)
        checked = sharded.verify(records=records, log=written.log, plan=laid_out.verify, launch_tag=HEAD, **common)
    alone = [per_shard_reference(sharded, shard, one, LENS, pool) for shard in range(8)]
    np.testing.assert_array_equal(records, np.concatenate([records for records, _, _ in alone]))
    assert int(checked.log.write_index[0]) > 0
    for name in ("write_index", "slot_run_counter", "kernel_run_counter"):
        np.testing.assert_array_equal(getattr(checked.log, name), np.concatenate([getattr(log, name) for _, log, _ in alone]), name)
    for shard, (_, log, _) in enumerate(alone):  # rows in any order
        got, wanted = (np.asarray(ring).reshape(-1, 4, 32)[k] for ring, k in ((checked.log.ring, shard), (log.ring, 0)))
        assert sorted(map(tuple, got.tolist())) == sorted(map(tuple, wanted.tolist()))
    for rank in range(DP):
        packed = np.max([pack_verdicts(*alone[rank * TP + k][2]) for k in range(TP)], axis=0)
        verdict, position = unpack_verdicts(packed)
        np.testing.assert_array_equal(checked.verdict[2 * rank : 2 * rank + 2], verdict)
        np.testing.assert_array_equal(checked.first_bad_position[2 * rank : 2 * rank + 2], position)


def test_slots_are_checked_against_the_local_capacity() -> None:
    """A slot that exists in the whole pool, but not on a rank."""
    sharded = ops_of()
    state = prefilled(sharded)
    table = tables(sharded)
    table[4, 2] = SLOTS  # request 1 of the second data rank
    result = check(sharded, state, req_to_token=table)
    assert result.verdict.tolist() == [1, 1, 2, 1]
    report = sharded.decode_log(result.log, records=state[0])
    outside = [row for row in report.violations if FailReason.SLOT_OUT_OF_RANGE in row.reasons]
    assert {row.shard for row in report.violations} == {4, 5, 6, 7} and {row.slot for row in outside} == {SLOTS, 7}
    assert f"the slot is outside the pool of {SLOTS} slots" in outside[0].describe()
    slots = slots_of(LENS)
    slots[0] = SLOTS + 3
    laid_out = sharded.plan(
        req_pool_indices=ROWS,
        prefix_lens=LENS * 0,
        extend_seq_lens=LENS,
        req_to_token=tables(sharded),
        verify_capacity=0,
        write_req_capacity=2,
    )
    written = sharded.write(
        records=state[0], log=sharded.allocate_log(ring_capacity=4), plan=laid_out.write, input_ids=slots, positions=positions_of(LENS),
        out_cache_loc=slots, launch_tag=TAIL,
    )  # fmt: skip
    assert written.verdict.tolist() == [2, 1, 1, 1]
    assert {row.shard for row in sharded.decode_log(written.log).violations} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("sizes", "spec", "pages"),
    [((1, 8), P(None, None, "tensor", None), PAGES // 2), ((8, 1), P("data"), 4 * PAGES), ((1, 1), P(), PAGES // 2)],
    ids=["tensor", "data", "one"],
)
def test_heads_only_pages_only_and_one_device(sizes: tuple[int, int], spec: P, pages: int) -> None:
    sharded = ops_of(mesh_of(*sizes), spec, pages)
    assert sharded.slots == SLOTS
    lens = np.array([9, 6] * sharded.data_parallel, np.int32)
    pool, slots, rows = new_pool(sharded), slots_of(lens), np.array([1, 2] * sharded.data_parallel, np.int32)
    ask = {"req_pool_indices": rows, "req_to_token": tables(sharded)}
    common = {"real_kv_hash_mode": 2, "step": 3}
    laid_out = sharded.plan(**ask, prefix_lens=lens * 0, extend_seq_lens=lens, verify_capacity=0, write_req_capacity=2)
    written = sharded.write(
        records=sharded.allocate_records(), log=sharded.allocate_log(ring_capacity=4), plan=laid_out.write, input_ids=slots,
        positions=positions_of(lens), out_cache_loc=slots, launch_tag=TAIL, real_kv_buffers=pool, **common,
    )  # fmt: skip
    last = sharded.num_shards - 1
    slot = int(TABLE[1, 5])
    where = (sharded.data_rank(last) * PAGES // 2 + slot // PAGE, slot % PAGE, HEADS - 1, 0)
    checked = sharded.verify_fused(
        records=written.records,
        log=written.log,
        **ask,
        prefix_lens=lens,
        launch_tag=HEAD,
        real_kv_buffers=corrupted(pool, 1, where),
        **common,
    )
    assert checked.verdict.tolist() == [1, 1] * (sharded.data_parallel - 1) + [2, 1]
    assert [(row.shard, row.slot) for row in sharded.decode_log(checked.log).violations] == [(last, slot)]


def test_copies_of_one_pool_are_checked_one_by_one() -> None:
    """Fewer heads than ranks: the pool is the same on all tensor ranks, and so must its bytes be."""
    sharded = ops_of(spec=P("data"))
    state = prefilled(sharded)
    slot = int(TABLE[2, 1])
    shards = {shard.device: np.array(shard.data) for shard in state[3][0].addressable_shards}
    shards[sharded.mesh.devices.flat[6]][slot // PAGE, slot % PAGE, 5, 2] += 1
    copies = [jax.device_put(data, device) for device, data in shards.items()]
    broken = jax.make_array_from_single_device_arrays(state[3][0].shape, state[3][0].sharding, copies)
    result = check(sharded, (*state[:3], (broken, state[3][1])))
    assert result.verdict.tolist() == [1, 1, 1, 2]
    assert [(row.shard, row.slot, row.first_bad_source) for row in sharded.decode_log(result.log).violations] == [(6, slot, 0)]


def test_shard_numbers_and_data_ranks() -> None:
    mesh = mesh_of(2, 2, 2, names=("expert", "data", "model"))
    sharded = ShardedOps(mesh=mesh, data_axes=("data", "expert"), slots=4)
    assert (sharded.tensor_axes, sharded.num_shards, sharded.data_parallel, sharded.tensor_parallel) == (("model",), 8, 4, 2)
    assert sharded.coordinates(5) == {"expert": 1, "data": 0, "model": 1}
    assert [sharded.data_rank(shard) for shard in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    records = sharded.allocate_records()
    verdict = sharded.verify_fused(
        records=records, log=sharded.allocate_log(ring_capacity=2), req_pool_indices=np.zeros(4, np.int32), padding_req=None,
        prefix_lens=np.array([1, 0, 0, 1], np.int32), req_to_token=np.full((4, 2), 1, np.int32), launch_tag=HEAD,
    )  # fmt: skip
    assert verdict.verdict.tolist() == [2, 0, 0, 2]
    assert sorted(row.shard for row in sharded.decode_log(verdict.log).violations) == [0, 1, 6, 7]
    assert sharded.data_rank(6) == 3
    with pytest.raises(ValueError, match=r"^kv-canary: shard must be in \[0, 8\), got 8"):
        sharded.coordinates(8)


def test_a_storm_on_one_shard_hides_no_other() -> None:
    sharded = ops_of()
    records, tags, _, pool = prefilled(sharded)
    wrong = np.array(records).reshape(8, SLOTS, -1)
    wrong[2, :, 2] += 1  # every position of shard 2
    wrong[5, TABLE[1, 4], 0] += 1
    result = check(sharded, (wrong.reshape(-1, 16), tags, sharded.allocate_log(ring_capacity=4), pool))
    report, shards = sharded.decode_log(result.log), sharded.decode_shards(result.log)
    assert [shards[k].stored for k in range(8)] == [0, 0, 4, 0, 0, 1, 0, 0]
    assert (report.reported, report.stored, report.lost) == (15 + 1, 5, 11)
    assert report.kernel_runs[HEAD] == 8 and report.slot_runs[HEAD] == 4 * (9 + 6 + 10 + 3)
    assert report == merge_reports(shards.values())
    none = check(sharded, (wrong.reshape(-1, 16), tags, sharded.allocate_log(ring_capacity=0), pool))
    assert sharded.decode_log(none.log).lost == 16


# ------------------------------------------------------------------------------------------------ digests


def digest(sharded: ShardedOps, state: Any, **changes: Any) -> Any:
    ask = {
        "records": state[0], "log": sharded.allocate_log(ring_capacity=4), "verdict": np.ones(4, np.int32), "req_pool_indices": ROWS,
        "prefix_lens": LENS, "req_to_token": tables(sharded), "launch_tag": HEAD, "page_size": PAGE, "step": 6,
    }  # fmt: skip
    return sharded.check_rank_digests(**{**ask, **changes})


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_rank_that_misses_a_page_load_is_seen_by_the_digest(page: int) -> None:
    sharded = ops_of()
    state = prefilled(sharded)
    healthy = digest(sharded, state)
    assert healthy.verdict.tolist() == [1] * 4 and not np.asarray(healthy.disagree).any()
    assert sharded.decode_log(healthy.log).reported == 0
    records = np.array(state[0]).reshape(8, SLOTS, -1)
    records[6, TABLE[1, PAGE * page : PAGE * (page + 1)]] = 0
    result = digest(sharded, (records.reshape(-1, 16),))
    assert result.verdict.tolist() == [1, 1, 2, 1]
    assert verdicts_by_device(result.verdict) == {k: [1, 1] if k < 4 else [2, 1] for k in range(8)}
    report = sharded.decode_log(result.log, records=records.reshape(-1, 16))
    assert {row.reasons for row in report.violations} == {FailReason.RANK_DIGEST}
    assert [row.shard for row in report.violations] == [4, 5, 6, 7]
    (found,) = sharded.find_deviating_ranks(report)
    assert (found.deviating, found.data_rank, found.batch_row, found.step) == ((6,), 1, 0, 6)
    assert sharded.find_deviating_ranks(sharded.decode_log(healthy.log)) == ()


def test_ranks_with_different_lengths_or_capacities_are_seen_by_the_digest() -> None:
    """Host code that ran apart: what should be one array everywhere is not."""
    sharded = ops_of()
    state = prefilled(sharded)
    placed = jax.device_put(LENS, NamedSharding(sharded.mesh, P("data")))
    copies = {shard.device: np.array(shard.data) for shard in placed.addressable_shards}
    copies[sharded.mesh.devices.flat[1]][1] -= 1
    lens = jax.make_array_from_single_device_arrays(placed.shape, placed.sharding, [jax.device_put(x, d) for d, x in copies.items()])
    result = digest(sharded, state, prefix_lens=lens)
    assert result.verdict.tolist() == [1, 2, 1, 1]
    (found,) = sharded.find_deviating_ranks(sharded.decode_log(result.log))
    assert (found.deviating, found.batch_row) == ((1,), 1)
    assert [found.views[k].length for k in range(4)] == [6, 5, 6, 6]
    capacities = np.full((8,), SLOTS, np.int32)
    capacities[7] = SLOTS - PAGE
    result = digest(sharded, state, capacities=capacities)
    assert result.verdict.tolist() == [1, 1, 2, 2]
    found = sharded.find_deviating_ranks(sharded.decode_log(result.log))
    assert [(entry.deviating, entry.batch_row, entry.views[7].capacity) for entry in found] == [((7,), 0, 28), ((7,), 1, 28)]


def test_digests_without_peers_are_silent() -> None:
    sharded = ops_of(mesh_of(8, 1), P("data"), 4 * PAGES)
    result = sharded.check_rank_digests(
        records=sharded.allocate_records(), log=sharded.allocate_log(ring_capacity=1), verdict=np.ones(8, np.int32), launch_tag=HEAD,
        req_pool_indices=np.ones(8, np.int32), prefix_lens=np.arange(8, dtype=np.int32), req_to_token=tables(sharded),
    )  # fmt: skip
    assert result.verdict.tolist() == [1] * 8 and sharded.decode_log(result.log).reported == 0


# ------------------------------------------------------------------------------------------------ the compiled step


def engine_step(sharded: ShardedOps, implementation: str, canary: bool, used: str, state: Any, number: Any, slots: Any) -> Any:
    """Head check, an update of one token a request in place, tail stamp. used: what the step returns beside its state."""
    records, log, pool, lens = state

    def model(layer: Any, slots: Any, add: Any) -> Any:
        page, within = slots // PAGE, slots % PAGE
        return layer.at[page, within].set(layer[page, within] * 2 + add.astype(layer.dtype))

    update = jax.shard_map(model, mesh=sharded.mesh, in_specs=(SPEC, P("data"), P()), out_specs=SPEC, check_vma=False)
    out: tuple[Any, ...] = ()
    if canary:
        ask = {"real_kv_hash_mode": RealKvHashMode.ALL, "step": number, "implementation": implementation}
        layout = {"req_pool_indices": ROWS, "prefix_lens": lens, "req_to_token": tables(sharded)}
        checked = sharded.verify_fused(records=records, log=log, launch_tag=HEAD, real_kv_buffers=pool, pass_through=True, **layout, **ask)
        pool, log, out = checked.real_kv_buffers, checked.log, (checked.verdict, checked.first_bad_position)
    pool = tuple(update(layer, slots, number.astype(jnp.float32)) for layer in pool)
    if canary:
        laid_out = sharded.plan(
            extend_seq_lens=jnp.ones_like(lens), verify_capacity=0, write_req_capacity=2, implementation=implementation, **layout
        )
        written = sharded.write(
            records=records, log=log, plan=laid_out.write, input_ids=slots * 7, positions=lens, out_cache_loc=slots, launch_tag=TAIL,
            real_kv_buffers=pool, **ask,
        )  # fmt: skip
        records, log = written.records, written.log
        if used == "digest":
            compared = sharded.check_rank_digests(
                records=records, log=log, verdict=out[0], launch_tag=HEAD, page_size=PAGE, step=number, **layout
            )
            log, out = compared.log, (compared.verdict, *out[1:])
        if used == "write verdict":
            out = (*out, written.verdict)
    return (records, log, pool, lens + 1), out


def new_state(sharded: ShardedOps) -> Any:
    lens = jax.device_put(np.zeros(4, np.int32), NamedSharding(sharded.mesh, P("data")))
    return sharded.allocate_records(provenance=True), sharded.allocate_log(ring_capacity=8), new_pool(sharded), lens


def written_at(sharded: ShardedOps, number: int) -> jax.Array:
    return jax.device_put(np.concatenate([TABLE[1:, number]] * DP), NamedSharding(sharded.mesh, P("data")))


def compiled(sharded: ShardedOps, implementation: str = "auto", canary: bool = True, used: str = "") -> Any:
    one = functools.partial(engine_step, sharded, implementation, canary, used)
    return jax.jit(one, donate_argnums=0).lower(new_state(sharded), jnp.int32(0), written_at(sharded, 0)).compile()


def instructions(text: str) -> list[tuple[str, list[tuple[str, int]]]]:
    """(opcode, (dtype and shape, bytes) of each result) of every instruction of a compiled program."""
    out = []
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if found:
            results = []
            for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", found[1]):
                width = int(re.sub(r"\D", "", dtype) or 8) // 8 or 1
                results.append((f"{dtype}[{dims}]", width * math.prod(int(n) for n in dims.split(",") if n)))
            out.append((found[2], results))
    return out


MOVES = {
    "copy",
    "copy-start",
    "transpose",
    "convert",
    "all-gather",
    "all-gather-start",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
}
BIG_PAGES = 1024


@functools.cache
def big_step(implementation: str, canary: bool, used: str = "") -> Any:
    return compiled(ops_of(pages=BIG_PAGES), implementation, canary, used)


def test_nothing_of_the_size_of_a_pool_is_copied_or_moved(implementation: str) -> None:
    layer = BIG_PAGES // DP * PAGE * HEADS // TP * DIM * 4  # bytes of one layer on one device
    step, plain = big_step(implementation, True), big_step("auto", False)
    assert any(size == layer for _, results in instructions(step.as_text()) for _, size in results)  # the parser sees the pool
    moved = [
        (opcode, shape)
        for opcode, results in instructions(step.as_text())
        if opcode in MOVES
        for shape, size in results
        if size >= layer // 4
    ]
    assert moved == []
    assert "all-gather" not in step.as_text()
    extra = step.memory_analysis().temp_size_in_bytes - plain.memory_analysis().temp_size_in_bytes
    if implementation == "ffi":
        assert extra <= 8192, extra
    assert extra < layer, extra


@pytest.mark.parametrize(
    ("used", "wanted"),
    [("", ["s32[2]"]), ("write verdict", ["s32[2]", "s32[2]"]), ("digest", ["s32[2]", "u32[2,2]"])],
    ids=["verify", "write", "digest"],
)
def test_one_all_reduce_a_verdict_and_nothing_larger(used: str, wanted: list[str]) -> None:
    """Two batch rows a rank: an int32 [2] for each verdict that is used, a uint32 [2, 2] for a digest; nothing else moves."""
    found = instructions(big_step("auto", True, used).as_text())
    reduced = [shape for opcode, results in found if opcode.startswith("all-reduce") for shape, _ in results]
    assert sorted(reduced) == wanted
    assert not [opcode for opcode, _ in found if opcode.startswith(("all-gather", "all-to-all", "collective", "reduce-scatter"))]


def test_pages_only_need_no_collective_at_all() -> None:
    sharded = ops_of(mesh_of(8, 1), P("data"), 4 * PAGES)

    @jax.jit
    def run(records: Any, log: Any, pool: Any) -> Any:
        out = sharded.verify_fused(
            records=records, log=log, req_pool_indices=np.ones(8, np.int32), prefix_lens=np.ones(8, np.int32), req_to_token=tables(sharded),
            launch_tag=HEAD, real_kv_hash_mode=2, real_kv_buffers=pool,
        )  # fmt: skip
        return out.log, out.verdict

    state = sharded.allocate_records(), sharded.allocate_log(ring_capacity=1), new_pool(sharded)
    assert not [op for op, _ in instructions(run.lower(*state).compile().as_text()) if op.startswith(("all-", "collective"))]


def test_donated_steps_with_an_update_in_place(implementation: str) -> None:
    sharded, step = ops_of(pages=BIG_PAGES), big_step(implementation, True)
    state = new_state(sharded)
    for number in range(6):
        before = state
        state, (verdict, position) = step(state, jnp.int32(number), written_at(sharded, number))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert verdict.tolist() == [int(number > 0)] * 4 and position.tolist() == [-1] * 4
        if number == 4:
            slot = int(TABLE[1, 3])
            where = (BIG_PAGES // DP + slot // PAGE, slot % PAGE, 2, 0)  # data rank 1, heads of tensor rank 1
            state = (*state[:2], corrupted(state[2], 1, where), state[3])
            state, (verdict, position) = step(state, jnp.int32(5), written_at(sharded, 5))
            break
    assert (verdict.tolist(), position.tolist()) == ([1, 1, 2, 1], [-1, -1, 3, -1])
    assert [row.shard for row in sharded.decode_log(state[1]).violations] == [5]


def test_explicit_mesh_and_scan() -> None:
    sharded = ops_of(mesh_of(DP, TP, axis_type=AxisType.Explicit))
    one = functools.partial(engine_step, sharded, "auto", True, "")
    slots = jnp.stack([jnp.asarray(np.concatenate([TABLE[1:, n]] * DP)) for n in range(4)])
    with jax.set_mesh(sharded.mesh):
        run = jax.jit(
            lambda state: jax.lax.scan(lambda s, x: one(s, *x), state, (jnp.arange(4), jax.sharding.reshard(slots, P(None, "data"))))
        )
        state, (verdicts, _) = run(new_state(sharded))
    assert np.asarray(verdicts).tolist() == [[0] * 4] + [[1] * 4] * 3
    auto = ops_of()
    wanted = new_state(auto)
    step = jax.jit(functools.partial(engine_step, auto, "auto", True, ""))
    for number in range(4):
        wanted, _ = step(wanted, jnp.int32(number), written_at(auto, number))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_static_argument_and_one_program() -> None:
    """Equal objects hash alike, so a step is compiled once."""
    mesh = mesh_of(DP, TP)
    first, second = (ops_of.__wrapped__(mesh) for _ in range(2))
    assert first is not second and first == second and hash(first) == hash(second)
    assert ops_of.__wrapped__(mesh, P("data")) != first

    @functools.partial(jax.jit, static_argnums=0)
    def run(sharded: ShardedOps, state: Any) -> Any:
        return check(sharded, state).verdict

    state = prefilled(first)
    assert run(first, state).tolist() == run(second, state).tolist() == [1] * 4
    assert run._cache_size() == 1


def test_x64(x64: None) -> None:
    sharded = ops_of()
    state = prefilled.__wrapped__(sharded)
    result = check(sharded, state, req_pool_indices=ROWS.astype(np.int64), namespaces=np.zeros(4, np.int64), step=2**32 - 1)
    assert result.verdict.tolist() == [1] * 4
    wrong = check(sharded, state, namespaces=np.array([0, 0, 2**40, 0], np.int64), step=2**32 - 1)
    assert wrong.verdict.tolist() == [1, 1, 2, 1]
    assert {row.step for row in sharded.decode_log(wrong.log).violations} == {2**32 - 1}


def test_one_buffer_for_two_sources_is_passed_once() -> None:
    """K and V interleaved: the same array twice comes back as the same array twice."""
    sharded = ops_of()
    state = prefilled(sharded)
    pool = state[3]
    both = (pool[0], pool[0])
    result = check(sharded, (*state[:3], both), pass_through=True)
    assert len(result.real_kv_buffers) == 2 and result.real_kv_buffers[0] is result.real_kv_buffers[1]
    np.testing.assert_array_equal(result.real_kv_buffers[0], pool[0])
    assert result.verdict.tolist() == [2] * 4


def test_rotation_and_further_arguments() -> None:
    sharded = ops_of()
    state = prefilled(sharded)
    pool = corrupted(state[3], 1, (TABLE[1, 0] // PAGE, TABLE[1, 0] % PAGE, 0, 0))
    verdicts = [
        check(sharded, (*state[:3], pool), source_window=window).verdict.tolist() for window in ((0, 1), (1, 1), np.array([0, 2], np.int32))
    ]
    assert verdicts == [[1, 1, 1, 1], [2, 1, 1, 1], [2, 1, 1, 1]]
    tokens = np.zeros((3 * DP, WIDTH), np.int32)
    tokens[[1, 2, 4, 5]] = 7 * TABLE[[1, 2, 1, 2]]
    tokens[5, 2] = 1
    expected = {
        "req_to_verify_expected_tokens": tokens,
        "req_to_verify_expected_tokens_valid_lens": LENS,
        "check_verify_expected_token": True,
    }
    result = check(sharded, state, **expected)
    assert (result.verdict.tolist(), result.first_bad_position.tolist()) == ([1, 1, 1, 2], [-1, -1, -1, 2])
    mapping = np.concatenate([np.arange(SLOTS, dtype=np.int32)] * DP)
    windowed = check(sharded, state, swa_window_size=3, full_to_swa_index_mapping=mapping)
    assert windowed.verdict.tolist() == [1] * 4
    assert sharded.decode_log(windowed.log).slot_runs[HEAD] == 4 * TP * 3


def test_write_asserts_and_adoption() -> None:
    sharded = ops_of()
    laid_out = sharded.plan(
        req_pool_indices=ROWS,
        prefix_lens=LENS * 0,
        extend_seq_lens=LENS,
        req_to_token=tables(sharded),
        verify_capacity=0,
        write_req_capacity=2,
    )
    slots, positions = slots_of(LENS), positions_of(LENS)
    expected = slots * 7
    expected[2 * WIDTH + 4] += 1  # first request of the second data rank
    ask = {
        "records": sharded.allocate_records(provenance=True), "log": sharded.allocate_log(ring_capacity=4), "plan": laid_out.write,
        "input_ids": slots * 7, "positions": positions, "out_cache_loc": slots, "launch_tag": TAIL,
    }  # fmt: skip
    written = sharded.write(**ask, enable_write_input_assert=True, expected_input_tokens=expected, expected_input_positions=positions)
    assert written.verdict.tolist() == [1, 1, 2, 1]
    assert [row.shard for row in sharded.decode_log(written.log).violations] == [4, 5, 6, 7]
    positions = positions.copy()
    positions[3] += 1
    chained = sharded.write(**{**ask, "positions": positions}, enable_chain_position_assert=True)
    assert chained.verdict.tolist() == [1, 1, 1, 1]  # the chain assert begins at a seed, and there is none
    adopted = sharded.adopt(**ask)
    flags = np.asarray(adopted.records).reshape(8, SLOTS, 16)[:, TABLE[1, 0], 11]
    assert flags.tolist() == [RecordFlag.ADOPTED] * 8


def test_moves_and_functions_of_one_rank() -> None:
    sharded = ops_of()
    records, tags, _, _ = prefilled(sharded)
    before = np.asarray(records).reshape(DP, TP, SLOTS, 16)
    freed = sharded.move(release_records, records=records, slots=np.array([5, -1, 17, SLOTS], np.int32))
    assert freed.status.tolist() == [0, 0, 0, 64]
    after = np.asarray(freed.records).reshape(DP, TP, SLOTS, 16)
    changed = np.argwhere((after != before).any(axis=-1))
    assert changed.tolist() == [[0, k, 5] for k in range(TP)] + [[1, k, 17] for k in range(TP)]
    fresh = sharded.move(reset_records, records=records, source_tags=tags, slots=np.array([1, 2], np.int32), page_size=PAGE)
    assert not np.asarray(fresh.records).reshape(DP, TP, SLOTS, 16)[0, :, 4:8].any()
    assert not np.asarray(fresh.source_tags).reshape(DP, TP, SLOTS, -1)[1, :, 8:12].any()
    copied = sharded.move(
        copy_records, records=records, source_tags=tags, src=np.array([1, 1], np.int32), dst=np.array([7, 6], np.int32), page_size=PAGE
    )
    np.testing.assert_array_equal(np.asarray(copied.records).reshape(before.shape)[0, :, 28:32], before[0, :, 4:8])
    tokens = sharded.map_data_ranks(
        lambda flat, offsets, rows, pool: scatter_req_token_ids(flat_in=flat, offsets=offsets, req_pool_indices=rows, pool_out=pool).pool,
        np.arange(6, dtype=np.int32), np.array([0, 2, 0, 3], np.int32), np.array([1, 0], np.int32), np.zeros((4, 3), np.int32),
    )  # fmt: skip
    assert tokens.tolist() == [[0, 0, 0], [0, 1, 0], [3, 4, 5], [0, 0, 0]]


def test_packed_verdicts_keep_every_pair_apart() -> None:
    pairs = [(0, -1), (1, -1), (2, -1)] + [(2, position) for position in (INT32_MAX, INT32_MAX - 1, 7, 1, 0)]
    packed = pack_verdicts(*(np.array(values, np.int32) for values in zip(*pairs, strict=True)))
    assert packed.tolist() == sorted(set(packed.tolist()))  # later in the list is worse
    verdict, position = unpack_verdicts(packed)
    assert list(zip(verdict.tolist(), position.tolist(), strict=True)) == pairs
    assert int(Verdict.BAD) == 2


def test_what_is_not_packed() -> None:
    good = np.zeros((2,), np.int32)
    for arguments, error, message in (
        ((good, good[:1]), ValueError, "first_bad_position length must be 2, got 1"),
        ((good, good[None]), ValueError, "first_bad_position must be 1-D, got shape"),
        ((good.astype(np.int64), good), ValueError, "verdict must have dtype int32, got int64"),
        ((good, good.astype(np.float32)), ValueError, "first_bad_position must have dtype int32, got float32"),
        ((None, good), TypeError, "verdict must be an array, got NoneType"),
        (([0, 1], good), TypeError, "verdict must be an array, got list"),
    ):
        with pytest.raises(error, match=f"^kv-canary: {message}"):
            pack_verdicts(*arguments)
    for packed, error, message in (
        (np.zeros((2,)), ValueError, "packed must have dtype int32, got float64"),
        (None, TypeError, "packed must be an array, got NoneType"),
    ):
        with pytest.raises(error, match=f"^kv-canary: {message}"):
            unpack_verdicts(packed)


# ------------------------------------------------------------------------------------------------ bad input

POOL = (jax.ShapeDtypeStruct((PAGES, PAGE, HEADS, DIM), jnp.float32),)


def make(**changes: Any) -> ShardedOps:
    settings = {"mesh": mesh_of(DP, TP), "data_axes": "data", "buffers": POOL, "buffer_specs": SPEC, "sources": local_sources, **changes}
    return ShardedOps(**settings)


ODD = (jax.ShapeDtypeStruct((15, PAGE, HEADS, DIM), jnp.float32),)
FEW = (jax.ShapeDtypeStruct((PAGES, PAGE, 6, DIM), jnp.float32),)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"buffers": ODD},
            ValueError,
            "buffers[0] axis 0 of size 15 does not divide over the mesh axis 'data' of size 2 (shape (15, 4, 8, 8), ",
        ),
        (
            {"buffers": FEW},
            ValueError,
            "buffers[0] axis 2 of size 6 does not divide over the mesh axis 'tensor' of size 4 (shape (16, 4, 6, 8), ",
        ),
        (
            {"buffer_specs": P("data", None, "model")},
            ValueError,
            "buffer_specs[0] names the axis 'model', the mesh has the axes {'data': 2, 'tensor': 4} (shape (16, 4, 8, 8))",
        ),
        (
            {"buffer_specs": P(("data", "tensor"), None, None, None), "buffers": (jax.ShapeDtypeStruct((12, 4, 8), jnp.float32),)},
            ValueError,
            f"buffer_specs[0] {P(('data', 'tensor'), None, None, None)} has 4 axes, buffers[0] has shape (12, 4, 8)",
        ),
        (
            {"buffer_specs": P(("data", "tensor")), "buffers": (jax.ShapeDtypeStruct((12, 4, 8), jnp.float32),)},
            ValueError,
            "buffers[0] axis 0 of size 12 does not divide over the mesh axis 'data' of size 2 x 'tensor' of size 4 (shape (12, 4, 8), ",
        ),
        (
            {"buffer_specs": P(None, None, "tensor")},
            ValueError,
            "buffers[0] must be split over the data axis 'data' of size 2: shards along it serve different requests and need pages of "
            f"their own (shape (16, 4, 8, 8), partitioned as {P(None, None, 'tensor')})",
        ),
        ({"data_axes": "dp"}, ValueError, "data_axes names the axis 'dp', the mesh has the axes {'data': 2, 'tensor': 4}"),
        ({"tensor_axes": ("model",)}, ValueError, "tensor_axes names the axis 'model', the mesh has the axes"),
        (
            {"tensor_axes": ("data", "tensor")},
            ValueError,
            "the mesh axis 'data' must be named once in data_axes and tensor_axes, got ('data',)",
        ),
        ({"tensor_axes": ()}, ValueError, "the mesh axis 'tensor' of size 4 must be one of data_axes ('data',) or tensor_axes ():"),
        ({"mesh": "cpu"}, TypeError, "mesh must be a jax.sharding.Mesh, got str"),
        ({"data_axes": (1,)}, TypeError, "data_axes must be mesh axis names, got int"),
        ({"buffers": POOL[0]}, TypeError, "buffers must be a tuple of arrays, got ShapeDtypeStruct"),
        ({"buffer_specs": (SPEC, SPEC)}, ValueError, "buffer_specs must hold one PartitionSpec a buffer, got 2 for 1 buffers"),
        ({"buffer_specs": ("data",)}, TypeError, "buffer_specs[0] must be a PartitionSpec, got str"),
        ({"buffer_specs": None}, TypeError, "buffer_specs must be a tuple of PartitionSpec, got NoneType"),
        ({"buffer_specs": P("data", "data")}, ValueError, f"buffer_specs[0] {P('data', 'data')} names the axis 'data' twice"),
        ({"buffer_specs": P(P.UNCONSTRAINED)}, TypeError, "buffer_specs[0] must be a tuple of mesh axis names, got UnconstrainedSingleton"),
        ({"buffer_specs": P(("data", 3))}, TypeError, "buffer_specs[0] must be mesh axis names, got int"),
        ({"buffers": None}, TypeError, "buffers must be a tuple of arrays, got NoneType"),
        ({"buffers": (None,)}, TypeError, "buffers[0] must be an array or anything with shape and dtype, got NoneType"),
        ({"buffers": (jax.ShapeDtypeStruct((), jax.dtypes.prng_key),)}, TypeError, "buffers[0] must have a dtype of numbers, got "),
        ({"data_axes": None}, TypeError, "data_axes must be a tuple of mesh axis names, got NoneType"),
        ({"tensor_axes": 3}, TypeError, "tensor_axes must be a tuple of mesh axis names, got int"),
        ({"sources": None}, TypeError, "sources must be a tuple of RealKvSource, got NoneType"),
        ({"sources": lambda local: None}, TypeError, "sources must be a tuple of RealKvSource, got NoneType"),
        ({"sources": ()}, ValueError, "slots is required without sources: the slots of one shard"),
        ({"sources": (), "slots": -1}, ValueError, "slots must be non-negative, got -1"),
        ({"sources": ("x",), "slots": 4}, TypeError, "sources must be a tuple of RealKvSource, got a str in it"),
        (
            {"sources": local_sources(POOL)},
            ValueError,
            "sources[0] describes float32 (16, 4, 8, 8), but one shard of buffers[0] is float32 (8, 4, 2, 8) (the whole is (16, 4, 8, 8), "
            f"partitioned as {SPEC})",
        ),
        ({"sources": lambda local: local_sources(local) * 2}, ValueError, "sources[1] reads buffer 1, but there are 1 buffers"),
    ],
)
def test_bad_settings(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make(**changes)
    assert str(caught.value).startswith(f"kv-canary: {message}")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"req_pool_indices": np.ones(5, np.int32)},
            ValueError,
            "req_pool_indices axis 0 of size 5 does not divide over the mesh axis 'data' of size 2 (shape (5,), the mesh has the axes",
        ),
        (
            {"req_to_token": np.ones((5, 3), np.int32)},
            ValueError,
            "req_to_token axis 0 of size 5 does not divide over the mesh axis 'data'",
        ),
        (
            {"req_to_token": FlatTable(np.ones(8, np.int32), np.ones(5, np.int32))},
            ValueError,
            "req_to_token starts axis 0 of size 5 does not divide over the mesh axis 'data' of size 2 (shape (5,)",
        ),
        ({"prefix_lens": np.ones(6, np.int32)}, ValueError, "prefix_lens length must be 2, got 3"),
        (
            {"full_to_swa_index_mapping": None, "swa_window_size": 2},
            ValueError,
            "full_to_swa_index_mapping is required when swa_window_size > 0",
        ),
        (
            {"records": np.zeros((SLOTS, 8), np.uint32)},
            ValueError,
            f"records must have {8 * SLOTS} rows (8 shards of {SLOTS} slots), got shape ({SLOTS}, 8), the mesh has the axes",
        ),
        (
            {"source_tags": np.zeros((3, 2), np.uint32)},
            ValueError,
            f"source_tags must have {8 * SLOTS} rows (8 shards of {SLOTS} slots), got",
        ),
        (
            {"log": ViolationLog.allocate(ring_capacity=8)},
            ValueError,
            "log must hold the logs of 8 shards (allocate_log), got write_index of shape (1,) and ring of shape (8, 32)",
        ),
        ({"log": 3}, TypeError, "log must be a ViolationLog, got int"),
        ({"real_kv_buffers": (np.zeros((2, 2), np.float32),)}, ValueError, "real_kv_buffers must hold 2 arrays, got 1"),
        ({"real_kv_buffers": np.zeros(3)}, TypeError, "real_kv_buffers must be a tuple of arrays, got ndarray"),
        ({"real_kv_buffers": (1, 2)}, TypeError, "real_kv_buffers[0] must be an array, got int"),
        (
            {"real_kv_buffers": (np.zeros((16, 4, 2, 8), np.float32),) * 2},
            ValueError,
            "real_kv_buffers[0] must be float32 (16, 4, 8, 8) as the ShardedOps was made for, got float32 (16, 4, 2, 8)",
        ),
        ({"shard": 3}, TypeError, "shard is known to the ShardedOps and must not be given"),
        ({"shards": 3}, TypeError, "verify_fused has no argument 'shards'"),
        ({"plan": 3}, TypeError, "verify_fused has no argument 'plan'"),
        ({"launch_tag": [0]}, TypeError, "launch_tag must be an int, got list"),
        ({"launch_tag": 12}, ValueError, "launch_tag must be one of"),
        ({"step": -1}, ValueError, "step must be >= 0, got -1"),
        ({"step": np.array(2**40)}, ValueError, "step must be <= 4294967295, got 1099511627776"),
        ({"step": None}, TypeError, "step must be an int, got NoneType"),
        ({"records": None}, TypeError, "records must be an array, got NoneType"),
        ({"log": None}, TypeError, "log must be a ViolationLog, got NoneType"),
        ({"prefix_lens": None}, TypeError, "prefix_lens must be an array, got None"),
        ({"req_to_token": None}, TypeError, "req_to_token must be an array, got None"),
        ({"req_pool_indices": jax.ShapeDtypeStruct((4,), jnp.int32)}, TypeError, "req_pool_indices must be an array, got ShapeDtypeStruct"),
        *[
            ({"real_kv_buffers": value}, ValueError, "real_kv_buffers must hold one array a source, got 0 for 2 sources")
            for value in (None, (), [])
        ],
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    sharded = ops_of()
    with pytest.raises(error) as caught:
        check(sharded, prefilled(sharded), **changes)
    assert str(caught.value).startswith(f"kv-canary: {message}")


def test_more_bad_arguments() -> None:
    sharded = ops_of()
    state = prefilled(sharded)
    ask = {"records": state[0], "log": state[2], "req_pool_indices": ROWS, "prefix_lens": LENS, "req_to_token": tables(sharded)}
    assert sharded.verify_fused(**ask, launch_tag=HEAD, real_kv_hash_mode=RealKvHashMode.NONE).verdict.shape == (4,)
    for mode in (RealKvHashMode.ALL, 1):
        with pytest.raises(ValueError, match=r"^kv-canary: real_kv_buffers must hold one array a source, got 0 for 2 sources"):
            sharded.verify_fused(**ask, launch_tag=HEAD, real_kv_hash_mode=mode)
    with pytest.raises(TypeError, match=r"^kv-canary: verify_fused needs the argument 'launch_tag'"):
        sharded.verify_fused(**ask)
    elsewhere = jax.device_put(ROWS, jax.devices("cpu")[1])
    with pytest.raises(ValueError, match=r"^kv-canary: req_pool_indices must be on the mesh of the ShardedOps, got SingleDeviceSharding"):
        sharded.verify_fused(**{**ask, "req_pool_indices": elsewhere}, launch_tag=HEAD)
    whole = jax.device_put(np.asarray(state[3][0]), NamedSharding(sharded.mesh, P()))
    with pytest.raises(ValueError, match=r"^kv-canary: real_kv_buffers\[0\] must be placed as NamedSharding.*shape \(16, 4, 8, 8\)"):
        check(sharded, (*state[:3], (whole, state[3][1])))
    with pytest.raises(TypeError, match=r"^kv-canary: plan must be one half of a Plan, got int"):
        sharded.verify(records=state[0], log=state[2], plan=1, launch_tag=HEAD)
    laid_out = sharded.plan(
        req_pool_indices=ROWS, prefix_lens=LENS, extend_seq_lens=LENS * 0, req_to_token=tables(sharded), verify_capacity=20,
        write_req_capacity=2,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"^kv-canary: plan.slot_indices must be an array, got None"):
        sharded.verify(records=state[0], log=state[2], plan=dataclasses.replace(laid_out.verify, slot_indices=None), launch_tag=HEAD)
    wide = np.asarray(laid_out.verify.slot_indices).astype(np.int64)
    wide[0] += 2**32  # cut to 32 bits it would be the slot that is meant
    far = sharded.verify(
        records=state[0], log=state[2], plan=dataclasses.replace(laid_out.verify, slot_indices=wide), launch_tag=HEAD,
        real_kv_hash_mode=RealKvHashMode.ALL, real_kv_buffers=state[3],
    )  # fmt: skip
    assert far.verdict.tolist() == [2, 1, 1, 1]
    lopsided = VerifyPlan.allocate(verify_capacity=3, bs=2)
    with pytest.raises(
        ValueError, match=r"^kv-canary: plan.slot_indices axis 0 of size 3 does not divide over the mesh axis 'data' of size 2"
    ):
        sharded.verify(records=state[0], log=state[2], plan=lopsided, launch_tag=HEAD)
    with pytest.raises(ValueError, match=r"^kv-canary: capacities length must be 8, got 4"):
        digest(sharded, state, capacities=np.ones(4, np.int32))
    with pytest.raises(ValueError, match=r"^kv-canary: verdict axis 0 of size 3 does not divide"):
        digest(sharded, state, verdict=np.ones(3, np.int32))
    with pytest.raises(ValueError, match=r"^kv-canary: verdict length must be 4, got 2"):
        digest(sharded, state, verdict=np.ones(2, np.int32))
    with pytest.raises(ValueError, match=r"^kv-canary: log must hold the logs of 8 shards"):
        sharded.decode_log(ViolationLog.allocate(ring_capacity=8))
    with pytest.raises(ValueError, match=r"^kv-canary: slots axis 0 of size 3 does not divide over the mesh axis 'data' of size 2"):
        sharded.move(reset_records, records=state[0], slots=np.ones(3, np.int32))
    with pytest.raises(ValueError, match=r"^kv-canary: arrays\[0\] must have an axis to split over the data axes"):
        sharded.map_data_ranks(lambda x: x, jnp.int32(3))


def test_an_abstract_mesh_will_do_inside_a_step() -> None:
    mesh = mesh_of(DP, TP)
    sharded = ops_of.__wrapped__(mesh.abstract_mesh)
    state = prefilled(ops_of())
    with jax.set_mesh(mesh):
        assert jax.jit(lambda *state: check(sharded, state).verdict)(*state).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, r: s.move(None, records=r, slots=TWO), TypeError, "function must be a function, got NoneType"),
        (lambda s, r: s.move(reset_records, records=None, slots=TWO), TypeError, "records must be an array, got NoneType"),
        (lambda s, r: s.move(reset_records, slots=TWO), TypeError, "reset_records needs the argument 'records'"),
        (lambda s, r: s.move(reset_records, records=r, slots=None), TypeError, "slots must be an array, got None"),
        (lambda s, r: s.move(reset_records, records=r, slots=TWO, pages=1), TypeError, "reset_records has no argument 'pages'"),
        (lambda s, r: s.move(reset_records, records=r, slots=TWO, page_size=True), TypeError, "page_size must be an int, got bool"),
        (lambda s, r: s.move(reset_records, records=r, slots=TWO, page_size=SLOTS + 1), ValueError, f"page_size must be at most {SLOTS}"),
        (lambda s, r: s.move(take_records, records=r, slots=TWO), TypeError, "the result of function must be a MoveResult, got Taken"),
        (lambda s, r: s.map_data_ranks(None, TWO), TypeError, "function must be a function, got NoneType"),
        (lambda s, r: s.map_data_ranks(abs, 3), TypeError, "arrays[0] must be an array, got int"),
        (lambda s, r: s.coordinates(None), TypeError, "shard must be an int, got NoneType"),
        (lambda s, r: s.data_rank("0"), TypeError, "shard must be an int, got str"),
        (lambda s, r: s.decode_log(None), TypeError, "log must be a ViolationLog, got NoneType"),
        (lambda s, r: s.decode_log(s.allocate_log(ring_capacity=1), records=3), TypeError, "records must be an array, got int"),
        (
            lambda s, r: s.decode_log(dataclasses.replace(s.allocate_log(ring_capacity=1), slot_run_counter=np.zeros((3, 2), np.uint32))),
            ValueError,
            "log.slot_run_counter axis 0 must be 96, got 3",
        ),
        (
            lambda s, r: jax.jit(lambda log: s.decode_log(log).reported)(s.allocate_log(ring_capacity=1)),
            TypeError,
            "log.ring must be a concrete array, got a traced value; read it outside of jit",
        ),
        (lambda s, r: s.find_deviating_ranks(None), TypeError, "report must be a LogReport, got NoneType"),
        (lambda s, r: merge_reports(None), TypeError, "reports must be several LogReport, got NoneType"),
        (lambda s, r: merge_reports([3]), TypeError, "reports must be a tuple of LogReport, got a int in it"),
    ],
)  # fmt: skip
def test_bad_moves_and_readings(call: Any, error: type[Exception], message: str) -> None:
    sharded = ops_of()
    sharded.move(reset_records, records=sharded.allocate_records(), slots=TWO, page_size=1)  # True is not the 1 that was compiled
    with pytest.raises(error, match=f"^kv-canary: {re.escape(message)}"):
        call(sharded, sharded.allocate_records())
