"""The hash, on uint64 arrays where the target has them and on pairs of uint32 elsewhere: S, the chain step, and moves between the two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import words
from jax_kvcanary.pure.target import current
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import CHAIN_ANCHOR, SPLITMIX_MULTIPLIERS, SPLITMIX_SHIFTS

Hash = Any
"""64-bit values to hash with: a uint64 array or a :class:`U64`; fit for loop carries, slices and scatters leaf by leaf."""


def pack(x: U64) -> Hash:
    if not current().wide:
        return x
    hi = lax.convert_element_type(x.hi, jnp.uint64)
    return (hi << np.uint64(32)) | lax.convert_element_type(x.lo, jnp.uint64)


def unpack(x: Hash) -> U64:
    if isinstance(x, U64):
        return x
    return U64(lax.convert_element_type(x, jnp.uint32), lax.convert_element_type(x >> np.uint64(32), jnp.uint32))


def zeros(shape: tuple[int, ...]) -> Hash:
    return pack(words.zeros(shape))


def xor(a: Hash, b: Hash) -> Hash:
    return words.xor(a, b) if isinstance(a, U64) else a ^ b


def select(mask: jax.Array, a: Hash, b: Hash) -> Hash:
    return jax.tree.map(lambda x, y: jnp.where(mask, x, y), a, b)


def splitmix64(x: Hash) -> Hash:
    """``S(x)``."""
    if isinstance(x, U64):
        return _splitmix64_words(x)
    first, second, last = (np.uint64(by) for by in SPLITMIX_SHIFTS)
    x = (x ^ (x >> first)) * np.uint64(SPLITMIX_MULTIPLIERS[0])
    x = (x ^ (x >> second)) * np.uint64(SPLITMIX_MULTIPLIERS[1])
    return x ^ (x >> last)


@jax.jit
def _splitmix64_words(x: U64) -> U64:
    x = words.mul_const(words.xor_shift_right(x, SPLITMIX_SHIFTS[0]), SPLITMIX_MULTIPLIERS[0])
    x = words.mul_const(words.xor_shift_right(x, SPLITMIX_SHIFTS[1]), SPLITMIX_MULTIPLIERS[1])
    return words.xor_shift_right(x, SPLITMIX_SHIFTS[2])


def fold_word(acc: Hash, word: Hash) -> Hash:
    """One step of a fold: ``S(acc ^ word)``."""
    return splitmix64(xor(acc, word))


def mix3(a: Hash, b: Hash, c: Hash) -> Hash:
    """The chain step ``S(S(S(a) ^ b) ^ c)``."""
    return fold_word(fold_word(splitmix64(a), b), c)


def chain_hash(prev_hash: U64, token: U64, position: U64) -> U64:
    """What the record after this one stores as its ``prev_hash``."""
    return unpack(mix3(pack(prev_hash), pack(token), pack(position)))


def head_hash(namespace: U64) -> U64:
    """What the first record of a chain stores: ``S(ANCHOR ^ namespace)``."""
    anchor = words.const(CHAIN_ANCHOR)
    return unpack(splitmix64(pack(U64(namespace.lo ^ anchor.lo, namespace.hi ^ anchor.hi))))
