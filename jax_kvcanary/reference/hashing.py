"""The hash: splitmix64's finaliser, the chain step mix3, and the fold of bytes; one value at a time and over arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_kvcanary.reference.integers import MASK64
from jax_kvcanary.spec import CHAIN_ANCHOR, SPLITMIX_MULTIPLIERS, SPLITMIX_SHIFTS


def splitmix64(x: int) -> int:
    """``S(x)`` of one integer; any sign or size counts modulo 2**64."""
    x &= MASK64
    x ^= x >> SPLITMIX_SHIFTS[0]
    x = x * SPLITMIX_MULTIPLIERS[0] & MASK64
    x ^= x >> SPLITMIX_SHIFTS[1]
    x = x * SPLITMIX_MULTIPLIERS[1] & MASK64
    return x ^ x >> SPLITMIX_SHIFTS[2]


def mix3(a: int, b: int, c: int) -> int:
    """``S(S(S(a) ^ b) ^ c)``; the chain hash of a record is ``mix3(prev_hash, token, position)``."""
    return splitmix64(splitmix64(splitmix64(a) ^ (b & MASK64)) ^ (c & MASK64))


def head_hash(namespace: int) -> int:
    """What the first record of a chain stores as its predecessor's hash."""
    return splitmix64(CHAIN_ANCHOR ^ (namespace & MASK64))


def splitmix64_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``S`` of every element of a one-dimensional uint64 array."""
    x = x ^ (x >> np.uint64(SPLITMIX_SHIFTS[0]))
    x = x * np.uint64(SPLITMIX_MULTIPLIERS[0])
    x = x ^ (x >> np.uint64(SPLITMIX_SHIFTS[1]))
    x = x * np.uint64(SPLITMIX_MULTIPLIERS[1])
    return x ^ (x >> np.uint64(SPLITMIX_SHIFTS[2]))


def fold_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The fold of every row of ``rows [n, bytes] uint8``, as ``[n] uint64``.

    A row is padded with zeros to whole 8-byte little-endian words; ``acc = S(acc ^ word)`` over them, from 0.
    """
    count, size = rows.shape
    padded = np.zeros((count, -(-size // 8) * 8), np.uint8)
    padded[:, :size] = rows
    words = padded.view("<u8").astype(np.uint64, copy=False)  # [n, words]
    acc = np.zeros(count, np.uint64)
    for word in range(words.shape[1]):
        acc = splitmix64_array(acc ^ words[:, word])
    return acc


def fold_bytes(data: Any) -> int:
    """The fold of one string of bytes (bytes, or an array of uint8)."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        data = np.frombuffer(data, np.uint8)
    return int(fold_rows(np.asarray(data, np.uint8).reshape(1, -1))[0])
