"""Integers of every operand as exact Python integers, and back into NumPy arrays of a fixed width.

Operands are int32 or int64, or uint32 pairs ``[n, 2]`` (low word first) where a 64-bit value is needed without 64-bit arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MASK32: Final = 2**32 - 1
MASK64: Final = 2**64 - 1


def signed(value: int, bits: int = 64) -> int:
    """``value`` modulo 2**bits, read as two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def unsigned(value: int) -> int:
    """``value`` modulo 2**64, without a sign."""
    return value & MASK64


def is_pairs(array: NDArray[Any]) -> bool:
    """Whether ``array`` is the uint32 ``[n, 2]`` form of 64-bit integers."""
    return array.dtype == np.uint32 and array.ndim == 2 and array.shape[1] == 2


def integers(operand: Any) -> list[int]:
    """The values of a one-dimensional operand as signed 64-bit Python integers; None is an empty one."""
    if operand is None:
        return []
    array = np.asarray(operand)
    if is_pairs(array):
        return [signed(int(low) | int(high) << 32) for low, high in array.tolist()]
    values: list[int] = array.reshape(-1).tolist()
    return values if array.dtype.kind == "i" else [signed(int(value)) for value in values]


def scalar(operand: Any, default: int = 0) -> int:
    """The value of a one-element operand, or ``default`` if it is None or empty."""
    values = integers(operand)
    return values[0] if values else default


def item(values: Sequence[int], index: int, default: int) -> int:
    """``values[index]``, or ``default`` outside of ``[0, len(values))``."""
    return values[index] if 0 <= index < len(values) else default


def clamp(value: int, low: int, high: int) -> int:
    """``value`` moved into ``[low, high]``."""
    return max(low, min(value, high))


def array_of(values: Iterable[int], dtype: Any) -> NDArray[Any]:
    """A one-dimensional array of int32 or int64; a value beyond it saturates, so that what was out of range stays so."""
    limits = np.iinfo(dtype)
    return np.array([clamp(value, int(limits.min), int(limits.max)) for value in values], dtype=dtype)


def words_of(values: Iterable[int]) -> list[int]:
    """64-bit values as uint32 words, low word first."""
    return [word for value in values for word in (value & MASK32, (value >> 32) & MASK32)]


def require_length(name: str, values: Sequence[Any], length: int) -> None:
    """Raise ValueError unless ``values`` has ``length`` elements."""
    if len(values) != length:
        raise ValueError(f"kv-canary: {name} length must be {length}, got {len(values)}")
