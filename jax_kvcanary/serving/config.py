"""Shapes of a Llama model and the sizes and policies of the engine: frozen, hashable, checked when made."""

from __future__ import annotations

import dataclasses
from typing import Any

BAD_POLICIES = ("ignore", "drop", "recompute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shapes of a Llama model; the defaults are a tiny one for tests.

    ``num_heads`` query heads share ``num_kv_heads`` key and value heads of ``head_dim``. ``tie_embeddings``: the output matrix is
    the embedding.

    Raises:
      ValueError: a size below 1, an odd ``head_dim``, or query heads that do not divide among the KV heads.
    """

    vocab_size: int = 256
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            _at_least("LlamaConfig", name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"LlamaConfig.num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig.head_dim must be even, as RoPE turns pairs, got {self.head_dim}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of an :class:`Engine`.

    page_size: tokens a page. num_pages: pages of the pool, page 0 included, which takes dummy writes. max_batch: requests that run
    at once. max_context: tokens a request may reach, a multiple of page_size. chunk_size: tokens a step with prefill may process,
    all requests together. decode_steps: decode steps of one call. batch_buckets, token_buckets, page_buckets: the padded sizes that
    are compiled, ascending, each ending at its maximum (max_batch, chunk_size, max_context / page_size); empty means the maximum
    alone. host_pages: pages that host memory keeps of what the prefix cache evicts. release_capacity: freed pages announced in one
    batch. eos_token_ids: tokens that end a request. on_bad: what becomes of a request that the canary calls bad: "ignore", "drop" or
    "recompute"; after max_recomputes it is dropped. check_writes: the canary compares what each
    layer wrote with the pool. sweep_every: calls of step between two sweeps of cached pages, for a canary with a sweep_capacity; 0
    means none. engine_id: upper 32 bits of every request id. cache_dtype: of the pool.

    Raises:
      ValueError: a size out of range, buckets that do not end at their maximum, or an unknown policy.
    """

    page_size: int = 16
    num_pages: int = 128
    max_batch: int = 8
    max_context: int = 256
    chunk_size: int = 64
    decode_steps: int = 4
    batch_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    page_buckets: tuple[int, ...] = ()
    host_pages: int = 0
    release_capacity: int = 32
    prefix_caching: bool = True
    eos_token_ids: tuple[int, ...] = ()
    on_bad: str = "ignore"
    max_recomputes: int = 3
    check_writes: bool = False
    sweep_every: int = 1
    engine_id: int = 0
    cache_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch", "max_context", "decode_steps", "release_capacity"):
            _at_least("EngineConfig", name, getattr(self, name), 1)
        for name in ("host_pages", "max_recomputes", "sweep_every", "engine_id"):
            _at_least("EngineConfig", name, getattr(self, name), 0)
        _at_least("EngineConfig", "num_pages", self.num_pages, 2)
        if self.chunk_size <= self.max_batch:
            raise ValueError(f"EngineConfig.chunk_size must exceed max_batch={self.max_batch}, got {self.chunk_size}")
        if self.max_context % self.page_size:
            raise ValueError(f"EngineConfig.max_context must be a multiple of page_size={self.page_size}, got {self.max_context}")
        if self.on_bad not in BAD_POLICIES:
            raise ValueError(f"EngineConfig.on_bad must be one of {', '.join(BAD_POLICIES)}, got {self.on_bad!r}")
        if self.engine_id >= 2**32:
            raise ValueError(f"EngineConfig.engine_id must be below 2**32, got {self.engine_id}")
        for name, maximum in (("batch", self.max_batch), ("token", self.chunk_size), ("page", self.max_pages)):
            buckets = tuple(getattr(self, f"{name}_buckets")) or (maximum,)
            if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != maximum:
                raise ValueError(f"EngineConfig.{name}_buckets must ascend from at least 1 to {maximum}, got {buckets}")
            object.__setattr__(self, f"{name}_buckets", buckets)

    @property
    def max_pages(self) -> int:
        """Pages a request may hold."""
        return self.max_context // self.page_size

    @property
    def rows(self) -> int:
        """Rows of the token table: row 0 is padding."""
        return self.max_batch + 1


def _at_least(owner: str, name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{owner}.{name} must be an integer of at least {minimum}, got {value!r}")
