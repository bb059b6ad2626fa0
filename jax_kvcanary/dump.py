"""Dumps: what a violation is about, saved to one file that explains itself on any machine.

A file is a NumPy archive (.npz) whose comment holds a SHA-256 of all bytes before it. It holds the violation rows with what their
causes were told from, records, tags and pool bytes of the slots concerned, and, when asked, the flight recorder's batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from jax_kvcanary import validation
from jax_kvcanary.canary import Canary
from jax_kvcanary.canary_state import COUNTERS, CanaryState
from jax_kvcanary.causes import Case
from jax_kvcanary.events import Event
from jax_kvcanary.history import Answers
from jax_kvcanary.recorder import FlightRecorder
from jax_kvcanary.reference.hashing import mix3
from jax_kvcanary.reference.source import Descriptor, buffer_bytes
from jax_kvcanary.report_header import RowFacts
from jax_kvcanary.sources import RealKvSource, flatten_descriptor
from jax_kvcanary.spec import PROVENANCE_RECORD_WORDS, RecordFlag

logger = logging.getLogger(__name__)

FORMAT: Final = "jax_kvcanary dump"
FORMAT_VERSION: Final = 1
SUFFIX: Final = ".kvcanary.npz"
_TRAILER: Final = b"jax_kvcanary sha256 "
_DIGEST_CHARACTERS: Final = 64
_END_OF_ARCHIVE: Final = b"PK\x05\x06"
_END_BYTES: Final = 22

HEAD, UNKNOWN = -1, -2
"""As a slot's predecessor: it begins a chain; nobody knows."""

_ROW_FIELDS: Final = tuple(field.name for field in dataclasses.fields(RowFacts))
_MAX_EVENTS: Final = 64


class DumpError(ValueError):
    """A file that is no dump, is damaged, or was written by a newer version."""


# ---------------------------------------------------------------------------------------------- what a dump holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpedSlot:
    """One slot as of the dump.

    why: "bad", "predecessor" or "neighbour". request, position: who reads it where by the tables, 0 and -1 unknown. previous: its
    predecessor's slot, :data:`HEAD` or :data:`UNKNOWN`. record: uint32 ``[16]``; token words are 0 in a dump without tokens.
    chain: the hash that the record of the next position must hold. tags: uint32 ``[sources]``. data: uint8 of each source, None if
    its bytes were not saved.
    """

    group: str
    slot: int
    why: str
    request: int
    position: int
    previous: int
    record: np.ndarray
    chain: int
    tags: np.ndarray
    data: tuple[np.ndarray, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpedGroup:
    """A group of layers. labels: of its sources. sources: what they read. leading: how many are the leading bytes of others."""

    name: str
    slots: int
    window: int
    padding_slot: int | None
    labels: tuple[str, ...]
    leading: int
    sources: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DumpedEvent:
    """An event as it was told: the fields of :class:`Event` that are no objects, and the case with the number of its row."""

    fields: dict[str, Any]
    case: Case | None
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dump:
    """A dump that was read and whose checksum is right.

    meta: versions, canary, config. step: the last step before the bytes were saved. events: with the steps that they were found in.
    """

    path: Path
    meta: dict[str, Any]
    step: int
    with_tokens: bool
    groups: tuple[DumpedGroup, ...]
    slots: tuple[DumpedSlot, ...]
    events: tuple[DumpedEvent, ...]
    recorder: FlightRecorder | None

    def slot(self, group: str, slot: int) -> DumpedSlot | None:
        """A saved slot, or None."""
        return next((held for held in self.slots if held.group == group and held.slot == slot), None)


# ---------------------------------------------------------------------------------------------- writing


class Dumper:
    """Saves what violations are about. A failure to save is logged and counted, and never reaches the caller.

    **Call it where pool and state are whole: after the step that returned them, before the one that donates them.** The bytes are
    those of that moment, which may be later than the violation; the file names both steps. Records, hashes and bytes tell of tokens,
    even where they are not written down: treat a dump as you treat the prompts.

    Args:
      canary: whose state it is given.
      directory: made if it is not there.
      max_files: dumps in the directory; when there are so many, no more are written, and none is deleted.
      max_bytes: of one file; what has no room is left out: bytes of the last slots, the recorder's batches, all bytes, neighbours, events.
      min_seconds: between two dumps.
      with_tokens: also write down tokens.
      recorder: a :class:`FlightRecorder` whose batches go into every dump.
      neighbours: positions on either side of a bad one whose records are saved.

    Example:
      >>> dumper = Dumper(canary, "dumps")  # doctest: +SKIP
      >>> events = monitor.observe(report)  # doctest: +SKIP
      >>> if events:  # doctest: +SKIP
      ...     dumper.save(kv, state, events)
    """

    def __init__(
        self,
        canary: Canary,
        directory: str | os.PathLike[str],
        *,
        max_files: int = 16,
        max_bytes: int = 64 << 20,
        min_seconds: float = 60.0,
        with_tokens: bool = False,
        recorder: FlightRecorder | None = None,
        neighbours: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.canary, self.directory = canary, Path(directory)
        self.max_files = validation.static_int("max_files", max_files, minimum=1)
        self.max_bytes = validation.static_int("max_bytes", max_bytes, minimum=1)
        self.min_seconds = min_seconds
        self.with_tokens = validation.static_bool("with_tokens", with_tokens)
        self.neighbours = validation.static_int("neighbours", neighbours, minimum=0)
        self.recorder = recorder
        self.saved = self.skipped = self.failures = 0
        self._clock, self._last = clock, -math.inf
        self._full = False

    def hook(self, current: Callable[[], tuple[Any, CanaryState]], **more: Any) -> Callable[[Event], None]:
        """For ``Monitor(on_event=...)``: saves each event. current: returns the pool and the state as they are then, not donated."""

        def on_event(event: Event) -> None:
            kv, state = current()
            self.save(kv, state, [event], **more)

        return on_event

    def save(
        self,
        kv: Any,
        state: CanaryState,
        events: Sequence[Event],
        *,
        request_ids: Any = (),
        tables: Any = None,
        lengths: Any = None,
        page_size: int = 1,
        full_to_swa_index_mapping: Any = None,
        swept: Iterable[Any] = (),
    ) -> Path | None:
        """Write a dump of some events, if number and rate allow; waits for the device.

        Args:
          kv, state: the pool and the canary's state after a step; only read, not donated yet.
          events: of the monitor.
          request_ids, tables, lengths, page_size: the batch's tables as :meth:`Monitor.record_batch` takes them, for predecessors and
            neighbours. None: those that the recorder has.
          full_to_swa_index_mapping: ``[slots]``, for groups with slots of their own.
          swept: :class:`SweepResult` of the sweeps that the events may come from.

        Returns:
          The file, None if nothing was written.
        """
        violations = [event for event in events if event.kind == "violation" and event.case is not None]
        try:
            if not violations or self._must_skip():
                return None
            tables_of = _Tables(request_ids, tables, lengths, page_size, full_to_swa_index_mapping, self.recorder, list(swept))
            return self._write(kv, state, violations[:_MAX_EVENTS], len(events), tables_of)
        except Exception as error:
            self.failures += 1
            logger.error("kvcanary=dump_failed name=%s %s: %s", self.canary.name, type(error).__name__, error, exc_info=self.failures == 1)
            return None

    def _must_skip(self) -> bool:
        if self._clock() - self._last < self.min_seconds:
            self.skipped += 1
            return True
        if len(_dumps_in(self.directory)) >= self.max_files:
            self.skipped += 1
            if not self._full:
                self._full = True
                logger.warning(
                    "kvcanary=dumps_full name=%s directory=%s files=%d no more are written",
                    self.canary.name,
                    self.directory,
                    self.max_files,
                )
            return True
        self._full = False
        return False

    def _write(self, kv: Any, state: CanaryState, events: list[Event], found: int, tables: _Tables) -> Path | None:
        self._last = self._clock()
        slots = {name: self._wanted(name, events, tables) for name in self.canary.group_names}
        only_bad = {name: [one for one in held if one[1] == "bad"] for name, held in slots.items()}
        content, excess, used = b"", 0, 0
        for attempt in range(10):  # with ever less in it, until it fits
            room = {0: self.max_bytes, 1: used - excess, 2: self.max_bytes, 3: used - excess}.get(attempt, 0)
            arrays = self._arrays(kv, state, slots if attempt < 5 else only_bad, max(0, room))
            before, used = used, sum(value.nbytes for name, value in arrays.items() if name.endswith("_bytes"))
            if attempt == 1 and before and not used:
                continue  # rather bytes of the bad slots than the recorder's batches
            with_recorder = self.recorder is not None and attempt < 2
            if self.recorder is not None and with_recorder:
                arrays |= {f"recorder_{name}": value for name, value in self.recorder.to_arrays().items()}
            told = events[: max(1, len(events) >> max(0, attempt - 4))]
            meta = self._meta(state, told, found, recorder_left_out=self.recorder is not None and not with_recorder)
            content = encode(meta, arrays)
            excess = len(content) - self.max_bytes
            if excess <= 0:
                break
        else:
            raise validation.error(f"a dump of {len(content)} bytes does not fit max_bytes={self.max_bytes}")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / self._name(meta["step"])
        _write_atomically(path, content)
        self.saved += 1
        logger.warning(
            "kvcanary=dump name=%s step=%s file=%s bytes=%d", "_".join(self.canary.name.split()), meta["step"], path, len(content)
        )
        return path

    def _name(self, step: int) -> str:
        safe = "".join(c if c.isalnum() else "_" for c in self.canary.name)[:40]
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
        return f"{safe}-step{step}-{stamp}-{os.getpid()}{SUFFIX}"

    # ------------------------------------------------------------------------------------------ which slots

    def _wanted(self, group: str, events: Sequence[Event], tables: _Tables) -> list[_Wanted]:
        """The slots of a group: bad ones first, then predecessors, then neighbours; each once."""
        held = self.canary._named(group)
        every = [known for event in events for known in (event, *event.echoes) if known.group == group]
        found: dict[int, _Wanted] = {}

        def add(slot: int, why: str, request: int, position: int, previous: int) -> None:
            if 0 <= slot < held.slots and slot not in found:
                found[slot] = (slot, why, request, position, previous)

        for event in every:
            add(event.slot, "bad", event.request, event.position, tables.previous(event, mapped=held.mapped))
        for event in every:
            before = tables.previous(event, mapped=held.mapped)
            if before >= 0:
                further = tables.slot_at(event, event.position - 2, mapped=held.mapped)
                add(before, "predecessor", event.request, event.position - 1, HEAD if event.position == 1 else further)
        for event in every:
            for position in range(event.position - self.neighbours, event.position + self.neighbours + 1):
                if position < 0 or event.position < 0:
                    continue
                slot = tables.slot_at(event, position, mapped=held.mapped)
                before = HEAD if position == 0 else tables.slot_at(event, position - 1, mapped=held.mapped)
                add(slot, "neighbour", event.request, position, before)
        return list(found.values())[:1024]

    # ------------------------------------------------------------------------------------------ arrays

    def _arrays(self, kv: Any, state: CanaryState, slots: Mapping[str, list[_Wanted]], room: int) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        for number, name in enumerate(self.canary.group_names):
            group, wanted = self.canary._named(name), slots[name]
            index = np.array([slot for slot, *_ in wanted], np.int64)
            records = _take(state.records[name], index)[:, :PROVENANCE_RECORD_WORDS]
            chain = np.array([_chain_of(record) for record in records], np.uint64)
            if not self.with_tokens:
                records[:, :2] = 0
            size = sum(source.read_bytes for source in group.sources)
            bad = [place for place, (_, why, *_) in enumerate(wanted) if why == "bad"]
            bad = bad[: room // max(1, size)] if size else []
            room -= len(bad) * size
            data = [np.zeros((len(bad), 0), np.uint8)]
            if bad:
                buffers = group.pool.buffers(kv)
                for place, source in enumerate(group.sources):
                    at = place if source.buffer_index is None else source.buffer_index
                    data.append(read_slots(source, buffers[at], index[bad]))
            out |= {
                f"g{number}_slots": np.array([(one[0], WHY.index(one[1]), one[3], one[4]) for one in wanted], np.int64).reshape(-1, 4),
                f"g{number}_requests": np.array([request for _, _, request, _, _ in wanted], np.uint64),
                f"g{number}_records": records,
                f"g{number}_chain": chain,
                f"g{number}_tags": _take(state.source_tags[name], index),
                f"g{number}_with_bytes": np.array(bad, np.int64),
                f"g{number}_bytes": np.concatenate(data, axis=1),
            }
        return out

    def _meta(self, state: CanaryState, events: Sequence[Event], found: int, *, recorder_left_out: bool) -> dict[str, Any]:
        counters = dict(zip(COUNTERS, np.asarray(state.counters).tolist(), strict=True))
        cases: list[Case] = []
        told = [self._event(event, cases) for event in events]
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "device": jax.devices()[0].device_kind,
            "step": counters["step"] - 1,
            "epoch": counters["epoch"],
            "armed_steps": counters["armed_steps"],
            "with_tokens": self.with_tokens,
            "canary": {
                "name": self.canary.name,
                "key": self.canary.key,
                "config": dataclasses.asdict(self.canary.config),
                "padding_req": self.canary.padding_req,
                "reserved_slots": self.canary.reserved_slots,
                "copy_page_size": self.canary.copy_page_size,
                "kv_token_id_vs_position_offset": self.canary.kv_token_id_vs_position_offset,
                "groups": [self._group(name) for name in self.canary.group_names],
            },
            "events_found": found,
            "recorder_left_out": recorder_left_out,
            "row_fields": list(_ROW_FIELDS),
            "events": told,
            "cases": [self._case(case) for case in cases],
        }

    def _group(self, name: str) -> dict[str, Any]:
        group = self.canary._named(name)
        return {
            "name": name,
            "slots": group.slots,
            "window": group.window,
            "padding_slot": group.padding_slot,
            "labels": list(group.labels),
            "leading": group.leading,
            "sources": [
                {
                    "descriptor": list(flatten_descriptor(source.descriptor(place))),
                    "dtype": source.buffer_dtype.name,
                    "shape": list(source.buffer_shape),
                    "read_bytes": source.read_bytes,
                }
                for place, source in enumerate(group.sources)
            ],
        }

    def _event(self, event: Event, cases: list[Case]) -> dict[str, Any]:
        case = -1
        if event.case is not None:
            case = next((place for place, known in enumerate(cases) if known is event.case), len(cases))
            if case == len(cases):
                cases.append(event.case)
        return {
            "name": event.name,
            "page": event.page,
            "layer": event.layer,
            "sharers": [list(pair) for pair in event.sharers],
            "tables_known": event.tables_known,
            "cause": event.cause.value,
            "line": event.line(),
            "case": case,
            "number": event.number,
        }

    def _case(self, case: Case) -> dict[str, Any]:
        return {
            "rows": [self._row(row) for row in case.rows],
            "others": [[*key, self._row(row)] for key, row in case.others.items()],
            "answers": None if case.history is None else case.history.to_lists(),
            "holders": [[slot, [list(pair) for pair in held]] for slot, held in case.holders.items()],
            "complete": case.complete,
        }

    def _row(self, row: RowFacts) -> list[Any]:
        hidden = () if self.with_tokens else ("token", "expected_token")
        return [None if name in hidden else _plain(getattr(row, name)) for name in _ROW_FIELDS]


_Wanted = tuple[int, str, int, int, int]
"""slot, why, request, position, previous slot."""

WHY: Final = ("bad", "predecessor", "neighbour")


class _Tables:
    """Which slot a request reads at a position, from whatever is known."""

    def __init__(
        self, request_ids: Any, tables: Any, lengths: Any, page_size: int, mapping: Any, recorder: FlightRecorder | None, swept: list[Any]
    ) -> None:
        self.rows: dict[int, np.ndarray] = {}
        self.mapping = None if mapping is None else np.asarray(mapping)
        self.recorder, self.swept = recorder, swept
        if tables is not None:
            ids, table = [int(i) for i in np.asarray(request_ids).reshape(-1)], np.asarray(tables, np.int64)
            ends = np.full(len(ids), table.shape[1] * page_size) if lengths is None else np.asarray(lengths).reshape(-1)
            for row, request in enumerate(ids):
                slots = (table[row][:, None] * page_size + np.arange(page_size)).reshape(-1)
                self.rows[request] = slots[: int(ends[row])]

    def slot_at(self, event: Event, position: int, *, mapped: bool) -> int:
        """A slot, or :data:`UNKNOWN`."""
        if position < 0:
            return UNKNOWN
        if position == event.position:
            return event.slot
        if "SWEEP" in event.tag_name:
            return self._swept(event, position)
        slots = self.rows.get(event.request)
        if slots is None and self.recorder is not None and event.request:
            slots = self.recorder.slots_of(event.request, group=event.group, step=event.step)
            mapped = False  # recorded under the group's own name
        if slots is not None and position < len(slots):
            slot = int(slots[position])
            if not mapped:
                return slot
            return int(self.mapping[slot]) if self.mapping is not None and 0 <= slot < len(self.mapping) else UNKNOWN
        answers = None if event.case is None else event.case.history
        entry = None if answers is None else answers.entries.get((event.request, position, event.step))
        return UNKNOWN if entry is None else entry.slot

    def previous(self, event: Event, *, mapped: bool) -> int:
        """The predecessor's slot, :data:`HEAD` or :data:`UNKNOWN`."""
        return HEAD if event.position == 0 else self.slot_at(event, event.position - 1, mapped=mapped)

    def _swept(self, event: Event, position: int) -> int:
        """From what a sweep was given: a chain of slots around the one that it found."""
        for result in reversed(self.swept):
            entries = result.entries
            at = np.flatnonzero((entries.slots == event.slot) & (entries.positions == event.position))
            if not len(at):
                continue
            slot, here = event.slot, event.position
            while here > position:  # down the chain
                place = np.flatnonzero((entries.slots == slot) & (entries.positions == here))
                before = int(entries.prev_slots[place[0]]) if len(place) else -1
                if before < 0:
                    return UNKNOWN
                slot, here = before, here - 1
            while here < position:
                place = np.flatnonzero((entries.prev_slots == slot) & (entries.positions == here + 1))
                if not len(place):
                    return UNKNOWN
                slot, here = int(entries.slots[place[0]]), here + 1
            return slot
        return UNKNOWN


def read_slots(source: RealKvSource, buffer: Any, slots: np.ndarray) -> np.ndarray:
    """uint8 ``[n, read_bytes]`` that a source reads of some slots; gathered on the device, whatever the buffer's size.

    Args:
      source: of the buffer. buffer: an array of JAX or NumPy. slots: int64 ``[n]``, in range.
    """
    given = Descriptor(*source.descriptor(0))
    runs = np.zeros(1, np.int64)
    for count, stride in zip(given.run_counts, given.run_strides, strict=True):
        runs = (runs[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    within = (runs[:, None] + np.arange(given.run_bytes, dtype=np.int64)).reshape(-1)[: given.read_bytes]
    page, token = np.divmod(slots, given.page_size)
    address = (given.offset + page * given.page_stride + token * given.token_stride)[:, None] + within  # [n, bytes]
    bits = jax.dtypes.itemsize_bits(source.buffer_dtype)
    if bits < 8:
        elements = (address[:, :, None] * (8 // bits) + np.arange(8 // bits)).reshape(len(slots), -1)
        return buffer_bytes(_gather(buffer, elements, source.buffer_shape)).reshape(address.shape)
    width = bits // 8
    groups = address.reshape(len(slots), -1, width) if address.shape[1] % width == 0 else None
    if groups is not None and not np.any(groups[:, :, 0] % width) and np.all(groups - groups[:, :, :1] == np.arange(width)):
        return _as_bytes(_gather(buffer, groups[:, :, 0] // width, source.buffer_shape)).reshape(address.shape)
    whole = _as_bytes(_gather(buffer, address // width, source.buffer_shape)).reshape(*address.shape, width)
    return np.take_along_axis(whole, (address % width)[:, :, None], axis=2)[:, :, 0]


def _gather(buffer: Any, elements: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Elements by their row-major number; the index of each axis fits in 32 bits, that of all may not."""
    index = tuple(axis.astype(np.int32) for axis in np.unravel_index(elements, shape))
    return np.asarray(buffer[index])


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _take(array: Any, index: np.ndarray) -> np.ndarray:
    """Rows of a device array, on the host and writable."""
    return np.array(array[index.astype(np.int32)]) if len(index) else np.zeros((0, array.shape[1]), array.dtype)


def _chain_of(record: np.ndarray) -> int:
    words = [int(word) for word in record[:6]]
    token, position, before = (words[2 * k] | words[2 * k + 1] << 32 for k in range(3))
    return mix3(before, token, position)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, bool)) else int(value)


def _versions() -> dict[str, str]:
    from importlib import metadata

    out = {}
    for name in ("jax_kvcanary", "jax", "jaxlib", "numpy"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "(not installed)"
    return out | {"python": platform.python_version(), "machine": platform.machine()}


# ---------------------------------------------------------------------------------------------- the file


def encode(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A file's content: the archive, and its digest as the archive's comment."""
    stream = io.BytesIO()
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False).encode()
    np.savez(stream, meta=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]
    content = bytearray(stream.getvalue())
    if content[-_END_BYTES : -_END_BYTES + 4] != _END_OF_ARCHIVE:
        raise validation.error("the archive does not end as one without a comment")
    content[-2:] = (len(_TRAILER) + _DIGEST_CHARACTERS).to_bytes(2, "little")
    content += _TRAILER
    return bytes(content) + hashlib.sha256(content).hexdigest().encode()


def _decode(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    body, digest = content[:-_DIGEST_CHARACTERS], content[-_DIGEST_CHARACTERS:]
    if not body.endswith(_TRAILER):
        if content.startswith(b"PK\x03\x04"):
            raise DumpError("it is truncated, damaged, or an archive of something else: it does not end with a dump's checksum")
        raise DumpError("it is no dump of jax_kvcanary")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DumpError("it is damaged: its checksum is another one than that of its content")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta = json.loads(bytes(arrays.pop("meta")))
    except Exception as error:
        raise DumpError(f"its checksum is right, and yet it cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DumpError("its checksum is right, and yet it is no dump of jax_kvcanary")
    if meta.get("version") != FORMAT_VERSION:
        made = meta.get("versions", {}).get("jax_kvcanary", "?")
        raise DumpError(f"it has format {meta.get('version')} (jax_kvcanary {made}), this version reads format {FORMAT_VERSION}")
    return meta, arrays


def load_dump(path: str | os.PathLike[str]) -> Dump:
    """Read a dump.

    Raises:
      DumpError: no dump, a damaged one, or one of a newer version; the message says which. OSError: a file that cannot be read.
    """
    path = Path(path)
    try:
        meta, arrays = _decode(path.read_bytes())
        return _read(path, meta, arrays)
    except DumpError as error:
        raise DumpError(f"kv-canary: {path}: {error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"kv-canary: {path}: a part of it does not fit the others: {type(error).__name__}: {error}") from error


def _read(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Dump:
    groups = tuple(
        DumpedGroup(
            name=given["name"],
            slots=given["slots"],
            window=given["window"],
            padding_slot=given["padding_slot"],
            labels=tuple(given["labels"]),
            leading=given["leading"],
            sources=tuple(given["sources"]),
        )
        for given in meta["canary"]["groups"]
    )
    slots = [slot for number, group in enumerate(groups) for slot in _read_slots(number, group, arrays)]
    recorded = {name.removeprefix("recorder_"): value for name, value in arrays.items() if name.startswith("recorder_")}
    cases = [_read_case(given, meta["row_fields"]) for given in meta["cases"]]
    return Dump(
        path=path,
        meta=meta,
        step=meta["step"],
        with_tokens=meta["with_tokens"],
        groups=groups,
        slots=tuple(slots),
        events=tuple(DumpedEvent(fields=given, case=cases[given["case"]], number=given["number"]) for given in meta["events"]),
        recorder=FlightRecorder.from_arrays(recorded) if recorded else None,
    )


def _read_slots(number: int, group: DumpedGroup, arrays: Mapping[str, np.ndarray]) -> Iterable[DumpedSlot]:
    of = {name: arrays[f"g{number}_{name}"] for name in ("slots", "requests", "records", "chain", "tags", "with_bytes", "bytes")}
    sizes = [source["read_bytes"] for source in group.sources]
    data = {int(place): np.split(row, np.cumsum(sizes)[:-1]) for place, row in zip(of["with_bytes"], of["bytes"], strict=True)}
    for place, (slot, why, position, previous) in enumerate(of["slots"].tolist()):
        yield DumpedSlot(
            group=group.name,
            slot=slot,
            why=WHY[why],
            request=int(of["requests"][place]),
            position=position,
            previous=previous,
            record=of["records"][place],
            chain=int(of["chain"][place]),
            tags=of["tags"][place],
            data=tuple(data[place]) if place in data else None,
        )


def _read_case(given: Mapping[str, Any], fields: Sequence[str]) -> Case:
    return Case(
        rows=[_read_row(row, fields) for row in given["rows"]],
        others={(a, b, c, d): _read_row(row, fields) for a, b, c, d, row in given["others"]},
        history=None if given["answers"] is None else Answers.from_lists(given["answers"]),
        holders={slot: [(request, position) for request, position in held] for slot, held in given["holders"]},
        complete=given["complete"],
    )


def _read_row(values: Sequence[Any], fields: Sequence[str]) -> RowFacts:
    named: dict[str, Any] = {name: NotSaved() if value is None else value for name, value in zip(fields, values, strict=True)}
    return RowFacts(**(named | {"flags": RecordFlag(named["flags"])}))


class NotSaved(int):
    """A token that was not written down; says so wherever it is printed."""

    def __new__(cls) -> NotSaved:
        return super().__new__(cls, -1)

    def __format__(self, spec: str) -> str:
        return str(self)

    def __str__(self) -> str:
        return "(not saved)"

    __repr__ = __str__


def _dumps_in(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if SUFFIX in name]
    except FileNotFoundError:
        return []


def _write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none, also after a crash of the machine."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # not every file system lets a directory be synced
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
