"""plan: from batch rows and lengths to the entries of a verify launch and the segments of a write launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jax_kvcanary.reference.integers import array_of, integers, is_pairs, require_length
from jax_kvcanary.reference.table import SlotTable
from jax_kvcanary.spec import FailReason, TableKind
from jax_kvcanary.state import Plan, VerifyPlan, WritePlan


class Entry(NamedTuple):
    """One slot to verify."""

    slot: int
    expected_token: int
    expected_position: int
    prev_slot: int
    batch_row: int


class Batch:
    """The rows of a step: what plan and the fused verify have in common."""

    def __init__(
        self,
        *,
        req_pool_indices: Any,
        prefix_lens: Any,
        table: SlotTable,
        swa_window_size: int,
        expected_tokens: Any,
        valid_lens: Any,
        position_offset: int,
        padding_req: int | None,
        position_stride: int = 1,
        step: int = 0,
    ) -> None:
        if table.mapping is None and swa_window_size > 0:
            raise ValueError("kv-canary: full_to_swa_index_mapping is required when swa_window_size > 0")
        if expected_tokens is not None and valid_lens is None:
            raise ValueError("kv-canary: req_to_verify_expected_tokens_valid_lens is required when req_to_verify_expected_tokens is set")
        self.rows = integers(req_pool_indices)
        self.prefix_lens = [max(0, length) for length in integers(prefix_lens)]
        require_length("prefix_lens", self.prefix_lens, len(self.rows))
        self.table = table
        self.swa_window_size = swa_window_size
        self.expected_tokens = None if expected_tokens is None else np.asarray(expected_tokens)  # [rows, context]
        self.valid_lens = integers(valid_lens)
        if self.expected_tokens is not None:
            require_length("req_to_verify_expected_tokens_valid_lens", self.valid_lens, len(self.rows))
        self.position_offset = position_offset
        self.padding_req = padding_req
        if position_stride < 1:
            raise ValueError(f"kv-canary: position_stride must be at least 1, got {position_stride}")
        self.position_stride, self.step = position_stride, step

    def is_padding(self, batch_row: int) -> bool:
        """Whether the row is a dummy that contributes nothing."""
        row = self.rows[batch_row]
        return row == -1 or (self.padding_req is not None and row == self.padding_req)

    def status(self, batch_row: int) -> int:
        """0, or TABLE_OUT_OF_RANGE for a row that the table does not have or a prefix that it cannot hold."""
        if self.is_padding(batch_row) or self.table.holds(batch_row, self.rows[batch_row], self.prefix_lens[batch_row]):
            return 0
        return int(FailReason.TABLE_OUT_OF_RANGE)

    def positions(self, batch_row: int) -> range:
        """The positions of the row that are verified."""
        if self.is_padding(batch_row) or self.status(batch_row):
            return range(0)
        prefix = self.prefix_lens[batch_row]
        window_start = max(0, prefix - self.swa_window_size) if self.swa_window_size > 0 else 0
        start = max(window_start, self.table.oldest_checkable(prefix))
        return range(start + (self.step - start) % self.position_stride, prefix, self.position_stride)

    def slot(self, batch_row: int, position: int) -> int:
        """The slot of a position of the row; -1 before the first one."""
        return -1 if position < 0 else self.table.slot(batch_row, self.rows[batch_row], position)

    def expected_token(self, batch_row: int, position: int) -> int:
        """The token that the position should hold, or -1 if that is not known."""
        if self.expected_tokens is None:
            return -1
        rows, context = self.expected_tokens.shape
        row, index = self.rows[batch_row], position + self.position_offset
        if 0 <= row < rows and 0 <= index < min(self.valid_lens[batch_row], context):
            return int(self.expected_tokens[row, index])
        return -1

    def entries(self, batch_row: int) -> Iterator[Entry]:
        """The verify entries of one row, by position; a window start keeps its true predecessor."""
        for position in self.positions(batch_row):
            yield Entry(
                slot=self.slot(batch_row, position),
                expected_token=self.expected_token(batch_row, position),
                expected_position=position,
                prev_slot=self.slot(batch_row, position - 1),
                batch_row=batch_row,
            )


def _is_wide(operand: Any) -> bool:
    array = np.asarray(operand)
    return array.dtype.itemsize == 8 or is_pairs(array)


def plan(
    *,
    req_pool_indices: Any,
    prefix_lens: Any,
    extend_seq_lens: Any,
    req_to_token: Any,
    verify_capacity: int,
    write_req_capacity: int,
    swa_window_size: int = 0,
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
) -> Plan:
    """Plan one step; see ``SlotTable`` for the ``table_*`` arguments of tables other than rows.

    Plan arrays are int64 if any input is, else int32. Entries past ``num_valid`` are zero here and unspecified elsewhere.
    """
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
    )
    bs = len(batch.rows)
    extend_lens = [max(0, length) for length in integers(extend_seq_lens)]
    require_length("extend_seq_lens", extend_lens, bs)
    if bs > write_req_capacity:
        raise ValueError(f"kv-canary: bs={bs} exceeds write_req_capacity={write_req_capacity}")
    inputs = [req_pool_indices, prefix_lens, extend_seq_lens, req_to_token, table_starts, full_to_swa_index_mapping]
    inputs += [req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens]
    dtype = np.int64 if any(_is_wide(operand) for operand in inputs if operand is not None) else np.int32
    largest = int(np.iinfo(dtype).max)

    # Verify entries: rows in order, cut at the capacity; the total decides whether they may be used at all.
    entries: list[Entry] = []
    total = 0
    for r in range(bs):
        total += len(batch.positions(r))
        for _, entry in zip(range(verify_capacity - len(entries)), batch.entries(r), strict=False):
            entries.append(entry)
    columns = [[entry[k] for entry in entries] + [0] * (verify_capacity - len(entries)) for k in range(len(Entry._fields))]

    # Write segments: an exclusive prefix sum, zero after entry bs.
    offsets = [0] * (write_req_capacity + 1)
    seeds = [-1] * write_req_capacity
    for r in range(bs):
        write_len = 0 if batch.is_padding(r) else extend_lens[r]
        offsets[r + 1] = min(offsets[r] + write_len, largest)
        if write_len > 0 and batch.status(r) == 0:
            seeds[r] = batch.slot(r, batch.prefix_lens[r] - 1)

    req_pool = np.asarray(req_pool_indices)
    return Plan(
        verify=VerifyPlan(
            slot_indices=array_of(columns[0], dtype),
            expected_tokens=array_of(columns[1], dtype),
            expected_positions=array_of(columns[2], dtype),
            prev_slot_indices=array_of(columns[3], dtype),
            batch_rows=array_of(columns[4], dtype),
            num_valid=np.array([min(total, verify_capacity)], np.int32),
            enable=np.array([int(total <= verify_capacity)], np.int32),
            row_status=np.array([batch.status(r) for r in range(bs)], np.int32),
            req_pool_indices=req_pool,
        ),
        write=WritePlan(
            write_offsets=array_of(offsets, dtype),
            write_seed_slot_indices=array_of(seeds, dtype),
            write_num_valid_reqs=np.array([bs], np.int32),
            req_pool_indices=req_pool,
        ),
    )
