"""The host side of a canary: reads the reports of steps without ever waiting for one, and logs, counts or raises what they hold."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from jax_kvcanary import validation
from jax_kvcanary.causes import RECORD_BITS, Case, Cause, Crossings, Finding, crossings
from jax_kvcanary.events import Event, KvCanaryError, reason_names
from jax_kvcanary.history import TableHistory
from jax_kvcanary.report_header import (
    ReportHeader,
    ReportingCanary,
    RowFacts,
    check_report_shapes,
    decode_rows,
    header_fields,
    part_groups,
)
from jax_kvcanary.spec import CanaryLaunchTag, Column, FailReason

logger = logging.getLogger(__name__)

MODES = ("off", "log", "raise")

_STRUCTURAL = ~int(FailReason.VERIFY_REAL_KV_HASH)
_KNOWN_EVENTS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """Whether a canary really checks, as of the newest report that was read.

    step: of that report, None before the first. lag: reports observed since. merged: reports that were covered by a newer one.
    armed_steps: steps that stamped. launches, slots: by launch tag, so far. unchecked_steps: steps since a launch last checked or
    stamped a slot, by launch tag. coverage: what the canary says of its period. unattested: positions that were adopted. rows_reported,
    rows_lost, rows_waiting: violation rows; lost ones were not stored or given up, waiting ones are stored and not decoded yet.
    events, repeats: found, and seen again. failures: of the monitor itself, with the text of the last. sweep: a
    :class:`jax_kvcanary.sweep.SweepHealth`, None without a sweeper.
    """

    name: str
    mode: str
    step: int | None
    lag: int
    merged: int
    armed_steps: int
    launches: dict[CanaryLaunchTag, int]
    slots: dict[CanaryLaunchTag, int]
    unchecked_steps: dict[CanaryLaunchTag, int]
    coverage: Any
    unattested: int
    rows_reported: int
    rows_lost: int
    rows_waiting: int
    events: int
    repeats: int
    failures: int
    last_failure: str | None
    sweep: Any = None

    def describe(self) -> str:
        """One line of ``key=value`` pairs, as the statistics line has them."""
        verified, written, _ = _totals(self.slots)
        pairs = {
            "name": "_".join(self.name.split()),
            "step": "-" if self.step is None else self.step,
            "armed_steps": self.armed_steps,
            "verified": verified,
            "written": written,
            "violations": self.rows_reported,
            "events": self.events,
            "repeats": self.repeats,
            "rows_lost": self.rows_lost,
            "unattested": self.unattested,
            "lag": self.lag,
            "failures": self.failures,
        }
        if self.sweep is not None:
            pairs |= self.sweep.pairs()
        return " ".join(f"{key}={value}" for key, value in pairs.items())


@dataclasses.dataclass(slots=True)
class _Pending:
    report: Any
    number: int
    pinned: bool = False


@dataclasses.dataclass(slots=True)
class _Chunk:
    """Rows on the host that are not decoded yet, in order of steps. complete: none of their steps' rows is missing."""

    rows: np.ndarray  # [n, 32] uint32
    context: np.ndarray  # [n, 24] uint32
    parts: np.ndarray  # [n]
    complete: bool


@dataclasses.dataclass(slots=True)
class _Told:
    """Events of one request in one step that are still to be told, roots first."""

    case: Case
    findings: list[Finding]
    keys: list[tuple[Any, ...]]
    order: collections.deque[int]
    sharers: dict[int, list[tuple[int, int]]]
    echoes: dict[int, list[int]]
    runs: collections.Counter[int]
    made: dict[int, Event]

    @property
    def rows(self) -> Sequence[RowFacts]:
        return self.case.rows


class Monitor:
    """Reads the reports of a canary. Not for several threads at once.

    Args:
      canary: whose reports; a :class:`Canary`, or what has the attributes of :class:`ReportingCanary`.
      mode: "log", "raise" or "off"; None: the canary's. In mode "raise" the first violations raise once; later ones are logged.
      max_pending: reports that may wait, at least 2; more are merged into newer ones, since the log is cumulative.
      history: events that :attr:`events` keeps.
      statistics_every: steps between two statistics lines (INFO); 0: none.
      metrics: a :class:`PrometheusMetrics`.
      on_event: called with every new event.
      tables: a :class:`TableHistory`, or one a group by name; None: :meth:`record_batch` makes them.
      recorder: a :class:`jax_kvcanary.recorder.FlightRecorder`, fed by :meth:`record_batch`.
      sweeper: a :class:`jax_kvcanary.sweep.Sweeper` whose coverage and age :meth:`health` shows; can be set later.
      page_size: slots a page, for events; None: the canary's ``page_size`` if it has one.
      max_rows: violation rows that one observe decodes, and max_events: events that it tells; the rest waits for the next one.
      max_waiting: rows that may wait on the host; more are given up and counted.
      repeat_seconds: at most one line about repeated violations in this time.

    Example:
      >>> monitor = Monitor(canary)  # doctest: +SKIP
      >>> state, verdict, report = canary.tail(kv, state, batch, verdict)  # doctest: +SKIP
      >>> events = monitor.observe(report)  # doctest: +SKIP
    """

    def __init__(
        self,
        canary: ReportingCanary,
        mode: str | None = None,
        *,
        max_pending: int = 4,
        history: int = 1000,
        statistics_every: int = 1000,
        metrics: Any = None,
        on_event: Callable[[Event], Any] | None = None,
        tables: TableHistory | Mapping[str, TableHistory] | None = None,
        recorder: Any = None,
        sweeper: Any = None,
        page_size: int | None = None,
        max_rows: int = 64,
        max_events: int = 12,
        max_waiting: int = 16384,
        repeat_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        mode = canary.config.mode if mode is None else mode
        if not isinstance(mode, str):
            raise validation.type_error(f"mode must be a str, got {type(mode).__name__}")
        if mode not in MODES:
            raise validation.error(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        self.canary, self.mode = canary, mode
        self.max_pending = validation.static_int("max_pending", max_pending, minimum=2)
        self.statistics_every = validation.static_int("statistics_every", statistics_every, minimum=0)
        self.max_rows = validation.static_int("max_rows", max_rows, minimum=1)
        self.max_events = validation.static_int("max_events", max_events, minimum=1)
        self.max_waiting = validation.static_int("max_waiting", max_waiting, minimum=1)
        self.events: collections.deque[Event] = collections.deque(maxlen=validation.static_int("history", history, minimum=1))
        self.page_size = (
            getattr(canary, "page_size", None) if page_size is None else validation.static_int("page_size", page_size, minimum=1)
        )
        self.metrics, self.on_event = metrics, on_event
        self.recorder, self.sweeper = recorder, sweeper
        self.repeat_seconds, self._clock = repeat_seconds, clock
        self._parts = tuple(canary.parts)
        self._groups = part_groups(canary) if mode != "off" else ()
        self._labels = {tag: tuple(canary.source_labels(tag)) for tag in self._parts} if mode != "off" else {}
        self._tables: dict[str, TableHistory] = {}
        if isinstance(tables, TableHistory):
            self._tables = {self._groups[0]: tables} if self._groups else {}
        elif tables is not None:
            self._tables = dict(tables)
        self._pending: collections.deque[_Pending] = collections.deque()
        self._observed = self._number_read = self._merged = 0
        self._header: ReportHeader | None = None
        self._read = [0] * len(self._parts)
        self._lost_in_epoch = [0] * len(self._parts)
        self._reported = self._lost = self._given_up = self._waiting = 0
        self._chunks: collections.deque[_Chunk] = collections.deque()
        self._untold: collections.deque[_Told] = collections.deque()
        self._known: collections.OrderedDict[tuple[Any, ...], Event] = collections.OrderedDict()
        self._bad: collections.OrderedDict[tuple[Any, ...], Event] = collections.OrderedDict()
        self._overflows: dict[int, Event] = {}
        self._limit_event: Event | None = None
        self._last_run: dict[CanaryLaunchTag, int] = {}
        self._found = self._repeats = self._repeats_told = 0
        self._repeats_since: float | None = None
        self._statistics_at: int | None = None
        self._failures = 0
        self._last_failure: str | None = None
        self._raised = self._closed = False

    # ------------------------------------------------------------------------------------------ what a loop calls

    def observe(self, report: Any) -> list[Event]:
        """Take the report of a step, and read whatever is on the host by now. Never waits for the device.

        Args:
          report: what the canary's ``tail`` returned, arrays of JAX or NumPy; not donated.

        Returns:
          New events that became readable, without those that only follow from another (see :attr:`Event.echoes`).

        Raises:
          KvCanaryError: in mode "raise", once. ValueError: a report of another canary, or one older than the last; a closed monitor.
        """
        if self.mode == "off":
            return []
        started = time.perf_counter()
        if self._closed:
            raise validation.error("the monitor is closed, it observes no more reports")
        check_report_shapes(report, self.canary)
        self._observed += 1
        self._pending.append(_Pending(report, self._observed))
        self._guard(_start_copy, report.header)
        out = self._poll(wait=False)
        if self.metrics is not None:
            self._guard(lambda: self.metrics.poll(name=self.canary.name, seconds=time.perf_counter() - started))
        return out

    def flush(self) -> list[Event]:
        """Wait for all reports that were observed, and tell everything they hold.

        Raises:
          KvCanaryError, ValueError: as :meth:`observe`.
        """
        return [] if self.mode == "off" else self._poll(wait=True)

    def service(self, state: Any) -> Any:
        """Clear the device's log when it is half full, and everything in it is read or kept to be read. Call it between steps.

        Args:
          state: the canary's, as the step returned it whose report was observed last.

        Returns:
          The state to go on with.
        """
        header = self._header
        if self.mode == "off" or self._closed or header is None or any(pending.pinned for pending in self._pending):
            return state
        capacity = self._capacity
        if capacity == 0 or 2 * max(header.write_index.values(), default=0) < capacity or self._cleared_at == header.epoch:
            return state
        if self._pending:
            self._pending[-1].pinned = True  # the last of its epoch: it may not be merged
        self._cleared_at = header.epoch
        return self.canary.clear_log(state)  # type: ignore[attr-defined]

    def record_batch(
        self,
        step: int,
        *,
        request_ids: Any,
        tables: Any,
        lengths: Any,
        prefix_lengths: Any = None,
        copies: tuple[Any, Any] | None = None,
        finished: Any = (),
        released: Any = (),
        page_size: int = 1,
        group: str | None = None,
    ) -> None:
        """Remember the host's tables of a step, as evidence for the cause of violations; see :meth:`TableHistory.record`.

        Args:
          released: table entries (pages, if page_size is not 1) that were given back since the last record; for a recorder alone.
          page_size: slots a table entry, from the first call on. group: the group of layers, None is the first.
        """
        if self.mode == "off":
            return
        name = self._groups[0] if group is None else group
        if name not in self._groups:
            raise validation.error(f"record_batch names the group {name!r}, there are {', '.join(map(repr, dict.fromkeys(self._groups)))}")
        if name not in self._tables:
            self._tables[name] = TableHistory(page_size=page_size)
        self._tables[name].record(
            step,
            request_ids=request_ids,
            tables=tables,
            lengths=lengths,
            prefix_lengths=prefix_lengths,
            copies=copies,
            finished=finished,
        )
        if self.recorder is not None:
            self.recorder.record(
                step,
                request_ids=request_ids,
                tables=tables,
                lengths=lengths,
                prefix_lengths=prefix_lengths,
                copies=copies,
                finished=finished,
                released=released,
                page_size=page_size,
                group=name,
            )

    @property
    def lag(self) -> int:
        """Reports observed since the newest one that was read: steps, where every step has a report."""
        return self._observed - self._number_read

    def health(self) -> Health:
        """Whether the canary really checks, as of the newest report that was read."""
        header, coverage = self._header, getattr(self.canary, "coverage", None)
        step = None if header is None else header.step
        return Health(
            name=self.canary.name,
            mode=self.mode,
            step=step,
            lag=self.lag,
            merged=self._merged,
            armed_steps=0 if header is None else header.armed_steps,
            launches={} if header is None else dict(header.kernel_runs),
            slots={} if header is None else dict(header.slot_runs),
            unchecked_steps={tag: ((step or 0) - self._last_run.get(tag, 0)) & 0xFFFFFFFF for tag in self._parts} if header else {},
            coverage=coverage() if callable(coverage) and self.mode != "off" else coverage,
            unattested=0 if header is None else header.unattested,
            rows_reported=self._reported,
            rows_lost=self._lost + self._given_up,
            rows_waiting=self._waiting + sum(len(told.order) for told in self._untold),
            events=self._found,
            repeats=self._repeats,
            failures=self._failures,
            last_failure=self._last_failure,
            sweep=None if self.sweeper is None else self.sweeper.health(),
        )

    def rearm(self) -> None:
        """Let mode "raise" raise once more."""
        self._raised = False

    def close(self) -> None:
        """Read what is left, write a last statistics line, and observe no more.

        Raises:
          KvCanaryError, ValueError: as :meth:`flush`; the monitor is closed nevertheless.
        """
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            if self.mode != "off" and self.statistics_every and self._header is not None:
                self._tell_statistics()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        self._raised = True  # another error is on its way: log, do not replace it
        try:
            self.close()
        except Exception as e:
            self._failed(e)

    # ------------------------------------------------------------------------------------------ reading

    _capacity = 0
    _cleared_at: int | None = None

    def _poll(self, *, wait: bool) -> list[Event]:
        misuse: list[ValueError] = []
        told: list[Event] = []
        self._guard(self._read_reports, wait, misuse, told)
        while len(self._pending) > self.max_pending:
            # The oldest is the next to be ready, the newest covers those between.
            victim = next((i for i in range(1, len(self._pending) - 1) if not self._pending[i].pinned), None)
            if victim is None:
                break
            del self._pending[victim]
            self._merged += 1
        everything = wait or (self.mode == "raise" and not self._raised)
        self._guard(self._decode, told, None if everything else self.max_rows, None if everything else self.max_events)
        self._guard(self._tell_repeats)
        self._guard(self._maybe_statistics)
        if misuse:
            raise misuse[0]
        if self.mode == "raise" and told and not self._raised:
            self._raised = True
            raise KvCanaryError(told, lost=self._lost + self._given_up)
        return told

    def _read_reports(self, wait: bool, misuse: list[ValueError], told: list[Event]) -> None:
        ready: list[tuple[_Pending, ReportHeader]] = []
        while self._pending and (wait or _is_ready(self._pending[0].report)):
            pending = self._pending.popleft()
            try:
                header = header_fields(pending.report.header, self.canary)
                self._check_order(header, ready[-1][1] if ready else self._header)
            except ValueError as e:
                misuse.append(e)
                continue
            ready.append((pending, header))
        for place, (pending, header) in enumerate(ready):
            if self._header is not None and header.epoch != self._header.epoch:
                self._begin_epoch()
            last = place + 1 == len(ready) or ready[place + 1][1].epoch != header.epoch
            self._take_header(header)
            self._number_read = max(self._number_read, pending.number)
            if last:
                self._take_rows(pending.report, header, told)
            else:
                self._merged += 1

    def _check_order(self, header: ReportHeader, last: ReportHeader | None) -> None:
        if last is None:
            return
        whose = f"reports of canary {self.canary.name!r}"
        for what, new, old in (("step", header.step, last.step), ("epoch", header.epoch, last.epoch)):
            if (new - old) & 0xFFFFFFFF >= 1 << 31:
                raise validation.error(
                    f"{whose} came out of order: {what} {new} after {what} {old}; observe them in the order of the steps, "
                    "and give every state that init() made a monitor of its own"
                )
        if header.epoch == last.epoch and any(header.write_index[tag] < last.write_index[tag] for tag in self._parts):
            raise validation.error(f"{whose} are of different states: the log of step {header.step} holds fewer rows than before")

    def _begin_epoch(self) -> None:
        self._read = [0] * len(self._parts)
        self._lost_in_epoch = [0] * len(self._parts)
        self._overflows.clear()
        self._limit_event = None

    def _take_header(self, header: ReportHeader) -> None:
        """Note the counters of a header."""
        before = self._header
        same = before is not None and before.epoch == header.epoch
        slots: dict[CanaryLaunchTag, int] = {}
        launches: dict[CanaryLaunchTag, int] = {}
        for tag in self._parts:
            old_slots, old_launches = (before.slot_runs[tag], before.kernel_runs[tag]) if before is not None else (0, 0)
            slots[tag] = _grown_by(header.slot_runs[tag], old_slots)
            launches[tag] = _grown_by(header.kernel_runs[tag], old_launches)
            self._reported += header.write_index[tag] - (before.write_index[tag] if before is not None and same else 0)
            if slots[tag]:
                self._last_run[tag] = header.step
        self._header = header
        if self.metrics is not None:
            for tag in self._parts:
                kind = "written" if "TAIL" in tag.name else "verified"
                if slots[tag]:
                    self.metrics.count(kind, name=self.canary.name, tag=tag.name, count=slots[tag])
                if launches[tag] and "SWEEP" in tag.name:
                    self.metrics.count("sweeps", name=self.canary.name, tag=tag.name, count=launches[tag])

    def _take_rows(self, report: Any, header: ReportHeader, told: list[Event]) -> None:
        """Fetch rows that were not read yet; none if the header shows no new ones."""
        capacity = self._capacity = int(report.rows.shape[1])
        fresh = []
        for part, tag in enumerate(self._parts):
            index = header.write_index[tag]
            stored = min(index, capacity)
            if stored > self._read[part]:
                fresh.append((part, self._read[part], stored))
            lost = index - stored
            if lost > self._lost_in_epoch[part]:
                more = lost - self._lost_in_epoch[part]
                self._lost_in_epoch[part] = lost
                self._lost += more
                self._tell_overflow(part, header, lost, told)
                if self.metrics is not None:
                    self.metrics.count("dropped", name=self.canary.name, tag=tag.name, count=more)
        if not fresh:
            return
        _start_copy(report.rows)
        _start_copy(report.context)
        all_rows, all_context = np.asarray(report.rows), np.asarray(report.context)
        rows = np.concatenate([all_rows[part, start:stop] for part, start, stop in fresh]).astype(np.uint32, copy=False)
        context = np.concatenate([all_context[part, start:stop] for part, start, stop in fresh]).astype(np.uint32, copy=False)
        parts = np.repeat([part for part, _, _ in fresh], [stop - start for _, start, stop in fresh])
        for part, _, stop in fresh:
            self._read[part] = stop
        order = np.argsort(rows[:, 2 * Column.STEP], kind="stable")
        rows, context, parts = rows[order], context[order], parts[order]
        if self.metrics is not None:
            self._count_reasons(rows, parts)
        room = self.max_waiting - self._waiting
        complete = not any(self._lost_in_epoch)
        if len(rows) > room:
            self._give_up(len(rows) - room, header, told)
            rows, context, parts, complete = rows[:room], context[:room], parts[:room], False
        if len(rows):
            self._chunks.append(_Chunk(rows, context, parts, complete))
            self._waiting += len(rows)

    def _count_reasons(self, rows: np.ndarray, parts: np.ndarray) -> None:
        which = np.stack([parts, rows[:, 2 * Column.SHARD], rows[:, 2 * Column.REASON]], axis=1)
        kinds, counts = np.unique(which, axis=0, return_counts=True)
        for (part, shard, reasons), count in zip(kinds.tolist(), counts.tolist(), strict=True):
            for reason in reason_names(reasons):
                self.metrics.violations(name=self.canary.name, tag=self._parts[part].name, reason=reason, shard=shard, count=count)

    # ------------------------------------------------------------------------------------------ decoding

    def _decode(self, told: list[Event], max_rows: int | None, max_events: int | None) -> None:
        left = max_rows
        while self._chunks and (left is None or left > 0) and (max_events is None or len(self._untold) < max_events):
            chunk = self._chunks[0]
            take = len(chunk.rows) if left is None else min(left, len(chunk.rows))
            whole = chunk.complete
            if take < len(chunk.rows):
                steps = chunk.rows[:, 2 * Column.STEP]
                begins = int(np.searchsorted(steps[:take], steps[take]))  # the step that the cut falls into begins here
                if steps[take - 1] == steps[take]:
                    if begins:
                        take = begins
                    else:
                        whole = chunk.complete = False
            part = _Chunk(chunk.rows[:take], chunk.context[:take], chunk.parts[:take], whole)
            if take == len(chunk.rows):
                self._chunks.popleft()
            else:
                chunk.rows, chunk.context, chunk.parts = chunk.rows[take:], chunk.context[take:], chunk.parts[take:]
            self._waiting -= take
            left = None if left is None else left - take
            try:
                self._read_chunk(part)
            except Exception:
                self._given_up += take
                raise
        while self._untold and (max_events is None or len(told) < max_events):
            of_request = self._untold[0]
            if of_request.order:
                self._tell_next(of_request, told)
            else:
                self._untold.popleft()

    def _read_chunk(self, chunk: _Chunk) -> None:
        facts = decode_rows(chunk.rows, chunk.context, [(int(self._parts[part]), self._groups[part]) for part in chunk.parts.tolist()])
        requests: dict[tuple[Any, ...], list[RowFacts]] = {}
        steps: dict[tuple[Any, ...], list[RowFacts]] = {}
        for row in facts:
            requests.setdefault((row.step, row.group, row.shard, row.request), []).append(row)
            steps.setdefault((row.step, row.group, row.shard), []).append(row)
        fresh: list[tuple[list[RowFacts], list[tuple[Any, ...]]]] = []
        for rows in requests.values():
            keys = [_key(row) for row in rows]
            if all(key in self._known for key in keys):
                for row, key in zip(rows, keys, strict=True):
                    self._repeat(key, row)
            else:
                fresh.append((rows, keys))
        if not fresh:
            return
        readers: dict[tuple[Any, ...], dict[int, int]] = {}
        for row in facts:
            if row.slot >= 0 and row.reader:
                readers.setdefault((row.group, row.shard, row.slot), {})[row.reader] = row.expected_position
        held: dict[str, dict[int, list[tuple[int, int]]]] = {}
        for group, history in self._tables.items():
            slots = [row.slot for rows, _ in fresh for row in rows if row.group == group]
            held[group] = history.holders(slots, step=facts[-1].step) if slots else {}
        made: dict[tuple[Any, ...], Crossings] = {}

        def crossed(row: RowFacts) -> Crossings:
            key = (row.step, row.group, row.shard)
            if key not in made:
                made[key] = crossings(steps[key])
            return made[key]

        for rows, keys in fresh:
            first = rows[0]
            known_holders = held.get(first.group, {})
            case, findings = Case.of(
                rows,
                others=crossed(first),
                history=self._tables.get(first.group),
                holders=known_holders,
                complete=chunk.complete and first.of_request,
            )
            order = sorted(range(len(rows)), key=lambda i: (findings[i].root is not None, rows[i].expected_position))
            sharers = {}
            for i, row in enumerate(rows):
                others = readers.get((row.group, row.shard, row.slot), {})
                if len(others) > (row.reader in others) or row.slot in known_holders:
                    others = others | dict(known_holders.get(row.slot, ()))
                    sharers[i] = sorted(other for other in others.items() if other[0] != row.reader)
            echoes: dict[int, list[int]] = {}
            for i, finding in enumerate(findings):
                if finding.root is not None:
                    echoes.setdefault(finding.root, []).append(i)
            runs = collections.Counter(finding.run for finding in findings if finding.root is None)
            self._untold.append(_Told(case, findings, keys, collections.deque(order), sharers, echoes, runs, {}))

    def _tell_next(self, of: _Told, told: list[Event]) -> None:
        number = of.order.popleft()
        row, finding, key = of.rows[number], of.findings[number], of.keys[number]
        known = self._known.get(key)
        if known is not None:
            of.made[number] = known
            if known.last_step != row.step:
                self._repeat(key, row)
            return
        event = of.made[number] = self._make(of, number, key)
        if finding.root is not None and (root := of.made.get(finding.root)) is not None:
            event.root = root  # one that was told before
            root.echoes.append(event)
            logger.warning("%s", event.line())
            return
        if finding.root is None and (earlier := self._stamped_on(row, finding)) is not None:
            event.root, event.cause = earlier, earlier.cause
            event.evidence = (f"stamped in step {row.writer_step}, when the slot before it was bad",)
            earlier.echoes.append(event)
            logger.warning("%s", event.line())
            return
        self._found += 1
        for echo in of.echoes.get(number, ()):
            if echo not in of.made and of.keys[echo] not in self._known:
                follows = of.made[echo] = self._make(of, echo, of.keys[echo])
                follows.root = event
                event.echoes.append(follows)
        event.run_length = max(1, of.runs[number])
        if finding.run != number:
            event.run = of.made.get(finding.run)
        if row.reasons & RECORD_BITS:
            place = (row.group, row.shard, row.request, row.expected_position)
            self._bad[place] = event
            self._bad.move_to_end(place)
            if len(self._bad) > _KNOWN_EVENTS:
                self._bad.popitem(last=False)
        self._tell(event, told)

    def _stamped_on(self, row: RowFacts, finding: Finding) -> Event | None:
        """The event of the predecessor that was bad when this slot was stamped on it, and may be right again by now."""
        if finding.cause is not Cause.UNKNOWN or row.reasons & RECORD_BITS != FailReason.VERIFY_CHAIN_HASH or row.writer != row.reader:
            return None
        earlier = self._bad.get((row.group, row.shard, row.request, row.expected_position - 1))
        return earlier if earlier is not None and earlier.step <= row.writer_step <= earlier.last_step else None

    def _make(self, of: _Told, number: int, key: tuple[Any, ...]) -> Event:
        row = of.rows[number]
        labels = self._labels.get(row.tag, ())  # type: ignore[call-overload]
        event = Event.of_row(
            row, of.findings[number], name=self.canary.name, labels=labels, page_size=self.page_size, sharers=of.sharers.get(number, ())
        )
        event.tables_known = row.group in self._tables
        event.case, event.number = of.case, number
        self._known[key] = event
        if len(self._known) > _KNOWN_EVENTS:
            self._known.popitem(last=False)
        return event

    def _repeat(self, key: tuple[Any, ...], row: RowFacts) -> None:
        event = self._known[key]
        self._known.move_to_end(key)
        event.repeats += 1
        event.last_step = row.step
        event.reasons |= row.reasons
        self._repeats += 1

    # ------------------------------------------------------------------------------------------ telling

    def _tell(self, event: Event, told: list[Event]) -> None:
        self.events.append(event)
        told.append(event)
        if self.mode == "log" or self._raised:
            logger.warning("%s", event.describe())
        if self.on_event is not None:
            self._guard(self.on_event, event)

    def _tell_overflow(self, part: int, header: ReportHeader, lost: int, told: list[Event]) -> None:
        event = self._overflows.get(part)
        if event is None:
            tag = self._parts[part]
            event = self._overflows[part] = Event(
                kind="overflow", name=self.canary.name, step=header.step, tag=int(tag), group=self._groups[part], rows=lost
            )
            self._found += 1
            self._tell(event, told)
        else:
            event.repeats += 1
            self._repeats += 1
        event.rows, event.last_step = lost, header.step

    def _give_up(self, rows: int, header: ReportHeader, told: list[Event]) -> None:
        self._given_up += rows
        tag = self._parts[0]
        if self.metrics is not None:
            self.metrics.count("dropped", name=self.canary.name, tag=tag.name, count=rows)
        if self._limit_event is None:
            self._limit_event = Event(
                kind="decode_limit", name=self.canary.name, step=header.step, tag=int(tag), group=self._groups[0], rows=rows
            )
            self._found += 1
            self._tell(self._limit_event, told)
        else:
            self._limit_event.rows += rows
            self._limit_event.repeats += 1

    def _tell_repeats(self) -> None:
        new = self._repeats - self._repeats_told
        if not new:
            return
        now = self._clock()
        if self._repeats_since is None:
            self._repeats_since = now
        elif now - self._repeats_since >= self.repeat_seconds:
            step = self._header.step if self._header is not None else "-"
            logger.warning(
                "kvcanary=repeats name=%s step=%s repeats=%d events=%d rows_lost=%d seconds=%.0f",
                "_".join(self.canary.name.split()),
                step,
                new,
                self._found,
                self._lost + self._given_up,
                now - self._repeats_since,
            )
            self._repeats_told, self._repeats_since = self._repeats, None

    def _maybe_statistics(self) -> None:
        if not self.statistics_every or self._header is None:
            return
        step = self._header.step
        if self._statistics_at is None:
            self._statistics_at = step
        elif (step - self._statistics_at) & 0xFFFFFFFF >= self.statistics_every:
            self._statistics_at = step
            self._tell_statistics()

    def _tell_statistics(self) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("kvcanary=statistics %s", self.health().describe())

    # ------------------------------------------------------------------------------------------ failures

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Run a part of the monitor; what fails in it is logged once and counted, and the step goes on."""
        try:
            call(*arguments)
        except KvCanaryError:
            raise
        except Exception as e:
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._last_failure = f"{type(error).__name__}: {error}"
        if self._failures == 1:
            logger.error(
                "kvcanary=failure name=%s the monitor failed; the step goes on, later failures are only counted",
                "_".join(self.canary.name.split()),
                exc_info=error,
            )


def _key(row: RowFacts) -> tuple[Any, ...]:
    """What makes two rows the same event; the bytes of a bad record come and go with the sources that rotate."""
    reasons = row.reasons & _STRUCTURAL or row.reasons
    return (row.group, row.shard, row.slot, reasons, row.request, row.expected_position if row.slot < 0 else 0, row.writer)


def _grown_by(new: int, old: int) -> int:
    """By how much a counter grew; one that was reset counts from 0."""
    return new - old if new >= old else new


def _is_ready(report: Any) -> bool:
    return all(getattr(array, "is_ready", _always)() for array in (report.header, report.rows, report.context))


def _always() -> bool:
    return True


def _start_copy(array: Any) -> None:
    if hasattr(array, "copy_to_host_async"):
        array.copy_to_host_async()


def _totals(slots: Mapping[CanaryLaunchTag, int]) -> tuple[int, int, int]:
    """Slots of head, tail and sweep launches."""
    of = [sum(count for tag, count in slots.items() if launch in tag.name) for launch in ("HEAD", "TAIL", "SWEEP")]
    return of[0] + of[2], of[1], of[2]
