"""The canary in jitted serving code: verify at the head of a step, stamp at its tail, report to the host."""

from __future__ import annotations

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import moves, ops, report_header, spec, validation
from jax_kvcanary.batch import CanaryBatch, optional_pairs, slots_at, token_places
from jax_kvcanary.canary_state import COUNTERS, CanaryReport, CanaryState, CanaryVerdict, SweepPortion
from jax_kvcanary.capacities import CanaryLaunchCapacities
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.digest import append_rows
from jax_kvcanary.groups import TaggedLog, translate_slots
from jax_kvcanary.layouts import Layout, PoolSources, pool_sources
from jax_kvcanary.pure import words
from jax_kvcanary.pure.words import U64
from jax_kvcanary.report_header import CONTEXT_WORDS
from jax_kvcanary.sharding import pack_verdicts, unpack_verdicts
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.spec import CanaryLaunchTag, Column, RealKvHashMode, RecordFlag, Verdict
from jax_kvcanary.state import Array, Plan, VerifyPlan, VerifyResult, ViolationLog, WritePlan, allocate_records, allocate_source_tags
from jax_kvcanary.tables import ResolvedTable, resolve_table

logger = logging.getLogger(__name__)

_STEP, _EPOCH, _UNATTESTED, _UNATTESTED_HIGH, _ARMED_STEPS, _BATCH_SIZE = range(len(COUNTERS))
_FULL_TAGS = {"head": CanaryLaunchTag.HEAD_K_FULL, "tail": CanaryLaunchTag.TAIL_K_FULL, "sweep": CanaryLaunchTag.SWEEP_K_FULL}
_SWA_TAGS = {"head": CanaryLaunchTag.HEAD_K_SWA, "tail": CanaryLaunchTag.TAIL_K_SWA, "sweep": CanaryLaunchTag.SWEEP_K_SWA}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Layers that share slots: full attention, or a sliding window with a pool of its own. Static.

    name: for reports. layers: layer numbers in the pool; None: all. swa_window_size: tokens, 0 is full attention.
    needs_mapping: whether slots go through ``full_to_swa_index_mapping``; None: if there is a window.
    padding_slot: of this group's pool; "same": the canary's.
    """

    name: str = "full"
    layers: tuple[int, ...] | None = None
    swa_window_size: int = 0
    needs_mapping: bool | None = None
    padding_slot: int | str | None = "same"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """After how many steps every part of a running request's prefix was checked. Units: steps; 0 is never.

    records: chain, position, token and bounds. leading_bytes: the leading bytes of every source. all_bytes: all bytes of all layers.
    """

    records: int
    leading_bytes: int
    all_bytes: int

    def describe(self) -> str:
        """In words.

        Example:
          >>> Coverage(1, 32, 64).describe()
          'records every step, leading bytes of every layer within 32 steps, all bytes within 64 steps'
        """

        def within(steps: int) -> str:
            return "never" if steps == 0 else "every step" if steps == 1 else f"within {steps} steps"

        return (
            f"records {within(self.records)}, leading bytes of every layer {within(self.leading_bytes)}, all bytes {within(self.all_bytes)}"
        )


@dataclasses.dataclass(frozen=True)
class _Group:
    """A group as the launches take it: first the leading bytes of every source, then all bytes of it."""

    name: str
    window: int
    mapped: bool
    padding_slot: int | None
    slots: int
    pool: PoolSources
    pool_layers: tuple[int, ...] | None
    sources: tuple[RealKvSource, ...]
    labels: tuple[str, ...]
    leading: int
    sweeps: bool

    @property
    def tags(self) -> dict[str, CanaryLaunchTag]:
        """Launch tags of head, tail and, where there are sweeps, sweep."""
        every = _SWA_TAGS if self.mapped else _FULL_TAGS
        return {launch: tag for launch, tag in every.items() if launch != "sweep" or self.sweeps}


@dataclasses.dataclass(frozen=True, init=False)
class Canary:
    """Checks a paged KV pool inside a jitted step. Static and hashable: close over it, or pass it as a static argument.

    One record a slot and group covers K and V of all its layers. :meth:`head` verifies the prefix of every running request,
    :meth:`tail` stamps the new tokens with their bytes and hands out a report; :meth:`guard` does both around a forward function.

    Args:
      pool: the KV pool: arrays, or shapes and dtypes; only looked at. As in :func:`pool_sources`, also ``layout``, ``getter``, ``setter``.
      layout: how its axes are named, as in :func:`pool_sources`; a str such as ``"page slot head dim"`` will do for one :class:`Layout`.
      config: what is checked, and how often.
      groups: layers that share slots; the default is one group of all.
      name: of this canary, for log lines and metrics.
      padding_slot: slot of dummy writes, None: there is none. padding_req: table row of padding requests, None: there is none.
      reserved_slots: leading slots that never hold a token of a request; what is written there is not stamped.
      copy_page_size: unit of ``copy_src``, ``copy_dst`` and ``released_slots`` of a batch: 1 counts slots, else pages of that many.
      kv_token_id_vs_position_offset: 1 for a draft pool, see :func:`plan`.
      capacities: the largest batch that is served; None does not limit it.

    Raises:
      ValueError, TypeError: a pool, layout or value that breaks a rule.

    Example:
      >>> pool = [jnp.zeros((8, 4, 2, 16), jnp.float32)] * 2
      >>> canary = Canary(pool, Layout.from_axes("page slot head dim", interleaved="head"))
      >>> state = canary.init()
      >>> batch = CanaryBatch(
      ...     req_pool_indices=jnp.array([1]), prefix_lens=jnp.array([0]), extend_seq_lens=jnp.array([3]),
      ...     req_to_token=jnp.array([[0, 0, 0, 0], [4, 5, 6, 7]]), input_ids=jnp.array([11, 12, 13]),
      ... )
      >>> pool, state, verdict = canary.head(pool, state, batch)
      >>> state, verdict, report = canary.tail(pool, state, batch, verdict)
      >>> Verdict(int(verdict.verdict[0]))
      <Verdict.OK: 1>
    """

    name: str
    config: CanaryConfig
    padding_req: int | None
    reserved_slots: int
    copy_page_size: int
    kv_token_id_vs_position_offset: int
    capacities: CanaryLaunchCapacities | None
    key: int
    _groups: tuple[_Group, ...]

    def __init__(
        self,
        pool: Any,
        layout: Any,
        *,
        config: CanaryConfig | None = None,
        groups: Sequence[PoolGroup] = (PoolGroup(),),
        name: str = "kv",
        padding_slot: int | None = 0,
        padding_req: int | None = 0,
        reserved_slots: int = 0,
        copy_page_size: int = 1,
        kv_token_id_vs_position_offset: int = 0,
        capacities: CanaryLaunchCapacities | None = None,
        getter: Callable[[Any], Any] | None = None,
        setter: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        config = CanaryConfig() if config is None else config
        if not isinstance(config, CanaryConfig):
            raise validation.type_error(f"config must be a CanaryConfig, got {type(config).__name__}")
        if not isinstance(name, str) or not name:
            raise validation.type_error(f"name must be a str that is not empty, got {name!r}")
        padding = validation.optional_slot("padding_slot", padding_slot)
        row = validation.optional_slot("padding_req", padding_req)
        offset = validation.static_int("kv_token_id_vs_position_offset", kv_token_id_vs_position_offset)
        layout = _as_layout(layout)
        made = tuple(
            _make_group(pool, layout, config, group, padding[1] if padding[0] else None, getter, setter) for group in _distinct(groups)
        )
        fields: dict[str, Any] = {
            "name": name,
            "config": config,
            "padding_req": row[1] if row[0] else None,
            "reserved_slots": validation.static_capacity("reserved_slots", reserved_slots),
            "copy_page_size": validation.static_int("copy_page_size", copy_page_size, minimum=1),
            "kv_token_id_vs_position_offset": offset,
            "capacities": capacities,
            "_groups": made,
        }
        text = repr((name, config, [(g.name, g.window, g.mapped, g.slots, g.labels, g.sources) for g in made]))
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        object.__setattr__(self, "key", zlib.crc32(text.encode()))
        if self.enabled:
            logger.info("kvcanary=ready name=%s coverage: %s", name, self.coverage().describe())

    # ------------------------------------------------------------------------------------------ facts

    @property
    def enabled(self) -> bool:
        """Whether anything is checked: the mode is not "off"."""
        return self.config.mode != "off"

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(group.name for group in self._groups)

    @property
    def parts(self) -> tuple[CanaryLaunchTag, ...]:
        """Launch tags that have a part of the log, ascending: the order of a report's parts."""
        return tuple(sorted(tag for group in self._groups for tag in group.tags.values()))

    def group_of_part(self, tag: CanaryLaunchTag) -> str:
        """Name of the group that a launch tag belongs to."""
        return self._group_of(tag).name

    def source_labels(self, tag: CanaryLaunchTag) -> tuple[str, ...]:
        """Names of a group's sources as violations number them: "layer 3 K (leading bytes)" and "layer 3 K"."""
        return self._group_of(tag).labels

    @property
    def page_size(self) -> int:
        """Slots a page of the pool; 1 where it has no pages."""
        return max((source.page_size for group in self._groups for source in group.pool.sources), default=1)

    def slots(self, group: str | None = None) -> int:
        """Slots of a group's pool."""
        return self._named(group).slots

    def coverage(self) -> Coverage:
        """After how many steps everything in a running prefix was checked."""
        config = self.config
        most = max(group.leading for group in self._groups)
        per_step = self._leading_per_step(next(group for group in self._groups if group.leading == most))
        all_bytes = config.verify_every if config.real_kv == "all" else 0
        leading = -(-most // per_step) if per_step else 0
        return Coverage(records=1, leading_bytes=leading or all_bytes, all_bytes=all_bytes)

    def state_bytes(self) -> int:
        """Bytes of the state on the device, from shapes alone: known before the pool is allocated."""
        if not self.enabled:
            return 0
        shapes = jax.eval_shape(self.init)
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    def init(self) -> CanaryState:
        """A fresh state: nothing is stamped. One array a field, so that it can be donated."""
        if not self.enabled:
            return CanaryState(
                key=self.key, records={}, source_tags={}, log=TaggedLog(tags=(), parts=()), contexts=(), seen=None, counters=None
            )
        rows = self.config.ring_capacity
        return CanaryState(
            key=self.key,
            records={group.name: allocate_records(slots=group.slots, provenance=True) for group in self._groups},
            source_tags={group.name: allocate_source_tags(slots=group.slots, sources=len(group.sources)) for group in self._groups},
            log=TaggedLog.of({tag: ViolationLog.allocate(ring_capacity=rows) for tag in self.parts}),
            contexts=tuple(jnp.zeros((rows, CONTEXT_WORDS), jnp.uint32) for _ in self.parts),
            seen=jnp.zeros((len(self.parts),), jnp.int32),
            counters=jnp.zeros((len(COUNTERS),), jnp.uint32),
        )

    # ------------------------------------------------------------------------------------------ the step

    def head(self, kv: Any, state: CanaryState, batch: CanaryBatch) -> tuple[Any, CanaryState, CanaryVerdict | None]:
        """Take in announced moves and verify the prefix of every request, before the forward pass.

        **Use the returned pool and state: the pool ties the check to the step, so that nothing overwrites what is being checked.**

        Args:
          kv: the pool, as it was described.
          state: of :meth:`init`, or of the step before.
          batch: the step.

        Returns:
          The pool, the state, and the verdict (None with mode "off").

        Raises:
          ValueError: a pool of other shapes, the state of another canary, a batch over capacity.
        """
        self._check_state(state)
        if not self.enabled:
            return kv, state, None
        step = self._step(batch, state)
        state = self._take_in(state, batch)
        packed, unattested = step.nothing(), jnp.zeros((step.bs,), jnp.int32)
        before = state.log
        if self.config.checks in ("head", "both"):
            for group in self._groups:
                kv, state, found = self._verify(kv, state, step, group, "head", step.prefix, passing=True)
                packed = jnp.maximum(packed, found[0])
                unattested = unattested + found[1]
                if self.config.adopt_capacity:
                    state = self._adopt_prefixes(kv, state, step, group, found[1], found[2])
            state = self._capture(state, step, "head")
        return kv, state, self._verdict(step, state, before, packed, unattested, None)

    def tail(
        self,
        kv: Any,
        state: CanaryState,
        batch: CanaryBatch,
        verdict: CanaryVerdict | None,
        *,
        new_kv: Any = None,
        new_kv_layout: Any = None,
    ) -> tuple[CanaryState, CanaryVerdict | None, CanaryReport | None]:
        """Stamp the tokens that the step wrote, with their bytes, after the forward pass; the pool is only read.

        **Use the returned state, or jit removes the stamps.**

        Args:
          kv: the pool after the forward pass.
          state, batch, verdict: as :meth:`head` returned and took them.
          new_kv: the K and V rows that the step handed to its writer, ``[tokens]`` slots in the order of ``input_ids`` and in the pool's
            dtype (after quantisation): what does not stand in the pool now is a violation, a write that did not land.
          new_kv_layout: how its axes are named, such as ``"slot head dim"``; static.

        Returns:
          The state for the next step, the verdict with what the tail found, and the report for the host (both None with mode "off").
        """
        self._check_state(state)
        if not self.enabled:
            return state, None, None
        if verdict is None:
            raise validation.type_error("verdict must be what head returned, got None")
        step = self._step(batch, state)
        before = state.log
        packed = pack_verdicts(verdict.verdict, verdict.first_bad_position)
        for group in self._groups:
            state, bad = self._write(kv, state, step, group)
            packed = jnp.maximum(packed, pack_verdicts(bad, jnp.full_like(bad, -1)))
            if new_kv is not None:
                state, bad = self._landed(state, step, group, new_kv, new_kv_layout)
                packed = jnp.maximum(packed, bad)
        unattested = verdict.unattested
        if self.config.checks in ("tail", "both"):
            for group in self._groups:
                _, state, found = self._verify(kv, state, step, group, "tail", step.prefix + step.extend, passing=False)
                packed = jnp.maximum(packed, found[0])
                unattested = jnp.maximum(unattested, found[1])
        state = self._capture(state, step, "tail")
        verdict = self._verdict(step, state, before, packed, unattested, verdict)
        state = dataclasses.replace(state, counters=self._count(state, step, verdict))
        return state, verdict, self.report(state)

    def guard(self, forward: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any, CanaryState, Any, Any]]:
        """``forward(kv, *args, **kwargs) -> (out, kv)`` with the canary around it.

        Returns:
          ``guarded(kv, state, batch, *args, **kwargs) -> (out, kv, state, verdict, report)``, to be jitted by the caller.

        Example:
          >>> pool = [jnp.zeros((8, 4, 2, 16), jnp.float32)]
          >>> canary = Canary(pool, Layout.from_axes("page slot head dim", interleaved="head"))
          >>> step = jax.jit(canary.guard(lambda kv, tokens: (tokens + 1, kv)))
          >>> batch = CanaryBatch(
          ...     req_pool_indices=jnp.array([1]), prefix_lens=jnp.array([0]), extend_seq_lens=jnp.array([1]),
          ...     req_to_token=jnp.array([[0], [4]]), input_ids=jnp.array([11]),
          ... )
          >>> out, pool, state, verdict, report = step(pool, canary.init(), batch, batch.input_ids)
          >>> out.tolist(), verdict.verdict.tolist()
          ([12], [1])
        """

        @functools.wraps(forward)
        def guarded(kv: Any, state: CanaryState, batch: CanaryBatch, *args: Any, **kwargs: Any) -> Any:
            kv, state, verdict = self.head(kv, state, batch)
            out, kv = forward(kv, *args, **kwargs)
            state, verdict, report = self.tail(kv, state, batch, verdict)
            return out, kv, state, verdict, report

        return guarded

    def report(self, state: CanaryState) -> CanaryReport:
        """The report of a state: copies, which stay valid when the state is donated."""
        parts = [state.log[tag] for tag in self.parts]
        counters = state.counters
        assert counters is not None
        fixed = jnp.stack(
            [
                jnp.uint32(report_header.HEADER_MAGIC),
                jnp.uint32(self.key),
                counters[_STEP],
                counters[_EPOCH],
                counters[_UNATTESTED],
                counters[_UNATTESTED_HIGH],
                counters[_ARMED_STEPS],
                counters[_BATCH_SIZE],
            ]
        )
        of_parts = [
            jnp.concatenate(
                [
                    jax.lax.bitcast_convert_type(jnp.asarray(log.write_index), jnp.uint32),
                    jnp.asarray(log.slot_run_counter)[tag],
                    jnp.asarray(log.kernel_run_counter)[tag],
                    jnp.zeros((1,), jnp.uint32),
                ]
            )
            for tag, log in zip(self.parts, parts, strict=True)
        ]
        return CanaryReport(
            header=jnp.concatenate([fixed, *of_parts]),
            rows=jnp.stack([log.ring for log in parts]),
            context=jnp.stack(state.contexts),
        )

    # ------------------------------------------------------------------------------------------ between steps

    def clear_log(self, state: CanaryState) -> CanaryState:
        """Empty the rings and begin an epoch, once the host has read what is in them. Counters go on."""
        self._check_state(state)
        return state if not self.enabled else _clear_log(state)

    def copy(self, state: CanaryState, *, src: Array, dst: Array, page_size: int | None = None, group: str | None = None) -> CanaryState:
        """Records and tags follow KV that the engine copies from ``src`` to ``dst``: see :func:`copy_records`."""
        return self._moved(state, group, page_size, lambda size, **held: moves.copy_records(src=src, dst=dst, page_size=size, **held))

    def permute(self, state: CanaryState, *, permutation: Array, page_size: int | None = None, group: str | None = None) -> CanaryState:
        """Records and tags follow a pool that is reordered as ``pool[permutation]``: see :func:`permute_records`."""
        return self._moved(
            state, group, page_size, lambda size, **held: moves.permute_records(permutation=permutation, page_size=size, **held)
        )

    def reset(self, state: CanaryState, *, slots: Array, page_size: int | None = None, group: str | None = None) -> CanaryState:
        """Forget what was stamped in some slots: see :func:`reset_records`."""
        return self._moved(state, group, page_size, lambda size, **held: moves.reset_records(slots=slots, page_size=size, **held))

    def release(self, state: CanaryState, *, slots: Array, page_size: int | None = None, group: str | None = None) -> CanaryState:
        """Flag slots as given back; optional. Forgetting it can cost an explanation, never an alarm."""
        self._check_state(state)
        if not self.enabled:
            return state
        held = self._named(group)
        size = self.copy_page_size if page_size is None else page_size
        result = moves.release_records(records=state.records[held.name], slots=slots, page_size=size)
        return dataclasses.replace(state, records={**state.records, held.name: result.records})

    def export(self, state: CanaryState, *, slots: Array, page_size: int | None = None, group: str | None = None) -> dict[str, np.ndarray]:
        """Records and tags that travel with bytes which leave the pool: see :func:`export_records`. Waits for the device."""
        self._check_state(state)
        if not self.enabled:
            return {}
        held = self._named(group)
        size = self.copy_page_size if page_size is None else page_size
        return moves.export_records(records=state.records[held.name], source_tags=state.source_tags[held.name], slots=slots, page_size=size)

    def import_(
        self,
        state: CanaryState,
        kv: Any,
        exported: Mapping[str, Any],
        *,
        slots: Array,
        page_size: int | None = None,
        group: str | None = None,
    ) -> tuple[CanaryState, jax.Array]:
        """Take in records and tags that came with bytes, and check them there; nothing is stamped anew.

        Returns:
          The state, and a status per slot, int32: 0, or ``MoveStatus`` and ``FailReason`` bits, see :func:`import_records`.
        """
        self._check_state(state)
        size = self.copy_page_size if page_size is None else page_size
        if not self.enabled:
            return state, jnp.zeros((validation.shape_of(slots)[0] * size,), jnp.int32)
        held = self._named(group)
        reads = self._mode != RealKvHashMode.NONE
        result = moves.import_records(
            records=state.records[held.name],
            source_tags=state.source_tags[held.name],
            exported=exported,
            slots=slots,
            page_size=size,
            real_kv_hash_mode=self._mode,
            real_kv_sources=held.sources if reads else (),
            real_kv_buffers=held.pool.buffers(kv) if reads else (),
            implementation=self.config.implementation,
        )
        return self._with(state, held, result.records, result.source_tags), result.status

    def adopt(self, state: CanaryState, kv: Any, batch: CanaryBatch) -> CanaryState:
        """Stamp what is there as the tail of ``batch`` would, flagged ADOPTED: for KV whose origin nobody recorded."""
        self._check_state(state)
        if not self.enabled:
            return state
        step = self._step(batch, state)
        for group in self._groups:
            state, _ = self._write(kv, state, step, group, flags=RecordFlag.ADOPTED)
        return state

    def sweep(self, kv: Any, state: CanaryState, portion: SweepPortion, *, group: str | None = None) -> tuple[CanaryState, jax.Array]:
        """Verify idle cached slots with all their bytes: in a step, or between steps.

        **Use the returned state, or jit removes the check.** Call it where nothing writes the pool between it and the step.

        Args:
          kv: the pool, only read.
          state: of the canary, whose config has a ``sweep_capacity``.
          portion: at most that many slots.
          group: whose slots they are.

        Returns:
          The state, and int32 ``[n]`` a :class:`Verdict` of each entry; 0 for padding.
        """
        self._check_state(state)
        size = validation.shape_of(portion.slots)[0]
        if not self.enabled:
            return state, jnp.zeros((size,), jnp.int32)
        if size > self.config.sweep_capacity:
            raise validation.error(f"portion has {size} slots, the config's sweep_capacity is {self.config.sweep_capacity}")
        held = self._named(group)
        tag, reads = held.tags["sweep"], self._mode != RealKvHashMode.NONE
        slots = validation.int_array("portion.slots", portion.slots, (size,), pairs=False)
        used = slots != -1
        number = jnp.cumsum(used, dtype=jnp.int32)
        order = jnp.argsort(~used, stable=True)  # padding last, so that a count tells how many there are
        every = jnp.arange(size, dtype=jnp.int32)
        fields = {
            name: validation.int_array(f"portion.{name}", getattr(portion, name), (size,), pairs=False)[order]
            for name in ("positions", "prev_slots", "tokens")
        }
        spaces = optional_pairs(portion.namespaces)
        assert state.counters is not None
        result = ops.verify(
            records=state.records[held.name],
            log=state.log[tag],
            plan=VerifyPlan(
                slot_indices=slots[order],
                expected_tokens=fields["tokens"],
                expected_positions=fields["positions"],
                prev_slot_indices=fields["prev_slots"],
                batch_rows=every,
                num_valid=number[-1:] if size else jnp.zeros((1,), jnp.int32),
                enable=jnp.ones((1,), jnp.int32),
                row_status=jnp.zeros((size,), jnp.int32),
                req_pool_indices=jnp.full((size,), -1, jnp.int32),
            ),
            launch_tag=tag,
            real_kv_hash_mode=self._mode,
            real_kv_sources=held.sources if reads else (),
            real_kv_buffers=held.pool.buffers(kv) if reads else (),
            source_tags=state.source_tags[held.name] if reads else None,
            check_verify_expected_token=True,
            namespaces=None if spaces is None else spaces[order],
            step=jnp.asarray(state.counters)[_STEP],
            padding_slot=held.padding_slot,
            implementation=self.config.implementation,
            strict=self.config.strict,
        )
        state = dataclasses.replace(state, log=state.log.replace(tag, result.log))
        verdicts = jnp.zeros((size,), jnp.int32).at[order].set(jnp.asarray(result.verdict))
        return self._capture_sweep(state, held), verdicts

    # ------------------------------------------------------------------------------------------ launches

    @property
    def _mode(self) -> RealKvHashMode:
        return RealKvHashMode.NONE if self.config.real_kv == "none" else RealKvHashMode.ALL

    def _leading_per_step(self, group: _Group) -> int:
        """Sources whose leading bytes are checked in a step."""
        layers = len(set(group.pool.source_layers))
        if not group.leading or not layers:
            return 0
        return min(group.leading, self.config.partial_layers * -(-group.leading // layers))

    def _verify(
        self, kv: Any, state: CanaryState, step: _Step, group: _Group, launch: str, lens: jax.Array, *, passing: bool
    ) -> tuple[Any, CanaryState, tuple[jax.Array, jax.Array, jax.Array]]:
        """All launches of a group: records and leading bytes of a few layers, then all bytes of some positions."""
        config, tag = self.config, group.tags[launch]
        passes: list[tuple[int, tuple[Any, int] | None]] = []
        per_step, all_sources = self._leading_per_step(group), len(group.sources) - group.leading
        if config.verify_every == 1 and all_sources:
            passes = [(1, None)]
        else:
            start = (step.number * np.uint32(max(per_step, 1))) % np.uint32(max(group.leading, 1))
            # Records stamped with bytes are never compared in mode NONE: a window of no source reads none and compares none.
            passes = [(1, (start.astype(jnp.int32), per_step))]
            if config.verify_every and all_sources:
                passes.append((config.verify_every, (group.leading, all_sources)))
        buffers = group.pool.buffers(kv) if self._mode != RealKvHashMode.NONE else ()
        packed, unattested, first = step.nothing(), jnp.zeros((step.bs,), jnp.int32), jnp.full((step.bs,), -1, jnp.int32)
        expected: dict[str, Any] = {
            "req_to_verify_expected_tokens": step.batch.expected_tokens,
            "req_to_verify_expected_tokens_valid_lens": step.batch.expected_valid_lens,
        }
        known = config.token_asserts and step.batch.expected_tokens is not None
        for number, (stride, window) in enumerate(passes):
            reads = bool(buffers)
            last = number == len(passes) - 1
            log = state.log[tag]
            result: VerifyResult = ops.verify_fused(
                records=state.records[group.name],
                log=log,
                launch_tag=tag,
                req_pool_indices=step.rows,
                prefix_lens=lens,
                req_to_token=step.batch.req_to_token,
                swa_window_size=group.window,
                full_to_swa_index_mapping=step.batch.full_to_swa_index_mapping if group.mapped else None,
                kv_token_id_vs_position_offset=self.kv_token_id_vs_position_offset,
                padding_req=self.padding_req,
                real_kv_hash_mode=self._mode if reads else RealKvHashMode.NONE,
                real_kv_sources=group.sources if reads else (),
                real_kv_buffers=buffers if reads else (),
                source_tags=state.source_tags[group.name] if reads else None,
                source_window=None if window is None or not reads else jnp.stack([jnp.asarray(part, jnp.int32) for part in window]),
                check_verify_expected_token=known,
                namespaces=step.batch.namespaces,
                step=step.number,
                padding_slot=group.padding_slot,
                pass_through=passing and reads and last,
                implementation=config.implementation,
                strict=config.strict,
                position_stride=stride,
                **(expected if known else {}),
            )
            state = dataclasses.replace(state, log=state.log.replace(tag, result.log))
            packed = jnp.maximum(packed, pack_verdicts(result.verdict, result.first_bad_position))
            if number == 0:
                unattested, first = jnp.asarray(result.unattested), jnp.asarray(result.first_unattested_position)
            if passing and reads and last:
                kv = group.pool.replace(kv, result.real_kv_buffers)
        return kv, state, (packed, unattested, first)

    def _write(
        self, kv: Any, state: CanaryState, step: _Step, group: _Group, flags: RecordFlag = RecordFlag.NONE, launch: str = "tail"
    ) -> tuple[CanaryState, jax.Array]:
        """Stamp the step's tokens; records continue the chain of the prefix."""
        batch, tag, config = step.batch, group.tags[launch], self.config
        planned = self._plan(step, group)
        slots, positions, _ = self._written(step, group, planned.write)
        asserts = config.input_asserts and batch.expected_input_tokens is not None and flags == RecordFlag.NONE
        expected = {
            "expected_input_tokens": batch.expected_input_tokens,
            "expected_input_positions": positions if batch.expected_input_positions is None else batch.expected_input_positions,
        }
        reads = self._mode != RealKvHashMode.NONE
        result = ops.write(
            records=state.records[group.name],
            log=state.log[tag],
            plan=planned.write,
            input_ids=batch.input_ids,
            positions=positions,
            out_cache_loc=slots,
            launch_tag=tag,
            real_kv_hash_mode=self._mode,
            real_kv_sources=group.sources if reads else (),
            real_kv_buffers=group.pool.buffers(kv) if reads else (),
            source_tags=state.source_tags[group.name] if reads else None,
            enable_write_input_assert=asserts,
            enable_chain_position_assert=config.position_asserts or None,
            request_ids=batch.request_ids,
            namespaces=batch.namespaces,
            record_flags=flags,
            step=step.number,
            padding_slot=group.padding_slot,
            implementation=config.implementation,
            strict=config.strict,
            **(expected if asserts else {}),
        )
        state = self._with(state, group, result.records, result.source_tags if reads else state.source_tags[group.name])
        return dataclasses.replace(state, log=state.log.replace(tag, result.log)), result.verdict[: step.bs]

    def _written(self, step: _Step, group: _Group, plan: WritePlan) -> tuple[jax.Array, Array, jax.Array]:
        """Slot in the group's pool (-1 for none), position and batch row of every input token."""
        batch = step.batch
        tokens = validation.shape_of(batch.input_ids)[0]
        rows, derived = token_places(jnp.asarray(plan.write_offsets), bs=step.bs, tokens=tokens, prefix_lens=step.prefix)
        slots = batch.out_cache_loc
        if slots is None:
            of_row = step.rows[jnp.maximum(rows, 0)] if step.bs else jnp.full((tokens,), -1, jnp.int32)
            found = slots_at(step.table, req_pool_indices=of_row, batch_rows=rows, positions=derived, missing=-2)
            slots = jnp.where(rows >= 0, found, -1)
        slots = validation.int_array("out_cache_loc", slots, (tokens,), pairs=False)
        if self.reserved_slots:
            slots = jnp.where((slots >= 0) & (slots < self.reserved_slots), -1, slots)
        if group.mapped:
            slots = translate_slots(slots=slots, mapping=batch.full_to_swa_index_mapping)
        return slots, derived if batch.positions is None else batch.positions, rows

    def _landed(self, state: CanaryState, step: _Step, group: _Group, new_kv: Any, new_kv_layout: Any) -> tuple[CanaryState, jax.Array]:
        """Compare the rows that were handed to the writer with what the tail has just hashed in the pool."""
        batch, tag = step.batch, group.tags["tail"]
        tokens = validation.shape_of(batch.input_ids)[0]
        if self._mode == RealKvHashMode.NONE:
            raise validation.error("new_kv needs real_kv other than 'none': nothing is hashed that it could be compared with")
        handed = pool_sources(new_kv, _as_layout(new_kv_layout), layers=group.pool_layers)
        sources = handed.sources if self.config.real_kv == "all" else tuple(source.leading(spec.PARTIAL_BYTES) for source in handed.sources)
        skip = group.leading if self.config.real_kv == "all" else 0
        wanted = group.sources[skip:]
        if [source.read_bytes for source in sources] != [source.read_bytes for source in wanted] or handed.num_slots != tokens:
            raise validation.error(
                f"new_kv must hold {tokens} slots of {len(wanted)} sources with {sum(source.read_bytes for source in wanted)} bytes, got "
                f"{handed.num_slots} slots of {len(sources)} sources with {sum(source.read_bytes for source in sources)} bytes"
            )
        if tokens == 0:
            return state, step.nothing()
        one_each = jnp.arange(tokens + 1, dtype=jnp.int32)
        hashed = ops.write(
            records=allocate_records(slots=tokens),
            source_tags=allocate_source_tags(slots=tokens, sources=len(sources)),
            log=ViolationLog.allocate(ring_capacity=0),
            plan=WritePlan(
                write_offsets=one_each,
                write_seed_slot_indices=jnp.full((tokens,), -1, jnp.int32),
                write_num_valid_reqs=jnp.full((1,), tokens, jnp.int32),
                req_pool_indices=jnp.zeros((0,), jnp.int32),
            ),
            input_ids=batch.input_ids,
            positions=jnp.zeros((tokens,), jnp.int32),
            out_cache_loc=one_each[:-1],
            launch_tag=tag,
            real_kv_hash_mode=self._mode,
            real_kv_sources=sources,
            real_kv_buffers=handed.buffers(new_kv),
            padding_slot=None,
            implementation=self.config.implementation,
        )
        slots, positions, rows = self._written(step, group, self._plan(step, group).write)
        counted = (rows >= 0) & (slots >= 0) & (slots < group.slots)
        counted &= moves.is_last_of_each(jnp.where(counted, slots, group.slots + one_each[:-1]))
        stored = _rows_at(state.source_tags[group.name], slots)[:, skip:]
        differs = jnp.asarray(hashed.source_tags) != stored
        bad = counted & differs.any(axis=1)
        first = jnp.argmax(differs, axis=1)

        def of_first(tags: Array) -> U64:
            return words.from_uint32(jnp.take_along_axis(jnp.asarray(tags), first[:, None], axis=1)[:, 0])

        position = words.from_operand(validation.int_array("positions", positions, (tokens,), pairs=True))
        none = words.const(-1)
        at = jnp.maximum(rows, 0)
        columns = [
            words.const(int(tag)),
            words.from_operand(slots),
            position,
            words.from_operand(validation.int_array("input_ids", batch.input_ids, (tokens,), pairs=True)),
            none,
            words.const(0),
            none,
            words.const(int(spec.FailReason.LANDING)),
            words.from_int32(rows),
            words.from_operand(step.rows[at]),
            words.from_uint32(step.number),
            position,
            of_first(stored),
            of_first(jnp.asarray(hashed.source_tags)),
            words.from_int32(first.astype(jnp.int32) + np.int32(skip)),
            words.const(0),
        ]
        log = append_rows(state.log[tag], bad, columns)
        worst = jnp.full((step.bs,), -(2**31), jnp.int32)
        verdicts = pack_verdicts(
            jnp.where(bad, int(Verdict.BAD), int(Verdict.NOT_CHECKED)), jnp.where(bad, words.as_int32(position.lo), -1)
        )
        packed = worst.at[jnp.where(bad, rows, step.bs)].max(verdicts, mode="drop")
        return dataclasses.replace(state, log=state.log.replace(tag, log)), jnp.maximum(packed, step.nothing())

    def _adopt_prefixes(self, kv: Any, state: CanaryState, step: _Step, group: _Group, count: jax.Array, first: jax.Array) -> CanaryState:
        """Stamp the unattested ends of prefixes that fit. One with stamped tokens behind it stays as it is, or these would not chain."""
        room, batch = self.config.adopt_capacity, step.batch
        whole = (count > 0) & (count == step.prefix - first)
        upto = jnp.cumsum(jnp.where(whole, count, 0))
        taken = jnp.where(whole & (upto <= room), count, 0)
        short = dataclasses.replace(
            step, prefix=jnp.where(taken > 0, first, 0).astype(step.prefix.dtype), extend=taken.astype(step.extend.dtype)
        )
        tokens = jnp.full((room,), -1, jnp.int32)
        bare = dataclasses.replace(
            batch, input_ids=tokens, positions=None, out_cache_loc=None, expected_input_tokens=None, expected_input_positions=None
        )
        short = dataclasses.replace(short, batch=bare)
        if batch.expected_tokens is not None:
            planned = self._plan(short, group).write
            rows, positions = token_places(jnp.asarray(planned.write_offsets), bs=step.bs, tokens=room, prefix_lens=short.prefix)
            table = jnp.asarray(batch.expected_tokens)
            at = jnp.maximum(rows, 0)
            column = positions + np.int32(self.kv_token_id_vs_position_offset)
            known = (rows >= 0) & (column >= 0) & (column < jnp.asarray(batch.expected_valid_lens)[at])
            row = jnp.where(known, step.rows[at], table.shape[0])
            found = table.at[row, jnp.maximum(column, 0)].get(mode="fill", fill_value=-1)
            short = dataclasses.replace(short, batch=dataclasses.replace(bare, input_ids=found))
        state, _ = self._write(kv, state, short, group, flags=RecordFlag.ADOPTED, launch="head")
        return state

    def _plan(self, step: _Step, group: _Group) -> Plan:
        return ops.plan(
            req_pool_indices=step.rows,
            prefix_lens=step.prefix,
            extend_seq_lens=step.extend,
            req_to_token=step.batch.req_to_token,
            verify_capacity=0,
            write_req_capacity=step.bs,
            swa_window_size=group.window,
            full_to_swa_index_mapping=step.batch.full_to_swa_index_mapping if group.mapped else None,
            padding_req=self.padding_req,
            implementation=self.config.implementation,
        )

    # ------------------------------------------------------------------------------------------ parts of a step

    def _step(self, batch: CanaryBatch, state: CanaryState) -> _Step:
        if not isinstance(batch, CanaryBatch):
            raise validation.type_error(f"batch must be a CanaryBatch, got {type(batch).__name__}")
        rows = validation.int_array("req_pool_indices", batch.req_pool_indices, (None,), pairs=False)
        (bs,) = rows.shape
        prefix = validation.int_array("prefix_lens", batch.prefix_lens, (bs,), pairs=False)
        extend = validation.int_array("extend_seq_lens", batch.extend_seq_lens, (bs,), pairs=False)
        tokens = validation.shape_of(batch.input_ids)[0]
        if self.capacities is not None:
            for what, given, room in (
                ("requests", bs, self.capacities.per_forward_write_req_capacity),
                ("tokens", tokens, self.capacities.per_forward_write_entry_capacity),
            ):
                if given > room:
                    raise validation.error(f"batch has room for {given} {what}, the canary was made for {room}")
        for group in self._groups:
            if group.mapped and batch.full_to_swa_index_mapping is None:
                raise validation.error(f"full_to_swa_index_mapping of the batch is required: group {group.name!r} has slots of its own")
        if (batch.copy_src is None) != (batch.copy_dst is None):
            raise validation.error("copy_src and copy_dst of the batch must be given together")
        if (batch.expected_tokens is None) != (batch.expected_valid_lens is None):
            raise validation.error("expected_tokens and expected_valid_lens of the batch must be given together")
        armed = None if batch.armed is None else jnp.asarray(batch.armed)
        if armed is not None:
            if armed.shape != () or armed.dtype != jnp.bool_:
                raise validation.error(f"armed must be a bool scalar, got shape {armed.shape} and dtype {armed.dtype.name}")
            rows = jnp.where(armed, rows, -1)
        assert state.counters is not None
        return _Step(
            batch=batch,
            rows=rows,
            prefix=jnp.maximum(prefix, 0),
            extend=jnp.maximum(extend, 0),
            table=resolve_table(batch.req_to_token, bs=bs),
            number=state.counters[_STEP],
            armed=armed,
            bs=bs,
        )

    def _take_in(self, state: CanaryState, batch: CanaryBatch) -> CanaryState:
        """Announced releases, then copies: a page that was given back may be a copy's destination."""
        size = self.copy_page_size
        for group in self._groups:
            if batch.released_slots is not None:
                slots = self._translated(batch.released_slots, batch, group)
                result = moves.release_records(records=state.records[group.name], slots=slots, page_size=1 if group.mapped else size)
                state = dataclasses.replace(state, records={**state.records, group.name: result.records})
            if batch.copy_src is not None and batch.copy_dst is not None:
                src, dst = (self._translated(slots, batch, group) for slots in (batch.copy_src, batch.copy_dst))
                copied = moves.copy_records(
                    records=state.records[group.name],
                    source_tags=state.source_tags[group.name],
                    src=src,
                    dst=dst,
                    page_size=1 if group.mapped else size,
                )
                state = self._with(state, group, copied.records, copied.source_tags)
        return state

    def _translated(self, slots: Array, batch: CanaryBatch, group: _Group) -> Array:
        """Announced slots or pages as a group's launches take them: single slots where they go through a mapping."""
        if not group.mapped:
            return slots
        given = validation.int_array("slots", slots, (None,), pairs=False)
        if self.copy_page_size > 1:
            given = jnp.where(
                given[:, None] < 0,
                given[:, None],
                given[:, None] * self.copy_page_size + jnp.arange(self.copy_page_size, dtype=given.dtype),
            ).reshape(-1)
        moved = translate_slots(slots=given, mapping=batch.full_to_swa_index_mapping)
        return jnp.where(moved < 0, -1, moved)

    def _capture(self, state: CanaryState, step: _Step, launch: str) -> CanaryState:
        """The context of the rows that a launch has added."""
        contexts = list(state.contexts)
        assert state.seen is not None
        seen = state.seen
        for group in self._groups:
            tag = group.tags[launch]
            place = self.parts.index(tag)
            log = state.log[tag]
            contexts[place] = self._context(state, step, group, log, contexts[place], seen[place])
            seen = seen.at[place].set(jnp.asarray(log.write_index)[0])
        # What was read of the records is read before the tail stamps: else it would need a copy of them.
        records, kept = jax.lax.optimization_barrier((state.records, tuple(contexts)))
        return dataclasses.replace(state, records=records, contexts=kept, seen=seen)

    def _capture_sweep(self, state: CanaryState, group: _Group) -> CanaryState:
        """The records of the slots that a sweep has reported; there is no request."""
        tag = group.tags["sweep"]
        place, log = self.parts.index(tag), state.log[tag]
        assert state.seen is not None
        ring = jnp.asarray(log.ring)
        index = jnp.arange(ring.shape[0], dtype=jnp.int32)
        fresh = (index >= state.seen[place]) & (index < jnp.asarray(log.write_index)[0])
        record = _rows_at(jnp.asarray(state.records[group.name]), _low_signed(ring, Column.SLOT))[:, :16]
        made = jnp.pad(record, ((0, 0), (0, CONTEXT_WORDS - record.shape[1])))
        contexts = list(state.contexts)
        contexts[place] = jnp.where(fresh[:, None], made, contexts[place])
        seen = jnp.asarray(state.seen).at[place].set(jnp.asarray(log.write_index)[0])
        return dataclasses.replace(state, contexts=tuple(contexts), seen=seen)

    def _context(self, state: CanaryState, step: _Step, group: _Group, log: ViolationLog, known: Array, seen: jax.Array) -> jax.Array:
        ring, records = jnp.asarray(log.ring), jnp.asarray(state.records[group.name])
        (rows,) = ring.shape[:1]
        index = jnp.arange(rows, dtype=jnp.int32)
        fresh = (index >= seen) & (index < jnp.asarray(log.write_index)[0])

        slot, row, position = (_low_signed(ring, column) for column in (Column.SLOT, Column.BATCH_ROW, Column.EXPECTED_POSITION))
        record = _rows_at(records, slot)
        row_known = (row >= 0) & (row < step.bs)
        at = jnp.where(row_known, row, step.bs)
        ids = _rows_at(optional_pairs(step.batch.request_ids), at)
        spaces = _rows_at(optional_pairs(step.batch.namespaces), at)
        before = slots_at(
            step.table, req_pool_indices=_element(step.rows, at), batch_rows=jnp.where(row_known, row, -1), positions=position - 1
        )
        if group.mapped:
            before = translate_slots(slots=before, mapping=step.batch.full_to_swa_index_mapping)
        prev_known = (before >= 0) & (before < group.slots)
        prev = _rows_at(records, before)
        bits = row_known.astype(jnp.uint32) | (prev_known.astype(jnp.uint32) << 1)
        made = jnp.concatenate([record[:, :16], ids, spaces, prev[:, 10:11], prev[:, 8:10], bits[:, None]], axis=1)
        return jnp.where(fresh[:, None], made, known)

    def _verdict(
        self,
        step: _Step,
        state: CanaryState,
        before: TaggedLog,
        packed: jax.Array,
        unattested: jax.Array,
        earlier: CanaryVerdict | None,
    ) -> CanaryVerdict:
        verdict, position = unpack_verdicts(packed)
        slot = slots_at(
            step.table,
            req_pool_indices=step.rows,
            batch_rows=jnp.where(verdict == int(Verdict.BAD), jnp.arange(step.bs, dtype=jnp.int32), -1),
            positions=position,
        )
        bad = {}
        for group in self._groups:
            found = [
                _new_slots(before[group.tags[launch]], state.log[group.tags[launch]], self.config.quarantine) for launch in ("head", "tail")
            ]
            if earlier is not None:
                found.insert(0, jnp.asarray(earlier.bad_slots[group.name]))
            bad[group.name] = _first_of(jnp.concatenate(found), self.config.quarantine)
        return CanaryVerdict(verdict=verdict, first_bad_position=position, first_bad_slot=slot, unattested=unattested, bad_slots=bad)

    def _count(self, state: CanaryState, step: _Step, verdict: CanaryVerdict) -> jax.Array:
        counters = state.counters
        assert counters is not None
        new = jnp.sum(jnp.asarray(verdict.unattested).astype(jnp.uint32), dtype=jnp.uint32)
        low = counters[_UNATTESTED] + new
        armed = jnp.uint32(1) if step.armed is None else step.armed.astype(jnp.uint32)
        return jnp.stack(
            [
                counters[_STEP] + jnp.uint32(1),
                counters[_EPOCH],
                low,
                counters[_UNATTESTED_HIGH] + (low < new).astype(jnp.uint32),
                counters[_ARMED_STEPS] + armed,
                jnp.uint32(step.bs),
            ]
        )

    # ------------------------------------------------------------------------------------------ helpers

    def _check_state(self, state: CanaryState) -> None:
        if not isinstance(state, CanaryState):
            raise validation.type_error(f"state must be a CanaryState, got {type(state).__name__}")
        if state.key != self.key:
            raise validation.error(f"state belongs to another canary than {self.name!r}: it was made for another pool, layout or config")

    def _named(self, group: str | None) -> _Group:
        if group is None:
            if len(self._groups) > 1:
                raise validation.error(f"group is required, there are {', '.join(map(repr, self.group_names))}")
            return self._groups[0]
        for held in self._groups:
            if held.name == group:
                return held
        raise validation.error(f"there is no group {group!r}, there are {', '.join(map(repr, self.group_names))}")

    def _group_of(self, tag: CanaryLaunchTag) -> _Group:
        for group in self._groups:
            if tag in group.tags.values():
                return group
        raise validation.error(f"no group has the launch tag {tag!r}")

    @staticmethod
    def _with(state: CanaryState, group: _Group, records: Array, source_tags: Array | None) -> CanaryState:
        tags = state.source_tags[group.name] if source_tags is None else source_tags
        return dataclasses.replace(
            state, records={**state.records, group.name: records}, source_tags={**state.source_tags, group.name: tags}
        )

    def _moved(self, state: CanaryState, group: str | None, page_size: int | None, move: Callable[..., moves.MoveResult]) -> CanaryState:
        self._check_state(state)
        if not self.enabled:
            return state
        held = self._named(group)
        size = self.copy_page_size if page_size is None else page_size
        result = move(size, records=state.records[held.name], source_tags=state.source_tags[held.name])
        return self._with(state, held, result.records, result.source_tags)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A batch that was looked at: rows are -1 where nothing is armed."""

    batch: CanaryBatch
    rows: jax.Array
    prefix: jax.Array
    extend: jax.Array
    table: ResolvedTable
    number: jax.Array
    armed: jax.Array | None
    bs: int

    def nothing(self) -> jax.Array:
        """Packed verdicts of requests that nothing looked at."""
        none = jnp.zeros((self.bs,), jnp.int32)
        return pack_verdicts(none, none - 1)


def _make_group(
    pool: Any,
    layout: Any,
    config: CanaryConfig,
    group: PoolGroup,
    padding_slot: int | None,
    getter: Callable[[Any], Any] | None,
    setter: Callable[[Any, Any], Any] | None,
) -> _Group:
    of = f"of group {group.name!r}"
    window = validation.static_capacity(f"swa_window_size {of}", group.swa_window_size)
    mapped = window > 0 if group.needs_mapping is None else validation.static_bool(f"needs_mapping {of}", group.needs_mapping)
    held = pool_sources(pool, layout, layers=group.layers, getter=getter, setter=setter)
    leading = [source.leading(spec.PARTIAL_BYTES) for source in held.sources]
    sources: list[RealKvSource] = []
    labels: list[str] = []
    if config.real_kv != "none":
        sources += leading
        labels += [f"{label} (leading bytes)" for label in held.labels]
    if config.real_kv == "all":
        sources += held.sources
        labels += held.labels
    padding = padding_slot
    if group.padding_slot != "same":
        has, slot = validation.optional_slot(f"padding_slot {of}", group.padding_slot)
        padding = slot if has else None
    return _Group(
        name=group.name,
        window=window,
        mapped=mapped,
        padding_slot=padding,
        slots=held.num_slots,
        pool=held,
        pool_layers=None if group.layers is None else tuple(group.layers),
        sources=tuple(sources),
        labels=tuple(labels),
        leading=len(leading) if config.real_kv != "none" else 0,
        sweeps=config.sweep_capacity > 0,
    )


def _as_layout(layout: Any) -> Any:
    return Layout.from_axes(layout) if isinstance(layout, str) else layout


def _distinct(groups: Iterable[PoolGroup]) -> tuple[PoolGroup, ...]:
    held = tuple(groups)
    if not held:
        raise validation.error("groups must hold at least one PoolGroup")
    for number, group in enumerate(held):
        if not isinstance(group, PoolGroup):
            raise validation.type_error(f"groups[{number}] must be a PoolGroup, got {type(group).__name__}")
    names = [group.name for group in held]
    if len(set(names)) < len(names):
        raise validation.error(f"groups must have different names, got {names}")
    mapped = [bool(group.swa_window_size) if group.needs_mapping is None else group.needs_mapping for group in held]
    if mapped.count(True) > 1 or mapped.count(False) > 1:
        raise validation.error("groups must be at most one pool with the slots of the table and one with a mapping")
    return held


def _low_signed(ring: jax.Array, column: Column) -> jax.Array:
    """A column of a ring as int32 where its values fit, else -2."""
    low, high = (jax.lax.bitcast_convert_type(ring[:, 2 * column + k], jnp.int32) for k in (0, 1))
    return jnp.where((low >> 31) == high, low, -2)


def _new_slots(before: ViolationLog, after: ViolationLog, room: int) -> jax.Array:
    """Slots of the first ``room`` rows that were added, -1 for the others."""
    ring = jnp.asarray(after.ring)
    index = jnp.asarray(before.write_index)[0] + jnp.arange(room, dtype=jnp.int32)
    added = (index < jnp.asarray(after.write_index)[0]) & (index < ring.shape[0])
    words = _rows_at(ring, jnp.where(added, index, -1))
    low, high = words[:, 2 * Column.SLOT], words[:, 2 * Column.SLOT + 1]
    return jnp.where(added & (high == 0), jax.lax.bitcast_convert_type(low, jnp.int32), -1)


def _first_of(slots: jax.Array, room: int) -> jax.Array:
    """The first ``room`` slots that are not -1, then -1: two small reductions instead of a sort."""
    used, index = slots != -1, jnp.arange(slots.shape[0], dtype=jnp.int32)
    rank = jnp.sum(used[None, :] & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)
    place = jnp.where(used, rank, -1)
    return jnp.max(jnp.where(place[None, :] == jnp.arange(room, dtype=jnp.int32)[:, None], slots[None, :], -1), axis=1, initial=-1)


def _element(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[index]`` of indices that are not negative, -1 past the end."""
    return jnp.full(index.shape, -1, x.dtype) if x.shape[0] == 0 else x.at[index].get(mode="fill", fill_value=-1)


def _rows_at(x: Any, index: jax.Array) -> jax.Array:
    """``x[index]`` of uint32 ``[n, words]``, zeros out of range; without an array, two words of zeros."""
    if x is None:
        return jnp.zeros((*index.shape, 2), jnp.uint32)
    rows = jnp.asarray(x)
    if rows.shape[0] == 0:
        return jnp.zeros((*index.shape, rows.shape[1]), rows.dtype)
    return rows.at[jnp.where(index < 0, rows.shape[0], index)].get(mode="fill", fill_value=0)


@jax.jit
def _clear_log(state: CanaryState) -> CanaryState:
    parts = {
        tag: dataclasses.replace(part, write_index=jnp.zeros_like(part.write_index))
        for tag, part in zip(state.log.tags, state.log.parts, strict=True)
    }
    assert state.counters is not None and state.seen is not None
    counters = jnp.asarray(state.counters).at[_EPOCH].add(jnp.uint32(1))
    return dataclasses.replace(state, log=TaggedLog.of(parts), seen=jnp.zeros_like(state.seen), counters=counters)
