"""Slot tables: which slot holds position p of a request, for each of the four ways in which engines keep that."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_kvcanary.reference.integers import integers, item, signed
from jax_kvcanary.spec import INT32_MAX, PLAN_INVALID_SLOT, TableKind


class SlotTable:
    """A table of one of the four kinds, behind an optional index mapping.

    rows:     values ``[rows, width]``, slot = values[row, p].
    blocks:   values ``[rows, n]`` of block numbers, page_size slots a block; a negative block is a negative slot.
    flat:     values ``[n]``, batch row r owns ``starts[r] .. starts[r + 1]``; the request row decides padding only.
    identity: no values, slot = row * width + p % width: a ring of ``width`` slots a row.
    """

    def __init__(
        self,
        values: Any,
        *,
        table_kind: int = TableKind.ROWS,
        table_page_size: int = 1,
        table_starts: Any = None,
        table_rows: int = 0,
        table_width: int = 0,
        mapping: Any = None,
    ) -> None:
        self.kind = TableKind(int(table_kind))
        self.values = np.asarray(values)
        self.page_size = max(0, int(table_page_size))
        self.starts = integers(table_starts)
        self.mapping = None if mapping is None else integers(mapping)
        if self.kind == TableKind.FLAT:
            self.values = self.values.reshape(-1)
        elif self.kind == TableKind.IDENTITY:
            self.rows, self.width = max(0, int(table_rows)), max(0, int(table_width))
        else:
            if self.values.ndim != 2:
                raise ValueError(f"kv-canary: req_to_token must be 2-D, got shape {self.values.shape}")
            self.rows, self.width = self.values.shape
            if self.kind == TableKind.BLOCKS:
                self.width *= self.page_size

    def holds(self, batch_row: int, row: int, prefix: int) -> bool:
        """Whether the table has this row, and in it every position below ``prefix``."""
        if self.kind == TableKind.FLAT:
            start, end = item(self.starts, batch_row, -1), item(self.starts, batch_row + 1, -1)
            return start >= 0 and prefix <= min(end, self.values.size) - start
        if not 0 <= row < self.rows:
            return False
        return self.kind == TableKind.IDENTITY or prefix <= self.width  # a ring serves any length

    def oldest_checkable(self, prefix: int) -> int:
        """The first position whose own slot and predecessor's slot still hold what was written for them."""
        if self.kind == TableKind.IDENTITY and prefix > self.width:
            return prefix - self.width + 1
        return 0

    def slot(self, batch_row: int, row: int, position: int) -> int:
        """The slot of a position that the table holds, after the mapping."""
        if self.kind == TableKind.ROWS:
            slot = signed(int(self.values[row, position]))
        elif self.kind == TableKind.BLOCKS:
            block = signed(int(self.values[row, position // self.page_size]))
            in_reach = 0 <= block <= INT32_MAX  # anything else is no page and stays as it is
            slot = block * self.page_size + position % self.page_size if in_reach else block
        elif self.kind == TableKind.FLAT:
            slot = signed(int(self.values[self.starts[batch_row] + position]))
        elif self.width > 0:
            slot = signed(row * self.width + position % self.width)
        else:
            slot = PLAN_INVALID_SLOT
        if self.mapping is None or slot < 0:
            return slot
        return item(self.mapping, slot, PLAN_INVALID_SLOT)
