"""64-bit integers as pairs of uint32 arrays: the same bits with x64 off and on, on every platform.

Only lax operations on arrays of one dtype, so nothing depends on the promotion rules that the caller has configured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.spec import INT32_MAX

_MASK32 = 0xFFFFFFFF
_T = TypeVar("_T")


def repeat(times: int | jax.Array, body: Callable[[jax.Array, _T], _T], init: _T) -> _T:
    """``body(i, carry)`` for each ``i`` int32 in ``[0, times)``; the counter is int32 whatever the width of integers is."""
    step = lambda carry: (carry[0] + np.int32(1), body(*carry))  # noqa: E731
    return lax.while_loop(lambda carry: carry[0] < times, step, (np.int32(0), init))[1]


class U64(NamedTuple):
    """64-bit values, low and high words of one shape; signed where a function says so."""

    lo: Any
    hi: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lo.shape


def const(value: int, shape: tuple[int, ...] = ()) -> U64:
    """``value`` modulo 2**64."""
    return U64(jnp.full(shape, np.uint32(value & _MASK32)), jnp.full(shape, np.uint32((value >> 32) & _MASK32)))


def zeros(shape: tuple[int, ...]) -> U64:
    return const(0, shape)


def from_int32(x: jax.Array) -> U64:
    """Sign-extended int32."""
    hi = lax.shift_right_arithmetic(x, lax.full_like(x, 31))
    return U64(lax.bitcast_convert_type(x, jnp.uint32), lax.bitcast_convert_type(hi, jnp.uint32))


def from_uint32(x: jax.Array) -> U64:
    return U64(x, lax.full_like(x, 0))


def from_operand(x: jax.Array | U64) -> U64:
    """Values of an integer operand: int32, int64, or uint32 ``[..., 2]`` pairs; what has been converted stays as it is."""
    if isinstance(x, U64):
        return x
    if x.dtype == jnp.uint32:
        return U64(lax.index_in_dim(x, 0, x.ndim - 1, keepdims=False), lax.index_in_dim(x, 1, x.ndim - 1, keepdims=False))
    if x.dtype == jnp.int64:
        hi = lax.shift_right_arithmetic(x, lax.full_like(x, 32))
        return U64(lax.convert_element_type(x, jnp.uint32), lax.convert_element_type(hi, jnp.uint32))
    return from_int32(lax.convert_element_type(x, jnp.int32))


def to_operand(x: U64, dtype: Any) -> jax.Array:
    """As int32 (wraps) or int64."""
    if dtype == jnp.int64:
        hi = lax.convert_element_type(lax.bitcast_convert_type(x.hi, jnp.int32), jnp.int64)
        return lax.bitwise_or(lax.shift_left(hi, lax.full_like(hi, 32)), lax.convert_element_type(x.lo, jnp.int64))
    return lax.bitcast_convert_type(x.lo, jnp.int32)


def saturated(x: U64, dtype: Any) -> jax.Array:
    """As int32, or int64, the nearest value of that type: what is out of range stays so."""
    if dtype == jnp.int64:
        return to_operand(x, dtype)
    low = as_int32(x.lo)
    fits = as_int32(x.hi) == lax.shift_right_arithmetic(low, lax.full_like(low, 31))
    return jnp.where(fits, low, jnp.where(is_negative(x), np.int32(-INT32_MAX - 1), np.int32(INT32_MAX)))


def as_int32(x: jax.Array) -> jax.Array:
    """The bits of uint32 words as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def as_uint32(x: jax.Array) -> jax.Array:
    """The bits of int32 words as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def xor(a: U64, b: U64) -> U64:
    return U64(a.lo ^ b.lo, a.hi ^ b.hi)


def add(a: U64, b: U64) -> U64:
    lo = a.lo + b.lo
    return U64(lo, a.hi + b.hi + lax.convert_element_type(lo < a.lo, jnp.uint32))


def sub(a: U64, b: U64) -> U64:
    return U64(a.lo - b.lo, a.hi - b.hi - lax.convert_element_type(a.lo < b.lo, jnp.uint32))


def shift_left_one(a: U64) -> U64:
    return U64(a.lo << np.uint32(1), (a.hi << np.uint32(1)) | (a.lo >> np.uint32(31)))


def equal(a: U64, b: U64) -> jax.Array:
    return (a.lo == b.lo) & (a.hi == b.hi)


def not_equal(a: U64, b: U64) -> jax.Array:
    return (a.lo != b.lo) | (a.hi != b.hi)


def equals(a: U64, value: int) -> jax.Array:
    return (a.lo == np.uint32(value & _MASK32)) & (a.hi == np.uint32((value >> 32) & _MASK32))


def less_unsigned(a: U64, b: U64) -> jax.Array:
    return (a.hi < b.hi) | ((a.hi == b.hi) & (a.lo < b.lo))


def less(a: U64, b: U64) -> jax.Array:
    """Signed comparison."""
    return (as_int32(a.hi) < as_int32(b.hi)) | ((a.hi == b.hi) & (a.lo < b.lo))


def is_negative(a: U64) -> jax.Array:
    return as_int32(a.hi) < np.int32(0)


def below(a: U64, limit: int) -> jax.Array:
    """``0 <= a < limit`` for a limit of at most 2**32."""
    if limit > _MASK32:
        return a.hi == np.uint32(0)
    return (a.hi == np.uint32(0)) & (a.lo < np.uint32(max(limit, 0)))


def select(mask: jax.Array, a: U64, b: U64) -> U64:
    return U64(jnp.where(mask, a.lo, b.lo), jnp.where(mask, a.hi, b.hi))


def at_least_zero(a: U64) -> U64:
    negative = is_negative(a)
    return U64(jnp.where(negative, np.uint32(0), a.lo), jnp.where(negative, np.uint32(0), a.hi))


def clamp_int32(a: U64, high: int = INT32_MAX) -> jax.Array:
    """``clamp(a, 0, high)`` as int32; ``a`` is signed, ``high`` an int32."""
    fits = below(a, high + 1)
    return jnp.where(is_negative(a), np.int32(0), jnp.where(fits, as_int32(a.lo), np.int32(high)))


def saturating_add(a: U64, b: U64, top: int) -> U64:
    """``min(a + b, top)`` of two values in ``[0, 2**63)``."""
    total, limit = add(a, b), const(top)
    return select(less_unsigned(limit, total), U64(*(jnp.broadcast_to(w, total.shape) for w in limit)), total)


def mul_const(a: U64, value: int) -> U64:
    """``a * value`` modulo 2**64."""
    c_lo, c_hi = value & _MASK32, (value >> 32) & _MASK32
    c0, c1 = np.uint32(c_lo & 0xFFFF), np.uint32(c_lo >> 16)
    low, sixteen = np.uint32(0xFFFF), np.uint32(16)
    a0, a1 = a.lo & low, a.lo >> sixteen
    # 16-bit schoolbook product for the high word of lo * c_lo: no step overflows 32 bits.
    mid = a0 * c1 + ((a0 * c0) >> sixteen)
    mid2 = a1 * c0 + (mid & low)
    hi = a1 * c1 + (mid >> sixteen) + (mid2 >> sixteen)
    return U64(a.lo * np.uint32(c_lo), hi + a.lo * np.uint32(c_hi) + a.hi * np.uint32(c_lo))


def divmod_const(a: U64, divisor: int) -> tuple[U64, jax.Array]:
    """Quotient and (uint32) remainder of an unsigned value by ``0 < divisor < 2**31``, bit by bit: for a few values only."""
    if not 0 < divisor <= INT32_MAX:
        raise ValueError(f"kv-canary: divisor must be in (0, 2**31), got {divisor}")

    def bit(_: Any, carry: tuple[U64, U64, jax.Array]) -> tuple[U64, U64, jax.Array]:
        rest, quotient, remainder = carry
        remainder = (remainder << np.uint32(1)) | (rest.hi >> np.uint32(31))
        fits = remainder >= np.uint32(divisor)
        quotient = shift_left_one(quotient)
        quotient = U64(quotient.lo | lax.convert_element_type(fits, jnp.uint32), quotient.hi)
        return shift_left_one(rest), quotient, jnp.where(fits, remainder - np.uint32(divisor), remainder)

    zero = lax.full_like(a.lo, 0)
    _, quotient, remainder = repeat(64, bit, (a, U64(zero, zero), zero))
    return quotient, remainder


def xor_shift_right(a: U64, by: int) -> U64:
    """``a ^ (a >> by)`` for ``0 < by < 32``."""
    down, up = np.uint32(by), np.uint32(32 - by)
    return U64(a.lo ^ ((a.lo >> down) | (a.hi << up)), a.hi ^ (a.hi >> down))
