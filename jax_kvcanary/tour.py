"""A short run of the ops: two requests in a small paged pool, then one fault after the other and what verify says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary import ops, report
from jax_kvcanary.sources import RealKvSource, make_packed_source
from jax_kvcanary.spec import CanaryLaunchTag, FailReason, RealKvHashMode
from jax_kvcanary.state import ViolationLog, allocate_records, allocate_source_tags

PAGES, PAGE, HEADS, DIM, LAYERS = 16, 4, 2, 8, 3
PROMPTS = {1: [11, 12, 13, 14, 15, 16, 17], 2: [21, 22, 23, 24, 25]}  # row of req_to_token: token ids
REQUEST_IDS = {1: 9001, 2: 9002}


@dataclasses.dataclass(frozen=True)
class Served:
    """A pool with two stamped requests.

    pool: bfloat16 [pages, page, 2 * heads, dim] a layer. req_to_token: int32 [rows, width].
    """

    pool: tuple[jax.Array, ...]
    sources: tuple[RealKvSource, ...]
    records: jax.Array
    source_tags: jax.Array
    req_to_token: jax.Array


def serve() -> Served:
    """Write both prompts into the pool and stamp every slot."""
    shape = (PAGES, PAGE, 2 * HEADS, DIM)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    pool = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    token_bytes = 2 * HEADS * DIM * 2
    sources = tuple(
        source
        for layer in pool
        for source in make_packed_source(buffer=layer, page_size=PAGE, bytes_per_token=token_bytes, read_bytes=token_bytes)
    )
    # Page 0 is the padding page; request 1 lives on pages 3 and 7, request 2 on pages 5 and 2.
    pages = {1: (3, 7), 2: (5, 2)}
    table = jnp.zeros((4, 2 * PAGE), jnp.int32)
    for row, owned in pages.items():
        table = table.at[row].set(jnp.concatenate([page * PAGE + jnp.arange(PAGE, dtype=jnp.int32) for page in owned]))
    rows = jnp.array(list(PROMPTS), jnp.int32)
    lengths = jnp.array([len(tokens) for tokens in PROMPTS.values()], jnp.int32)
    plan = ops.plan(
        req_pool_indices=rows,
        prefix_lens=jnp.zeros_like(lengths),
        extend_seq_lens=lengths,
        req_to_token=table,
        verify_capacity=64,
        write_req_capacity=4,
    )
    written = ops.write(
        records=allocate_records(slots=PAGES * PAGE, provenance=True),
        source_tags=allocate_source_tags(slots=PAGES * PAGE, sources=len(sources)),
        log=ViolationLog.allocate(ring_capacity=64),
        plan=plan.write,
        input_ids=jnp.array([token for tokens in PROMPTS.values() for token in tokens], jnp.int32),
        positions=jnp.concatenate([jnp.arange(len(tokens), dtype=jnp.int32) for tokens in PROMPTS.values()]),
        out_cache_loc=jnp.concatenate([table[row, : len(tokens)] for row, tokens in PROMPTS.items()]),
        request_ids=jnp.array([REQUEST_IDS[row] for row in PROMPTS], jnp.int32),
        launch_tag=CanaryLaunchTag.TAIL_K_FULL,
        real_kv_hash_mode=RealKvHashMode.ALL,
        real_kv_sources=sources,
        real_kv_buffers=pool,
        step=1,
    )
    assert written.source_tags is not None  # some were given
    return Served(pool, sources, written.records, written.source_tags, table)


@jax.jit
def _check(pool: tuple[jax.Array, ...], records: jax.Array, source_tags: jax.Array, req_to_token: jax.Array, log: ViolationLog) -> Any:
    sources = tuple(
        source
        for layer in pool
        for source in make_packed_source(buffer=layer, page_size=PAGE, bytes_per_token=2 * HEADS * DIM * 2, read_bytes=2 * HEADS * DIM * 2)
    )
    expected = jnp.zeros((4, 2 * PAGE), jnp.int32)
    for row, tokens in PROMPTS.items():
        expected = expected.at[row, : len(tokens)].set(jnp.array(tokens, jnp.int32))
    lengths = jnp.array([len(tokens) for tokens in PROMPTS.values()], jnp.int32)
    return ops.verify_fused(
        records=records,
        source_tags=source_tags,
        log=log,
        req_pool_indices=jnp.array(list(PROMPTS), jnp.int32),
        prefix_lens=lengths,
        req_to_token=req_to_token,
        req_to_verify_expected_tokens=expected,
        req_to_verify_expected_tokens_valid_lens=lengths,
        check_verify_expected_token=True,
        launch_tag=CanaryLaunchTag.HEAD_K_FULL,
        real_kv_hash_mode=RealKvHashMode.ALL,
        real_kv_sources=sources,
        real_kv_buffers=pool,
        step=2,
    )


def check(served: Served) -> tuple[report.LogReport, list[int]]:
    """Verify both requests inside ``jax.jit``; the decoded log and a verdict a request."""
    result = _check(served.pool, served.records, served.source_tags, served.req_to_token, ViolationLog.allocate(ring_capacity=64))
    return report.decode_log(result.log, records=served.records), [int(v) for v in result.verdict]


# --- faults ---


def _flip_bit(served: Served) -> Served:
    """One bit of layer 1 changes at request 1's position 5."""
    words = jax.lax.bitcast_convert_type(served.pool[1], jnp.uint16).at[7, 1, 3, 2].add(1)
    return dataclasses.replace(served, pool=(served.pool[0], jax.lax.bitcast_convert_type(words, jnp.bfloat16), served.pool[2]))


def _swap_pages(served: Served) -> Served:
    """Request 1's second page is taken from request 2."""
    return dataclasses.replace(served, req_to_token=served.req_to_token.at[1, PAGE : 2 * PAGE].set(served.req_to_token[2, :PAGE]))


def _never_loaded(served: Served) -> Served:
    """Request 2's last page points at a page that nothing was written to."""
    fresh = 9 * PAGE + jnp.arange(PAGE, dtype=jnp.int32)
    return dataclasses.replace(served, req_to_token=served.req_to_token.at[2, PAGE : 2 * PAGE].set(fresh))


def _out_of_range(served: Served) -> Served:
    """A table entry of request 1 lies outside the pool, where JAX would clamp it in silence."""
    return dataclasses.replace(served, req_to_token=served.req_to_token.at[1, 3].set(PAGES * PAGE + 5))


FAULTS: dict[str, tuple[Callable[[Served], Served], int, FailReason]] = {
    "a flipped bit in layer 1": (_flip_bit, 1, FailReason.VERIFY_REAL_KV_HASH),
    "a page of another request": (_swap_pages, 1, FailReason.VERIFY_TOKEN),
    "a page that was never loaded": (_never_loaded, 2, FailReason.UNWRITTEN),
    "a slot outside the pool": (_out_of_range, 1, FailReason.SLOT_OUT_OF_RANGE),
}
"""Name: how to plant it, the row of the request it hits, a reason that must be among those reported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the run; 0 if the clean pool raised nothing and every fault was seen at the right request."""
    served = serve()
    print(f"pool: {LAYERS} layers of {PAGES} pages x {PAGE} slots on {jax.devices()[0].device_kind}, 2 requests stamped")
    clean, verdicts = check(served)
    print(f"clean: {clean.describe()} verdicts {verdicts}")
    good = clean.reported == 0 and verdicts == [1, 1]
    for name, (plant, row, reason) in FAULTS.items():
        found, verdicts = check(plant(served))
        hit = found.reported > 0 and all(v.req_pool_idx == row for v in found.violations)
        hit = hit and any(reason in v.reasons for v in found.violations)
        good = good and hit
        print(f"\n{name}: {'seen' if hit else 'NOT SEEN'}, verdicts {verdicts}")
        print("\n".join(f"  {line}" for line in found.describe().splitlines()))
    print("\nevery fault was seen, and only at the request it hit" if good else "\nsomething was missed")
    return 0 if good else 1
