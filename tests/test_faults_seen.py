"""Every fault through a real canary and its monitor: seen, at the slot and request that were hit, with the right cause or none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import Canary, CanaryBatch, CanaryConfig, Layout, pool_sources
from jax_kvcanary.causes import Cause
from jax_kvcanary.events import Event
from jax_kvcanary.faults import FaultKind, Faults
from jax_kvcanary.monitor import Monitor

PAGES, PAGE, LAYERS, HEADS, DIM = 16, 4, 2, 2, 8
SLOTS, BS, WIDTH, TOKENS = PAGES * PAGE, 3, 24, 16
LAYOUT = Layout.from_axes("page slot head dim", interleaved="head")
ROW_LAYOUT = Layout.from_axes("slot head dim", interleaved="head")
PAGES_OF = {1: (3, 7, 9, 11, 2, 8), 2: (5, 15, 12, 13, 4, 6)}
IDS = {0: 0, 1: 9001, 2: 9002}


def make_pool() -> list[jax.Array]:
    return [jnp.ones((PAGES, PAGE, 2 * HEADS, DIM), jnp.float32) * (1 + layer) for layer in range(LAYERS)]


CANARY = Canary(make_pool(), LAYOUT, config=CanaryConfig(verify_every=1, strict=True))
FAULTS = Faults(sources=pool_sources(make_pool(), LAYOUT), page_size=PAGE, vocabulary=1000)
TABLE = np.zeros((3, WIDTH), np.int32)
for _row, _pages in PAGES_OF.items():
    TABLE[_row] = (np.array(_pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def new_rows(batch: CanaryBatch) -> list[jax.Array]:
    """K and V of new tokens, which depend on token, position and layer."""
    base = jnp.asarray(batch.input_ids) * 64 + jnp.asarray(batch.positions)
    rows = base[:, None, None].astype(jnp.float32) + jnp.arange(2 * HEADS * DIM, dtype=jnp.float32).reshape(2 * HEADS, DIM) / 64
    return [rows * (layer + 1) for layer in range(LAYERS)]


def write(kv: list[jax.Array], batch: CanaryBatch) -> list[jax.Array]:
    """A scatter takes slot -1 for the last one, and drops what lies past the end."""
    slots, shape = jnp.asarray(batch.out_cache_loc), kv[0].shape
    flat = [layer.reshape(SLOTS, 2 * HEADS, DIM) for layer in kv]
    return [layer.at[slots].set(row, mode="drop").reshape(shape) for layer, row in zip(flat, new_rows(batch), strict=True)]


@jax.jit
def step(kv: Any, state: Any, batch: CanaryBatch, of_model: CanaryBatch) -> Any:
    kv, state, verdict = CANARY.head(kv, state, batch)
    kv = write(kv, of_model)
    return kv, *CANARY.tail(kv, state, batch, verdict, new_kv=new_rows(of_model), new_kv_layout=ROW_LAYOUT)


@functools.partial(jax.jit, static_argnames="kind")
def inject(kind: str, key: Any, kv: Any, batch: CanaryBatch) -> Any:
    return FAULTS.inject(kind, key, kv, batch, idle_slots=jnp.array([-1], jnp.int32))


class Engine:
    """Two requests that prefill and decode; the monitor is told the host's tables or not."""

    def __init__(self, *, told: bool) -> None:
        self.kv, self.state = make_pool(), CANARY.init()
        self.monitor, self.told = Monitor(CANARY, page_size=PAGE), told
        self.table, self.number = TABLE.copy(), 0
        self.lengths = {1: 0, 2: 0}

    def batch(self, new: dict[int, int]) -> CanaryBatch:
        rows, tokens, positions, slots = [1, 2, 0], [], [], []
        for row in (1, 2):
            for position in range(self.lengths[row], self.lengths[row] + new[row]):
                tokens.append(100 * row + position)
                positions.append(position)
                slots.append(self.table[row, position])
        fill = TOKENS - len(tokens)
        expected = np.array(tokens + [0] * fill, np.int32)
        return jax.tree.map(
            jnp.asarray,
            CanaryBatch(
                req_pool_indices=np.array(rows, np.int32),
                prefix_lens=np.array([self.lengths[1], self.lengths[2], 0], np.int32),
                extend_seq_lens=np.array([new[1], new[2], 0], np.int32),
                req_to_token=self.table,
                input_ids=expected,
                positions=np.array(positions + [0] * fill, np.int32),
                out_cache_loc=np.array(slots + [SLOTS] * fill, np.int32).clip(max=SLOTS),
                request_ids=np.array([IDS[row] for row in rows], np.int32),
                expected_input_tokens=expected,
                expected_input_positions=np.array(positions + [0] * fill, np.int32),
            ),
        )

    def run(self, new: dict[int, int], kind: FaultKind | None = None, seed: int = 0) -> Any:
        batch, done = self.batch(new), None
        of_model = batch
        if self.told:
            lengths = [self.lengths[row] for row in (1, 2)]
            after = [self.lengths[row] + new[row] for row in (1, 2)]
            self.monitor.record_batch(
                self.number, request_ids=[9001, 9002], tables=self.table[1:], lengths=after, prefix_lengths=lengths, page_size=1
            )
        key = jax.random.key(seed)
        if kind is not None and kind.when != "after":
            self.kv, changed, done = inject(kind.value, key, self.kv, batch)
            batch, of_model = (batch, changed) if kind.when == "model" else (changed, changed)
        self.kv, self.state, _, report = step(self.kv, self.state, batch, of_model)
        if kind is not None and kind.when == "after":
            self.kv, _, done = inject(kind.value, key, self.kv, batch)
        self.monitor.observe(report)
        self.number += 1
        for row in (1, 2):
            self.lengths[row] += new[row]
        return done

    def events(self) -> list[Event]:
        self.monitor.flush()
        assert self.monitor.health().failures == 0, self.monitor.health().last_failure
        return list(self.monitor.events)


ONE = {1: 1, 2: 1}


def play(kind: FaultKind | None, seed: int, *, told: bool) -> tuple[Engine, Any]:
    engine = Engine(told=told)
    engine.run({1: 7, 2: 6})
    engine.run(ONE)
    engine.run(ONE)
    done = engine.run(ONE, kind, seed)
    engine.run(ONE)
    engine.run(ONE)
    return engine, done


def test_without_a_fault_nothing_is_seen() -> None:
    engine, _ = play(None, 0, told=True)
    assert engine.events() == [] and engine.monitor.health().slots[CANARY.parts[0]] > 0


RIGHT = {
    FaultKind.FLIP_IN_USE: {Cause.BYTES_CHANGED},
    FaultKind.FLIP_AFTER_STAMP: {Cause.BYTES_CHANGED},
    FaultKind.SWAP_ENTRIES: {Cause.TABLE_ENTRY},
    FaultKind.SHIFT_POSITION: {Cause.WRONG_INPUT, Cause.SHIFTED},
    FaultKind.FOREIGN_TOKEN: {Cause.WRONG_INPUT},
    FaultKind.REUSE_EARLY: {Cause.OVERWRITTEN},
    FaultKind.ZERO_PAGE: {Cause.BYTES_CHANGED},
    FaultKind.SWAP_LAYERS: {Cause.BYTES_CHANGED},
    FaultKind.DROP_WRITE: {Cause.WRITE_NOT_LANDED},
    FaultKind.SCATTER_MINUS_ONE: {Cause.BYTES_CHANGED, Cause.WRITE_NOT_LANDED},
}


@pytest.mark.parametrize("told", [True, False], ids=["told", "bare"])
@pytest.mark.parametrize("kind", RIGHT)
def test_a_fault_is_seen_and_named(kind: FaultKind, told: bool) -> None:
    for seed in range(5):
        engine, done = play(kind, seed, told=told)
        assert bool(done.fired)
        events = engine.events()
        position, request = int(done.position), 9001 + int(done.batch_row)
        if kind is FaultKind.SCATTER_MINUS_ONE:
            strayed = [event for event in events if event.slot == int(done.other_slot) and event.request == request]
            assert strayed and strayed[0].cause is Cause.WRITE_NOT_LANDED, [event.line() for event in events]
            position, request = 7, 9002  # whose slot is the pool's last
        hit = [event for event in events if event.slot == int(done.slot) and event.position == position]
        assert hit, [event.line() for event in events]
        assert {event.request for event in hit} == {request}
        assert hit[0].cause in RIGHT[kind], hit[0].describe()
        if kind in (FaultKind.FLIP_IN_USE, FaultKind.FLIP_AFTER_STAMP, FaultKind.SWAP_LAYERS):
            assert hit[0].layer is not None and f"layer {int(done.layer)} " in hit[0].layer
        if kind is FaultKind.REUSE_EARLY:
            assert hit[0].writer == 9001 + int(done.other_row)
            # The request that strayed misses its token afterwards.
            events = [event for event in events if event.request == request]
        wrong = [event.describe() for event in events if event.cause not in RIGHT[kind] | {Cause.UNKNOWN}]
        assert not wrong, "\n".join(wrong)
