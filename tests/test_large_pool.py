"""Pools of more than 2^31 and 2^32 bytes: slots past those offsets are hashed right. Pages that nobody touches cost no memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import (
    BlockTable,
    CanaryLaunchTag,
    FailReason,
    Layout,
    RealKvHashMode,
    VerifyPlan,
    ViolationLog,
    WritePlan,
    allocate_records,
    allocate_source_tags,
    backend_info,
    decode_log,
    plan,
    pool_sources,
    reference,
    verify,
    verify_fused,
    write,
)
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.spec import Column

BYTES = 2048
"""Bytes a slot."""

PAGE = 16
NEEDED = 8 << 30


def available_memory() -> int:
    """Bytes that the system can give to a new process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


class Pool:
    """Slots just past ``size`` bytes, all zero but for some, as a NumPy array that takes memory only where it was written."""

    def __init__(self, size: int) -> None:
        self.slots = size // BYTES + 2 * PAGE
        room = np.zeros(self.slots * BYTES + 64, np.uint8)
        start = -room.ctypes.data % 64  # aligned memory is shared with JAX, not copied
        self.bytes = room[start : start + self.slots * BYTES]
        border = size // BYTES
        self.touched = [0, 1, border // 2, border - 1, border, border + 1, border + PAGE + 3, self.slots - 1]
        rng = np.random.default_rng(size)
        for slot in self.touched:
            self.of_slot(slot)[:] = rng.integers(0, 256, BYTES)

    def of_slot(self, slot: int) -> np.ndarray:
        return self.bytes[slot * BYTES : (slot + 1) * BYTES]


def layouts(slots: int) -> dict[str, tuple[RealKvSource, tuple[int, ...], Any]]:
    """Sources that read the same bytes of a slot, each with the shape and dtype of its buffer."""
    rows, packed, flat = (slots, BYTES), (slots // PAGE, PAGE * BYTES), (slots * BYTES,)
    heads = (slots, 4, BYTES // 16, 2)
    general = {"pages": slots, "page_size": 1, "page_stride": BYTES, "token_stride": 0}
    return {
        "rows": (RealKvSource(shape=rows, dtype="uint8", page_size=1, num_bytes_per_token=BYTES, read_bytes=BYTES), rows, np.uint8),
        "packed": (
            RealKvSource(shape=packed, dtype="uint8", page_size=PAGE, num_bytes_per_token=BYTES, read_bytes=BYTES),
            packed,
            np.uint8,
        ),
        "heads": (RealKvSource(shape=heads, dtype="uint16", page_size=1, num_bytes_per_token=BYTES, read_bytes=BYTES), heads, np.uint16),
        "flat": (RealKvSource.general(buffer_shape=flat, buffer_dtype="uint8", run_bytes=BYTES, **general), flat, np.uint8),
    }


def stamp_and_check(buffer: Any, source: RealKvSource, slots: list[int], implementation: str) -> tuple[Any, Any]:
    """The real-KV hashes that a write stores, and records to check again."""
    index = jnp.asarray(np.array(slots, np.int32))
    count = len(slots)
    result = write(
        records=allocate_records(slots=source.num_slots),
        log=ViolationLog.allocate(ring_capacity=8),
        plan=WritePlan(
            write_offsets=jnp.arange(count + 1, dtype=jnp.int32),
            write_seed_slot_indices=jnp.full((count,), -1, jnp.int32),
            write_num_valid_reqs=jnp.array([count], jnp.int32),
            req_pool_indices=jnp.zeros((0,), jnp.int32),
        ),
        input_ids=index,
        positions=jnp.zeros((count,), jnp.int32),
        out_cache_loc=index,
        launch_tag=CanaryLaunchTag.TAIL_K_FULL,
        real_kv_hash_mode=RealKvHashMode.ALL,
        real_kv_sources=(source,),
        real_kv_buffers=(buffer,),
        padding_slot=None,
        implementation=implementation,
    )
    assert int(result.log.write_index[0]) == 0
    stored = np.ascontiguousarray(np.asarray(result.records[index, 6:8]))
    return stored.view(np.uint64)[:, 0], result.records


def violations(buffer: Any, source: RealKvSource, records: Any, slots: list[int], implementation: str) -> list[tuple[int, int]]:
    """(slot, reasons) of the rows that a verify reports."""
    count = len(slots)
    entries = VerifyPlan.from_entries(slot_indices=slots, expected_positions=[0] * count, prev_slot_indices=[-1] * count)
    log = verify(
        records=records,
        log=ViolationLog.allocate(ring_capacity=16),
        plan=entries,
        launch_tag=CanaryLaunchTag.HEAD_K_FULL,
        real_kv_hash_mode=RealKvHashMode.ALL,
        real_kv_sources=(source,),
        real_kv_buffers=(buffer,),
        padding_slot=None,
        implementation=implementation,
    ).log
    ring = np.asarray(log.ring)[: int(log.write_index[0])]
    return [(int(row[2 * Column.SLOT]), int(row[2 * Column.REASON])) for row in ring]


def expected(rows: list[np.ndarray]) -> list[int]:
    """Hashes over one source of slots with these bytes."""
    return [reference.splitmix64(reference.fold_bytes(row)) for row in rows]


@pytest.fixture(scope="module", params=[31, 32], ids=["2GiB", "4GiB"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    if available_memory() < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free memory, there are {available_memory() / 2**30:.1f}")
    yield Pool(1 << request.param)
    gc.collect()


@pytest.mark.parametrize("layout", layouts(PAGE))
def test_slots_past_the_border(pool: Pool, layout: str, implementation: str) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("host memory stands in for the pool on the CPU only")
    if implementation == "jax" and layout in ("packed", "heads"):
        pytest.skip("plain JAX compiles for long: two layouts are enough")
    source, shape, dtype = layouts(pool.slots)[layout]
    host = pool.bytes.view(dtype).reshape(shape)
    buffer = jax.device_put(host, may_alias=True)
    shared = buffer.unsafe_buffer_pointer() == host.ctypes.data
    if pool.bytes.size > 1 << 32 and not (shared and implementation == "ffi"):
        pytest.skip("more than 4 GiB only where the pool is neither copied nor indexed by 32 bits")
    hashes, records = stamp_and_check(buffer, source, pool.touched, implementation)
    assert hashes.tolist() == expected([pool.of_slot(slot) for slot in pool.touched])
    assert violations(buffer, source, records, pool.touched, implementation) == []
    for slot in (pool.touched[4], pool.touched[-1]):
        pool.of_slot(slot)[-1] ^= 1
        changed = buffer if shared else jax.device_put(host, may_alias=True)
        try:
            found = violations(changed, source, records, pool.touched, implementation)
            assert found == [(slot, FailReason.VERIFY_REAL_KV_HASH)]
        finally:
            pool.of_slot(slot)[-1] ^= 1


@pytest.mark.gpu
@pytest.mark.parametrize("layout", layouts(PAGE))
def test_slots_past_the_border_on_the_gpu(layout: str) -> None:
    """More than 2^32 bytes on the device."""
    info = backend_info()["cuda"]
    if not info.compiled:
        pytest.skip(info.detail)
    device = jax.devices("gpu")[0]
    free = (device.memory_stats() or {}).get("bytes_limit", 0)
    if free < 2 * NEEDED:
        pytest.skip(f"needs {2 * NEEDED >> 30} GiB of device memory, there are {free / 2**30:.1f}")
    slots = (1 << 32) // BYTES + 2 * PAGE
    border = (1 << 32) // BYTES
    touched = [0, 1, border // 2, border - 1, border, border + 1, border + PAGE + 3, slots - 1]
    rows = np.random.default_rng(0).integers(0, 256, (len(touched), BYTES), np.uint8)
    source, shape, dtype = layouts(slots)[layout]
    with jax.default_device(device):

        def put(buffer: jax.Array, slot: Any, row: jax.Array) -> jax.Array:
            if layout == "flat":
                at = [slot * BYTES]
            else:
                at = [slot // PAGE, slot % PAGE * BYTES] if layout == "packed" else [slot] + [0] * (len(shape) - 1)
            piece = (1,) * (layout != "flat") + (shape[1:] if layout in ("rows", "heads") else (BYTES,))
            return jax.lax.dynamic_update_slice(buffer, row.reshape(piece), at)

        with jax.enable_x64(True):  # the flat layout needs an index of 64 bits
            place = jax.jit(put, donate_argnums=0)
            buffer = jax.jit(lambda: jnp.zeros(shape, dtype))()
            for slot, row in zip(touched, rows, strict=True):
                buffer = place(buffer, np.int64(slot), row.view(dtype))
        hashes, records = stamp_and_check(buffer, source, touched, "ffi")
        assert hashes.tolist() == expected(list(rows))
        assert violations(buffer, source, records, touched, "ffi") == []
        rows[-1, -1] ^= 1
        with jax.enable_x64(True):
            buffer = place(buffer, np.int64(touched[-1]), rows[-1].view(dtype))
        assert violations(buffer, source, records, touched, "ffi") == [(touched[-1], FailReason.VERIFY_REAL_KV_HASH)]


LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
REQUESTS, CONTEXT = 64, 4096


@pytest.mark.gpu
def test_the_pool_of_an_8b_model_in_one_call() -> None:
    """32 layers, K and V, 34 GB: every byte stamped by one write and checked by one verify; one changed byte is named."""
    info = backend_info()["cuda"]
    if not info.compiled:
        pytest.skip(info.detail)
    device = jax.devices("gpu")[0]
    slots = REQUESTS * CONTEXT
    size = slots * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    free = (device.memory_stats() or {}).get("bytes_limit", 0)
    if free < size + (8 << 30):
        pytest.skip(f"needs {size / 2**30:.0f} GiB of device memory and 8 more, there are {free / 2**30:.1f}")
    with jax.default_device(device):
        shape = (slots // PAGE, PAGE, KV_HEADS, HEAD_DIM)
        make = jax.jit(lambda key: jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint16), jnp.bfloat16))
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 2 * LAYERS)
        pool = [{"K": make(keys[2 * layer]), "V": make(keys[2 * layer + 1])} for layer in range(LAYERS)]
        axes = "page slot head dim"
        sources = pool_sources(pool, [{half: Layout.from_axes(axes).as_half(half) for half in "KV"}] * LAYERS)
        assert len(sources) == 2 * LAYERS
        pages = np.random.default_rng(0).permutation(slots // PAGE).astype(np.int32).reshape(REQUESTS, -1)
        table, rows = BlockTable(jnp.asarray(pages), PAGE), jnp.arange(REQUESTS, dtype=jnp.int32)
        lens = jnp.full((REQUESTS,), CONTEXT, jnp.int32)
        common = {"real_kv_hash_mode": RealKvHashMode.ALL, "padding_slot": None}
        planned = plan(
            req_pool_indices=rows,
            prefix_lens=jnp.zeros_like(lens),
            extend_seq_lens=lens,
            req_to_token=table,
            verify_capacity=0,
            write_req_capacity=REQUESTS,
            padding_req=None,
        )
        stamped = write(
            records=allocate_records(slots=slots),
            source_tags=allocate_source_tags(slots=slots, sources=len(sources)),
            log=ViolationLog.allocate(ring_capacity=8),
            plan=planned.write,
            input_ids=jnp.arange(slots, dtype=jnp.int32),
            positions=jnp.tile(jnp.arange(CONTEXT, dtype=jnp.int32), REQUESTS),
            out_cache_loc=jnp.asarray((pages[:, :, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1)),
            launch_tag=CanaryLaunchTag.TAIL_K_FULL,
            **common,
            **sources.arguments(pool),
        )

        def check(pool: Any) -> Any:
            return verify_fused(
                records=stamped.records,
                source_tags=stamped.source_tags,
                log=stamped.log,
                req_pool_indices=rows,
                prefix_lens=lens,
                req_to_token=table,
                padding_req=None,
                launch_tag=CanaryLaunchTag.HEAD_K_FULL,
                **common,
                **sources.arguments(pool),
            )

        clean = check(pool)
        assert int(clean.log.write_index[0]) == 0 and np.asarray(clean.verdict).tolist() == [1] * REQUESTS
        assert decode_log(clean.log).slot_runs[CanaryLaunchTag.HEAD_K_FULL] == slots
        layer, position, request = 17, CONTEXT - 1, REQUESTS - 1
        page, inside = int(pages[request, position // PAGE]), position % PAGE
        flip = jax.jit(
            lambda x: x.at[page, inside, KV_HEADS - 1, HEAD_DIM - 1].set(
                jax.lax.bitcast_convert_type(
                    jax.lax.bitcast_convert_type(x[page, inside, KV_HEADS - 1, HEAD_DIM - 1], jnp.uint16) ^ jnp.uint16(0x100), jnp.bfloat16
                )
            ),
            donate_argnums=0,
        )
        pool[layer]["V"] = flip(pool[layer]["V"])
        (violation,) = decode_log(check(pool).log, source_names=sources.labels).violations
        assert (violation.slot, violation.expected_position, violation.batch_row) == (page * PAGE + inside, position, request)
        assert violation.source_name == f"layer {layer} V" and violation.reasons == FailReason.VERIFY_REAL_KV_HASH
