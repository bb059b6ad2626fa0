"""The flight recorder: bounded memory, what it tells of a slot, and its way through a file."""

from __future__ import annotations

import numpy as np
import pytest

from jax_kvcanary.recorder import BLOCK, FlightRecorder


def full(recorder: FlightRecorder) -> list[tuple[object, ...]]:
    """All that is recorded, as plain values."""
    return [
        (
            batch.step,
            batch.group,
            batch.page_size,
            batch.request_ids,
            batch.lengths.tolist(),
            batch.prefix_lengths.tolist(),
            [batch.slots(row).tolist() for row in range(len(batch.rows))],
            [part.tolist() for part in batch.copies],
            batch.finished,
            batch.released.tolist(),
        )
        for batch in recorder.batches
    ]


def life() -> FlightRecorder:
    """Slot 21 (page 5): written by request 7, shared by 8, 7 ends, copied out, 8 loses it, freed, copied into."""
    recorder, of = FlightRecorder(), {"page_size": 4, "group": "full"}
    recorder.record(0, request_ids=[7, 0], tables=[[3, 5], [9, 9]], lengths=[5, 3], prefix_lengths=[0, 0], **of)
    recorder.record(1, request_ids=[7], tables=[[3, 5]], lengths=[6], prefix_lengths=[5], **of)
    recorder.record(2, request_ids=[7, 8], tables=[[3, 5, 0], [3, 5, 6]], lengths=[7, 10], prefix_lengths=[6, 8], **of)
    recorder.record(3, request_ids=[8], tables=[[3, 5, 6]], lengths=[11], prefix_lengths=[10], finished=[7], copies=([21], [45]), **of)
    recorder.record(4, request_ids=[8], tables=[[3, 11, 6]], lengths=[12], prefix_lengths=[11], **of)
    recorder.record(5, request_ids=[2**64 - 1], tables=[[5]], lengths=[2], prefix_lengths=[2], released=[5], copies=([33], [21]), **of)
    return recorder


def test_the_biography_of_a_slot() -> None:
    assert [moment.words for moment in life().biography(21)] == [
        "step 1: request 7 wrote its position 5 there",
        "step 2: request 8 has it as its position 5, already written",
        "step 3: request 7 ended, which had it as its position 5",
        "step 3: copied from there to slot 45",
        "step 4: the table of request 8 no longer names it for position 5",
        "step 5: given back",
        "step 5: copied there from slot 33",
        f"step 5: request {2**64 - 1} has it as its position 1, already written",
    ]
    assert [moment.words for moment in life().biography(45)] == [
        "step 3: copied there from slot 21",
        "step 4: request 8 has it as its position 5, already written",
    ]
    assert [(m.step, m.what, m.request) for m in life().biography(20)][-1] == (5, "held", 2**64 - 1)
    assert life().biography(99) == [] == life().biography(21, group="swa") == FlightRecorder().biography(1)


def test_slots_of_a_request() -> None:
    recorder = life()
    assert recorder.slots_of(8).tolist()[4:8] == [44, 45, 46, 47]
    assert recorder.slots_of(8, step=3).tolist()[4:8] == [20, 21, 22, 23]
    assert recorder.slots_of(9) is None and recorder.slots_of(8, group="swa") is None


def test_a_recorder_through_arrays() -> None:
    recorder = life()
    recorder.record(6, request_ids=[4], tables=np.arange(1000).reshape(1, -1), lengths=[1000], group="swa")
    again = FlightRecorder.from_arrays(recorder.to_arrays())
    assert full(again) == full(recorder) and again.biography(21) == recorder.biography(21)
    assert again.bytes == recorder.bytes
    assert full(FlightRecorder.from_arrays(FlightRecorder().to_arrays())) == []
    arrays = recorder.to_arrays() | {"rows": recorder.to_arrays()["rows"][:-1]}
    with pytest.raises(ValueError, match="recorded batches end early: 1 values are due, 0 are left"):
        FlightRecorder.from_arrays(arrays)


def test_memory_is_bounded() -> None:
    """Long tables of many requests that grow by one slot a step: what did not change is kept once."""
    width, requests = 4 * BLOCK, 16
    tables = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
    recorder = FlightRecorder(max_batches=32)
    for step in range(100):
        lengths = np.full(requests, 3 * BLOCK + step)
        recorder.record(step, request_ids=range(1, requests + 1), tables=tables, lengths=lengths, prefix_lengths=lengths - 1)
    assert len(recorder) == 32 and recorder.forgotten == 68
    assert recorder.bytes < 32 * requests * (4 * 100 + 400) + requests * 4 * width
    small = FlightRecorder(max_batches=1000, max_bytes=200_000)
    rng = np.random.default_rng(0)
    for step in range(200):
        count = int(rng.integers(0, 12))
        small.record(
            step,
            request_ids=rng.integers(0, 2**63, count),
            tables=rng.integers(0, 999, (count, 700)),
            lengths=rng.integers(-3, 900, count),
            copies=(rng.integers(0, 9, 5), rng.integers(0, 9, 5)),
            released=rng.integers(0, 9, count),
        )
        assert small.bytes <= 200_000
    assert 1 < len(small) < 200 and FlightRecorder.from_arrays(small.to_arrays()).bytes <= small.bytes
    tiny = FlightRecorder(max_bytes=100)
    tiny.record(0, request_ids=[1], tables=[[1]], lengths=[1])
    assert (len(tiny), tiny.bytes, tiny.forgotten) == (0, 0, 1)


def test_tables_are_copied() -> None:
    table, recorder = np.array([[1, 2]]), FlightRecorder()
    recorder.record(0, request_ids=[5], tables=table, lengths=[2])
    table[:] = 9
    recorder.record(1, request_ids=[5], tables=table, lengths=[2])
    assert [batch.slots(0).tolist() for batch in recorder.batches] == [[1, 2], [9, 9]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tables": [1, 2]}, "one row of tables and one length a request, got 1 request_ids"),
        ({"lengths": [1, 2]}, "one row of tables and one length a request"),
        ({"prefix_lengths": []}, "one prefix length a request, got 0 for 1 requests"),
        ({"copies": ([1], [])}, "copies as .src, dst. of one length, got 1 and 0"),
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
    ],
)
def test_wrong_arguments(given: dict[str, object], message: str) -> None:
    arguments = {"request_ids": [1], "tables": [[1, 2]], "lengths": [2]} | given
    with pytest.raises(ValueError, match=message):
        FlightRecorder().record(0, **arguments)
