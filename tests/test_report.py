"""The decoded log: numbers exactly, and sentences that say what happened."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import (
    CanaryLaunchTag,
    FailReason,
    Provenance,
    RecordFlag,
    VerifyPlan,
    ViolationLog,
    allocate_records,
    decode_log,
    make_row_source,
    plan,
    reset_records,
    verify_fused,
    write,
)
from jax_kvcanary.spec import RING_WORDS, Column

ROW = {
    "TAG": 2,
    "SLOT": 5,
    "POSITION": 1,
    "TOKEN": 203,
    "EXPECTED_TOKEN": -1,
    "CHAIN_HASH": 0xABC,
    "AUX": 0xABC,
    "REASON": 0,
    "BATCH_ROW": 0,
    "REQ_POOL_IDX": 3,
    "STEP": 7,
    "EXPECTED_POSITION": 1,
    "REAL_KV_HASH": 0,
    "EXPECTED_REAL_KV_HASH": 0,
    "FIRST_BAD_SOURCE": -1,
    "SHARD": 4,
}


NOTHING_READ = dict.fromkeys(("POSITION", "TOKEN", "CHAIN_HASH", "REAL_KV_HASH", "EXPECTED_REAL_KV_HASH", "AUX"), 0)


def log_of(*rows: dict[str, int], ring_rows: int | None = None, write_index: int | None = None) -> ViolationLog:
    ring = np.zeros((len(rows) if ring_rows is None else ring_rows, 16), np.uint64)
    for i, row in enumerate(rows):
        for name, value in (ROW | row).items():
            ring[i, Column[name]] = value & (2**64 - 1)
    return ViolationLog(
        ring=ring.view(np.uint32).reshape(-1, 32),
        write_index=np.array([len(rows) if write_index is None else write_index], np.int32),
        slot_run_counter=np.array([[tag, tag == 3] for tag in range(12)], np.uint32),
        kernel_run_counter=np.ones((12, 2), np.uint32) * np.array([1, 0], np.uint32),
    )


def sentence(records: Any = None, **row: int) -> str:
    (violation,) = decode_log(log_of(row), records=records).violations
    return violation.describe()


def test_columns() -> None:
    (violation,) = decode_log(
        log_of(
            {
                "TAG": 8,
                "SLOT": -5,
                "POSITION": -(2**40),
                "TOKEN": 2**40,
                "CHAIN_HASH": 2**64 - 1,
                "AUX": 2**63,
                "REASON": 3,
                "FIRST_BAD_SOURCE": 6,
                "STEP": 2**32 - 1,
                "REAL_KV_HASH": 2**63 + 1,
                "EXPECTED_REAL_KV_HASH": 9,
            }
        )
    ).violations
    assert violation.tag is CanaryLaunchTag.TAIL_K_SWA
    assert violation.reasons == FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_POSITION
    assert (violation.slot, violation.position, violation.token, violation.expected_token) == (-5, -(2**40), 2**40, -1)
    assert (violation.chain_hash, violation.aux) == (2**64 - 1, 2**63)
    assert (violation.batch_row, violation.req_pool_idx, violation.step, violation.shard) == (0, 3, 2**32 - 1, 4)
    assert (violation.real_kv_hash, violation.expected_real_kv_hash, violation.first_bad_source) == (2**63 + 1, 9, 6)
    assert violation.writer is None and hash(violation)


@pytest.mark.parametrize(
    ("write_index", "rows", "stored", "lost"), [(0, 3, 0, 0), (2, 3, 2, 0), (3, 3, 3, 0), (9, 3, 3, 6), (5, 0, 0, 5), (-4, 3, 0, 0)]
)
def test_counts(write_index: int, rows: int, stored: int, lost: int) -> None:
    report = decode_log(log_of(ring_rows=rows, write_index=write_index))
    assert (report.reported, report.stored, report.lost, len(report.violations)) == (max(0, write_index), stored, lost, stored)


def test_counters() -> None:
    report = decode_log(log_of())
    assert report.slot_runs[CanaryLaunchTag.TAIL_V_FULL] == 3 + 2**32 and report.slot_runs[CanaryLaunchTag.SWEEP_V_SWA] == 11
    assert report.kernel_runs == dict.fromkeys(CanaryLaunchTag, 1)
    assert report.describe() == f"0 violations in 12 launches over {66 + 2**32} slots."


def test_the_whole_log_in_words() -> None:
    lines = decode_log(log_of({"REASON": 2, "POSITION": 9}, write_index=4)).describe().splitlines()
    assert lines[0].startswith("4 violations in ") and lines[0].endswith(", 3 of them not stored.")
    assert len(lines) == 2 and "its position is 9, expected 1" in lines[1]
    assert decode_log(log_of(write_index=2**31 - 1)).describe().startswith("at least 2147483647 violations")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"REASON": 1, "AUX": 0xDEF}, "its chain hash is 0x0000000000000abc, its predecessor gives 0x0000000000000def"),
        ({"REASON": 2, "POSITION": 9}, "its position is 9, expected 1"),
        ({"REASON": 4, "REAL_KV_HASH": 1, "EXPECTED_REAL_KV_HASH": 2}, "its bytes hash to 0x2, stamped was 0x1"),
        ({"REASON": 4, "FIRST_BAD_SOURCE": 3}, "(first bad source 3)"),
        ({"REASON": 32, "EXPECTED_TOKEN": 202}, "its token is 203, expected 202"),
        ({"REASON": 8, "EXPECTED_TOKEN": 202}, "token 203 was written, expected 202"),
        ({"REASON": 16, "POSITION": 4}, "position 4 was written, expected 1"),
        ({"REASON": 64, "SLOT": -7}, "found a violation at slot -7 (position 1, batch row 0, request row 3): the slot is outside the pool"),
        ({"REASON": 64, **NOTHING_READ, "AUX": 0}, ": the slot is outside the pool"),
        ({"REASON": 64}, "the slot of its predecessor is outside the pool"),  # a record that was read
        ({"REASON": 64, "CHAIN_HASH": 0, "AUX": 0}, "the slot of its predecessor is outside the pool"),
        ({"REASON": 64, "AUX": 1}, ": the slot is outside the pool"),  # of a write: the running hash, the expected position
        ({"REASON": 64, **NOTHING_READ, "CHAIN_HASH": 0xABC, "AUX": -1}, ": the slot is outside the pool"),  # a seed
        ({"REASON": 72, "EXPECTED_TOKEN": 5, "AUX": 1}, ": the slot is outside the pool; token 203 was written, expected 5"),
        ({"REASON": 65}, "the slot of its predecessor is outside the pool"),
        ({"REASON": 256}, "it was never written"),
        ({"REASON": 128, "SLOT": -1}, "TAIL_K_FULL skipped batch row 0, request row 3: its table row does not exist"),
        ({"REASON": 0}, "no reason bit is set"),
        ({"REASON": 1 << 40}, "unknown reason bits 0x10000000000"),
        ({"REASON": 2, "TAG": 99}, "launch 99 found"),
        ({"REASON": 2}, "step 7, shard 4."),
        ({"REASON": 2, "BATCH_ROW": -1, "REQ_POOL_IDX": -1}, "at slot 5 (position 1): "),
        ({"REASON": 2, "BATCH_ROW": -1, "REQ_POOL_IDX": -1, "EXPECTED_POSITION": -1}, "at slot 5: "),
    ],
)
def test_sentences(row: dict[str, int], words: str) -> None:
    text = sentence(**row)
    assert words in text and text.endswith(".") and text.count(". ") == 0


def test_all_findings_are_in_one_sentence() -> None:
    text = sentence(REASON=1 | 2 | 4 | 32 | 256, EXPECTED_TOKEN=1)
    for words in ("never written", "token is", "position is", "chain hash is", "bytes hash to"):
        assert words in text


def test_the_writer() -> None:
    records = np.zeros((8, 16), np.uint32)
    records[5] = [0] * 8 + [77, 1, 12, 3, 9, 0, 0, 0]
    (violation,) = decode_log(log_of({"REASON": 4}), records=records).violations
    assert violation.writer == Provenance(request_id=77 + 2**32, step=12, flags=RecordFlag.FREE | RecordFlag.ADOPTED, namespace=9)
    assert violation.describe().endswith("; the slot was written by request 4294967373 in step 12 under namespace 0x9 (adopted, now free).")
    for slot in (-1, 8, 2**40, 3):  # outside, or never written
        assert decode_log(log_of({"REASON": 4, "SLOT": slot}), records=records).violations[0].writer is None
    assert decode_log(log_of({"REASON": 4}), records=records[:, :8]).violations[0].writer is None


def test_with_records_the_pool_size_is_known() -> None:
    records = np.zeros((8, 8), np.uint32)
    assert "the slot is outside the pool of 8 slots" in sentence(records, REASON=64, SLOT=8)
    assert "the slot of its predecessor is outside the pool;" in sentence(records, REASON=64, SLOT=5)
    assert "the slot is one of the 8 of the records, but outside what the sources cover" in sentence(records, REASON=64, **NOTHING_READ)


def test_any_bits_decode() -> None:
    """A log may itself be damaged: decoding and describing never fail."""
    ring = np.random.default_rng(0).integers(0, 2**32, (200, 32), dtype=np.uint32)
    log = log_of(ring_rows=200, write_index=200)
    report = decode_log(ViolationLog(**(vars(log) | {"ring": ring})), records=np.full((8, 16), 2**32 - 1, np.uint32))
    assert len(report.describe().splitlines()) == 201


def test_what_is_no_log() -> None:
    donated = jnp.zeros((4, 32), jnp.uint32)
    donated.delete()
    for changes, error, message in (
        ({"ring": np.zeros((4, 16), np.uint32)}, ValueError, r"log.ring axis 1 must be 32, got 16 \(shape \(4, 16\)\)"),
        ({"ring": np.zeros((4, 32), np.int32)}, ValueError, "log.ring must have dtype uint32, got int32"),
        ({"ring": None}, TypeError, "log.ring must be an array, got NoneType"),
        ({"ring": donated}, ValueError, "log.ring was deleted"),
        ({"write_index": np.zeros(2, np.int32)}, ValueError, "log.write_index length must be 1, got 2"),
        ({"write_index": np.zeros(0, np.int32)}, ValueError, "log.write_index length must be 1, got 0"),
        ({"write_index": 3}, TypeError, "log.write_index must be an array, got int"),
        ({"slot_run_counter": np.zeros((3, 2), np.uint32)}, ValueError, "log.slot_run_counter axis 0 must be 12, got 3"),
        ({"kernel_run_counter": np.zeros((12, 2), np.int64)}, ValueError, "log.kernel_run_counter must have dtype uint32, got int64"),
    ):
        with pytest.raises(error, match=f"^kv-canary: {message}"):
            decode_log(ViolationLog(**(vars(log_of()) | changes)))
    for log in (None, 3, {}):
        with pytest.raises(TypeError, match=r"^kv-canary: log must be a ViolationLog, got "):
            decode_log(log)
    with pytest.raises(TypeError, match=r"^kv-canary: log.ring must be a concrete array, got a traced value; read it outside of jit"):
        jax.jit(lambda log: decode_log(log).reported)(log_of())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"records": 3}, TypeError, "records must be an array, got int"),
        ({"records": np.zeros((8,), np.uint32)}, ValueError, "records must be 2-D, got shape"),
        ({"records": np.zeros((8, 4), np.uint32)}, ValueError, "records must have at least 8 words a slot"),
        ({"records": np.zeros((8, 16), np.int32)}, ValueError, "records must have dtype uint32, got int32"),
        ({"source_names": "layer 0 K"}, TypeError, "source_names must be a tuple of str, got str"),
        ({"source_names": [3]}, TypeError, "source_names must be a tuple of str, got a int in it"),
        ({"source_names": 3}, TypeError, "source_names must be a tuple of str, got int"),
    ],
)
def test_what_a_log_is_not_decoded_with(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        decode_log(log_of({"REASON": 4}), **arguments)


def test_whose_slot_is_out_of_range() -> None:
    """Sources that cover fewer slots than the records: the row of a slot outside says so, that of a bad predecessor says that."""
    pool, table = np.zeros((4, 32), np.uint8), np.array([[0, 0], [5, 1]], np.int32)
    source = {"real_kv_hash_mode": 2, "real_kv_sources": make_row_source(layer_buffer=pool, read_bytes=32), "real_kv_buffers": (pool,)}
    laid_out = plan(
        req_pool_indices=[1], prefix_lens=[0], extend_seq_lens=[2], req_to_token=table, verify_capacity=4, write_req_capacity=1
    )  # fmt: skip
    for source_or_none, where in (({}, None), (source, 5)):
        written = write(
            records=allocate_records(slots=8), log=ViolationLog.allocate(ring_capacity=8), plan=laid_out.write, input_ids=[7, 8],
            positions=[0, 1], out_cache_loc=[5, 1], launch_tag=2, **source_or_none,
        )  # fmt: skip
        found = [v.describe() for v in decode_log(written.log, records=written.records).violations]
        assert [f"at slot {where}" in text and "but outside what the sources cover" in text for text in found] == [True] * len(found)
        assert len(found) == (where is not None)
        checked = verify_fused(
            records=written.records, log=ViolationLog.allocate(ring_capacity=8), req_pool_indices=[1], prefix_lens=[2],
            req_to_token=table, launch_tag=0, **source,
        )  # fmt: skip
        for records in (None, written.records):
            first, second = sorted(decode_log(checked.log, records=records).violations, key=lambda violation: violation.expected_position)
            assert "predecessor" not in first.describe() and "outside" in first.describe()
            assert "the slot of its predecessor is outside the pool" in second.describe()


def test_one_is_singular() -> None:
    log = log_of({"REASON": 2})
    one = np.zeros((12, 2), np.uint32)
    one[3, 0] = 1
    report = decode_log(ViolationLog(**(vars(log) | {"slot_run_counter": one, "kernel_run_counter": one})))
    assert report.describe().splitlines()[0] == "1 violation in 1 launch over 1 slot."


def test_from_a_step_to_the_sentence() -> None:
    """Stamp, corrupt, verify, explain."""
    table = np.array([[0, 0, 0], [3, 4, 5]], np.int32)
    pool = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)
    source = make_row_source(layer_buffer=pool, read_bytes=32)
    laid_out = plan(
        req_pool_indices=[1], prefix_lens=[0], extend_seq_lens=[3], req_to_token=table, verify_capacity=4, write_req_capacity=1
    )  # fmt: skip
    written = write(
        records=allocate_records(slots=8, provenance=True), log=ViolationLog.allocate(ring_capacity=8), plan=laid_out.write,
        input_ids=[101, 202, 303], positions=[0, 1, 2], out_cache_loc=[3, 4, 5], launch_tag=2, real_kv_hash_mode=2, real_kv_sources=source,
        real_kv_buffers=(pool,), request_ids=[77], step=12,
    )  # fmt: skip
    pool[4, 20] ^= 1
    checked = verify_fused(
        records=written.records, log=written.log, req_pool_indices=[1], prefix_lens=[3], req_to_token=table, launch_tag=0,
        real_kv_hash_mode=2, real_kv_sources=source, real_kv_buffers=(pool,), step=13, shard=2,
    )  # fmt: skip
    report = decode_log(checked.log, records=checked and written.records)
    (violation,) = report.violations
    assert violation.describe().startswith(
        "HEAD_K_FULL found a violation at slot 4 (position 1, batch row 0, request row 1): its bytes hash to 0x"
    )
    assert violation.describe().endswith("; step 13, shard 2; the slot was written by request 77 in step 12.")
    assert report.slot_runs[CanaryLaunchTag.HEAD_K_FULL] == 3 and report.kernel_runs[CanaryLaunchTag.TAIL_K_FULL] == 1

    emptied = reset_records(records=written.records, slots=[3])
    checked = verify_fused(
        records=emptied.records, log=ViolationLog.allocate(ring_capacity=8), req_pool_indices=[1], prefix_lens=[1], req_to_token=table,
        launch_tag=0,
    )  # fmt: skip
    assert "it was never written" in decode_log(checked.log, records=emptied.records).describe()


def test_hand_made_entries_have_no_request() -> None:
    from jax_kvcanary import verify

    entries = VerifyPlan.from_entries(slot_indices=[2, 99], expected_positions=[0, 1], prev_slot_indices=[-1, 2])
    out = verify(records=allocate_records(slots=4), log=ViolationLog.allocate(ring_capacity=4), plan=entries, launch_tag=4)
    first, second = sorted(decode_log(out.log).violations, key=lambda v: v.slot)
    assert (first.batch_row, first.req_pool_idx) == (-1, -1) and "batch row" not in first.describe()
    assert second.reasons == FailReason.SLOT_OUT_OF_RANGE


def test_a_source_name_replaces_its_number() -> None:
    row = np.zeros((1, RING_WORDS), np.uint32)
    row[0, 2 * Column.REASON] = int(FailReason.VERIFY_REAL_KV_HASH)
    row[0, 2 * Column.FIRST_BAD_SOURCE] = 1
    log = dataclasses.replace(ViolationLog.allocate(ring_capacity=1), ring=row, write_index=np.ones((1,), np.int32))
    cases = ((None, "(first bad source 1)"), (["layer 0 K", "layer 0 V"], "(first bad source layer 0 V)"), (["one"], "source 1)"))
    for names, text in cases:
        assert text in decode_log(log, source_names=names).violations[0].describe()
