"""The NumPy reference by hand: known answers of the contract, this library's own checks, and integers that mean harm."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import vectors_io as io

from jax_kvcanary import reference
from jax_kvcanary.reference.hashing import head_hash
from jax_kvcanary.reference.integers import signed
from jax_kvcanary.reference.record import Record, read_record
from jax_kvcanary.spec import CHAIN_ANCHOR, INT32_MAX, CanaryLaunchTag, Column, FailReason, RealKvHashMode, RecordFlag, TableKind, Verdict
from jax_kvcanary.state import VerifyPlan, VerifyResult, ViolationLog, WritePlan, WriteResult

ANCHOR_HASH = 0xDE7FAE23A9A1B716
TOKENS = [101, 202, 303, 404, 505]
PREV_HASHES = [ANCHOR_HASH, 0x542FE5061275A6AB, 0x9890D56BDE53142E, 0x5213C65EEE8A1DD1, 0xC749AFFE5A5A9634]
NEXT_HASH = 0x3A650FCC4023CD13
KNOWN_BYTES = bytes.fromhex("0102040810204080 8182848890A0C0FF")
TAG = CanaryLaunchTag.HEAD_K_FULL
SLOTS = 8


def signed_rows(log: ViolationLog) -> list[list[int]]:
    """All stored rows, columns as signed 64-bit integers."""
    count = min(int(log.write_index[0]), log.ring.shape[0])
    return np.ascontiguousarray(log.ring[:count]).view("<i8").tolist()


def only_row(log: ViolationLog) -> list[int]:
    rows = signed_rows(log)
    assert len(rows) == 1, rows
    return rows[0]


def reasons(log: ViolationLog) -> list[int]:
    return [row[Column.REASON] for row in signed_rows(log)]


def write_plan(lengths: list[int], seeds: list[int], rows: list[int] | None = None) -> WritePlan:
    return WritePlan(
        write_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        write_seed_slot_indices=np.array(seeds, np.int64),
        write_num_valid_reqs=np.array([len(lengths)], np.int32),
        req_pool_indices=np.array(rows if rows is not None else [], np.int64),
    )


def write_chain(
    slots: list[int], *, tokens: list[int] = TOKENS, width: int = 8, records: np.ndarray | None = None, **more: Any
) -> WriteResult:
    """Stamp one request from position 0 on, without a predecessor."""
    count = len(slots)
    arguments = {
        "records": np.zeros((SLOTS, width), np.uint32) if records is None else records,
        "log": io.empty_log(16),
        "plan": write_plan([count], [-1]),
        "input_ids": np.array(tokens[:count], np.int64),
        "positions": np.arange(count),
        "out_cache_loc": np.array(slots, np.int64),
        "launch_tag": TAG,
    }
    return reference.write(**{**arguments, **more})


def verify_plan(
    slots: list[int], prevs: list[int], positions: list[int] | None = None, *, batch_rows: list[int] | None = None, bs: int = 1, **more: Any
) -> VerifyPlan:
    plan = {
        "slot_indices": np.array(slots, np.int64),
        "expected_tokens": np.full(len(slots), -1, np.int64),
        "expected_positions": np.array(range(len(slots)) if positions is None else positions, np.int64),
        "prev_slot_indices": np.array(prevs, np.int64),
        "batch_rows": np.zeros(len(slots), np.int64) if batch_rows is None else np.array(batch_rows, np.int64),
        "num_valid": np.array([len(slots)], np.int32),
        "enable": np.ones(1, np.int32),
        "row_status": np.zeros(bs, np.int32),
        "req_pool_indices": np.arange(3, 3 + bs),
    }
    return VerifyPlan(**{**plan, **more})


def verify(records: np.ndarray, plan: VerifyPlan, **more: Any) -> VerifyResult:
    return reference.verify(**{"records": records, "log": io.empty_log(16), "plan": plan, "launch_tag": TAG, "step": 9, "shard": 2, **more})


# ---------------------------------------------------------------------------------------------- known answers


def test_splitmix64() -> None:
    assert reference.splitmix64(0) == 0
    assert reference.splitmix64(CHAIN_ANCHOR) == ANCHOR_HASH == head_hash(0)
    values = np.array([0, 1, CHAIN_ANCHOR, 2**64 - 1], np.uint64)
    assert reference.splitmix64_array(values).tolist() == [reference.splitmix64(int(value)) for value in values]


def test_chain_of_known_tokens() -> None:
    result = write_chain([1, 2, 3, 4, 5])
    stored = [read_record(result.records, slot) for slot in (1, 2, 3, 4, 5)]
    assert stored == [Record(token, position, prev, 0) for position, (token, prev) in enumerate(zip(TOKENS, PREV_HASHES, strict=True))]
    assert stored[-1].chain_hash == NEXT_HASH
    assert signed_rows(result.log) == []
    assert io.counters_of(result.log.slot_run_counter)[TAG] == 5
    assert io.counters_of(result.log.kernel_run_counter)[TAG] == 1
    assert result.verdict.tolist() == [Verdict.OK]


def test_chain_continues_from_a_seed() -> None:
    first = write_chain([1, 2, 3])
    second = reference.write(
        records=first.records,
        log=first.log,
        plan=write_plan([2], [3]),
        input_ids=np.array(TOKENS[3:]),
        positions=np.array([3, 4]),
        out_cache_loc=np.array([4, 5]),
        launch_tag=TAG,
    )
    np.testing.assert_array_equal(second.records, write_chain([1, 2, 3, 4, 5]).records)


def test_known_bytes() -> None:
    assert reference.fold_bytes(KNOWN_BYTES) == 0xF036E30B6961C78D
    data = np.frombuffer(KNOWN_BYTES, np.uint8).reshape(1, 16)
    source = io.GoldenSource(1, 16, 1, 16, 16, "uint8")
    for mode in (RealKvHashMode.PARTIAL, RealKvHashMode.ALL):
        hashed = reference.SourceReader([source], [data], mode).hashes([0])[0]
        assert hashed == reference.SlotHash(0x6041580849E6407D, (0xF036E30B6961C78D,))
        assert hashed.tags == (0x6961C78D,)


# ---------------------------------------------------------------------------------------------- sources


def fold(*parts: bytes) -> int:
    return reference.fold_bytes(b"".join(parts))


def test_modes_and_combination() -> None:
    data = np.arange(2 * 64, dtype=np.uint8).reshape(2, 64)
    sources = [io.GoldenSource(2, 64, 2, 32, 32, "uint8"), io.GoldenSource(2, 64, 2, 32, 16, "uint8")]
    raw = data.tobytes()
    for mode, first_size in ((RealKvHashMode.PARTIAL, 16), (RealKvHashMode.ALL, 32)):
        hashed = reference.SourceReader(sources, [data, data], mode).hashes([3])[3]
        own = (fold(raw[96 : 96 + first_size]), fold(raw[96 : 96 + 16]))
        assert hashed == reference.SlotHash(reference.splitmix64(reference.splitmix64(own[0]) ^ own[1]), own)
    assert reference.SourceReader(sources, [], RealKvHashMode.NONE).hashes([3])[3] == reference.SlotHash(0, (0, 0))
    assert reference.SourceReader([], [], RealKvHashMode.ALL).hashes([3])[3] == reference.SlotHash(0, ())


def test_source_that_reads_nothing_is_left_out() -> None:
    data = np.arange(32, dtype=np.uint8).reshape(2, 16)
    whole, empty = io.GoldenSource(2, 16, 1, 16, 16, "uint8"), io.GoldenSource(2, 16, 1, 16, 0, "uint8")
    alone = reference.SourceReader([whole], [data], RealKvHashMode.ALL).hashes([1])[1]
    among = reference.SourceReader([empty, whole], [data, data], RealKvHashMode.ALL).hashes([1])[1]
    assert among == reference.SlotHash(alone.combined, (0, *alone.own))


def test_strided_runs_are_padded_once() -> None:
    # [heads 3, pages 2, page size 2, bytes 4]: a slot's bytes are one run of 4 a head, 12 in all.
    data = np.arange(3 * 2 * 2 * 4, dtype=np.uint8).reshape(3, 2, 2, 4)
    source = (0, 0, 2, 2, 8, 4, (1, 3, 1, 1), (0, 16, 0, 0), 4, 12)
    reader = reference.SourceReader([source], [data], RealKvHashMode.ALL)
    assert reader.slots(100) == 4
    for slot, hashed in reader.hashes(range(4)).items():
        runs = data[:, slot // 2, slot % 2].tobytes()
        assert len(runs) == 12
        assert hashed.own == (fold(runs + bytes(4)),)


def test_strided_runs_in_row_major_order_cut_by_read_bytes() -> None:
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 4), np.uint8)  # [a, b, slots, bytes]
    source = (0, 0, 5, 1, 4, 4, (2, 3, 1, 1), (60, 20, 0, 0), 4, 18)
    hashed = reference.SourceReader([source], [data], RealKvHashMode.ALL).hashes([3])[3]
    assert hashed.own == (fold(data[:, :, 3].tobytes()[:18]),)
    assert reference.SourceReader([source], [data], RealKvHashMode.PARTIAL).hashes([3])[3].own == (fold(data[:, :, 3].tobytes()[:16]),)


def test_sources_may_share_a_buffer_and_name_it() -> None:
    data = np.arange(64, dtype=np.uint8)
    halves = [(0, offset, 4, 1, 16, 16, (1, 1, 1, 1), (0, 0, 0, 0), 8, 8) for offset in (0, 8)]
    hashed = reference.SourceReader(halves, [data], RealKvHashMode.ALL).hashes([2])[2]
    assert hashed.own == (fold(data[32:40].tobytes()), fold(data[40:48].tobytes()))
    with pytest.raises(ValueError, match="names buffer 1, but 1 buffers are given"):
        reference.SourceReader([(1, *halves[0][1:])], [data], RealKvHashMode.ALL)


def test_bytes_of_any_dtype() -> None:
    values = np.arange(-8, 8)
    packed = bytes((int(low) & 15) | (int(high) & 15) << 4 for low, high in values.reshape(-1, 2))
    source = io.GoldenSource(1, 8, 1, 8, 8, "int4")
    assert reference.SourceReader([source], [values.astype(ml_dtypes.int4)], RealKvHashMode.ALL).hashes([0])[0].own == (fold(packed),)
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.float32, np.int64, np.bool_):
        data = np.arange(16).reshape(2, 8).astype(dtype)
        size = 8 * data.itemsize
        source = io.GoldenSource(2, size, 1, size, size, "")
        assert reference.SourceReader([source], [data], RealKvHashMode.ALL).hashes([1])[1].own == (fold(data[1].tobytes()),)


def test_source_past_its_buffer_is_refused() -> None:
    source = io.GoldenSource(4, 16, 1, 16, 16, "uint8")
    with pytest.raises(ValueError, match="reaches past its buffer of 48 bytes"):
        reference.SourceReader([source], [np.zeros((3, 16), np.uint8)], RealKvHashMode.ALL).hashes([3])


# ---------------------------------------------------------------------------------------------- bit 64: slots out of range


@pytest.mark.parametrize("slot", [-(2**63), -5, SLOTS, 2**40])
def test_verify_slot_out_of_range(slot: int) -> None:
    records = write_chain([1, 2]).records
    plan = verify_plan([slot], [-1], [7])
    result = verify(records, plan)
    assert only_row(result.log) == [TAG, slot, 0, 0, -1, 0, 0, FailReason.SLOT_OUT_OF_RANGE, 0, 3, 9, 7, 0, 0, -1, 2]
    assert (result.verdict.tolist(), result.first_bad_position.tolist()) == ([Verdict.BAD], [7])

    plain = verify(records, plan, extended_checks=False)
    assert signed_rows(plain.log) == []
    assert (plain.verdict.tolist(), plain.first_bad_position.tolist()) == ([Verdict.NOT_CHECKED], [-1])
    assert io.counters_of(plain.log.slot_run_counter)[TAG] == 1


def test_verify_predecessor_out_of_range() -> None:
    records = write_chain([1, 2, 3]).records
    # A head checked with a predecessor of -2 is a head, one with a predecessor past the end is not checked; both are reported.
    result = verify(records, verify_plan([1, 2], [-2, SLOTS]))
    assert reasons(result.log) == [64, 64]
    assert [row[Column.AUX] for row in signed_rows(result.log)] == [row[Column.CHAIN_HASH] for row in signed_rows(result.log)]
    assert signed_rows(verify(records, verify_plan([1, 2], [-2, SLOTS]), extended_checks=False).log) == []
    # The bit joins others.
    assert reasons(verify(records, verify_plan([2], [-2])).log) == [64 | FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_POSITION]


def test_padding_slot_and_unreachable_predecessor() -> None:
    records = write_chain([1, 2]).records
    result = verify(records, verify_plan([0, 2], [-1, 0]))  # slot 0 is never checked, slot 2 has lost its predecessor
    assert signed_rows(result.log) == []
    assert io.counters_of(result.log.slot_run_counter)[TAG] == 2
    assert reasons(verify(records, verify_plan([0, 2], [-1, 0]), padding_slot=None).log) == [1 | 256, 1]
    outside = verify(records, verify_plan([2_000_000, 1, 2], [-1, -1, 2_000_000], [0, 0, 1]), padding_slot=2_000_000)
    assert signed_rows(outside.log) == []
    assert verify(records, verify_plan([0], [-1])).verdict.tolist() == [Verdict.NOT_CHECKED]


def test_slots_end_where_a_source_ends() -> None:
    data = np.zeros((2, 32), np.uint8)
    more = {"real_kv_sources": [io.GoldenSource(2, 32, 2, 16, 16, "uint8")], "real_kv_buffers": [data]}
    records = write_chain([1, 2]).records
    assert reasons(verify(records, verify_plan([5], [-1]), real_kv_hash_mode=RealKvHashMode.ALL, **more).log) == [64]
    assert reasons(verify(records, verify_plan([5], [-1]), real_kv_hash_mode=RealKvHashMode.NONE, **more).log) == [1 | 256]


def test_write_slots_out_of_range() -> None:
    # -1 is skipped in silence, -3 and 8 are reported; none of them is stored, counted or advances the chain.
    result = write_chain([1, -1, -3, SLOTS, 2], tokens=[101, 7, 8, 9, 202])
    rows = signed_rows(result.log)
    assert [(row[Column.SLOT], row[Column.REASON]) for row in rows] == [(-3, 64), (SLOTS, 64)]
    assert rows[0] == [TAG, -3, 2, 8, -1, signed(PREV_HASHES[1]), -1, 64, 0, -1, 0, -1, 0, 0, -1, 0]
    assert read_record(result.records, 2).prev_hash == PREV_HASHES[1]
    assert io.counters_of(result.log.slot_run_counter)[TAG] == 2
    assert result.verdict.tolist() == [Verdict.BAD]
    plain = write_chain([1, -1, -3, SLOTS, 2], tokens=[101, 7, 8, 9, 202], extended_checks=False)
    assert signed_rows(plain.log) == []
    np.testing.assert_array_equal(plain.records, result.records)
    assert plain.verdict.tolist() == [Verdict.OK]


def test_write_to_a_padding_slot() -> None:
    assert read_record(write_chain([0], padding_slot=0).records, 0).token == 101
    outside = write_chain([2_000_000, 3], padding_slot=2_000_000)
    assert signed_rows(outside.log) == []
    assert read_record(outside.records, 3) == Record(202, 1, ANCHOR_HASH, 0)


@pytest.mark.parametrize("seed", [-2, SLOTS, 2**62])
def test_write_seed_out_of_range(seed: int) -> None:
    result = write_chain([1], plan=write_plan([1], [seed], [5]))
    assert only_row(result.log) == [TAG, seed, 0, 0, -1, signed(ANCHOR_HASH), -1, 64, 0, 5, 0, -1, 0, 0, -1, 0]
    assert read_record(result.records, 1).prev_hash == ANCHOR_HASH
    assert signed_rows(write_chain([1], plan=write_plan([1], [seed]), extended_checks=False).log) == []
    assert signed_rows(write_chain([], plan=write_plan([0], [seed])).log) == []


# ---------------------------------------------------------------------------------------------- bit 128: tables out of range


def plan_of(req_pool_indices: list[int], prefix_lens: list[int], table: Any, **more: Any) -> Any:
    bs = len(req_pool_indices)
    arguments = {
        "req_pool_indices": np.array(req_pool_indices, np.int32),
        "prefix_lens": np.array(prefix_lens, np.int32),
        "extend_seq_lens": np.ones(bs, np.int32),
        "req_to_token": np.asarray(table),
        "verify_capacity": 16,
        "write_req_capacity": bs,
    }
    return reference.plan(**{**arguments, **more})


def test_table_out_of_range() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    plan = plan_of([1, 3, -2, 2, 0, -1, 2], [2, 1, 1, 5, 9, 9, 4], table)
    assert plan.verify.row_status.tolist() == [0, 128, 128, 128, 0, 0, 0]
    assert plan.verify.num_valid.tolist() == [6]
    assert plan.verify.slot_indices[:6].tolist() == [4, 5, 8, 9, 10, 11]
    assert plan.verify.batch_rows[:6].tolist() == [0, 0, 6, 6, 6, 6]
    assert plan.write.write_offsets.tolist() == [0, 1, 2, 3, 4, 4, 4, 5]
    assert plan.write.write_seed_slot_indices.tolist() == [5, -1, -1, -1, -1, -1, 11]

    result = verify(np.zeros((16, 8), np.uint32), plan.verify)
    faults = [row for row in signed_rows(result.log) if row[Column.REASON] == 128]
    assert faults == [[TAG, -1, 0, 0, -1, 0, 0, 128, r, idx, 9, -1, 0, 0, -1, 2] for r, idx in ((1, 3), (2, -2), (3, 2))]
    assert result.verdict.tolist() == [2, 2, 2, 2, 0, 0, 2]
    assert result.first_bad_position.tolist() == [0, -1, -1, -1, -1, -1, 0]
    plain = verify(np.zeros((16, 8), np.uint32), plan.verify, extended_checks=False)
    assert plain.verdict.tolist() == [2, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("offsets", [[-1, 1], [0, 3], [1, 0], [2**63 - 1, -(2**63)], [-(2**63), 2**63 - 1]])
def test_write_segment_out_of_range(offsets: list[int]) -> None:
    plan = dataclasses.replace(write_plan([2], [-1], [4]), write_offsets=np.array(offsets))
    result = write_chain([1, 2], plan=plan)
    assert only_row(result.log) == [TAG, -1, 0, 0, -1, 0, -1, 128, 0, 4, 0, -1, 0, 0, -1, 0]
    stored = max(0, min(offsets[1], 2) - max(offsets[0], 0))
    assert io.counters_of(result.log.slot_run_counter)[TAG] == stored
    plain = write_chain([1, 2], plan=plan, extended_checks=False)
    assert signed_rows(plain.log) == []
    np.testing.assert_array_equal(plain.records, result.records)


def test_mapping_out_of_range_emits_minus_two() -> None:
    plan = plan_of([1], [4], [[0, 0, 0, 0], [5, -7, 99, 2]], full_to_swa_index_mapping=np.array([0, 10, 20, 30, 40, 50]))
    assert plan.verify.slot_indices[:4].tolist() == [50, -7, -2, 20]
    assert plan.verify.prev_slot_indices[:4].tolist() == [-1, 50, -7, -2]
    assert plan.write.write_seed_slot_indices.tolist() == [20]


# ---------------------------------------------------------------------------------------------- bit 256: never stamped


@pytest.mark.parametrize("width", [8, 12, 16, 18])
def test_unwritten(width: int) -> None:
    records = np.zeros((SLOTS, width), np.uint32)
    # Unreachable predecessor, position 0, no bytes: nothing but the zeros themselves is wrong.
    plan = verify_plan([3], [0], [0])
    assert reasons(verify(records, plan).log) == [256]
    assert signed_rows(verify(records, plan, extended_checks=False).log) == []
    records[3, width - 1] = 1  # of the real-KV hash, of no record at all, of the provenance, past it
    assert reasons(verify(records, plan).log) == {8: [FailReason.VERIFY_REAL_KV_HASH], 12: [256], 16: [], 18: [256]}[width]


# ---------------------------------------------------------------------------------------------- namespaces and provenance


def test_namespaces_do_not_chain() -> None:
    namespace = 0x8000_0000_0000_0001
    as_pairs = io.pairs(np.array([signed(namespace)]))
    records = write_chain([1, 2], namespaces=as_pairs).records
    assert read_record(records, 1).prev_hash == reference.splitmix64(CHAIN_ANCHOR ^ namespace)
    plan = verify_plan([1, 2], [-1, 1])
    assert signed_rows(verify(records, plan, namespaces=as_pairs).log) == []
    assert reasons(verify(records, plan).log) == [FailReason.VERIFY_CHAIN_HASH]
    # A batch row that is not known has namespace 0, no verdict and no name in the row.
    result = verify(records, verify_plan([1, 2], [-1, 1], batch_rows=[4, -1]), namespaces=as_pairs)
    row = only_row(result.log)
    assert (row[Column.BATCH_ROW], row[Column.REQ_POOL_IDX]) == (-1, -1)
    assert result.verdict.tolist() == [Verdict.NOT_CHECKED]


def test_provenance() -> None:
    result = write_chain(
        [1, 2],
        width=18,
        records=np.full((SLOTS, 18), 7, np.uint32),
        request_ids=np.array([-2]),
        namespaces=np.array([2**40 + 3]),
        step=2**32 - 1,
        record_flags=RecordFlag.ADOPTED,
    )
    for slot in (1, 2):
        assert result.records[slot, 8:].tolist() == [2**32 - 2, 2**32 - 1, 2**32 - 1, 2, 3, 2**8, 0, 0, 7, 7]
    assert result.records[3].tolist() == [7] * 18
    narrow = write_chain([1], records=np.full((SLOTS, 15), 7, np.uint32), request_ids=np.array([5]))
    assert narrow.records[1, 8:].tolist() == [7] * 7


# ---------------------------------------------------------------------------------------------- tags and rotation


@pytest.fixture(name="tagged")
def _tagged() -> tuple[np.ndarray, np.ndarray, list[np.ndarray], dict[str, Any]]:
    """Records and tags of three sources, their buffers, and the arguments that name them."""
    rng = np.random.default_rng(7)
    buffers = [rng.integers(0, 256, (SLOTS, 16), np.uint8) for _ in range(3)]
    more = {"real_kv_sources": [io.GoldenSource(SLOTS, 16, 1, 16, 16, "uint8")] * 3, "real_kv_hash_mode": RealKvHashMode.ALL}
    result = write_chain([1, 2], real_kv_buffers=buffers, source_tags=np.zeros((SLOTS, 3), np.uint32), **more)
    return result.records, result.source_tags, buffers, more


def test_tags_are_the_sources_own_hashes(tagged: Any) -> None:
    _, tags, buffers, _ = tagged
    for slot in (1, 2):
        assert tags[slot].tolist() == [reference.fold_bytes(buffer[slot]) & 0xFFFFFFFF for buffer in buffers]
    assert not tags[3:].any()


def test_first_bad_source(tagged: Any) -> None:
    records, tags, buffers, more = tagged
    plan = verify_plan([1, 2], [-1, 1])
    assert signed_rows(verify(records, plan, real_kv_buffers=buffers, source_tags=tags, **more).log) == []
    for bad in (2, 1):
        buffers[bad][2, 5] ^= 16
        now = reference.SourceReader(more["real_kv_sources"], buffers, RealKvHashMode.ALL).hashes([2])[2]
        row = only_row(verify(records, plan, real_kv_buffers=buffers, source_tags=tags, **more).log)
        assert row[Column.REASON] == FailReason.VERIFY_REAL_KV_HASH
        assert row[Column.FIRST_BAD_SOURCE] == bad
        assert row[Column.REAL_KV_HASH] == signed(read_record(records, 2).real_kv_hash)
        assert row[Column.EXPECTED_REAL_KV_HASH] == signed(now.combined)
        assert only_row(verify(records, plan, real_kv_buffers=buffers, **more).log)[Column.FIRST_BAD_SOURCE] == -1


@pytest.mark.parametrize(
    ("window", "seen"),
    [((0, 1), []), ((1, 1), [1]), ((2, 1), [2]), ((2, 2), [2]), ((1, 2), [1]), ((-2, 2), [1]), ((4, 1), [1]), ((1, 0), []), ((0, -3), [])],
)
def test_rotation(tagged: Any, window: tuple[int, int], seen: list[int]) -> None:
    records, tags, buffers, more = tagged
    buffers[1][2, 0] ^= 1
    buffers[2][2, 0] ^= 1
    plan = verify_plan([1, 2], [-1, 1])
    log = verify(records, plan, real_kv_buffers=buffers, source_tags=tags, source_window=np.array(window, np.int32), **more).log
    assert [row[Column.FIRST_BAD_SOURCE] for row in signed_rows(log)] == seen
    for source in seen:
        row = only_row(log)
        assert row[Column.REAL_KV_HASH] == tags[2, source]
        assert row[Column.EXPECTED_REAL_KV_HASH] == reference.fold_bytes(buffers[source][2]) & 0xFFFFFFFF


def test_rotation_over_all_sources_compares_the_combined_hash(tagged: Any) -> None:
    records, tags, buffers, more = tagged
    records[2, 6] ^= 1
    arguments = {"real_kv_buffers": buffers, "source_tags": tags, **more}
    assert signed_rows(verify(records, verify_plan([2], [1], [1]), source_window=(1, 2), **arguments).log) == []
    row = only_row(verify(records, verify_plan([2], [1], [1]), source_window=(1, 3), **arguments).log)
    assert (row[Column.REASON], row[Column.FIRST_BAD_SOURCE]) == (FailReason.VERIFY_REAL_KV_HASH, -1)
    # A rotated check that finds another fault has nothing to say about bytes.
    row = only_row(verify(records, verify_plan([2], [1], [5]), source_window=(0, 1), **arguments).log)
    assert [row[column] for column in (Column.REASON, Column.REAL_KV_HASH, Column.EXPECTED_REAL_KV_HASH)] == [2, 0, 0]


def test_mode_none_reads_no_source(tagged: Any) -> None:
    records, tags, buffers, more = tagged
    arguments = {**more, "real_kv_hash_mode": RealKvHashMode.NONE, "real_kv_buffers": buffers}
    # The stored hash is compared with 0, in a rotated check too, and no source is to blame.
    for window in (None, (0, 1)):
        row = only_row(verify(records, verify_plan([1], [-1]), source_tags=tags, source_window=window, **arguments).log)
        assert [row[c] for c in (Column.REASON, Column.EXPECTED_REAL_KV_HASH, Column.FIRST_BAD_SOURCE)] == [4, 0, -1]
    written = write_chain([2], source_tags=tags, **arguments)
    assert (read_record(written.records, 2).real_kv_hash, written.source_tags[2].tolist()) == (0, [0, 0, 0])


def test_rotation_needs_tags(tagged: Any) -> None:
    records, _, buffers, more = tagged
    with pytest.raises(ValueError, match="source_window requires source_tags"):
        verify(records, verify_plan([1], [-1]), real_kv_buffers=buffers, source_window=(0, 1), **more)


# ---------------------------------------------------------------------------------------------- asserts and verdicts of a write


def test_input_assert_and_chain_position_assert() -> None:
    first = write_chain([1]).records
    arguments = {
        "records": first,
        "plan": write_plan([3], [1], [6]),
        "input_ids": np.array([202, 303, 404]),
        "positions": np.array([1, 5, 6]),
        "out_cache_loc": np.array([2, 3, 4]),
        "enable_write_input_assert": True,
        "expected_input_tokens": np.array([202, 999, 404]),
        "expected_input_positions": np.array([1, 2, 6]),
        "step": 4,
    }
    result = write_chain([], **arguments, enable_chain_position_assert=np.array([3], np.int32))
    running = signed(read_record(result.records, 3).prev_hash)
    who = [0, 6, 4]
    assert signed_rows(result.log) == [
        [TAG, 3, 5, 303, 999, running, 2, 8 | 16, *who, 2, 0, 0, -1, 0],
        [TAG, 3, 5, 303, 303, running, 2, 16, *who, 2, 0, 0, -1, 0],
    ]
    assert read_record(result.records, 3).position == 5
    assert reasons(write_chain([], **arguments).log) == [8 | 16]
    with pytest.raises(ValueError, match="require enable_write_input_assert"):
        write_chain([], **{**arguments, "enable_write_input_assert": False})
    with pytest.raises(ValueError, match="requires expected_input_tokens"):
        write_chain([1], enable_write_input_assert=True)


def test_chain_position_wraps() -> None:
    records = write_chain([1], positions=np.array([2**63 - 1])).records
    more = {"records": records, "plan": write_plan([1], [1]), "enable_chain_position_assert": True}
    assert signed_rows(write_chain([2], positions=np.array([-(2**63)]), **more).log) == []
    row = only_row(write_chain([2], positions=np.array([0]), **more).log)
    assert (row[Column.AUX], row[Column.REASON]) == (-(2**63), 16)


def test_verdicts() -> None:
    records = write_chain([1, 2, 3]).records
    plan = verify_plan(
        [1, 2, 3, 2, 0, 3],
        [-1, 1, 2, 2, 0, 2],
        [0, 1, 9, 2**40, 0, -4],
        batch_rows=[0, 0, 1, 1, 2, 3],
        bs=5,
    )
    result = verify(records, plan)
    assert result.verdict.tolist() == [Verdict.OK, Verdict.BAD, Verdict.NOT_CHECKED, Verdict.BAD, Verdict.NOT_CHECKED]
    assert result.first_bad_position.tolist() == [-1, 9, -1, 0, -1]
    far = verify(records, verify_plan([3], [2], [2**40]))
    assert far.first_bad_position.tolist() == [INT32_MAX]
    assert write_chain([-1]).verdict.tolist() == [Verdict.NOT_CHECKED]


def test_disabled_verify_counts_its_launch_only() -> None:
    log = io.empty_log(4)
    log.write_index[:] = -3
    plan = verify_plan([5], [-1], enable=np.zeros(1, np.int32), row_status=np.array([128], np.int32))
    result = verify(write_chain([1]).records, plan, log=log)
    assert (result.log.write_index.tolist(), result.verdict.tolist()) == ([-3], [Verdict.NOT_CHECKED])
    assert io.counters_of(result.log.kernel_run_counter)[TAG] == 1
    assert io.counters_of(result.log.slot_run_counter)[TAG] == 0


# ---------------------------------------------------------------------------------------------- log


@pytest.mark.parametrize(
    ("before", "after", "stored"), [(-9, 2, 2), (3, 5, 1), (70, 72, 0), (INT32_MAX - 1, INT32_MAX, 0), (INT32_MAX, INT32_MAX, 0)]
)
def test_write_index(before: int, after: int, stored: int) -> None:
    log = io.empty_log(4)
    log.write_index[:] = before
    log.slot_run_counter[TAG] = 2**32 - 1
    log.kernel_run_counter[TAG] = [2**32 - 1, 0]
    result = verify(write_chain([1]).records, verify_plan([5, 6], [-1, -1]), log=log)
    assert result.log.write_index.tolist() == [after]
    assert int((result.log.ring != 0).any(axis=1).sum()) == stored
    assert result.log.slot_run_counter[TAG].tolist() == [1, 0]
    assert result.log.kernel_run_counter[TAG].tolist() == [0, 1]
    assert log.write_index.tolist() == [before]


def test_ring_without_rows() -> None:
    result = verify(write_chain([1]).records, verify_plan([5], [-1]), log=io.empty_log(0))
    assert result.log.write_index.tolist() == [1]


# ---------------------------------------------------------------------------------------------- tables


def test_four_tables_of_the_same_slots() -> None:
    blocks = np.array([[9, 9, 9], [2, 0, 5]])
    rows = (blocks[:, :, None] * 4 + np.arange(4)).reshape(2, 12)
    lengths = {"req_pool_indices": [1], "prefix_lens": [10]}
    by_rows = plan_of(**lengths, table=rows)
    by_blocks = plan_of(**lengths, table=blocks, table_kind=TableKind.BLOCKS, table_page_size=4)
    flat = np.concatenate([[-1, -1, -1], rows[1]])
    by_flat = plan_of(**lengths, table=flat, table_kind=TableKind.FLAT, table_starts=np.array([3, 99]))
    for other in (by_blocks, by_flat):
        for name in ("slot_indices", "prev_slot_indices", "num_valid", "row_status"):
            np.testing.assert_array_equal(getattr(other.verify, name), getattr(by_rows.verify, name))
        np.testing.assert_array_equal(other.write.write_seed_slot_indices, by_rows.write.write_seed_slot_indices)
    identity = plan_of(**lengths, table=np.zeros(0, np.int32), table_kind=TableKind.IDENTITY, table_rows=2, table_width=12)
    assert identity.verify.slot_indices[:10].tolist() == list(range(12, 22))


def test_negative_block_is_a_negative_slot() -> None:
    plan = plan_of([0], [4], [[-1, 3]], table_kind=TableKind.BLOCKS, table_page_size=2, padding_req=None)
    assert plan.verify.slot_indices[:4].tolist() == [-1, -1, 6, 7]


def test_flat_table_decides_by_batch_row() -> None:
    starts = np.array([0, 2, -1, 3, 9])
    plan = plan_of([50, -9, 7, 8], [2, 0, 0, 3], [4, 5, 6, 7], table_kind=TableKind.FLAT, table_starts=starts)
    assert plan.verify.row_status.tolist() == [0, 128, 128, 128]
    assert plan.verify.slot_indices[:2].tolist() == [4, 5]


@pytest.mark.parametrize("prefix", [3, 4, 5, 11, INT32_MAX])
def test_identity_table_is_a_ring(prefix: int) -> None:
    width = 4
    plan = plan_of([2], [prefix], [], table_kind=TableKind.IDENTITY, table_rows=3, table_width=width)
    first = max(0, prefix - width + 1) if prefix > width else 0
    expected = list(range(first, prefix))
    assert plan.verify.num_valid.tolist() == [len(expected)]
    assert plan.verify.expected_positions[: len(expected)].tolist() == expected
    assert plan.verify.slot_indices[: len(expected)].tolist() == [8 + position % width for position in expected]
    assert plan.write.write_seed_slot_indices.tolist() == [8 + (prefix - 1) % width]


def test_write_offsets_saturate() -> None:
    most = np.full(3, INT32_MAX, np.int32)
    plan = plan_of([1, 1, 1], [0, 0, 0], np.zeros((2, 2), np.int32), extend_seq_lens=most)
    assert plan.write.write_offsets.tolist() == [0, INT32_MAX, INT32_MAX, INT32_MAX]
    wide = plan_of([1, 1, 1], [0, 0, 0], np.zeros((2, 2), np.int64), extend_seq_lens=most)
    assert wide.write.write_offsets.tolist() == [0, INT32_MAX, 2 * INT32_MAX, 3 * INT32_MAX]
    assert (plan.write.write_offsets.dtype, wide.write.write_offsets.dtype) == (np.int32, np.int64)


def test_slots_past_a_plan_array_saturate() -> None:
    more = {"padding_req": None, "table_kind": TableKind.BLOCKS, "table_page_size": 16, "verify_capacity": 32}
    table = np.array([[2**30, 3]], np.int32)
    narrow = plan_of([0], [17], table, **more)
    assert narrow.verify.slot_indices[[0, 15, 16]].tolist() == [INT32_MAX, INT32_MAX, 48]
    wide = plan_of([0], [17], table.astype(np.int64), **more)
    assert wide.verify.slot_indices[[0, 15, 16]].tolist() == [2**34, 2**34 + 15, 48]
    # No page number at all: the block itself stands for its slots.
    assert plan_of([0], [1], np.array([[2**40]]), **more).verify.slot_indices[:1].tolist() == [2**40]


def test_plan_overflow() -> None:
    plan = plan_of([1, 1], [3, 3], np.arange(6).reshape(2, 3), verify_capacity=5)
    assert (plan.verify.num_valid.tolist(), plan.verify.enable.tolist()) == ([5], [0])
    assert plan_of([1, 1], [3, 3], np.arange(6).reshape(2, 3), verify_capacity=6).verify.enable.tolist() == [1]


def test_expected_tokens() -> None:
    more = {
        "req_to_verify_expected_tokens": np.array([[0, 0, 0], [11, 12, 13]]),
        "req_to_verify_expected_tokens_valid_lens": np.array([2]),
    }
    table = np.arange(8).reshape(2, 4)
    assert plan_of([1], [4], table, **more).verify.expected_tokens[:4].tolist() == [11, 12, -1, -1]
    draft = plan_of([1], [4], table, **more, kv_token_id_vs_position_offset=1)
    assert draft.verify.expected_tokens[:4].tolist() == [12, -1, -1, -1]


# ---------------------------------------------------------------------------------------------- scatter


def test_scatter() -> None:
    result = reference.scatter_req_token_ids(
        flat_in=np.array([1, 2, 2**31, 2**32 + 5, -1]),
        offsets=np.array([0, 2, 5, 5, 5, 9, 3]),
        req_pool_indices=np.array([0, 2, -1, 9, 1, 1]),
        pool_out=np.full((3, 2), 7, np.int32),
    )
    assert result.pool.tolist() == [[1, 2], [7, 7], [-(2**31), 5]]
    assert result.status.tolist() == [0, 0, 0, 128, 128, 128]
    assert result.pool.dtype == np.int32


# ---------------------------------------------------------------------------------------------- hostile integers


def hostile(rng: np.random.Generator, *shape: int, near: int = 8) -> np.ndarray:
    """int64 values: small ones, boundaries of 32 and 64 bits, and anything at all."""
    edges = np.array([-(2**63), 2**63 - 1, -(2**31), 2**31 - 1, 2**31, 2**32, -1, -2, 0, near, near - 1], np.int64)
    small = rng.integers(-2, near + 2, shape)
    anything = rng.integers(-(2**63), 2**63 - 1, shape, np.int64, endpoint=True)
    return np.choose(rng.integers(0, 4, shape), [small, small, edges[rng.integers(0, edges.size, shape)], anything])


def hostile_batch(rng: np.random.Generator) -> dict[str, Any]:
    bs, rows, width = (int(n) for n in rng.integers(0, 6, 3))
    kind = TableKind(int(rng.integers(0, 4)))
    table = {
        TableKind.ROWS: lambda: hostile(rng, rows, width),
        TableKind.BLOCKS: lambda: hostile(rng, rows, width, near=3),
        TableKind.FLAT: lambda: hostile(rng, rows * width),
        TableKind.IDENTITY: lambda: np.zeros(0, np.int64),
    }[kind]()
    batch = {
        "req_pool_indices": hostile(rng, bs, near=rows),
        "prefix_lens": hostile(rng, bs, near=width),
        "req_to_token": table,
        "table_kind": kind,
        "table_page_size": 3,
        "table_starts": hostile(rng, bs + 1, near=rows * width),
        "table_rows": rows,
        "table_width": width,
        "kv_token_id_vs_position_offset": int(rng.integers(-1, 2)),
        "padding_req": [None, 0, -5][int(rng.integers(0, 3))],
    }
    if rng.integers(0, 2):
        batch["full_to_swa_index_mapping"] = hostile(rng, int(rng.integers(0, 9)))
        batch["swa_window_size"] = int(rng.integers(0, 4))
    if rng.integers(0, 2):
        batch["req_to_verify_expected_tokens"] = hostile(rng, rows, width)
        batch["req_to_verify_expected_tokens_valid_lens"] = hostile(rng, bs, near=width)
    return batch


def hostile_pool(rng: np.random.Generator) -> dict[str, Any]:
    slots, sources = int(rng.integers(0, 8)), int(rng.integers(0, 3))
    pool = {
        "records": rng.integers(0, 2**32, (slots, int(rng.choice([8, 12, 16, 17]))), np.uint32) * rng.integers(0, 2, (slots, 1), np.uint32),
        "log": dataclasses.replace(io.empty_log(int(rng.integers(0, 9))), write_index=hostile(rng, 1).astype(np.int32)),
        "launch_tag": int(rng.integers(0, 12)),
        "real_kv_hash_mode": int(rng.integers(0, 3)),
        "real_kv_sources": [io.GoldenSource(6, 16, 1, 16, 16, "uint8")] * sources,
        "real_kv_buffers": [rng.integers(0, 256, (6, 16), np.uint8)] * sources,
        "padding_slot": [None, 0, -5, 2_000_000][int(rng.integers(0, 4))],
        "extended_checks": bool(rng.integers(0, 2)),
        "step": int(rng.integers(0, 2**32)),
    }
    if rng.integers(0, 2):
        pool["source_tags"] = rng.integers(0, 2**32, (slots, sources), np.uint32)
    return pool


@pytest.mark.parametrize("seed", range(150))
def test_hostile_plan_and_verify(seed: int) -> None:
    """Nothing raises or warns, and the fused verify reports what plan and verify do."""
    rng = np.random.default_rng(seed)
    batch, pool = hostile_batch(rng), hostile_pool(rng)
    bs = batch["req_pool_indices"].size
    plan = reference.plan(**batch, extend_seq_lens=hostile(rng, bs), verify_capacity=int(rng.integers(0, 40)), write_req_capacity=bs + 1)
    assert plan.verify.num_valid[0] <= plan.verify.slot_indices.size
    pool["check_verify_expected_token"] = bool(rng.integers(0, 2))
    pool["namespaces"] = hostile(rng, bs)
    if "source_tags" in pool and rng.integers(0, 2):
        pool["source_window"] = hostile(rng, 2, near=3).astype(np.int32)
    planned, fused = reference.verify(**pool, plan=plan.verify), reference.verify_fused(**pool, **batch)
    if plan.verify.enable[0]:
        for name in ("ring", "write_index", "slot_run_counter", "kernel_run_counter"):
            np.testing.assert_array_equal(getattr(planned.log, name), getattr(fused.log, name), err_msg=name)
        np.testing.assert_array_equal(planned.verdict, fused.verdict)
        np.testing.assert_array_equal(planned.first_bad_position, fused.first_bad_position)
    elsewhere = verify_plan(
        hostile(rng, 9),
        hostile(rng, 9),
        hostile(rng, 9),
        batch_rows=hostile(rng, 9, near=bs),
        num_valid=hostile(rng, 1).astype(np.int32),
        row_status=hostile(rng, bs).astype(np.int32),
        req_pool_indices=hostile(rng, bs),
        expected_tokens=hostile(rng, 9),
    )
    reference.verify(**pool, plan=elsewhere)


@pytest.mark.parametrize("seed", range(150))
def test_hostile_write_and_scatter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = hostile_pool(rng)
    capacity, tokens = int(rng.integers(0, 5)), int(rng.integers(0, 9))
    plan = WritePlan(
        write_offsets=hostile(rng, capacity + 1, near=tokens),
        write_seed_slot_indices=hostile(rng, capacity),
        write_num_valid_reqs=hostile(rng, 1, near=capacity).astype(np.int32),
        req_pool_indices=hostile(rng, int(rng.integers(0, capacity + 1))),
    )
    more = {name: hostile(rng, tokens) for name in ("input_ids", "positions", "out_cache_loc")}
    if rng.integers(0, 2):
        more.update({name: hostile(rng, tokens) for name in ("expected_input_tokens", "expected_input_positions")})
        more["enable_write_input_assert"] = True
    before = pool["records"].copy()
    result = reference.write(
        **pool,
        **more,
        plan=plan,
        enable_chain_position_assert=hostile(rng, 1),
        request_ids=hostile(rng, capacity),
        namespaces=io.pairs(hostile(rng, capacity)),
        record_flags=int(rng.integers(0, 2**32)),
    )
    np.testing.assert_array_equal(pool["records"], before)
    untouched = np.setdiff1d(np.arange(before.shape[0]), more["out_cache_loc"])
    np.testing.assert_array_equal(result.records[untouched], before[untouched])
    reference.scatter_req_token_ids(
        flat_in=hostile(rng, tokens),
        offsets=hostile(rng, capacity + 1, near=tokens),
        req_pool_indices=hostile(rng, capacity),
        pool_out=np.zeros((int(rng.integers(0, 4)), int(rng.integers(0, 4))), np.int32),
    )
