"""The violation log inside a launch: rows are appended in order behind a condition, counters add modulo 2**64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import count, cumsum, iota, put, take, take_rows
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import INT32_MAX, RING_COLUMNS


class Log(NamedTuple):
    """Ring uint32 ``[rows, 32]`` and write index int32 ``[1]``, which counts on past the ring up to 2**31 - 1."""

    ring: jax.Array
    write_index: jax.Array


def started(log: Log) -> Log:
    """A negative write index counts as 0."""
    return Log(log.ring, jnp.maximum(log.write_index, np.int32(0)))


def append(log: Log, flags: jax.Array, rows: Callable[[jax.Array], jax.Array]) -> Log:
    """Append one row for each true element of ``flags [n]``, in order.

    rows: from the numbers ``[m]`` of flagged elements to their rows ``[32, m]``; traced where there is a row to store.
    """
    n = flags.shape[0]
    if n == 0:
        return log

    def first_rows(room: int) -> jax.Array:
        target = jnp.where(flags, cumsum(lax.convert_element_type(flags, jnp.int32)) - np.int32(1), np.int32(n) + iota(n))
        return rows(put(jnp.zeros((room,), jnp.int32), target, iota(n)))

    return append_rows(log, count(flags), n, first_rows)


def append_rows(log: Log, total: jax.Array, at_most: int, rows: Callable[[int], jax.Array]) -> Log:
    """Append ``total`` rows, at most ``at_most``; ``rows(m)`` makes the first ``m`` of them, uint32 ``[32, m]``."""
    room = min(at_most, log.ring.shape[0])
    index = log.write_index[0]
    saturated = words.as_int32(jnp.minimum(words.as_uint32(index) + words.as_uint32(total), np.uint32(INT32_MAX)))
    new_index = jnp.where(index < np.int32(0), index, saturated)  # negative: a launch that does not run
    ring = log.ring
    if room > 0:

        def store(ring: jax.Array) -> jax.Array:
            place = jnp.minimum(words.as_uint32(index), np.uint32(ring.shape[0])) + words.as_uint32(iota(room))
            stored = iota(room) < total
            # Places past the ring stay different from each other: a scatter may rely on that.
            place = words.as_int32(jnp.where(stored, place, np.uint32(ring.shape[0]) + place))
            return put(ring, place, lax.transpose(rows(room), (1, 0)))

        wanted = (total > np.int32(0)) & (index >= np.int32(0)) & (index < np.int32(ring.shape[0]))
        ring = lax.cond(wanted, store, lambda ring: ring, ring)
    return Log(ring, new_index[None])


class Facts:
    """Named 64-bit values of ``m`` rows to report, from which the columns of each kind of row are picked in one gather."""

    def __init__(self, m: int, context: jax.Array, launch_tag: int) -> None:
        self._m = m
        self._names: list[str] = []
        self._parts: list[jax.Array] = []
        self.add_scalars(
            tag=words.const(launch_tag),
            step=words.from_uint32(context[0]),
            shard=words.from_uint32(context[1]),
            zero=words.zeros(()),
            none=words.const(-1),
        )

    def add(self, names: str, values: jax.Array) -> None:
        """Words ``[2 * names, m]`` of as many values, named in a row."""
        assert values.shape == (2 * len(names.split()), self._m)
        self._names += names.split()
        self._parts.append(values)

    def add_scalars(self, **values: U64) -> None:
        """Values that are the same for all rows."""
        stacked = jnp.stack([word for value in values.values() for word in value])
        self.add(" ".join(values), lax.broadcast_in_dim(stacked, (stacked.shape[0], self._m), (0,)))

    def rows(self, kinds: Sequence[str], kind: jax.Array) -> jax.Array:
        """Ring rows ``[32, m]``: row j has the sixteen columns that ``kinds[kind[j]]`` names."""
        columns = [names.split() for names in kinds]
        assert all(len(names) == RING_COLUMNS for names in columns)
        pick = np.array([[2 * self._names.index(name) + half for name in names for half in (0, 1)] for names in columns], np.int32)
        facts = jnp.concatenate(self._parts)
        source = take_rows(jnp.asarray(pick), kind, pick.shape[1])  # [32, m]
        return take(facts, source, lax.broadcast_in_dim(iota(self._m), source.shape, (1,)))


def matrix(*values: U64) -> jax.Array:
    """Words of values ``[n]``, uint32 ``[2 * values, n]``."""
    return jnp.stack([word for value in values for word in value])


def add_to_counter(counter: jax.Array, tag: int, amount: U64) -> jax.Array:
    """``counter[tag] += amount`` modulo 2**64; counter: uint32 ``[12, 2]``."""
    total = words.add(U64(counter[tag, 0], counter[tag, 1]), amount)
    return lax.dynamic_update_slice(counter, jnp.stack([total.lo, total.hi])[None], (np.int32(tag), np.int32(0)))
