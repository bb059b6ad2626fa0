"""The host side: reading without waiting, de-duplication, log lines, raising, overflow, health, metrics, storms."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from report_builder import (
    BYTES,
    CHAIN,
    HEAD,
    POSITION,
    TAIL,
    TOKEN,
    UNWRITTEN,
    Config,
    Report,
    Row,
    StandIn,
    report,
)

from jax_kvcanary.causes import Cause
from jax_kvcanary.events import Event, KvCanaryError
from jax_kvcanary.history import TableHistory
from jax_kvcanary.metrics import PrometheusMetrics
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.report_header import header_fields, part_groups
from jax_kvcanary.spec import CanaryLaunchTag, FailReason

LOGGER = "jax_kvcanary.monitor"
BAD = Row(reasons=BYTES, slot=37, at=5, reader=9001, writer=9001, source=3)


class LateArray:
    """An array that the device has not computed yet; counts what is done with it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape
        self.ready = False
        self.copies = self.reads = self.blocking_reads = 0

    def is_ready(self) -> bool:
        return self.ready

    def copy_to_host_async(self) -> None:
        self.copies += 1

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.reads += 1
        self.blocking_reads += not self.ready
        return self.values


def late(made: Report) -> Report:
    return Report(*(LateArray(array) for array in (made.header, made.rows, made.context)))


def arrive(*reports: Report) -> None:
    for made in reports:
        for array in (made.header, made.rows, made.context):
            array.ready = True


def arrays(*reports: Report) -> list[LateArray]:
    return [array for made in reports for array in (made.header, made.rows, made.context)]


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_report_of_numpy_or_jax(convert: Callable[[Any], Any]) -> None:
    made = report(BAD)
    monitor = Monitor(StandIn())
    events = monitor.observe(Report(convert(made.header), convert(made.rows), convert(made.context))) or monitor.flush()
    (event,) = events
    assert (event.slot, event.page, event.position, event.request, event.layer) == (37, 2, 5, 9001, "layer 1 V")
    assert event.cause is Cause.BYTES_CHANGED and event.violation is not None and event.violation.writer is not None
    assert list(monitor.events) == [event] and monitor.lag == 0


def test_header_fields() -> None:
    canary = StandIn()
    header = header_fields(report(BAD, step=7, epoch=3, unattested=2**33 + 1, runs=2**32).header, canary)
    assert (header.step, header.epoch, header.unattested, header.armed_steps, header.bs) == (7, 3, 2**33 + 1, 7, 2)
    assert header.write_index == {HEAD: 1, TAIL: 0} and header.slot_runs[TAIL] == 7 * 2**32 and header.kernel_runs[HEAD] == 7


def test_groups_in_any_form() -> None:
    class Named(StandIn):
        group_of_part = ("full", "swa")  # type: ignore[assignment]

    class Mapped(StandIn):
        group_of_part = {HEAD: "full", TAIL: "swa"}  # type: ignore[assignment]  # noqa: RUF012

    assert part_groups(Named()) == part_groups(Mapped()) == ("full", "swa")
    assert part_groups(StandIn()) == ("full", "full")


def test_observe_never_blocks() -> None:
    monitor = Monitor(StandIn())
    made = [late(report(BAD, step=step)) for step in range(20, 30)]
    for one in made:
        assert monitor.observe(one) == []
    assert monitor.lag == 10 and monitor.health().step is None and monitor.health().merged == 6
    assert [array.reads for array in arrays(*made)] == [0] * 30
    assert [one.header.copies for one in made] == [1] * 10 and not any(one.rows.copies for one in made)
    arrive(made[0])
    assert [event.slot for event in monitor.observe(late(report(BAD, step=30)))] == [37]
    assert monitor.health().step == 20 and monitor.lag == 10  # ten steps are newer
    arrive(*made)
    monitor.observe(late(report(BAD, step=31)))
    assert monitor.health().step == 29 and monitor.lag == 2
    assert sum(array.blocking_reads for array in arrays(*made)) == 0


def test_the_oldest_report_is_kept_until_it_is_there() -> None:
    """A device that is far behind does not starve the monitor."""
    monitor, made = Monitor(StandIn(), max_pending=2), []
    for step in range(100):
        made.append(late(report(step=step)))
        if step >= 10:
            arrive(made[step - 10])
        monitor.observe(made[-1])
    health = monitor.health()
    assert health.step is not None and health.step >= 80 and monitor.lag <= 20
    assert not any(array.blocking_reads for array in arrays(*made))


def test_rows_are_fetched_only_when_there_are_new_ones() -> None:
    monitor = Monitor(StandIn())
    made = [late(report(*rows, step=20 + i)) for i, rows in enumerate([(), (BAD,), (BAD,), (BAD, Row(reasons=BYTES, slot=9, at=0))])]
    for one in made:
        arrive(one)
        monitor.observe(one)
    assert [one.rows.reads for one in made] == [0, 1, 0, 1] and [one.header.reads for one in made] == [1] * 4
    assert len(monitor.events) == 2


def test_flush_waits() -> None:
    monitor = Monitor(StandIn())
    made = [late(report(BAD, step=step)) for step in (20, 21)]
    for one in made:
        monitor.observe(one)
    assert [event.slot for event in monitor.flush()] == [37]
    assert monitor.lag == 0 and made[1].header.blocking_reads == 1


def test_rows_that_wait_are_told_later() -> None:
    rows = [Row(reasons=BYTES, slot=s, at=s, reader=100 + s, step=10 + s // 8) for s in range(1, 61)]
    monitor = Monitor(StandIn(), max_rows=16, max_events=5)
    seen = [event.slot for event in monitor.observe(report(*rows))]
    assert len(seen) == 5 and monitor.health().rows_waiting == 55
    for step in range(21, 60):
        seen += [event.slot for event in monitor.observe(report(*rows, step=step))]
    assert sorted(seen) == list(range(1, 61)) and monitor.health().rows_waiting == 0


def test_more_rows_than_the_host_keeps_are_counted() -> None:
    rows = [Row(reasons=BYTES, slot=s, at=s) for s in range(1, 41)]
    monitor = Monitor(StandIn(), max_waiting=30)
    events = monitor.observe(report(*rows)) + monitor.flush()
    assert sum(event.kind == "violation" for event in events) == 30
    (limit,) = [event for event in events if event.kind == "decode_limit"]
    assert limit.rows == 10 == monitor.health().rows_lost and "not decoded" in limit.describe()


def test_an_epoch_that_ended_is_read_before_the_next() -> None:
    monitor = Monitor(StandIn())
    other = Row(reasons=BYTES, slot=4, at=1)
    made = [late(one) for one in (report(BAD, step=20), report(step=21, epoch=1), report(other, step=22, epoch=1))]
    for one in made:
        monitor.observe(one)
    arrive(*made)
    assert [event.slot for event in monitor.flush()] == [37, 4]
    assert monitor.health().rows_reported == 2


def test_service_clears_the_log_when_it_is_half_full() -> None:
    monitor = Monitor(StandIn())
    assert monitor.service("state") == "state"
    monitor.observe(report(BAD, capacity=4))
    assert monitor.service("state") == "state"
    rows = [Row(reasons=BYTES, slot=s, at=s) for s in (1, 2)]
    monitor.observe(report(*rows, capacity=4, step=21))
    monitor_two = Monitor(StandIn())
    monitor_two.observe(report(*rows, capacity=4, step=21))
    assert monitor_two.service("state") == ("cleared", "state")
    assert monitor_two.service("state") == "state"  # until a report of the new epoch was read
    monitor_two.observe(report(capacity=4, step=22, epoch=1))
    assert monitor_two.service("state") == "state"


def test_service_keeps_the_last_report_of_an_epoch() -> None:
    rows = [Row(reasons=BYTES, slot=s, at=s) for s in (1, 2)]
    monitor = Monitor(StandIn(), max_pending=2)
    monitor.observe(report(*rows, capacity=4))
    last = late(report(*rows, Row(reasons=BYTES, slot=3, at=3), capacity=4, step=21))
    monitor.observe(last)
    assert monitor.service("state") == ("cleared", "state")
    newer = [late(report(step=step, epoch=1, capacity=4)) for step in range(22, 30)]
    for one in newer:
        monitor.observe(one)
        assert monitor.service("state") == "state"
    arrive(last, *newer)
    assert [event.slot for event in monitor.flush()] == [3]


# ---------------------------------------------------------------------------------------------- events


def test_one_event_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(StandIn())
    rows = [Row(**vars(BAD) | {"step": step, "tag": tag}) for step in (20, 21, 22) for tag in (HEAD, TAIL)]
    (event,) = monitor.observe(report(*rows))
    assert len(warnings_of(caplog)) == 1 and (event.repeats, event.last_step) == (2, 22)
    worse = Row(reasons=CHAIN | POSITION, slot=37, at=5, reader=9001, writer=9002, writer_step=22, position=1, step=23, previous=(9001, 5))
    (second,) = monitor.observe(report(*rows, worse, step=23))
    assert second.cause is Cause.OVERWRITTEN and len(warnings_of(caplog)) == 2
    rotated = Row(**vars(worse) | {"reasons": CHAIN | POSITION | BYTES, "step": 24})
    assert monitor.observe(report(*rows, worse, rotated, step=24)) == []
    assert second.repeats == 1 and second.reason_names == ["verify_chain_hash", "verify_position", "verify_real_kv_hash"]


def test_the_line_and_the_words(caplog: pytest.LogCaptureFixture) -> None:
    page = [
        Row(
            reasons=(CHAIN if p == 16 else 0) | POSITION | TOKEN,
            slot=32 + p,
            at=p,
            position=p - 16,
            token=50 + p,
            expected_token=p,
            reader=9001,
            writer=9002,
            writer_step=12,
            previous=(9001, 4) if p == 16 else (9002, 12),
            batch_row=2,
        )
        for p in range(16, 32)
    ]
    echo = Row(reasons=CHAIN, slot=64, at=32, reader=9001, writer=9001, writer_step=6, previous=(9002, 12), batch_row=2)
    monitor = Monitor(StandIn(name="my pool"))
    events = monitor.observe(report(*page, echo)) + monitor.flush()
    assert [event.slot for event in events] == list(range(48, 64))
    (first, *rest) = events
    assert first.line() == (
        "kvcanary=violation name=my_pool step=20 tag=HEAD_K_FULL group=full request=9001 slot=48 page=3 position=16 layer=- "
        "reason=verify_chain_hash|verify_position|verify_token cause=overwritten writer=9002 shard=0"
    )
    text = warnings_of(caplog)[0]
    assert text.splitlines()[0] == first.line()
    for words in (
        "its token is 66, expected 16",
        "its position is 0, expected 16",
        "written by request 9002 in step 12",
        "looks like: overwritten by another sequence",
        "runs over 16 positions",
        "follow from it: slot 64",
        "look first at:",
    ):
        assert words in text, words
    assert len(warnings_of(caplog)) == 16  # the echo is told with its root
    assert [e.position for e in first.echoes] == [32] and first.echoes[0].root is first
    assert all(event.run is first for event in rest) and "goes on with the fault that begins at slot 48" in rest[0].describe()


def test_who_shares_a_slot() -> None:
    rows = [Row(**vars(BAD) | {"reader": reader, "batch_row": reader}) for reader in (1, 2, 3)]
    monitor = Monitor(StandIn())
    monitor.record_batch(19, request_ids=[1, 4], tables=np.array([[35, 36, 37]] * 2), lengths=[3, 3])
    events = monitor.observe(report(*rows))
    assert events[0].sharers == ((2, 5), (3, 5), (4, 2)) and "shared with request 2 (position 5), request 3" in events[0].describe()


def test_tables_reach_the_cause() -> None:
    monitor = Monitor(StandIn())
    row = Row(reasons=CHAIN | POSITION, slot=300, at=2, position=9, writer=2, writer_step=12)
    monitor.record_batch(4, request_ids=[1], tables=np.array([[10, 11, 12]]), lengths=[3])
    assert monitor.observe(report(row))[0].cause is Cause.TABLE_ENTRY
    given = TableHistory()
    given.record(4, request_ids=[1], tables=np.array([[10, 11, 300]]), lengths=[3])
    assert Monitor(StandIn(), tables=given).observe(report(row))[0].cause is Cause.OVERWRITTEN
    assert Monitor(StandIn(), tables={"full": given}).observe(report(row))[0].cause is Cause.OVERWRITTEN
    with pytest.raises(ValueError, match=r"^kv-canary: record_batch names the group 'swa', there are 'full'"):
        monitor.record_batch(5, request_ids=[1], tables=np.array([[1]]), lengths=[1], group="swa")


def test_rows_of_a_sweep_stand_alone() -> None:
    """No request reads them, so neighbours by position may be of other chains, and an overwritten page is not called shifted."""
    sweep = {"tag": CanaryLaunchTag.SWEEP_K_FULL, "reader": 0, "batch_row": -1, "previous": None}
    rows = [Row(reasons=CHAIN | POSITION, slot=9, at=3, position=8, **sweep), Row(reasons=POSITION, slot=10, at=4, position=9, **sweep)]
    rows.append(Row(reasons=BYTES, slot=40, at=4, **sweep))
    canary = StandIn(parts=(HEAD, CanaryLaunchTag.SWEEP_K_FULL))
    made = report(*rows, canary=canary)
    made.rows[1, :, 18:20] = 2**32 - 1  # no request row
    events = Monitor(canary).observe(made)
    assert [event.cause for event in events] == [Cause.UNKNOWN, Cause.UNKNOWN, Cause.BYTES_CHANGED]
    assert all(event.request == 0 and not event.echoes for event in events) and "request=-" in events[0].line()


def test_an_echo_of_a_root_that_was_told_before(caplog: pytest.LogCaptureFixture) -> None:
    root = Row(reasons=UNWRITTEN | CHAIN, slot=9, at=3, step=20)
    monitor = Monitor(StandIn())
    (event,) = monitor.observe(report(root))
    again, echo = Row(**vars(root) | {"step": 21}), Row(reasons=CHAIN, slot=4, at=4, step=21)
    assert monitor.observe(report(root, again, echo, step=21)) == []
    assert [e.slot for e in event.echoes] == [4] and event.repeats == 1
    assert "root=9" in warnings_of(caplog)[1]


def test_a_slot_that_was_stamped_on_a_bad_one() -> None:
    """The table was wrong in one step only: what that step stamped stays broken, and is no fault of its own."""
    bad = [Row(reasons=CHAIN | POSITION, slot=s, at=p, position=q, step=20) for s, p, q in ((31, 8, 7), (36, 7, 8))]
    after = Row(reasons=CHAIN, slot=37, at=9, writer_step=20, step=21, previous=(1, 6))
    monitor = Monitor(StandIn())
    events = monitor.observe(report(*bad)) + monitor.observe(report(*bad, after, step=21))
    assert [event.cause for event in events] == [Cause.TABLE_ENTRY] * 2
    assert [echo.slot for echo in events[1].echoes] == [37] and "stamped in step 20" in events[1].echoes[0].describe()
    later = Row(reasons=CHAIN, slot=37, at=9, writer_step=21, step=22)
    assert [event.cause for event in Monitor(StandIn()).observe(report(later))] == [Cause.UNKNOWN]


def test_repeats_are_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monitor = Monitor(StandIn(), clock=lambda: now[0], repeat_seconds=60)
    rows = []
    for step in range(20, 80):
        rows.append(Row(**vars(BAD) | {"step": step}))
        monitor.observe(report(*rows, step=step))
        now[0] += 10
    lines = warnings_of(caplog)
    assert len(lines) <= 11 and all(line.startswith("kvcanary=repeats") for line in lines[1:])
    assert monitor.health().repeats == 59


def test_a_ring_overflow_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [Row(reasons=BYTES, slot=s, at=s) for s in range(1, 5)]
    monitor = Monitor(StandIn())
    events = monitor.observe(report(*rows, capacity=4, index={HEAD: 9}))
    (overflow,) = [event for event in events if event.kind == "overflow"]
    assert "ring overflow: 5 rows not stored" in overflow.describe() and overflow.line().endswith("group=full rows=5")
    assert monitor.observe(report(*rows, capacity=4, index={HEAD: 100_009}, step=21)) == []
    assert overflow.rows == monitor.health().rows_lost == 100_005
    assert sum("ring overflow" in line for line in warnings_of(caplog)) == 1
    assert monitor.health().rows_reported == 100_009
    again = monitor.observe(report(*rows, capacity=4, index={HEAD: 5}, step=22, epoch=1))
    assert [event.kind for event in again] == ["overflow"] and monitor.health().rows_lost == 100_006


def test_events_are_bounded() -> None:
    monitor = Monitor(StandIn(), history=10)
    monitor.observe(report(*(Row(reasons=BYTES, slot=s, at=s) for s in range(1, 41))))
    monitor.flush()
    assert len(monitor.events) == 10 and monitor.health().events == 40


# ---------------------------------------------------------------------------------------------- modes


def test_raise_raises_once_with_every_row(caplog: pytest.LogCaptureFixture) -> None:
    rows = [Row(reasons=BYTES, slot=s, at=s, step=20) for s in range(1, 61)]
    echo = Row(reasons=CHAIN, slot=80, at=11, step=21, tag=TAIL)
    root = Row(reasons=UNWRITTEN | CHAIN, slot=70, at=10, step=21, tag=TAIL)
    canary = StandIn(config=Config("raise"))
    monitor = Monitor(canary, max_rows=8)
    with pytest.raises(KvCanaryError, match=r"^kv-canary: 61 violations of the KV cache, 3 rows not stored\nkvcanary=") as caught:
        monitor.observe(report(*rows, root, echo, capacity=60, index={HEAD: 63}, step=21))
    assert len(caught.value.violations) == 62 and caught.value.lost == 3 and warnings_of(caplog) == []
    more = Row(reasons=BYTES, slot=99, at=9, tag=TAIL, step=22)
    assert [event.slot for event in monitor.observe(report(*rows, root, echo, more, capacity=60, index={HEAD: 63}, step=22))] == [99]
    assert len(warnings_of(caplog)) == 1
    monitor.rearm()
    last = Row(reasons=BYTES, slot=98, at=9, tag=TAIL)
    with pytest.raises(KvCanaryError, match="1 violation of"):
        monitor.observe(report(*rows, root, echo, more, last, capacity=60, index={HEAD: 63}, step=23))


def test_off_is_inert() -> None:
    monitor = Monitor(StandIn(config=Config("off")))
    assert monitor.observe(None) == [] and monitor.flush() == [] and monitor.service(3) == 3
    monitor.record_batch(1, request_ids=[1], tables=np.zeros((1, 1)), lengths=[1])
    monitor.close()
    assert monitor.health().mode == "off" and monitor.lag == 0
    assert Monitor(StandIn(), mode="off").observe(None) == []


def test_close_reads_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with Monitor(StandIn()) as monitor:
        monitor.observe(late(report(BAD)))
    assert len(monitor.events) == 1 and "kvcanary=statistics" in caplog.text
    with pytest.raises(ValueError, match=r"^kv-canary: the monitor is closed"):
        monitor.observe(report(BAD))
    monitor.close()
    raising = Monitor(StandIn(), mode="raise")
    with pytest.raises(KvCanaryError), raising:
        raising.observe(late(report(BAD)))
    hidden = Monitor(StandIn(), mode="raise")
    with pytest.raises(ZeroDivisionError), hidden:
        hidden.observe(late(report(BAD)))
        raise ZeroDivisionError
    assert len(hidden.events) == 1


def test_statistics_every_n_steps(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(StandIn(), statistics_every=10)
    for step in range(1, 36):
        monitor.observe(report(step=step))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and lines[0] == (
        "kvcanary=statistics name=kv step=11 armed_steps=11 verified=1100 written=1100 violations=0 events=0 repeats=0 rows_lost=0 "
        "unattested=0 lag=0 failures=0"
    )


def test_no_handler_is_added() -> None:
    Monitor(StandIn()).observe(report(BAD))
    assert logging.getLogger(LOGGER).handlers == [] and logging.getLogger("jax_kvcanary").handlers == []


def test_health_says_what_really_runs() -> None:
    class Covered(StandIn):
        def coverage(self) -> str:
            return "everything within 64 steps"

    monitor = Monitor(Covered())
    idle = report(step=20)
    monitor.observe(idle)
    stopped = report(step=50)
    stopped.header[9:11] = idle.header[9:11]  # no slot of the head launch was checked since
    monitor.observe(stopped)
    health = monitor.health()
    assert health.unchecked_steps == {HEAD: 30, TAIL: 0} and health.coverage == "everything within 64 steps"
    assert health.launches == {HEAD: 50, TAIL: 50} and health.slots == {HEAD: 2000, TAIL: 5000}


# ---------------------------------------------------------------------------------------------- misuse and failures


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (report(key=1), "the report is of another canary: its key is 0x00000001, that of canary 'kv' is 0xabcd1234"),
        (report(magic=1), "the report is no canary's: its header starts with 0x1"),
        (report(canary=StandIn(parts=(HEAD,))), r"header must have shape \(20,\) for the 2 launches of canary 'kv', got \(14,\)"),
        (Report(report().header, np.zeros((2, 4, 31)), report().context), r"rows must have shape \(2, capacity, 32\)"),
        (Report(report().header, report().rows, np.zeros((2, 4, 24))), r"context must have shape \(2, 64, 24\)"),
    ],
)
def test_foreign_reports_are_refused(made: Report, text: str) -> None:
    monitor = Monitor(StandIn())
    with pytest.raises(ValueError, match=rf"^kv-canary: .*{text}"):
        monitor.observe(made)
    assert [event.slot for event in monitor.observe(report(BAD))] == [37]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (report(BAD, step=19, epoch=2), "out of order: step 19 after step 20"),
        (report(BAD, step=21, epoch=1), "out of order: epoch 1 after epoch 2"),
        (report(step=21, epoch=2), "the log of step 21 holds fewer rows than before"),
    ],
)
def test_reports_out_of_order_are_refused(made: Report, text: str) -> None:
    monitor = Monitor(StandIn())
    monitor.observe(report(BAD, step=20, epoch=2))
    with pytest.raises(ValueError, match=rf"^kv-canary: reports of canary 'kv' .*{text}"):
        monitor.observe(made)
    assert monitor.observe(report(BAD, step=22, epoch=2)) == []
    wrap = Monitor(StandIn())
    wrap.observe(report(step=2**32 - 1))
    wrap.observe(report(step=0))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"^kv-canary: mode must be one of 'off', 'log', 'raise', got 'warn'"):
        Monitor(StandIn(), mode="warn")
    with pytest.raises(TypeError, match=r"^kv-canary: mode must be a str, got int"):
        Monitor(StandIn(), mode=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^kv-canary: max_pending must be >= 2, got 1"):
        Monitor(StandIn(), max_pending=1)
    with pytest.raises(TypeError, match=r"^kv-canary: observe takes the report that tail returned, got NoneType"):
        Monitor(StandIn()).observe(None)


def test_a_failure_is_logged_once_and_never_reaches_the_step(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LateArray):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise RuntimeError("the device is gone")

    monitor = Monitor(StandIn())
    for step in (20, 21, 22):
        made = report(BAD, step=step)
        broken = Broken(made.rows)
        broken.ready = True
        assert monitor.observe(Report(made.header, broken, made.context)) == []
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failures) == 1 and failures[0].exc_info and monitor.health().failures == 3
    assert monitor.health().last_failure == "RuntimeError: the device is gone"
    assert [event.slot for event in monitor.observe(report(BAD, step=23))] == [37]


def test_a_callback_that_fails_is_counted() -> None:
    seen: list[Event] = []

    def fail(event: Event) -> None:
        seen.append(event)
        raise ZeroDivisionError

    monitor = Monitor(StandIn(), on_event=fail)
    assert monitor.observe(report(BAD)) == seen and monitor.health().failures == 1


# ---------------------------------------------------------------------------------------------- metrics


def test_metrics_of_two_canaries_in_one_registry() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    parts = (HEAD, TAIL, CanaryLaunchTag.SWEEP_K_FULL)
    canaries = [StandIn(name=name, parts=parts) for name in ("a", "b")]
    monitors = [Monitor(canary, metrics=PrometheusMetrics(registry=registry)) for canary in canaries]
    rows = [Row(reasons=CHAIN | POSITION, slot=s, at=s, writer=7, shard=1) for s in range(1, 4)]
    for canary, monitor in zip(canaries, monitors, strict=True):
        monitor.observe(report(*rows, canary=canary, capacity=3, index={HEAD: 8}, step=10))
        monitor.observe(report(*rows, canary=canary, capacity=3, index={HEAD: 8}, step=11))

    def value(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(metric, labels)

    for name in ("a", "b"):
        of = {"name": name, "shard": "0"}
        for reason in ("verify_chain_hash", "verify_position"):
            assert value("kvcanary_violations_total", reason=reason, tag="HEAD_K_FULL", name=name, shard="1") == 3
        assert value("kvcanary_slots_verified_total", tag="HEAD_K_FULL", **of) == 1100
        assert value("kvcanary_slots_written_total", tag="TAIL_K_FULL", **of) == 1100
        assert value("kvcanary_sweeps_total", tag="SWEEP_K_FULL", **of) == 11
        assert value("kvcanary_ring_dropped_total", tag="HEAD_K_FULL", **of) == 5
        assert value("kvcanary_poll_seconds_count", **of) == 2
    assert monitors[0].health().failures == 0


def test_metrics_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"^kv-canary: PrometheusMetrics needs prometheus-client: pip install 'jax_kvcanary\[metrics\]'"):
        PrometheusMetrics()


# ---------------------------------------------------------------------------------------------- storms


def storm(steps: int, capacity: int = 1024) -> list[Report]:
    """A full ring whose rows are all different, an index far beyond, 100,000 more a step, and an epoch every 20 steps."""
    made = []
    for step in range(steps):
        epoch, within = divmod(step, 20)
        rows = [
            Row(reasons=CHAIN | POSITION, slot=s + 7 * epoch, at=s % 97, reader=1 + s // 97, writer=2 + s % 5, position=s, step=20 * epoch)
            for s in range(1, capacity + 1)
        ]
        if within == 0:
            first = report(*rows, capacity=capacity)
        header = first.header.copy()
        header[2:4] = step, epoch
        header[8] = 100_000 * (within + 1)
        made.append(Report(header, first.rows, first.context))
    return made


def test_a_storm_costs_the_host_little() -> None:
    """Of the thread's own time: what other processes take of the machine is not counted."""
    monitor = Monitor(StandIn())
    seconds = []
    gc.collect()
    for made in storm(60):
        start = time.thread_time()
        monitor.observe(made)
        seconds.append(time.thread_time() - start)
    health = monitor.health()
    print(f"observe in a storm: median {1e3 * np.median(seconds):.2f} ms, worst {1e3 * max(seconds):.2f} ms")
    assert np.median(seconds) < 0.005
    assert health.failures == 0 and health.rows_reported == 6_000_000
    assert health.rows_lost == 6_000_000 - 3 * 1024 and health.rows_waiting >= 0


def test_quiet_steps_cost_the_host_next_to_nothing() -> None:
    monitor, made = Monitor(StandIn()), [report(step=step) for step in range(300)]
    start = time.thread_time()
    for one in made:
        monitor.observe(one)
    print(f"observe of a quiet step: {1e6 * (time.thread_time() - start) / len(made):.0f} us")
    assert (time.thread_time() - start) / len(made) < 0.001


def test_reasons_have_names() -> None:
    event = Event(name="kv", step=1, tag=99, group="full", reasons=int(FailReason.UNWRITTEN) | 1 << 20)
    assert event.reason_names == ["unwritten", "bit_1048576"] and event.tag_name == "launch_99"
