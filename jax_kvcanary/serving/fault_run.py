"""An engine in which faults are planted one at a time, and what became of each: seen or not, after how many steps, rightly named or not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary.causes import Cause
from jax_kvcanary.events import Event
from jax_kvcanary.faults import FaultKind, Faults
from jax_kvcanary.serving.batching import Bucket, StepInput
from jax_kvcanary.serving.engine import Engine
from jax_kvcanary.serving.steps import StepStatics, canary_batch

RIGHT_CAUSES: dict[FaultKind, frozenset[Cause]] = {
    FaultKind.FLIP_IN_USE: frozenset({Cause.BYTES_CHANGED}),
    FaultKind.FLIP_IDLE: frozenset({Cause.BYTES_CHANGED}),
    FaultKind.FLIP_AFTER_STAMP: frozenset({Cause.BYTES_CHANGED}),
    FaultKind.ZERO_PAGE: frozenset({Cause.BYTES_CHANGED}),
    FaultKind.SWAP_LAYERS: frozenset({Cause.BYTES_CHANGED}),
    FaultKind.SWAP_ENTRIES: frozenset({Cause.TABLE_ENTRY}),
    FaultKind.SHIFT_POSITION: frozenset({Cause.WRONG_INPUT, Cause.SHIFTED}),
    FaultKind.FOREIGN_TOKEN: frozenset({Cause.WRONG_INPUT}),
    FaultKind.REUSE_EARLY: frozenset({Cause.OVERWRITTEN}),
    FaultKind.DROP_WRITE: frozenset({Cause.WRITE_NOT_LANDED}),
    FaultKind.SCATTER_MINUS_ONE: frozenset({Cause.WRITE_NOT_LANDED}),
}
"""What the cause of a planted fault is, in the words of a report."""

_FROM_BATCH = ("req_to_token", "input_ids", "positions", "out_cache_loc")


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault that was planted. step: the canary's. request, other_request: engine ids, 0 if there is none. As :class:`Injection` else."""

    kind: FaultKind
    step: int
    request: int
    other_request: int
    position: int
    slot: int
    other_slot: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a planted fault.

    steps: canary steps until the first event, None if there was none. event: that event. named: it names the request that was hit (or,
    for idle KV, the slot). cause_right: its cause is one of :data:`RIGHT_CAUSES`.
    """

    planted: Planted
    steps: int | None
    event: Event | None
    named: bool
    cause_right: bool

    @property
    def right(self) -> bool:
        """Seen, and named in all."""
        return self.event is not None and self.named and self.cause_right


class FaultyEngine(Engine):
    """An engine that does one fault on purpose when it is told to; as any other until then. It decodes one step a call."""

    def __init__(self, *args: Any, faults: Faults, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.canary is None:
            raise ValueError("a FaultyEngine needs a canary")
        self.planted: list[Planted] = []
        self._wanted: tuple[FaultKind, jax.Array] | None = None
        self._statics = StepStatics.of(self.config, self.engine_config, self.canary)
        self._inject = _injection(faults)

    def plant(self, kind: FaultKind, *, seed: int) -> None:
        """Do this fault in the next step in which there is something to do it to."""
        self._wanted = (kind, jax.random.key(seed))

    def wipe_quarantine(self) -> None:
        """Zero the pages of the quarantine that nobody holds, forget their records, and use them again."""
        pages = [page for page in sorted(self.allocator.quarantined) if self.allocator.refcounts[page] == 0]
        assert self.canary is not None
        for page in pages:
            self.device.pool = _wipe(self.device.pool, page)
            self.device.canary_state = self.canary.reset(
                self.device.canary_state, slots=np.array([page], np.int32), page_size=self.engine_config.page_size
            )
        self.allocator.end_quarantine()

    def idle_slots(self, capacity: int) -> np.ndarray:
        """Slots of cached pages that no running request reads, int32 ``[capacity]``, padded with -1."""
        read = {page for request in self.scheduler.running for page in request.pages}
        size = self.engine_config.page_size
        slots = [page * size + i for page in self.cache.pages() if page not in read for i in range(size)][:capacity]
        return np.array(slots + [-1] * (capacity - len(slots)), np.int32)

    def _launch(self, batch: StepInput, bucket: Bucket, *, is_decode: bool) -> tuple[dict[str, Any], Any]:
        if self._wanted is None or not bool(batch.armed):
            return super()._launch(batch, bucket, is_decode=is_decode)
        kind, key = self._wanted
        key, mine = jax.random.split(key)
        self._wanted = (kind, key)
        marks = canary_batch(self._statics, jax.tree.map(jnp.asarray, batch))
        if kind.when == "after":
            results = super()._launch(batch, bucket, is_decode=is_decode)
            self._do(kind, mine, marks, batch)
            return results
        changed = self._do(kind, mine, marks, batch)
        if changed is not None:
            if kind.when == "model":
                batch = dataclasses.replace(batch, model_cache_loc=changed.out_cache_loc)
            else:
                batch = dataclasses.replace(batch, **{name: getattr(changed, name) for name in _FROM_BATCH})
        return super()._launch(batch, bucket, is_decode=is_decode)

    def _do(self, kind: FaultKind, key: jax.Array, marks: Any, batch: StepInput) -> Any:
        """The canary's batch after the fault, or None where nothing could be done."""
        idle = self.idle_slots(self.engine_config.num_pages * self.engine_config.page_size)
        pool, changed, injection = self._inject(kind, key, self.device.pool, marks, jnp.asarray(idle))
        done = jax.device_get(injection)
        if not bool(done.fired):
            return None
        ids = np.asarray(batch.request_ids).astype(np.uint64)

        def request(row: Any) -> int:
            return 0 if int(row) < 0 else int(ids[int(row), 0] | ids[int(row), 1] << np.uint64(32))

        if kind.when != "model":
            self.device.pool = tuple(pool)
        self.planted.append(
            Planted(
                kind=kind,
                step=self.canary_step,
                request=request(done.batch_row),
                other_request=request(done.other_row),
                position=int(done.position),
                slot=int(done.slot),
                other_slot=int(done.other_slot),
                layer=int(done.layer),
            )
        )
        self._wanted = None
        return changed


@functools.partial(jax.jit, donate_argnums=0)
def _wipe(pool: Any, page: jax.Array) -> Any:
    return tuple(layer.at[page].set(0) for layer in pool)


@functools.lru_cache(maxsize=8)
def _injection(faults: Faults) -> Callable[..., Any]:
    def inject(kind: FaultKind, key: jax.Array, pool: Any, batch: Any, idle: jax.Array) -> Any:
        return faults.inject(kind, key, pool, batch, idle_slots=idle)

    return jax.jit(inject, static_argnums=0)


def judge(planted: Planted, events: Sequence[Event]) -> Outcome:
    """What the monitor's events say of a fault: the first root event on its slots or requests, that of the request hit before others."""
    roots = [event for event in events if event.kind == "violation" and event.root is None and event.step >= planted.step]
    requests = {planted.request, planted.other_request} - {0}
    slots = {planted.slot, planted.other_slot} - {-1}
    mine = [event for event in roots if event.request in requests or event.slot in slots]
    if not mine:
        return Outcome(planted, None, None, named=False, cause_right=False)
    hit = planted.request
    at_once = [event for event in mine if event.step == mine[0].step]
    first = next((event for event in at_once if hit and event.request == hit), at_once[0])
    named = first.slot in slots if hit == 0 else first.request == hit
    return Outcome(
        planted,
        first.step - planted.step + (0 if planted.kind.when != "after" else -1),
        first,
        named=named,
        cause_right=first.cause in RIGHT_CAUSES[planted.kind],
    )
