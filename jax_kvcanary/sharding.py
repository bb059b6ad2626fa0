"""The operations on a device mesh: one object that holds the mesh and the pool's partition, and runs every launch rank by rank.

Nothing of the size of a pool ever moves: each rank checks what it holds, and one all-reduce of an int32 a request agrees the verdict.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvcanary import digest as digest_
from jax_kvcanary import ops, spec, validation
from jax_kvcanary.digest import RankDigestResult, RankDisagreement
from jax_kvcanary.moves import MoveResult
from jax_kvcanary.report import LogReport, decode_log
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import Array, Plan, VerifyPlan, VerifyResult, ViolationLog, WritePlan, WriteResult
from jax_kvcanary.tables import BlockTable, FlatTable, IdentityTable, RowTable

LocalSources = Sequence[RealKvSource] | Callable[[tuple[jax.ShapeDtypeStruct, ...]], Sequence[RealKvSource]]
"""Sources of one shard, or how to make them from the shapes and dtypes of the shards of all buffers."""

_STATE = frozenset({"records", "source_tags", "log", "capacities"})  # a part for every shard
_EVERYWHERE = frozenset({"step", "source_window", "enable_chain_position_assert"})  # one value for all
_NARROW = frozenset(
    {
        "req_pool_indices",
        "prefix_lens",
        "extend_seq_lens",
        "full_to_swa_index_mapping",
        "req_to_verify_expected_tokens_valid_lens",
    }
)
_WIDE = frozenset(
    {
        "namespaces",
        "request_ids",
        "input_ids",
        "positions",
        "out_cache_loc",
        "expected_input_tokens",
        "expected_input_positions",
    }
)
_ARRAYS = _STATE | _EVERYWHERE | _NARROW | _WIDE | {"req_to_token", "req_to_verify_expected_tokens", "plan", "real_kv_buffers", "verdict"}
_OWN = frozenset({"real_kv_sources", "shard"})  # what this module fills in itself

_OK, _NOT_CHECKED, _BAD_NOWHERE = -2, -3, -1


def pack_verdicts(verdict: Array, first_bad_position: Array) -> jax.Array:
    """Verdict and first bad position in one int32, so that a maximum over ranks gives the worst verdict and the smallest position.

    BAD at position p is ``2**31 - 1 - p``, BAD without a position -1, OK -2, NOT_CHECKED -3: every pair of values that a launch
    returns has a number of its own.

    Args:
      verdict, first_bad_position: int32, of one shape.

    Example:
      >>> pack_verdicts(jnp.array([0, 1, 2, 2]), jnp.array([-1, -1, -1, 5])).tolist()
      [-3, -2, -1, 2147483642]
    """
    bad = validation.exact_array("verdict", verdict, (None,) * len(validation.shape_of(verdict)), np.int32)
    position = validation.exact_array("first_bad_position", first_bad_position, bad.shape, np.int32)
    placed = jnp.where(position >= np.int32(0), np.int32(spec.INT32_MAX) - position, np.int32(_BAD_NOWHERE))
    return jnp.where(bad == np.int32(spec.Verdict.BAD), placed, bad + np.int32(_NOT_CHECKED))


def unpack_verdicts(packed: Array) -> tuple[jax.Array, jax.Array]:
    """Verdict and first bad position of :func:`pack_verdicts`, int32 of the shape of ``packed``."""
    value = validation.exact_array("packed", packed, (None,) * len(validation.shape_of(packed)), np.int32)
    bad = value >= np.int32(_BAD_NOWHERE)
    verdict = jnp.where(bad, np.int32(spec.Verdict.BAD), value - np.int32(_NOT_CHECKED))
    return verdict, jnp.where(value >= np.int32(0), np.int32(spec.INT32_MAX) - value, np.int32(-1))


def merge_reports(reports: Iterable[LogReport]) -> LogReport:
    """Several logs as one: violations one log after the other, counts added up."""
    if not isinstance(reports, Iterable):
        raise validation.type_error(f"reports must be several LogReport, got {type(reports).__name__}")
    every = validation.sequence_of("reports", tuple(reports), LogReport)
    return LogReport(
        violations=tuple(violation for report in every for violation in report.violations),
        reported=min(sum(report.reported for report in every), spec.INT32_MAX),
        stored=sum(report.stored for report in every),
        lost=sum(report.lost for report in every),
        slot_runs={tag: sum(report.slot_runs[tag] for report in every) for tag in spec.CanaryLaunchTag},
        kernel_runs={tag: sum(report.kernel_runs[tag] for report in every) for tag in spec.CanaryLaunchTag},
    )


@dataclasses.dataclass(frozen=True, init=False)
class ShardedOps:
    """The operations for one pool on one mesh. Frozen and hashable: a static argument, or closed over by a step.

    Every device is a *shard* with records and a log of its own; its number, in column 15 of a violation, is its place in the mesh
    in row-major order. Shards along ``data_axes`` serve different requests: batch arrays and tables are split over these axes
    along axis 0, and rows and slots in them count from 0 in each part. Shards along ``tensor_axes`` serve the same requests and hold
    different heads of them (or copies), so they get the same batch and must come to the same verdict.

    Args:
      mesh: the device mesh.
      buffer_specs: a PartitionSpec a pool buffer, or one for all.
      buffers: the pool's buffers, arrays or anything with ``shape`` and ``dtype``: the whole ones. Not kept.
      sources: sources of one shard, or a function that makes them from the ShapeDtypeStructs of one shard of each buffer.
      data_axes: mesh axes over which requests and pages are split.
      tensor_axes: mesh axes whose shards serve the same requests; None: all axes that are not in ``data_axes``.
      slots: slots of one shard; None: what the sources cover.

    Attributes:
      sources: of one shard. slots: of one shard. buffer_shapes, buffer_dtypes: of the whole buffers.

    Raises:
      ValueError: an axis that the mesh does not have or that does not divide, sources of other shapes. TypeError: no mesh.

    Example:
      >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
      >>> pool = jax.ShapeDtypeStruct((16, 4, 8), jnp.float32)
      >>> sharded = ShardedOps(
      ...     mesh=mesh, data_axes=("data",), buffers=(pool,), buffer_specs=jax.sharding.PartitionSpec("data", "tensor"),
      ...     sources=lambda local: make_row_source(layer_buffer=local[0], read_bytes=32),
      ... )
      >>> sharded.slots, sharded.tensor_axes
      (16, ('tensor',))
    """

    mesh: Mesh | AbstractMesh
    data_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    buffer_specs: tuple[P, ...]
    buffer_shapes: tuple[tuple[int, ...], ...]
    buffer_dtypes: tuple[np.dtype, ...]
    sources: tuple[RealKvSource, ...]
    slots: int

    def __init__(
        self,
        *,
        mesh: Mesh | AbstractMesh,
        buffer_specs: P | Sequence[P] = (),
        buffers: Sequence[Any] = (),
        sources: LocalSources = (),
        data_axes: str | Sequence[str] = (),
        tensor_axes: str | Sequence[str] | None = None,
        slots: int | None = None,
    ) -> None:
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise validation.type_error(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
        data = _axis_names("data_axes", data_axes)
        rest = tuple(axis for axis in mesh.axis_names if axis not in data)
        tensor = rest if tensor_axes is None else _axis_names("tensor_axes", tensor_axes)
        _check_axes(mesh, data, tensor)
        buffers = validation.sequence("buffers", buffers, "arrays")
        one = isinstance(buffer_specs, P)
        specs = (buffer_specs,) * len(buffers) if one else validation.sequence("buffer_specs", buffer_specs, "PartitionSpec")
        if len(specs) != len(buffers):
            raise validation.error(f"buffer_specs must hold one PartitionSpec a buffer, got {len(specs)} for {len(buffers)} buffers")
        self._set(
            mesh=mesh,
            data_axes=data,
            tensor_axes=tensor,
            buffer_specs=specs,
            buffer_dtypes=tuple(_described(f"buffers[{i}]", buffer) for i, buffer in enumerate(buffers)),
            buffer_shapes=tuple(tuple(buffer.shape) for buffer in buffers),
        )
        local = tuple(jax.ShapeDtypeStruct(self._local_shape(i), dtype, sharding=None) for i, dtype in enumerate(self.buffer_dtypes))
        made = validation.sequence_of("sources", sources(local) if callable(sources) else sources, RealKvSource)
        self._set(sources=made, slots=_local_slots(made, slots))
        self._check_sources(local)

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------------------ shards

    @property
    def num_shards(self) -> int:
        """Devices of the mesh."""
        return self._size(self.mesh.axis_names)

    @property
    def data_parallel(self) -> int:
        """Parts into which a batch is split."""
        return self._size(self.data_axes)

    @property
    def tensor_parallel(self) -> int:
        """Shards that serve the same requests."""
        return self._size(self.tensor_axes)

    def coordinates(self, shard: int) -> dict[str, int]:
        """Where a shard is on the mesh, an index an axis."""
        sizes = tuple(self.mesh.shape[axis] for axis in self.mesh.axis_names)
        shard = validation.static_int("shard", shard)
        if not 0 <= shard < self.num_shards:
            raise validation.error(f"shard must be in [0, {self.num_shards}), got {shard}")
        return dict(zip(self.mesh.axis_names, (int(i) for i in np.unravel_index(shard, sizes)), strict=True))

    def data_rank(self, shard: int) -> int:
        """Which part of the batch a shard serves."""
        at = self.coordinates(shard)
        rank = 0
        for axis in self.data_axes:
            rank = rank * self.mesh.shape[axis] + at[axis]
        return rank

    @property
    def state_spec(self) -> P:
        """Partition of records, source tags and logs: axis 0 over all mesh axes."""
        return P(tuple(self.mesh.axis_names))

    @property
    def batch_spec(self) -> P:
        """Partition of batch arrays, tables, plans and verdicts: axis 0 over the data axes."""
        return P(self.data_axes) if self.data_axes else P()

    # ------------------------------------------------------------------------------------------ allocation

    def allocate_records(self, *, provenance: bool = False) -> jax.Array:
        """Fresh records of all shards, uint32 ``[shards * slots, 8 or 16]``."""
        words = spec.PROVENANCE_RECORD_WORDS if validation.static_bool("provenance", provenance) else spec.RECORD_WORDS
        return self._zeros((self.num_shards * self.slots, words), jnp.uint32)

    def allocate_source_tags(self) -> jax.Array:
        """Fresh source tags of all shards, uint32 ``[shards * slots, sources]``."""
        return self._zeros((self.num_shards * self.slots, len(self.sources)), jnp.uint32)

    def allocate_log(self, *, ring_capacity: int) -> ViolationLog:
        """An empty log of every shard, one after the other along axis 0, each with room for ``ring_capacity`` rows."""
        rows = validation.static_capacity("ring_capacity", ring_capacity)
        shards = self.num_shards
        return ViolationLog(
            ring=self._zeros((shards * rows, spec.RING_WORDS), jnp.uint32),
            write_index=self._zeros((shards,), jnp.int32),
            slot_run_counter=self._zeros((shards * spec.NUM_LAUNCH_TAGS, 2), jnp.uint32),
            kernel_run_counter=self._zeros((shards * spec.NUM_LAUNCH_TAGS, 2), jnp.uint32),
        )

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.zeros(shape, dtype, device=NamedSharding(self.mesh, self.state_spec))

    # ------------------------------------------------------------------------------------------ launches

    def plan(self, **arguments: Any) -> Plan:
        """:func:`jax_kvcanary.plan` on every data rank.

        Args:
          arguments: those of :func:`plan`; arrays hold the parts of all data ranks one after the other along axis 0, capacities are
            those of one rank.

        Returns:
          The plans of all data ranks, every array one after the other along axis 0.
        """
        return self._launch("plan", arguments)

    def verify(self, **arguments: Any) -> VerifyResult:
        """:func:`jax_kvcanary.verify` on every shard, with one all-reduce of an int32 ``[bs]`` over the tensor axes.

        **Use the returned log, or jit removes the check.**

        Args:
          arguments: those of :func:`verify` but for ``real_kv_sources`` and ``shard``, which are known here. ``plan``: the verify
            half of :meth:`plan`.

        Returns:
          Logs of all shards, verdict and first bad position of all requests (the worst and the smallest of their shards), and the
          buffers if passed through.
        """
        return self._launch("verify", arguments)

    def verify_fused(self, **arguments: Any) -> VerifyResult:
        """:func:`jax_kvcanary.verify_fused` on every shard, with one all-reduce of an int32 ``[bs]`` over the tensor axes.

        **Use the returned log, or jit removes the check.**

        Args:
          arguments: those of :func:`verify_fused` but for ``real_kv_sources`` and ``shard``, which are known here.

        Returns:
          What :meth:`verify` returns.

        Raises:
          ValueError: an array whose axis 0 does not divide over the data axes, and whatever :func:`verify_fused` raises.
        """
        return self._launch("verify_fused", arguments)

    def write(self, **arguments: Any) -> WriteResult:
        """:func:`jax_kvcanary.write` on every shard, with one all-reduce of the verdict over the tensor axes if it is used.

        **Use the returned records, tags and log, or jit removes the stamps and the checks.**

        Args:
          arguments: those of :func:`write` but for ``real_kv_sources`` and ``shard``, which are known here. ``plan``: the write
            half of :meth:`plan`. ``input_ids``, ``positions``, ``out_cache_loc``: equally many tokens a data rank, the slots
            counted on the rank; -1 fills up.

        Returns:
          Records, tags and logs of all shards and the verdict of all requests.
        """
        return self._launch("write", arguments)

    def adopt(self, **arguments: Any) -> WriteResult:
        """:func:`jax_kvcanary.adopt` on every shard; arguments and result are those of :meth:`write`."""
        flags = validation.static_int("record_flags", arguments.pop("record_flags", 0), minimum=0, maximum=2**32 - 1)
        return self._launch("write", {**arguments, "record_flags": flags | int(spec.RecordFlag.ADOPTED)})

    def check_rank_digests(
        self,
        *,
        records: Array,
        log: ViolationLog,
        verdict: Array,
        launch_tag: int | spec.CanaryLaunchTag,
        step: int | Array = 0,
        capacities: Array | None = None,
        **arguments: Any,
    ) -> RankDigestResult:
        """Compare what shards that serve the same requests hold of them, by one all-reduce of a uint32 ``[bs, 2]``.

        **Use the returned log and verdict, or jit removes the comparison.**

        Args:
          records, log: of all shards.
          verdict: int32 ``[data ranks * bs]`` of a verify of this batch.
          launch_tag, step: what violation rows say.
          capacities: int32 ``[shards]``, slots that each shard really has; None: ``slots`` on all.
          arguments: those of :func:`rank_digest` but for ``records`` and ``capacity``.

        Returns:
          Logs of all shards, and verdict and disagreement of all requests; see :func:`check_rank_digests`.
        """
        given = {"records": records, "log": log, "verdict": verdict, "launch_tag": launch_tag, "step": step, **arguments}
        return self._launch("rank_digest", given if capacities is None else {**given, "capacities": capacities})

    def move(self, function: Callable[..., MoveResult], **arguments: Any) -> MoveResult:
        """Run one of the record moves (copy, permute, release, reset) on every shard.

        Args:
          function: of :mod:`jax_kvcanary.moves`: copy_records, permute_records, release_records or reset_records.
          arguments: its arguments: ``records`` and ``source_tags`` of all shards, index arrays of all data ranks one after the other
            along axis 0, with slots or pages counted on the rank.

        Returns:
          Records and tags of all shards, and the status of all data ranks' entries.
        """
        known = inspect.signature(validation.function("function", function)).parameters
        _check_arguments(getattr(function, "__name__", "function"), known, arguments)
        kept = {name: value for name, value in arguments.items() if value is not None or name != "source_tags"}
        static = {name: value for name, value in kept.items() if isinstance(value, (bool, int, np.integer, str))}
        arrays = {name: value for name, value in kept.items() if name not in static}
        placed = {
            name: self._place(name, value) if name in _STATE else self._split(name, validation.int_array(name, value, (None,), pairs=False))
            for name, value in arrays.items()
        }
        self._check_state(placed)
        tags = self.state_spec if "source_tags" in placed else None
        out = MoveResult(records=self.state_spec, source_tags=tags, status=self.batch_spec)
        values = tuple((name, type(value), value) for name, value in sorted(static.items()))
        return _mapped(self, function, values, tuple(sorted(placed)), out)(placed)

    def map_data_ranks(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """``function`` of each data rank's part of the arrays: axis 0 of arrays and results is split over the data axes.

        Example:
          >>> sharded = ShardedOps(mesh=jax.make_mesh((1,), ("data",)), data_axes="data", slots=4)
          >>> sharded.map_data_ranks(lambda x: x - x[0], jnp.array([5, 7])).tolist()
          [0, 2]
        """
        validation.function("function", function)
        placed = tuple(jax.tree.map(functools.partial(self._split, f"arrays[{i}]"), array) for i, array in enumerate(arrays))
        specs = (self.batch_spec,) * len(placed)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=self.batch_spec, check_vma=False)
        return jax.jit(mapped, inline=True)(*placed)

    def _launch(self, name: str, arguments: dict[str, Any]) -> Any:
        known = _parameters(name)
        for argument in arguments:
            if argument in _OWN:
                raise validation.type_error(f"{argument} is known to the ShardedOps and must not be given")
        _check_arguments(name, known, arguments)
        # None stands for an argument that is not given where that is its default; of padding_slot and padding_req it is a value.
        optional = {key for key in _ARRAYS & known.keys() if known[key].default is None or key == "real_kv_buffers"}
        given = {key: value for key, value in arguments.items() if value is not None or key not in optional}
        self._check_devices({key: value for key, value in given.items() if key in _ARRAYS and key != "real_kv_buffers"})
        arrays = {key: self._place(key, value) for key, value in given.items() if key in _ARRAYS}
        static = {key: value for key, value in arguments.items() if key not in _ARRAYS}
        self._check_state(arrays)
        if "verdict" in arrays and "req_pool_indices" in arrays:
            validation.check_shape("verdict", arrays["verdict"].shape, arrays["req_pool_indices"].shape)
        buffers, places = _without_repeats(arrays.pop("real_kv_buffers", ()))
        if "real_kv_hash_mode" in known and self.sources and not buffers:
            mode = static.get("real_kv_hash_mode", spec.RealKvHashMode.NONE)
            if validation.static_enum("real_kv_hash_mode", mode, spec.RealKvHashMode) != spec.RealKvHashMode.NONE:
                raise validation.error(f"real_kv_buffers must hold one array a source, got 0 for {len(self.sources)} sources")
        passes = bool(buffers) and static.get("pass_through") is True
        unique_specs = tuple(self.buffer_specs[places.index(place)] for place in range(len(buffers)))
        arrays["real_kv_buffers"] = buffers
        key = (self, name, tuple((k, type(v), v) for k, v in sorted(static.items())), places, unique_specs, passes, tuple(sorted(arrays)))
        try:
            program = _program(*key)
        except TypeError:  # a static argument that cannot be hashed: the operation says which
            program = _program.__wrapped__(*key)
        return program(arrays)

    def _local(self, name: str, static: dict[str, Any], places: tuple[int, ...], arrays: dict[str, Any]) -> Any:
        """One shard's part of a launch."""
        unique = arrays.pop("real_kv_buffers")
        if name == "plan":
            return ops.plan(**arrays, **static)
        shard = lax.axis_index(tuple(self.mesh.axis_names)).astype(jnp.uint32)
        if name == "rank_digest":
            return self._local_digest(static, shard, **arrays)
        pool = {"real_kv_buffers": tuple(unique[place] for place in places), "real_kv_sources": self.sources} if places else {}
        result = getattr(ops, name)(**arrays, **static, **pool, shard=shard)
        if name == "write":
            return dataclasses.replace(result, verdict=self._agree(result.verdict))
        packed = pack_verdicts(result.verdict, result.first_bad_position)
        unattested, first = result.unattested, result.first_unattested_position
        if static.get("strict", True):  # none is unattested anywhere
            packed = self._agree(packed)
        else:  # the largest count and the lowest position, in the same all-reduce
            top = jnp.int32(spec.INT32_MAX)
            packed, unattested, first = self._agree(jnp.stack([packed, unattested, jnp.where(first < 0, -1, top - first)]))
            first = jnp.where(first < 0, -1, top - first)
        verdict, position = unpack_verdicts(packed)
        passed = result.real_kv_buffers
        handed_on = tuple(passed[places.index(place)] for place in range(len(unique))) if passed else ()
        return dataclasses.replace(
            result,
            verdict=verdict,
            first_bad_position=position,
            unattested=unattested,
            first_unattested_position=first,
            real_kv_buffers=handed_on,
        )

    def _local_digest(
        self, static: dict[str, Any], shard: jax.Array, *, log: Any, verdict: Any, step: Any, capacities: Any = None, **arrays: Any
    ) -> RankDigestResult:
        tag = {"launch_tag": static["launch_tag"]}
        rest = {name: value for name, value in static.items() if name not in tag}
        mine = digest_.rank_digest(**arrays, **rest, capacity=capacities)
        return digest_.check_rank_digests(digest=mine, log=log, verdict=verdict, axis_names=self.tensor_axes, step=step, shard=shard, **tag)

    def _agree(self, value: jax.Array) -> jax.Array:
        """The maximum over the shards that serve the same requests."""
        return lax.pmax(value, self.tensor_axes) if self.tensor_parallel > 1 else value

    # ------------------------------------------------------------------------------------------ reading

    def decode_shards(self, log: ViolationLog, *, records: Array | None = None) -> dict[int, LogReport]:
        """The log of every shard that this process holds, by its number; see :func:`decode_log`."""
        validation.instance("log", log, ViolationLog)
        for field in dataclasses.fields(log):
            validation.readable(f"log.{field.name}", getattr(log, field.name))
        if records is not None:
            validation.readable("records", records)
        self._check_state({"log": log} if records is None else {"log": log, "records": records})
        parts = {field.name: _parts(getattr(log, field.name), self.num_shards) for field in dataclasses.fields(log)}
        tables = {} if records is None else _parts(records, self.num_shards)
        return {
            shard: decode_log(ViolationLog(**{name: part[shard] for name, part in parts.items()}), records=tables.get(shard))
            for shard in sorted(parts["write_index"])
        }

    def decode_log(self, log: ViolationLog, *, records: Array | None = None) -> LogReport:
        """The logs of all shards as one report; each violation says its shard. Counters add up over the shards."""
        return merge_reports(self.decode_shards(log, records=records).values())

    def find_deviating_ranks(self, report: LogReport) -> tuple[RankDisagreement, ...]:
        """Which shards the RANK_DIGEST rows of a report speak against."""
        validation.instance("report", report, LogReport)
        return digest_.find_deviating_ranks(report.violations, data_rank=self.data_rank)

    # ------------------------------------------------------------------------------------------ checks

    def _size(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _local_shape(self, index: int) -> tuple[int, ...]:
        """The shape of one shard of a buffer."""
        name, shape, partition = f"buffers[{index}]", self.buffer_shapes[index], self.buffer_specs[index]
        if not isinstance(partition, P):
            raise validation.type_error(f"buffer_specs[{index}] must be a PartitionSpec, got {type(partition).__name__}")
        if len(partition) > len(shape):
            raise validation.error(f"buffer_specs[{index}] {partition} has {len(partition)} axes, {name} has shape {shape}")
        local, used = list(shape), []
        for axis, entry in enumerate(partition):
            names = () if entry is None else _axis_names(f"buffer_specs[{index}]", entry)
            for mesh_axis in names:
                if mesh_axis in used:
                    raise validation.error(f"buffer_specs[{index}] {partition} names the axis {mesh_axis!r} twice")
                if mesh_axis not in self.mesh.axis_names:
                    raise validation.error(f"buffer_specs[{index}] names the axis {mesh_axis!r}, {_mesh_text(self.mesh)} (shape {shape})")
                used.append(mesh_axis)
            local[axis] = self._divide(name, shape, axis, names, f"partitioned as {partition}")
        for mesh_axis in self.data_axes:
            if mesh_axis not in used and self.mesh.shape[mesh_axis] > 1:
                raise validation.error(
                    f"{name} must be split over the data axis {mesh_axis!r} of size {self.mesh.shape[mesh_axis]}: shards along it serve "
                    f"different requests and need pages of their own (shape {shape}, partitioned as {partition})"
                )
        return tuple(local)

    def _divide(self, name: str, shape: tuple[int, ...], axis: int, mesh_axes: tuple[str, ...], detail: str) -> int:
        parts = self._size(mesh_axes)
        if shape[axis] % parts:
            over = " x ".join(f"{mesh_axis!r} of size {self.mesh.shape[mesh_axis]}" for mesh_axis in mesh_axes)
            raise validation.error(
                f"{name} axis {axis} of size {shape[axis]} does not divide over the mesh axis {over} (shape {shape}, {detail})"
            )
        return shape[axis] // parts

    def _check_sources(self, local: tuple[jax.ShapeDtypeStruct, ...]) -> None:
        for i, source in enumerate(self.sources):
            if not isinstance(source, RealKvSource):
                raise validation.type_error(f"sources must be a tuple of RealKvSource, got a {type(source).__name__} in it")
            index = i if source.buffer_index is None else source.buffer_index
            if index >= len(local):
                raise validation.error(f"sources[{i}] reads buffer {index}, but there are {len(local)} buffers")
            if (source.buffer_shape, source.buffer_dtype) != (local[index].shape, local[index].dtype):
                raise validation.error(
                    f"sources[{i}] describes {source.buffer_dtype.name} {source.buffer_shape}, but one shard of buffers[{index}] is "
                    f"{local[index].dtype.name} {local[index].shape} (the whole is {self.buffer_shapes[index]}, partitioned as "
                    f"{self.buffer_specs[index]})"
                )

    def _check_state(self, arrays: Mapping[str, Any]) -> None:
        shards, rows = self.num_shards, self.num_shards * self.slots
        for name in ("records", "source_tags"):
            shape = validation.shape_of(arrays[name]) if name in arrays else None
            if shape is not None and (len(shape) != 2 or shape[0] != rows):
                raise validation.error(
                    f"{name} must have {rows} rows ({shards} shards of {self.slots} slots), got shape {shape}, {_mesh_text(self.mesh)}"
                )
        log = arrays.get("log")
        if log is not None:
            if not isinstance(log, ViolationLog):
                raise validation.type_error(f"log must be a ViolationLog, got {type(log).__name__}")
            shapes = {field.name: validation.shape_of(getattr(log, field.name)) for field in dataclasses.fields(log)}
            if shapes["write_index"] != (shards,) or shapes["ring"][:1] == () or shapes["ring"][0] % shards:
                raise validation.error(
                    f"log must hold the logs of {shards} shards (allocate_log), got write_index of shape {shapes['write_index']} and ring "
                    f"of shape {shapes['ring']}, {_mesh_text(self.mesh)}"
                )
            for name in ("slot_run_counter", "kernel_run_counter"):
                validation.check_shape(f"log.{name}", shapes[name], (shards * spec.NUM_LAUNCH_TAGS, 2))
        if "capacities" in arrays:
            validation.check_shape("capacities", validation.shape_of(arrays["capacities"]), (shards,))

    def _place(self, name: str, value: Any) -> Any:
        """An argument as arrays that can be split, checked against the mesh."""
        if name == "log":
            for field in dataclasses.fields(validation.instance("log", value, ViolationLog)):
                validation.operand_dtype(f"log.{field.name}", getattr(value, field.name))
            return value
        if name == "capacities":
            return validation.int_array(name, value, (None,), pairs=False)
        if name in _STATE:
            validation.operand_dtype(name, value)
            return value
        if name == "step":
            return self._everywhere(validation.context_array(value, 0)[0])
        if name == "source_window":
            return self._everywhere(validation.window_array(value))
        if name == "enable_chain_position_assert":
            return self._everywhere(validation.flag_array(name, value))
        if name == "real_kv_buffers":
            return self._check_buffers(value)
        if name in _NARROW:
            return self._split(name, validation.int_array(name, value, (None,), pairs=False))
        if name in _WIDE:
            return self._split(name, validation.int_array(name, value, (None,), pairs=True))
        if name == "verdict":
            return self._split(name, validation.exact_array(name, value, (None,), np.int32))
        if name == "plan":
            if not isinstance(value, (VerifyPlan, WritePlan)):
                raise validation.type_error(f"plan must be one half of a Plan, got {type(value).__name__}")
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return type(value)(**{key: self._split(f"plan.{key}", _plan_field(key, array)) for key, array in fields.items()})
        if name == "req_to_verify_expected_tokens":
            return self._split(name, validation.int_array(name, value, (None, None), pairs=False))
        return self._place_table(name, value)

    def _place_table(self, name: str, value: Any) -> Any:
        if isinstance(value, IdentityTable):
            return value
        if isinstance(value, FlatTable):
            flat, starts = (validation.int_array(name, x, (None,), pairs=False) for x in (value.table, value.starts))
            return FlatTable(self._split(name, flat), self._split(f"{name} starts", starts))
        table = value.table if isinstance(value, (RowTable, BlockTable)) else value
        rows = self._split(name, validation.int_array(name, table, (None, None), pairs=False))
        return dataclasses.replace(value, table=rows) if isinstance(value, (RowTable, BlockTable)) else rows

    def _check_buffers(self, buffers: Any) -> tuple[Any, ...]:
        buffers = validation.sequence("real_kv_buffers", buffers, "arrays")
        if buffers and len(buffers) != len(self.buffer_shapes):
            raise validation.error(f"real_kv_buffers must hold {len(self.buffer_shapes)} arrays, got {len(buffers)}")
        for i, (buffer, shape, dtype) in enumerate(zip(buffers, self.buffer_shapes, self.buffer_dtypes, strict=False)):
            found = validation.operand_dtype(f"real_kv_buffers[{i}]", buffer)
            if tuple(buffer.shape) != shape or found != dtype:
                raise validation.error(
                    f"real_kv_buffers[{i}] must be {dtype.name} {shape} as the ShardedOps was made for, got {found.name} "
                    f"{tuple(buffer.shape)}"
                )
            self._check_placement(f"real_kv_buffers[{i}]", buffer, self.buffer_specs[i])
        return tuple(buffers)

    def _check_placement(self, name: str, buffer: Any, partition: P) -> None:
        """A pool that lies otherwise than it is said to would be moved, silently."""
        if isinstance(buffer, jax.core.Tracer) or not getattr(buffer, "committed", False) or isinstance(self.mesh, AbstractMesh):
            return
        wanted = NamedSharding(self.mesh, partition)
        if not buffer.sharding.is_equivalent_to(wanted, buffer.ndim):
            raise validation.error(f"{name} must be placed as {wanted}, got {buffer.sharding} (shape {tuple(buffer.shape)})")

    def _check_devices(self, arrays: Mapping[str, Any]) -> None:
        """Outside of jit nobody moves an array that was put on other devices, or on another mesh whose axes say where it is."""
        leaves = [(name, leaf) for name, value in arrays.items() for leaf in jax.tree.leaves(value)]
        if isinstance(self.mesh, AbstractMesh) or any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
            return
        for name, leaf in leaves:
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                continue
            held = leaf.sharding
            explicit = isinstance(held, NamedSharding) and AxisType.Explicit in held.mesh.axis_types and held.mesh != self.mesh
            if explicit or held.device_set != set(self.mesh.devices.flat):
                raise validation.error(f"{name} must be on the mesh of the ShardedOps, got {held}, {_mesh_text(self.mesh)}")

    def _split(self, name: str, array: Any) -> jax.Array:
        validation.operand_dtype(name, array)
        if array.ndim == 0:
            raise validation.error(f"{name} must have an axis to split over the data axes {self.data_axes}, got a scalar")
        self._divide(name, tuple(array.shape), 0, self.data_axes, _mesh_text(self.mesh))
        return self._reshard(array, self.batch_spec)

    def _everywhere(self, array: jax.Array) -> jax.Array:
        return self._reshard(array, P())

    def _reshard(self, array: jax.Array, partition: P) -> jax.Array:
        """On a mesh with explicit axes an array must say how it is split; only small arrays come here."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        return jax.sharding.reshard(array, NamedSharding(self.mesh, partition))

    def _spec(self, name: str) -> P:
        return self.state_spec if name in _STATE else P() if name in _EVERYWHERE else self.batch_spec


@functools.lru_cache(maxsize=256)
def _program(
    sharded: ShardedOps,
    name: str,
    static: tuple[tuple[str, type, Any], ...],
    places: tuple[int, ...],
    unique_specs: tuple[P, ...],
    passes: bool,
    names: tuple[str, ...],
) -> Callable[[dict[str, Any]], Any]:
    """A launch as one jitted program; inside another jit it is inlined."""
    specs: dict[str, Any] = {key: sharded._spec(key) for key in names}
    specs["real_kv_buffers"] = unique_specs
    state: Any = sharded.state_spec  # stands for all arrays of a log
    batch = sharded.batch_spec
    out: Any
    if name == "plan":
        out = batch
    elif name == "write":
        out = WriteResult(records=state, source_tags=state if "source_tags" in names else None, log=state, verdict=batch)
    elif name == "rank_digest":
        out = RankDigestResult(log=state, verdict=batch, disagree=batch)
    else:
        buffers = unique_specs if passes else ()
        rows = dict.fromkeys(("verdict", "first_bad_position", "unattested", "first_unattested_position"), batch)
        out = VerifyResult(log=state, **rows, real_kv_buffers=buffers)
    values = {key: value for key, _, value in static}
    local = functools.partial(sharded._local, name, values, places)
    run = jax.jit(jax.shard_map(local, mesh=sharded.mesh, in_specs=(specs,), out_specs=out, check_vma=False), inline=True)

    def launch(arrays: dict[str, Any]) -> Any:
        result = run(arrays)
        if passes:
            result = dataclasses.replace(result, real_kv_buffers=tuple(result.real_kv_buffers[place] for place in places))
        return result

    return launch


@functools.lru_cache(maxsize=64)
def _mapped(
    sharded: ShardedOps, function: Callable[..., Any], static: tuple[tuple[str, type, Any], ...], names: tuple[str, ...], out_specs: Any
) -> Callable[[dict[str, Any]], Any]:
    """A move of keyword arrays, shard by shard, as one jitted program."""
    specs = {name: sharded._spec(name) for name in names}
    values = {name: value for name, _, value in static}

    def local(arrays: dict[str, Any]) -> MoveResult:
        return validation.instance("the result of function", function(**arrays, **values), MoveResult)

    return jax.jit(jax.shard_map(local, mesh=sharded.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False), inline=True)


@functools.cache
def _parameters(name: str) -> dict[str, inspect.Parameter]:
    if name == "rank_digest":
        own = {**inspect.signature(digest_.rank_digest).parameters, **inspect.signature(ShardedOps.check_rank_digests).parameters}
        return {key: own[key] for key in own if key not in ("self", "arguments", "capacity")}
    return dict(inspect.signature(getattr(ops, name)).parameters)


def _check_arguments(name: str, known: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    """Names only; a function that takes any keyword has no unknown ones."""
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values())
    for argument in arguments:
        if argument not in known and not takes_any:
            raise validation.type_error(f"{name} has no argument {argument!r}")
    for argument, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if needed and argument not in arguments:
            raise validation.type_error(f"{name} needs the argument {argument!r}")


def _described(name: str, value: Any) -> np.dtype:
    """The dtype of an array or a description of one."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise validation.type_error(f"{name} must be an array or anything with shape and dtype, got {type(value).__name__}")
    return validation.numpy_dtype(name, value.dtype)


def _plan_field(name: str, value: Any) -> jax.Array:
    """A field of a plan, no bit of it lost."""
    if name == "row_status":
        return validation.exact_array(f"plan.{name}", value, (None,), np.int32)
    return validation.int_array(f"plan.{name}", value, (None,), pairs=name not in ("num_valid", "enable", "write_num_valid_reqs"))


def _axis_names(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else validation.sequence(name, value, "mesh axis names")
    for axis in names:
        if not isinstance(axis, str):
            raise validation.type_error(f"{name} must be mesh axis names, got {type(axis).__name__}")
    return names


def _check_axes(mesh: Mesh | AbstractMesh, data: tuple[str, ...], tensor: tuple[str, ...]) -> None:
    for name, axes in (("data_axes", data), ("tensor_axes", tensor)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise validation.error(f"{name} names the axis {axis!r}, {_mesh_text(mesh)}")
            if (data + tensor).count(axis) > 1:
                raise validation.error(f"the mesh axis {axis!r} must be named once in data_axes and tensor_axes, got {data} and {tensor}")
    for axis in mesh.axis_names:
        if axis not in data + tensor:
            raise validation.error(
                f"the mesh axis {axis!r} of size {mesh.shape[axis]} must be one of data_axes {data} or tensor_axes {tensor}: "
                f"shards along it serve either different requests or the same ones; {_mesh_text(mesh)}"
            )


def _local_slots(sources: tuple[RealKvSource, ...], slots: int | None) -> int:
    if slots is not None:
        return validation.static_capacity("slots", slots)
    covered = [source.num_slots for source in sources if isinstance(source, RealKvSource)]
    if not covered:
        raise validation.error("slots is required without sources: the slots of one shard")
    return min(covered)


def _without_repeats(buffers: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The buffers without repeats, and the place of each given one among them."""
    unique: list[Any] = []
    places = []
    for buffer in buffers:
        found = next((i for i, other in enumerate(unique) if other is buffer), None)
        places.append(len(unique) if found is None else found)
        if found is None:
            unique.append(buffer)
    return tuple(unique), tuple(places)


def _mesh_text(mesh: Mesh | AbstractMesh) -> str:
    return f"the mesh has the axes {dict(mesh.shape)}"


def _parts(array: Any, shards: int) -> dict[int, np.ndarray]:
    """The parts of an array that this process holds, by shard number."""
    rows = array.shape[0] // shards
    if isinstance(array, jax.Array) and rows:
        held = {(shard.index[0].start or 0) // rows: shard.data for shard in array.addressable_shards}
        if all(data.shape[0] == rows for data in held.values()):
            return {number: np.asarray(data) for number, data in held.items()}
    return dict(enumerate(np.asarray(array).reshape(shards, rows, *array.shape[1:])))
