"""verify and verify_fused: compare records with the chain, the expected tokens and positions, and the bytes of the pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_kvcanary.reference.hashing import head_hash
from jax_kvcanary.reference.integers import clamp, integers, item, require_length, scalar
from jax_kvcanary.reference.log import LogWriter, context_word
from jax_kvcanary.reference.plan import Batch, Entry
from jax_kvcanary.reference.record import as_records, is_blank, is_unwritten, read_record
from jax_kvcanary.reference.source import SlotHash, SourceReader, as_source_tags
from jax_kvcanary.reference.table import SlotTable
from jax_kvcanary.spec import INT32_MAX, FailReason, RealKvHashMode, TableKind, Verdict
from jax_kvcanary.state import Plan, VerifyPlan, VerifyResult, ViolationLog


class _Verdicts:
    """The verdict of each batch row while a launch runs."""

    def __init__(self, bs: int) -> None:
        self.verdict = [int(Verdict.NOT_CHECKED)] * bs
        self.first_bad_position = [-1] * bs
        self.unattested = [0] * bs
        self.first_unattested_position = [-1] * bs

    def knows(self, batch_row: int) -> bool:
        return 0 <= batch_row < len(self.verdict)

    def checked(self, batch_row: int) -> None:
        if self.knows(batch_row):
            self.verdict[batch_row] = max(self.verdict[batch_row], int(Verdict.OK))

    def bad(self, batch_row: int, expected_position: int | None = None) -> None:
        if not self.knows(batch_row):
            return
        self.verdict[batch_row] = int(Verdict.BAD)
        if expected_position is not None:
            position, first = clamp(expected_position, 0, INT32_MAX), self.first_bad_position[batch_row]
            self.first_bad_position[batch_row] = position if first < 0 else min(first, position)

    def left_out(self, batch_row: int, expected_position: int) -> None:
        """An entry whose slot nobody wrote."""
        if self.knows(batch_row):
            self.unattested[batch_row] += 1
            position, first = clamp(expected_position, 0, INT32_MAX), self.first_unattested_position[batch_row]
            self.first_unattested_position[batch_row] = position if first < 0 else min(first, position)

    def arrays(self) -> dict[str, np.ndarray]:
        names = ("verdict", "first_bad_position", "unattested", "first_unattested_position")
        return {name: np.array(getattr(self, name), np.int32) for name in names}


class _Verifier:
    """One verify launch."""

    def __init__(
        self,
        *,
        records: Any,
        log: ViolationLog,
        launch_tag: int,
        real_kv_hash_mode: int,
        real_kv_sources: Sequence[Any],
        real_kv_buffers: Sequence[Any],
        source_tags: Any,
        source_window: Any,
        check_verify_expected_token: bool,
        namespaces: Any,
        step: Any,
        shard: Any,
        padding_slot: int | None,
        extended_checks: bool,
        strict: bool,
    ) -> None:
        self.records = as_records(records)
        self.log = LogWriter(log, launch_tag=launch_tag, step=context_word(step), shard=context_word(shard))
        self.reader = SourceReader(real_kv_sources, real_kv_buffers, real_kv_hash_mode)
        self.source_tags = as_source_tags(source_tags, self.records.shape[0], len(self.reader))
        self.window = self._window(source_window)
        if self.reader.mode == RealKvHashMode.NONE:  # no source is read: nothing to compare tags with
            self.source_tags = self.window = None
        self.slots = self.reader.slots(self.records.shape[0])
        self.check_token = check_verify_expected_token
        self.namespaces = integers(namespaces)
        self.padding_slot = padding_slot
        self.extended = extended_checks
        self.tolerant = extended_checks and not strict

    def _window(self, source_window: Any) -> list[int] | None:
        """The sources of a rotated check in rising order, or None for a check of all of them by the combined hash."""
        if source_window is None:
            return None
        if self.source_tags is None:
            raise ValueError("kv-canary: source_window requires source_tags")
        total = len(self.reader)
        start, count = integers(source_window)
        count = clamp(count, 0, total)
        if count == total:
            return None
        return sorted((start + j) % total for j in range(count))

    def is_padding(self, slot: int) -> bool:
        return self.padding_slot is not None and slot == self.padding_slot

    def in_range(self, slot: int) -> bool:
        return 0 <= slot < self.slots

    def expected_chain_hash(self, prev_slot: int, namespace: int) -> tuple[int | None, int]:
        """What the slot's record should store (None: the predecessor cannot be reached), and the reason bits of ``prev_slot`` itself."""
        if prev_slot < 0:
            return head_hash(namespace), int(FailReason.SLOT_OUT_OF_RANGE) if prev_slot < -1 else 0
        if self.is_padding(prev_slot):
            return None, 0
        if prev_slot >= self.slots:
            return None, int(FailReason.SLOT_OUT_OF_RANGE)
        if self.tolerant and is_blank(self.records, prev_slot):
            return None, 0
        return read_record(self.records, prev_slot).chain_hash, 0

    def real_kv(self, slot: int, stored: int, now: SlotHash) -> tuple[bool, int, int, int]:
        """Whether the slot's bytes changed, the stored and the present hash to report, and the first bad source."""
        tags = now.tags if self.source_tags is None else self.source_tags[slot].tolist()
        differing = [k for k, tag in enumerate(now.tags) if tag != tags[k]]
        if self.window is None:
            bad = stored != now.combined
            return bad, stored, now.combined, differing[0] if bad and differing else -1
        rotated = [k for k in self.window if k in differing]
        if not rotated:
            return False, 0, 0, -1
        return True, tags[rotated[0]], now.tags[rotated[0]], rotated[0]

    def entry(self, entry: Entry, hashes: dict[int, SlotHash], req_pool_indices: Sequence[int], verdicts: _Verdicts) -> None:
        """Check one slot and report at most one row."""
        slot = entry.slot
        if self.is_padding(slot):
            return
        batch_row = entry.batch_row if verdicts.knows(entry.batch_row) else -1
        who = {"batch_row": batch_row, "req_pool_idx": item(req_pool_indices, batch_row, -1)}
        expected = {
            "expected_token": entry.expected_token if self.check_token else -1,
            "expected_position": entry.expected_position,
        }
        if not self.in_range(slot):
            if self.extended:
                self.log.row(slot=slot, reason=FailReason.SLOT_OUT_OF_RANGE, **expected, **who)
                verdicts.bad(batch_row, entry.expected_position)
            return
        if self.tolerant and is_unwritten(self.records, slot):
            verdicts.left_out(batch_row, entry.expected_position)
            return
        verdicts.checked(batch_row)

        record = read_record(self.records, slot)
        chain_hash, extended_bits = self.expected_chain_hash(entry.prev_slot, item(self.namespaces, batch_row, 0))
        if is_unwritten(self.records, slot):
            extended_bits |= FailReason.UNWRITTEN
        real_kv_bad, real_kv_hash, expected_real_kv_hash, first_bad_source = self.real_kv(slot, record.real_kv_hash, hashes[slot])

        bits = int(extended_bits) if self.extended else 0
        if chain_hash is not None and record.prev_hash != chain_hash:
            bits |= FailReason.VERIFY_CHAIN_HASH
        if record.position != entry.expected_position:
            bits |= FailReason.VERIFY_POSITION
        if real_kv_bad:
            bits |= FailReason.VERIFY_REAL_KV_HASH
        if self.check_token and entry.expected_token != -1 and record.token != entry.expected_token:
            bits |= FailReason.VERIFY_TOKEN
        if bits == 0:
            return
        self.log.row(
            slot=slot,
            reason=bits,
            position=record.position,
            token=record.token,
            chain_hash=record.prev_hash,
            aux=record.prev_hash if chain_hash is None else chain_hash,
            real_kv_hash=real_kv_hash,
            expected_real_kv_hash=expected_real_kv_hash,
            first_bad_source=first_bad_source,
            **expected,
            **who,
        )
        verdicts.bad(batch_row, entry.expected_position)

    def run(self, entries: Iterable[Entry], row_status: Sequence[int], req_pool_indices: Sequence[int], *, enable: bool) -> VerifyResult:
        """Check all entries; ``row_status`` names the rows for which the plan could make none."""
        verdicts = _Verdicts(len(row_status))
        self.log.count_launch()
        if enable:
            entries = list(entries)
            self.log.start()
            self.log.count_slots(len(entries))
            hashes = self.reader.hashes(e.slot for e in entries if self.in_range(e.slot) and not self.is_padding(e.slot))
            for batch_row, status in enumerate(row_status):
                if status != 0 and self.extended:
                    self.log.row(
                        slot=-1,
                        reason=FailReason.TABLE_OUT_OF_RANGE,
                        batch_row=batch_row,
                        req_pool_idx=item(req_pool_indices, batch_row, -1),
                    )
                    verdicts.bad(batch_row)
            for entry in entries:
                self.entry(entry, hashes, req_pool_indices, verdicts)
        return VerifyResult(log=self.log.result(), real_kv_buffers=(), **verdicts.arrays())


def _plan_entries(plan: VerifyPlan) -> list[Entry]:
    """The live entries of a plan: the first ``clamp(num_valid, 0, capacity)``."""
    slots = integers(plan.slot_indices)
    columns = {
        "expected_tokens": integers(plan.expected_tokens),
        "expected_positions": integers(plan.expected_positions),
        "prev_slot_indices": integers(plan.prev_slot_indices),
        "batch_rows": integers(plan.batch_rows) or [-1] * len(slots),
    }
    for name, values in columns.items():
        require_length(name, values, len(slots))
    live = clamp(scalar(plan.num_valid), 0, len(slots))
    return [Entry(*values) for values in list(zip(slots, *columns.values(), strict=True))[:live]]


def verify(
    *,
    records: Any,
    log: ViolationLog,
    plan: VerifyPlan | Plan,
    launch_tag: int,
    real_kv_hash_mode: int = RealKvHashMode.NONE,
    real_kv_sources: Sequence[Any] = (),
    real_kv_buffers: Sequence[Any] = (),
    source_tags: Any = None,
    source_window: Any = None,
    check_verify_expected_token: bool = False,
    namespaces: Any = None,
    step: Any = 0,
    shard: Any = 0,
    padding_slot: int | None = 0,
    extended_checks: bool = True,
    strict: bool = True,
    pass_through: bool = False,
) -> VerifyResult:
    """Check the entries of a plan against ``records``; only the returned log is new."""
    verifier = _Verifier(
        records=records,
        log=log,
        launch_tag=launch_tag,
        real_kv_hash_mode=real_kv_hash_mode,
        real_kv_sources=real_kv_sources,
        real_kv_buffers=real_kv_buffers,
        source_tags=source_tags,
        source_window=source_window,
        check_verify_expected_token=check_verify_expected_token,
        namespaces=namespaces,
        step=step,
        shard=shard,
        padding_slot=padding_slot,
        extended_checks=extended_checks,
        strict=strict,
    )
    checks = plan.verify if isinstance(plan, Plan) else plan
    result = verifier.run(
        _plan_entries(checks),
        integers(checks.row_status),
        integers(checks.req_pool_indices),
        enable=scalar(checks.enable, 1) != 0,
    )
    return _with_buffers(result, real_kv_buffers, pass_through)


def verify_fused(
    *,
    records: Any,
    log: ViolationLog,
    req_pool_indices: Any,
    prefix_lens: Any,
    req_to_token: Any,
    launch_tag: int,
    swa_window_size: int = 0,
    position_stride: int = 1,
    full_to_swa_index_mapping: Any = None,
    req_to_verify_expected_tokens: Any = None,
    req_to_verify_expected_tokens_valid_lens: Any = None,
    kv_token_id_vs_position_offset: int = 0,
    padding_req: int | None = 0,
    table_kind: int = TableKind.ROWS,
    table_page_size: int = 1,
    table_starts: Any = None,
    table_rows: int = 0,
    table_width: int = 0,
    real_kv_hash_mode: int = RealKvHashMode.NONE,
    real_kv_sources: Sequence[Any] = (),
    real_kv_buffers: Sequence[Any] = (),
    source_tags: Any = None,
    source_window: Any = None,
    check_verify_expected_token: bool = False,
    namespaces: Any = None,
    step: Any = 0,
    shard: Any = 0,
    padding_slot: int | None = 0,
    extended_checks: bool = True,
    strict: bool = True,
    pass_through: bool = False,
) -> VerifyResult:
    """What plan with unlimited capacity followed by verify reports, straight from tables and lengths.

    Slots stay 64-bit on the way: nothing saturates at the width of a plan array.
    """
    verifier = _Verifier(
        records=records,
        log=log,
        launch_tag=launch_tag,
        real_kv_hash_mode=real_kv_hash_mode,
        real_kv_sources=real_kv_sources,
        real_kv_buffers=real_kv_buffers,
        source_tags=source_tags,
        source_window=source_window,
        check_verify_expected_token=check_verify_expected_token,
        namespaces=namespaces,
        step=step,
        shard=shard,
        padding_slot=padding_slot,
        extended_checks=extended_checks,
        strict=strict,
    )
    batch = Batch(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        table=SlotTable(
            req_to_token,
            table_kind=table_kind,
            table_page_size=table_page_size,
            table_starts=table_starts,
            table_rows=table_rows,
            table_width=table_width,
            mapping=full_to_swa_index_mapping,
        ),
        swa_window_size=swa_window_size,
        expected_tokens=req_to_verify_expected_tokens,
        valid_lens=req_to_verify_expected_tokens_valid_lens,
        position_offset=kv_token_id_vs_position_offset,
        padding_req=padding_req,
        position_stride=position_stride,
        step=context_word(step),
    )
    bs = len(batch.rows)
    result = verifier.run(
        [entry for r in range(bs) for entry in batch.entries(r)],
        [batch.status(r) for r in range(bs)],
        batch.rows,
        enable=True,
    )
    return _with_buffers(result, real_kv_buffers, pass_through)


def _with_buffers(result: VerifyResult, buffers: Sequence[Any], pass_through: bool) -> VerifyResult:
    return dataclasses.replace(result, real_kv_buffers=tuple(buffers) if pass_through else ())
