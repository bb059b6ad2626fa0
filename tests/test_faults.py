"""Faults on purpose: each changes exactly what it says, and nothing before its time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import BlockTable, FlatTable, IdentityTable, Layout, RowTable, per_layer, pool_sources
from jax_kvcanary.batch import CanaryBatch
from jax_kvcanary.faults import FaultKind, Faults, Injection

PAGES, PAGE, HEADS, DIM, LAYERS = 16, 4, 2, 8, 2
SLOTS = PAGES * PAGE
WARMUP = 3
K, V = (Layout.from_axes("page slot head dim", half=half) for half in "KV")
POOLS = {
    "combined": Layout.from_axes("page slot head dim", interleaved="head"),
    "head_major": Layout.from_axes("head page slot dim", half="K"),
    "pair": per_layer((K, V)),
}


def make_pool(name: str) -> Any:
    shape = {"combined": (PAGES, PAGE, 2 * HEADS, DIM), "head_major": (HEADS, PAGES, PAGE, DIM), "pair": (PAGES, PAGE, HEADS, DIM)}[name]
    arrays = [jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.bfloat16) for i in range(2 * LAYERS)]
    return [(arrays[2 * i], arrays[2 * i + 1]) for i in range(LAYERS)] if name == "pair" else arrays[:LAYERS]


def make_batch(table: str = "rows") -> CanaryBatch:
    """Requests of batch rows 0 and 2 with 10 and 7 tokens, two and one new ones; row 1 is padding."""
    pages = np.zeros((4, 6), np.int32)
    pages[1, :3], pages[2, :2] = (3, 7, 9), (5, 2)
    rows = (pages[:, :, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(4, -1)
    slots = np.array([rows[1, 10], rows[1, 11], rows[2, 7], -1], np.int32)
    tables = {
        "rows": jnp.asarray(rows),
        "RowTable": RowTable(jnp.asarray(rows)),
        "blocks": BlockTable(jnp.asarray(pages), page_size=PAGE),
        "flat": FlatTable(jnp.asarray(np.concatenate([rows[1], rows[2]])), jnp.array([0, 24, 24, 48], jnp.int32)),
        "identity": IdentityTable(rows=4, width=16),
    }
    return CanaryBatch(
        req_pool_indices=jnp.array([1, 0, 2], jnp.int32),
        prefix_lens=jnp.array([10, 5, 7], jnp.int32),
        extend_seq_lens=jnp.array([2, 3, 1], jnp.int32),
        req_to_token=tables[table],
        input_ids=jnp.array([11, 12, 13, 0], jnp.int32),
        positions=jnp.array([10, 11, 7, 0], jnp.int32),
        out_cache_loc=jnp.asarray(slots),
        request_ids=jnp.array([901, 0, 902], jnp.int32),
    )


def make_faults(name: str = "combined", **more: Any) -> Faults:
    return Faults(**{"sources": pool_sources(make_pool(name), POOLS[name]), "page_size": PAGE, "warmup": WARMUP} | more)


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Small programs that run once or twice: compile time is what counts."""

inject = jax.jit(
    lambda faults, kind, key, pool, batch, **more: faults.inject(kind, key, pool, batch, **more),
    static_argnames=("faults", "kind"),
    compiler_options=QUICK,
)


def slot_bytes(faults: Faults, pool: Any) -> np.ndarray:
    """uint8 [slots, sources, bytes], by NumPy."""
    buffers = [np.asarray(buffer).view(np.uint8).reshape(-1) for buffer in faults.sources.buffers(pool)]
    out = []
    for source in faults.sources.sources:
        slot = np.arange(SLOTS)
        first = source.offset + slot // source.page_size * source.page_stride + slot % source.page_size * source.token_stride
        within = np.arange(source.run_bytes)
        for count, stride in zip(reversed(source.run_counts), reversed(source.run_strides), strict=True):
            within = (np.arange(count)[:, None] * stride + within).reshape(-1)
        assert source.buffer_index is not None
        out.append(buffers[source.buffer_index][first[:, None] + within])
    return np.stack(out, axis=1)


def values(done: Injection) -> dict[str, int]:
    return {field.name: int(getattr(done, field.name)) for field in dataclasses.fields(done)}


def run(faults: Faults, kind: str, seed: int = 0, table: str = "rows", pool: str = "combined", **more: Any) -> tuple[Any, ...]:
    before = make_pool(pool)
    batch = make_batch(table)
    after, changed, done = inject(faults, str(kind), jax.random.key(seed), before, batch, step=WARMUP, **more)
    return slot_bytes(faults, before), slot_bytes(faults, after), batch, changed, values(done)


IDLE = jnp.array([-1, 44, 45, -1], jnp.int32)


def extra(kind: FaultKind) -> dict[str, Any]:
    return {"idle_slots": IDLE} if kind is FaultKind.FLIP_IDLE else {}


def slot_at(batch: CanaryBatch, row: int, position: int) -> int:
    return int(np.asarray(batch.req_to_token)[int(batch.req_pool_indices[row]), position])


@pytest.mark.parametrize(
    ("kind", "pool"), [*(("flip_in_use", pool) for pool in POOLS), ("flip_after_stamp", "combined"), ("flip_idle", "pair")]
)
def test_a_flip_changes_one_bit_of_the_slot_it_names(kind: str, pool: str) -> None:
    faults, rows = make_faults(pool), set()
    for seed in range(6):
        before, after, batch, changed, done = run(faults, kind, seed, pool=pool, **extra(FaultKind(kind)))
        assert done["fired"] and all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (batch, changed)), strict=True))
        flipped = np.unpackbits(before ^ after, axis=-1).sum(axis=-1)
        assert flipped.sum() == 1 and flipped[done["slot"], done["source"]] == 1
        assert done["layer"] == faults.sources.source_layers[done["source"]]
        rows.add(done["batch_row"])
        if kind == "flip_idle":
            assert done["slot"] in (44, 45) and done["position"] == -1
        else:
            assert done["slot"] == slot_at(batch, done["batch_row"], done["position"])
            new = done["position"] - int(batch.prefix_lens[done["batch_row"]])
            assert new >= 0 if kind == "flip_after_stamp" else new < 0
    assert rows == ({-1} if kind == "flip_idle" else {0, 2})


def test_flips_keep_to_leading_bytes() -> None:
    faults = make_faults(leading_bytes=4)
    for seed in range(10):
        before, after, *_ = run(faults, "flip_in_use", seed)
        assert np.argwhere(before != after)[:, 2].max() < 4


@pytest.mark.parametrize("pool", ["combined", "head_major"])
def test_a_page_is_zeroed_in_every_layer(pool: str) -> None:
    before, after, batch, _, done = run(make_faults(pool), "zero_page", pool=pool)
    page = done["slot"] // PAGE
    assert done["slot"] % PAGE == 0 and done["slot"] == slot_at(batch, done["batch_row"], done["position"])
    inside = np.arange(SLOTS) // PAGE == page
    assert not after[inside].any() and (after[~inside] == before[~inside]).all()


@pytest.mark.parametrize("pool", ["head_major", "pair"])
def test_layers_are_swapped_in_one_slot(pool: str) -> None:
    faults = make_faults(pool)
    before, after, _, _, done = run(faults, "swap_layers", seed=3, pool=pool)
    changed = np.unique(np.argwhere(before != after)[:, :2], axis=0)
    assert set(changed[:, 0]) == {done["slot"]}
    one, other = changed[:, 1]
    assert one == done["source"] and faults.sources.names[one].half == faults.sources.names[other].half
    was, now = before[done["slot"]], after[done["slot"]]
    assert (now[one] == was[other]).all() and (now[other] == was[one]).all()


@pytest.mark.parametrize("table", ["rows", "RowTable", "blocks", "flat"])
def test_two_entries_of_a_table_are_swapped(table: str) -> None:
    before, after, batch, changed, done = run(make_faults(), "swap_entries", seed=2, table=table)
    assert (before == after).all() and done["fired"] and done["position"] != done["other_position"]

    def flat(of: CanaryBatch) -> np.ndarray:
        return np.asarray(jax.tree.leaves(of.req_to_token)[0]).reshape(-1)

    old, new = flat(batch), flat(changed)
    assert (old != new).sum() == 2 and sorted(old) == sorted(new)
    rows = make_batch()
    assert done["slot"] == slot_at(rows, done["batch_row"], done["other_position"])
    assert done["other_slot"] == slot_at(rows, done["batch_row"], done["position"])
    assert done["position"] < int(batch.prefix_lens[done["batch_row"]])


def test_positions_and_tokens() -> None:
    _, _, batch, changed, done = run(make_faults(), "shift_position", seed=1)
    moved = np.asarray(changed.positions) - np.asarray(batch.positions)
    assert moved.tolist() == ([1, 1, 0, 0] if done["batch_row"] == 0 else [0, 0, 1, 0])
    assert done["position"] == int(batch.prefix_lens[done["batch_row"]])
    _, _, batch, changed, done = run(make_faults(), "foreign_token", seed=1)
    (at,) = np.flatnonzero(np.asarray(changed.input_ids) != np.asarray(batch.input_ids))
    assert done["position"] == int(batch.positions[at]) and done["slot"] == int(batch.out_cache_loc[at])
    assert 0 <= int(changed.input_ids[at]) < 32000


@pytest.mark.parametrize("table", ["rows", "blocks", "flat"])
def test_a_page_is_reused_early(table: str) -> None:
    hit = set()
    for seed in range(8):
        before, after, batch, changed, done = run(make_faults(), "reuse_early", seed, table=table)
        assert (before == after).all() and done["fired"] and done["batch_row"] != done["other_row"]
        rows = make_batch()
        assert done["slot"] == slot_at(rows, done["batch_row"], done["position"])
        assert done["other_slot"] == slot_at(rows, done["other_row"], done["other_position"])
        written = np.flatnonzero(np.asarray(changed.out_cache_loc) != np.asarray(batch.out_cache_loc))
        assert int(changed.out_cache_loc[written[0]]) == done["slot"] and len(written) == int(batch.extend_seq_lens[done["other_row"]])
        leaf, old = (np.asarray(jax.tree.leaves(of.req_to_token)[0]) for of in (changed, batch))
        assert (leaf != old).sum() == (1 if table == "blocks" else len(written))
        hit.add(done["batch_row"])
    assert hit == {0, 2}


@pytest.mark.parametrize(("kind", "target"), [("drop_write", SLOTS), ("scatter_minus_one", -1)])
def test_writes_that_stray(kind: str, target: int) -> None:
    _, _, batch, changed, done = run(make_faults(), kind, seed=1)
    (at,) = np.flatnonzero(np.asarray(changed.out_cache_loc) != np.asarray(batch.out_cache_loc))
    assert int(changed.out_cache_loc[at]) == target and done["other_slot"] == int(batch.out_cache_loc[at])
    assert done["slot"] == (SLOTS - 1 if target == -1 else done["other_slot"]) and done["position"] == int(batch.positions[at])


@pytest.mark.parametrize("kind", list(FaultKind))
def test_nothing_happens_before_its_time_or_without_a_victim(kind: FaultKind) -> None:
    assert kind.when in ("step", "model", "after")
    faults, pool = make_faults(), make_pool("combined")

    def nothing(batch: CanaryBatch, step: int, idle: Any) -> None:
        more = {"idle_slots": idle} if kind is FaultKind.FLIP_IDLE else {}
        after, changed, done = inject(faults, str(kind), jax.random.key(0), pool, batch, step=step, **more)
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, ((pool, batch), (after, changed))), strict=True))
        told = values(done)
        assert told.pop("fired") == 0 and set(told.values()) == {-1}

    nothing(make_batch(), WARMUP - 1, IDLE)
    nothing(dataclasses.replace(make_batch(), req_pool_indices=jnp.array([0, -1, 0], jnp.int32)), WARMUP, jnp.full((4,), -1, jnp.int32))


def test_chance_and_seed() -> None:
    faults, traces = make_faults(probability=0.5), []
    pool, batch = make_pool("combined"), make_batch()

    @functools.partial(jax.jit, compiler_options=QUICK)
    def often(seed: Any, step: Any) -> Injection:
        traces.append(1)
        return faults.inject("foreign_token", jax.random.key(seed), pool, batch, step=step)[2]

    once, again = ([values(often(step, step)) for step in range(40)] for _ in range(2))
    assert once == again and len(traces) == 1
    fired = [one["fired"] for one in once]
    assert not any(fired[:WARMUP]) and 8 < sum(fired) < 32


def test_refused() -> None:
    faults, batch, pool = make_faults(), make_batch(), make_pool("combined")
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"^kv-canary: fault must be one of 'flip_in_use', .* got 'flip'"):
        faults.inject("flip", key, pool, batch)
    with pytest.raises(ValueError, match=r"^kv-canary: flip_idle needs idle_slots"):
        faults.inject("flip_idle", key, pool, batch)
    with pytest.raises(ValueError, match=r"^kv-canary: this fault changes the batch's positions, which is None"):
        faults.inject("shift_position", key, pool, dataclasses.replace(batch, positions=None))
    with pytest.raises(ValueError, match=r"^kv-canary: this fault changes a table, and an IdentityTable has none"):
        faults.inject("swap_entries", key, pool, make_batch("identity"))
    with pytest.raises(ValueError, match=r"^kv-canary: probability must be in \[0, 1\], got 2"):
        make_faults(probability=2)
    with pytest.raises(TypeError, match=r"^kv-canary: sources must be a PoolSources, got tuple"):
        Faults(sources=())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^kv-canary: batch must be a CanaryBatch, got dict"):
        faults.inject("swap_entries", key, pool, {})  # type: ignore[arg-type]
