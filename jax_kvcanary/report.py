"""Violation rows in words: what was expected, what was found, where, when, and who had written it. Host side, NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_kvcanary import html, validation
from jax_kvcanary.spec import (
    INT32_MAX,
    NUM_LAUNCH_TAGS,
    PROVENANCE_RECORD_WORDS,
    RECORD_WORDS,
    RING_WORDS,
    CanaryLaunchTag,
    Column,
    FailReason,
    RecordFlag,
)
from jax_kvcanary.state import Array, ViolationLog

_VERIFY_REASONS = (
    FailReason.VERIFY_CHAIN_HASH
    | FailReason.VERIFY_POSITION
    | FailReason.VERIFY_REAL_KV_HASH
    | FailReason.VERIFY_TOKEN
    | FailReason.UNWRITTEN
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Who wrote a slot, from a record of 16 words.

    request_id, namespace: 64 bits, unsigned. step: of the write. flags: FREE, ADOPTED.
    """

    request_id: int
    step: int
    flags: RecordFlag
    namespace: int

    def describe(self) -> str:
        words = f"written by request {self.request_id} in step {self.step}"
        if self.namespace:
            words += f" under namespace {self.namespace:#x}"
        marks = [mark for flag, mark in ((RecordFlag.ADOPTED, "adopted"), (RecordFlag.FREE, "now free")) if flag in self.flags]
        return words + (f" ({', '.join(marks)})" if marks else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """One row of the log, a field a column, and the writer of its slot where records tell.

    tag: the launch; a plain int if the number is unknown. position, token: stored (verify) or written (write).
    expected_token: -1 is not checked. chain_hash: stored (verify) or running (write). aux: the expected chain hash
    (verify) or the expected position (write), as 64 unsigned bits. batch_row, req_pool_idx, first_bad_source: -1 is unknown.
    num_slots: of the records, which may be more than the sources cover; None: not known.
    """

    tag: CanaryLaunchTag | int
    slot: int
    position: int
    token: int
    expected_token: int
    chain_hash: int
    aux: int
    reasons: FailReason
    batch_row: int
    req_pool_idx: int
    step: int
    expected_position: int
    real_kv_hash: int
    expected_real_kv_hash: int
    first_bad_source: int
    shard: int
    writer: Provenance | None = None
    source_name: str | None = None
    num_slots: int | None = None

    @property
    def tag_name(self) -> str:
        return self.tag.name if isinstance(self.tag, CanaryLaunchTag) else f"launch {self.tag}"

    def describe(self) -> str:
        """The violation as one sentence.

        Example:
          >>> decode_log(log).violations[0].describe()  # doctest: +SKIP
          'TAIL_K_FULL found a violation at slot 5 (position 1, batch row 0): its token is 203, expected 202; step 7, shard 0.'
        """
        if FailReason.TABLE_OUT_OF_RANGE in self.reasons:
            return f"{self.tag_name} skipped {self._request()}: {self._table_finding()}; {self._when()}."
        place = f"slot {self.slot}"
        where = [f"position {self.expected_position}"] if self.expected_position != -1 else []
        if self.batch_row >= 0 or self.req_pool_idx >= 0:
            where.append(self._request())
        if where:
            place += f" ({', '.join(where)})"
        text = f"{self.tag_name} found a violation at {place}: {'; '.join(self._findings()) or 'no reason bit is set'}; {self._when()}"
        if self.writer is not None:
            text += f"; the slot was {self.writer.describe()}"
        return text + "."

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows: list[tuple[str, object]] = [
            ("launch", self.tag_name),
            ("slot, position", f"{self.slot}, {self.expected_position}"),
            ("request", self._request()),
            ("found", "; ".join(self._findings())),
            ("when", self._when()),
        ]
        if self.writer is not None:
            rows.append(("writer", self.writer.describe()))
        return html.table("Violation", rows)

    def _request(self) -> str:
        row = f"batch row {self.batch_row}" if self.batch_row >= 0 else "a batch row that is unknown"
        return row + (f", request row {self.req_pool_idx}" if self.req_pool_idx != -1 else "")

    def _when(self) -> str:
        return f"step {self.step}, shard {self.shard}"

    def _table_finding(self) -> str:
        if self.reasons & ~FailReason.TABLE_OUT_OF_RANGE:
            return "its table row, its length or its segment is out of range, among other reasons"
        return "its table row does not exist, its prefix is longer than the table, or its segment lies outside the inputs"

    def _findings(self) -> list[str]:
        reasons, out = self.reasons, []
        if FailReason.SLOT_OUT_OF_RANGE in reasons:
            out.append(self._range_finding())
        if FailReason.UNWRITTEN in reasons:
            out.append("it was never written")
        if FailReason.VERIFY_TOKEN in reasons:
            out.append(f"its token is {self.token}, expected {self.expected_token}")
        if FailReason.VERIFY_POSITION in reasons:
            out.append(f"its position is {self.position}, expected {self.expected_position}")
        if FailReason.VERIFY_CHAIN_HASH in reasons:
            out.append(f"its chain hash is {self.chain_hash:#018x}, its predecessor gives {self.aux:#018x}")
        if FailReason.VERIFY_REAL_KV_HASH in reasons:
            source = f" (first bad source {self.source_name or self.first_bad_source})" if self.first_bad_source >= 0 else ""
            out.append(f"its bytes hash to {self.expected_real_kv_hash:#x}, stamped was {self.real_kv_hash:#x}{source}")
        if FailReason.WRITE_TOKEN in reasons:
            out.append(f"token {self.token} was written, expected {self.expected_token}")
        if FailReason.WRITE_POSITION in reasons:
            out.append(f"position {self.position} was written, expected {self.expected_position}")
        if FailReason.LANDING in reasons:
            source = f" (first bad source {self.source_name or self.first_bad_source})" if self.first_bad_source >= 0 else ""
            out.append(f"what was handed to the writer does not stand there{source}: the write did not land, or another replaced it")
        if FailReason.RANK_DIGEST in reasons:
            out.append(
                f"this rank's digest is {self.real_kv_hash:#010x} (length {self.expected_position + 1}, chain {self.chain_hash:#018x}, "
                f"capacity {self.aux}), that of another rank is {self.expected_real_kv_hash:#010x}"
            )
        unknown = int(reasons) & ~sum(int(reason) for reason in FailReason)
        if unknown:
            out.append(f"unknown reason bits {unknown:#x}")
        return out

    def _range_finding(self) -> str:
        if self._predecessor_is_outside():
            return "the slot of its predecessor is outside the pool"
        if self.num_slots is None:
            return "the slot is outside the pool"
        if 0 <= self.slot < self.num_slots:
            return f"the slot is one of the {self.num_slots} of the records, but outside what the sources cover"
        return f"the slot is outside the pool of {self.num_slots} slots"

    def _predecessor_is_outside(self) -> bool:
        """Whether the row is that of a slot that was read. Of a slot outside nothing is: its row has no other reason of a verify, and in
        column 5 nothing (verify) or the hash of a chain (write), while an unreachable predecessor leaves the stored hash in 5 and 6."""
        if self.slot < 0 or (self.num_slots is not None and self.slot >= self.num_slots):
            return False
        stored = (self.position, self.token, self.chain_hash, self.real_kv_hash, self.expected_real_kv_hash)
        return bool(self.reasons & _VERIFY_REASONS) or (self.chain_hash == self.aux and any(stored))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogReport:
    """A log on the host.

    violations: the stored rows in ring order. reported: rows that launches reported (2**31 - 1: at least). stored: rows kept.
    lost: rows past the ring's capacity. slot_runs, kernel_runs: slots checked or stamped, and launches, per tag.
    """

    violations: tuple[Violation, ...]
    reported: int
    stored: int
    lost: int
    slot_runs: dict[CanaryLaunchTag, int]
    kernel_runs: dict[CanaryLaunchTag, int]

    def describe(self) -> str:
        """The whole log, a sentence a line."""
        at_least = "at least " if self.reported == INT32_MAX else ""
        launches, slots = sum(self.kernel_runs.values()), sum(self.slot_runs.values())
        ran = f"{_counted(launches, 'launch', 'launches')} over {_counted(slots, 'slot')}"
        head = f"{at_least}{_counted(self.reported, 'violation')} in {ran}"
        if self.lost:
            head += f", {self.lost} of them not stored"
        return "\n".join([head + ".", *(violation.describe() for violation in self.violations)])


def decode_log(log: ViolationLog, *, records: Array | None = None, source_names: Sequence[str] | None = None) -> LogReport:
    """Read a log into named fields; waits for the device.

    Args:
      log: a violation log of JAX or NumPy arrays, not traced, not donated.
      records: uint32 ``[slots, words]``; with 16 words or more, violations also say who wrote their slot and when. As of
        now: a slot that was written since names its new writer.
      source_names: a name a source, such as ``PoolSources.labels``; the first bad source is then named.

    Returns:
      The report.

    Raises:
      ValueError: arrays of other shapes or dtypes than a log's, or a deleted one. TypeError: no log, a traced one, no names.

    Example:
      >>> decode_log(ViolationLog.allocate(ring_capacity=4)).reported
      0
    """
    validation.instance("log", log, ViolationLog)
    ring = _on_host("log.ring", log.ring, (None, RING_WORDS), np.uint32)
    index = _on_host("log.write_index", log.write_index, (1,), np.int32)
    counters = {
        name: _on_host(f"log.{name}", getattr(log, name), (NUM_LAUNCH_TAGS, 2), np.uint32)
        for name in ("slot_run_counter", "kernel_run_counter")
    }
    table = None if records is None else _on_host("records", records, (None, None), np.uint32)
    if table is not None and table.shape[1] < RECORD_WORDS:
        raise validation.error(f"records must have at least {RECORD_WORDS} words a slot, got shape {table.shape}")
    names = None if source_names is None else validation.sequence_of("source_names", source_names, str)
    reported = max(0, int(index[0]))
    stored = min(reported, ring.shape[0])
    return LogReport(
        violations=tuple(_violation(row, table, names) for row in ring[:stored]),
        reported=reported,
        stored=stored,
        lost=reported - stored,
        slot_runs=_counters(counters["slot_run_counter"]),
        kernel_runs=_counters(counters["kernel_run_counter"]),
    )


def _on_host(name: str, value: Any, shape: Sequence[int | None], dtype: Any) -> np.ndarray:
    array = validation.host_array(name, value)
    validation.check_shape(name, array.shape, shape)
    validation.check_dtype(name, array.dtype, dtype)
    return array


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _violation(row: np.ndarray, records: np.ndarray | None, source_names: Sequence[str] | None) -> Violation:
    unsigned = [int(low) | int(high) << 32 for low, high in row.reshape(-1, 2)]
    signed = [value - (1 << 64) if value >> 63 else value for value in unsigned]
    slot = signed[Column.SLOT]
    source = signed[Column.FIRST_BAD_SOURCE]
    return Violation(
        tag=_tag(signed[Column.TAG]),
        slot=slot,
        position=signed[Column.POSITION],
        token=signed[Column.TOKEN],
        expected_token=signed[Column.EXPECTED_TOKEN],
        chain_hash=unsigned[Column.CHAIN_HASH],
        aux=unsigned[Column.AUX],
        reasons=FailReason(unsigned[Column.REASON]),
        batch_row=signed[Column.BATCH_ROW],
        req_pool_idx=signed[Column.REQ_POOL_IDX],
        step=unsigned[Column.STEP],
        expected_position=signed[Column.EXPECTED_POSITION],
        real_kv_hash=unsigned[Column.REAL_KV_HASH],
        expected_real_kv_hash=unsigned[Column.EXPECTED_REAL_KV_HASH],
        first_bad_source=signed[Column.FIRST_BAD_SOURCE],
        shard=unsigned[Column.SHARD],
        writer=_writer(slot, records),
        source_name=source_names[source] if source_names is not None and 0 <= source < len(source_names) else None,
        num_slots=None if records is None else records.shape[0],
    )


def _tag(number: int) -> CanaryLaunchTag | int:
    return CanaryLaunchTag(number) if 0 <= number < NUM_LAUNCH_TAGS else number


def _writer(slot: int, records: np.ndarray | None) -> Provenance | None:
    if records is None or records.shape[1] < PROVENANCE_RECORD_WORDS or not 0 <= slot < records.shape[0]:
        return None
    words = [int(word) for word in records[slot, :PROVENANCE_RECORD_WORDS]]
    if not any(words):
        return None
    return Provenance(
        request_id=words[8] | words[9] << 32,
        step=words[10],
        flags=RecordFlag(words[11]),
        namespace=words[12] | words[13] << 32,
    )


def _counters(pairs: np.ndarray) -> dict[CanaryLaunchTag, int]:
    return {tag: int(pairs[tag, 0]) | int(pairs[tag, 1]) << 32 for tag in CanaryLaunchTag}
