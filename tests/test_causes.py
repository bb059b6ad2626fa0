"""Likely causes: what separates them, with and without the host's tables, and where nothing does."""

from __future__ import annotations

import numpy as np
import pytest
from report_builder import BYTES, CHAIN, HEAD, POSITION, TAIL, TOKEN, UNWRITTEN, Row, facts

from jax_kvcanary.causes import Cause, Finding, classify
from jax_kvcanary.history import TableHistory
from jax_kvcanary.reference import splitmix64
from jax_kvcanary.spec import CHAIN_ANCHOR, FailReason

FREE = 1


def read(*rows: Row, others: tuple[Row, ...] = (), history: TableHistory | None = None, complete: bool = True) -> list[Finding]:
    mine = facts(*rows)
    return classify(mine, others=[*mine, *facts(*others)] if others else mine, history=history, complete=complete)


def causes(*rows: Row, **more: object) -> list[Cause]:
    return [finding.cause for finding in read(*rows, **more)]


def foreign(at: int, *, reasons: int = CHAIN | POSITION, **more: object) -> Row:
    """A slot with the record of request 2."""
    return Row(**{"reasons": reasons, "slot": 100 + at, "at": at, "position": at + 40, "writer": 2, "writer_step": 12} | more)


def history_of(*steps: tuple[int, dict[int, list[int]]], page_size: int = 1, written: bool = True) -> TableHistory:
    """Tables of slots by request; requests write what is new unless ``written`` is False."""
    history = TableHistory(page_size=page_size)
    for step, tables in steps:
        width = max(len(row) for row in tables.values())
        table = np.zeros((len(tables), width), np.int32)
        for i, row in enumerate(tables.values()):
            table[i, : len(row)] = row
        lengths = [len(row) * page_size for row in tables.values()]
        history.record(step, request_ids=list(tables), tables=table, lengths=lengths, prefix_lengths=None if written else lengths)
    return history


SLOTS = [100, 101, 102, 103]
"""Of request 1, positions 0 to 3."""


# ---------------------------------------------------------------------------------------------- one reason, one cause


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (Row(reasons=BYTES, slot=5, at=3, source=2), Cause.BYTES_CHANGED),
        (Row(reasons=BYTES, slot=5, at=3, flags=FREE), Cause.BYTES_CHANGED),
        (Row(reasons=UNWRITTEN | CHAIN | POSITION, slot=5, at=3), Cause.NEVER_WRITTEN),
        (Row(reasons=FailReason.SLOT_OUT_OF_RANGE, slot=-7, at=3, written=False), Cause.OUT_OF_RANGE),
        (Row(reasons=FailReason.SLOT_OUT_OF_RANGE, slot=9999, at=3, written=False), Cause.OUT_OF_RANGE),
        (Row(reasons=FailReason.TABLE_OUT_OF_RANGE, slot=-1, at=-1, written=False), Cause.OUT_OF_RANGE),
        (Row(reasons=FailReason.WRITE_TOKEN, slot=5, at=3, token=8, expected_token=9, tag=TAIL), Cause.WRONG_INPUT),
        (Row(reasons=FailReason.WRITE_POSITION, slot=5, at=3, position=4, tag=TAIL), Cause.WRONG_INPUT),
        (Row(reasons=FailReason.LANDING, slot=5, at=3, tag=TAIL), Cause.WRITE_NOT_LANDED),
        (Row(reasons=FailReason.RANK_DIGEST, slot=-1, at=3, written=False), Cause.RANK),
        (Row(reasons=TOKEN, slot=5, at=3, token=8, expected_token=9), Cause.WRONG_INPUT),
        (Row(reasons=TOKEN, slot=5, at=3, token=8, expected_token=9, writer=6), Cause.WRONG_INPUT),
        (Row(reasons=POSITION, slot=5, at=3, position=4), Cause.SHIFTED),
        (Row(reasons=1 << 20, slot=5, at=3), Cause.UNKNOWN),
    ],
)
def test_one_row(row: Row, cause: Cause) -> None:
    (finding,) = read(row)
    assert finding.cause is cause and finding.root is None and finding.evidence
    assert cause.words and cause.first_look


def test_shifted_positions_are_one_run() -> None:
    found = read(*(Row(reasons=POSITION, slot=50 + p, at=p, position=p + 1) for p in range(4, 9)))
    assert {f.cause for f in found} == {Cause.SHIFTED} and [f.run for f in found] == [0] * 5
    assert "+1" in found[0].evidence[0]


def test_a_namespace_that_differs_at_the_head() -> None:
    head = splitmix64(CHAIN_ANCHOR ^ 77)
    row = Row(reasons=CHAIN, slot=5, at=0, writer=6, namespace=77, reader_namespace=78, chain_hash=head, previous=None)
    assert causes(row) == [Cause.NAMESPACE]
    assert causes(Row(reasons=CHAIN, slot=5, at=0, writer=6, namespace=77, reader_namespace=78, previous=None)) == [Cause.UNKNOWN]
    # The request had written the slot itself before: more than a key that is too short.
    history = history_of((3, {1: [5]}))
    assert causes(Row(**vars(row) | {"writer_step": 9}), history=history) == [Cause.OVERWRITTEN]


# ---------------------------------------------------------------------------------------------- overwritten


def test_a_page_that_another_request_wrote_and_its_echo() -> None:
    """Positions 16 to 31 belong to request 2 now, whose positions are others."""
    page = [foreign(p, reasons=(CHAIN if p == 16 else 0) | POSITION, previous=(1, 4) if p == 16 else (2, 12)) for p in range(16, 32)]
    echo = Row(reasons=CHAIN, slot=132, at=32, writer_step=6, previous=(2, 12))
    found = read(*page, echo)
    assert {f.cause for f in found} == {Cause.OVERWRITTEN}
    assert [f.run for f in found[:16]] == [0] * 16 and [f.root for f in found] == [None] * 16 + [0]
    assert (found[0].writer, found[0].writer_step) == (2, 12)
    assert "position 32 was stamped in step 6" in " ".join(found[0].evidence)


def test_a_page_of_equal_positions_shows_only_at_its_ends() -> None:
    begin = foreign(16, reasons=CHAIN, position=16, previous=(1, 4))
    end = Row(reasons=CHAIN, slot=132, at=32, writer_step=6, previous=(2, 12))
    found = read(begin, end)
    assert [f.cause for f in found] == [Cause.OVERWRITTEN] * 2 and found[1].root == 0


def test_a_page_at_the_start_shows_only_behind_it() -> None:
    """The overwriting page heads a whole chain: the only break is at the successor, and the slot before it is the bad one."""
    end = Row(reasons=CHAIN, slot=116, at=16, writer_step=6, previous=(2, 12))
    (found,) = read(end)
    assert found.cause is Cause.OVERWRITTEN and found.position == 15 and found.writer == 2


def test_the_tail_of_a_request() -> None:
    assert causes(foreign(3)) == [Cause.OVERWRITTEN]  # the request stamped position 2 in step 5, request 2 wrote 3 in step 12
    assert causes(foreign(3, flags=FREE)) == [Cause.UNKNOWN]  # perhaps never written by this request
    assert causes(foreign(3, writer_step=5)) == [Cause.UNKNOWN]
    assert causes(foreign(3, previous=(9, 5))) == [Cause.UNKNOWN]  # a shared prefix before it: perhaps a wrong page of the cache


def test_older_content_is_not_called_overwritten() -> None:
    echo = Row(reasons=CHAIN, slot=104, at=4, writer_step=6, previous=(2, 3))
    found = read(foreign(3, writer_step=3), echo)
    assert [f.cause for f in found] == [Cause.UNKNOWN] * 2 and found[1].root == 0
    assert causes(foreign(3, writer_step=3)) == [Cause.UNKNOWN]
    assert causes(foreign(3, writer_step=3, flags=FREE)) == [Cause.STALE_PAGE]


def test_without_ids_nothing_is_said_of_writers() -> None:
    assert causes(foreign(3, reader=0, writer=0, previous=(0, 5))) == [Cause.UNKNOWN]


def test_shared_prefixes_accuse_nobody() -> None:
    """Written by others with a whole chain: only the row that is bad says anything."""
    assert causes(Row(reasons=BYTES, slot=5, at=3, writer=6, previous=(6, 2))) == [Cause.BYTES_CHANGED]
    assert causes(Row(reasons=CHAIN, slot=5, at=3, writer=6, writer_step=3, previous=(6, 3))) == [Cause.UNKNOWN]
    assert causes(Row(reasons=CHAIN, slot=5, at=16, writer=6, writer_step=3, previous=(7, 2))) == [Cause.UNKNOWN]


# ---------------------------------------------------------------------------------------------- tables


def test_two_entries_of_one_request_swapped() -> None:
    rows = [
        Row(reasons=CHAIN | POSITION, slot=9, at=2, position=7),
        Row(reasons=CHAIN, slot=3, at=3),
        Row(reasons=CHAIN | POSITION, slot=2, at=7, position=2),
        Row(reasons=CHAIN, slot=8, at=8),
    ]
    found = read(*rows)
    assert {f.cause for f in found} == {Cause.TABLE_ENTRY} and [f.root for f in found] == [None, 0, None, 2]


def test_two_pages_of_one_request_swapped() -> None:
    rows = [Row(reasons=(CHAIN if p in (0, 4) else 0) | POSITION, slot=(p + 4) % 8, at=p, position=(p + 4) % 8) for p in range(8)]
    found = read(*rows, Row(reasons=CHAIN, slot=8, at=8))
    assert {f.cause for f in found} == {Cause.TABLE_ENTRY}


def test_entries_of_two_requests_swapped() -> None:
    mine = foreign(3, position=5, slot=205)
    theirs = Row(reasons=CHAIN | POSITION, slot=103, at=5, position=3, reader=2, writer=1, writer_step=5, previous=(2, 11))
    assert causes(mine, others=(theirs,)) == [Cause.TABLE_ENTRY]
    assert causes(theirs, others=(mine,)) == [Cause.TABLE_ENTRY]


def test_the_step_read_another_slot_than_the_host_names() -> None:
    history = history_of((4, {1: SLOTS}))
    (found,) = read(foreign(3, slot=300), history=history)
    assert found.cause is Cause.TABLE_ENTRY and "slot 103" in found.evidence[0]
    assert causes(Row(reasons=UNWRITTEN | CHAIN, slot=300, at=3), history=history) == [Cause.TABLE_ENTRY]


def test_an_entry_that_changed() -> None:
    to_another = history_of((4, {1: SLOTS}), (10, {1: [100, 101, 102, 205], 2: [203, 204, 205]}))
    row = foreign(3, slot=205, position=2, writer_step=2)
    assert causes(row, history=to_another) == [Cause.TABLE_ENTRY]
    assert causes(foreign(3, slot=205, position=2, writer_step=12), history=to_another) == [Cause.UNKNOWN]  # written after the change
    to_nobody = history_of((4, {1: SLOTS}), (10, {1: [100, 101, 102, 205]}))
    assert causes(row, history=to_nobody) == [Cause.MOVED]
    assert causes(Row(reasons=UNWRITTEN | CHAIN, slot=205, at=3), history=to_nobody) == [Cause.MOVED]


def test_an_announced_copy_is_no_change() -> None:
    history = TableHistory()
    history.record(4, request_ids=[1], tables=np.array([SLOTS]), lengths=[4])
    history.record(10, request_ids=[1], tables=np.array([[100, 101, 102, 205]]), lengths=[4], copies=([103], [205]))
    assert causes(foreign(3, slot=205, writer_step=15), history=history) == [Cause.OVERWRITTEN]
    entry = history.entry(1, 3, step=20)
    assert entry is not None and entry.announced and entry.previous_slot == 103 and entry.since == 10
    before = history.entry(1, 3, step=9)
    assert before is not None and before.slot == 103 and before.previous_slot is None


def test_history_tells_overwritten_from_stale() -> None:
    wrote = history_of((4, {1: SLOTS}))
    assert causes(foreign(3, slot=103, writer_step=12), history=wrote) == [Cause.OVERWRITTEN]
    assert causes(foreign(3, slot=103, writer_step=4), history=wrote) == [Cause.OVERWRITTEN]  # two writers in one step
    assert causes(foreign(3, slot=103, writer_step=3, flags=FREE), history=wrote) == [Cause.STALE_PAGE]  # its own stamp is not there
    assert causes(foreign(3, slot=103, writer_step=3), history=wrote) == [Cause.UNKNOWN]  # or moved there with its record
    took_over = history_of((4, {1: SLOTS}), written=False)
    assert causes(foreign(3, slot=103, writer_step=12), history=took_over) == [Cause.OVERWRITTEN]
    assert causes(foreign(3, slot=103, writer_step=3), history=took_over) == [Cause.UNKNOWN]
    assert causes(foreign(3, slot=103, writer_step=3, flags=FREE), history=took_over) == [Cause.STALE_PAGE]


def test_records_that_were_brought_from_elsewhere() -> None:
    """A load brings older steps, or those of another engine."""
    assert causes(foreign(3, writer_step=500)) == [Cause.UNKNOWN]
    assert causes(foreign(3, slot=103, writer_step=500), history=history_of((4, {1: SLOTS}))) == [Cause.UNKNOWN]
    assert causes(Row(reasons=CHAIN, slot=116, at=16, writer_step=6, previous=(2, 500))) == [Cause.UNKNOWN]
    reused = history_of((4, {1: [*SLOTS, 104]}), (9, {1: [*SLOTS, 104], 2: [103]}))
    echo = Row(reasons=CHAIN, slot=104, at=4, writer_step=4, previous=(2, 1))
    assert causes(foreign(3, slot=103, writer_step=1), echo, history=reused) == [Cause.OVERWRITTEN] * 2


def test_a_write_into_the_page_of_another_is_not_called_shifted() -> None:
    """The write of another request went on from what stands before the slot, so the chain is whole."""
    assert causes(foreign(3, reasons=POSITION | TOKEN)) == [Cause.OVERWRITTEN]
    assert causes(foreign(3, reasons=POSITION)) == [Cause.OVERWRITTEN]
    assert causes(foreign(3, reasons=POSITION, previous=(2, 12))) == [Cause.SHIFTED]  # a shared prefix, all of it by one request


def test_an_announced_copy_onto_a_slot_in_use() -> None:
    history = TableHistory()
    history.record(4, request_ids=[1], tables=np.array([SLOTS]), lengths=[4])
    history.record(9, request_ids=[1], tables=np.array([SLOTS]), lengths=[4], copies=([50], [103]))
    (found,) = read(foreign(3, slot=103, writer_step=2), history=history)
    assert found.cause is Cause.OVERWRITTEN and "copy from slot 50" in " ".join(found.evidence)


def test_a_device_entry_that_leads_to_an_equal_position_of_another() -> None:
    """Only the successor shows it; the other request has its position elsewhere, so the content is not overwritten."""
    history = history_of((4, {1: SLOTS}), (12, {1: SLOTS, 2: [200, 201, 202]}))
    (found,) = read(Row(reasons=CHAIN, slot=103, at=3, writer_step=4, previous=(2, 12)), history=history)
    assert found.cause is Cause.TABLE_ENTRY and found.position == 2


def test_contents_that_changed_places_under_unchanged_tables() -> None:
    history = history_of((4, {1: SLOTS}))
    rows = [Row(reasons=CHAIN | POSITION, slot=101, at=1, position=3), Row(reasons=CHAIN | POSITION, slot=103, at=3, position=1)]
    assert causes(*rows, history=history) == [Cause.MOVED] * 2


def test_one_slot_at_two_positions_of_a_request() -> None:
    history = history_of((4, {1: [100, 101, 102]}), (9, {1: [100, 101, 102, 103, 101]}))
    row = Row(reasons=CHAIN | POSITION, slot=101, at=1, position=4, writer_step=9)
    assert causes(row, history=history) == [Cause.OVERWRITTEN]
    assert causes(row) == [Cause.UNKNOWN]


def test_history_of_the_future_is_not_used() -> None:
    history = history_of((30, {1: [100, 101, 102, 205]}))
    assert history.entry(1, 3, step=20) is None
    assert causes(foreign(3), history=history) == causes(foreign(3))


# ---------------------------------------------------------------------------------------------- echoes


@pytest.mark.parametrize(
    "root",
    [foreign(3), Row(reasons=UNWRITTEN | CHAIN, slot=9, at=3), Row(reasons=CHAIN | TOKEN, slot=9, at=3, token=1, expected_token=2)],
)
def test_the_slot_after_a_bad_one_is_its_echo(root: Row) -> None:
    found = read(Row(reasons=CHAIN, slot=4, at=4), root)  # in any order
    assert found[0].root == 1 and found[0].cause is found[1].cause


def test_a_slot_after_changed_bytes_is_no_echo() -> None:
    assert read(Row(reasons=BYTES, slot=3, at=3), Row(reasons=CHAIN, slot=4, at=4))[1].root is None


def test_a_successor_of_a_slot_out_of_range() -> None:
    bad = Row(reasons=FailReason.SLOT_OUT_OF_RANGE, slot=999, at=3, written=False)
    after = Row(reasons=FailReason.SLOT_OUT_OF_RANGE, slot=4, at=4)
    assert [f.root for f in read(bad, after)] == [None, 0]


def test_a_write_after_a_bad_slot_is_its_echo() -> None:
    """What was due is told by the predecessor's record, so the place is that of the position that was written."""
    shifted = Row(reasons=POSITION, slot=5, at=5, position=8)
    unwritten = Row(reasons=UNWRITTEN | CHAIN, slot=5, at=5)
    for root, due in ((shifted, 9), (unwritten, 1)):
        written = Row(reasons=FailReason.WRITE_POSITION, slot=6, at=due, position=6, tag=TAIL)
        assert read(root, written)[1].root == 0


def test_launches_of_one_step_agree() -> None:
    rows = [foreign(3, tag=HEAD), foreign(3, tag=TAIL), Row(reasons=CHAIN, slot=4, at=4, tag=TAIL)]
    found = read(*rows)
    assert len({f.cause for f in found}) == 1 and found[2].root is not None


def test_rows_that_are_missing_leave_the_rest_unknown() -> None:
    rows = [foreign(p, reasons=POSITION, previous=(2, 12)) for p in (18, 19)]
    assert causes(*rows, complete=False) == [Cause.UNKNOWN] * 2


# ---------------------------------------------------------------------------------------------- history


def test_history_by_pages() -> None:
    history = TableHistory(page_size=4)
    history.record(1, request_ids=[7, 8, 0], tables=np.array([[3, 5], [9, 5], [1, 1]]), lengths=[6, 8, 8])
    entry = history.entry(7, 5, step=1)
    assert entry is not None and entry.slot == 21 and entry.written_step == 1
    assert history.entry(7, 6, step=1) is None and history.entry(0, 0, step=1) is None
    assert history.holders([21, 36, 12], step=1) == {21: [(7, 5), (8, 5)], 36: [(8, 0)], 12: [(7, 0)]}
    history.record(2, request_ids=[7], tables=np.array([[3, 5]]), lengths=[7], finished=[8])
    assert history.holders([21], step=2) == {21: [(7, 5)]} and history.finished(8) == 2
    assert history.entry(8, 5, step=1) is not None  # reports of steps before its end may still be read
    again = history.entry(7, 6, step=2)
    assert again is not None and again.written_step == 2 and history.entry(7, 5, step=2) == entry


def test_a_request_that_was_out_of_the_batch_may_hold_other_slots() -> None:
    """Preempted, and back with pages of the prefix cache: its entries did not change, they are new."""
    history = history_of((4, {1: SLOTS, 2: [5]}), (5, {2: [5]}))
    history.record(6, request_ids=[1], tables=np.array([[100, 101, 60, 61]]), lengths=[4], prefix_lengths=[3])
    entries = [history.entry(1, position, step=6) for position in range(4)]
    assert [entry and (entry.slot, entry.since, entry.written_step, entry.previous_slot) for entry in entries] == [
        (100, 4, 4, None),
        (101, 4, 4, None),
        (60, 6, None, None),
        (61, 6, 6, None),
    ]
    history.record(7, request_ids=[2], tables=np.array([[5]]), lengths=[1], finished=[1])
    history.record(8, request_ids=[1], tables=np.array([[70, 71]]), lengths=[2], prefix_lengths=[2])
    again = history.entry(1, 1, step=8)
    assert again is not None and (again.slot, again.written_step, again.previous_slot) == (71, None, None)


def test_history_is_bounded() -> None:
    history = TableHistory(max_requests=3)
    for step in range(10):
        history.record(step, request_ids=[step + 1], tables=np.array([[step]]), lengths=[1], finished=[step])
    assert len(history) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"request_ids": [1, 2], "tables": np.zeros((1, 4)), "lengths": [1]}, "one row of tables and one length a request"),
        ({"request_ids": [1], "tables": np.zeros((1, 4)), "lengths": [1], "prefix_lengths": [0, 0]}, "one prefix length a request"),
        ({"request_ids": [1], "tables": np.zeros((1, 4)), "lengths": [1], "copies": ([1, 2], [3])}, "of one length, got 2 and 1"),
    ],
)
def test_history_refuses(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^kv-canary: .*{text}"):
        TableHistory().record(1, **arguments)


def test_history_takes_steps_in_order() -> None:
    history = history_of((5, {1: [1]}))
    with pytest.raises(ValueError, match="ascending order, got step 4 after 5"):
        history.record(4, request_ids=[1], tables=np.array([[1]]), lengths=[1])


# ---------------------------------------------------------------------------------------------- what mutated engines showed


def test_a_record_in_its_writers_own_place_is_no_shift() -> None:
    """A sweep meets position 9 of request 2 where position 1 of a cached sequence should be: request 2 wrote it where it had to."""
    history = TableHistory()
    history.record(12, request_ids=[2], tables=np.arange(200, 210)[None], lengths=[10])
    swept = {"reasons": POSITION, "slot": 209, "at": 1, "position": 9, "reader": 0, "writer": 2, "writer_step": 12, "previous": (2, 12)}
    assert causes(Row(**swept), history=history) == [Cause.UNKNOWN]
    assert causes(Row(**swept | {"reasons": POSITION | TOKEN})) == [Cause.UNKNOWN]


def test_cached_pages_in_the_wrong_order_did_not_change_places() -> None:
    """Request 1 took over two slots of request 2 in the wrong order; each record is where request 2 had to write it."""
    history = TableHistory()
    history.record(5, request_ids=[2], tables=np.array([[200, 201]]), lengths=[2])
    history.record(20, request_ids=[2, 1], tables=np.array([[200, 201], [201, 200]]), lengths=[2, 2], prefix_lengths=[2, 2])
    rows = [
        Row(reasons=CHAIN | POSITION, slot=201, at=0, position=1, writer=2, writer_step=5, previous=None),
        Row(reasons=CHAIN | POSITION, slot=200, at=1, position=0, writer=2, writer_step=5, previous=(2, 5)),
    ]
    assert set(causes(*rows, history=history)) == {Cause.TABLE_ENTRY}


def test_a_token_taken_over_is_not_this_requests_input() -> None:
    history = history_of((20, {1: SLOTS}), written=False)
    row = Row(reasons=TOKEN, slot=103, at=3, token=8, expected_token=9, writer=2, writer_step=5)
    assert causes(row, history=history) == [Cause.UNKNOWN]
    assert causes(row) == [Cause.WRONG_INPUT]


def test_a_copy_over_a_slot_in_use_shows_in_tokens_too() -> None:
    history = history_of((12, {1: SLOTS}))
    history.record(20, request_ids=[1], tables=np.array([SLOTS]), lengths=[4], copies=([302, 303], [102, 103]))
    rows = [Row(reasons=TOKEN, slot=100 + p, at=p, token=8, expected_token=9, writer=2, writer_step=5) for p in (3, 2)]
    assert causes(*rows, history=history)[0] is Cause.OVERWRITTEN


def test_an_entry_that_leads_to_the_page_of_another_is_not_moved_content() -> None:
    history = history_of((4, {1: SLOTS}), (10, {1: [100, 101, 102, 205], 2: [203, 204, 205]}))
    (found,) = read(Row(reasons=UNWRITTEN | CHAIN, slot=205, at=3), history=history)
    assert found.cause is Cause.TABLE_ENTRY and "request 2 (position 2)" in found.evidence[0]


def test_a_free_page_behind_a_changed_entry_is_not_called_moved() -> None:
    history = history_of((4, {1: SLOTS}), (10, {1: [100, 101, 102, 205]}))
    row = {"at": 3, "slot": 205, "position": 2, "writer_step": 2, "flags": FREE}
    assert causes(foreign(**row), history=history) == [Cause.UNKNOWN]
    assert causes(foreign(**row, reasons=CHAIN | POSITION | BYTES), history=history) == [Cause.MOVED]  # other bytes came there


def test_a_position_that_the_tables_confirm_is_not_a_wrong_input() -> None:
    """The record before it leads elsewhere, in a page that is not verified."""
    history = history_of((20, {1: SLOTS}))
    row = {"reasons": FailReason.WRITE_POSITION, "at": 1, "position": 3, "writer_step": 20, "tag": TAIL}
    assert causes(Row(slot=103, **row), history=history) == [Cause.UNKNOWN]
    assert causes(Row(slot=101, **row), history=history) == [Cause.WRONG_INPUT]
    assert causes(Row(slot=101, **row), history=history, complete=False) == [Cause.UNKNOWN]  # its predecessor may be bad
