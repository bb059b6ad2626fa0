"""Vector folders: how their files are found and read, in the terms of the library's arrays, and how results are compared.

A folder holds manifest.json, one .npz a file named there, and source_factory.json. The repository's own is tests/vectors; further
ones come from the environment variable KVCANARY_VECTORS, separated like the entries of PATH.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jax_kvcanary.spec import INT32_MAX, NUM_LAUNCH_TAGS, RECORD_WORDS, RING_WORDS, Column
from jax_kvcanary.state import ViolationLog

ENVIRONMENT_VARIABLE = "KVCANARY_VECTORS"

GOLDEN_COLUMNS = 8
"""Columns of a violation row that the files hold."""

GOLDEN_REASONS = 63
"""Reason bits that the files know."""

MAX_RECORD_WORDS = 15
"""Widest record that the files are read as: one word more and it would hold provenance, which they do not know."""

Row = tuple[int, ...]
"""The 64-bit columns of a violation row, without sign."""


# ---------------------------------------------------------------------------------------------- folders and files


@dataclasses.dataclass(frozen=True)
class Vector:
    """One file of a folder."""

    folder: str
    path: Path
    kind: str
    entry: dict[str, Any] = dataclasses.field(compare=False, repr=False)

    @property
    def id(self) -> str:
        return f"{self.folder}-{self.path.stem}"

    @property
    def params(self) -> dict[str, Any]:
        return self.entry["params"]

    @property
    def stats(self) -> dict[str, Any]:
        return self.entry["stats"]

    @functools.cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        with np.load(self.path) as file:
            return {name: file[name] for name in file.files}


def folders() -> list[tuple[str, Path]]:
    """(label, path) of every vector folder; labels are unique."""
    found = [("repo", Path(__file__).parent / "vectors")]
    for number, name in enumerate(filter(None, os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep))):
        path = Path(name)
        if not (path / "manifest.json").is_file():
            raise FileNotFoundError(f"{ENVIRONMENT_VARIABLE} names {name!r}, which has no manifest.json")
        found.append((f"extra{number}", path))
    return found


@functools.cache
def all_vectors() -> tuple[Vector, ...]:
    """Every file of every folder."""
    out = []
    for label, path in folders():
        manifest = json.loads((path / "manifest.json").read_text())
        out += [Vector(label, path / entry["file"], entry["kind"], entry) for entry in manifest["files"]]
    return tuple(out)


def vectors(kind: str) -> list[Vector]:
    """The files of one kind."""
    return [vector for vector in all_vectors() if vector.kind == kind]


def factory_calls() -> list[tuple[str, dict[str, Any]]]:
    """(id, call) of every recorded call of a source factory."""
    out = []
    for label, path in folders():
        if (path / "source_factory.json").is_file():
            calls = json.loads((path / "source_factory.json").read_text())
            out += [(f"{label}-{number:03d}-{call['fn'].lstrip('_')}", call) for number, call in enumerate(calls)]
    return out


# ---------------------------------------------------------------------------------------------- inputs


class GoldenSource(NamedTuple):
    """One real-KV source of a file; hashable, and a source to the reference as it is."""

    rows: int
    row_bytes: int
    page_size: int
    num_bytes_per_token: int
    read_bytes: int
    dtype: str

    def descriptor(self, buffer_index: int) -> tuple[Any, ...]:
        run = self.num_bytes_per_token
        ones, zeros = (1, 1, 1, 1), (0, 0, 0, 0)
        return (buffer_index, 0, self.rows, self.page_size, self.row_bytes, run, ones, zeros, run, self.read_bytes)


def as_dtype(data: NDArray[np.uint8], name: str) -> NDArray[Any]:
    """Raw bytes ``[rows, row_bytes]`` as elements of a dtype of up to four bytes."""
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if dtype.itemsize > 4 or data.shape[1] % dtype.itemsize:
        return data
    return np.ascontiguousarray(data).view(dtype)


def sources_and_buffers(
    described: Iterable[dict[str, Any]], data: list[NDArray[np.uint8]]
) -> tuple[tuple[GoldenSource, ...], tuple[Any, ...]]:
    """The sources of ``params.sources`` and their buffers, viewed in the dtype that the file names."""
    sources, buffers = [], []
    for source, raw in zip(described, data, strict=True):
        sizes = (source["page_size"], source["num_bytes_per_token"], source["read_bytes"])
        sources.append(GoldenSource(*raw.shape, *sizes, source["dtype"]))
        buffers.append(as_dtype(raw, source["dtype"]))
    return tuple(sources), tuple(buffers)


def records_from(buffer: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Records ``[slots, words]`` from a file's ``[slots, stride] uint8``; bytes that fill no word are left out."""
    words = min(buffer.shape[1] // 4, MAX_RECORD_WORDS)
    return np.ascontiguousarray(buffer[:, : 4 * words]).view("<u4").astype(np.uint32)


def record_bytes(records: NDArray[np.uint32], buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``buffer`` with its leading bytes taken from ``records``: what the file's buffer is after a launch."""
    out = buffer.copy()
    raw = np.ascontiguousarray(records.astype("<u4")).view(np.uint8)
    assert raw.shape[1] >= 4 * RECORD_WORDS
    out[:, : raw.shape[1]] = raw
    return out


def pairs(values: NDArray[Any]) -> NDArray[np.uint32]:
    """64-bit integers as uint32 ``[..., 2]``, low word first."""
    raw = np.ascontiguousarray(values.astype(np.int64, copy=False)).view(np.uint64)
    return np.stack([raw & np.uint64(2**32 - 1), raw >> np.uint64(32)], axis=-1).astype(np.uint32)


def fits_int32(values: NDArray[Any]) -> bool:
    """Whether int32 holds every value."""
    return values.size == 0 or (int(values.min()) >= -INT32_MAX - 1 and int(values.max()) <= INT32_MAX)


def empty_log(capacity: int) -> ViolationLog:
    """A fresh log."""
    return ViolationLog(
        ring=np.zeros((capacity, RING_WORDS), np.uint32),
        write_index=np.zeros(1, np.int32),
        slot_run_counter=np.zeros((NUM_LAUNCH_TAGS, 2), np.uint32),
        kernel_run_counter=np.zeros((NUM_LAUNCH_TAGS, 2), np.uint32),
    )


def log_before(vector: Vector, tag: int) -> ViolationLog:
    """The log of a verify or write file before the launch: eight columns are known, counters belong to the launch's tag."""
    arrays = vector.arrays
    log = empty_log(arrays["violation_ring_before"].shape[0])
    log.ring[:, : 2 * GOLDEN_COLUMNS] = ring_words(arrays["violation_ring_before"])
    log.write_index[:] = arrays["violation_write_index_before"]
    log.slot_run_counter[tag] = pairs(arrays["slot_run_counter_before"])[0]
    log.kernel_run_counter[tag] = pairs(arrays["kernel_run_counter_before"])[0]
    return log


def ring_words(ring: NDArray[np.int64]) -> NDArray[np.uint32]:
    """A file's ring ``[rows, 8] int64`` as the leading words of ours."""
    return pairs(ring).reshape(ring.shape[0], 2 * ring.shape[1])


# ---------------------------------------------------------------------------------------------- results


def rows_of(ring: NDArray[np.uint32], begin: int = 0, end: int | None = None) -> list[Row]:
    """Rows ``[begin, end)`` of a ring ``[rows, words] uint32``, cut at its capacity."""
    part = np.ascontiguousarray(np.asarray(ring)[begin:end]).astype("<u4").view("<u8")
    return [tuple(row) for row in part.tolist()]


def counters_of(counter: NDArray[np.uint32]) -> list[int]:
    """The twelve 64-bit counts of a counter ``[12, 2]``."""
    return [int(low) | int(high) << 32 for low, high in np.asarray(counter).tolist()]


def golden_rows(rows: Iterable[Row]) -> list[Row]:
    """What a file would hold of these rows: its columns and reason bits, without rows of other reasons alone."""
    out = []
    for row in rows:
        row = row[:GOLDEN_COLUMNS]
        reason = row[Column.REASON] & GOLDEN_REASONS
        if reason:
            out.append((*row[: Column.REASON], reason))
    return out


def assert_same_rows(got: Iterable[Row], wanted: Iterable[Row]) -> None:
    """The same rows in any order."""
    got, wanted = collections.Counter(got), collections.Counter(wanted)
    assert got == wanted, f"rows that should not be there: {list((got - wanted).elements())}; missing: {list((wanted - got).elements())}"


def assert_among(got: Iterable[Row], launch: Iterable[Row]) -> None:
    """Every row is one of the launch's, none more often than there."""
    surplus = collections.Counter(got) - collections.Counter(launch)
    assert not surplus, f"rows that the launch does not report: {list(surplus.elements())}"


def assert_launch_rows(ring: NDArray[np.uint32], before: int, after: int, launch: list[Row], columns: int) -> None:
    """A launch that moved the write index from ``before`` to ``after`` stored its rows, or as many as the ring has room for."""
    capacity = ring.shape[0]
    got = [row[:columns] for row in rows_of(ring, min(before, capacity), min(after, capacity))]
    launch = [row[:columns] for row in launch]
    assert after == min(before + len(launch), INT32_MAX)
    if after <= capacity:
        assert_same_rows(got, launch)
    else:
        assert_among(got, launch)
