"""How a request's positions lead to slots: token rows, block tables, flat runs, or arithmetic alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary import spec, validation


@dataclasses.dataclass(frozen=True)
class RowTable:
    """``slot = table[req_pool_idx, position]``. table: ``[rows, width]`` int32 or int64."""

    table: Any


@dataclasses.dataclass(frozen=True)
class BlockTable:
    """``slot = table[req_pool_idx, position // page_size] * page_size + position % page_size``, negative blocks unchanged.

    table: ``[rows, blocks]`` int32 or int64. page_size: static, slots a block.
    """

    table: Any
    page_size: int


@dataclasses.dataclass(frozen=True)
class FlatTable:
    """``slot = table[starts[batch row] + position]``. table: ``[n]``. starts: ``[batch rows + 1]``; both int32 or int64."""

    table: Any
    starts: Any


@dataclasses.dataclass(frozen=True)
class IdentityTable:
    """``slot = req_pool_idx * width + position % width``: contiguous caches, rings included. rows, width: static."""

    rows: int
    width: int


Table = RowTable | BlockTable | FlatTable | IdentityTable

jax.tree_util.register_dataclass(RowTable, data_fields=["table"], meta_fields=[])
jax.tree_util.register_dataclass(BlockTable, data_fields=["table"], meta_fields=["page_size"])
jax.tree_util.register_dataclass(FlatTable, data_fields=["table", "starts"], meta_fields=[])
jax.tree_util.register_dataclass(IdentityTable, data_fields=[], meta_fields=["rows", "width"])


@dataclasses.dataclass(frozen=True)
class ResolvedTable:
    """A table as a launch takes it: two operands and four static numbers."""

    table: jax.Array
    starts: jax.Array
    kind: spec.TableKind
    page_size: int
    rows: int
    width: int

    @property
    def params(self) -> dict[str, int]:
        return {
            "table_kind": int(self.kind),
            "table_page_size": self.page_size,
            "table_rows": self.rows,
            "table_width": self.width,
        }


def resolve_table(table: Any, *, bs: int) -> ResolvedTable:
    """Check ``req_to_token``, an array ``[rows, width]`` or one of the tables of this module."""
    none = jnp.zeros((0,), jnp.int32)
    if isinstance(table, BlockTable):
        page_size = validation.static_int("page_size", table.page_size, minimum=1, maximum=spec.INT32_MAX)
        blocks = validation.int_array("req_to_token", table.table, (None, None), pairs=False)
        width = validation.fits_int32("blocks x page_size", blocks.shape[1] * page_size)
        return ResolvedTable(blocks, none, spec.TableKind.BLOCKS, page_size, blocks.shape[0], width)
    if isinstance(table, FlatTable):
        flat = validation.int_array("req_to_token", table.table, (None,), pairs=False)
        starts = validation.int_array("req_to_token starts", table.starts, (bs + 1,), pairs=False)
        return ResolvedTable(flat, starts, spec.TableKind.FLAT, 1, bs, flat.shape[0])
    if isinstance(table, IdentityTable):
        rows = validation.static_capacity("rows", table.rows)
        width = validation.static_int("width", table.width, minimum=1, maximum=spec.INT32_MAX)
        validation.fits_int32("rows x width", rows * width)
        return ResolvedTable(none, none, spec.TableKind.IDENTITY, 1, rows, width)
    if isinstance(table, RowTable):
        table = table.table
    rows_array = validation.int_array("req_to_token", table, (None, None), pairs=False)
    return ResolvedTable(rows_array, none, spec.TableKind.ROWS, 1, rows_array.shape[0], rows_array.shape[1])
