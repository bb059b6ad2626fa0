"""Real-KV hashes in plain JAX: which elements of the pool belong to a slot, gathered in the pool's own dtype and axes, then folded.

The pool itself is never reshaped, bitcast or copied: only gathered rows are. Everything static is decided from shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import hashing, words
from jax_kvcanary.pure.hashing import Hash
from jax_kvcanary.pure.indexing import take
from jax_kvcanary.pure.target import current
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import PARTIAL_BYTES, RealKvHashMode

_SUB_BYTE_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
_FOLD_UNROLL = 8
"""Words folded per loop iteration: 64 bytes, whole TPU tiles of one-byte elements."""

_MIN_LANES, _MAX_LANES = 8, 4096


def _bits(dtype: Any) -> int:
    dtype = np.dtype(dtype)
    bits = _SUB_BYTE_BITS.get(dtype.name, dtype.itemsize * 8)
    if bits > 64 or dtype.kind == "c":
        raise NotImplementedError(f"kv-canary: real-KV buffers of dtype {dtype.name} cannot be read by the plain JAX implementation")
    return bits


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How the bytes of a slot lie in a buffer, in elements and on the buffer's own axes.

    page, token: what one page and one token add to the index, an int an axis.
    levels: (count, index step an axis, window axis or None) of each nested loop over the slot's elements, outermost first. A level
    with a window axis is a slice of that axis, the others are indices.
    carries: per axis, whether indices may run past its size and carry into the axis before it.
    """

    shape: tuple[int, ...]
    bits: int
    read_bytes: int
    page_size: int
    page: tuple[int, ...]
    token: tuple[int, ...]
    levels: tuple[tuple[int, tuple[int, ...], int | None], ...]
    carries: tuple[bool, ...]
    wide_index: bool

    @property
    def elements(self) -> int:
        """Gathered elements a slot, at least those that are read."""
        return math.prod(count for count, _, _ in self.levels)


def _axis_strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _digits(elements: int, shape: Sequence[int]) -> tuple[int, ...]:
    """``elements`` (a distance) as an index step an axis."""
    out = []
    for stride in _axis_strides(shape):
        step, elements = divmod(elements, stride)
        out.append(step)
    return tuple(out)


def _levels(counts: Sequence[int], strides: Sequence[int], run: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    """(count, stride) of the loops over a slot's elements; the run is cut at the axes of the buffer where it covers whole ones."""
    inner: list[tuple[int, int]] = []
    stride, axis = 1, len(shape) - 1
    while axis > 0 and run > shape[axis] and run % shape[axis] == 0:
        inner.insert(0, (shape[axis], stride))
        run //= shape[axis]
        stride *= shape[axis]
        axis -= 1
    levels = [*zip(counts, strides, strict=True), (run, stride), *inner]
    return [(count, stride) for count, stride in levels if count > 1]


def _leading_box(counts: Sequence[int], pieces: int) -> list[int]:
    """The smallest loop counts whose leading ``pieces`` iterations are those of ``counts``."""
    box = [1] * len(counts)
    for level in range(len(counts) - 1, -1, -1):
        box[level] = min(pieces, counts[level])
        pieces = -(-pieces // counts[level])
        if pieces <= 1:
            break
    return box


def _locate(source: tuple[Any, ...], index: int, read_bytes: int, shape: tuple[int, ...], dtype: Any) -> tuple[Geometry, tuple[int, ...]]:
    """The geometry of a source and the index step of its offset."""
    _, offset, pages, page_size, page_stride, token_stride, counts, strides, run_bytes, _ = source
    bits = _bits(dtype)
    if not shape:
        shape = (1,)

    def elements(name: str, size: int) -> int:
        if size * 8 % bits:
            raise ValueError(f"kv-canary: {name} of source {index} must be whole elements of {np.dtype(dtype).name}, got {size} bytes")
        return size * 8 // bits

    pieces = -(-read_bytes // run_bytes)
    box = _leading_box(counts, pieces)
    run = elements("run_bytes", run_bytes) if pieces > 1 else -(-read_bytes * 8 // bits)
    steps = [elements("run stride", s) if n > 1 else 0 for n, s in zip(box, strides, strict=True)]
    page = _digits(elements("page_stride", page_stride) if pages > 1 else 0, shape)
    token = _digits(elements("token_stride", token_stride) if page_size > 1 else 0, shape)
    start = _digits(elements("offset", offset), shape)
    levels = [(count, _digits(stride, shape)) for count, stride in _levels(box, steps, run, shape)]

    # From the last axis to the first: where indices may pass the end of an axis they carry, and slices of that axis become indices.
    top = [first + (pages - 1) * p + (page_size - 1) * t for first, p, t in zip(start, page, token, strict=True)]
    for count, step in levels:
        top = [high + (count - 1) * by for high, by in zip(top, step, strict=True)]
    carries, largest = [False] * len(shape), 0
    for axis in range(len(shape) - 1, -1, -1):
        largest = max(largest, top[axis])
        if top[axis] >= shape[axis] and axis > 0:
            carries[axis] = True
            top[axis - 1] += top[axis] // shape[axis]
    if top[0] >= shape[0]:
        raise ValueError(f"kv-canary: source {index} reaches past its buffer of shape {shape}")
    if largest >= 2**32:
        raise NotImplementedError(f"kv-canary: source {index} needs an index of {largest} on one axis of its buffer of shape {shape}")
    taken: set[int] = set()
    placed = []
    for count, step in levels:
        axes = [axis for axis, by in enumerate(step) if by]
        fits = len(axes) == 1 and step[axes[0]] == 1 and not carries[axes[0]] and axes[0] not in taken
        if fits:
            taken.add(axes[0])
        placed.append((count, step, axes[0] if fits else None))
    geometry = Geometry(
        shape=shape,
        bits=bits,
        read_bytes=read_bytes,
        page_size=page_size,
        page=page,
        token=token,
        levels=tuple(placed),
        carries=tuple(carries),
        wide_index=largest > 2**31 - 1,
    )
    return geometry, start


def _gather(buffer: jax.Array, geometry: Geometry, starts: jax.Array, slots: jax.Array) -> jax.Array:
    """Elements of ``slots [n]`` (in range) for sources that start at ``starts [sources, axes]`` uint32.

    ``[sources * n, elements]`` or the other way round, as the target wants them.
    """
    shape, rank = geometry.shape, len(geometry.shape)
    if buffer.ndim == 0:
        buffer = lax.reshape(buffer, (1,))
    place = words.as_uint32(slots)
    page, token = (place, None) if geometry.page_size == 1 else _divmod(place, geometry.page_size)
    loops = [(count, step) for count, step, window in geometry.levels if window is None]
    dims = (*(count for count, _ in loops), starts.shape[0], slots.shape[0])

    def along(x: jax.Array, dim: int) -> jax.Array:
        return lax.broadcast_in_dim(x, dims, (dim,))

    index: list[jax.Array] = []
    for axis in range(rank):
        at = along(lax.index_in_dim(starts, axis, 1, keepdims=False), len(loops))
        if geometry.page[axis]:
            at = at + along(page * np.uint32(geometry.page[axis]), len(loops) + 1)
        if geometry.token[axis] and token is not None:
            at = at + along(token * np.uint32(geometry.token[axis]), len(loops) + 1)
        for level, (count, step) in enumerate(loops):
            if step[axis]:
                at = at + along(lax.iota(jnp.uint32, count) * np.uint32(step[axis]), level)
        index.append(at)
    for axis in range(rank - 1, 0, -1):
        if geometry.carries[axis]:
            over, index[axis] = _divmod(index[axis], shape[axis])
            index[axis - 1] = index[axis - 1] + over
    if not geometry.wide_index:
        index = [words.as_int32(at) for at in index]
    # Slices come out after the indices, in the order of their axes.
    windows = sorted(window for _, _, window in geometry.levels if window is not None)
    size = {window: count for count, _, window in geometry.levels if window is not None}
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(len(dims) + k for k in range(len(windows))),
        collapsed_slice_dims=tuple(axis for axis in range(rank) if axis not in size),
        start_index_map=tuple(range(rank)),
    )
    out = _bits_at(buffer, jnp.stack(index, axis=-1), numbers, tuple(size.get(axis, 1) for axis in range(rank)), geometry.bits)
    loop = iter(range(len(loops)))
    order = [next(loop) if window is None else len(dims) + windows.index(window) for _, _, window in geometry.levels]
    lanes = (len(loops), len(loops) + 1)
    shape = (starts.shape[0] * slots.shape[0], geometry.elements)
    if current().lanes_first:
        return lax.reshape(lax.transpose(out, (*lanes, *order)), shape)
    return lax.reshape(lax.transpose(out, (*order, *lanes)), shape[::-1])


def _divmod(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    quotient = lax.div(x, lax.full_like(x, by))
    return quotient, x - quotient * np.uint32(by)


def _bits_at(buffer: jax.Array, index: jax.Array, numbers: lax.GatherDimensionNumbers, sizes: tuple[int, ...], bits: int) -> jax.Array:
    """Gathered elements as unsigned integers of their width (of 8 bits for smaller ones)."""

    def gather(buffer: jax.Array, index: jax.Array) -> jax.Array:
        return lax.gather(buffer, index, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    def plain(buffer: jax.Array, index: jax.Array) -> jax.Array:
        return _as_unsigned(gather(buffer, index), bits)

    def fused_view(buffer: jax.Array, index: jax.Array) -> jax.Array:
        # The barrier ties the view to this iteration: hoisted out of the loop it would be a copy of the pool.
        buffer, index = lax.optimization_barrier((buffer, index))
        return gather(_as_unsigned(buffer, bits), index)

    narrow_float = bits <= 16 and jnp.issubdtype(buffer.dtype, jnp.floating)
    return (fused_view if narrow_float and current().widens_narrow_floats else plain)(buffer, index)


def _as_unsigned(x: jax.Array, bits: int) -> jax.Array:
    if x.dtype == jnp.bool_:
        return lax.convert_element_type(x, jnp.uint8)
    if bits < 8:
        return lax.convert_element_type(lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")), jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))


def _word(elements: list[jax.Array], bits: int) -> Hash:
    """The 8-byte little-endian word that ``64 / bits`` elements make."""
    if bits == 64:
        wide = elements[0]
        high = lax.shift_right_logical(wide, lax.full_like(wide, 32))
        return hashing.pack(U64(lax.convert_element_type(wide, jnp.uint32), lax.convert_element_type(high, jnp.uint32)))

    def joined(part: list[jax.Array], dtype: Any) -> jax.Array:
        value = lax.convert_element_type(part[0], dtype)
        for k, element in enumerate(part[1:], 1):
            value = value | (lax.convert_element_type(element, dtype) << np.dtype(dtype).type(k * bits))
        return value

    if current().wide:
        return joined(elements, jnp.uint64)
    half = 32 // bits
    return U64(joined(elements[:half], jnp.uint32), joined(elements[half:], jnp.uint32))


def _fold(x: jax.Array, bits: int, read_bytes: int) -> Hash:
    """The fold of the first ``read_bytes`` bytes of each lane of gathered elements."""
    axis, per_word = (1 if current().lanes_first else 0), 64 // bits
    lanes = x.shape[1 - axis]
    whole, rest = divmod(read_bytes, 8)
    missing = (whole + (rest > 0)) * per_word - x.shape[axis]
    if missing > 0:
        fill = (lanes, missing) if current().lanes_first else (missing, lanes)
        x = jnp.concatenate([x, jnp.zeros(fill, x.dtype)], axis=axis)

    def words_at(part: jax.Array, first: int, count: int) -> list[Hash]:
        return [
            _word([lax.index_in_dim(part, (first + w) * per_word + k, axis, keepdims=False) for k in range(per_word)], bits)
            for w in range(count)
        ]

    unroll = next(count for count in (_FOLD_UNROLL, 4, 2, 1) if whole % count == 0)

    def block(i: jax.Array, acc: Hash) -> Hash:
        part = lax.dynamic_slice_in_dim(x, i * np.int32(unroll * per_word), unroll * per_word, axis=axis)
        for word in words_at(part, 0, unroll):
            acc = hashing.fold_word(acc, word)
        return acc

    acc = hashing.zeros((lanes,))
    if whole > 4:
        acc = words.repeat(whole // unroll, block, acc)
    else:
        for word in words_at(x, 0, whole):
            acc = hashing.fold_word(acc, word)
    if rest:
        word, mask = hashing.unpack(words_at(x, whole, 1)[0]), words.const((1 << (8 * rest)) - 1)
        acc = hashing.fold_word(acc, hashing.pack(U64(word.lo & mask.lo, word.hi & mask.hi)))
    return acc


@dataclasses.dataclass(frozen=True)
class _Group:
    """Sources of one buffer and geometry: gathered at once."""

    buffer: int
    geometry: Geometry
    starts: np.ndarray  # [sources, axes] uint32
    members: tuple[int, ...]  # their numbers among all sources


class SourceHasher:
    """The sources of one launch, and the hashes of slots over them."""

    def __init__(self, sources: Sequence[tuple[Any, ...]], mode: int, buffers: Sequence[jax.Array]) -> None:
        self.buffers = tuple(buffers)
        self.count = len(sources)
        self.reads = mode != RealKvHashMode.NONE
        self.limit = min((max(0, s[2]) * max(0, s[3]) for s in sources), default=None) if self.reads else None
        self.read_bytes = [self._bytes_read(s, mode) for s in sources]
        grouped: dict[tuple[int, Geometry], list[tuple[int, tuple[int, ...]]]] = {}
        if self.limit != 0:
            for index, source in enumerate(sources):
                if self.read_bytes[index]:
                    buffer = self.buffers[source[0]]
                    geometry, start = _locate(source, index, self.read_bytes[index], tuple(buffer.shape), buffer.dtype)
                    grouped.setdefault((source[0], geometry), []).append((index, start))
        # Groups whose gathered elements look alike are folded at once: [kind][group].
        kinds: dict[tuple[int, int], list[_Group]] = {}
        for (buffer, geometry), members in grouped.items():
            starts = np.array([start for _, start in members], np.uint32).reshape(len(members), len(geometry.shape))
            group = _Group(buffer, geometry, starts, tuple(index for index, _ in members))
            kinds.setdefault((geometry.bits, geometry.read_bytes), []).append(group)
        self._kinds = list(kinds.values())

    @staticmethod
    def _bytes_read(source: tuple[Any, ...], mode: int) -> int:
        read = max(0, min(source[9], math.prod(max(0, n) for n in source[6]) * source[8]))
        if mode == RealKvHashMode.NONE:
            return 0
        return min(PARTIAL_BYTES, read) if mode == RealKvHashMode.PARTIAL else read

    def slots(self, record_slots: int) -> int:
        """How many slots a launch may touch."""
        return record_slots if self.limit is None else min(record_slots, self.limit)

    def chunk(self, entries: int, *, one_source: bool = False) -> int:
        """How many of ``entries`` to hash at once, so that the gathered bytes stay bounded."""
        gathered = max(self.read_bytes, default=0) if one_source else sum(self.read_bytes)
        return max(1, min(entries, _lanes(current().gathered_bytes // max(gathered, 1))))

    def own_hashes(self, slots: jax.Array) -> Hash | None:
        """The own hash of each source that reads anything, in their order, of ``slots [n]`` in range: ``[sources, n]``; None for none."""
        n = slots.shape[0]
        folded, members = [], []
        for groups in self._kinds:
            parts = [_gather(self.buffers[g.buffer], g.geometry, jnp.asarray(g.starts), slots) for g in groups]
            geometry = groups[0].geometry
            hashes = _fold(_side_by_side(parts), geometry.bits, geometry.read_bytes)
            folded.append(jax.tree.map(lambda x: lax.reshape(x, (x.shape[0] // n, n)), hashes))
            members += [index for g in groups for index in g.members]
        if not folded:
            return None
        order = np.argsort(members)
        return jax.tree.map(lambda *parts: _in_order(jnp.concatenate(parts), order), *folded)

    def combined(self, own: Hash | None, n: int) -> U64:
        """The hash over all sources from their own hashes."""
        acc = hashing.zeros((n,))
        sources = 0 if own is None else jax.tree.leaves(own)[0].shape[0]

        def step(i: Any, acc: Hash) -> Hash:
            return hashing.fold_word(acc, jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), own))

        if sources > 8:
            return hashing.unpack(words.repeat(sources, step, acc))
        for i in range(sources):
            acc = step(np.int32(i), acc)
        return hashing.unpack(acc)

    def tags(self, own: Hash | None, n: int) -> jax.Array:
        """The low word of each source's own hash, ``[all sources, n]``; 0 for one that reads nothing."""
        zero = jnp.zeros((1, n), jnp.uint32)
        reads = np.array([read > 0 and own is not None for read in self.read_bytes], bool)
        lows = zero if own is None else jnp.concatenate([zero, hashing.unpack(own).lo])
        return _in_order(lows, np.where(reads, np.cumsum(reads), 0))

    def hash_one(self, source: jax.Array, slots: jax.Array) -> Hash:
        """The own hash of ``slots`` for the source of that (traced) number; 0 for one that reads nothing."""
        n = slots.shape[0]
        kind_of, group_of, member_of = (np.zeros(max(self.count, 1), np.int32) for _ in range(3))
        for kind, groups in enumerate(self._kinds):
            for number, group in enumerate(groups):
                for member, index in enumerate(group.members):
                    kind_of[index], group_of[index], member_of[index] = kind, number, member
        for index, read in enumerate(self.read_bytes):
            if read == 0 or not self._kinds:
                kind_of[index] = len(self._kinds)
        member = take(jnp.asarray(member_of), source[None])

        def gather_from(group: _Group) -> Callable[[], jax.Array]:
            def branch() -> jax.Array:
                starts = jnp.stack([take(jnp.asarray(column), member) for column in group.starts.T], axis=-1)  # [1, axes]
                return _gather(self.buffers[group.buffer], group.geometry, starts, slots)

            return branch

        def of_kind(groups: list[_Group]) -> Callable[[], Hash]:
            def branch() -> Hash:
                geometry = groups[0].geometry
                number = take(jnp.asarray(group_of), source[None])[0]
                least = min(g.geometry.elements for g in groups)
                gathers = [gather_from(g) for g in groups]
                axis = 1 if current().lanes_first else 0
                x = _switch(number, [lambda f=f: lax.slice_in_dim(f(), 0, least, axis=axis) for f in gathers])
                return _fold(x, geometry.bits, geometry.read_bytes)

            return branch

        branches: list[Callable[[], Hash]] = [of_kind(groups) for groups in self._kinds]
        if not branches or (kind_of[: self.count] == len(self._kinds)).any():
            branches.append(lambda: hashing.zeros((n,)))
        return _switch(take(jnp.asarray(kind_of), source[None])[0], branches)


def _switch(index: jax.Array, branches: Sequence[Callable[[], Any]]) -> Any:
    return branches[0]() if len(branches) == 1 else lax.switch(index, branches)


def _side_by_side(parts: Sequence[jax.Array]) -> jax.Array:
    """Gathered elements of several groups along the lanes; a group may hold a few more elements than are read."""
    axis = 1 if current().lanes_first else 0
    least = min(part.shape[axis] for part in parts)
    return jnp.concatenate([lax.slice_in_dim(part, 0, least, axis=axis) for part in parts], axis=1 - axis)


def _in_order(x: jax.Array, order: np.ndarray) -> jax.Array:
    """``x[order]`` with a static order."""
    if np.array_equal(order, np.arange(x.shape[0])):
        return x
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    index = jnp.asarray(order.astype(np.int32))[:, None]
    return lax.gather(x, index, numbers, (1, x.shape[1]), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _lanes(wanted: int) -> int:
    """``wanted`` entries rounded down to a power of two within bounds."""
    return 1 << (max(_MIN_LANES, min(wanted, _MAX_LANES)).bit_length() - 1)
