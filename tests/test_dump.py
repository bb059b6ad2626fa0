"""Dumps: every fault of the demo saved and explained in a fresh process, bounds, and files that are damaged or of something else."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import Canary, CanaryBatch, CanaryConfig, Layout, PoolGroup
from jax_kvcanary import dump as dump_module
from jax_kvcanary.causes import Cause
from jax_kvcanary.dump import FORMAT_VERSION, HEAD, UNKNOWN, Dumper, DumpError, encode, load_dump, read_slots
from jax_kvcanary.events import Event
from jax_kvcanary.explain import explain, main, rebuild
from jax_kvcanary.faults import FaultKind, Faults
from jax_kvcanary.layouts import pool_sources
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.recorder import FlightRecorder
from jax_kvcanary.reference import SourceReader
from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.engine import make_canary
from jax_kvcanary.serving.fault_run import RIGHT_CAUSES, FaultyEngine, Planted, judge
from jax_kvcanary.serving.model import pool_shapes
from jax_kvcanary.serving.sampling import SamplingParams
from jax_kvcanary.serving.weights import random_params

PAGED = Layout.from_axes("page slot head dim", interleaved="head")


# ---------------------------------------------------------------------------------------------- every fault of the demo


@dataclasses.dataclass
class Saved:
    """A fault, what the monitor said, and the file; the lines are those at the time of the dump."""

    planted: Planted
    path: Path
    lines: list[str]
    first: Event
    explained: str = ""


class Noting(Dumper):
    """A dumper that notes what it was given."""

    def save(self, kv: Any, state: Any, events: Any, **more: Any) -> Path | None:
        path = super().save(kv, state, events, **more)
        if path is not None:
            self.noted = path, [event.line() for event in events]
        return path


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[FaultKind, Saved]:
    """Each fault planted in a serving engine and dumped, then all explained by one fresh process."""
    config = LlamaConfig()
    params = random_params(config, seed=0)
    sizes = EngineConfig(num_pages=40, max_batch=4, max_context=128, chunk_size=96, decode_steps=1, check_writes=True)
    canary = make_canary(config, sizes, CanaryConfig(strict=True, verify_every=2, sweep_capacity=4 * sizes.page_size))
    faults = Faults(sources=pool_sources(pool_shapes(config, sizes), PAGED), page_size=sizes.page_size, vocabulary=config.vocab_size)
    prompts = [[(7 * i + j) % config.vocab_size for j in range(24 + i)] for i in range(3)]
    folder = tmp_path_factory.mktemp("dumps")
    out: dict[FaultKind, Saved] = {}
    for kind in FaultKind:
        recorder = FlightRecorder(max_batches=32)
        monitor = Monitor(canary, page_size=sizes.page_size, recorder=recorder)
        dumper = Noting(
            canary, folder / kind.value, min_seconds=0, max_files=1, recorder=recorder, with_tokens=kind is FaultKind.FOREIGN_TOKEN
        )
        engine = FaultyEngine(config, params, canary, engine_config=sizes, monitor=monitor, dumper=dumper, faults=faults)
        if kind is FaultKind.FLIP_IDLE:
            engine.add_request([*prompts[0][:20], *range(5, 40)], SamplingParams(max_new_tokens=1))
            engine.run()
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_new_tokens=64))
        for _ in range(3):
            engine.step()
        engine.plant(kind, seed=3)
        for _ in range(16):
            engine.step()
            if dumper.saved:
                break
        assert engine.planted and monitor.health().failures == dumper.failures == 0
        path, lines = dumper.noted
        outcome = judge(engine.planted[0], list(monitor.events))
        assert outcome.event is not None
        out[kind] = Saved(engine.planted[0], path, lines, outcome.event)
    files = [str(saved.path) for saved in out.values()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "jax_kvcanary", "explain", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"\n\n(?=\S+\.kvcanary\.npz: canary)", done.stdout)
    for saved, text in zip(out.values(), parts, strict=True):
        saved.explained = text
    return out


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_is_explained_elsewhere_as_live(dumps: dict[FaultKind, Saved], kind: FaultKind) -> None:
    saved = dumps[kind]
    explained = re.findall(r"kvcanary=violation .*", saved.explained)
    assert explained == saved.lines
    assert saved.first.cause in RIGHT_CAUSES[kind]
    assert f"cause={saved.first.cause.value} " in saved.explained and "this version reads" not in saved.explained
    dump = load_dump(saved.path)
    for event, dumped in zip([rebuild(dump, dumped) for dumped in dump.events], dump.events, strict=True):
        assert event.line() == dumped.fields["line"]
    assert saved.first.cause.words in saved.explained
    assert re.search(r"slot \d+ in steps \d+ to \d+, as the host had it", saved.explained)


def test_words_for_some_faults(dumps: dict[FaultKind, Saved]) -> None:
    flip = dumps[FaultKind.FLIP_IN_USE]
    assert f"layer {flip.planted.layer} " in flip.explained and "bytes: the same that the check saw" in flip.explained
    assert re.search(r"bytes: 1 of 4 sources differ from the stamp: layer", flip.explained)
    assert "chain: whole, its predecessor is slot" in flip.explained or "chain: whole, it begins a chain" in flip.explained
    assert "look first at: who writes KV without stamping it" in flip.explained
    assert re.search(rf"request {flip.planted.request} wrote its position {flip.planted.position} there", flip.explained)
    assert "bytes: all of those that differ are zero" in dumps[FaultKind.ZERO_PAGE].explained
    idle = dumps[FaultKind.FLIP_IDLE]
    assert "chain: whole" in idle.explained and "ended, which had it as its position" in idle.explained
    swap = dumps[FaultKind.SWAP_ENTRIES].explained
    assert "chain: broken" in swap and "still wrong" in swap
    assert re.search(r"token \d+ was given to the step, the scheduler has \d+", dumps[FaultKind.FOREIGN_TOKEN].explained)


def test_tokens_only_if_asked(dumps: dict[FaultKind, Saved]) -> None:
    dump = load_dump(dumps[FaultKind.FLIP_IN_USE].path)
    assert not dump.with_tokens and not any(slot.record[:2].any() for slot in dump.slots)
    case = dump.events[0].case
    assert case is not None and str(case.rows[0].token) == "(not saved)" == f"{case.rows[0].expected_token:d}"
    asked = load_dump(dumps[FaultKind.FOREIGN_TOKEN].path)
    assert asked.with_tokens and any(slot.record[:2].any() for slot in asked.slots)


def test_what_a_dump_holds(dumps: dict[FaultKind, Saved]) -> None:
    saved = dumps[FaultKind.FLIP_IN_USE]
    dump = load_dump(saved.path)
    assert dump.step >= saved.planted.step and dump.meta["versions"]["jax"] == jax.__version__
    assert dump.meta["canary"]["config"]["verify_every"] == 2
    (group,) = dump.groups
    assert [source["dtype"] for source in group.sources] == ["float32"] * 8 and group.leading == 4
    bad = dump.slot("full", saved.planted.slot)
    assert bad is not None and bad.why == "bad" and bad.data is not None
    assert [len(data) for data in bad.data] == [source["read_bytes"] for source in group.sources]
    assert bad.position == saved.planted.position and bad.previous != UNKNOWN
    if bad.previous != HEAD:
        before = dump.slot("full", bad.previous)
        assert before is not None and before.chain == int(bad.record[4]) | int(bad.record[5]) << 32
    assert len(dump.recorder.batches) > 3 if dump.recorder else False
    assert "nobody held it" in explain(dump, slot=0)


# ---------------------------------------------------------------------------------------------- damaged and foreign files


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small dump and its explanation."""
    play = Play()
    play.flip()
    path = Dumper(play.canary, tmp_path_factory.mktemp("small"), min_seconds=0).save(play.kv, play.state, play.events())
    assert path is not None
    return path, explain(load_dump(path))


def test_a_flipped_bit_anywhere_is_an_error(small: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = small
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    places = {
        0,
        1,
        3,
        len(content) - 1,
        len(content) - 64,
        len(content) - 65,
        len(content) - 90,
        *rng.integers(0, len(content), 400).tolist(),
    }
    copy = tmp_path / path.name
    for place in sorted(places):
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(rng.integers(8))
        copy.write_bytes(flipped)
        with pytest.raises(DumpError, match=r"damaged|truncated|no dump"):
            load_dump(copy)


def test_a_truncated_file_is_an_error(small: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = small
    content = path.read_bytes()
    copy = tmp_path / path.name
    for size in {0, 1, 10, 64, 84, 100, len(content) // 2, len(content) - 85, len(content) - 64, len(content) - 1}:
        copy.write_bytes(content[:size])
        with pytest.raises(DumpError, match=r"damaged|truncated|no dump"):
            load_dump(copy)
    copy.write_bytes(content + b"0")
    with pytest.raises(DumpError, match="truncated, damaged, or an archive of something else"):
        load_dump(copy)


def test_foreign_and_newer_files(small: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = small
    other = tmp_path / "other.npz"
    np.savez(other, a=np.zeros(3))
    with pytest.raises(DumpError, match="archive of something else"):
        load_dump(other)
    (tmp_path / "text").write_text("not a dump")
    with pytest.raises(DumpError, match=r"text: it is no dump of jax_kvcanary"):
        load_dump(tmp_path / "text")
    with np.load(path) as archive:  # NumPy reads it as well
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(bytes(arrays.pop("meta")))
    other.write_bytes(encode(meta, arrays))
    assert explain(load_dump(other)).split("\n", 1)[1] == text.split("\n", 1)[1]
    other.write_bytes(encode(meta | {"version": FORMAT_VERSION + 1, "versions": {"jax_kvcanary": "9.9"}}, arrays))
    with pytest.raises(DumpError, match=r"it has format 2 \(jax_kvcanary 9.9\), this version reads format 1"):
        load_dump(other)
    other.write_bytes(encode({"format": "something"}, arrays))
    with pytest.raises(DumpError, match="and yet it is no dump"):
        load_dump(other)
    for name in arrays:
        other.write_bytes(encode(meta, {key: value for key, value in arrays.items() if key != name}))
        with pytest.raises(DumpError, match="a part of it does not fit the others: KeyError"):
            load_dump(other)
    stream = io.BytesIO()
    np.savez(stream, meta=np.array([object()], dtype=object), **arrays)
    made = bytearray(stream.getvalue())
    made[-2:] = (84).to_bytes(2, "little")
    made += dump_module._TRAILER
    other.write_bytes(bytes(made) + dump_module.hashlib.sha256(made).hexdigest().encode())
    with pytest.raises(DumpError, match="cannot be read: ValueError"):  # no pickles
        load_dump(other)
    assert main([str(other), str(path), str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out.strip() == text and err.count("explain: ") == 2 and "No such file" in err
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


# ---------------------------------------------------------------------------------------------- bounds


class Play:
    """Two requests in a small pool, of which one slot can be flipped."""

    SLOTS, WIDTH = 32, 8

    def __init__(self, config: CanaryConfig | None = None, **options: Any) -> None:
        self.kv = [jnp.arange(self.SLOTS * 16, dtype=jnp.float32).reshape(8, 4, 2, 8) + 100 * layer for layer in range(2)]
        self.canary = _canary(config or CanaryConfig(strict=True, verify_every=1))
        self.state, self.monitor = self.canary.init(), Monitor(self.canary, page_size=4, **options)
        self.table = np.zeros((3, self.WIDTH), np.int32)
        self.table[1], self.table[2] = range(4, 12), range(20, 28)
        self.length = 0
        self.step(3)

    def step(self, new: int = 1) -> list[Event]:
        tokens = np.zeros(8, np.int32)
        tokens[: 2 * new] = 7
        batch = CanaryBatch(
            req_pool_indices=np.array([1, 2], np.int32),
            prefix_lens=np.full(2, self.length, np.int32),
            extend_seq_lens=np.full(2, new, np.int32),
            req_to_token=self.table,
            input_ids=tokens,
            request_ids=np.array([71, 72], np.int32),
        )
        self.length += new
        _, self.kv, self.state, _, report = _step(self.canary)(self.kv, self.state, batch)
        return self.monitor.observe(report)

    def flip(self, slot: int = 5) -> None:
        self.kv[1] = self.kv[1].at[slot // 4, slot % 4, 1, 3].add(1)
        self.step()

    def events(self) -> list[Event]:
        self.monitor.flush()
        return list(self.monitor.events)


_made: dict[Any, Any] = {}


def _canary(config: CanaryConfig) -> Canary:
    return Canary([jax.ShapeDtypeStruct((8, 4, 2, 8), jnp.float32)] * 2, PAGED, config=config, copy_page_size=4)


def _step(canary: Canary) -> Any:
    if canary not in _made:
        _made[canary] = jax.jit(canary.guard(lambda kv: (None, kv)))
    return _made[canary]


def test_number_rate_and_size_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    play, now = Play(), [0.0]
    play.flip()
    folder = tmp_path / "made" / "here"
    dumper = Dumper(play.canary, folder, max_files=2, min_seconds=10, clock=lambda: now[0])
    events = play.events()
    assert dumper.save(play.kv, play.state, []) is None and not folder.exists()
    first = dumper.save(play.kv, play.state, events)
    assert first is not None and first.parent == folder
    assert dumper.save(play.kv, play.state, events) is None and dumper.skipped == 1
    now[0] = 10.0
    assert dumper.save(play.kv, play.state, events) is not None
    now[0] = 30.0
    assert dumper.save(play.kv, play.state, events) is None and dumper.save(play.kv, play.state, events) is None
    assert (dumper.saved, dumper.skipped, dumper.failures) == (2, 3, 0) and len(list(folder.iterdir())) == 2
    assert caplog.text.count("kvcanary=dumps_full") == 1
    assert all(name.name.endswith(".kvcanary.npz") for name in folder.iterdir())


def test_what_has_no_room_is_left_out(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    play = Play(recorder=recorder)
    recorder.record(0, request_ids=[71], tables=np.arange(9000)[None], lengths=[9000])
    play.flip()
    whole = Dumper(play.canary, tmp_path / "whole", min_seconds=0, recorder=recorder).save(play.kv, play.state, play.events())
    assert whole is not None and load_dump(whole).recorder is not None
    without = Dumper(play.canary, tmp_path / "none", min_seconds=0).save(play.kv, play.state, play.events())
    assert without is not None
    sizes = whole.stat().st_size, without.stat().st_size
    for limit in (sizes[0] - 1, sizes[1] + 100, sizes[1] - 100):
        dumper = Dumper(play.canary, tmp_path / str(limit), max_bytes=limit, min_seconds=0, recorder=recorder)
        path = dumper.save(play.kv, play.state, play.events())
        assert path is not None and path.stat().st_size <= limit
        dump = load_dump(path)
        assert dump.recorder is None and dump.meta["recorder_left_out"] and dump.events
        assert "bytes_changed" in explain(dump)
    assert "bytes: not saved, there was no room" in explain(dump)
    tiny = Dumper(play.canary, tmp_path / "tiny", max_bytes=1000, min_seconds=0)
    assert tiny.save(play.kv, play.state, play.events()) is None and tiny.failures == 1
    assert not (tmp_path / "tiny").exists()


def test_a_failure_leaves_no_file_and_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    play = Play()
    play.flip()
    dumper = Dumper(play.canary, tmp_path / "full", min_seconds=0)

    def no_room(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump_module.os, "fsync", no_room)
    assert dumper.save(play.kv, play.state, play.events()) is None
    assert dumper.failures == 1 and list((tmp_path / "full").iterdir()) == []
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert dumper.save([play.kv[0]], play.state, play.events()) is None and dumper.failures == 2  # another pool
    (tmp_path / "file").write_text("")
    assert Dumper(play.canary, tmp_path / "file", min_seconds=0).save(play.kv, play.state, play.events()) is None


def test_a_monitor_can_call_it(tmp_path: Path) -> None:
    """In mode "raise" too; and the bytes may be later ones than those that were found bad, which is said."""
    play = Play(mode="raise")
    dumper = Dumper(play.canary, tmp_path, min_seconds=0)
    play.monitor.on_event = dumper.hook(lambda: (play.kv, play.state))
    with pytest.raises(RuntimeError, match="1 violation of the KV cache"):
        play.flip()
        play.monitor.flush()
    (path,) = tmp_path.iterdir()
    text = explain(load_dump(path))
    assert "what slot 5 held right after the step that found it (step 1)" in text and "not known, not checked" in text
    play.kv[1] = play.kv[1].at[1, 1, 1, 3].add(1)
    play.step()
    later = dumper.save(play.kv, play.state, [play.monitor.events[0]], request_ids=[71], tables=play.table[1:2])
    assert later is not None
    text = explain(load_dump(later))
    assert "held 1 step after the one that found it (step 2)" in text and "others than the check saw: changed since" in text
    assert "chain: whole, its predecessor is slot 4, position 0 of request 71, stamped in step 0" in text
    play.kv[1] = play.kv[1].at[1, 1, 1, 3].add(-2)
    play.state = play.canary.reset(play.state, slots=np.array([0], np.int32), page_size=4)
    mended = dumper.save(play.kv, play.state, [play.monitor.events[0]], request_ids=[71], tables=play.table[1:2])
    assert mended is not None and "bytes: all 128 hash to what was stamped" in explain(load_dump(mended))
    play.state = play.canary.reset(play.state, slots=np.array([1], np.int32), page_size=4)
    gone = dumper.save(play.kv, play.state, [play.monitor.events[0]])
    assert gone is not None and "record: all zero, nothing is stamped there" in explain(load_dump(gone))


@pytest.mark.parametrize("real_kv", ["none", "partial"])
def test_other_configs(tmp_path: Path, real_kv: str) -> None:
    play = Play(CanaryConfig(strict=True, real_kv=real_kv, verify_every=0))
    play.table[1, 1] = 22
    play.step()
    path = Dumper(play.canary, tmp_path, min_seconds=0).save(
        play.kv, play.state, play.events(), request_ids=[71, 72], tables=play.table[1:], lengths=[play.length] * 2
    )
    assert path is not None
    text = explain(load_dump(path))
    assert "chain: broken" in text and ("bytes: none are covered" in text) == (real_kv == "none")
    assert Cause(play.events()[0].cause).value in text


def test_groups_with_slots_of_their_own(tmp_path: Path) -> None:
    """A pool of a window besides the full one: its slots, its predecessors through the mapping, its labels."""
    pool = [jnp.arange(32 * 16, dtype=jnp.float32).reshape(8, 4, 2, 8) + 100 * layer for layer in range(2)]
    canary = Canary(
        pool,
        PAGED,
        config=CanaryConfig(strict=True, verify_every=1),
        groups=(PoolGroup(name="full", layers=(0,)), PoolGroup(name="window", layers=(1,), swa_window_size=4)),
    )
    mapping = np.arange(32, dtype=np.int32)
    mapping[4:12] = range(20, 28)
    table = np.zeros((2, 8), np.int32)
    table[1] = range(4, 12)
    monitor, state, step = Monitor(canary), canary.init(), _step(canary)
    for prefix, new in ((0, 5), (5, 1)):
        batch = CanaryBatch(
            req_pool_indices=np.array([1], np.int32),
            prefix_lens=np.array([prefix], np.int32),
            extend_seq_lens=np.array([new], np.int32),
            req_to_token=table,
            input_ids=np.array([7] * 5, np.int32),
            request_ids=np.array([71], np.int32),
            full_to_swa_index_mapping=mapping,
        )
        _, pool, state, _, report = step(pool, state, batch)
        monitor.observe(report)
        pool[1] = pool[1].at[23 // 4, 23 % 4, 1, 3].add(prefix == 0)
    monitor.flush()
    (event,) = monitor.events
    assert (event.group, event.slot, event.position) == ("window", 23, 3)
    dumper = Dumper(canary, tmp_path, min_seconds=0)
    path = dumper.save(pool, state, [event], request_ids=[71], tables=table[1:], lengths=[6], full_to_swa_index_mapping=mapping)
    assert path is not None
    dump = load_dump(path)
    assert {(slot.group, slot.slot, slot.why) for slot in dump.slots if slot.why != "neighbour"} == {
        ("window", 23, "bad"),
        ("window", 22, "predecessor"),
    }
    text = explain(dump)
    assert "chain: whole, its predecessor is slot 22, position 2 of request 71" in text and "sources differ from the stamp: layer 1" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int4"])
@pytest.mark.parametrize("axes", ["page slot head dim", "page head slot dim", "layer slot head dim", "dim head slot"])
def test_bytes_are_read_as_the_reference_reads_them(dtype: str, axes: str) -> None:
    if (dtype, axes) == ("int4", "dim head slot"):
        pytest.skip("two slots share a byte")
    sizes = {"page": 4, "slot": 6, "head": 3, "dim": 32, "layer": 2}
    shape = tuple(sizes[axis] for axis in axes.split())
    bits = np.random.default_rng(1).integers(0, 16 if dtype == "int4" else 256, shape).astype(np.uint8)
    pool = jnp.asarray(bits.astype(np.int8) % 8 if dtype == "int4" else bits).astype(dtype)
    sources = pool_sources(pool, Layout.from_axes(axes, half="K"))
    slots = np.array([0, 5, sources.num_slots - 1, 5])
    buffers = sources.buffers(pool)
    reader = SourceReader(sources.sources, [np.asarray(buffer) for buffer in buffers], 2)
    for source, descriptor in zip(sources.sources, reader.descriptors, strict=True):
        want = reader.read(descriptor, slots)
        np.testing.assert_array_equal(read_slots(source, buffers[descriptor.buffer], slots), want)
        few = source.leading(16)
        np.testing.assert_array_equal(read_slots(few, buffers[descriptor.buffer], slots), want[:, :16])
