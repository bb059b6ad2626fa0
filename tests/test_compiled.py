"""What the compiler makes of a checked step: custom calls, recompilation, collectives, and copies of the pool."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kvcanary import (
    BlockTable,
    ViolationLog,
    allocate_records,
    backend_info,
    make_packed_source,
    plan,
    scatter_req_token_ids,
    verify,
    verify_fused,
    write,
)

pytestmark = pytest.mark.skipif(not backend_info()["cpu"].compiled, reason=backend_info()["cpu"].detail)

LAYERS, PAGES, PAGE, DIM = 4, 64, 16, 256  # a layer is 1 MiB of float32
SLOTS, BATCH, BLOCKS = PAGES * PAGE, 2, 8
LAYER_BYTES = PAGES * PAGE * DIM * 4
POOL_BYTES = LAYERS * LAYER_BYTES
SLACK = 64 * 1024  # "a few KiB", the plan's own arrays, and one gathered batch
CPU = jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def _on_cpu():
    with jax.default_device(CPU):
        yield


def compiled(function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def pool_copies(text: str, stacked: bool) -> list[str]:
    """Copies of a whole pool, or of a layer's array, in compiled text."""
    shapes = [f"f32[{PAGES},{PAGE},{DIM}]"] + ([f"f32[{LAYERS},{PAGES},{PAGE},{DIM}]"] if stacked else [])
    copies = re.findall(r"= (\S+?)(?:\{[^}]*\})? (copy|copy-start)\(", text)
    return [f"{op} {shape}" for shape, op in copies if shape in shapes]


# ------------------------------------------------------------------------------------------------ the step


def model_layer(pool: jax.Array, slots: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write this step's keys, then attend over the first pages: an in-place update and a read of one layer."""
    pool = pool.at[slots // PAGE, slots % PAGE].set(x)
    seen = pool[:2].reshape(-1, DIM)
    return pool, x + jax.nn.softmax(x @ seen.T) @ seen


def run_model(pool: Any, slots: jax.Array, x: jax.Array) -> tuple[Any, jax.Array]:
    if isinstance(pool, list):
        out = []
        for layer in pool:
            layer, x = model_layer(layer, slots, x)
            out.append(layer)
        return out, x

    def body(carry: Any, index: Any) -> Any:
        stack, x = carry
        layer, x = model_layer(stack[index], slots, x)
        return (jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0), x), None

    (pool, x), _ = jax.lax.scan(body, (pool, x), jnp.arange(LAYERS))
    return pool, x


def sources_of(pool: Any) -> tuple[Any, tuple[Any, ...]]:
    """One source a layer, on the arrays as they are: a stack is one buffer with an offset a layer."""
    if isinstance(pool, list):
        source = make_packed_source(buffer=pool[0], page_size=PAGE, bytes_per_token=DIM * 4, read_bytes=DIM * 4)
        return source * LAYERS, tuple(pool)
    from jax_kvcanary import RealKvSource

    return tuple(
        RealKvSource.general(
            buffer_shape=pool.shape, buffer_dtype=pool.dtype, pages=PAGES, page_size=PAGE, page_stride=PAGE * DIM * 4,
            token_stride=DIM * 4, run_bytes=DIM * 4, offset=layer * LAYER_BYTES, buffer_index=0,
        )
        for layer in range(LAYERS)
    ), (pool,)  # fmt: skip


def head_and_tail(
    state: Any, lens: jax.Array, *, checked: bool, head_passes: bool = True, fused: bool = True
) -> tuple[Any, jax.Array]:  # fmt: skip
    """A decode step: head check, model, tail check and stamp."""
    records, log, pool, table, x = state
    rows = jnp.arange(BATCH, dtype=jnp.int32)
    slots = table[rows, lens // PAGE] * PAGE + lens % PAGE
    batch = {"req_pool_indices": rows, "prefix_lens": lens, "req_to_token": BlockTable(table, PAGE), "padding_req": None}
    ask = {"real_kv_hash_mode": 2, "padding_slot": None}
    if checked:
        sources, buffers = sources_of(pool)
        common = ask | {"records": records, "real_kv_sources": sources, "real_kv_buffers": buffers}
        laid_out = plan(**batch, extend_seq_lens=jnp.ones_like(lens), verify_capacity=256, write_req_capacity=BATCH)
        if fused:
            head = verify_fused(**batch, **common, log=log, launch_tag=0, pass_through=head_passes)
        else:
            head = verify(**common, plan=laid_out.verify, log=log, launch_tag=0, pass_through=head_passes)
        log = head.log
        if head_passes:
            pool = list(head.real_kv_buffers) if isinstance(pool, list) else head.real_kv_buffers[0]
    pool, y = run_model(pool, slots, x)
    if checked:
        common["real_kv_buffers"] = sources_of(pool)[1]
        tail = verify_fused(**batch, **common, log=log, launch_tag=2)
        written = write(
            **(common | {"log": tail.log}), plan=laid_out.write, input_ids=lens, positions=lens, out_cache_loc=slots, launch_tag=2
        )
        records, log = written.records, written.log
    return (records, log, pool, table, x), y


def state_of(kind: str) -> Any:
    layer = jnp.zeros((PAGES, PAGE, DIM), jnp.float32)
    pool = [jnp.array(layer) for _ in range(LAYERS)] if kind == "list" else jnp.stack([layer] * LAYERS)
    table = jnp.asarray(np.arange(1, 1 + BATCH * BLOCKS).reshape(BATCH, BLOCKS), jnp.int32)
    return (allocate_records(slots=SLOTS), ViolationLog.allocate(ring_capacity=16), pool, table, jnp.ones((BATCH, DIM), jnp.float32))


def one_step(state: Any, lens: jax.Array, **options: Any) -> Any:
    return head_and_tail(state, lens, **options)


def many_steps(state: Any, lens: jax.Array, **options: Any) -> Any:
    return jax.lax.scan(lambda s, n: head_and_tail(s, lens + n, **options), state, jnp.arange(5, dtype=jnp.int32))


LENS = jnp.array([20, 7], jnp.int32)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "planned"])
@pytest.mark.parametrize("run", [one_step, many_steps])
@pytest.mark.parametrize("kind", ["list", "stack"])
def test_no_hidden_copy_of_the_pool(kind: str, run: Any, fused: bool) -> None:
    """Head hands the pool on, tail reads: nothing of a pool's or a layer's size is copied or allocated."""
    state = state_of(kind)
    with_checks = compiled(functools.partial(run, checked=True, fused=fused), state, LENS, donate=(0,))
    without = compiled(functools.partial(run, checked=False), state, LENS, donate=(0,))
    extra = with_checks.memory_analysis().temp_size_in_bytes - without.memory_analysis().temp_size_in_bytes
    assert extra < SLACK, f"{extra} bytes of temp memory more than without checks"
    assert len(pool_copies(with_checks.as_text(), True)) <= len(pool_copies(without.as_text(), True))


def test_the_ruler_sees_a_copy() -> None:
    """A head that only reads costs a copy of the pool; if not, the test above measures nothing."""
    state = state_of("list")
    reads_only = compiled(functools.partial(one_step, checked=True, head_passes=False), state, LENS, donate=(0,))
    passes = compiled(functools.partial(one_step, checked=True), state, LENS, donate=(0,))
    extra = reads_only.memory_analysis().temp_size_in_bytes - passes.memory_analysis().temp_size_in_bytes
    assert extra > LAYER_BYTES


@pytest.mark.parametrize("kind", ["list", "stack"])
def test_the_step_is_right(kind: str) -> None:
    """The memory tests compile; this one runs: clean steps are silent and a flipped byte alarms."""
    run = jax.jit(functools.partial(many_steps, checked=True), donate_argnums=0)
    state, _ = run(state_of(kind), jnp.zeros(BATCH, jnp.int32))
    assert int(state[1].write_index[0]) == 0
    records, log, pool, table, x = state
    slot = int(table[1, 0]) * PAGE + 3
    if kind == "list":
        pool[2] = pool[2].at[slot // PAGE, slot % PAGE, 5].add(1)
    else:
        pool = pool.at[2, slot // PAGE, slot % PAGE, 5].add(1)
    state, _ = run((records, log, pool, table, x), jnp.full(BATCH, 5, jnp.int32))
    ring = np.asarray(state[1].ring)
    assert int(state[1].write_index[0]) == 10 and set(ring[:10, 2]) == {slot} and set(ring[:10, 14]) == {4}


TPU_CHILD = """
    import functools
    import json
    import sys
    import jax
    from jax.experimental import topologies
    sys.path.insert(0, sys.argv[1])
    import test_compiled as t
    t.PAGES = 512  # a layer is 8 MiB: more than what a check gathers at a time
    t.SLOTS, t.LAYER_BYTES = t.PAGES * t.PAGE, t.PAGES * t.PAGE * t.DIM * 4
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    where = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (t.state_of("list"), t.LENS))
    step = jax.jit(functools.partial(t.one_step, checked=True), donate_argnums=0).lower(*shapes).compile()
    text, temp = step.as_text(), step.memory_analysis().temp_size_in_bytes
    print(json.dumps([temp, t.LAYER_BYTES, t.pool_copies(text, True), "custom_call_target=\\"kvcanary" in text]))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: nothing to compile for TPU with")
def test_no_hidden_copy_on_tpu() -> None:
    """Compiled ahead of time for a v5e, where the operations are plain JAX: no copy of a layer, no memory that grows with the pool."""
    here = Path(__file__).parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = [sys.executable, "-c", textwrap.dedent(TPU_CHILD), str(here)]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    temp, layer, copies, custom_calls = json.loads(run.stdout.splitlines()[-1])
    assert temp < layer and copies == [] and not custom_calls


# ------------------------------------------------------------------------------------------------ custom calls


def test_one_custom_call_an_operation() -> None:
    rows, zeros = jnp.array([1, 2], jnp.int32), jnp.zeros((2,), jnp.int32)
    records, log, table = allocate_records(slots=8), ViolationLog.allocate(ring_capacity=4), jnp.zeros((3, 4), jnp.int32)
    laid_out = functools.partial(
        plan, req_pool_indices=rows, prefix_lens=rows, extend_seq_lens=rows, verify_capacity=8, write_req_capacity=2
    )
    made = laid_out(req_to_token=table)
    calls = {
        "plan": lambda table: laid_out(req_to_token=table),
        "verify": lambda records: verify(records=records, log=log, plan=made.verify, launch_tag=0),
        "verify_fused": lambda records: verify_fused(
            records=records, log=log, req_pool_indices=rows, prefix_lens=rows, req_to_token=table, launch_tag=0
        ),
        "write": lambda records: write(
            records=records, log=log, plan=made.write, input_ids=rows, positions=zeros, out_cache_loc=rows, launch_tag=0
        ),
        "scatter": lambda pool: scatter_req_token_ids(
            flat_in=rows, offsets=jnp.array([0, 1, 2], jnp.int32), req_pool_indices=zeros, pool_out=pool
        ),
    }
    for name, call in calls.items():
        text = compiled(call, table if name in ("plan", "scatter") else records).as_text()
        targets = re.findall(r'custom_call_target="([^"]+)"', text)
        assert targets == [f"kvcanary_{name}_v1"], name


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_what_crosses_to_a_handler(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """int64 attributes, the sources as one table, and every state operand aliased to its result."""
    from jax_kvcanary import backend, spec

    monkeypatch.setattr(backend, "_targets", {platform: frozenset(spec.TARGETS.values())})
    pool = jnp.zeros((PAGES, PAGE, DIM), jnp.float32)
    text = (
        jax.jit(
            lambda pool: verify_fused(
                records=allocate_records(slots=8), log=ViolationLog.allocate(ring_capacity=4), req_pool_indices=[1], prefix_lens=[1],
                req_to_token=np.zeros((3, 4), np.int32), launch_tag=9, padding_slot=-7, real_kv_hash_mode=1, pass_through=True,
                real_kv_buffers=(pool,),
                real_kv_sources=make_packed_source(buffer=pool, page_size=PAGE, bytes_per_token=DIM * 4, read_bytes=32),
            ).real_kv_buffers
        )
        .trace(pool)
        .lower(lowering_platforms=(platform,))
        .as_text()
    )  # fmt: skip
    (call,) = [line for line in text.splitlines() if "@kvcanary_verify_fused_v1" in line]
    for attribute in (
        "abi = 1 : i64",
        "launch_tag = 9 : i64",
        "padding_slot = -7 : i64",
        "has_padding_slot = 1 : i64",
        "num_sources = 1 : i64",
        "strict = 1 : i64",
        "position_stride = 1 : i64",
    ):
        assert attribute in call
    table = [0, 0, PAGES, PAGE, PAGE * DIM * 4, DIM * 4, 1, 1, 1, 1, 0, 0, 0, 0, DIM * 4, 32]
    assert f"source_table = dense<{table}> : tensor<16xi64>" in call
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\],\s+operand_index = (\d+)", text)
    assert aliases == [("0", "2"), ("1", "3"), ("2", "4"), ("3", "5"), ("9", "16")]
    assert "implementation" not in call


def test_state_is_updated_in_place() -> None:
    """Donated records, tags and log are aliased through the call: no copy of them is made."""
    records, log = allocate_records(slots=65536, provenance=True), ViolationLog.allocate(ring_capacity=1024)
    rows = jnp.array([1, 2], jnp.int32)
    made = plan(
        req_pool_indices=rows, prefix_lens=rows * 0, extend_seq_lens=rows, req_to_token=jnp.zeros((3, 4), jnp.int32), verify_capacity=8,
        write_req_capacity=2,
    )  # fmt: skip

    def stamp(records: Any, log: Any) -> Any:
        out = write(records=records, log=log, plan=made.write, input_ids=rows, positions=rows, out_cache_loc=rows, launch_tag=0)
        return out.records, out.log

    program = compiled(stamp, records, log, donate=(0, 1))
    assert program.memory_analysis().temp_size_in_bytes < 4096
    assert not re.search(r"u32\[65536,16\]\S* copy\(", program.as_text())


def test_new_data_does_not_recompile() -> None:
    step = jax.jit(functools.partial(one_step, checked=True))
    state = state_of("list")
    for n in range(4):
        state, _ = step(state, jnp.array([n, 2 * n], jnp.int32))
    assert step._cache_size() == 1


def test_eager_calls_compile_once() -> None:
    from jax_kvcanary import lowering

    records, log = allocate_records(slots=8), ViolationLog.allocate(ring_capacity=4)

    def call(step: int, lens: list[int]) -> None:
        verify_fused(
            records=records, log=log, req_pool_indices=np.array([1, 2], np.int32), prefix_lens=np.array(lens, np.int32),
            req_to_token=np.zeros((3, 4), np.int32), launch_tag=5, step=step,
        )  # fmt: skip

    call(0, [1, 2])
    (function,) = [lowering._jitted("verify_fused", key) for key in _keys_of("verify_fused", records, log)]
    before = function._cache_size()
    for n in range(1, 4):
        call(n, [n, 0])
    assert function._cache_size() == before


def _keys_of(name: str, records: Any, log: Any) -> list[Any]:
    """Params of the one call above, read from its jaxpr."""
    jaxpr = jax.make_jaxpr(
        lambda records: verify_fused(
            records=records, log=log, req_pool_indices=np.array([1, 2], np.int32), prefix_lens=np.array([1, 2], np.int32),
            req_to_token=np.zeros((3, 4), np.int32), launch_tag=5,
        ).verdict
    )(records)  # fmt: skip
    return [tuple(sorted(eqn.params.items())) for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == f"kvcanary_{name}"]


# ------------------------------------------------------------------------------------------------ sharding


def test_no_all_gather_under_shard_map() -> None:
    """Heads are sharded: every rank checks its own part of the pool, in place, and no collective appears."""
    mesh = jax.make_mesh((8,), ("tensor",), devices=jax.devices("cpu"), axis_types=(AxisType.Auto,))
    heads = jax.sharding.NamedSharding(mesh, P(None, None, "tensor"))
    ranks = jax.sharding.NamedSharding(mesh, P("tensor"))
    pool = jax.device_put(jnp.zeros((PAGES, PAGE, DIM), jnp.float32), heads)
    records = jax.device_put(jnp.zeros((8, SLOTS, 8), jnp.uint32), ranks)

    def rank(records: Any, pool: Any, lens: Any) -> Any:
        sources = make_packed_source(buffer=pool, page_size=PAGE, bytes_per_token=DIM // 8 * 4, read_bytes=DIM // 8 * 4)
        table = BlockTable(jnp.arange(1, 1 + BATCH * BLOCKS, dtype=jnp.int32).reshape(BATCH, BLOCKS), PAGE)
        out = verify_fused(
            records=records[0], log=ViolationLog.allocate(ring_capacity=4), req_pool_indices=jnp.arange(BATCH, dtype=jnp.int32),
            prefix_lens=lens, req_to_token=table, launch_tag=0, padding_req=None, real_kv_hash_mode=2, real_kv_sources=sources,
            real_kv_buffers=(pool,), pass_through=True, shard=jax.lax.axis_index("tensor"),
        )  # fmt: skip
        return out.real_kv_buffers[0] + 1, out.log.write_index

    function = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(P("tensor"), P(None, None, "tensor"), P()),
        out_specs=(P(None, None, "tensor"), P("tensor")),
        check_vma=False,
    )
    program = jax.jit(function, donate_argnums=1).lower(records, pool, LENS).compile()
    text = program.as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", text)
    assert text.count('custom_call_target="kvcanary_verify_fused_v1"') == 1
    assert program.memory_analysis().temp_size_in_bytes < SLACK
