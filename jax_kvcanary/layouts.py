"""From the names of a pool's axes to its sources: which bytes belong to a slot, a layer and a half, without touching the pool.

Everything here is decided from shapes and dtypes. A pool is an array, a list of layer arrays, or any pytree of those.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import validation
from jax_kvcanary.sources import RealKvSource

AXES = {
    "layer": "one source a layer",
    "kv": "two halves: K at 0, V at 1",
    "page": "pages of slots",
    "batch": "rows of a contiguous cache",
    "slot": "a slot's place in its page; without pages, the slot",
    "length": "a position's place in its row",
    "slot_outer": "a slot's place in its page, the high part",
    "slot_pack": "a slot's place in its page, the low part",
    "head": "bytes of a slot",
    "kv_head": "bytes of a slot",
    "group": "bytes of a slot",
    "pack": "bytes of a slot",
    "dim": "bytes of a slot",
    "lane": "bytes of a slot",
}
"""The names that an axis can have, and what each says."""

_PAGE_AXES = ("page", "batch")
_PLACE_AXES = ("slot", "length", "slot_outer", "slot_pack")
_NUMBERED = (*_PAGE_AXES, *_PLACE_AXES)  # a slot's number is made of these, in this order
_BYTE_AXES = ("head", "kv_head", "group", "pack", "dim", "lane")
_HALVES = ("K", "V")
_RUN_LEVELS = 4
_MAX_ROTATED = 2**16 - 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the axes of one array of a pool mean. Made by :meth:`from_axes`; hashable, so it can be a static argument.

    axes: a name an axis. half: what the array holds, if not both K and V. interleaved, concatenated: axes on which K and V
    share the array. split: a source for each half. used: (axis, start, stop) of axes of which only a part counts.
    """

    axes: tuple[str, ...]
    half: str | None = None
    interleaved: tuple[str, ...] = ()
    concatenated: tuple[str, ...] = ()
    split: bool = True
    used: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def from_axes(
        cls,
        axes: str | Sequence[str],
        *,
        half: str | None = None,
        interleaved: str | Sequence[str] = (),
        concatenated: str | Sequence[str] = (),
        split: bool = True,
        use: Mapping[str, int | tuple[int, int]] | None = None,
    ) -> Layout:
        """The layout of an array from the names of its axes, in the array's own order.

        Args:
          axes: names of :data:`AXES`, as in ``"page slot kv_head dim"``: which axes number the slots, which hold a slot's bytes.
          half: what the array holds where that is not K and V together: "K", "V", "latent", "K scale".
          interleaved: the axis (or axes, high one first) on which K0, V0, K1, V1 alternate, as in ``"head"`` or ``"group pack"``.
          concatenated: the axis (or axes) whose first half is K and whose second is V, as in ``"dim"``.
          split: give K and V a source each where they can be told apart, so that a violation names the half. False gives one source
            of both: longer runs, which are faster to read.
          use: for an axis, how many of its leading elements count, or ``(start, stop)``: the rest is padding that nothing reads.
            On axes that number the slots, the rest are no slots.

        Returns:
          The layout.

        Raises:
          ValueError: an axis that is unknown, repeated, missing, or in conflict with another. TypeError: no names.

        Example:
          >>> Layout.from_axes("page slot group pack dim", interleaved="group pack").halves
          ('K', 'V')
        """
        return cls(
            axes=_names("axes", axes),
            half=half,
            interleaved=_names("interleaved", interleaved),
            concatenated=_names("concatenated", concatenated),
            split=validation.static_bool("split", split),
            used=tuple(sorted((name, *_part(name, part)) for name, part in _use(use).items())),
        )

    def __post_init__(self) -> None:
        for field in ("axes", "interleaved", "concatenated"):
            object.__setattr__(self, field, _names(field, getattr(self, field)))
        validation.static_bool("split", self.split)
        text = self.text
        for name in self.axes:
            if name not in AXES:
                raise validation.error(f"layout {text!r} names the axis {name!r}, which is not known; known are {', '.join(AXES)}")
        for name, times in collections.Counter(self.axes).items():
            if times > 1:
                raise validation.error(f"layout {text!r} names the axis {name!r} {times} times")
        for one, other in (("page", "batch"), ("slot", "length"), *((a, b) for a in ("slot", "length") for b in _PLACE_AXES[2:])):
            if one in self.axes and other in self.axes:
                raise validation.error(f"layout {text!r} names both {one!r} and {other!r}, which say the same")
        for one, other in (("slot_outer", "slot_pack"), ("slot_pack", "slot_outer")):
            if one in self.axes and other not in self.axes:
                raise validation.error(f"layout {text!r} names {one!r} without {other!r}")
        if not any(name in self.axes for name in _NUMBERED):
            raise validation.error(f"layout {text!r} names no axis of slots; those are {', '.join(_NUMBERED)}")
        ways = [way for way in ("interleaved", "concatenated") if getattr(self, way)]
        if "kv" in self.axes:
            ways.append("axis kv")
        if len(ways) > 1:
            raise validation.error(f"layout {text!r} separates K and V in more than one way: {', '.join(ways)}")
        for way in ("interleaved", "concatenated"):
            for name in getattr(self, way):
                if name not in self.axes or name not in _BYTE_AXES:
                    raise validation.error(f"layout {text!r} is {way} on {name!r}, which is none of its axes of bytes")
        if self.half is not None and not isinstance(self.half, str):
            raise validation.type_error(f"layout half must be a str, got {type(self.half).__name__}")
        if ways and self.half in _HALVES:
            raise validation.error(f"layout {text!r} holds both halves ({ways[0]}), so it cannot be the half {self.half!r} alone")
        for part in validation.sequence("used", self.used, "(axis, start, stop)"):
            if not isinstance(part, tuple) or len(part) != 3:
                raise validation.type_error(f"used must be a tuple of (axis, start, stop), got {part!r} in it")
            name, (start, stop) = part[0], _part(part[0], part[1:])
            if name not in self.axes:
                raise validation.error(f"layout {text!r} has no axis {name!r} to use {start}:{stop} of")
            if name in ("layer", "kv"):
                raise validation.error(f"layout {text!r} cannot use a part of the axis {name!r}")
            if name in _NUMBERED and start != 0:
                raise validation.error(f"layout {text!r} numbers slots along {name!r}, so its used part must start at 0, got {start}")

    @property
    def text(self) -> str:
        """The axes as one string."""
        return " ".join(self.axes)

    @property
    def has_halves(self) -> bool:
        """Whether K and V share the array and can be told apart."""
        return "kv" in self.axes or bool(self.interleaved or self.concatenated)

    @property
    def halves(self) -> tuple[str, ...]:
        """Names of the sources that a layer has in this array."""
        if not self.has_halves or not self.split:
            return (self.half or "KV",)
        return tuple(f"{half} {self.half}" if self.half else half for half in _HALVES)

    def as_half(self, half: str) -> Layout:
        """This layout, for an array that holds ``half``."""
        return dataclasses.replace(self, half=half)

    def geometries(self, shape: Sequence[int], dtype: Any, *, where: str = "the array") -> list[Geometry]:
        """Where the bytes of each layer and half are in an array of this shape and dtype, layers outermost.

        Raises:
          ValueError: the array does not fit the layout, or its slots cannot be described; the message names the axis and the shape.
        """
        given = validation.sequence("shape", shape, "ints")
        sizes = tuple(validation.static_int(f"{where} axis {axis}", size, minimum=0) for axis, size in enumerate(given))
        return list(_geometries(self, sizes, validation.numpy_dtype(where, dtype), where))


class Geometry(NamedTuple):
    """Bytes of one layer and half of an array, as :meth:`RealKvSource.general` takes them."""

    layer: int | None
    half: str
    pages: int
    page_size: int
    page_stride: int
    token_stride: int
    offset: int
    run_bytes: int
    run_counts: tuple[int, ...]
    run_strides: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return self.pages * self.page_size

    @property
    def slot_bytes(self) -> int:
        return self.run_bytes * math.prod(self.run_counts)


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """A container of layers, each laid out as ``layout`` says. Layers are numbered by position, in a dict by the number in the key."""

    layout: Any


def per_layer(layout: Any) -> PerLayer:
    """Say that the next container of the pool holds layers, each of this layout (or tuple or dict of layouts).

    Example:
      >>> k, v = (Layout.from_axes("page slot head dim", half=half) for half in "KV")
      >>> pool = [(jax.ShapeDtypeStruct((4, 8, 2, 16), jnp.bfloat16),) * 2] * 3
      >>> pool_sources(pool, per_layer((k, v))).labels[-1]
      'layer 2 V'
    """
    return PerLayer(layout)


class SourceName(NamedTuple):
    """What a source covers: its layer (None: the pool has no layers) and its half, such as "K", "V", "KV", "latent", "K scale"."""

    layer: int | None
    half: str

    def __str__(self) -> str:
        return self.half if self.layer is None else f"layer {self.layer} {self.half}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSources:
    """The sources of a pool, ordered by layer, then half; static and hashable, and it keeps no array.

    sources: what the ops take as ``real_kv_sources``. names: layer and half of each. num_slots: slots that every source covers.
    structure, leaves, paths: the pool's pytree structure, and number and path of its leaves that are read.
    getter, setter: how to reach the pool in the state that holds it, None where they are the same.
    """

    sources: tuple[RealKvSource, ...]
    names: tuple[SourceName, ...]
    num_slots: int
    structure: Any
    leaves: tuple[int, ...]
    paths: tuple[str, ...]
    getter: Callable[[Any], Any] | None = None
    setter: Callable[[Any, Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def labels(self) -> tuple[str, ...]:
        """A name a source, such as "layer 3 V"."""
        return tuple(str(name) for name in self.names)

    @property
    def source_layers(self) -> tuple[int, ...]:
        """The layer of each source, -1 where the pool has no layers."""
        return tuple(-1 if name.layer is None else name.layer for name in self.names)

    def describe(self, source: int) -> str:
        """What a violation's ``first_bad_source`` is.

        Example:
          >>> pool = jax.ShapeDtypeStruct((2, 4, 8, 2, 16), jnp.bfloat16)
          >>> pool_sources(pool, Layout.from_axes("layer page slot head dim", interleaved="head")).describe(3)
          'layer 1 V'
        """
        source = validation.static_int("source", source)
        return self.labels[source] if 0 <= source < len(self.names) else "an unknown source"

    def index(self, *, layer: int | None = None, half: str) -> int:
        """The number of a layer's half among the sources."""
        name = SourceName(layer, validation.instance("half", half, str))
        if name not in self.names:
            raise validation.error(f"no source is {name}; there are {', '.join(self.labels)}")
        return self.names.index(name)

    def buffers(self, pool: Any) -> tuple[Any, ...]:
        """The arrays of ``pool`` that the sources read, each once: the ops' ``real_kv_buffers``.

        Args:
          pool: a pool of the structure that the sources were made from (or the state that holds it, with a getter).

        Raises:
          ValueError: a pool of another structure, or an array of another shape or dtype; the message names it.
        """
        leaves = self._flatten(self._get(pool))
        picked = tuple(leaves[leaf] for leaf in self.leaves)
        wanted = {source.buffer_index: source for source in self.sources}
        for buffer, (array, path) in enumerate(zip(picked, self.paths, strict=True)):
            shape, dtype = _shape_and_dtype(path, array)
            source = wanted[buffer]
            if (shape, dtype) != (source.buffer_shape, source.buffer_dtype):
                raise validation.error(
                    f"{path} must have shape {source.buffer_shape} and dtype {source.buffer_dtype.name} as the layout was made for, "
                    f"got shape {shape} and dtype {dtype.name}"
                )
        return picked

    def replace(self, pool: Any, buffers: Sequence[Any]) -> Any:
        """``pool`` with its arrays replaced by ``buffers``: for those that a check has handed on (``pass_through=True``).

        Args:
          pool: as in :meth:`buffers`; parts that no source reads are kept.
          buffers: as :meth:`buffers` returned them.

        Raises:
          ValueError: another number of buffers, or a pool that has a getter and no setter.
        """
        buffers = validation.sequence("buffers", buffers, "arrays")
        if len(buffers) != len(self.leaves):
            raise validation.error(f"buffers must hold {len(self.leaves)} arrays, got {len(buffers)}")
        if self.getter is not None and self.setter is None:
            raise validation.error("a pool that is reached by a getter needs a setter to be replaced")
        held = self._get(pool)
        leaves = self._flatten(held)
        for leaf, buffer in zip(self.leaves, buffers, strict=True):
            leaves[leaf] = buffer
        replaced = jax.tree.unflatten(jax.tree.structure(held, is_leaf=_is_description), leaves)
        return replaced if self.setter is None else self.setter(pool, replaced)

    def arguments(self, pool: Any) -> dict[str, Any]:
        """``real_kv_sources`` and ``real_kv_buffers`` of a launch.

        Example:
          >>> pool = [jnp.zeros((4, 8, 2, 16), jnp.bfloat16)] * 2
          >>> sorted(pool_sources(pool, Layout.from_axes("page slot head dim")).arguments(pool))
          ['real_kv_buffers', 'real_kv_sources']
        """
        return {"real_kv_sources": self.sources, "real_kv_buffers": self.buffers(pool)}

    def rotation(self, step: Any, *, per_step: int) -> jax.Array:
        """The ``source_window`` of a step: see :func:`rotation_window`."""
        return rotation_window(step, num_sources=len(self), per_step=per_step)

    def _get(self, pool: Any) -> Any:
        return pool if self.getter is None else self.getter(pool)

    def _flatten(self, pool: Any) -> list[Any]:
        leaves, structure = jax.tree.flatten(pool, is_leaf=_is_description)
        if structure != self.structure:
            raise validation.error(f"the pool must have the structure {self.structure} that its sources were made from, got {structure}")
        return leaves


def pool_sources(
    pool: Any,
    layout: Any,
    *,
    read_bytes: int | Mapping[str, int] = sys.maxsize,
    layers: Sequence[int] | None = None,
    getter: Callable[[Any], Any] | None = None,
    setter: Callable[[Any, Any], Any] | None = None,
) -> PoolSources:
    """The sources of a pool from the names of its axes: all layers and halves, for one launch.

    The pool is only looked at: no reshape, no copy, no cast. Inside ``shard_map`` pass the local pool.

    Args:
      pool: an array, a list of layer arrays, or a pytree of those; arrays, tracers, ``jax.ShapeDtypeStruct`` or (shape, dtype) pairs.
      layout: a :class:`Layout`; or a tuple (by position) or dict (by key or field name) of layouts for the parts of a pytree, with
        None for parts that hold no KV; a list of layouts, one a layer; :func:`per_layer` of any of these for a container of layers.
        A Python list where the layout has none is taken for layers.
      read_bytes: leading bytes of a slot that each source hashes in mode ALL: a number for all, or one a half
        (``{"K": 64, "K scale": 4}``, halves left out read all). ``sys.maxsize`` reads all; a half with 0 gets no source.
      layers: the layers to cover, such as those of a sliding window with slots of their own; None covers all.
      getter, setter: ``getter(state)`` is the pool in an opaque state, ``setter(state, pool)`` the state with another pool. Then
        ``pool`` is that state. Both are part of the key of a compiled step: define them once.

    Returns:
      The sources, without any where the pool has no slots.

    Raises:
      ValueError: an array that does not fit its layout, parts without a layout, layers of different numbers of slots.
      TypeError: what is no pool or no layout.

    Example:
      >>> pool = [jax.ShapeDtypeStruct((64, 16, 8, 2, 128), jnp.bfloat16)] * 32  # pages, page size, 2 H / p, p, D
      >>> sources = pool_sources(pool, Layout.from_axes("page slot group pack dim", interleaved="group pack"))
      >>> len(sources), sources.labels[:3], sources.num_slots
      (64, ('layer 0 K', 'layer 0 V', 'layer 1 K'), 1024)
    """
    if setter is not None and getter is None:
        raise validation.error("a setter needs a getter")
    for argument, function in (("getter", getter), ("setter", setter)):
        if function is not None:
            validation.function(argument, function)
    held = pool if getter is None else getter(pool)
    leaves, structure = jax.tree.flatten(held, is_leaf=_is_description)
    parts = [part for array in _match(layout, held, "pool", 0, None, root=True) for part in _parts(array, leaves[array.leaf])]
    if not parts:
        raise validation.error(f"the layout names no layer and no array of the pool, which has the structure {structure}")
    if layers is not None:
        if isinstance(layers, (str, int)) or not isinstance(layers, (Sequence, range, set, frozenset)):
            raise validation.type_error(f"layers must be a sequence of layer numbers, got {type(layers).__name__}")
        parts = _of_layers(parts, {validation.static_int("layers element", layer, minimum=0) for layer in layers})
    parts.sort(key=lambda part: -1 if part.name.layer is None else part.name.layer)  # stable: halves stay as they come
    _check_parts(parts)
    reads = [_bytes_to_read(read_bytes, part) for part in parts]
    _check_halves(read_bytes, {part.name.half for part in parts})
    num_slots = parts[0].geometry.num_slots if parts else 0
    kept = [(part, read) for part, read in zip(parts, reads, strict=True) if read > 0 and num_slots > 0]
    paths = {part.array.leaf: part.array.path for part, _ in sorted(kept, key=lambda entry: entry[0].array.leaf)}
    place = {leaf: buffer for buffer, leaf in enumerate(paths)}
    return PoolSources(
        sources=tuple(
            RealKvSource.general(
                buffer_shape=part.shape,
                buffer_dtype=part.dtype,
                pages=part.geometry.pages,
                page_size=part.geometry.page_size,
                page_stride=part.geometry.page_stride,
                token_stride=part.geometry.token_stride,
                offset=part.geometry.offset,
                run_bytes=part.geometry.run_bytes,
                run_counts=part.geometry.run_counts,
                run_strides=part.geometry.run_strides,
                read_bytes=read,
                buffer_index=place[part.array.leaf],
            )
            for part, read in kept
        ),
        names=tuple(part.name for part, _ in kept),
        num_slots=num_slots,
        structure=structure,
        leaves=tuple(paths),
        paths=tuple(paths.values()),
        getter=getter,
        setter=setter,
    )


def rotation_window(step: Any, *, num_sources: int, per_step: int) -> jax.Array:
    """Which sources a rotated check looks at in a step: ``source_window``, int32 ``[2]``.

    All sources are seen in any ``rotation_period`` steps that follow each other.

    Args:
      step: the step counter, a Python integer or a traced integer scalar; only its low 32 bits count.
      num_sources: static, sources of the launch. per_step: static, sources a step; more than there are is all of them.

    Raises:
      ValueError: no sources, more than 65,535, or none a step.

    Example:
      >>> [rotation_window(step, num_sources=6, per_step=4).tolist() for step in range(3)]
      [[0, 4], [4, 4], [2, 4]]
    """
    sources, count = _rotation(num_sources, per_step)
    if isinstance(step, (int, np.integer)) and not isinstance(step, (bool, np.bool_)):
        return jnp.asarray(np.array([(int(step) & 0xFFFFFFFF) % sources * count % sources, count], np.int32))
    if validation.operand_dtype("step", step, "an integer or an integer scalar array").kind not in "iu":
        raise validation.type_error(f"step must be an integer or an integer scalar array, got {type(step).__name__}")
    if tuple(step.shape) not in ((), (1,)):
        raise validation.error(f"step must be a scalar, got shape {tuple(step.shape)}")
    number = jnp.asarray(step).reshape(()).astype(jnp.uint32)
    start = (number % jnp.uint32(sources)) * jnp.uint32(count) % jnp.uint32(sources)
    return jnp.stack([start.astype(jnp.int32), jnp.int32(count)])


def rotation_period(*, num_sources: int, per_step: int) -> int:
    """Steps after which every source was looked at.

    Example:
      >>> rotation_period(num_sources=64, per_step=6)
      11
    """
    sources, count = _rotation(num_sources, per_step)
    return -(-sources // count)


def _rotation(num_sources: Any, per_step: Any) -> tuple[int, int]:
    sources = validation.static_int("num_sources", num_sources, minimum=1, maximum=_MAX_ROTATED)
    return sources, min(validation.static_int("per_step", per_step, minimum=1), sources)


# ---------------------------------------------------------------------------------------------- names


def _names(what: str, value: Any) -> tuple[str, ...]:
    names = tuple(value.split()) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise validation.type_error(f"{what} must be axis names, got {type(value).__name__}")
    return tuple(names)


def _use(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise validation.type_error(f"use must be a mapping from axis names, got {type(value).__name__}")
    return value


def _part(name: str, part: Any) -> tuple[int, int]:
    start, stop = part if isinstance(part, tuple) and len(part) == 2 else (0, part)
    start = validation.static_int(f"use of axis {name!r}", start, minimum=0)
    return start, validation.static_int(f"use of axis {name!r}", stop, minimum=start)


# ---------------------------------------------------------------------------------------------- one array


class _Axis(NamedTuple):
    """Elements along an axis; the distance of two neighbours in bits."""

    name: str
    size: int
    stride: int


def _geometries(layout: Layout, shape: tuple[int, ...], dtype: np.dtype, where: str) -> Iterator[Geometry]:
    fit = f"(shape={shape}, dtype={dtype.name})"
    if len(shape) != len(layout.axes):
        raise validation.error(f"layout {layout.text!r} names {len(layout.axes)} axes, but {where} has {len(shape)} {fit}")
    bits = jax.dtypes.itemsize_bits(dtype)
    axes: dict[str, _Axis] = {}
    stride = bits
    for name, size in zip(reversed(layout.axes), reversed(shape), strict=True):
        axes[name] = _Axis(name, size, stride)
        stride *= size
    if stride % 8:
        raise validation.error(f"{where} must be a whole number of bytes, got {stride} bits {fit}")
    start = 0
    for name, first, stop in layout.used:
        if stop > axes[name].size:
            raise validation.error(
                f"layout {layout.text!r} uses {first}:{stop} of the axis {name!r}, but {where} has {axes[name].size} there {fit}"
            )
        start += first * axes[name].stride
        axes[name] = axes[name]._replace(size=stop - first)
    if "kv" in axes and axes["kv"].size != 2:
        raise validation.error(f"the axis 'kv' must have size 2, K and V, but {where} has {axes['kv'].size} there {fit}")

    pages, places = _numbering(layout, axes, where, fit)
    of_slot = [axes[name] for name in layout.axes if name in _BYTE_AXES or name == "kv"]  # in the array's own order
    layer = axes.get("layer")
    halves = len(layout.halves)
    for number in range(1 if layer is None else layer.size):
        for half, name in enumerate(layout.halves):
            offset, runs = _take_half(layout, of_slot, half, where, fit) if halves == 2 else (0, of_slot)
            offset += start + (0 if layer is None else number * layer.stride)
            run, loops = _runs(runs, bits)
            in_bytes = {
                "page_stride": ("page", pages.stride if pages.size > 1 else 0),
                "token_stride": (places.name, places.stride if places.size > 1 else 0),
                "offset": (name, offset),
                "run_bytes": (runs[-1].name if runs else "element", run),
                **{f"stride {axis.name}": (axis.name, axis.stride) for axis in loops},
            }
            for axis_name, number_of_bits in in_bytes.values():
                if number_of_bits % 8:
                    raise validation.error(
                        f"layout {layout.text!r}: along {axis_name!r} the bytes of a slot would begin or end inside a byte, "
                        f"{number_of_bits} bits in {where} {fit}"
                    )
            if len(loops) > _RUN_LEVELS:
                raise validation.error(
                    f"layout {layout.text!r}: a slot's bytes are runs in {len(loops)} nested loops ({', '.join(a.name for a in loops)}), "
                    f"at most {_RUN_LEVELS} can be described; {where} {fit}"
                )
            yield Geometry(
                layer=None if layer is None else number,
                half=name,
                pages=pages.size,
                page_size=max(1, places.size),
                page_stride=in_bytes["page_stride"][1] // 8,
                token_stride=in_bytes["token_stride"][1] // 8,
                offset=offset // 8,
                run_bytes=run // 8,
                run_counts=tuple(axis.size for axis in loops),
                run_strides=tuple(axis.stride // 8 for axis in loops),
            )


def _numbering(layout: Layout, axes: dict[str, _Axis], where: str, fit: str) -> tuple[_Axis, _Axis]:
    """The axes that number slots as two: pages and places in a page, each of one stride."""
    one = _Axis("slot", 1, 0)
    paged = [axes[name] for name in _PAGE_AXES if name in axes]
    placed = [axes[name] for name in _PLACE_AXES if name in axes]
    numbered = [*paged, *placed]
    if any(axis.size == 0 for axis in numbered):
        return one._replace(size=0), one
    cuts = [len(paged), *range(len(numbered), 0, -1)] if paged else range(len(numbered), -1, -1)
    for cut in cuts:
        merged = [_merge(part, one) for part in (numbered[:cut], numbered[cut:])]
        if merged[0] is not None and merged[1] is not None:
            return merged[0], merged[1]
    names = ", ".join(repr(axis.name) for axis in numbered)
    raise validation.error(f"layout {layout.text!r}: the slots along {names} do not lie at two strides in {where} {fit}")


def _merge(axes: Sequence[_Axis], empty: _Axis) -> _Axis | None:
    """Axes as one, high one first; None where they have no common stride."""
    merged = empty
    for axis in (axis for axis in reversed(axes) if axis.size != 1):
        if merged.size == 1:
            merged = axis
        elif axis.stride == merged.size * merged.stride:
            merged = _Axis(axis.name, axis.size * merged.size, merged.stride)
        else:
            return None
    return merged


def _take_half(layout: Layout, of_slot: list[_Axis], half: int, where: str, fit: str) -> tuple[int, list[_Axis]]:
    """K (0) or V (1) of the axes of a slot: bits to skip, and the axes that are left."""
    if "kv" in layout.axes:
        (kv,) = (axis for axis in of_slot if axis.name == "kv")
        return half * kv.stride, [axis for axis in of_slot if axis.name != "kv"]
    way, names = ("interleaved", layout.interleaved) if layout.interleaved else ("concatenated", layout.concatenated)
    shared = [next(axis for axis in of_slot if axis.name == name) for name in names]
    # K and V alternate along the lowest axis, or share the highest one; axes of size 1 say nothing.
    deciding = [axis for axis in (reversed(shared) if way == "interleaved" else shared) if axis.size != 1]
    if not deciding or math.prod(axis.size for axis in shared) % 2:
        size = math.prod(axis.size for axis in shared)
        raise validation.error(
            f"layout {layout.text!r} is {way} on {' '.join(names)!r}, which must be even, but {where} has {size} there {fit}"
        )
    chosen = deciding[0]
    rest = of_slot
    if chosen.size % 2:  # the cut goes through the axes as one
        merged = _merge(shared, chosen._replace(size=1))
        if merged is None:
            raise validation.error(
                f"layout {layout.text!r} is {way} on {' '.join(names)!r}, which do not lie next to each other with sizes "
                f"{', '.join(str(axis.size) for axis in shared)}; {where} {fit}"
            )
        rest = [axis for axis in of_slot if axis not in shared[1:]]
        rest[rest.index(shared[0])] = merged
        chosen = merged
    size = chosen.size // 2
    taken, skipped = (chosen.stride * 2, chosen.stride) if way == "interleaved" else (chosen.stride, size * chosen.stride)
    return half * skipped, [_Axis(axis.name, size, taken) if axis is chosen else axis for axis in rest]


def _runs(axes: Sequence[_Axis], bits: int) -> tuple[int, list[_Axis]]:
    """Bits of one run of a slot, and the loops over its runs, outermost first."""
    run = bits
    loops: list[_Axis] = []
    for axis in (axis for axis in reversed(axes) if axis.size != 1):
        if not loops and axis.stride == run:
            run *= axis.size
        elif loops and axis.stride == loops[0].size * loops[0].stride:
            loops[0] = _Axis(axis.name, axis.size * loops[0].size, loops[0].stride)
        else:
            loops.insert(0, axis)
    return run, loops


# ---------------------------------------------------------------------------------------------- the pool


class _Array(NamedTuple):
    """An array of the pool: the number of its leaf, its path, its layout, and its layer in a container."""

    leaf: int
    path: str
    layout: Layout
    layer: int | None


class _Part(NamedTuple):
    """One layer and half of an array of the pool: a source to be."""

    array: _Array
    shape: tuple[int, ...]
    dtype: np.dtype
    geometry: Geometry
    name: SourceName

    @property
    def where(self) -> str:
        return f"{self.array.path}, shape={self.shape}"


def _parts(array: _Array, leaf: Any) -> Iterator[_Part]:
    """The layers and halves of an array."""
    shape, dtype = _shape_and_dtype(array.path, leaf)
    if array.layer is not None and "layer" in array.layout.axes:
        raise validation.error(
            f"{array.path} is layer {array.layer} of a container, and its layout {array.layout.text!r} names an axis 'layer' as well "
            f"(shape={shape})"
        )
    for geometry in array.layout.geometries(shape, dtype, where=array.path):
        layer = array.layer if geometry.layer is None else geometry.layer
        yield _Part(array, shape, dtype, geometry, SourceName(layer, geometry.half))


def _of_layers(parts: list[_Part], layers: set[int]) -> list[_Part]:
    known = {part.name.layer for part in parts if part.name.layer is not None}
    if layers - known:
        raise validation.error(f"layers {sorted(layers - known)} are not in the pool, which has {len(known)}")
    return [part for part in parts if part.name.layer in layers]


def _check_parts(parts: Sequence[_Part]) -> None:
    """Every source has a name of its own, and all have the same slots."""
    for name, times in collections.Counter(part.name for part in parts).items():
        if times > 1:
            paths = ", ".join(sorted({part.array.path for part in parts if part.name == name}))
            raise validation.error(f"{times} sources would be called {name!s} ({paths}); give each array a half of its own")
    for part in parts:
        if part.geometry.num_slots != parts[0].geometry.num_slots:
            raise validation.error(
                f"{part.name!s} has {part.geometry.num_slots} slots ({part.where}), but {parts[0].name!s} has "
                f"{parts[0].geometry.num_slots} ({parts[0].where}); pools of different slots need launches of their own, see the "
                "argument layers"
            )


def _is_description(value: Any) -> bool:
    """Whether ``value`` is a (shape, dtype) pair, which stands for an array."""
    return (
        type(value) is tuple
        and len(value) == 2
        and isinstance(value[0], (tuple, list))
        and all(isinstance(size, (int, np.integer)) for size in value[0])
        and isinstance(value[1], (str, type, np.dtype))
    )


def _is_leaf(value: Any) -> bool:
    # None and [] are nodes without leaves.
    return _count(value) == 1 and jax.tree_util.treedef_is_leaf(jax.tree.structure(value, is_leaf=_is_description))


def _count(value: Any) -> int:
    return len(jax.tree.leaves(value, is_leaf=_is_description))


def _children(node: Any, path: str) -> list[tuple[Any, Any, str]]:
    """(key, child, path) of a pytree node."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda value: value is not node)
    return [(_key(keys[-1]), child, path + jax.tree_util.keystr(keys)) for keys, child in found]


def _key(entry: Any) -> Any:
    for field in ("key", "name", "idx"):
        if hasattr(entry, field):
            return getattr(entry, field)
    return entry


def _match(layout: Any, node: Any, path: str, first: int, layer: int | None, *, root: bool = False) -> Iterator[_Array]:
    """Every array of ``node`` whose layout is known; ``first`` is the number of its first leaf in the whole pool."""
    if layout is None:
        return
    if node is None:
        raise validation.error(f"{path} is None, where the layout describes an array; None as its layout leaves it out")
    if isinstance(layout, Layout):
        if _is_leaf(node):
            yield _Array(first, path, layout, layer)
        elif isinstance(node, list) or (root and isinstance(node, tuple)):
            yield from _match_layers(PerLayer(layout), node, path, first, layer)
        elif _count(node) == 1:  # an array in a wrapper, such as one with named axes
            yield _Array(first, path, layout, layer)
        else:
            raise validation.error(
                f"{path} holds {_count(node)} arrays in a {type(node).__name__}, where the layout {layout.text!r} describes one; give a "
                "tuple or dict of layouts for its parts, or per_layer(...) if they are layers"
            )
        return
    if isinstance(layout, (PerLayer, list)):
        yield from _match_layers(layout, node, path, first, layer)
        return
    if not isinstance(layout, (tuple, dict)):
        raise validation.type_error(
            f"layout must be a Layout, a tuple, list or dict of layouts, per_layer(...) or None, got {type(layout).__name__} for {path}"
        )
    if isinstance(node, list):
        yield from _match_layers(PerLayer(layout), node, path, first, layer)
        return
    if _is_leaf(node):
        raise validation.error(f"{path} is one array{_shape_text(node)}, where the layout describes {len(layout)} parts")
    children = _children(node, path)
    if isinstance(layout, dict):
        keys = [key for key, *_ in children]
        unknown = [key for key in layout if key not in keys]
        bare = [key for key in keys if key not in layout]
        if unknown or bare:
            what = f"has no part {unknown[0]!r}" if unknown else f"has a part {bare[0]!r} without a layout (None leaves it out)"
            raise validation.error(
                f"{path} {what}; its parts are {', '.join(map(repr, keys))}, the layout's {', '.join(map(repr, layout))}"
            )
        parts = [layout[key] for key in keys]
    else:
        if isinstance(node, dict):
            raise validation.error(
                f"{path} is a dict with the keys {', '.join(map(repr, node))}: give a dict of layouts for it, not a tuple"
            )
        if len(children) != len(layout):
            raise validation.error(f"{path} has {len(children)} parts, the layout describes {len(layout)}")
        parts = list(layout)
    for part, (_, child, child_path) in zip(parts, children, strict=True):
        yield from _match(part, child, child_path, first, layer)
        first += _count(child)


def _match_layers(layout: PerLayer | list[Any], node: Any, path: str, first: int, layer: int | None) -> Iterator[_Array]:
    if layer is not None:
        raise validation.error(f"{path} is a container of layers inside layer {layer}; a pool has one level of layers")
    if _is_leaf(node):
        raise validation.error(f"{path} is one array{_shape_text(node)}, where the layout describes a container of layers")
    children = _children(node, path)
    if isinstance(layout, list) and len(layout) != len(children):
        raise validation.error(f"{path} has {len(children)} layers, the list of layouts {len(layout)}")
    numbers = _layer_numbers([key for key, *_ in children], path) if isinstance(node, dict) else list(range(len(children)))
    for number, (_, child, child_path) in zip(numbers, children, strict=True):
        yield from _match(layout[number] if isinstance(layout, list) else layout.layout, child, child_path, first, number)
        first += _count(child)


def _layer_numbers(keys: Sequence[Any], path: str) -> list[int]:
    """Layer numbers from the keys of a dict: a dict is flattened in the order of its keys, in which "10" comes before "2"."""
    texts = [re.search(r"(\d+)$", str(key)) for key in keys]
    numbers = [int(text[1]) for text in texts if text]
    if len(numbers) != len(keys) or len(set(numbers)) != len(numbers):
        raise validation.error(
            f"{path} is a dict of layers, so each key must end in the number of its layer, got {', '.join(map(repr, keys))}"
        )
    return numbers


def _shape_and_dtype(path: str, value: Any) -> tuple[tuple[int, ...], np.dtype]:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, dtype = value.shape, value.dtype
    elif _is_description(value):
        shape, dtype = value
    else:
        raise validation.type_error(f"{path} must be an array or a (shape, dtype) pair, got {type(value).__name__}")
    sizes = tuple(validation.static_int(f"{path} axis {axis}", size, minimum=0) for axis, size in enumerate(shape))
    return sizes, validation.numpy_dtype(path, dtype)


def _shape_text(node: Any) -> str:
    return f" (shape={tuple(node.shape)})" if hasattr(node, "shape") else ""


def _bytes_to_read(read_bytes: Any, part: _Part) -> int:
    """Bytes of a slot that a source reads."""
    asked = read_bytes.get(part.name.half, sys.maxsize) if isinstance(read_bytes, Mapping) else read_bytes
    asked, slot_bytes = validation.static_int("read_bytes", asked), part.geometry.slot_bytes
    if asked < 0:
        raise validation.error(f"read_bytes must be non-negative, got {asked} for {part.name!s}")
    if asked == sys.maxsize:
        return slot_bytes
    if asked > slot_bytes:
        raise validation.error(
            f"read_bytes must be <= {slot_bytes}, the bytes of a slot in {part.name!s} ({part.where}), got {asked}; sys.maxsize reads all, "
            "and a mapping gives each half its own"
        )
    return asked


def _check_halves(read_bytes: Any, halves: set[str]) -> None:
    if isinstance(read_bytes, Mapping):
        for half in read_bytes:
            if half not in halves:
                raise validation.error(f"read_bytes names the half {half!r}, but the pool has {', '.join(sorted(halves))}")
