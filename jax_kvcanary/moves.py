"""Records and source tags on the move: copy, permute, take and put, export and import, release, reset.

Bytes of a pool that move without a model step must take their records along, or every later check alarms. All functions
work by slots or by pages, inside jit and outside, on index arrays of a fixed size: an entry of -1 is padding. An entry
out of range does nothing and says so in its status; no index is ever clamped or wrapped.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import ops, spec, validation
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import Array, VerifyPlan, ViolationLog, pytree_dataclass

EXPORT_VERSION = 1
"""Version of what :func:`export_records` returns."""

FLAGS_WORD = 11
"""Word of a 16-word record that holds its flags."""

_NAMESPACE_WORDS = slice(12, 14)
_NOWHERE = spec.INT32_MAX  # never a slot: stands for an unreachable predecessor


class MoveStatus(enum.IntFlag):
    """What became of one entry of a move; an import adds the :class:`FailReason` bits of its check."""

    OK = 0
    SLOT_OUT_OF_RANGE = 64
    OVERWRITTEN = 1 << 16
    """A later entry of the same move has the same destination, and that one counts."""


@pytree_dataclass
class MoveResult:
    """Records and source tags (None if none were given) after a move, and a status int32 per entry, see :class:`MoveStatus`."""

    records: Array
    source_tags: Array | None
    status: Array


@pytree_dataclass
class TakenRecords:
    """Records of some slots.

    records: uint32 ``[entries * page_size, words]``. source_tags: uint32 ``[entries * page_size, sources]``, or None.
    taken: bool per entry, False for padding and out of range. status: int32 per entry, see :class:`MoveStatus`.
    """

    records: Array
    source_tags: Array | None
    taken: Array
    status: Array


def copy_records(*, records: Array, src: Array, dst: Array, source_tags: Array | None = None, page_size: int = 1) -> MoveResult:
    """Copy records and tags from ``src`` to ``dst``, all entries at once: every entry reads what was there before.

    **Use the returned records and tags, or jit removes the copy.**

    Args:
      records: uint32 ``[slots, 8]`` or wider.
      src, dst: ``[n]`` slots, or pages with a ``page_size``; int32 or int64. -1 in both is padding.
      source_tags: uint32 ``[slots, sources]`` that move along.
      page_size: static, slots a page, at most those of the records; 1 counts slots.

    Returns:
      Records, tags and a status per entry. Of several entries with one destination the last counts; the others are OVERWRITTEN.

    Raises:
      ValueError: a shape or dtype that breaks a rule.

    Example:
      >>> records = allocate_records(slots=4).at[1, 0].set(7)
      >>> result = copy_records(records=records, src=jnp.array([1, -1, 9]), dst=jnp.array([3, -1, 0]))
      >>> int(result.records[3, 0]), result.status.tolist()
      (7, [0, 0, 64])
    """
    checked, tags, size = _check(records, source_tags, page_size)
    sources = validation.int_array("src", src, (None,), pairs=False)
    targets = validation.int_array("dst", dst, (sources.shape[0],), pairs=False)
    return _result(_copy(checked, tags, sources, targets, page_size=size), source_tags)


def permute_records(*, records: Array, permutation: Array, source_tags: Array | None = None, page_size: int = 1) -> MoveResult:
    """Reorder as ``pool[permutation]`` does: place ``i`` gets what was in place ``permutation[i]``.

    **Use the returned records and tags, or jit removes the move.**

    Args:
      records, source_tags, page_size: as in :func:`copy_records`.
      permutation: ``[n]`` slots or pages, for the first ``n`` places; -1 leaves a place as it is.

    Returns:
      Records, tags and a status per place; a place whose entry is out of range stays as it is.

    Example:
      >>> records = allocate_records(slots=2).at[1, 0].set(7)
      >>> permute_records(records=records, permutation=jnp.array([1, 0])).records[:, 0].tolist()
      [7, 0]
    """
    checked, tags, size = _check(records, source_tags, page_size)
    sources = validation.int_array("permutation", permutation, (None,), pairs=False)
    places = checked.shape[0] // size
    if sources.shape[0] > places:
        raise validation.error(f"permutation length must be at most {places}, got {sources.shape[0]}")
    targets = jnp.where(sources == -1, -1, jnp.arange(sources.shape[0], dtype=sources.dtype))
    return _result(_copy(checked, tags, sources, targets, page_size=size), source_tags)


def take_records(*, records: Array, slots: Array, source_tags: Array | None = None, page_size: int = 1) -> TakenRecords:
    """The records and tags of some slots; zeros for padding and for entries out of range.

    Args:
      records, source_tags, page_size: as in :func:`copy_records`.
      slots: ``[n]`` slots or pages.

    Example:
      >>> take_records(records=allocate_records(slots=8), slots=jnp.array([1]), page_size=4).records.shape
      (4, 8)
    """
    checked, tags, size = _check(records, source_tags, page_size)
    index = validation.int_array("slots", slots, (None,), pairs=False)
    rows, row_tags, taken, status = _take(checked, tags, index, page_size=size)
    return TakenRecords(records=rows, source_tags=None if source_tags is None else row_tags, taken=taken, status=status)


def put_records(*, records: Array, taken: TakenRecords, slots: Array, source_tags: Array | None = None, page_size: int = 1) -> MoveResult:
    """Put taken records and tags into some slots, unverified: the counterpart of :func:`take_records`.

    **Use the returned records and tags, or jit removes the move.**

    Args:
      records, source_tags, page_size: as in :func:`copy_records`.
      taken: what :func:`take_records` returned; an entry that it could not take is out of range here too.
      slots: ``[n]`` slots or pages; -1 is padding.

    Example:
      >>> taken = take_records(records=allocate_records(slots=4).at[1, 0].set(7), slots=jnp.array([1]))
      >>> put_records(records=allocate_records(slots=2), taken=taken, slots=jnp.array([0])).records[:, 0].tolist()
      [7, 0]
    """
    checked, tags, size = _check(records, source_tags, page_size)
    index = validation.int_array("slots", slots, (None,), pairs=False)
    validation.instance("taken", taken, TakenRecords)
    n = index.shape[0]
    rows = validation.exact_array("taken.records", taken.records, (n * size, checked.shape[1]), np.uint32)
    if source_tags is not None and taken.source_tags is None:
        raise validation.error("taken.source_tags is required when source_tags is set")
    taken_tags = (
        jnp.zeros((n * size, 0), jnp.uint32)
        if source_tags is None
        else validation.exact_array("taken.source_tags", taken.source_tags, (n * size, tags.shape[1]), np.uint32)
    )
    there = validation.exact_array("taken.taken", taken.taken, (n,), np.bool_)
    return _result(_put(checked, tags, rows, taken_tags, there, index, page_size=size), source_tags)


def export_records(*, records: Array, slots: Array, source_tags: Array | None = None, page_size: int = 1) -> dict[str, np.ndarray]:
    """Records and tags of some slots as NumPy arrays, to travel with the bytes; fit for ``np.savez``.

    Args:
      records, source_tags, page_size: as in :func:`copy_records`; concrete, not traced (inside jit: :func:`take_records`).
      slots: ``[n]`` slots or pages, in the order of positions, so that the import can check the chain.

    Returns:
      ``version``, ``shape`` (entries, page size, words, sources or -1 without tags), ``records``, ``source_tags``, ``taken``, ``status``.

    Example:
      >>> export_records(records=allocate_records(slots=4), slots=[2, 3])["shape"].tolist()
      [2, 1, 8, -1]
    """
    size = validation.static_int("page_size", page_size, minimum=1, maximum=spec.INT32_MAX)
    taken = take_records(records=records, slots=slots, source_tags=source_tags, page_size=size)
    if isinstance(taken.records, jax.core.Tracer):  # inside jit, of concrete arrays too
        raise validation.type_error("export_records needs concrete arrays, got a traced value; inside jit use take_records")
    tags = np.zeros((taken.records.shape[0], 0), np.uint32) if taken.source_tags is None else np.asarray(taken.source_tags)
    return {
        "version": np.array(EXPORT_VERSION, np.int32),
        "shape": np.array(
            [taken.status.shape[0], size, taken.records.shape[1], -1 if taken.source_tags is None else tags.shape[1]], np.int64
        ),
        "records": np.asarray(taken.records),
        "source_tags": tags,
        "taken": np.asarray(taken.taken),
        "status": np.asarray(taken.status),
    }


def import_records(
    *,
    records: Array,
    exported: Mapping[str, Any],
    slots: Array,
    source_tags: Array | None = None,
    page_size: int = 1,
    real_kv_hash_mode: int | spec.RealKvHashMode = spec.RealKvHashMode.NONE,
    real_kv_sources: Sequence[RealKvSource] = (),
    real_kv_buffers: Sequence[Array] = (),
    implementation: str = "auto",
) -> MoveResult:
    """Put exported records and tags into some slots and check them there. Nothing is stamped anew: a fault stays visible.

    Checked are the links between neighbouring entries with neighbouring positions, heads (in records of 16 words, which
    keep their namespace), records that were never written, and, with buffers, the bytes that came along. A record that was
    flagged FREE where it came from is not free here.

    **Use the returned records and tags, or jit removes the import.**

    Args:
      records, source_tags, page_size: of the receiving side, as in :func:`copy_records`.
      exported: what :func:`export_records` returned there; ``version`` and ``shape`` concrete.
      slots: ``[n]`` slots or pages here, one an exported entry; -1 leaves that entry out.
      real_kv_hash_mode: static, the mode in which the records were stamped; NONE checks no bytes.
      real_kv_sources, real_kv_buffers: the pool that holds the bytes already, as in :func:`verify`.
      implementation: "auto", "ffi" or "jax", of the check.

    Returns:
      Records, tags, and a status per slot, int32 ``[n * page_size]``: 0, or :class:`MoveStatus` and ``FailReason`` bits.

    Raises:
      ValueError: an export of another version, or of other records than these.

    Example:
      >>> exported = export_records(records=allocate_records(slots=4), slots=[2])
      >>> import_records(records=allocate_records(slots=4), exported=exported, slots=[1]).status.tolist()
      [256]
    """
    mode = validation.static_enum("real_kv_hash_mode", real_kv_hash_mode, spec.RealKvHashMode)
    checked, tags, size = _check(records, source_tags, page_size)
    index = validation.int_array("slots", slots, (None,), pairs=False)
    _check_export(exported, checked, None if source_tags is None else tags, index.shape[0], size)
    taken = TakenRecords(
        records=_in_use(exported["records"]),
        source_tags=None if source_tags is None else exported["source_tags"],
        taken=exported["taken"],
        status=exported["status"],
    )
    put = put_records(records=checked, taken=taken, slots=index, source_tags=source_tags, page_size=size)
    landed = _expand_entries(jnp.where((put.status == 0) & (index != -1), index, -1).astype(jnp.int32), size)
    bits = _check_landed(
        put.records,
        put.source_tags if mode != spec.RealKvHashMode.NONE else None,
        landed,
        mode=mode,
        real_kv_sources=real_kv_sources if mode != spec.RealKvHashMode.NONE else (),
        real_kv_buffers=real_kv_buffers if mode != spec.RealKvHashMode.NONE else (),
        implementation=implementation,
    )
    return MoveResult(records=put.records, source_tags=put.source_tags, status=bits | jnp.repeat(put.status, size))


def release_records(*, records: Array, slots: Array, page_size: int = 1) -> MoveResult:
    """Flag slots as free and keep their records, so that a late use can still say whose they were.

    **Use the returned records, or jit removes the flags.**

    Args:
      records: uint32 ``[slots, 16]`` or wider.
      slots, page_size: as in :func:`take_records`.

    Raises:
      ValueError: records without provenance, which have no flags.

    Example:
      >>> result = release_records(records=allocate_records(slots=2, provenance=True), slots=jnp.array([1]))
      >>> result.records[:, 11].tolist()
      [0, 1]
    """
    checked, _, size = _check(records, None, page_size)
    if checked.shape[1] < spec.PROVENANCE_RECORD_WORDS:
        raise validation.error(
            f"release needs records of at least {spec.PROVENANCE_RECORD_WORDS} words, which have flags, got shape {checked.shape}; "
            "use allocate_records(provenance=True)"
        )
    index = validation.int_array("slots", slots, (None,), pairs=False)
    out, status = _release(checked, index, page_size=size)
    return MoveResult(records=out, source_tags=None, status=status)


def reset_records(*, records: Array, slots: Array, source_tags: Array | None = None, page_size: int = 1) -> MoveResult:
    """Make slots fresh: all words of their records and tags are zero.

    **Use the returned records and tags, or jit removes the reset.**

    Args:
      records, source_tags, page_size: as in :func:`copy_records`.
      slots: ``[n]`` slots or pages; -1 is padding.

    Example:
      >>> reset_records(records=allocate_records(slots=2) + 1, slots=jnp.array([1])).records[:, 0].tolist()
      [1, 0]
    """
    checked, tags, size = _check(records, source_tags, page_size)
    index = validation.int_array("slots", slots, (None,), pairs=False)
    return _result(_reset(checked, tags, index, page_size=size), source_tags)


# ---------------------------------------------------------------------------------------------- device code


def _check(records: Array, source_tags: Array | None, page_size: Any) -> tuple[jax.Array, jax.Array, int]:
    size = validation.static_int("page_size", page_size, minimum=1, maximum=spec.INT32_MAX)
    checked = ops.check_records(records)
    if size > max(checked.shape[0], 1):
        raise validation.error(f"page_size must be at most {checked.shape[0]}, the slots of the records, got {size}")
    if source_tags is None:
        return checked, jnp.zeros((checked.shape[0], 0), jnp.uint32), size
    return checked, ops.check_source_tags(source_tags, checked, None), size


def _result(out: tuple[jax.Array, jax.Array, jax.Array], source_tags: Array | None) -> MoveResult:
    records, tags, status = out
    return MoveResult(records=records, source_tags=None if source_tags is None else tags, status=status)


def _locate(index: jax.Array, places: int) -> tuple[jax.Array, jax.Array]:
    """Entries inside the pool as int32, others as ``places``, and their status."""
    inside = (index >= 0) & (index < places)
    status = jnp.where(inside | (index == -1), 0, int(MoveStatus.SLOT_OUT_OF_RANGE)).astype(jnp.int32)
    return jnp.where(inside, index, places).astype(jnp.int32), status


def _expand(entries: jax.Array, places: int, slots: int, page_size: int) -> jax.Array:
    """Slots of pages; a page of number ``places`` gives ``slots``, which no scatter reaches."""
    inside = entries < places
    first = jnp.where(inside, entries, 0) * page_size
    expanded = first[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None, :]
    return jnp.where(inside[:, None], expanded, slots).reshape(-1)


def _expand_entries(entries: jax.Array, page_size: int) -> jax.Array:
    """Slots of pages, -1 for -1."""
    expanded = jnp.maximum(entries, 0)[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, :]
    return jnp.where(entries[:, None] >= 0, expanded, -1).reshape(-1)


def is_last_of_each(targets: jax.Array) -> jax.Array:
    """Whether no later entry has the same target."""
    order = jnp.argsort(targets, stable=True)
    ordered = targets[order]
    is_last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones((min(1, ordered.shape[0]),), bool)])
    return jnp.zeros(targets.shape, bool).at[order].set(is_last)


def _gather(rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows, zeros for slots past the end."""
    if rows.shape[0] == 0:
        return jnp.zeros((slots.shape[0], rows.shape[1]), rows.dtype)
    return rows.at[slots].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, static_argnames=("page_size",))
def _copy(records: jax.Array, tags: jax.Array, src: jax.Array, dst: jax.Array, *, page_size: int) -> tuple[jax.Array, ...]:
    slots, places = records.shape[0], records.shape[0] // page_size
    sources, source_status = _locate(src, places)
    targets, target_status = _locate(dst, places)
    lone = (src == -1) != (dst == -1)  # an end without the other is no padding
    status = source_status | target_status | jnp.where(lone, int(MoveStatus.SLOT_OUT_OF_RANGE), 0)
    targets = jnp.where((status == 0) & (sources < places), targets, places)
    last = is_last_of_each(targets)
    status = jnp.where(last | (targets == places), status, int(MoveStatus.OVERWRITTEN)).astype(jnp.int32)
    from_slots = _expand(sources, places, slots, page_size)
    to_slots = _expand(jnp.where(last, targets, places), places, slots, page_size)
    moved, moved_tags = _gather(records, from_slots), _gather(tags, from_slots)
    return records.at[to_slots].set(moved, mode="drop"), tags.at[to_slots].set(moved_tags, mode="drop"), status


@functools.partial(jax.jit, static_argnames=("page_size",))
def _take(records: jax.Array, tags: jax.Array, index: jax.Array, *, page_size: int) -> tuple[jax.Array, ...]:
    slots, places = records.shape[0], records.shape[0] // page_size
    entries, status = _locate(index, places)
    from_slots = _expand(entries, places, slots, page_size)
    return _gather(records, from_slots), _gather(tags, from_slots), entries < places, status


@functools.partial(jax.jit, static_argnames=("page_size",))
def _put(
    records: jax.Array, tags: jax.Array, rows: jax.Array, row_tags: jax.Array, taken: jax.Array, index: jax.Array, *, page_size: int
) -> tuple[jax.Array, ...]:
    slots, places = records.shape[0], records.shape[0] // page_size
    targets, status = _locate(index, places)
    status = jnp.where(taken | (index == -1), status, int(MoveStatus.SLOT_OUT_OF_RANGE))
    targets = jnp.where(status == 0, targets, places)
    last = is_last_of_each(targets)
    status = jnp.where(last | (targets == places), status, int(MoveStatus.OVERWRITTEN)).astype(jnp.int32)
    to_slots = _expand(jnp.where(last, targets, places), places, slots, page_size)
    return records.at[to_slots].set(rows, mode="drop"), tags.at[to_slots].set(row_tags, mode="drop"), status


@functools.partial(jax.jit, static_argnames=("page_size",))
def _release(records: jax.Array, index: jax.Array, *, page_size: int) -> tuple[jax.Array, jax.Array]:
    slots, places = records.shape[0], records.shape[0] // page_size
    entries, status = _locate(index, places)
    if slots == 0:
        return records, status
    at = _expand(entries, places, slots, page_size)
    flags = records.at[at, FLAGS_WORD].get(mode="fill", fill_value=0) | jnp.uint32(spec.RecordFlag.FREE)
    return records.at[at, FLAGS_WORD].set(flags, mode="drop"), status


@functools.partial(jax.jit, static_argnames=("page_size",))
def _reset(records: jax.Array, tags: jax.Array, index: jax.Array, *, page_size: int) -> tuple[jax.Array, ...]:
    slots, places = records.shape[0], records.shape[0] // page_size
    entries, status = _locate(index, places)
    at = _expand(entries, places, slots, page_size)
    return records.at[at].set(0, mode="drop"), tags.at[at].set(0, mode="drop"), status


def _check_export(exported: Mapping[str, Any], records: jax.Array, tags: jax.Array | None, entries: int, page_size: int) -> None:
    if not isinstance(exported, Mapping):
        raise validation.type_error(f"exported must be a mapping as export_records returns it, got {type(exported).__name__}")
    missing = [key for key in ("version", "shape", "records", "source_tags", "taken", "status") if key not in exported]
    if missing:
        raise validation.error(f"exported lacks {', '.join(missing)}")
    if any(isinstance(exported[key], jax.core.Tracer) for key in ("version", "shape")):
        raise validation.type_error("exported version and shape must be concrete, got a traced value; close over the exported dict")
    version = validation.integer_scalar("exported version", _concrete("exported version", exported["version"]))
    if version != EXPORT_VERSION:
        raise validation.error(f"exported has version {version}, this package reads version {EXPORT_VERSION}")
    numbers = _concrete("exported shape", exported["shape"])
    if validation.operand_dtype("exported shape", numbers).kind not in "iu" or numbers.ndim != 1:
        raise validation.error(f"exported shape must be integers, got {numbers.dtype.name} of shape {numbers.shape}")
    if len(numbers) != 4:
        raise validation.error(f"exported shape must have 4 numbers, got {len(numbers)}")
    shape = tuple(int(number) for number in numbers)
    if shape[2] != records.shape[1]:
        raise validation.error(f"exported records have {shape[2]} words, these have {records.shape[1]}")
    if shape[:2] != (entries, page_size):
        raise validation.error(f"exported holds {shape[0]} entries of page_size {shape[1]}, slots names {entries} of page_size {page_size}")
    if tags is not None and shape[3] != tags.shape[1]:
        have = "no source tags" if shape[3] < 0 else f"source tags of {shape[3]} sources"
        raise validation.error(f"exported has {have}, here there are {tags.shape[1]} sources")


def _concrete(name: str, value: Any) -> Any:
    """A number, or a list or an array of them on the host."""
    if isinstance(value, (list, tuple)):
        return validation.list_to_numpy(name, value)
    return validation.host_array(name, value) if hasattr(value, "shape") else value


def _in_use(rows: Any) -> Any:
    """Records without the flag FREE; anything else that is wrong with them is found later."""
    if not hasattr(rows, "dtype"):
        return rows
    records = jnp.asarray(rows)
    if records.ndim != 2 or records.shape[1] < spec.PROVENANCE_RECORD_WORDS or records.dtype != jnp.uint32:
        return records
    return records.at[:, FLAGS_WORD].set(records[:, FLAGS_WORD] & jnp.uint32(~int(spec.RecordFlag.FREE) & 0xFFFFFFFF))


def _check_landed(
    records: jax.Array,
    tags: Array | None,
    landed: jax.Array,
    *,
    mode: spec.RealKvHashMode,
    real_kv_sources: Sequence[RealKvSource],
    real_kv_buffers: Sequence[Array],
    implementation: str,
) -> jax.Array:
    """FailReason bits of every landed slot, by a verify whose batch rows are the slots themselves."""
    (n,) = landed.shape
    if n == 0:
        return jnp.zeros((0,), jnp.int32)
    words = _gather(records, jnp.where(landed >= 0, landed, records.shape[0]))
    positions = words[:, 2:4]
    previous = _next_of(jnp.roll(positions, 1, axis=0))
    linked = jnp.all(positions == previous, axis=1) & (landed >= 0) & (jnp.roll(landed, 1) >= 0) & (jnp.arange(n) > 0)
    is_head = jnp.all(positions == 0, axis=1) & (records.shape[1] >= spec.PROVENANCE_RECORD_WORDS)
    prev = jnp.where(linked, jnp.roll(landed, 1), jnp.where(is_head, -1, _NOWHERE)).astype(jnp.int32)
    entries = VerifyPlan(
        slot_indices=jnp.where(landed >= 0, landed, _NOWHERE),
        expected_tokens=jnp.full((n,), -1, jnp.int32),
        expected_positions=positions,
        prev_slot_indices=prev,
        batch_rows=jnp.arange(n, dtype=jnp.int32),
        num_valid=jnp.full((1,), n, jnp.int32),
        enable=jnp.ones((1,), jnp.int32),
        row_status=jnp.zeros((n,), jnp.int32),
        req_pool_indices=jnp.full((n,), -1, jnp.int32),
    )
    has_namespace = records.shape[1] >= spec.PROVENANCE_RECORD_WORDS
    result = ops.verify(
        records=records,
        log=ViolationLog.allocate(ring_capacity=n),
        plan=entries,
        launch_tag=spec.CanaryLaunchTag.SWEEP_K_FULL,
        real_kv_hash_mode=mode,
        real_kv_sources=real_kv_sources,
        real_kv_buffers=real_kv_buffers,
        source_tags=tags,
        namespaces=words[:, _NAMESPACE_WORDS] if has_namespace else None,
        padding_slot=_NOWHERE,
        implementation=implementation,
    )
    ring = result.log.ring.reshape(n, spec.RING_COLUMNS, 2)
    rows = ring[:, spec.Column.BATCH_ROW, 0].astype(jnp.int32)
    reasons = ring[:, spec.Column.REASON, 0].astype(jnp.int32)
    if mode == spec.RealKvHashMode.NONE:  # bytes are not looked at: their hash says nothing
        reasons &= ~int(spec.FailReason.VERIFY_REAL_KV_HASH)
    used = jnp.arange(n) < result.log.write_index[0]
    return jnp.zeros((n,), jnp.int32).at[jnp.where(used, rows, n)].set(reasons, mode="drop")


def _next_of(words: jax.Array) -> jax.Array:
    """64-bit values plus one, as (low, high) words."""
    low = words[:, 0] + jnp.uint32(1)
    return jnp.stack([low, words[:, 1] + (low == 0).astype(jnp.uint32)], axis=1)
