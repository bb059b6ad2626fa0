"""scatter_req_token_ids in plain JAX: one request after the other, blocks of columns of its row at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import iota, window
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import FailReason

_BLOCK = 1024
"""Columns copied at a time."""


def scatter(flat_in: jax.Array, offsets: jax.Array, req_pool_indices: jax.Array, pool: jax.Array) -> list[jax.Array]:
    """The scatter primitive: pool int32 ``[rows, width]`` and a status ``[bs]``."""
    total, bs = flat_in.shape[0], req_pool_indices.shape[0]
    rows, width = pool.shape
    row, bounds = words.from_operand(req_pool_indices), words.from_operand(offsets)
    begin, end = U64(*(w[:bs] for w in bounds)), U64(*(w[1 : bs + 1] for w in bounds))
    padding = words.equals(row, -1)
    good = words.below(row, rows) & words.below(begin, total + 1) & words.below(end, total + 1) & ~words.less(end, begin) & ~padding
    status = jnp.where(good | padding, np.int32(0), np.int32(FailReason.TABLE_OUT_OF_RANGE))
    if bs == 0 or rows == 0 or width == 0 or total == 0:
        return [pool, status]

    block = min(width, _BLOCK)
    values = words.to_operand(words.from_operand(flat_in), jnp.int32)
    values = jnp.concatenate([values, jnp.zeros((block,), jnp.int32)])  # so that a block may start anywhere
    target = jnp.where(good, words.as_int32(row.lo), np.int32(0))
    first = jnp.where(good, words.as_int32(begin.lo), np.int32(0))
    length = jnp.where(good, jnp.minimum(words.as_int32(end.lo - begin.lo), np.int32(width)), np.int32(0))

    def one_request(r: jax.Array, pool: jax.Array) -> jax.Array:
        def one_block(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            done, pool = carry
            column = jnp.minimum(done, np.int32(width - block))
            new = window(values, first[r] + column, block)
            old = lax.dynamic_slice(pool, (target[r], column), (1, block))
            row = jnp.where(column + iota(block) < length[r], new, old[0])
            return done + np.int32(block), lax.dynamic_update_slice(pool, row[None], (target[r], column))

        return lax.while_loop(lambda carry: carry[0] < length[r], one_block, (np.int32(0), pool))[1]

    return [words.repeat(bs, one_request, pool), status]
