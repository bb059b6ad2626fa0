"""Device time of single ops, as (time of 64 chained calls - time of 32) / 32, beside a plain read of the same bytes.

Run by hand on an idle machine: ``python tests/bench_ops.py [--slots-log2 20]``; not collected by pytest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary import CanaryLaunchTag, RealKvHashMode

LONG, SHORT = 64, 32


def seconds_per_call(step: Callable[..., Any], state: Any, *operands: Any, repeats: int = 5) -> float:
    """Median device seconds of one call of ``step(state, *operands)``, which gives the next state."""

    def chain(length: int) -> Callable[..., Any]:
        return jax.jit(lambda s, *xs: jax.lax.fori_loop(0, length, lambda _, x: step(x, *xs), s))

    long, short = chain(LONG), chain(SHORT)
    jax.block_until_ready((long(state, *operands), short(state, *operands)))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(long(state, *operands))
        middle = time.perf_counter()
        jax.block_until_ready(short(state, *operands))
        samples.append((middle - start - (time.perf_counter() - middle)) / (LONG - SHORT))
    return statistics.median(samples)


def show(name: str, seconds: float, kv_bytes: int = 0) -> None:
    rate = f"{kv_bytes / seconds / 1e9:9.0f} GB/s" if kv_bytes else ""
    print(f"{name:60s} {seconds * 1e6:10.1f} us {rate}", flush=True)


def bench_verify(slots: int, token_bytes: int, page: int) -> None:
    rng = np.random.default_rng(0)
    pool = jax.random.bits(jax.random.key(0), (slots // page, page * token_bytes // 4), jnp.uint32)
    sources = kvc.make_packed_source(buffer=pool, page_size=page, bytes_per_token=token_bytes, read_bytes=token_bytes)
    read = seconds_per_call(lambda s, x: s + jnp.sum(x ^ s, dtype=jnp.uint32), jnp.uint32(0), pool)
    show(f"plain read of {slots} slots x {token_bytes} B", read, slots * token_bytes)
    bs = 256
    length = slots // bs
    pages = rng.permutation(slots // page).reshape(bs, length // page).astype(np.int32)
    table = jnp.asarray((pages[:, :, None] * page + np.arange(page, dtype=np.int32)).reshape(bs, length))
    rows = jnp.arange(bs, dtype=jnp.int32)
    lengths = jnp.full((bs,), length, jnp.int32)
    log = kvc.ViolationLog.allocate(ring_capacity=1024)
    for mode in RealKvHashMode:
        kv = {RealKvHashMode.NONE: 0, RealKvHashMode.PARTIAL: 16, RealKvHashMode.ALL: token_bytes}[mode] * slots
        real = {"real_kv_hash_mode": mode, "real_kv_sources": sources}
        offsets = jnp.arange(bs + 1, dtype=jnp.int32) * length
        written = kvc.write(
            records=kvc.allocate_records(slots=slots),
            log=log,
            plan=_write_plan(offsets),
            input_ids=jnp.arange(slots, dtype=jnp.int32),
            positions=jnp.tile(jnp.arange(length, dtype=jnp.int32), bs),
            out_cache_loc=table.reshape(-1),
            launch_tag=CanaryLaunchTag.TAIL_K_FULL,
            padding_slot=None,
            real_kv_buffers=(pool,),
            **real,
        )
        head = {"launch_tag": CanaryLaunchTag.HEAD_K_FULL, "padding_slot": None, **real}

        def fused(log: Any, records: Any, pool: Any, table: Any, head: Any = head) -> Any:
            batch = {"req_pool_indices": rows, "prefix_lens": lengths, "req_to_token": table, "padding_req": None}
            return kvc.verify_fused(records=records, log=log, real_kv_buffers=(pool,), **batch, **head).log

        def planned(log: Any, records: Any, pool: Any, table: Any, head: Any = head) -> Any:
            batch = {"req_pool_indices": rows, "prefix_lens": lengths, "req_to_token": table, "padding_req": None}
            plan = kvc.plan(extend_seq_lens=jnp.zeros_like(rows), verify_capacity=slots, write_req_capacity=bs, **batch)
            return kvc.verify(records=records, log=log, plan=plan.verify, real_kv_buffers=(pool,), **head).log

        operands = (written.records, pool, table)
        assert int(fused(log, *operands).write_index[0]) == 0 and int(planned(log, *operands).write_index[0]) == 0
        show(f"verify_fused {mode.name}, {slots} slots, shuffled pages of {page}", seconds_per_call(fused, log, *operands), kv)
        show(f"plan + verify {mode.name}, {slots} slots, shuffled pages of {page}", seconds_per_call(planned, log, *operands), kv)


def _write_plan(offsets: Any) -> kvc.WritePlan:
    requests = offsets.shape[0] - 1
    return kvc.WritePlan(
        write_offsets=offsets,
        write_seed_slot_indices=jnp.full((requests,), -1, jnp.int32),
        write_num_valid_reqs=jnp.full((1,), requests, jnp.int32),
        req_pool_indices=jnp.zeros((0,), jnp.int32),
    )


def bench_write(requests: int, tokens: int, token_bytes: int, slots: int) -> None:
    pool = jax.random.bits(jax.random.key(0), (slots, token_bytes // 4), jnp.uint32)
    sources = kvc.make_row_source(layer_buffer=pool, read_bytes=token_bytes)
    total = requests * tokens
    loc = jnp.asarray(np.random.default_rng(0).permutation(slots)[:total].astype(np.int32))
    plan = _write_plan(jnp.arange(requests + 1, dtype=jnp.int32) * tokens)
    for mode in RealKvHashMode:

        def step(state: Any, pool: Any, loc: Any, mode: RealKvHashMode = mode) -> Any:
            records, log = state
            out = kvc.write(
                records=records,
                log=log,
                plan=plan,
                input_ids=jnp.arange(total, dtype=jnp.int32),
                positions=jnp.arange(total, dtype=jnp.int32),
                out_cache_loc=loc,
                launch_tag=CanaryLaunchTag.TAIL_K_FULL,
                real_kv_hash_mode=mode,
                real_kv_sources=sources,
                real_kv_buffers=(pool,),
            )
            return out.records, out.log

        state = (kvc.allocate_records(slots=slots), kvc.ViolationLog.allocate(ring_capacity=64))
        show(f"write {requests} x {tokens} tokens, {mode.name} {token_bytes} B", seconds_per_call(step, state, pool, loc))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots-log2", type=int, default=20)
    arguments = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}")
    slots = 1 << arguments.slots_log2
    bench_verify(slots, 2048, 16)
    for requests, tokens in ((1, 8192), (64, 128), (256, 1)):
        bench_write(requests, tokens, 2048, max(slots // 8, requests * tokens))


if __name__ == "__main__":
    main()
