"""plan in plain JAX, and what it shares with the fused verify: the rows of a batch and the enumeration of their entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import count_not_above, doubling, exclusive, iota, put_window, take, take64
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import INT32_MAX, PLAN_INVALID_SLOT, FailReason, TableKind

_INT64_MAX = 2**63 - 1
_CHUNK = 4096


class Entries(NamedTuple):
    """Verify entries ``[n]``: 64-bit values (converted, or as they came) and the batch row int32 (-1: unknown)."""

    slot: Any
    expected_token: Any
    expected_position: Any
    prev_slot: Any
    batch_row: jax.Array


class Batch:
    """The rows of a step; operands and params as the primitives take them."""

    # position_stride, step: of a fused verify, which visits the positions p with p % position_stride == step % position_stride.
    def __init__(
        self,
        *,
        req_pool_indices: jax.Array,
        prefix_lens: jax.Array,
        table: jax.Array,
        table_starts: jax.Array,
        mapping: jax.Array,
        expected_tokens: jax.Array,
        valid_lens: jax.Array,
        swa_window_size: int,
        kv_token_id_vs_position_offset: int,
        has_padding_req: bool,
        padding_req: int,
        table_kind: int,
        table_page_size: int,
        table_rows: int,
        table_width: int,
        has_mapping: bool,
        has_expected: bool,
        position_stride: int = 1,
        step: jax.Array | None = None,
    ) -> None:
        self.kind = TableKind(table_kind)
        self.table = table
        self.page_size = table_page_size
        self.mapping = mapping if has_mapping else None
        self.expected_tokens = expected_tokens if has_expected else None
        self.position_offset = kv_token_id_vs_position_offset
        self.size = bs = req_pool_indices.shape[0]
        index = words.from_operand(req_pool_indices)
        prefix = words.at_least_zero(words.from_operand(prefix_lens))
        self.padding = words.equals(index, -1)
        if has_padding_req:
            self.padding = self.padding | words.equals(index, padding_req)

        if self.kind == TableKind.FLAT:
            starts = words.from_operand(table_starts)
            start, end = U64(*(w[:bs] for w in starts)), U64(*(w[1 : bs + 1] for w in starts))
            size = words.const(table.shape[0], (bs,))
            end = words.select(words.less(size, end), size, end)
            length = words.sub(end, start)
            held = ~words.is_negative(start) & ~words.less(end, start) & ~words.less(length, prefix)
            self.width = table.shape[0]
            self.row = jnp.where(held, words.as_int32(start.lo), np.int32(0))
        else:
            rows = table_rows if self.kind == TableKind.IDENTITY else table.shape[0]
            self.width = table_width if self.kind == TableKind.IDENTITY else table.shape[1]
            if self.kind == TableKind.BLOCKS:
                self.width *= self.page_size
            held = words.below(index, rows)
            if self.kind != TableKind.IDENTITY:
                held = held & ~words.less(words.const(self.width, (bs,)), prefix)
            self.row = jnp.where(held, words.as_int32(index.lo), np.int32(0))
        self.status = jnp.where(held | self.padding, np.int32(0), np.int32(FailReason.TABLE_OUT_OF_RANGE))  # [bs]
        live = held & ~self.padding
        self.prefix = words.select(live, prefix, words.zeros((bs,)))

        start = words.zeros((bs,))
        if swa_window_size > 0:
            start = words.at_least_zero(words.sub(self.prefix, words.const(swa_window_size, (bs,))))
        if self.kind == TableKind.IDENTITY:
            # A ring: the oldest position that is still there has lost its predecessor.
            oldest = words.at_least_zero(words.sub(self.prefix, words.const(self.width - 1, (bs,))))
            longer = words.less(words.const(self.width, (bs,)), self.prefix)
            start = words.select(longer & words.less(start, oldest), oldest, start)
            start = words.select(words.less(self.prefix, start), self.prefix, start)  # a width of 0
        self.stride = position_stride
        self.count = words.sub(self.prefix, start)
        if position_stride > 1:
            # Only the positions that are congruent to the step.
            assert step is not None
            phase, mine = lax.rem(step, np.uint32(position_stride)), words.divmod_const(start, position_stride)[1]
            skipped = jnp.where(phase >= mine, phase - mine, phase + np.uint32(position_stride) - mine)
            left = words.sub(self.count, words.from_uint32(skipped))
            rounded = words.add(words.at_least_zero(left), words.const(position_stride - 1, (bs,)))
            self.count = words.divmod_const(rounded, position_stride)[0]
            start = words.add(start, words.from_uint32(skipped))
        self.start = start
        self.start_in_ring = jnp.zeros((bs,), jnp.uint32)
        if self.kind == TableKind.IDENTITY and self.width > 0:
            self.start_in_ring = words.divmod_const(start, self.width)[1]
        # Rows of the expected tokens and how many of each are valid.
        self.token_row, self.token_count = jnp.zeros((bs,), jnp.int32), jnp.zeros((bs,), jnp.int32)
        if self.expected_tokens is not None:
            rows, context = self.expected_tokens.shape
            known = words.below(index, rows)
            self.token_row = jnp.where(known, words.as_int32(index.lo), np.int32(0))
            valid = words.clamp_int32(words.from_operand(valid_lens), context)
            self.token_count = jnp.where(known, valid, np.int32(0))

    def totals(self) -> U64:
        """Entries up to and including each row, ``[bs]``."""
        return _prefix_sums(self.count, _INT64_MAX)

    def entries(self, totals: U64, first: U64, n: int) -> Entries:
        """Entries ``first .. first + n - 1`` of the batch; those past its end hold anything."""
        bs = self.size
        begins = words.sub(totals, self.count)
        ends = words.at_least_zero(words.sub(totals, U64(*(jnp.broadcast_to(w, (bs,)) for w in first))))
        row = jnp.minimum(count_not_above(words.clamp_int32(ends), iota(n)), np.int32(bs - 1))
        # How far into its row the first entry would be; may be negative, and wraps back.
        skipped = words.sub(U64(*(jnp.broadcast_to(w, (bs,)) for w in first)), begins)
        within = words.add(take64(skipped, row), words.from_int32(iota(n)))
        if self.stride > 1:
            within = words.mul_const(within, self.stride)
        position = words.add(take64(self.start, row), within)
        ring = None
        if self.kind == TableKind.IDENTITY and self.width > 0:
            ring = self._wrap(take(self.start_in_ring, row) + within.lo)
        slot = self.slot(row, position, ring)
        before = words.sub(position, words.const(1, (n,)))
        if ring is not None:
            ring = jnp.where(ring == np.uint32(0), np.uint32(self.width - 1), ring - np.uint32(1))
        prev = self.slot(row, before, ring)
        return Entries(
            slot=slot,
            expected_token=self.token(row, position),
            expected_position=position,
            prev_slot=words.select(words.is_negative(before), words.const(-1, (n,)), prev),
            batch_row=row,
        )

    def _wrap(self, x: jax.Array) -> jax.Array:
        return jnp.where(x >= np.uint32(self.width), x - np.uint32(self.width), x)

    def slot(self, row: jax.Array, position: U64, ring: jax.Array | None) -> U64:
        """Slots of positions that the rows hold (of others: anything), after the mapping. ring: the position modulo the width."""
        base = take(self.row, row)
        if self.kind == TableKind.IDENTITY:
            if ring is None:
                return words.const(PLAN_INVALID_SLOT, row.shape)
            slot = words.add(words.mul_const(words.from_int32(base), self.width), words.from_uint32(ring))
        elif self.kind == TableKind.BLOCKS:
            if self.width > 2**32:
                block, within = words.divmod_const(position, self.page_size)
            else:
                page = lax.div(position.lo, lax.full_like(position.lo, self.page_size))
                block, within = words.from_uint32(page), position.lo - page * np.uint32(self.page_size)
            column = words.clamp_int32(block, max(self.table.shape[1] - 1, 0))
            number = words.from_operand(take(self.table, base, column))
            slot = words.add(words.mul_const(number, self.page_size), words.from_uint32(within))
            slot = words.select(words.below(number, INT32_MAX + 1), slot, number)  # what is no page number stays as it is
        elif self.kind == TableKind.FLAT:
            at = words.add(words.from_int32(base), position)
            slot = words.from_operand(take(self.table, words.clamp_int32(at, max(self.width - 1, 0))))
        else:
            slot = words.from_operand(take(self.table, base, words.clamp_int32(position, max(self.width - 1, 0))))
        if self.mapping is None:
            return slot
        size = self.mapping.shape[0]
        mapped = words.from_operand(take(self.mapping, words.clamp_int32(slot, max(size - 1, 0))))
        mapped = words.select(words.below(slot, size), mapped, words.const(PLAN_INVALID_SLOT, row.shape))
        return words.select(words.is_negative(slot), slot, mapped)

    def token(self, row: jax.Array, position: U64) -> U64:
        """Expected tokens, -1 where there is none."""
        none = words.const(-1, row.shape)
        if self.expected_tokens is None or self.expected_tokens.size == 0:
            return none
        column = words.add(position, words.const(self.position_offset, row.shape))
        limit = take(self.token_count, row)
        valid = (column.hi == np.uint32(0)) & (column.lo < words.as_uint32(limit))
        at = jnp.where(valid, words.as_int32(column.lo), np.int32(0))
        return words.select(valid, words.from_operand(take(self.expected_tokens, take(self.token_row, row), at)), none)

    def last_slot(self) -> U64:
        """The slot of each row's last written position, -1 if there is none, ``[bs]``."""
        row, none = iota(self.size), words.const(-1, (self.size,))
        last = words.sub(self.prefix, words.const(1, (self.size,)))
        ring = None
        if self.kind == TableKind.IDENTITY and self.width > 0:
            ring = words.divmod_const(last, self.width)[1]
        return words.select(words.is_negative(last), none, self.slot(row, last, ring))


def _prefix_sums(a: U64, top: int) -> U64:
    """Inclusive prefix sums of values in ``[0, 2**63)``, each at most ``top``."""
    if a.shape[0] == 0:
        return a
    first = words.saturating_add(a, words.zeros(a.shape), top)
    return doubling(lambda x, y: words.saturating_add(x, y, top), 0, first)


def plan(
    req_pool_indices: jax.Array,
    prefix_lens: jax.Array,
    extend_seq_lens: jax.Array,
    table: jax.Array,
    table_starts: jax.Array,
    mapping: jax.Array,
    expected_tokens: jax.Array,
    valid_lens: jax.Array,
    *,
    verify_capacity: int,
    write_req_capacity: int,
    extended_checks: bool,
    wide: bool,
    **table_params: Any,
) -> list[jax.Array]:
    """The plan primitive: entries of a verify launch and segments of a write launch."""
    del extended_checks
    dtype = jnp.int64 if wide else jnp.int32
    batch = Batch(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        table=table,
        table_starts=table_starts,
        mapping=mapping,
        expected_tokens=expected_tokens,
        valid_lens=valid_lens,
        **table_params,
    )
    bs = batch.size

    written = words.at_least_zero(words.from_operand(extend_seq_lens))
    written = words.select(batch.padding, words.zeros((bs,)), written)
    ends = words.to_operand(_prefix_sums(written, _INT64_MAX if wide else INT32_MAX), dtype)
    write_offsets = jnp.concatenate([exclusive(ends), jnp.zeros((write_req_capacity - bs,), dtype)])
    continues = words.not_equal(written, words.zeros((bs,))) & (batch.status == np.int32(0))
    seeds = words.saturated(words.select(continues, batch.last_slot(), words.const(-1, (bs,))), dtype)
    seeds = jnp.concatenate([seeds, jnp.full((write_req_capacity - bs,), -1, dtype)])

    out = [jnp.zeros((verify_capacity,), dtype)] * 5
    num_valid, enable = jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.int32)
    if bs > 0:
        totals = batch.totals()
        total = U64(totals.lo[-1:], totals.hi[-1:])
        num_valid = words.clamp_int32(total, verify_capacity)
        enable = lax.convert_element_type(words.below(total, verify_capacity + 1), jnp.int32)
        if verify_capacity > 0:
            out = _fill(batch, totals, num_valid[0] * enable[0], out, dtype)
    num_requests = jnp.full((1,), bs, jnp.int32)
    scratch = jnp.zeros((bs + 1, 2), jnp.uint32)
    return [*out, num_valid, enable, write_offsets, seeds, num_requests, batch.status, scratch]


def _fill(batch: Batch, totals: U64, n: jax.Array, out: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """The first ``n`` entries, a chunk at a time."""
    capacity = out[0].shape[0]
    chunk = min(capacity, _CHUNK)

    def body(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        first, out = carry
        start = jnp.minimum(first, np.int32(capacity - chunk))
        entries = batch.entries(totals, words.from_int32(start), chunk)
        columns = [words.saturated(value, dtype) for value in entries[:4]]
        columns.append(lax.convert_element_type(entries.batch_row, dtype))
        # Never past n, which is at most 2**31 - 1.
        return first + jnp.minimum(np.int32(chunk), n - first), [put_window(x, y, start) for x, y in zip(out, columns, strict=True)]

    return lax.while_loop(lambda carry: carry[0] < n, body, (np.int32(0), out))[1]
