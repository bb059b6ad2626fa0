"""Real-KV hashes: which bytes of the pool belong to a slot, and the hash of them over all sources.

A source descriptor is ``(buffer, offset, pages, page_size, page_stride, token_stride, (n0..n3), (s0..s3), run_bytes, read_bytes)``, all
in bytes. Slot ``s`` is token ``t = s % page_size`` of page ``s // page_size``; its bytes are, for i0 < n0, .., i3 < n3 in row-major order,
the ``run_bytes`` bytes at ``offset + page * page_stride + t * token_stride + i0 * s0 + .. + i3 * s3``, the first ``read_bytes`` of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jax_kvcanary.reference.hashing import fold_rows, splitmix64_array
from jax_kvcanary.reference.integers import MASK32
from jax_kvcanary.spec import PARTIAL_BYTES, RealKvHashMode

_SUB_BYTE_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
"""Element types of which NumPy holds one a byte and a device several."""

_GATHERED_BYTES = 1 << 22
"""Bytes gathered at once; each takes eight more for its address."""


class Descriptor(NamedTuple):
    """The static description of a source, see the head of this file."""

    buffer: int
    offset: int
    pages: int
    page_size: int
    page_stride: int
    token_stride: int
    run_counts: tuple[int, ...]
    run_strides: tuple[int, ...]
    run_bytes: int
    read_bytes: int


class SlotHash(NamedTuple):
    """The real-KV hash of a slot, and each source's own hash (0 for a source that reads nothing)."""

    combined: int
    own: tuple[int, ...]

    @property
    def tags(self) -> tuple[int, ...]:
        """The low 32 bits of each source's own hash."""
        return tuple(value & MASK32 for value in self.own)


def buffer_bytes(buffer: Any) -> NDArray[np.uint8]:
    """The bytes of an array of any dtype in row-major order; elements of less than a byte are packed, the lowest bits first."""
    array = np.ascontiguousarray(buffer).reshape(-1)
    bits = _SUB_BYTE_BITS.get(array.dtype.name)
    if bits is None:
        return array.view(np.uint8)
    per_byte = 8 // bits
    elements = np.zeros(-(-array.size // per_byte) * per_byte, np.uint8)
    elements[: array.size] = array.view(np.uint8) & ((1 << bits) - 1)
    packed = np.zeros(elements.size // per_byte, np.uint8)
    for k in range(per_byte):
        packed |= elements[k::per_byte] << (k * bits)
    return packed


class SourceReader:
    """The sources of one launch with their buffers, in one hash mode."""

    def __init__(self, sources: Sequence[Any], buffers: Sequence[Any], mode: int) -> None:
        self.mode = RealKvHashMode(int(mode))
        self.descriptors = [
            Descriptor(*(source.descriptor(index) if hasattr(source, "descriptor") else source)) for index, source in enumerate(sources)
        ]
        self.buffers: list[NDArray[np.uint8]] = []
        if self.mode == RealKvHashMode.NONE:
            return
        self.buffers = [buffer_bytes(buffer) for buffer in buffers]
        for index, descriptor in enumerate(self.descriptors):
            if not 0 <= descriptor.buffer < len(self.buffers):
                raise ValueError(f"kv-canary: source {index} names buffer {descriptor.buffer}, but {len(self.buffers)} buffers are given")

    def __len__(self) -> int:
        return len(self.descriptors)

    def slots(self, record_slots: int) -> int:
        """How many slots a launch may touch: those that have a record and bytes in every source that is read."""
        if self.mode == RealKvHashMode.NONE:
            return record_slots
        return min([record_slots, *(max(0, d.pages) * max(0, d.page_size) for d in self.descriptors)])

    def bytes_read(self, descriptor: Descriptor) -> int:
        """How many bytes of a slot the mode reads from this source."""
        total = math.prod(max(0, n) for n in descriptor.run_counts) * descriptor.run_bytes
        read = max(0, min(descriptor.read_bytes, total))
        if self.mode == RealKvHashMode.NONE:
            return 0
        return min(PARTIAL_BYTES, read) if self.mode == RealKvHashMode.PARTIAL else read

    def read(self, descriptor: Descriptor, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The bytes of ``slots [n]``, as ``[n, bytes_read]``."""
        size = self.bytes_read(descriptor)
        if size == 0 or slots.size == 0:
            return np.zeros((slots.size, size), np.uint8)
        runs = itertools.islice(
            itertools.product(*(range(n) for n in descriptor.run_counts)),  # row-major: the last index runs fastest
            -(-size // descriptor.run_bytes),
        )
        run_offsets = [sum(i * s for i, s in zip(index, descriptor.run_strides, strict=True)) for index in runs]
        within_slot = np.add.outer(np.array(run_offsets, np.int64), np.arange(descriptor.run_bytes, dtype=np.int64)).reshape(-1)[:size]
        page, token = slots // descriptor.page_size, slots % descriptor.page_size
        start = descriptor.offset + page * descriptor.page_stride + token * descriptor.token_stride
        address = start[:, None] + within_slot[None, :]  # [n, size]
        data = self.buffers[descriptor.buffer]
        if address.min() < 0 or address.max() >= data.size:
            raise ValueError(f"kv-canary: source reaches past its buffer of {data.size} bytes: {descriptor}")
        return data[address]

    def source_hash(self, descriptor: Descriptor, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The source's own hash of each of ``slots``, a bounded number of bytes at a time."""
        at_once = max(1, _GATHERED_BYTES // self.bytes_read(descriptor))
        parts = [slots[first : first + at_once] for first in range(0, slots.size, at_once)]
        return np.concatenate([np.zeros(0, np.uint64), *(fold_rows(self.read(descriptor, part)) for part in parts)])

    def hashes(self, slots: Iterable[int]) -> dict[int, SlotHash]:
        """The hashes of all of ``slots``, which are in range."""
        unique = sorted(set(slots))
        which = np.array(unique, np.int64)
        combined = np.zeros(len(unique), np.uint64)
        own = []
        for descriptor in self.descriptors:
            if self.bytes_read(descriptor) == 0:
                own.append([0] * len(unique))
                continue
            source_hash = self.source_hash(descriptor, which)
            combined = splitmix64_array(combined ^ source_hash)
            own.append(source_hash.tolist())
        columns = zip(*own, strict=True) if own else itertools.repeat(())
        return {slot: SlotHash(value, tuple(tags)) for slot, value, tags in zip(unique, combined.tolist(), columns, strict=False)}


def as_source_tags(source_tags: Any, record_slots: int, sources: int) -> NDArray[np.uint32] | None:
    """``source_tags`` as ``[slots, sources] uint32``, or None."""
    if source_tags is None:
        return None
    array = np.asarray(source_tags)
    if array.dtype != np.uint32 or array.shape != (record_slots, sources):
        raise ValueError(f"kv-canary: source_tags must be uint32 [{record_slots}, {sources}], got {array.dtype} {array.shape}")
    return array
