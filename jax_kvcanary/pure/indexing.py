"""Gathers, slices and searches whose indices the caller has checked: JAX clamps and wraps silently, so nothing here relies on that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import words
from jax_kvcanary.pure.target import current
from jax_kvcanary.pure.words import U64

_IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
_DROP = lax.GatherScatterMode.FILL_OR_DROP


def iota(n: int) -> jax.Array:
    """``0 .. n - 1`` int32."""
    return lax.iota(jnp.int32, n)


def take(x: jax.Array, *index: jax.Array) -> jax.Array:
    """``x[index]``, one element each; every index in range (zeros where ``x`` is empty)."""
    if x.size == 0:
        return jnp.zeros(index[0].shape, x.dtype)
    axes = tuple(range(x.ndim))
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=axes, start_index_map=axes)
    return lax.gather(x, jnp.stack(index, axis=-1), numbers, (1,) * x.ndim, mode=_IN_BOUNDS)


def take64(x: U64, index: jax.Array) -> U64:
    return U64(take(x.lo, index), take(x.hi, index))


def take_rows(x: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """Columns ``0 .. count - 1`` of rows of ``x [n, >= count]``, ``[count, rows]``; every row in range (zeros where ``x`` is empty)."""
    if x.shape[0] == 0:
        return jnp.zeros((count, *rows.shape), x.dtype)
    numbers = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, rows[:, None], numbers, (1, count), mode=_IN_BOUNDS)


def take_columns(x: jax.Array, columns: jax.Array) -> jax.Array:
    """``x[:, columns]``, every column in range."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,))
    return lax.gather(x, columns[:, None], numbers, (x.shape[0], 1), mode=_IN_BOUNDS)


def row(x: jax.Array, k: int) -> jax.Array:
    """``x[k]``."""
    return lax.index_in_dim(x, k, 0, keepdims=False)


def row64(x: jax.Array, k: int) -> U64:
    """The ``k``-th 64-bit value of words ``[words, n]``."""
    return U64(row(x, 2 * k), row(x, 2 * k + 1))


def put(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """``x`` with ``x[index] = values`` along axis 0; rows out of range are dropped, the others differ from each other."""
    window = tuple(range(1, x.ndim))
    numbers = lax.ScatterDimensionNumbers(update_window_dims=window, inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    if x.shape[0] == 0 or values.size == 0:
        return x
    return lax.scatter(x, index[:, None], values, numbers, unique_indices=True, mode=_DROP)


def put_max(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """``x[index] = max(x[index], values)``, dropping indices out of range."""
    return _combine(lax.scatter_max, x, index, values)


def put_min(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    return _combine(lax.scatter_min, x, index, values)


def put_add(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    return _combine(lax.scatter_add, x, index, values)


def _combine(scatter: Any, x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    return x if x.shape[0] == 0 else scatter(x, index[:, None], values, numbers, mode=_DROP)


def window(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """``x[start : start + size]`` along axis 0; the window lies inside."""
    return lax.dynamic_slice_in_dim(x, start, size, axis=0)


def put_window(x: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, values, start, axis=0)


def count_not_above(sorted_values: jax.Array, x: jax.Array) -> jax.Array:
    """How many of ``sorted_values [n]`` are <= each of ``x``, int32 (binary search)."""
    return search(sorted_values.shape[0], x.shape, lambda middle: take(sorted_values, middle) <= x)


def search(n: int, shape: tuple[int, ...], goes_right: Any) -> jax.Array:
    """The first place in ``[0, n]`` for which ``goes_right(place)`` does not hold, where it holds for a prefix of the places."""
    low, high = jnp.zeros(shape, jnp.int32), jnp.full(shape, np.int32(n))

    def step(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + lax.shift_right_logical(high - low, jnp.full(shape, np.int32(1)))
        inside = low < high
        right = inside & goes_right(jnp.minimum(middle, np.int32(max(n - 1, 0))))
        return jnp.where(right, middle + np.int32(1), low), jnp.where(inside & ~right, middle, high)

    if n == 0:
        return low
    return words.repeat(n.bit_length(), step, (low, high))[0]


def exclusive(inclusive: jax.Array) -> jax.Array:
    """Exclusive prefix sums ``[..., n + 1]`` (the last is the total) from inclusive ones ``[..., n]``."""
    return jnp.concatenate([jnp.zeros((*inclusive.shape[:-1], 1), inclusive.dtype), inclusive], axis=-1)


def cumsum(x: jax.Array) -> jax.Array:
    """Inclusive prefix sums of int32 along the last axis."""
    return doubling(jnp.add, 0, x) if current().wide else lax.cumsum(x, axis=x.ndim - 1)


def cummax(x: jax.Array) -> jax.Array:
    """Inclusive prefix maxima of int32 along the last axis."""
    return doubling(jnp.maximum, -(2**31), x) if current().wide else lax.cummax(x, axis=x.ndim - 1)


def doubling(combine: Any, identity: int, x: Any) -> Any:
    """Inclusive prefixes along the last axis of an array, or of several as a pytree, in one small loop."""
    leaves = jax.tree.leaves(x)
    n = leaves[0].shape[-1]

    def step(k: jax.Array, x: Any) -> Any:
        shift = lax.shift_left(np.int32(1), k)

        def before(y: jax.Array) -> jax.Array:
            padded = jnp.concatenate([jnp.full(y.shape, np.array(identity).astype(y.dtype)), y], axis=-1)
            return lax.dynamic_slice_in_dim(padded, np.int32(n) - shift, n, axis=y.ndim - 1)

        return combine(x, jax.tree.map(before, x))

    return words.repeat(max(n - 1, 0).bit_length(), step, x)


def count(mask: jax.Array) -> jax.Array:
    """Number of true elements, int32."""
    return jnp.sum(lax.convert_element_type(mask, jnp.int32), dtype=jnp.int32)
