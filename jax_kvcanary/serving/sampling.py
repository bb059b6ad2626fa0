"""How the next token is drawn: greedy, temperature, top-k and top-p, with a key that depends on the seed and the position alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    temperature: 0 is greedy. top_k: 0 means all tokens. top_p: smallest set of tokens whose probability reaches it. seed: 32 bits.

    Raises:
      ValueError: a value out of range.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"SamplingParams.max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"SamplingParams.temperature must not be negative, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"SamplingParams.top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"SamplingParams.seed must lie in [0, 2**32), got {self.seed}")


def sample(
    logits: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, seeds: jax.Array, positions: jax.Array
) -> jax.Array:
    """One token a row; the same seed and position give the same token in whatever batch.

    Args:
      logits: float32 ``[bs, vocab]``.
      temperature, top_p: float32 ``[bs]``. top_k: int32 ``[bs]``. seeds: uint32 ``[bs]``.
      positions: int32 ``[bs]``, the position that the token will have.

    Returns:
      int32 ``[bs]``.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
        noisy = _keep_likely(scaled, top_k, top_p) + gumbel_noise(seeds, positions, logits.shape[-1])
        return jnp.where(temperature > 0, jnp.argmax(noisy, axis=-1).astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def gumbel_noise(seeds: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise ``[bs, vocab]`` from a counter: a hash of seed, position and token, which compiles in no time."""
    keys = _mix(_mix(seeds) ^ positions.astype(jnp.uint32))
    bits = _mix(keys[:, None] + jnp.arange(vocab, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-24)
    return -jnp.log(-jnp.log(uniform))


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 on uint32: every bit of the input moves every bit of the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _keep_likely(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits ``[bs, vocab]`` with everything outside top-k and top-p at minus infinity."""
    vocab = logits.shape[-1]
    ascending = jnp.sort(logits, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    kth = jnp.take_along_axis(ascending, (vocab - k)[:, None], axis=-1)
    mass = jnp.where(ascending >= kth, jnp.exp(ascending - ascending[:, -1:]), 0)
    upto = jnp.cumsum(mass, axis=-1)  # of a token and all less likely ones
    outside = jnp.sum(upto <= (1 - top_p[:, None]) * upto[:, -1:], axis=-1, keepdims=True)  # too unlikely for top-p
    threshold = jnp.take_along_axis(ascending, jnp.minimum(outside, vocab - 1), axis=-1)
    return jnp.where(logits >= jnp.maximum(kth, threshold), logits, -jnp.inf)
