"""Where a slot's K/V bytes are: static descriptions of pool buffers, made from arrays or from their shapes and dtypes.

A source keeps no array. It is frozen and hashable, so it can be a static argument and part of a compiled step's key.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from typing import Any

import jax
import numpy as np

from jax_kvcanary import spec, validation

Descriptor = tuple[int, int, int, int, int, int, tuple[int, ...], tuple[int, ...], int, int]
"""(buffer, offset, pages, page_size, page_stride, token_stride, run counts, run strides, run_bytes, read_bytes), in bytes."""

DESCRIPTOR_NUMBERS = 16
"""Numbers of a flattened descriptor."""

MAX_BYTES = 2**58
"""Largest offset, stride and size of a slot that a launch takes, in bytes."""

_RUN_LEVELS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class RealKvSource:
    """One array of a KV pool, seen as rows of bytes: ``page_size`` slots a row, ``num_bytes_per_token`` bytes a slot.

    Args:
      shape: the buffer's own shape, any rank from 2; the first axis counts rows (pages).
      dtype: the buffer's dtype; sub-byte dtypes count by their bits.
      page_size: slots a row.
      num_bytes_per_token: bytes of one slot, a positive multiple of 16.
      read_bytes: leading bytes of a slot that are hashed in mode ALL, a positive multiple of 16.

    Attributes:
      shape: ``(rows, bytes a row)``. buffer_shape, buffer_dtype: of the buffer itself.
      offset, pages, page_stride, token_stride, run_counts, run_strides, run_bytes: byte geometry (see :meth:`general`).
      buffer_index: which of the launch's buffers it reads; None pairs sources and buffers by position.

    Raises:
      ValueError: a size that breaks a rule. TypeError: a size that is no static integer.

    Example:
      >>> RealKvSource(shape=(8, 16, 2, 64), dtype="bfloat16", page_size=16, num_bytes_per_token=256, read_bytes=256).shape
      (8, 4096)
    """

    shape: tuple[int, int]
    page_size: int
    num_bytes_per_token: int
    read_bytes: int
    buffer_shape: tuple[int, ...]
    buffer_dtype: np.dtype
    pages: int
    offset: int
    page_stride: int
    token_stride: int
    run_counts: tuple[int, ...]
    run_strides: tuple[int, ...]
    run_bytes: int
    buffer_index: int | None

    def __init__(
        self,
        *,
        shape: Any,
        dtype: Any = np.uint8,
        page_size: int,
        num_bytes_per_token: int,
        read_bytes: int,
    ) -> None:
        buffer_shape, buffer_dtype = _static_shape("RealKvSource.shape", shape), validation.numpy_dtype("RealKvSource", dtype)
        page_size = validation.static_int("page_size", page_size)
        num_bytes_per_token = validation.static_int("num_bytes_per_token", num_bytes_per_token)
        read_bytes = validation.static_int("read_bytes", read_bytes)
        if page_size < 1:
            raise validation.error(f"RealKvSource.page_size must be >= 1, got {page_size}")
        validation.fits_int32("RealKvSource.page_size", page_size)
        if num_bytes_per_token <= 0 or num_bytes_per_token % spec.SOURCE_ALIGNMENT:
            raise validation.error(f"RealKvSource.num_bytes_per_token must be a positive multiple of 16, got {num_bytes_per_token}")
        if read_bytes <= 0 or read_bytes > num_bytes_per_token or read_bytes % spec.SOURCE_ALIGNMENT:
            raise validation.error(
                "RealKvSource.read_bytes must be a positive multiple of 16 in "
                f"(0, num_bytes_per_token={num_bytes_per_token}], got {read_bytes}"
            )
        if len(buffer_shape) < 2:
            raise validation.error(f"RealKvSource.tensor must be at least 2-D, got shape {buffer_shape}")
        row_bytes = _whole_bytes("RealKvSource.tensor row", buffer_shape[1:], buffer_dtype)
        of_what = f"(shape={buffer_shape}, dtype={buffer_dtype.name})"
        if row_bytes % spec.SOURCE_ALIGNMENT:
            raise validation.error(f"RealKvSource.tensor row stride must be a multiple of 16 bytes, got {row_bytes} bytes {of_what}")
        if row_bytes < page_size * num_bytes_per_token:
            raise validation.error(
                f"RealKvSource.tensor row is {row_bytes} bytes wide but page_size={page_size} x "
                f"num_bytes_per_token={num_bytes_per_token} needs {page_size * num_bytes_per_token} {of_what}"
            )
        validation.fits_int32("RealKvSource.tensor rows", buffer_shape[0])
        _fits("RealKvSource.tensor row bytes", row_bytes)
        self._set(
            shape=(buffer_shape[0], row_bytes),
            page_size=page_size,
            num_bytes_per_token=num_bytes_per_token,
            read_bytes=read_bytes,
            buffer_shape=buffer_shape,
            buffer_dtype=buffer_dtype,
            pages=buffer_shape[0],
            offset=0,
            page_stride=row_bytes,
            token_stride=num_bytes_per_token,
            run_counts=(1,) * _RUN_LEVELS,
            run_strides=(0,) * _RUN_LEVELS,
            run_bytes=num_bytes_per_token,
            buffer_index=None,
        )

    @classmethod
    def general(
        cls,
        *,
        buffer_shape: Any,
        buffer_dtype: Any,
        pages: int,
        page_size: int,
        page_stride: int,
        token_stride: int,
        run_bytes: int,
        run_counts: tuple[int, ...] = (),
        run_strides: tuple[int, ...] = (),
        offset: int = 0,
        read_bytes: int | None = None,
        buffer_index: int | None = None,
    ) -> RealKvSource:
        """A source of any geometry: a slot's bytes are runs of ``run_bytes``, counted by up to four nested loops.

        Slot ``s`` starts at ``offset + (s // page_size) * page_stride + (s % page_size) * token_stride``. The rules about
        multiples of 16 do not hold here; the whole extent must lie inside the buffer.

        Args:
          buffer_shape, buffer_dtype: of the pool array, any rank from 1.
          pages, page_size: pages and slots a page.
          page_stride, token_stride, offset: bytes.
          run_bytes: bytes of one run. run_counts, run_strides: outermost loop first, up to four.
          read_bytes: leading bytes of the concatenated runs that are hashed; None reads all.
          buffer_index: which of the launch's buffers this source reads; None pairs by position.
        """
        buffer_shape = _static_shape("RealKvSource.buffer_shape", buffer_shape)
        buffer_dtype = validation.numpy_dtype("RealKvSource", buffer_dtype)
        numbers = {
            "pages": (pages, 0),
            "page_size": (page_size, 1),
            "page_stride": (page_stride, 0),
            "token_stride": (token_stride, 0),
            "offset": (offset, 0),
            "run_bytes": (run_bytes, 1),
        }
        checked = {name: validation.static_int(f"RealKvSource.{name}", value, minimum=low) for name, (value, low) in numbers.items()}
        for name, value in checked.items():
            (validation.fits_int32 if name in ("pages", "page_size") else _fits)(f"RealKvSource.{name}", value)
        run_counts = validation.sequence("RealKvSource.run_counts", run_counts, "ints")
        run_strides = validation.sequence("RealKvSource.run_strides", run_strides, "ints")
        if len(run_counts) != len(run_strides) or len(run_counts) > _RUN_LEVELS:
            raise validation.error(
                f"RealKvSource.run_counts and run_strides must have one length of at most {_RUN_LEVELS}, "
                f"got {len(run_counts)} and {len(run_strides)}"
            )
        fill = _RUN_LEVELS - len(run_counts)
        counts = (1,) * fill + tuple(
            validation.fits_int32("RealKvSource.run_counts", validation.static_int("RealKvSource.run_counts", count, minimum=1))
            for count in run_counts
        )
        strides = (0,) * fill + tuple(
            _fits("RealKvSource.run_strides", validation.static_int("RealKvSource.run_strides", stride, minimum=0))
            for stride in run_strides
        )
        slot_bytes = _fits("RealKvSource.run_bytes x run_counts", checked["run_bytes"] * math.prod(counts))
        read = slot_bytes if read_bytes is None else validation.static_int("RealKvSource.read_bytes", read_bytes)
        if not 0 <= read <= slot_bytes:
            raise validation.error(f"RealKvSource.read_bytes must be in [0, {slot_bytes}], got {read}")
        if buffer_index is not None:
            buffer_index = validation.static_int("RealKvSource.buffer_index", buffer_index, minimum=0, maximum=spec.INT32_MAX)
        total = _whole_bytes("RealKvSource buffer", buffer_shape, buffer_dtype)
        extent = checked["offset"] + checked["run_bytes"] + sum((n - 1) * s for n, s in zip(counts, strides, strict=True))
        validation.static_int("RealKvSource extent of a slot", extent, maximum=16 * MAX_BYTES)
        extent += (checked["pages"] - 1) * checked["page_stride"] + (checked["page_size"] - 1) * checked["token_stride"]
        if checked["pages"] > 0 and extent > total:
            raise validation.error(
                f"RealKvSource reaches byte {extent} but its buffer has {total} (shape={buffer_shape}, dtype={buffer_dtype.name})"
            )
        rows = buffer_shape[0] if buffer_shape else 1
        source = object.__new__(cls)
        source._set(
            shape=(rows, total // rows if rows else 0),
            num_bytes_per_token=slot_bytes,
            read_bytes=read,
            buffer_shape=buffer_shape,
            buffer_dtype=buffer_dtype,
            run_counts=counts,
            run_strides=strides,
            buffer_index=buffer_index,
            **checked,
        )
        return source

    @property
    def num_slots(self) -> int:
        """Slots that the source covers."""
        return self.pages * self.page_size

    def descriptor(self, position: int) -> Descriptor:
        """The numbers that a launch reads it by; ``position`` is its buffer unless it names one itself."""
        return (
            position if self.buffer_index is None else self.buffer_index,
            self.offset,
            self.pages,
            self.page_size,
            self.page_stride,
            self.token_stride,
            self.run_counts,
            self.run_strides,
            self.run_bytes,
            self.read_bytes,
        )

    def leading(self, read_bytes: int) -> RealKvSource:
        """This source with at most ``read_bytes`` bytes of a slot to read.

        Example:
          >>> RealKvSource(shape=(8, 64), dtype="uint8", page_size=1, num_bytes_per_token=64, read_bytes=64).leading(16).read_bytes
          16
        """
        size = validation.static_int("read_bytes", read_bytes, minimum=0)
        source = copy.copy(self)
        object.__setattr__(source, "read_bytes", min(size, self.read_bytes))
        return source

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return (
            f"RealKvSource(shape={self.buffer_shape}, dtype={self.buffer_dtype.name}, page_size={self.page_size}, "
            f"num_bytes_per_token={self.num_bytes_per_token}, read_bytes={self.read_bytes}, "
            f"runs={self.run_counts} of {self.run_bytes} bytes {self.run_strides} apart, offset={self.offset}, buffer={self.buffer_index})"
        )


def flatten_descriptor(descriptor: Descriptor) -> tuple[int, ...]:
    """The sixteen numbers of a descriptor in a row."""
    buffer, offset, pages, page_size, page_stride, token_stride, counts, strides, run_bytes, read_bytes = descriptor
    return (buffer, offset, pages, page_size, page_stride, token_stride, *counts, *strides, run_bytes, read_bytes)


def clip_read_bytes_aligned(*, requested: int, num_bytes_per_token: int) -> int:
    """Bytes of a slot to read: ``requested``, checked against the slot.

    Args:
      requested: bytes, a multiple of 16; 0 reads nothing, ``sys.maxsize`` all of the slot.
      num_bytes_per_token: bytes of a slot, a positive multiple of 16.

    Raises:
      ValueError: a size that breaks a rule. TypeError: a size that is no static integer.

    Example:
      >>> clip_read_bytes_aligned(requested=sys.maxsize, num_bytes_per_token=64)
      64
    """
    requested = validation.static_int("read_bytes", requested)
    num_bytes_per_token = validation.static_int("num_bytes_per_token", num_bytes_per_token)
    if num_bytes_per_token <= 0 or num_bytes_per_token % spec.SOURCE_ALIGNMENT:
        raise validation.error(f"num_bytes_per_token must be a positive multiple of 16, got {num_bytes_per_token}")
    if requested == 0:
        return 0
    if requested == sys.maxsize:
        return num_bytes_per_token
    if requested < 0:
        raise validation.error(f"read_bytes must be non-negative, got {requested}")
    if requested > num_bytes_per_token:
        raise validation.error(f"read_bytes must be <= num_bytes_per_token ({num_bytes_per_token}), got {requested}")
    if requested % spec.SOURCE_ALIGNMENT:
        raise validation.error(f"read_bytes must be a multiple of 16, got {requested}")
    return requested


def make_row_source(*, layer_buffer: Any, read_bytes: int) -> tuple[RealKvSource, ...]:
    """The source of a buffer with one slot a row.

    Args:
      layer_buffer: ``[slots, ...]`` array, anything with ``shape`` and ``dtype``, or a pair of the two. Not kept.
      read_bytes: leading bytes of a slot to hash, see :func:`clip_read_bytes_aligned`.

    Returns:
      A tuple of one source, empty when there are 0 slots or 0 bytes to read.

    Example:
      >>> make_row_source(layer_buffer=((8, 2, 8), "bfloat16"), read_bytes=16)[0].shape
      (8, 32)
    """
    shape, dtype = _shape_and_dtype("layer_buffer", layer_buffer)
    if len(shape) < 2:
        raise validation.error(f"layer_buffer must be at least 2-D, got shape {shape}")
    num_bytes_per_token = _whole_bytes("layer_buffer row", shape[1:], dtype)
    read = validation.static_int("read_bytes", read_bytes)
    if shape[0] == 0:
        return ()
    read = clip_read_bytes_aligned(requested=read, num_bytes_per_token=num_bytes_per_token)
    if read == 0:
        return ()
    return (RealKvSource(shape=shape, dtype=dtype, page_size=1, num_bytes_per_token=num_bytes_per_token, read_bytes=read),)


def make_packed_source(*, buffer: Any, page_size: int, bytes_per_token: int, read_bytes: int) -> tuple[RealKvSource, ...]:
    """The source of a buffer with ``page_size`` slots a row.

    Args:
      buffer: ``[pages, ...]`` array, anything with ``shape`` and ``dtype``, or a pair of the two; a 1-D buffer is one row. Not kept.
      page_size: slots a row.
      bytes_per_token: bytes of a slot, a positive multiple of 16.
      read_bytes: leading bytes of a slot to hash, see :func:`clip_read_bytes_aligned`.

    Returns:
      A tuple of one source, empty when there are 0 slots or 0 bytes to read.

    Example:
      >>> make_packed_source(buffer=((4, 80), "uint8"), page_size=4, bytes_per_token=16, read_bytes=0)
      ()
    """
    shape, dtype = _shape_and_dtype("buffer", buffer)
    page_size = validation.static_int("page_size", page_size)
    bytes_per_token = validation.static_int("bytes_per_token", bytes_per_token)
    read = validation.static_int("read_bytes", read_bytes)
    if math.prod(shape) == 0:
        return ()
    read = clip_read_bytes_aligned(requested=read, num_bytes_per_token=bytes_per_token)
    if read == 0:
        return ()
    rows = shape if len(shape) != 1 else (1, *shape)
    source = RealKvSource(shape=rows, dtype=dtype, page_size=page_size, num_bytes_per_token=bytes_per_token, read_bytes=read)
    source._set(buffer_shape=shape)
    return (source,)


def _static_shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)):
        raise validation.type_error(f"{name} must be a tuple of ints, got {type(shape).__name__}")
    return tuple(validation.static_int(f"{name}[{axis}]", size, minimum=0) for axis, size in enumerate(shape))


def _fits(name: str, value: int) -> int:
    """``value``, or ValueError if no launch takes it."""
    if value > MAX_BYTES:
        raise validation.error(f"{name} must be at most {MAX_BYTES}, got {value}")
    return value


def _shape_and_dtype(name: str, value: Any) -> tuple[tuple[int, ...], np.dtype]:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _static_shape(f"{name}.shape", tuple(value.shape)), validation.numpy_dtype(name, value.dtype)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (tuple, list)):
        return _static_shape(f"{name}.shape", value[0]), validation.numpy_dtype(name, value[1])
    raise validation.type_error(f"{name} must be an array or a (shape, dtype) pair, got {type(value).__name__}")


def _whole_bytes(name: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
    bits = math.prod(shape) * jax.dtypes.itemsize_bits(dtype)
    if bits % 8:
        raise validation.error(f"{name} must be a whole number of bytes, got {bits} bits (shape={shape}, dtype={dtype.name})")
    return bits // 8
