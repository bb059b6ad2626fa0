"""Llama on a paged pool: one forward pass for prefill chunks, decode and mixed batches, and a dense one without a pool to compare with.

The pool is a tuple of one array a layer, ``[pages, page_size, 2 * kv_heads, head_dim]``, K and V interleaved on the head axis. Tokens
lie flat, ``[tokens]``, those of one request side by side; only attention spreads them to ``[bs, max_extend]``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary.serving.config import EngineConfig, LlamaConfig

Pool = tuple[jax.Array, ...]
Params = dict[str, Any]


def pool_shapes(config: LlamaConfig, engine_config: EngineConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each layer of the pool."""
    shape = (engine_config.num_pages, engine_config.page_size, 2 * config.num_kv_heads, config.head_dim)
    return (jax.ShapeDtypeStruct(shape, jnp.dtype(engine_config.cache_dtype)),) * config.num_layers


def make_pool(config: LlamaConfig, engine_config: EngineConfig) -> Pool:
    """An empty pool."""
    return tuple(jnp.zeros(layer.shape, layer.dtype) for layer in pool_shapes(config, engine_config))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x: ``[..., hidden]``."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_tables(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine ``[tokens, head_dim / 2]`` of each position."""
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn neighbouring pairs ``(2i, 2i + 1)`` of x ``[tokens, heads, head_dim]``, the order in which GGUF stores q and k."""
    cos, sin = (table[:, None, :] for table in tables)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def project_qkv(
    config: LlamaConfig, layer: Params, x: jax.Array, tables: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q ``[tokens, heads, head_dim]``, k and v ``[tokens, kv_heads, head_dim]`` of the hidden states ``[tokens, hidden]``."""
    normed = rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    q, k, v = (_linear(normed, layer[name]).reshape(x.shape[0], -1, config.head_dim) for name in ("attn_q", "attn_k", "attn_v"))
    return rope(q, tables), rope(k, tables), v


def feed_forward(config: LlamaConfig, layer: Params, x: jax.Array) -> jax.Array:
    """SwiGLU of hidden states ``[tokens, hidden]``."""
    normed = rms_norm(x, layer["ffn_norm"], config.rms_norm_eps)
    return _linear(jax.nn.silu(_linear(normed, layer["ffn_gate"])) * _linear(normed, layer["ffn_up"]), layer["ffn_down"])


def kv_rows(k: jax.Array, v: jax.Array, dtype: Any) -> jax.Array:
    """Rows of the pool ``[tokens, 2 * kv_heads, head_dim]`` of k and v ``[tokens, kv_heads, head_dim]``."""
    return jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2]).astype(dtype)


def write_kv(pool_layer: jax.Array, rows: jax.Array, out_cache_loc: jax.Array) -> jax.Array:
    """Store rows ``[tokens, 2 * kv_heads, head_dim]`` in their slots ``[tokens]``."""
    page_size = pool_layer.shape[1]
    return pool_layer.at[out_cache_loc // page_size, out_cache_loc % page_size].set(rows)


def gather_kv(pool_layer: jax.Array, page_table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V ``[bs, context, kv_heads, head_dim]`` of the pages of a table ``[bs, pages]``."""
    pages = pool_layer[page_table]  # [bs, pages, page_size, 2 * kv_heads, head_dim]
    pairs = pages.reshape(page_table.shape[0], -1, pages.shape[3] // 2, 2, pages.shape[4])
    return pairs[:, :, :, 0].astype(jnp.float32), pairs[:, :, :, 1].astype(jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Causal attention: a query at position p sees the keys 0 to p.

    q: ``[bs, queries, heads, head_dim]``. k, v: ``[bs, context, kv_heads, head_dim]``. positions: ``[bs, queries]``. Returns as q.
    """
    bs, queries, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    grouped = q.reshape(bs, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bchd->bhgqc", grouped, k) * head_dim**-0.5
    visible = jnp.arange(context) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bhgqc,bchd->bqhgd", weights, v).reshape(q.shape)


def page_table(req_to_token: jax.Array, req_pool_indices: jax.Array, *, page_size: int, pages: int) -> jax.Array:
    """Pages ``[bs, pages]`` of the rows of a batch, from the slots of the first token of each page."""
    return req_to_token[req_pool_indices, : pages * page_size : page_size] // page_size


def forward(
    config: LlamaConfig,
    params: Params,
    pool: Pool,
    *,
    input_ids: jax.Array,
    positions: jax.Array,
    out_cache_loc: jax.Array,
    pages: jax.Array,
    prefix_lens: jax.Array,
    extend_lens: jax.Array,
    max_extend: int,
) -> tuple[jax.Array, Pool, Pool]:
    """One pass over the new tokens of all requests; their K and V are written first and read back through the pages.

    Args:
      input_ids, positions, out_cache_loc: int32 ``[tokens]``, padded at the end; the slot of padding is 0.
      pages: int32 ``[bs, pages]``. prefix_lens, extend_lens: int32 ``[bs]``. max_extend: static, most new tokens of one request.

    Returns:
      Logits float32 ``[bs, vocab]`` of each request's last new token, the pool, and the rows that each layer wrote.
    """
    tokens = input_ids.shape[0]
    starts = jnp.cumsum(extend_lens) - extend_lens  # [bs] first flat token of each request
    spread = jnp.minimum(starts[:, None] + jnp.arange(max_extend), tokens - 1)  # [bs, max_extend] flat token of each query
    owner = jnp.clip(jnp.searchsorted(starts, jnp.arange(tokens), side="right") - 1, 0)  # [tokens] batch row
    query = jnp.minimum(jnp.arange(tokens) - starts[owner], max_extend - 1)
    query_positions = prefix_lens[:, None] + jnp.arange(max_extend)
    tables = rope_tables(config, positions)

    x = params["embedding"][input_ids]
    written, new_kv = [], []
    for layer, pool_layer in zip(params["layers"], pool, strict=True):
        q, k, v = project_qkv(config, layer, x, tables)
        rows = kv_rows(k, v, pool_layer.dtype)
        pool_layer = write_kv(pool_layer, rows, out_cache_loc)
        attended = attend(q[spread], *gather_kv(pool_layer, pages), query_positions)
        x = x + _linear(attended[owner, query].reshape(tokens, -1), layer["attn_output"])
        x = x + feed_forward(config, layer, x)
        written.append(pool_layer)
        new_kv.append(rows)
    last = jnp.clip(starts + extend_lens - 1, 0, tokens - 1)
    return output_logits(config, params, x[last]), tuple(written), tuple(new_kv)


def output_logits(config: LlamaConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
    head = params["embedding"] if config.tie_embeddings else params["output"]
    return _linear(rms_norm(x, params["output_norm"], config.rms_norm_eps), head)


def dense_logits(config: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits ``[n, vocab]`` of one whole sequence ``[n]``, without a pool: what every way of serving it must agree with."""
    positions = jnp.arange(tokens.shape[0])
    tables = rope_tables(config, positions)
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        q, k, v = project_qkv(config, layer, x, tables)
        attended = attend(q[None], k[None], v[None], positions[None])[0]
        x = x + _linear(attended.reshape(tokens.shape[0], -1), layer["attn_output"])
        x = x + feed_forward(config, layer, x)
    return output_logits(config, params, x)


def copy_pages(pool: Pool, src: jax.Array, dst: jax.Array) -> Pool:
    """Copy pages src ``[n]`` to dst ``[n]``, all at once; -1 is padding."""
    return tuple(layer.at[_nowhere(dst, layer)].set(layer[src], mode="drop") for layer in pool)


def take_page(pool: Pool, page: jax.Array) -> Pool:
    """One page of each layer, ``[page_size, 2 * kv_heads, head_dim]``."""
    return tuple(layer[page] for layer in pool)


def put_page(pool: Pool, page: jax.Array, kv: Pool) -> Pool:
    """Overwrite one page of each layer."""
    return tuple(layer.at[page].set(rows) for layer, rows in zip(pool, kv, strict=True))


def _nowhere(pages: jax.Array, layer: jax.Array) -> jax.Array:
    """-1 wraps to the last page, so padding becomes a page past the end, which a scatter drops."""
    return jnp.where(pages < 0, layer.shape[0], pages)


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x ``[..., in]`` times weight ``[out, in]``."""
    return jnp.einsum("...i,oi->...o", x, weight)
