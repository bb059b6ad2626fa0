"""Layout of what a step hands to the host: header words, context words of a row, and their decoding with NumPy.

The device code builds both from the constants here; the monitor reads them through what it needs of a canary, a small protocol.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from jax_kvcanary import validation
from jax_kvcanary.spec import PROVENANCE_RECORD_WORDS, RING_WORDS, CanaryLaunchTag, Column, RecordFlag

HEADER_MAGIC: Final = 0x4B564359
"""First word of every header."""


class HeaderWord(enum.IntEnum):
    """uint32 words of a header before those of its parts. UNATTESTED: low word, the high one follows."""

    MAGIC = 0
    KEY = 1
    STEP = 2
    EPOCH = 3
    UNATTESTED = 4
    ARMED_STEPS = 6
    BS = 7


class PartWord(enum.IntEnum):
    """uint32 words of one part (one launch tag) of a header. SLOT_RUNS, KERNEL_RUNS: low words, the high ones follow."""

    WRITE_INDEX = 0
    SLOT_RUNS = 1
    KERNEL_RUNS = 3


HEADER_FIXED_WORDS: Final = 8
HEADER_PART_WORDS: Final = 6


class ContextWord(enum.IntEnum):
    """uint32 words of a row's context after the 16 of the slot's record; 64-bit values are (low, high)."""

    REQUEST_ID = 16
    NAMESPACE = 18
    PREVIOUS_STEP = 20
    PREVIOUS_REQUEST_ID = 21
    BITS = 23


CONTEXT_WORDS: Final = 24
CONTEXT_ROW_KNOWN: Final = 1
"""Bit: the row's batch row, so its request id and namespace, is known."""
CONTEXT_PREVIOUS_KNOWN: Final = 2
"""Bit: the predecessor's record was in reach."""


def header_words(parts: int) -> int:
    """Words of a header with so many parts.

    Example:
      >>> header_words(2)
      20
    """
    return HEADER_FIXED_WORDS + HEADER_PART_WORDS * parts


class _HasMode(Protocol):
    @property
    def mode(self) -> Any: ...


class ReportingCanary(Protocol):
    """What reading a report needs of a canary.

    key: 32 bits that tell its reports from those of another. name: for log lines and metrics. parts: launch tags, ascending.
    config.mode: "off", "log" or "raise". source_labels: names of the sources that a launch checks, such as "layer 3 K".
    group_of_part: the group's name of every part, in order; or by launch tag, as a mapping or a function.
    """

    @property
    def key(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> tuple[CanaryLaunchTag, ...]: ...
    @property
    def config(self) -> _HasMode: ...
    @property
    def group_of_part(self) -> Any: ...
    def source_labels(self, tag: CanaryLaunchTag) -> Sequence[str]: ...


def part_groups(canary: ReportingCanary) -> tuple[str, ...]:
    """The name of the group of every part."""
    groups: Sequence[Any] | Mapping[Any, Any] | Callable[[Any], Any] = canary.group_of_part
    if callable(groups):
        return tuple(str(groups(tag)) for tag in canary.parts)
    if isinstance(groups, Mapping):
        return tuple(str(groups[tag]) for tag in canary.parts)
    return tuple(str(groups[part]) for part in range(len(canary.parts)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportHeader:
    """A header in named fields.

    step: of the report. epoch: how often the log was cleared. unattested: positions that were adopted so far. armed_steps: steps that
    stamped. bs: batch rows of the step. write_index: rows reported in this epoch; slot_runs, kernel_runs: slots and launches so far;
    each by launch tag.
    """

    step: int
    epoch: int
    unattested: int
    armed_steps: int
    bs: int
    write_index: dict[CanaryLaunchTag, int]
    slot_runs: dict[CanaryLaunchTag, int]
    kernel_runs: dict[CanaryLaunchTag, int]


def header_fields(header: Any, canary: ReportingCanary) -> ReportHeader:
    """The header of a report in named fields; waits for the device if it has to.

    Args:
      header: uint32 ``[header_words(len(canary.parts))]``, a JAX or NumPy array.
      canary: the one whose step made the report.

    Raises:
      ValueError: no header, or one of another canary.
    """
    words = np.asarray(header)
    check_header_shape(words, canary)
    values = words.astype(np.uint32, copy=False).tolist()
    if values[HeaderWord.MAGIC] != HEADER_MAGIC:
        raise validation.error(f"the report is no canary's: its header starts with {values[0]:#x}, expected {HEADER_MAGIC:#x}")
    key = int(canary.key) & 0xFFFFFFFF
    if values[HeaderWord.KEY] != key:
        raise validation.error(
            f"the report is of another canary: its key is {values[HeaderWord.KEY]:#010x}, that of canary {canary.name!r} is {key:#010x}"
        )
    index: dict[CanaryLaunchTag, int] = {}
    slots: dict[CanaryLaunchTag, int] = {}
    launches: dict[CanaryLaunchTag, int] = {}
    for part, tag in enumerate(canary.parts):
        of = values[header_words(part) : header_words(part + 1)]
        index[tag] = min(of[PartWord.WRITE_INDEX], 2**31 - 1)
        slots[tag] = of[PartWord.SLOT_RUNS] | of[PartWord.SLOT_RUNS + 1] << 32
        launches[tag] = of[PartWord.KERNEL_RUNS] | of[PartWord.KERNEL_RUNS + 1] << 32
    return ReportHeader(
        step=values[HeaderWord.STEP],
        epoch=values[HeaderWord.EPOCH],
        unattested=values[HeaderWord.UNATTESTED] | values[HeaderWord.UNATTESTED + 1] << 32,
        armed_steps=values[HeaderWord.ARMED_STEPS],
        bs=values[HeaderWord.BS],
        write_index=index,
        slot_runs=slots,
        kernel_runs=launches,
    )


def check_header_shape(header: Any, canary: ReportingCanary) -> None:
    """ValueError unless the header has the length of this canary's; reads no value."""
    shape, wanted = tuple(header.shape), (header_words(len(canary.parts)),)
    if shape != wanted:
        raise validation.error(
            f"the report's header must have shape {wanted} for the {len(canary.parts)} launches of canary {canary.name!r}, got {shape}"
        )


def check_report_shapes(report: Any, canary: ReportingCanary) -> int:
    """The ring's capacity (rows a part), after a look at the shapes of a report; reads no value.

    Raises:
      ValueError: arrays of other shapes. TypeError: no report.
    """
    for name in ("header", "rows", "context"):
        if not hasattr(getattr(report, name, None), "shape"):
            raise validation.type_error(f"observe takes the report that tail returned, got {type(report).__name__} without {name}")
    check_header_shape(report.header, canary)
    parts, shape = len(canary.parts), tuple(report.rows.shape)
    if len(shape) != 3 or shape[0] != parts or shape[2] != RING_WORDS:
        raise validation.error(f"the report's rows must have shape ({parts}, capacity, {RING_WORDS}), got {shape}")
    if tuple(report.context.shape) != (parts, shape[1], CONTEXT_WORDS):
        raise validation.error(
            f"the report's context must have shape ({parts}, {shape[1]}, {CONTEXT_WORDS}), got {tuple(report.context.shape)}"
        )
    return shape[1]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RowFacts:
    """One violation row with its context, as plain Python values. Columns as in :class:`jax_kvcanary.Violation`.

    group: the pool's group. reader, reader_namespace: of the batch row; reader 0 is unknown. written: the slot's record is not all
    zero; then writer (0 is unknown), writer_step, writer_namespace and flags are its. previous_known, previous_writer,
    previous_step: the record of the predecessor.
    """

    tag: int
    group: str
    slot: int
    position: int
    token: int
    expected_token: int
    chain_hash: int
    aux: int
    reasons: int
    batch_row: int
    req_pool_idx: int
    step: int
    expected_position: int
    real_kv_hash: int
    expected_real_kv_hash: int
    first_bad_source: int
    shard: int
    reader: int
    reader_namespace: int
    written: bool
    writer: int
    writer_step: int
    writer_namespace: int
    flags: RecordFlag
    previous_known: bool
    previous_writer: int
    previous_step: int

    @property
    def request(self) -> tuple[str, int]:
        """What tells the request from others: its id where known, else its row; a row of none, as of a sweep, stands alone."""
        if self.reader:
            return "id", self.reader
        if self.req_pool_idx >= 0:
            return "row", self.req_pool_idx
        return ("batch row", self.batch_row) if self.batch_row >= 0 else ("slot", self.slot)

    @property
    def of_request(self) -> bool:
        """Whether the row belongs to any request."""
        return bool(self.reader) or self.req_pool_idx >= 0 or self.batch_row >= 0


_UNSIGNED = (Column.CHAIN_HASH, Column.AUX, Column.REAL_KV_HASH, Column.EXPECTED_REAL_KV_HASH)
_SWEEPS = frozenset(int(tag) for tag in CanaryLaunchTag if "SWEEP" in tag.name)
_FLAGS = {number: RecordFlag(number) for number in range(4)}


def decode_rows(rows: np.ndarray, context: np.ndarray, tags_and_groups: Sequence[tuple[int, str]]) -> list[RowFacts]:
    """Rows uint32 ``[n, 32]`` and contexts uint32 ``[n, 24]`` as facts; ``tags_and_groups``: the part of each row."""
    words = np.ascontiguousarray(rows, np.uint32).view(np.uint64).reshape(len(rows), RING_WORDS // 2)
    signed, unsigned = words.view(np.int64).tolist(), words[:, list(_UNSIGNED)].tolist()
    around = np.ascontiguousarray(context, np.uint32)
    written: list[bool] = np.any(around[:, :PROVENANCE_RECORD_WORDS], axis=1).tolist()
    out = []
    for s, u, c, stamped, (tag, group) in zip(signed, unsigned, around.tolist(), written, tags_and_groups, strict=True):
        bits = c[ContextWord.BITS]
        known, previous = bool(bits & CONTEXT_ROW_KNOWN), bool(bits & CONTEXT_PREVIOUS_KNOWN)
        out.append(
            RowFacts(
                tag=tag,
                group=group,
                slot=s[Column.SLOT],
                position=s[Column.POSITION],
                token=s[Column.TOKEN],
                expected_token=s[Column.EXPECTED_TOKEN],
                chain_hash=u[0],
                aux=u[1],
                reasons=s[Column.REASON],
                batch_row=-1 if tag in _SWEEPS else s[Column.BATCH_ROW],  # of a sweep it is a place in the portion
                req_pool_idx=s[Column.REQ_POOL_IDX],
                step=s[Column.STEP] & 0xFFFFFFFF,
                expected_position=s[Column.EXPECTED_POSITION],
                real_kv_hash=u[2],
                expected_real_kv_hash=u[3],
                first_bad_source=s[Column.FIRST_BAD_SOURCE],
                shard=s[Column.SHARD] & 0xFFFFFFFF,
                reader=c[16] | c[17] << 32 if known else 0,
                reader_namespace=c[18] | c[19] << 32 if known else 0,
                written=stamped,
                writer=c[8] | c[9] << 32,
                writer_step=c[10],
                writer_namespace=c[12] | c[13] << 32,
                flags=_FLAGS[c[11] & 3],
                previous_known=previous,
                previous_writer=c[21] | c[22] << 32 if previous else 0,
                previous_step=c[20] if previous else 0,
            )
        )
    return out
