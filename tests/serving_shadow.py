"""A stand-in canary for tests of the example engine: token, position, owner and a sum of the bytes of every slot, in plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary.config import CanaryConfig


@dataclasses.dataclass
class ShadowVerdict:
    """As a canary's verdict."""

    verdict: Any
    first_bad_position: Any
    first_bad_slot: Any
    bad_slots: Any


jax.tree_util.register_dataclass(ShadowVerdict, data_fields=[f.name for f in dataclasses.fields(ShadowVerdict)], meta_fields=[])


def byte_sums(kv: Any) -> jax.Array:
    """uint32 ``[slots]``: what the bytes of all layers of a slot add up to, each layer weighted so that a swap shows."""
    total = jnp.uint32(0)
    for i, layer in enumerate(kv):
        words = jax.lax.bitcast_convert_type(layer, jnp.uint32).reshape(layer.shape[0] * layer.shape[1], -1)
        weights = jnp.arange(1, words.shape[1] + 1, dtype=jnp.uint32) * jnp.uint32(2 * i + 1)
        total = total + jnp.sum(words * weights, axis=1, dtype=jnp.uint32)
    return total


class ShadowCanary:
    """Strict: a verified slot must have been stamped or moved there, and must not have been released."""

    copy_page_size = 1
    config = CanaryConfig()

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def init(self) -> dict[str, jax.Array]:
        state = {name: jnp.zeros(self.slots, jnp.int32) for name in ("token", "free")}
        state |= {"position": jnp.full(self.slots, -1, jnp.int32), "bytes": jnp.zeros(self.slots, jnp.uint32)}
        names = ("checked", "stamped", "copied", "released", "bad")
        return state | {name: jnp.int32(0) for name in names}

    def head(self, kv: Any, state: Any, batch: Any) -> Any:
        state = self._moved(state, batch)
        rows = batch.req_pool_indices
        slots = batch.req_to_token[rows]  # [bs, context]
        column = jnp.arange(slots.shape[1])
        inside = (column < batch.prefix_lens[:, None]) & (rows > 0)[:, None] & batch.armed
        good = (state["token"][slots] == batch.expected_tokens[rows]) & (state["position"][slots] == column)
        good &= (state["bytes"] == byte_sums(kv))[slots] & (state["free"][slots] == 0) & (column < batch.expected_valid_lens[:, None])
        wrong = inside & ~good
        bad = jnp.any(wrong, axis=1)
        first = jnp.argmax(wrong, axis=1)
        first_slot = slots[jnp.arange(rows.shape[0]), first]
        verdict = ShadowVerdict(
            verdict=jnp.where(bad, 2, (rows > 0) & batch.armed).astype(jnp.int32),
            first_bad_position=jnp.where(bad, first, -1).astype(jnp.int32),
            first_bad_slot=jnp.where(bad, first_slot, -1).astype(jnp.int32),
            bad_slots=jnp.where(bad, first_slot, -1).astype(jnp.int32),
        )
        state = state | {"checked": state["checked"] + jnp.sum(inside), "bad": state["bad"] + jnp.sum(wrong)}
        return kv, state, verdict

    def tail(self, kv: Any, state: Any, batch: Any, verdict: Any) -> Any:
        count = jnp.sum(jnp.where((batch.req_pool_indices > 0) & batch.armed, batch.extend_seq_lens, 0))
        slots = jnp.where(jnp.arange(batch.out_cache_loc.shape[0]) < count, batch.out_cache_loc, self.slots)
        new = {
            "token": batch.input_ids,
            "position": batch.positions,
            "free": jnp.zeros_like(slots),
            "bytes": byte_sums(kv).at[slots].get(mode="fill", fill_value=0),
        }
        state = state | {name: state[name].at[slots].set(value, mode="drop") for name, value in new.items()}
        state["stamped"] = state["stamped"] + count
        return state, verdict, {name: state[name] for name in ("checked", "stamped", "copied", "released", "bad")}

    def release(self, state: Any, *, slots: Any, page_size: int) -> Any:
        return self._released(state, jnp.asarray(_expand(np.asarray(slots), page_size)))

    def export(self, state: Any, *, slots: Any, page_size: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(state[name])[_expand(slots, page_size)] for name in ("token", "position", "free", "bytes")}

    def import_(self, state: Any, kv: Any, exported: Any, *, slots: Any, page_size: int) -> Any:
        at = _expand(slots, page_size)
        state = state | {name: state[name].at[at].set(value) for name, value in exported.items()}
        return state, np.asarray(byte_sums(kv))[at] != exported["bytes"]

    def _moved(self, state: Any, batch: Any) -> Any:
        state = self._released(state, batch.released_slots)
        dst = jnp.where(batch.copy_dst < 0, self.slots, batch.copy_dst)
        moved = {name: state[name].at[dst].set(state[name][batch.copy_src], mode="drop") for name in ("token", "position", "free", "bytes")}
        return state | moved | {"copied": state["copied"] + jnp.sum(batch.copy_dst >= 0)}

    def _released(self, state: Any, slots: Any) -> Any:
        free = state["free"].at[jnp.where(slots < 0, self.slots, slots)].set(1, mode="drop")
        return state | {"free": free, "released": state["released"] + jnp.sum(slots >= 0)}


def _expand(pages: np.ndarray, page_size: int) -> np.ndarray:
    slots = pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)
    return np.where(pages[:, None] < 0, -1, slots).reshape(-1)


class ShadowMonitor:
    """Keeps the newest report and counts calls."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.services = 0

    def observe(self, report: Any) -> list[Any]:
        self.reports = [report]
        return []

    def service(self, state: Any) -> Any:
        self.services += 1
        return state

    def counts(self) -> dict[str, int]:
        return {name: int(value) for name, value in self.reports[-1].items()}
