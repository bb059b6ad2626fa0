"""Pictures and notebook tables: they draw what is there, from a state, arrays or a dump's arrays, and refuse what is neither."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest
from test_canary import PAGE, SLOTS, TABLE, Run, make

from jax_kvcanary import viz
from jax_kvcanary.causes import Cause
from jax_kvcanary.events import Event
from jax_kvcanary.report_header import header_fields
from jax_kvcanary.spec import CanaryLaunchTag

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (extra 'viz')")


@pytest.fixture(scope="module")
def run() -> Run:
    """Two requests, of which one has a changed byte at slot 6."""
    made = Run(make())
    made.prefill()
    made.change(1, 6, 0)
    made.headers = []  # type: ignore[attr-defined]
    for _ in range(2):
        made.idle()
        made.headers.append(header_fields(made.report.header, made.canary))  # type: ignore[attr-defined]
    return made


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")


def texts(figure: Any) -> list[str]:
    """All words in a figure."""
    text = importlib.import_module("matplotlib.text").Text
    figure.canvas.draw()
    return [found.get_text() for found in figure.findobj(text) if found.get_text()]


# ------------------------------------------------------------------------------------------------ what is drawn


def test_records_from_everywhere(run: Run) -> None:
    records = np.asarray(run.state.records["full"])
    some = np.array([4, 5, 12])
    for source in (run.state, records, {"records": records}, {"records": {"full": records}}):
        assert np.array_equal(viz.records_of(source), records)
    picked = viz.records_of({"records": records[some], "slots": some, "num_slots": np.array(SLOTS)})
    assert picked.shape == records.shape and np.array_equal(picked[some], records[some]) and not picked[6].any()
    for source, text in (
        (records[:, :4], "records must be uint32 [slots, words], got uint32 (32, 4)"),
        (records.astype(np.int64), "got int64 (32, 16)"),
        ({"records": {"a": records, "b": records}}, "group is required, there are 'a', 'b'"),
        ({"records": records, "slots": some}, "slots must name the 32 records, got 3"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            viz.records_of(source)


def test_violations_from_everywhere(run: Run) -> None:
    rows = np.asarray(run.report.rows)[0, :1]
    event = Event(name="kv", step=1, tag=0, group="full", slot=6)
    assert viz.bad_slots_of(run.state) == {6}
    for violations in (rows, [event], [6], np.array([6])):
        assert viz.bad_slots_of(None, violations) == {6}
    assert viz.bad_slots_of({"records": None, "rows": rows}) == {6} and viz.bad_slots_of(rows) == set()


def test_chain_hashes(run: Run) -> None:
    """The stored hashes fit along a request, and not across two."""
    records = np.asarray(run.state.records["full"])
    assert all(stored == expected for stored, expected in viz.chain_hashes(records, TABLE[1, :5]))
    fits = [stored == expected for stored, expected in viz.chain_hashes(records, [4, 5, 14])]
    assert fits == [True, True, False]


# ------------------------------------------------------------------------------------------------ pictures


@needs_matplotlib
def test_the_slot_map(run: Run) -> None:
    found = texts(viz.slot_map(run.state, page_size=PAGE, labels={1002: "the other"}))
    assert {"request 1001", "the other", "never written", "violation", "8 of 32 slots stamped, 1 bad"} <= set(found)
    bare = texts(viz.slot_map(np.asarray(run.state.records["full"])[:, :8]))
    assert "unknown writer" in bare and "violation" not in bare
    assert "0 of 0 slots stamped" in texts(viz.slot_map(np.zeros((0, 16), np.uint32)))
    many = np.zeros((4096, 16), np.uint32)
    many[:, 8] = np.arange(4096) // 256 + 1
    many[5, 11] = 1
    assert {"and 6 more", "given back"} <= set(texts(viz.slot_map(many, page_size=16, violations=[9, -1, 5000])))


@needs_matplotlib
def test_the_timeline(run: Run) -> None:
    event = Event(name="kv", step=2, tag=int(CanaryLaunchTag.HEAD_K_FULL), group="full", slot=6, cause=Cause.BYTES_CHANGED)
    found = texts(viz.timeline([event, event], checks=run.headers, marks={1: "planted"}, title="t"))  # type: ignore[attr-defined]
    assert {"head k full", "tail k full", "slot 6 (+1): bytes changed", " planted", "t"} <= set(found)
    assert "sweep" in texts(viz.timeline(checks=[(0, {"SWEEP": 3})]))
    assert viz.timeline() is not None


@needs_matplotlib
def test_the_chains(run: Run) -> None:
    found = texts(viz.chains(run.state, {1001: [4, 5, 6], "b": [4, 5, 13]}, words={11: "Hello"}))
    assert {"shared prefix", "Hello", "slot 13", "request 1001", "b"} <= set(found)
    assert sum(text.endswith("expected") for text in found) == 1
    with pytest.raises(ValueError, match="requests must name at least one request"):
        viz.chains(run.state, {})


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("install jax_kvcanary[viz]")):
        viz.slot_map(np.zeros((4, 16), np.uint32))


# ------------------------------------------------------------------------------------------------ tables in notebooks


def test_a_state_as_html(run: Run) -> None:
    text = run.state._repr_html_()
    assert "8 of 32 stamped by 2 requests" in text and "violations of HEAD_K_FULL" in text
    donated = jax.tree.map(lambda leaf: leaf.copy(), run.state)
    donated.records["full"].delete()
    assert "traced or donated" in donated._repr_html_()
    seen = []
    jax.jit(lambda state: seen.append(state._repr_html_()))(run.state)
    assert "traced or donated" in seen[0] and "(32, 16)" in seen[0]
    assert "the mode is off" in make(dataclasses.replace(run.canary.config, mode="off")).init()._repr_html_()


def test_violations_and_events_as_html(run: Run) -> None:
    row = dataclasses.replace(run.rows()[0], source_name="<script>")
    assert "written by request 1001" in row._repr_html_() and "&lt;script&gt;" in row._repr_html_() and "<script>" not in row._repr_html_()
    event = Event(name="<b>", step=2, tag=0, group="full", slot=6, cause=Cause.BYTES_CHANGED, reasons=4, violation=row)
    text = event._repr_html_()
    assert "&lt;b&gt;" in text and "bytes changed after the stamp" in text and "<script>" not in text
    assert "3 rows not stored" in Event(kind="overflow", name="kv", step=1, tag=0, group="full", rows=3)._repr_html_()
