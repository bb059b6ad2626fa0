"""The violation log inside a launch: rows are appended in order behind a condition, counters add modulo 2**64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import count, cumsum, iota, put
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import INT32_MAX, RING_COLUMNS

Columns = Sequence[U64]
"""The sixteen columns of rows, each ``[n]`` or a scalar."""


class Log(NamedTuple):
    """Ring uint32 ``[rows, 32]`` and write index int32 ``[1]``, which counts on past the ring up to 2**31 - 1."""

    ring: jax.Array
    write_index: jax.Array


def started(log: Log) -> Log:
    """A negative write index counts as 0."""
    return Log(log.ring, jnp.maximum(log.write_index, np.int32(0)))


def append(log: Log, flags: jax.Array, columns: Callable[[jax.Array], Columns]) -> Log:
    """Append one row for each true element of ``flags [n]``, in order.

    columns: from the numbers ``[m]`` of flagged elements to their columns; traced under the condition that there is a row to store.
    """
    n = flags.shape[0]
    if n == 0:
        return log

    def numbers(room: int) -> jax.Array:
        target = jnp.where(flags, cumsum(lax.convert_element_type(flags, jnp.int32)) - np.int32(1), np.int32(n) + iota(n))
        return put(jnp.zeros((room,), jnp.int32), target, iota(n))

    return append_numbered(log, count(flags), n, numbers, columns)


def append_numbered(
    log: Log, total: jax.Array, at_most: int, numbers: Callable[[int], jax.Array], columns: Callable[[jax.Array], Columns]
) -> Log:
    """Append ``total`` rows, at most ``at_most``; ``numbers(m)`` names the first ``m`` of them, in order."""
    room = min(at_most, log.ring.shape[0])
    index = log.write_index[0]
    new_index = jnp.minimum(words.as_uint32(index) + words.as_uint32(total), np.uint32(INT32_MAX))
    ring = log.ring
    if room > 0:

        def store(ring: jax.Array) -> jax.Array:
            rows = _rows(columns(numbers(room)), room)
            place = jnp.minimum(words.as_uint32(index), np.uint32(ring.shape[0])) + words.as_uint32(iota(room))
            stored = iota(room) < total
            # Places past the ring stay different from each other: a scatter may rely on that.
            return put(ring, words.as_int32(jnp.where(stored, place, np.uint32(ring.shape[0]) + place)), rows)

        wanted = (total > np.int32(0)) & (index < np.int32(ring.shape[0]))
        ring = lax.cond(wanted, store, lambda ring: ring, ring)
    return Log(ring, words.as_int32(new_index)[None])


def _rows(columns: Columns, n: int) -> jax.Array:
    """Columns as ring rows uint32 ``[n, 32]``."""
    assert len(columns) == RING_COLUMNS
    return jnp.stack([jnp.broadcast_to(word, (n,)) for column in columns for word in column], axis=1)


def add_to_counter(counter: jax.Array, tag: int, amount: U64) -> jax.Array:
    """``counter[tag] += amount`` modulo 2**64; counter: uint32 ``[12, 2]``."""
    total = words.add(U64(counter[tag, 0], counter[tag, 1]), amount)
    return lax.dynamic_update_slice(counter, jnp.stack([total.lo, total.hi])[None], (np.int32(tag), np.int32(0)))
