"""What a dump says, in words: the cause read again from its rows, and its records and bytes checked again with NumPy."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator, Sequence

from jax_kvcanary.dump import HEAD, UNKNOWN, Dump, DumpedEvent, DumpedGroup, DumpedSlot, DumpError, load_dump
from jax_kvcanary.events import Event, reason_names
from jax_kvcanary.reference.hashing import fold_bytes, head_hash, splitmix64
from jax_kvcanary.report_header import RowFacts
from jax_kvcanary.spec import FailReason, RecordFlag

_BYTES = int(FailReason.VERIFY_REAL_KV_HASH)
_NOT_OF_A_RECORD = int(FailReason.LANDING | FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION | FailReason.RANK_DIGEST)


def rebuild(dump: Dump, dumped: DumpedEvent) -> Event:
    """The event as the monitor told it, its cause read again from the rows of the dump."""
    case, fields = dumped.case, dumped.fields
    if case is None:
        raise DumpError(f"kv-canary: {dump.path}: an event without its rows")
    findings = case.findings()
    labels = {group.name: group.labels for group in dump.groups}

    def make(number: int) -> Event:
        row = case.rows[number]
        return Event.of_row(row, findings[number], name=fields["name"], labels=labels.get(row.group, ()), page_size=None, sharers=())

    event = make(dumped.number)
    event.page, event.tables_known = fields["page"], fields["tables_known"]
    event.sharers = tuple((request, position) for request, position in fields["sharers"])
    event.case, event.number = case, dumped.number
    follow = [number for number, finding in enumerate(findings) if finding.root == dumped.number]
    event.echoes = [
        make(number) for number in {(case.rows[number].slot, case.rows[number].expected_position): number for number in follow}.values()
    ]
    event.run_length = max(1, collections.Counter(finding.run for finding in findings if finding.root is None)[dumped.number])
    run = findings[dumped.number].run
    event.run = make(run) if run != dumped.number else None
    return event


def explain(dump: Dump, *, slot: int | None = None) -> str:
    """A dump in words.

    Args:
      slot: whose biography is told too, besides those of the bad slots.
    """
    return "\n".join(_lines(dump, slot))


def _lines(dump: Dump, slot: int | None) -> Iterator[str]:
    canary, versions = dump.meta["canary"], dump.meta["versions"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    config = ", ".join(f"{name}={value}" for name, value in canary["config"].items())
    yield f"{dump.path.name}: canary {canary['name']!r} on {dump.meta['device']}, saved {dump.meta['time']} after step {dump.step}"
    yield f"  by {made}"
    yield f"  config: {config}"
    if dump.meta["events_found"] > len(dump.events):
        yield f"  {dump.meta['events_found'] - len(dump.events)} events more were found and not saved"
    told: set[tuple[str, int]] = set()
    for number, dumped in enumerate(dump.events):
        event = rebuild(dump, dumped)
        yield ""
        yield f"{number + 1} of {len(dump.events)}: {event.describe()}"
        if event.cause.value != dumped.fields["cause"]:
            yield f"  where it was found its cause was {dumped.fields['cause']!r}; this version reads the same rows otherwise"
        assert dumped.case is not None
        for line in _checked_again(dump, dumped.case.rows[dumped.number]):
            yield f"  {line}"
        if event.slot >= 0 and (event.group, event.slot) not in told:
            told.add((event.group, event.slot))
            yield from _biography(dump, event.group, event.slot)
    if slot is not None:
        yield ""
        for group in dump.groups:
            yield from _biography(dump, group.name, slot)


def _biography(dump: Dump, group: str, slot: int) -> Iterator[str]:
    if dump.recorder is None:
        return
    steps = [batch.step for batch in dump.recorder.batches if batch.group == group]
    if not steps:
        return
    moments = dump.recorder.biography(slot, group=group)
    yield f"  slot {slot} in steps {steps[0]} to {steps[-1]}, as the host had it" + (":" if moments else ": nobody held it")
    shown = moments if len(moments) <= 40 else [*moments[:10], *moments[-30:]]
    for number, moment in enumerate(shown):
        if number == 10 and len(moments) > len(shown):
            yield f"    {len(moments) - len(shown)} moments more"
        yield f"    {moment.words}"


def _checked_again(dump: Dump, row: RowFacts) -> Iterator[str]:
    """What records and bytes of the dump say of a row."""
    held = dump.slot(row.group, row.slot)
    if held is None:
        yield "its slot is not in the dump, nothing can be checked again" if row.slot >= 0 else "it is of no slot"
        return
    group = next(group for group in dump.groups if group.name == row.group)
    later = dump.step - row.step
    when = "right after the step that found it" if later <= 0 else f"{later} step{'s' if later > 1 else ''} after the one that found it"
    yield f"checked again, with what slot {row.slot} held {when} (step {dump.step}):"
    request, step, flags, _ = _provenance(held)
    if not held.record.any():
        yield "  record: all zero, nothing is stamped there"
        return
    marks = "".join([", given back since" if flags & RecordFlag.FREE else "", ", adopted" if flags & RecordFlag.ADOPTED else ""])
    yield f"  record: position {_word(held, 1)} of request {request or '(unknown)'}, stamped in step {step}{marks}"
    if row.written and (request, step) != (row.writer, row.writer_step):
        yield "  it was stamped anew since the violation was found: what follows is about the new stamp"
    again = 0
    if row.expected_position >= 0 and _word(held, 1) != row.expected_position and not row.reasons & _NOT_OF_A_RECORD:
        again |= FailReason.VERIFY_POSITION
        yield f"  position: {_word(held, 1)}, {row.expected_position} was expected: still wrong"
    broken, words = _chain(dump, group, held, row)
    again |= FailReason.VERIFY_CHAIN_HASH if broken else 0
    yield f"  chain: {words}"
    yield from _bytes(group, held, row)
    record_bits = FailReason.VERIFY_POSITION | FailReason.VERIFY_CHAIN_HASH
    gone = row.reasons & record_bits & ~again
    if gone and held.previous != UNKNOWN:
        yield f"  no longer seen: {', '.join(reason_names(gone))}"


def _chain(dump: Dump, group: DumpedGroup, held: DumpedSlot, row: RowFacts) -> tuple[bool, str]:
    """Whether the record does not follow from its predecessor, and in words."""
    stored = _word(held, 2, signed=False)
    if held.previous == UNKNOWN:
        return False, "its predecessor's slot is not known, not checked"
    if held.previous == HEAD:
        due, before = head_hash(row.reader_namespace if row.reader else _provenance(held)[3]), "it begins a chain"
    elif held.previous == group.padding_slot:
        return False, "its predecessor is out of reach, not checked"
    else:
        known = dump.slot(held.group, held.previous)
        if known is None:
            return False, f"its predecessor (slot {held.previous}) is not in the dump, not checked"
        due, before = known.chain, f"its predecessor is slot {held.previous}"
        request, step, _, _ = _provenance(known)
        before += (
            f", position {_word(known, 1)} of request {request or '(unknown)'}, stamped in step {step}"
            if known.record.any()
            else ", never stamped"
        )
    if stored == due:
        return False, f"whole, {before}"
    return True, f"broken, {before}; that gives {due:#018x}, the record holds {stored:#018x}"


def _bytes(group: DumpedGroup, held: DumpedSlot, row: RowFacts) -> Iterator[str]:
    """The bytes hashed again, and compared with stamp and finding."""
    if not group.sources:
        yield "  bytes: none are covered"
        return
    if held.data is None:
        yield "  bytes: not saved, there was no room"
        return
    own = [fold_bytes(data) if len(data) else 0 for data in held.data]
    combined = 0
    for value, data in zip(own, held.data, strict=True):
        combined = splitmix64(combined ^ value) if len(data) else combined
    tags = [value & 0xFFFFFFFF for value in own]
    differ = [number for number, (tag, stamped) in enumerate(zip(tags, held.tags.tolist(), strict=True)) if tag != stamped]
    total = sum(len(data) for data in held.data[group.leading :] or held.data)
    if not differ and combined == _word(held, 3, signed=False):
        yield f"  bytes: all {total} hash to what was stamped"
    else:
        names = [group.labels[number] for number in differ if number >= group.leading] or [group.labels[number] for number in differ]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        count = len(held.data) - group.leading or len(held.data)
        yield f"  bytes: {len(names)} of {count} sources differ from the stamp: {shown or 'none by its tag'}"
        zero = [number for number in differ if not held.data[number].any()]
        if zero:
            yield f"  bytes: {'all' if len(zero) == len(differ) else len(zero)} of those that differ are zero"
    if row.reasons & _BYTES and 0 <= row.first_bad_source < len(tags):
        now = combined if row.expected_real_kv_hash >> 32 or row.real_kv_hash >> 32 else tags[row.first_bad_source]
        same = now == row.expected_real_kv_hash
        yield f"  bytes: {'the same that the check saw' if same else 'others than the check saw: changed since'}"


def _word(held: DumpedSlot, number: int, *, signed: bool = True) -> int:
    """A 64-bit word of a record."""
    value = int(held.record[2 * number]) | int(held.record[2 * number + 1]) << 32
    return value - (1 << 64) if signed and value >> 63 else value


def _provenance(held: DumpedSlot) -> tuple[int, int, RecordFlag, int]:
    """Request, step, flags and namespace of a record."""
    words = [int(word) for word in held.record[8:14]]
    return words[0] | words[1] << 32, words[2], RecordFlag(words[3] & 3), words[4] | words[5] << 32


def main(argv: Sequence[str] | None = None) -> int:
    """Explain dumps; 2 if one cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary explain", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a dump")
    parser.add_argument("--slot", type=int, help="also tell what happened to this slot, if the dump has a flight recorder's batches")
    options = parser.parse_args(argv)
    status = 0
    for number, file in enumerate(options.files):
        try:
            text = explain(load_dump(file), slot=options.slot)
        except (DumpError, OSError) as error:
            print(f"explain: {error}", file=sys.stderr)
            status = 2
            continue
        print(("\n" if number else "") + text)
    return status
