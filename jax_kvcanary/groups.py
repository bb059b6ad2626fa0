"""Several KV pools of one model (full attention, sliding window): one static description, a log with a share for every launch.

Every group has records of its own and sees the step through its own slot mapping; the verdict of a request is the worst of its groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from jax_kvcanary import ops, spec, validation
from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import take
from jax_kvcanary.report import LogReport, Violation, decode_log
from jax_kvcanary.sharding import ShardedOps, merge_reports, pack_verdicts, unpack_verdicts
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.spec import CanaryLaunchTag
from jax_kvcanary.state import Array, Plan, ViolationLog, allocate_records, allocate_source_tags, pytree_dataclass

LAUNCHES = ("head", "tail", "sweep")
"""Launches of a step: before the model, after it, and over idle slots."""

_FULL_TAGS = (CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL, CanaryLaunchTag.SWEEP_K_FULL)
_SWA_TAGS = (CanaryLaunchTag.HEAD_K_SWA, CanaryLaunchTag.TAIL_K_SWA, CanaryLaunchTag.SWEEP_K_SWA)


# ---------------------------------------------------------------------------------------------- the log


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggedLog:
    """A log in parts, one a launch tag, so that no launch can fill the rows of another.

    tags: static, ascending. parts: a ViolationLog for each of them.

    Example:
      >>> log = TaggedLog.allocate(quotas={CanaryLaunchTag.HEAD_K_FULL: 8, CanaryLaunchTag.HEAD_K_SWA: 4})
      >>> log[CanaryLaunchTag.HEAD_K_SWA].ring.shape
      (4, 32)
    """

    tags: tuple[CanaryLaunchTag, ...]
    parts: tuple[ViolationLog, ...]

    @classmethod
    def allocate(cls, *, quotas: Mapping[CanaryLaunchTag, int]) -> TaggedLog:
        """An empty log with room for ``quotas[tag]`` rows of each launch tag."""
        rows = _mapping("quotas", quotas, "launch tags")
        return cls.of({tag: ViolationLog.allocate(ring_capacity=capacity) for tag, capacity in rows.items()})

    @classmethod
    def of(cls, parts: Mapping[CanaryLaunchTag, ViolationLog]) -> TaggedLog:
        """The log that consists of ``parts``."""
        checked = {
            validation.static_enum("launch_tag", tag, CanaryLaunchTag): validation.instance("a part of the log", part, ViolationLog)
            for tag, part in _mapping("parts", parts, "launch tags").items()
        }
        tags = tuple(sorted(checked))
        return cls(tags=tags, parts=tuple(checked[tag] for tag in tags))

    def __getitem__(self, launch_tag: int | CanaryLaunchTag) -> ViolationLog:
        """The part of a launch."""
        return self.parts[self._place(launch_tag)]

    def replace(self, launch_tag: int | CanaryLaunchTag, log: ViolationLog) -> TaggedLog:
        """The log with another part for a launch: **thread it on, or jit removes what the launch reported.**"""
        place = self._place(launch_tag)
        return dataclasses.replace(self, parts=(*self.parts[:place], log, *self.parts[place + 1 :]))

    @property
    def reported(self) -> jax.Array:
        """Rows reported so far, int32, the write indices of the parts one after the other: small enough to poll every step."""
        return jnp.concatenate([jnp.asarray(part.write_index) for part in self.parts])

    def decode(self, *, records: Mapping[CanaryLaunchTag, Array] | None = None, decode: Callable[..., LogReport] = decode_log) -> LogReport:
        """All parts as one report, see :func:`decode_log`; ``records``: by launch tag, of the pool that the launch checks."""
        return merge_reports(self.decode_parts(records=records, decode=decode).values())

    def decode_parts(
        self, *, records: Mapping[CanaryLaunchTag, Array] | None = None, decode: Callable[..., LogReport] = decode_log
    ) -> dict[CanaryLaunchTag, LogReport]:
        """A report a launch tag."""
        known = {} if records is None else _mapping("records", records, "launch tags")
        return {tag: decode(part, records=known.get(tag)) for tag, part in zip(self.tags, self.parts, strict=True)}

    def _place(self, launch_tag: int | CanaryLaunchTag) -> int:
        tag = validation.static_enum("launch_tag", launch_tag, CanaryLaunchTag)
        if tag not in self.tags:
            raise validation.error(f"the log has no part for {tag.name}, it has {', '.join(known.name for known in self.tags) or 'none'}")
        return self.tags.index(tag)


jax.tree_util.register_dataclass(TaggedLog, data_fields=["parts"], meta_fields=["tags"])
jax.export.register_pytree_node_serialization(
    TaggedLog,
    serialized_name="jax_kvcanary.TaggedLog",
    serialize_auxdata=lambda meta: bytes(int(tag) for tag in meta[0]),
    deserialize_auxdata=lambda data: (tuple(CanaryLaunchTag(tag) for tag in data),),
)


@pytree_dataclass
class GroupsState:
    """What a serving loop carries for all groups: records and source tags (or None) by group name, and the log."""

    records: dict[str, Array]
    source_tags: dict[str, Array | None]
    log: TaggedLog


@pytree_dataclass
class GroupsVerifyResult:
    """State to thread on, verdict and first bad position int32 [bs] over all groups, both by group, and the buffers by group.

    unattested: int32 [bs], the sum over the groups; first_unattested_position: the smallest over them, -1 if there is none.
    """

    state: GroupsState
    verdict: Array
    first_bad_position: Array
    verdicts: dict[str, Array]
    first_bad_positions: dict[str, Array]
    unattested: Array
    first_unattested_position: Array
    unattested_by_group: dict[str, Array]
    real_kv_buffers: dict[str, tuple[Array, ...]]


@pytree_dataclass
class GroupsWriteResult:
    """State to thread on, and the verdict int32 [write_req_capacity] over all groups and by group."""

    state: GroupsState
    verdict: Array
    verdicts: dict[str, Array]


@pytree_dataclass
class GroupsDigestResult:
    """State to thread on, the verdict int32 [bs], and bool [bs] by group where ranks disagree."""

    state: GroupsState
    verdict: Array
    disagree: dict[str, Array]


# ---------------------------------------------------------------------------------------------- groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """One KV pool of a model: which layers it holds and how the step's slots lead into it. Frozen and hashable.

    Args:
      name: for arguments, results and messages, such as "full" or "swa".
      swa_window_size: tokens; 0 is full attention.
      needs_mapping: whether slots go through a ``full_to_swa_index_mapping``; None: if there is a window.
      sources: of the group's buffers, of one pool; empty: only chains are checked. Layers without KV of their own have none.
      layers: the model's layer numbers of the sources, one each, for messages; empty: not known.
      slots: of the group's pool; None: what the sources cover.
      sharding: the group's pool on a mesh; sources and slots are then its.
      real_kv_hash_mode: how much of each source is hashed.
      padding_slot: the slot of dummy writes in this pool; None: there is none.
      ring_capacity: violation rows that each of the group's launches has room for (on each shard).
      provenance: records of 16 words. keep_source_tags: hashes of single sources beside the records.
      head_tag, tail_tag, sweep_tag: launch tags; None: those of FULL without a mapping, of SWA with one.

    Raises:
      ValueError: sizes that break a rule. TypeError: a value of the wrong type.

    Example:
      >>> Group(name="swa", swa_window_size=128, slots=4096).head_tag.name
      'HEAD_K_SWA'
    """

    name: str
    swa_window_size: int = 0
    needs_mapping: bool | None = None
    sources: tuple[RealKvSource, ...] = ()
    layers: tuple[int, ...] = ()
    slots: int | None = None
    sharding: ShardedOps | None = None
    real_kv_hash_mode: spec.RealKvHashMode = spec.RealKvHashMode.NONE
    padding_slot: int | None = 0
    ring_capacity: int = 64
    provenance: bool = False
    keep_source_tags: bool = False
    head_tag: CanaryLaunchTag | None = None
    tail_tag: CanaryLaunchTag | None = None
    sweep_tag: CanaryLaunchTag | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise validation.type_error(f"Group.name must be a str that is not empty, got {self.name!r}")
        of = f"of group {self.name!r}"
        window = validation.static_capacity(f"swa_window_size {of}", self.swa_window_size)
        mapped = window > 0 if self.needs_mapping is None else validation.static_bool(f"needs_mapping {of}", self.needs_mapping)
        if window > 0 and not mapped:
            raise validation.error(f"needs_mapping {of} must be True with swa_window_size {window}: a window pool has slots of its own")
        sources, slots = validation.sequence_of(f"sources {of}", self.sources, RealKvSource), self.slots
        layers = tuple(
            validation.static_int(f"layers {of}", layer, minimum=0) for layer in validation.sequence(f"layers {of}", self.layers, "ints")
        )
        has_padding, padding = validation.optional_slot(f"padding_slot {of}", self.padding_slot)
        if self.sharding is not None:
            validation.instance(f"sharding {of}", self.sharding, ShardedOps)
            if sources or slots is not None:
                raise validation.error(f"sources and slots {of} must not be given with sharding, which has its own")
            sources, slots = self.sharding.sources, self.sharding.slots
        elif slots is None:
            if not sources:
                raise validation.error(f"slots {of} is required without sources: the slots of its pool")
            slots = min(source.num_slots for source in sources)
        if layers and len(layers) != len(sources):
            raise validation.error(f"layers {of} must name one layer a source, got {len(layers)} for {len(sources)} sources")
        tags = _SWA_TAGS if mapped else _FULL_TAGS
        fields: dict[str, Any] = {
            "swa_window_size": window,
            "needs_mapping": mapped,
            "sources": sources,
            "layers": layers,
            "padding_slot": padding if has_padding else None,
            "provenance": validation.static_bool(f"provenance {of}", self.provenance),
            "keep_source_tags": validation.static_bool(f"keep_source_tags {of}", self.keep_source_tags),
            "slots": validation.static_capacity(f"slots {of}", slots),
            "real_kv_hash_mode": validation.static_enum(f"real_kv_hash_mode {of}", self.real_kv_hash_mode, spec.RealKvHashMode),
            "ring_capacity": validation.static_capacity(f"ring_capacity {of}", self.ring_capacity),
        }
        for launch, default in zip(LAUNCHES, tags, strict=True):
            given = getattr(self, f"{launch}_tag")
            fields[f"{launch}_tag"] = default if given is None else validation.static_enum(f"{launch}_tag {of}", given, CanaryLaunchTag)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def tag(self, launch: str) -> CanaryLaunchTag:
        """The launch tag of "head", "tail" or "sweep"."""
        if launch not in LAUNCHES:
            raise validation.error(f"launch must be one of {', '.join(map(repr, LAUNCHES))}, got {launch!r}")
        return getattr(self, f"{launch}_tag")

    @property
    def tags(self) -> tuple[CanaryLaunchTag, ...]:
        return tuple(self.tag(launch) for launch in LAUNCHES)

    def _launch(self, name: str, arguments: dict[str, Any]) -> Any:
        """One operation on this group's pool, on a mesh or not."""
        if self.sharding is not None:
            return getattr(self.sharding, name)(**arguments)
        if arguments.get("real_kv_buffers"):
            arguments = {**arguments, "real_kv_sources": self.sources}
        return getattr(ops, name)(**arguments)


@dataclasses.dataclass(frozen=True)
class KvGroups:
    """The operations for a model with several KV pools: each runs once a group, with the group's records, mapping and share of the log.

    Frozen and hashable. By-group arguments are mappings from a group's name; a ``full_to_swa_index_mapping`` may also be one array for
    all groups that need one. All other arguments go to every group as they are.

    Args:
      groups: at least one, of different names and launch tags.

    Example:
      >>> groups = KvGroups((Group(name="full", slots=32), Group(name="swa", swa_window_size=4, slots=16)))
      >>> state = groups.allocate()
      >>> {name: records.shape for name, records in state.records.items()}
      {'full': (32, 8), 'swa': (16, 8)}
    """

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        groups = validation.sequence("groups", self.groups, "Group")
        if not groups:
            raise validation.error("KvGroups must have at least one group")
        owner: dict[CanaryLaunchTag, str] = {}
        for i, group in enumerate(groups):
            if not isinstance(group, Group):
                raise validation.type_error(f"groups[{i}] must be a Group, got {type(group).__name__}")
            if group.name in [other.name for other in groups[:i]]:
                raise validation.error(f"groups must have different names, got {group.name!r} twice")
            for tag in group.tags:
                if tag in owner:
                    raise validation.error(
                        f"groups must have different launch tags, got {tag.name} in {owner[tag]!r} and {group.name!r}: "
                        "their violations and their shares of the log would mix"
                    )
            owner.update(dict.fromkeys(group.tags, group.name))
        object.__setattr__(self, "groups", groups)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(group.name for group in self.groups)

    def __getitem__(self, name: str) -> Group:
        """The group of a name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise validation.error(f"there is no group {name!r}, there are {_listed(self.names)}")

    def allocate(self) -> GroupsState:
        """Fresh records, source tags and log of all groups."""
        records: dict[str, Array] = {}
        tags: dict[str, Array | None] = {}
        parts: dict[CanaryLaunchTag, ViolationLog] = {}
        for group in self.groups:
            on_mesh = group.sharding
            rows = group.ring_capacity
            if on_mesh is not None:
                records[group.name] = on_mesh.allocate_records(provenance=group.provenance)
                tags[group.name] = on_mesh.allocate_source_tags() if group.keep_source_tags else None
                parts.update({tag: on_mesh.allocate_log(ring_capacity=rows) for tag in group.tags})
            else:
                assert group.slots is not None  # resolved when the group was made
                records[group.name] = allocate_records(slots=group.slots, provenance=group.provenance)
                tags[group.name] = allocate_source_tags(slots=group.slots, sources=len(group.sources)) if group.keep_source_tags else None
                parts.update({tag: ViolationLog.allocate(ring_capacity=rows) for tag in group.tags})
        return GroupsState(records=records, source_tags=tags, log=TaggedLog.of(parts))

    def plan(
        self,
        *,
        verify_capacity: int | Mapping[str, int],
        full_to_swa_index_mapping: Array | Mapping[str, Array] | None = None,
        **arguments: Any,
    ) -> dict[str, Plan]:
        """:func:`jax_kvcanary.plan` for every group.

        Args:
          verify_capacity: static, entries that each group's verify plan has room for, or by group.
          full_to_swa_index_mapping: slot of the group's pool for each slot of the full pool; one array, or by group.
          arguments: the others of :func:`plan`.

        Returns:
          The plans by group.

        Raises:
          ValueError: a group without its mapping, and whatever :func:`plan` raises.
        """
        self._refuse("plan", arguments, ("swa_window_size",))
        mappings = self._mappings(full_to_swa_index_mapping)
        capacities = self._by_group("verify_capacity", verify_capacity)
        return {
            group.name: group._launch(
                "plan",
                {
                    **arguments,
                    "verify_capacity": capacities[group.name],
                    "swa_window_size": group.swa_window_size,
                    "full_to_swa_index_mapping": mappings[group.name],
                },
            )
            for group in self.groups
        }

    def verify(
        self,
        *,
        state: GroupsState,
        plans: Mapping[str, Plan],
        launch: str,
        real_kv_buffers: Mapping[str, Sequence[Array]] | None = None,
        **arguments: Any,
    ) -> GroupsVerifyResult:
        """:func:`jax_kvcanary.verify` of every group's plan.

        **Use the returned state, or jit removes the checks.**

        Args:
          state: of :meth:`allocate`.
          plans: of :meth:`plan`.
          launch: static, "head", "tail" or "sweep".
          real_kv_buffers: by group.
          arguments: the others of :func:`verify`.
        """
        planned = self._plans(plans)
        given = {group.name: {**arguments, "plan": planned[group.name].verify} for group in self.groups}
        return self._verify("verify", state, launch, real_kv_buffers, arguments, given)

    def verify_fused(
        self,
        *,
        state: GroupsState,
        launch: str,
        full_to_swa_index_mapping: Array | Mapping[str, Array] | None = None,
        real_kv_buffers: Mapping[str, Sequence[Array]] | None = None,
        **arguments: Any,
    ) -> GroupsVerifyResult:
        """:func:`jax_kvcanary.verify_fused` for every group.

        **Use the returned state, or jit removes the checks.**

        Args:
          state: of :meth:`allocate`.
          launch: static, "head", "tail" or "sweep".
          full_to_swa_index_mapping: as in :meth:`plan`.
          real_kv_buffers: by group.
          arguments: the others of :func:`verify_fused`.

        Raises:
          ValueError: a group without its mapping, and whatever :func:`verify_fused` raises.

        Example:
          >>> groups = KvGroups((Group(name="full", slots=8), Group(name="swa", swa_window_size=2, slots=8)))
          >>> result = groups.verify_fused(
          ...     state=groups.allocate(), launch="head", full_to_swa_index_mapping=jnp.arange(8, dtype=jnp.int32),
          ...     req_pool_indices=jnp.array([1], jnp.int32), prefix_lens=jnp.array([3], jnp.int32),
          ...     req_to_token=jnp.array([[0, 0, 0], [2, 3, 4]], jnp.int32),
          ... )
          >>> result.first_bad_position.tolist(), {name: int(p[0]) for name, p in result.first_bad_positions.items()}
          ([0], {'full': 0, 'swa': 1})
        """
        self._refuse("verify_fused", arguments, ("swa_window_size",))
        mappings = self._mappings(full_to_swa_index_mapping)
        given = {
            group.name: {
                **arguments,
                "swa_window_size": group.swa_window_size,
                "full_to_swa_index_mapping": mappings[group.name],
            }
            for group in self.groups
        }
        return self._verify("verify_fused", state, launch, real_kv_buffers, arguments, given)

    def write(
        self,
        *,
        state: GroupsState,
        plans: Mapping[str, Plan],
        out_cache_loc: Array | Mapping[str, Array],
        launch: str = "tail",
        full_to_swa_index_mapping: Array | Mapping[str, Array] | None = None,
        real_kv_buffers: Mapping[str, Sequence[Array]] | None = None,
        **arguments: Any,
    ) -> GroupsWriteResult:
        """:func:`jax_kvcanary.write` for every group.

        **Use the returned state, or jit removes the stamps and the checks.**

        Args:
          state: of :meth:`allocate`.
          plans: of :meth:`plan`.
          out_cache_loc: slots of the full pool, translated for each group that has a mapping; or by group, as they are.
          launch: static, "head", "tail" or "sweep".
          full_to_swa_index_mapping: as in :meth:`plan`; not needed where ``out_cache_loc`` is by group.
          real_kv_buffers: by group.
          arguments: the others of :func:`write`.

        Raises:
          ValueError: a group without its mapping, and whatever :func:`write` raises.
        """
        self._refuse("write", arguments)
        validation.instance("state", state, GroupsState)
        slots = self._written_slots(out_cache_loc, full_to_swa_index_mapping)
        planned, buffers = self._plans(plans), self._buffers(real_kv_buffers)
        records, tags, log = dict(state.records), dict(state.source_tags), state.log
        verdicts = {}
        for group in self.groups:
            tag = group.tag(launch)
            result = group._launch(
                "write",
                {
                    **arguments,
                    **self._common(group, state, buffers),
                    "log": log[tag],
                    "launch_tag": tag,
                    "plan": planned[group.name].write,
                    "out_cache_loc": slots[group.name],
                },
            )
            log = log.replace(tag, result.log)
            records[group.name], tags[group.name], verdicts[group.name] = result.records, result.source_tags, result.verdict
        worst = jnp.stack(list(verdicts.values())).max(axis=0)
        return GroupsWriteResult(state=GroupsState(records=records, source_tags=tags, log=log), verdict=worst, verdicts=verdicts)

    def check_rank_digests(
        self,
        *,
        state: GroupsState,
        verdict: Array,
        launch: str,
        full_to_swa_index_mapping: Array | Mapping[str, Array] | None = None,
        **arguments: Any,
    ) -> GroupsDigestResult:
        """:meth:`jax_kvcanary.ShardedOps.check_rank_digests` for every group: all are on a mesh.

        **Use the returned state and verdict, or jit removes the comparison.**

        Args:
          state: of :meth:`allocate`.
          verdict: int32 ``[data ranks * bs]`` of a verify of this batch.
          launch: static, "head", "tail" or "sweep": whose rows of the log are used.
          full_to_swa_index_mapping: as in :meth:`plan`.
          arguments: the others of :meth:`ShardedOps.check_rank_digests`.
        """
        self._refuse("check_rank_digests", arguments, ("swa_window_size",))
        validation.instance("state", state, GroupsState)
        mappings, log, disagree = self._mappings(full_to_swa_index_mapping), state.log, {}
        for group in self.groups:
            if group.sharding is None:
                raise validation.error(f"group {group.name!r} has no sharding: there are no ranks to compare")
            tag = group.tag(launch)
            result = group.sharding.check_rank_digests(
                **arguments,
                records=state.records[group.name],
                log=log[tag],
                verdict=verdict,
                launch_tag=tag,
                padding_slot=group.padding_slot,
                swa_window_size=group.swa_window_size,
                full_to_swa_index_mapping=mappings[group.name],
            )
            log, verdict = log.replace(tag, result.log), result.verdict
            disagree[group.name] = result.disagree
        return GroupsDigestResult(state=dataclasses.replace(state, log=log), verdict=verdict, disagree=disagree)

    def decode(self, state: GroupsState, *, with_records: bool = True) -> LogReport:
        """The logs of all groups as one report; with records of 16 words violations say who wrote their slot."""
        return merge_reports(self.decode_parts(state, with_records=with_records).values())

    def decode_parts(self, state: GroupsState, *, with_records: bool = True) -> dict[CanaryLaunchTag, LogReport]:
        """A report a launch tag."""
        validation.instance("state", state, GroupsState)
        out = {}
        for group in self.groups:
            decode = decode_log if group.sharding is None else group.sharding.decode_log
            records = state.records[group.name] if with_records else None
            out.update({tag: decode(state.log[tag], records=records) for tag in group.tags})
        return out

    def group_of(self, violation: Violation) -> Group | None:
        """The group whose launch reported a violation."""
        return next((group for group in self.groups if violation.tag in group.tags), None)

    def layer_of(self, violation: Violation) -> int | None:
        """The model's layer whose bytes differ first, None where it is not known."""
        group = self.group_of(violation)
        if group is None or not 0 <= violation.first_bad_source < len(group.layers):
            return None
        return group.layers[violation.first_bad_source]

    # ------------------------------------------------------------------------------------------ parts

    def _verify(
        self,
        name: str,
        state: GroupsState,
        launch: str,
        real_kv_buffers: Any,
        arguments: Mapping[str, Any],
        given: Mapping[str, dict[str, Any]],
    ) -> GroupsVerifyResult:
        self._refuse(name, arguments)
        validation.instance("state", state, GroupsState)
        buffers = self._buffers(real_kv_buffers)
        log, verdicts, positions, passed = state.log, {}, {}, {}
        unattested, first_unattested = {}, []
        for group in self.groups:
            tag = group.tag(launch)
            own = {"log": log[tag], "launch_tag": tag, **self._common(group, state, buffers)}
            result = group._launch(name, {**given[group.name], **own})
            log = log.replace(tag, result.log)
            verdicts[group.name], positions[group.name] = result.verdict, result.first_bad_position
            unattested[group.name] = result.unattested
            first_unattested.append(result.first_unattested_position.astype(jnp.uint32))  # -1 becomes the largest
            passed[group.name] = result.real_kv_buffers
        packed = jnp.stack([pack_verdicts(verdicts[group], positions[group]) for group in self.names]).max(axis=0)
        verdict, position = unpack_verdicts(packed)
        return GroupsVerifyResult(
            state=dataclasses.replace(state, log=log),
            verdict=verdict,
            first_bad_position=position,
            verdicts=verdicts,
            first_bad_positions=positions,
            unattested=jnp.stack(list(unattested.values())).sum(axis=0, dtype=jnp.int32),
            first_unattested_position=jnp.stack(first_unattested).min(axis=0).astype(jnp.int32),
            unattested_by_group=unattested,
            real_kv_buffers=passed,
        )

    @staticmethod
    def _common(group: Group, state: GroupsState, buffers: Mapping[str, tuple[Array, ...]]) -> dict[str, Any]:
        held = buffers[group.name]
        if held and not group.sources:
            raise validation.error(f"real_kv_buffers must hold one array a source, got {len(held)} for 0 sources (group {group.name!r})")
        if group.sources and not held and group.real_kv_hash_mode != spec.RealKvHashMode.NONE:
            shapes = ", ".join(str(shape) for shape in dict.fromkeys(source.buffer_shape for source in group.sources))
            raise validation.error(
                f"group {group.name!r} needs its real_kv_buffers in mode {group.real_kv_hash_mode.name} ({len(group.sources)} sources, "
                f"buffers of shape {shapes})"
            )
        return {
            "records": state.records[group.name],
            "source_tags": state.source_tags[group.name],
            "real_kv_buffers": held,
            "real_kv_hash_mode": group.real_kv_hash_mode,
            "padding_slot": group.padding_slot,
        }

    def _refuse(self, name: str, arguments: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
        own = ("records", "log", "source_tags", "plan", "launch_tag", "real_kv_sources", "real_kv_hash_mode", "padding_slot", *more)
        for argument in own:
            if argument in arguments:
                raise validation.type_error(f"{argument} is known to the groups and must not be given to {name}")

    def _plans(self, plans: Any) -> dict[str, Plan]:
        by_group = self._by_group("plans", plans)
        return {group: validation.instance(f"plans of group {group!r}", plan, Plan) for group, plan in by_group.items()}

    def _by_group(self, name: str, value: Any) -> dict[str, Any]:
        """A value for every group: by name, or one for all."""
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.names, value)
        self._check_names(name, value)
        missing = [group for group in self.names if group not in value]
        if missing:
            raise validation.error(f"{name} must hold every group, group {missing[0]!r} is missing; there are {_listed(value)}")
        return dict(value)

    def _check_names(self, name: str, value: Mapping[str, Any]) -> None:
        for key in value:
            if key not in self.names:
                raise validation.error(f"{name} names the group {key!r}, there are {_listed(self.names)}")

    def _buffers(self, value: Any) -> dict[str, tuple[Array, ...]]:
        if value is None:
            return dict.fromkeys(self.names, ())
        if not isinstance(value, Mapping):
            raise validation.type_error(f"real_kv_buffers must be a mapping from group names to buffers, got {type(value).__name__}")
        self._check_names("real_kv_buffers", value)
        return {name: validation.sequence(f"real_kv_buffers of group {name!r}", value.get(name, ()), "arrays") for name in self.names}

    def _mappings(self, value: Any) -> dict[str, Any]:
        """The mapping of every group, None for those that have none."""
        by_name = isinstance(value, Mapping)
        if by_name:
            self._check_names("full_to_swa_index_mapping", value)
        out: dict[str, Any] = {}
        for group in self.groups:
            name = f"full_to_swa_index_mapping of group {group.name!r}"
            mine = value.get(group.name) if by_name else value if group.needs_mapping else None
            if group.needs_mapping and mine is None:
                raise validation.error(
                    f"group {group.name!r} (swa_window_size {group.swa_window_size}, pool of {group.slots} slots) needs its "
                    f"full_to_swa_index_mapping, an array of shape {self._mapping_shape()} with its slot for each slot of the full pool; "
                    f"got {'those of ' + _listed(value) if by_name and value else 'none'}"
                )
            if not group.needs_mapping and mine is not None:
                raise validation.error(
                    f"group {group.name!r} takes no full_to_swa_index_mapping (needs_mapping is False), got one of shape "
                    f"{validation.shape_of(mine, name)}"
                )
            if mine is not None:
                validation.check_shape(name, validation.shape_of(mine, name), (None,))
            out[group.name] = mine
        return out

    def _mapping_shape(self) -> str:
        """The shape that a mapping has, as far as the groups say."""
        full = next((group for group in self.groups if not group.needs_mapping), None)
        if full is None or full.slots is None:
            return "(full slots,)"
        parts = 1 if full.sharding is None else full.sharding.data_parallel
        return f"({parts * full.slots},)"

    def _written_slots(self, out_cache_loc: Any, mapping: Any) -> dict[str, Any]:
        if isinstance(out_cache_loc, Mapping):
            return self._by_group("out_cache_loc", out_cache_loc)
        mappings = self._mappings(mapping)
        out = {}
        for group in self.groups:
            mine = mappings[group.name]
            if mine is None:
                out[group.name] = out_cache_loc
            elif group.sharding is None:
                out[group.name] = translate_slots(slots=out_cache_loc, mapping=mine)
            else:
                arrays = (
                    validation.int_array("out_cache_loc", out_cache_loc, (None,), pairs=True),
                    validation.int_array("full_to_swa_index_mapping", mine, (None,), pairs=False),
                )
                out[group.name] = group.sharding.map_data_ranks(lambda slots, table: translate_slots(slots=slots, mapping=table), *arrays)
        return out


def translate_slots(*, slots: Array, mapping: Array) -> jax.Array:
    """Slots of the full pool as slots of another: negative ones unchanged, -2 where the mapping has no entry.

    Args:
      slots: ``[n]`` int32, int64 (x64 on) or uint32 ``[n, 2]``.
      mapping: ``[full slots]`` int32 or int64.

    Returns:
      Slots in the form of ``slots``, or int64 if the mapping is.

    Example:
      >>> translate_slots(slots=jnp.array([1, -1, 9]), mapping=jnp.array([0, 5, 6])).tolist()
      [5, -1, -2]
    """
    given = validation.int_array("slots", slots, (None,), pairs=True)
    table = validation.int_array("full_to_swa_index_mapping", mapping, (None,), pairs=False)
    value, size = words.from_operand(given), table.shape[0]
    found = words.from_operand(take(table, words.clamp_int32(value, max(size - 1, 0))))
    found = words.select(words.below(value, size), found, words.const(spec.PLAN_INVALID_SLOT, value.shape))
    found = words.select(words.is_negative(value), value, found)
    if given.dtype == jnp.uint32:
        return jnp.stack([found.lo, found.hi], axis=-1)
    return words.to_operand(found, jnp.int64 if jnp.int64 in (given.dtype, table.dtype) else jnp.int32)


def split_layers(*, layer_groups: Sequence[str | None], values: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """One value a layer (a buffer, a source, a number) as one tuple a group.

    Args:
      layer_groups: the group of each layer, None for a layer without KV of its own (it reads that of another layer).
      values: one a layer; those of layers without KV are left out, None will do.

    Example:
      >>> split_layers(layer_groups=("full", "swa", None, "swa"), values=range(4))
      {'full': (0,), 'swa': (1, 3)}
    """
    _check_layers(layer_groups, len(_sized("values", values)))
    out: dict[str, tuple[Any, ...]] = {}
    for group, value in zip(layer_groups, values, strict=True):
        if group is not None:
            out[group] = (*out.get(group, ()), value)
    return out


def join_layers(*, layer_groups: Sequence[str | None], values: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The inverse of :func:`split_layers`: one value a layer, None for layers without KV of their own.

    Example:
      >>> join_layers(layer_groups=("full", "swa", None, "swa"), values={"full": [0], "swa": [1, 3]})
      [0, 1, None, 3]
    """
    _check_layers(layer_groups, None)
    for name, held in _mapping("values", values, "groups").items():
        _sized(f"values of group {name!r}", held)
        wanted = sum(group == name for group in layer_groups)
        if len(held) != wanted:
            raise validation.error(f"group {name!r} has {wanted} layers, got {len(held)} values")
    rest = {group: iter(held) for group, held in values.items()}
    for group in layer_groups:
        if group is not None and group not in rest:
            raise validation.error(f"group {group!r} has layers, but no values; there are those of {_listed(values)}")
    return [None if group is None else next(rest[group]) for group in layer_groups]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _mapping(name: str, value: Any, keys: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise validation.type_error(f"{name} must be a mapping from {keys}, got {type(value).__name__}")
    return value


def _sized(name: str, value: Any) -> Any:
    """A sequence or an array, whose first axis is one."""
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise validation.type_error(f"{name} must be a sequence, got {type(value).__name__}")
    return value


def _check_layers(layer_groups: Any, count: int | None) -> None:
    for group in validation.sequence("layer_groups", layer_groups, "group names"):
        if group is not None and not isinstance(group, str):
            raise validation.type_error(f"layer_groups must be a tuple of group names and None, got a {type(group).__name__} in it")
    if count is not None and len(layer_groups) != count:
        raise validation.error(f"layer_groups must name a group a layer, got {len(layer_groups)} for {count} values")
