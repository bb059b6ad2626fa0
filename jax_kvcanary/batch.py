"""One forward step as the canary sees it, in the field's terms, and the slots of positions in each kind of table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary import spec, validation
from jax_kvcanary.state import Array, pytree_dataclass
from jax_kvcanary.tables import ResolvedTable, Table


@pytree_dataclass
class CanaryBatch:
    """One step, padded as the engine pads it. Integer arrays are int32, or int64 with x64; fields that are None are not used.

    req_pool_indices: ``[bs]`` row of each request in the table; the padding row and -1 are no requests.
    prefix_lens: ``[bs]`` tokens that are in the pool already. extend_seq_lens: ``[bs]`` tokens that this step writes.
    req_to_token: array ``[rows, width]``, or a RowTable, BlockTable, FlatTable or IdentityTable. Entries past a request's length
      are never looked at.
    input_ids: ``[tokens]`` of all requests one after the other, padded at the end.
    positions: ``[tokens]``; None: they follow the prefix.
    out_cache_loc: ``[tokens]`` slots that the step writes, -1 for none; None: those of the table.
    request_ids: ``[bs]`` the engine's own, never used again; uint32 ``[bs, 2]`` for 64 bits without x64.
    namespaces: ``[bs]`` or ``[bs, 2]``: adapter, weights version, tenant; requests of different ones never share a chain.
    full_to_swa_index_mapping: ``[slots]`` of the full pool, for pools that have a window.
    expected_tokens: ``[rows, context]`` int32 tokens of every request, and expected_valid_lens ``[bs]`` how many of them are known.
    expected_input_tokens, expected_input_positions: ``[tokens]`` what the scheduler believes this step writes.
    released_slots: ``[n]`` slots given back since the last step, -1 for padding; optional news.
    copy_src, copy_dst: ``[n]`` slots (pages with ``copy_page_size`` of the canary) whose KV was copied since the last step.
    armed: bool ``[]``; False: a warm-up or dummy step, nothing is stamped or checked. None is True.
    """

    req_pool_indices: Array
    prefix_lens: Array
    extend_seq_lens: Array
    req_to_token: Array | Table
    input_ids: Array
    positions: Array | None = None
    out_cache_loc: Array | None = None
    request_ids: Array | None = None
    namespaces: Array | None = None
    full_to_swa_index_mapping: Array | None = None
    expected_tokens: Array | None = None
    expected_valid_lens: Array | None = None
    expected_input_tokens: Array | None = None
    expected_input_positions: Array | None = None
    released_slots: Array | None = None
    copy_src: Array | None = None
    copy_dst: Array | None = None
    armed: Array | None = None


def slots_at(
    table: ResolvedTable, *, req_pool_indices: jax.Array, batch_rows: jax.Array, positions: jax.Array, missing: int = -1
) -> jax.Array:
    """Slots of positions, int32: ``missing`` where the table has none, -2 for slots past int32.

    Args:
      table: of :func:`resolve_table`.
      req_pool_indices, batch_rows, positions: ``[n]`` row in the table, row in the batch, position; out of range is missing.

    Example:
      >>> from jax_kvcanary.tables import resolve_table
      >>> table = resolve_table(jnp.array([[0, 0], [5, 6]], jnp.int32), bs=1)
      >>> one = jnp.array([1, 1, 9])
      >>> slots_at(table, req_pool_indices=one, batch_rows=one, positions=jnp.array([0, 1, 0])).tolist()
      [5, 6, -1]
    """
    rows, at = req_pool_indices, positions
    known = (rows >= 0) & (rows < table.rows) & (at >= 0)
    if table.kind == spec.TableKind.IDENTITY:
        found = rows * table.width + at % max(1, table.width)
        known &= table.width > 0
    elif table.kind == spec.TableKind.FLAT:
        bs = table.starts.shape[0] - 1
        known = (batch_rows >= 0) & (batch_rows < bs) & (at >= 0)
        first = _element(table.starts, jnp.where(known, batch_rows, bs))
        known &= (first >= 0) & (at < _element(table.starts, jnp.where(known, batch_rows + 1, bs)) - first)
        found = _element(table.table, jnp.where(known, first + at, -1))
    else:
        known &= at < table.width
        column = at // table.page_size
        width = table.table.shape[1]
        found = _element(table.table.reshape(-1), jnp.where(known, rows * width + column, -1))
        if table.kind == spec.TableKind.BLOCKS:
            too_large = found > spec.INT32_MAX // table.page_size
            found = jnp.where(too_large, -2, jnp.where(found < 0, found, found * table.page_size + at % table.page_size))
    found = jnp.where(found > spec.INT32_MAX, -2, found)
    return jnp.where(known, found, missing).astype(jnp.int32)


def _element(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[index]``, -1 out of range, negative indices too."""
    if x.shape[0] == 0:
        return jnp.full(index.shape, -1, x.dtype)
    return x.at[jnp.where(index < 0, x.shape[0], index)].get(mode="fill", fill_value=-1)


def token_places(write_offsets: jax.Array, *, bs: int, tokens: int, prefix_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Batch row and position of every input token, int32 ``[tokens]``; -1 and -1 past the last one.

    Args:
      write_offsets: ``[bs + 1]`` of a write plan.

    Example:
      >>> rows, positions = token_places(jnp.array([0, 2, 3]), bs=2, tokens=4, prefix_lens=jnp.array([5, 0]))
      >>> rows.tolist(), positions.tolist()
      ([0, 0, 1, -1], [5, 6, 0, -1])
    """
    if bs == 0:
        return jnp.full((tokens,), -1, jnp.int32), jnp.full((tokens,), -1, jnp.int32)
    index = jnp.arange(tokens, dtype=write_offsets.dtype)
    row = jnp.sum(index[:, None] >= write_offsets[None, 1 : bs + 1], axis=1, dtype=jnp.int32)
    known = row < bs
    safe = jnp.minimum(row, bs - 1)
    position = jnp.maximum(prefix_lens, 0)[safe] + index - write_offsets[safe]
    return jnp.where(known, row, -1), jnp.where(known, position, -1).astype(jnp.int32)


def optional_pairs(value: Any) -> Any:
    """uint32 ``[n, 2]`` of an integer operand ``[n]`` or ``[n, 2]``, None stays."""
    if value is None:
        return None
    given = validation.int_array("batch", value, (None,), pairs=True)
    if given.dtype == jnp.uint32:
        return given
    low = given.astype(jnp.uint32)
    high = jnp.where(given < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0)) if given.dtype == jnp.int32 else (given >> 32).astype(jnp.uint32)
    return jnp.stack([low, high], axis=-1)
