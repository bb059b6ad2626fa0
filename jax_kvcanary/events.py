"""What a monitor tells: one event a slot, reason and request, as a line for log search and in words, and the errors it raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jax_kvcanary import html
from jax_kvcanary.causes import Case, Cause, Finding
from jax_kvcanary.report import Provenance, Violation
from jax_kvcanary.report_header import RowFacts
from jax_kvcanary.spec import NUM_LAUNCH_TAGS, CanaryLaunchTag, FailReason

_REASON_NAMES = {int(reason): reason.name.lower() for reason in FailReason if reason.name}


def reason_names(reasons: int) -> list[str]:
    """The names of reason bits.

    Example:
      >>> reason_names(3)
      ['verify_chain_hash', 'verify_position']
    """
    bits = [1 << bit for bit in range(int(reasons).bit_length()) if reasons >> bit & 1]
    return [_REASON_NAMES.get(bit, f"bit_{bit}") for bit in bits]


def tag_name(tag: int) -> str:
    """The name of a launch tag."""
    return CanaryLaunchTag(tag).name if 0 <= tag < NUM_LAUNCH_TAGS else f"launch_{tag}"


@dataclasses.dataclass(kw_only=True, eq=False)
class Event:
    """Something that a monitor found, once, however often it is seen again.

    kind: "violation", "overflow" (rows that were not stored), "decode_limit" (rows that the host gave up). name: the canary's.
    step: when it was found; last_step, repeats: when and how often it was seen again. group: of layers. request: the engine's id,
    0 is unknown. page: None without a page size. position: where the request reads the slot, -1 is unknown. layer: first bad source.
    reasons: bits. cause, evidence: see :func:`classify`. writer, writer_step: who wrote the bad slot, 0 is unknown. root: the event
    that this one follows from. run: the first event of the same run of slots. sharers: (request, position) of others on the slot,
    position -1 is unknown. echoes: events that follow from this one. violation: the row. tables_known: whether
    the host's tables were at hand. rows: lost ones, of the other kinds. case, number: what the cause was told from, and which of its rows
    this is.
    """

    kind: str = "violation"
    name: str
    step: int
    tag: int
    group: str
    shard: int = 0
    request: int = 0
    batch_row: int = -1
    req_pool_idx: int = -1
    slot: int = -1
    page: int | None = None
    position: int = -1
    layer: str | None = None
    reasons: int = 0
    cause: Cause = Cause.UNKNOWN
    evidence: tuple[str, ...] = ()
    cause_position: int | None = None
    writer: int = 0
    writer_step: int = 0
    root: Event | None = None
    run: Event | None = None
    run_length: int = 1
    sharers: tuple[tuple[int, int], ...] = ()
    echoes: list[Event] = dataclasses.field(default_factory=list)
    violation: Violation | None = None
    tables_known: bool = False
    rows: int = 0
    repeats: int = 0
    last_step: int = 0
    case: Case | None = None
    number: int = -1

    @property
    def tag_name(self) -> str:
        return tag_name(self.tag)

    @property
    def reason_names(self) -> list[str]:
        return reason_names(self.reasons)

    def line(self) -> str:
        """One line of ``key=value`` pairs for log search; values hold no spaces, "-" is unknown."""
        if self.kind != "violation":
            place = f"name={_plain(self.name)} step={self.step} tag={self.tag_name} group={_plain(self.group)}"
            return f"kvcanary={self.kind} {place} rows={self.rows}"
        pairs = {
            "kvcanary": "violation",
            "name": self.name,
            "step": self.step,
            "tag": self.tag_name,
            "group": self.group,
            "request": self.request or "-",
            "slot": self.slot,
            "page": "-" if self.page is None else self.page,
            "position": self.position if self.position >= 0 else "-",
            "layer": self.layer or "-",
            "reason": "|".join(self.reason_names) or "-",
            "cause": self.cause.value,
            "writer": self.writer or "-",
            "shard": self.shard,
        }
        if self.root is not None:
            pairs["root"] = self.root.slot
        return " ".join(f"{key}={_plain(value)}" for key, value in pairs.items())

    def describe(self) -> str:
        """The line, then in words: expected, found, writer, likely cause, who shares the slot, what to look at first."""
        if self.kind == "overflow":
            return f"{self.line()}\n  ring overflow: {self.rows} rows not stored: violations came faster than the log was read and cleared"
        if self.kind == "decode_limit":
            return f"{self.line()}\n  {self.rows} stored rows not decoded: more came than the monitor keeps"
        return "\n  ".join([self.line(), *self._words()])

    def _repr_html_(self) -> str:
        """For notebooks."""
        words = self.describe().split("\n")[1:]
        rows: list[tuple[str, object]] = [("step", self.step), ("launch", self.tag_name)]
        if self.kind == "violation":
            rows.append(("request", self.request or "unknown"))
            rows.append(("slot, position", f"{self.slot}, {self.position}"))
            rows.append(("reason", ", ".join(self.reason_names)))
            rows.append(("cause", self.cause.words))
        rows += [("" if number else "in words", text.strip()) for number, text in enumerate(words)]
        return html.table(f"{self.kind} of {self.name}", rows)

    def _words(self) -> Iterator[str]:
        assert self.violation is not None
        if self.root is not None:
            yield f"follows from the violation at slot {self.root.slot} (position {self.root.position}): {'; '.join(self.evidence)}"
            return
        if self.run is not None:
            yield f"goes on with the fault that begins at slot {self.run.slot} (position {self.run.position}): {self.cause.words}"
            return
        yield self.violation.describe()
        where = "" if self.cause_position in (None, self.position) else f", at position {self.cause_position}"
        yield f"looks like: {self.cause.words}{where}; {'; '.join(self.evidence)}"
        if self.run_length > 1:
            yield f"the fault runs over {self.run_length} positions from {self.position}"
        if self.echoes:
            shown = ", ".join(str(echo.slot) for echo in self.echoes[:8])
            shown += f" and {len(self.echoes) - 8} more" if len(self.echoes) > 8 else ""
            yield f"violations that follow from it: slot {shown}"
        if self.sharers:
            shown = ", ".join(f"request {request}" + (f" (position {at})" if at >= 0 else "") for request, at in self.sharers[:8])
            yield f"the slot is shared with {shown}" + (f" and {len(self.sharers) - 8} more" if len(self.sharers) > 8 else "")
        if self.cause is not Cause.UNKNOWN or not self.tables_known:
            yield f"look first at: {self.cause.first_look}"

    @classmethod
    def of_row(
        cls, row: RowFacts, finding: Finding, *, name: str, labels: Sequence[str], page_size: int | None, sharers: Sequence[tuple[int, int]]
    ) -> Event:
        """The event of a decoded row."""
        source = row.first_bad_source
        layer = labels[source] if 0 <= source < len(labels) else None
        return cls(
            name=name,
            step=row.step,
            last_step=row.step,
            tag=row.tag,
            group=row.group,
            shard=row.shard,
            request=row.reader,
            batch_row=row.batch_row,
            req_pool_idx=row.req_pool_idx,
            slot=row.slot,
            page=row.slot // page_size if page_size and row.slot >= 0 else None,
            position=row.expected_position,
            layer=layer,
            reasons=row.reasons,
            cause=finding.cause,
            evidence=finding.evidence,
            cause_position=finding.position,
            writer=finding.writer,
            writer_step=finding.writer_step,
            sharers=tuple(sharers),
            violation=violation_of(row, layer),
        )


def violation_of(row: RowFacts, source_name: str | None) -> Violation:
    """The row in the terms of :func:`decode_log`, with the writer as it was when the row was found."""
    writer = None
    if row.written and (row.writer or row.writer_step or row.flags):
        writer = Provenance(request_id=row.writer, step=row.writer_step, flags=row.flags, namespace=row.writer_namespace)
    return Violation(
        tag=CanaryLaunchTag(row.tag) if 0 <= row.tag < NUM_LAUNCH_TAGS else row.tag,
        slot=row.slot,
        position=row.position,
        token=row.token,
        expected_token=row.expected_token,
        chain_hash=row.chain_hash,
        aux=row.aux,
        reasons=FailReason(row.reasons),
        batch_row=row.batch_row,
        req_pool_idx=row.req_pool_idx,
        step=row.step,
        expected_position=row.expected_position,
        real_kv_hash=row.real_kv_hash,
        expected_real_kv_hash=row.expected_real_kv_hash,
        first_bad_source=row.first_bad_source,
        shard=row.shard,
        writer=writer,
        source_name=source_name,
    )


class KvCanaryError(RuntimeError):
    """Corruption was found, and the mode is "raise". Raised once a monitor.

    events: new ones, each with its echoes. lost: rows that the ring had no room for.
    """

    def __init__(self, events: Sequence[Event], lost: int = 0) -> None:
        self.events = tuple(events)
        self.lost = lost
        shown = [event.describe() for event in self.events[:8]] + [event.line() for event in self.events[8:64]]
        rest = len(self.events) - 64
        if rest > 0:
            shown.append(f"and {rest} events more, in the error's events")
        count = sum(event.kind == "violation" for event in self.events)
        head = f"kv-canary: {count} violation{'' if count == 1 else 's'} of the KV cache" + (f", {lost} rows not stored" if lost else "")
        super().__init__("\n".join([head, *shown]))

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All rows that were known when it was raised."""
        every = [known for event in self.events for known in (event, *event.echoes)]
        return tuple(event.violation for event in every if event.violation is not None)


def _plain(value: object) -> str:
    return "_".join(str(value).split()) or "-"
