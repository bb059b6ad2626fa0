"""What inspect says of compiled steps: every copy in those written the wrong way, and nothing of the right ones."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvcanary import (
    BlockTable,
    Canary,
    CanaryBatch,
    CanaryConfig,
    Layout,
    ViolationLog,
    allocate_records,
    backend_info,
    cli,
    make_packed_source,
    verify_fused,
)
from jax_kvcanary.inspection import Inspection, command_buffers, inspect, main

pytestmark = pytest.mark.skipif(not backend_info()["cpu"].compiled, reason=backend_info()["cpu"].detail)

LAYERS, PAGES, PAGE, HEADS, DIM, BATCH = 2, 64, 16, 4, 64, 2  # a layer is 1 MiB of float32
LAYER_BYTES = PAGES * PAGE * HEADS * DIM * 4
LAYOUT = "page slot head dim"
CPU = jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def _on_cpu():
    with jax.default_device(CPU):
        yield


@functools.cache
def canary(layout: str = LAYOUT, mode: str = "log", **options: Any) -> Canary:
    shape = tuple({"page": PAGES, "slot": PAGE, "head": HEADS, "dim": DIM}[axis] for axis in layout.split())
    pool = [jax.ShapeDtypeStruct(shape, jnp.float32)] * LAYERS
    return Canary(pool, Layout.from_axes(layout, interleaved="head"), config=CanaryConfig(mode=mode, **options))


def make_pool() -> list[jax.Array]:
    return [jnp.zeros((PAGES, PAGE, HEADS, DIM), jnp.float32) for _ in range(LAYERS)]


def make_batch() -> CanaryBatch:
    table = np.arange(PAGE, PAGE + 4 * 64, dtype=np.int32).reshape(4, 64)
    fields = {"req_pool_indices": np.array([1, 2], np.int32), "prefix_lens": np.array([9, 3], np.int32)}
    return jax.tree.map(
        jnp.asarray,
        CanaryBatch(**fields, extend_seq_lens=np.ones(2, np.int32), req_to_token=table, input_ids=np.array([5, 6], np.int32)),
    )


def model(kv: list[jax.Array], batch: CanaryBatch) -> tuple[list[jax.Array], jax.Array]:
    """Writes a row of each request to every layer and reads some pages of it."""
    slots = batch.req_to_token[batch.req_pool_indices, batch.prefix_lens]
    x, out = jnp.ones((BATCH, HEADS, DIM), jnp.float32), []
    for layer in kv:
        layer = layer.at[slots // PAGE, slots % PAGE].set(x.astype(layer.dtype))
        seen = layer[:2].reshape(-1, HEADS, DIM)
        x = x + jnp.tanh(jnp.einsum("bhd,shd,she->bhe", x, seen, seen))
        out.append(layer)
    return out, x


def right(kv: Any, state: Any, batch: Any, *, of: Canary | None = None) -> Any:
    of = of or canary()
    kv, state, verdict = of.head(kv, state, batch)
    kv, x = model(kv, batch)
    state, verdict, report = of.tail(kv, state, batch, verdict)
    return kv, state, x, verdict, report


def tail_passes(kv: Any, state: Any, batch: Any) -> Any:
    """A second head where the tail should be."""
    kv, state, verdict = canary().head(kv, state, batch)
    kv, x = model(kv, batch)
    state, verdict, report = canary().tail(kv, state, batch, verdict)
    kv, state, verdict = canary().head(kv, state, batch)
    return kv, state, x, verdict, report


def head_of_a_reader(kv: Any, state: Any, batch: Any) -> Any:
    """A step that only reads, with the head: a scorer."""
    kv, state, verdict = canary().head(kv, state, batch)
    return kv, state, sum(jnp.sum(layer[:2]) for layer in kv), verdict


def head_of_a_silent_reader(kv: Any, state: Any, batch: Any) -> Any:
    """The same, and the pool is no result."""
    return head_of_a_reader(kv, state, batch)[1:]


def reading_only(kv: Any, state: Any, batch: Any) -> Any:
    """The right way for a step that only reads."""
    _, state, verdict = canary(checks="tail").head(kv, state, batch)
    state, verdict, report = canary(checks="tail").tail(kv, state, batch, verdict)
    return state, sum(jnp.sum(layer[:2]) for layer in kv), verdict, report


def head_forgotten(kv: Any, state: Any, batch: Any) -> Any:
    """The pool that the head returned is not used."""
    _, state, verdict = canary().head(kv, state, batch)
    kv, x = model(kv, batch)
    state, verdict, report = canary().tail(kv, state, batch, verdict)
    return kv, state, x, verdict, report


def turned(kv: Any, state: Any, batch: Any) -> Any:
    """The pool is brought into another order of axes before each check."""
    of = canary("page head slot dim")
    _, state, verdict = of.head([layer.transpose(0, 2, 1, 3) for layer in kv], state, batch)
    kv, x = model(kv, batch)
    state, verdict, report = of.tail([layer.transpose(0, 2, 1, 3) for layer in kv], state, batch, verdict)
    return kv, state, x, verdict, report


def widened(kv: Any, state: Any, batch: Any) -> Any:
    """A pool of half the width is converted for the check."""
    _, state, verdict = canary(checks="tail").head([layer.astype(jnp.float32) for layer in kv], state, batch)
    kv, x = model(kv, batch)
    state, verdict, report = canary(checks="tail").tail([layer.astype(jnp.float32) for layer in kv], state, batch, verdict)
    return kv, state, x, verdict, report


def sunk(kv: Any, state: Any, batch: Any) -> Any:
    """Neither the state nor a verdict comes out of the step."""
    return right(kv, state, batch)[0]


def look(
    step: Callable[..., Any], *, of: Canary | None = None, donate: tuple[int, ...] = (0, 1), kv: Any = None, **more: Any
) -> Inspection:
    state = (of or canary()).init()
    return inspect(jax.jit(step, donate_argnums=donate), make_pool() if kv is None else kv, state, make_batch(), **more)


def without(donate: tuple[int, ...] = (0,)) -> Any:
    return jax.jit(model, donate_argnums=donate), (make_pool(), make_batch())


# ------------------------------------------------------------------------------------------------ right ones


@pytest.mark.parametrize(("checks", "compared"), [("head", False), ("tail", False), ("both", True)])
def test_a_right_step_has_nothing_to_change(checks: str, compared: bool) -> None:
    of = canary(checks=checks)
    found = look(functools.partial(right, of=of), of=of, without=without() if compared else None)
    assert found.good and found.findings == () and found.notes == (), found.describe()
    assert found.targets["kvcanary_write_v1"] == 1 and found.plain == 0
    assert found.targets["kvcanary_verify_fused_v1"] == sum(call.operation == "verify_fused" for call in found.calls)
    assert found.platform == "cpu" and found.pool_bytes == LAYERS * LAYER_BYTES
    assert [call.launch for call in found.calls if call.passes] == ([] if checks == "tail" else ["HEAD_K_FULL"])
    if compared:
        assert found.added is not None and 0 < found.added.temp < LAYER_BYTES and found.added_collectives == {}
        assert "more than without the canary:" in found.describe()
    assert found.describe().endswith("nothing to change")


def test_a_right_reader_has_nothing_to_change() -> None:
    found = look(reading_only, of=canary(checks="tail"), donate=(1,))
    assert found.good and found.notes == (), found.describe()


def test_the_engine_has_nothing_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    """What the command inspects if it is given nothing: a loop of decode steps."""
    assert cli.main(["inspect"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing to change" and "more than without the canary" in "".join(lines)
    assert "  verify_fused HEAD_K_FULL: hands on 2 pool arrays, in a loop" in lines


def test_mode_off_is_the_program_without() -> None:
    off = canary(mode="off")

    def step(kv: Any, state: Any, batch: Any) -> Any:
        return right(kv, state, batch, of=off)

    found = look(right, without=lambda: (jax.jit(step, donate_argnums=(0, 1)), (make_pool(), off.init(), make_batch())))
    bare = look(right, without=without())
    assert found.added == bare.added and found.good
    assert look(step, of=off).notes == ("there is no canary call in this step",)


# ------------------------------------------------------------------------------------------------ wrong ones


READER = "verify_fused HEAD_K_FULL hands on a pool that the step only reads"


@pytest.mark.parametrize(
    ("step", "donate", "compared", "kind", "advice"),
    [
        (tail_passes, (0, 1), False, "copy", "HEAD_K_FULL hands the pool on after the step's last update: let the tail only read it"),
        (head_of_a_reader, (1,), True, "copy", f"{READER}: donate the pool, or use a check that only reads"),
        (head_of_a_silent_reader, (1,), False, "copy", f"{READER}: donate the pool, or use a check that only reads"),
        (turned, (0, 1), True, "transpose", "the pool goes through transpose before verify_fused HEAD_K_FULL: give it as it lies"),
    ],
)
def test_copies_are_found(step: Any, donate: Any, compared: bool, kind: str, advice: str) -> None:
    of = canary("page head slot dim") if step is turned else canary()
    other: Any = None
    if compared:
        reads = step in (head_of_a_reader, head_of_a_silent_reader)
        other = (jax.jit(lambda kv, batch: sum(jnp.sum(layer[:2]) for layer in kv)), (make_pool(), make_batch())) if reads else without()
    found = look(step, of=of, donate=donate, without=other)
    (finding,) = [one for one in found.findings if one.kind == kind]
    assert finding.bytes >= LAYER_BYTES and finding.count == len(finding.instructions) >= 1
    assert any(advice in line for line in finding.advice), found.describe()
    assert f"  change: {finding.advice[0]}" in found.describe() and not found.good


def test_a_head_whose_pool_is_not_used_is_found() -> None:
    (finding,) = look(head_forgotten).findings
    assert finding.kind == "copy" and finding.bytes >= LAYERS * LAYER_BYTES
    assert finding.advice == (
        "the step goes on with the pool from before verify_fused HEAD_K_FULL: go on with the pool that comes back from it",
    )


def by_the_op(*, passes: bool, implementation: str = "auto", mode: int = 2) -> Inspection:
    """A step with one op and no canary."""

    def step(kv: Any, records: Any, log: Any, batch: Any) -> Any:
        source = make_packed_source(buffer=kv[0], page_size=PAGE, bytes_per_token=HEADS * DIM * 4, read_bytes=HEADS * DIM * 4)
        real = {"real_kv_sources": source * LAYERS, "real_kv_buffers": tuple(kv), "pass_through": passes} if mode else {}
        made = verify_fused(
            records=records, log=log, req_pool_indices=batch.req_pool_indices, prefix_lens=batch.prefix_lens,
            req_to_token=batch.req_to_token, launch_tag=0, real_kv_hash_mode=mode, implementation=implementation, **real,
        )  # fmt: skip
        kv, x = model(list(made.real_kv_buffers) if passes else kv, batch)
        return kv, made.log, x

    records, log = allocate_records(slots=PAGES * PAGE), ViolationLog.allocate(ring_capacity=4)
    return inspect(jax.jit(step, donate_argnums=(0, 2)), make_pool(), records, log, make_batch())


def test_a_head_that_only_reads_is_found() -> None:
    assert by_the_op(passes=True).good
    (finding,) = by_the_op(passes=False).findings
    assert finding.kind == "copy" and finding.bytes >= LAYERS * LAYER_BYTES
    assert finding.advice == (
        "verify_fused HEAD_K_FULL only reads the pool, and the step updates it afterwards: hand it on (pass_through=True, or Canary.head) "
        "and go on with the pool that comes back",
    )


def test_a_converted_pool_is_found() -> None:
    kv = [layer.astype(jnp.bfloat16) for layer in make_pool()]
    found = look(widened, of=canary(checks="tail"), kv=kv)
    (finding,) = [one for one in found.findings if one.kind == "convert"]
    assert finding.bytes >= LAYER_BYTES and "convert_element_type" in finding.advice[0], found.describe()


def test_a_removed_check_is_found() -> None:
    found = look(sunk, donate=(0,))
    (finding,) = found.findings
    assert finding.kind == "removed" and "return the state" in finding.advice[0], found.describe()


def test_a_pool_that_is_not_donated_is_a_note() -> None:
    found = look(right, donate=())
    assert found.good and found.notes == ("the pool is updated and not donated: a step then copies it with and without the canary",)
    assert look(right, donate=(), without=without(donate=())).good


def test_the_plain_path() -> None:
    found = by_the_op(passes=False, implementation="jax", mode=0)
    assert found.targets == {} and found.plain == len(found.calls) == 1
    assert "1 of them as plain JAX operations" in found.describe() and "give the pool as pool=" in found.notes[0]


# ------------------------------------------------------------------------------------------------ several devices


def sharded(inside: bool) -> Inspection:
    mesh = jax.make_mesh((8,), ("tensor",), devices=jax.devices("cpu"), axis_types=(AxisType.Auto,))
    pool = jax.device_put(jnp.zeros((PAGES, PAGE, 8 * DIM), jnp.float32), NamedSharding(mesh, P(None, None, "tensor")))
    lens = jnp.array([20, 7], jnp.int32)

    def check(pool: Any, lens: Any) -> Any:
        row = pool.shape[-1] * 4
        out = verify_fused(
            records=allocate_records(slots=PAGES * PAGE), log=ViolationLog.allocate(ring_capacity=4),
            req_pool_indices=jnp.arange(BATCH, dtype=jnp.int32), prefix_lens=lens, padding_req=None, launch_tag=0, real_kv_hash_mode=2,
            req_to_token=BlockTable(jnp.arange(1, 17, dtype=jnp.int32).reshape(BATCH, 8), PAGE), pass_through=True,
            real_kv_sources=make_packed_source(buffer=pool, page_size=PAGE, bytes_per_token=row, read_bytes=row), real_kv_buffers=(pool,),
        )  # fmt: skip
        pool = out.real_kv_buffers[0].at[lens // PAGE, lens % PAGE].set(1.0)
        return pool, out.log.write_index

    step = check
    if inside:
        specs = P(None, None, "tensor")
        step = jax.shard_map(check, mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P("tensor")), check_vma=False)
    return inspect(jax.jit(step, donate_argnums=0), pool, lens, pool=pool)


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight virtual CPU devices")
def test_the_gather_of_a_sharded_pool_is_found() -> None:
    found = sharded(inside=False)
    (finding,) = [one for one in found.findings if one.kind == "gather"]
    assert finding.bytes == PAGES * PAGE * 8 * DIM * 4 and found.collectives["all-gather"] >= 1
    assert "use ShardedOps, or call the canary inside jax.shard_map" in finding.advice[0], found.describe()
    right_one = sharded(inside=True)
    assert right_one.good and right_one.collectives == {} and right_one.calls[0].sharded, right_one.describe()


# ------------------------------------------------------------------------------------------------ traces, errors, the command


def test_command_buffers_of_a_trace(tmp_path: Any) -> None:
    assert not command_buffers(tmp_path).available
    (tmp_path / "x.json.gz").write_bytes(b"no gzip")
    assert "not available: BadGzipFile" in command_buffers(tmp_path).detail
    inner = tmp_path / "plugins" / "profile"
    inner.mkdir(parents=True)

    def event(name: str, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "args": args}

    def write(events: list[Any]) -> None:
        (inner / "perfetto_trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        (tmp_path / "x.json.gz").unlink(missing_ok=True)

    write([event("fusion")])
    assert not command_buffers(tmp_path).available
    write([event("void kvcanary::verify(...)", graph_id=3), event("kvcanary_write_kernel"), event("cuGraphLaunch")])
    made = command_buffers(tmp_path)
    assert (made.available, made.canary, made.inside, made.graphs) == (True, 2, 1, 1)
    assert "1 of 2 launches" in made.detail


def test_bad_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match=re.escape("inspect takes what jax.jit returned, got function")):
        inspect(model, make_pool())
    assert main(["nothing"]) == 2 and "named as module:function" in capsys.readouterr().err
    assert main(["json:dumps"]) == 2
    assert main(["no_such_module_here:f"]) == 2


def given() -> Any:
    """A step as the command takes it."""
    return jax.jit(turned, donate_argnums=(0, 1)), (make_pool(), canary("page head slot dim").init(), make_batch())


def test_the_command_inspects_a_given_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main([f"{__name__}:given"]) == 1
    out = capsys.readouterr().out
    assert "transpose: a pool-sized array is transposed" in out and "describe its axes by the layout" in out
