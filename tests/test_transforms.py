"""The operations under JAX's transformations: same bits everywhere, in plain JAX and as custom calls."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kvcanary import (
    BlockTable,
    CanaryLaunchTag,
    RealKvHashMode,
    ViolationLog,
    allocate_records,
    allocate_source_tags,
    export_disabled_checks,
    make_row_source,
    plan,
    scatter_req_token_ids,
    verify,
    verify_fused,
    write,
)

SLOTS, WIDTH, STEPS = 32, 10, 4
TABLE = np.array([[0] * WIDTH, range(4, 4 + WIDTH), range(16, 16 + WIDTH)], np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What a serving loop carries."""

    records: Any
    tags: Any
    log: Any
    pool: Any
    lens: Any  # tokens written so far, a row of the batch


@functools.lru_cache
def fresh() -> State:
    pool = np.random.default_rng(0).standard_normal((SLOTS, 2, 8)).astype(np.float32)
    return State(
        records=allocate_records(slots=SLOTS, provenance=True),
        tags=allocate_source_tags(slots=SLOTS, sources=1),
        log=ViolationLog.allocate(ring_capacity=64),
        pool=jnp.asarray(pool),
        lens=jnp.zeros((2,), jnp.int32),
    )


def step(state: State, number: Any, *, implementation: str, corrupt: Any = 0) -> tuple[State, jax.Array]:
    """Head check, "model", tail stamp of one new token a request. ``corrupt`` is added to a stamped word of the pool."""
    source = make_row_source(layer_buffer=state.pool, read_bytes=64)
    ask = {"real_kv_hash_mode": RealKvHashMode.ALL, "real_kv_sources": source, "source_tags": state.tags, "step": number}
    rows = jnp.array([1, 2], jnp.int32)
    laid_out = plan(
        req_pool_indices=rows,
        prefix_lens=state.lens,
        extend_seq_lens=jnp.ones((2,), jnp.int32),
        req_to_token=TABLE,
        verify_capacity=2 * WIDTH,
        write_req_capacity=3,
        implementation=implementation,
    )
    checked = verify(
        records=state.records, log=state.log, plan=laid_out.verify, launch_tag=CanaryLaunchTag.HEAD_K_FULL,
        real_kv_buffers=(state.pool,), pass_through=True, implementation=implementation, **ask,
    )  # fmt: skip
    (pool,) = checked.real_kv_buffers
    slots = jnp.asarray(TABLE)[rows, state.lens]
    pool = pool.at[slots].set(pool[slots] * 2 + 1)
    pool = pool.at[4, 0, 0].add(jnp.asarray(corrupt, pool.dtype))
    written = write(
        records=state.records, log=checked.log, plan=laid_out.write, input_ids=slots * 7, positions=state.lens, out_cache_loc=slots,
        launch_tag=CanaryLaunchTag.TAIL_K_FULL, real_kv_buffers=(pool,), request_ids=rows + 40, implementation=implementation, **ask,
    )  # fmt: skip
    after = State(records=written.records, tags=written.source_tags, log=written.log, pool=pool, lens=state.lens + 1)
    return after, checked.verdict


def corruption(number: Any) -> Any:
    """Step 2 corrupts what step 0 has stamped, so step 3 alarms."""
    return jnp.where(number == 2, 1, 0)


@functools.lru_cache
def expected(implementation: str) -> tuple[State, np.ndarray]:
    """The loop, a jitted step at a time."""
    one = jax.jit(functools.partial(step, implementation=implementation))
    state, verdicts = fresh(), []
    for number in range(STEPS):
        state, verdict = one(state, np.int32(number), corrupt=corruption(number))
        verdicts.append(np.asarray(verdict))
    assert np.stack(verdicts).tolist() == [[0, 0], [1, 1], [1, 1], [2, 1]]
    assert int(state.log.write_index[0]) == 1
    return jax.tree.map(np.asarray, state), np.stack(verdicts)


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def scanned(state: State, *, implementation: str) -> tuple[State, jax.Array]:
    body = functools.partial(step, implementation=implementation)
    return jax.lax.scan(lambda s, n: body(s, n, corrupt=corruption(n)), state, jnp.arange(STEPS))


def test_both_implementations_agree() -> None:
    pytest.importorskip("jax_kvcanary._kvcanary_cpu", exc_type=ImportError)
    assert_same(expected("jax"), expected("ffi"))


def test_eager(implementation: str) -> None:
    state, verdicts = fresh(), []
    for number in range(STEPS):
        state, verdict = step(state, number, implementation=implementation, corrupt=corruption(number))
        verdicts.append(verdict)
    assert_same((state, np.stack(verdicts)), expected(implementation))


def test_disable_jit(implementation: str) -> None:
    with jax.disable_jit():
        test_eager(implementation)


def test_donated(implementation: str) -> None:
    one = jax.jit(functools.partial(step, implementation=implementation), donate_argnums=0)
    state = jax.tree.map(jnp.array, fresh())
    for number in range(STEPS):
        previous = state
        state, _ = one(state, np.int32(number), corrupt=corruption(number))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(previous))
    assert_same(state, expected(implementation)[0])


def test_scan(implementation: str) -> None:
    assert_same(jax.jit(functools.partial(scanned, implementation=implementation))(fresh()), expected(implementation))


def test_while_loop(implementation: str) -> None:
    def run(state: State) -> State:
        def body(carry: tuple[Any, State]) -> tuple[Any, State]:
            number, state = carry
            return number + 1, step(state, number, implementation=implementation, corrupt=corruption(number))[0]

        return jax.lax.while_loop(lambda carry: carry[0] < STEPS, body, (jnp.int32(0), state))[1]

    assert_same(jax.jit(run, donate_argnums=0)(jax.tree.map(jnp.array, fresh())), expected(implementation)[0])


def test_cond(implementation: str) -> None:
    @jax.jit
    def run(state: State, number: Any, active: Any) -> State:
        go = functools.partial(step, implementation=implementation)
        return jax.lax.cond(active, lambda s: go(s, number, corrupt=corruption(number))[0], lambda s: s, state)

    state = fresh()
    for number in range(STEPS):
        state = run(state, np.int32(number), False)
        state = run(state, np.int32(number), True)
    assert_same(state, expected(implementation)[0])


def test_vmap(implementation: str) -> None:
    """A batch of loops, one corrupted, runs as if each ran alone."""
    states = jax.tree.map(lambda x: jnp.stack([x, x, x]), fresh())

    @jax.jit
    def run(states: State) -> tuple[State, jax.Array]:
        one = functools.partial(step, implementation=implementation)
        in_turn = jax.vmap(lambda s, n, c: one(s, n, corrupt=c), in_axes=(0, None, 0))
        return jax.lax.scan(lambda s, n: in_turn(s, n, jnp.array([0, 1, 0]) * corruption(n)), states, jnp.arange(STEPS))

    out, verdicts = run(states)
    assert_same(jax.tree.map(lambda x: x[1], (out, jnp.swapaxes(verdicts, 0, 1))), expected(implementation))
    assert np.asarray(out.log.write_index)[:, 0].tolist() == [0, 1, 0]


def test_vmap_over_any_operand(implementation: str) -> None:
    """Only one operand is batched, and not along its first axis."""
    written = expected(implementation)[0]
    records = np.stack([written.records, written.records ^ np.uint32(1)], axis=1)

    def check(records: Any) -> jax.Array:
        return verify_fused(
            records=records, log=fresh().log, req_pool_indices=np.array([1, 2], np.int32), prefix_lens=written.lens, req_to_token=TABLE,
            launch_tag=0, implementation=implementation,
        ).verdict  # fmt: skip

    assert jax.vmap(check, in_axes=1)(records).tolist() == [check(records[:, 0]).tolist(), [2, 2]]


def test_vmap_of_scatter_and_plan(implementation: str) -> None:
    def both(prefix: Any, tokens: Any) -> Any:
        rows = jnp.array([1, 2], jnp.int32)
        scattered = scatter_req_token_ids(
            flat_in=tokens, offsets=jnp.array([0, 1, 3]), req_pool_indices=rows, pool_out=jnp.zeros((3, 4), jnp.int32),
            implementation=implementation,
        )  # fmt: skip
        laid_out = plan(
            req_pool_indices=rows, prefix_lens=prefix, extend_seq_lens=prefix, req_to_token=BlockTable(jnp.arange(6).reshape(3, 2), 4),
            verify_capacity=8, write_req_capacity=2, implementation=implementation,
        )  # fmt: skip
        return scattered, laid_out.verify.num_valid, laid_out.write

    prefixes, tokens = jnp.array([[1, 2], [3, 0]], jnp.int32), jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
    out = jax.vmap(both)(prefixes, tokens)
    for i in range(2):
        assert_same(jax.tree.map(lambda x, i=i: x[i], out), both(prefixes[i], tokens[i]))


# ------------------------------------------------------------------------------------------------ derivatives


def loss(pool: jax.Array, implementation: str) -> jax.Array:
    """Twice the pool, checked and handed on, then summed in squares; the canary adds nothing to the gradient."""
    state = dataclasses.replace(fresh(), pool=pool * 2)
    after, verdict = step(state, 0, implementation=implementation)
    return (after.pool**2).sum() + verdict.sum() + after.log.write_index[0]


def plain_loss(pool: jax.Array) -> jax.Array:
    pool = pool * 2
    slots = TABLE[[1, 2], [0, 0]]
    return (pool.at[slots].set(pool[slots] * 2 + 1) ** 2).sum()


def test_grad_keeps_the_pools_own_gradient(implementation: str) -> None:
    pool = fresh().pool
    wanted = jax.grad(plain_loss)(pool)
    assert float(jnp.abs(wanted).sum()) > 0
    of_ours = functools.partial(loss, implementation=implementation)
    np.testing.assert_allclose(jax.jit(jax.grad(of_ours))(pool), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(of_ours)))(pool), wanted, rtol=1e-6)
    value, tangent = jax.jvp(of_ours, (pool,), (jnp.ones_like(pool),))
    np.testing.assert_allclose((value, tangent), (plain_loss(pool), wanted.sum()), rtol=1e-5)
    np.testing.assert_allclose(jax.linearize(of_ours, pool)[1](jnp.ones_like(pool)), wanted.sum(), rtol=1e-5)


def test_grad_through_a_scan_and_vmap() -> None:
    def total(pool: jax.Array) -> jax.Array:
        state, _ = scanned(dataclasses.replace(fresh(), pool=pool), implementation="auto")
        return state.pool.sum()

    pool = fresh().pool
    gradient = jax.jit(jax.grad(total))(pool)
    touched = np.zeros(SLOTS, bool)
    touched[TABLE[1:3, :STEPS]] = True
    np.testing.assert_array_equal(gradient, np.where(touched[:, None, None], 2.0, 1.0) * np.ones(pool.shape))
    batched = jax.jit(jax.vmap(jax.grad(total)))(jnp.stack([pool, pool]))
    np.testing.assert_array_equal(batched[1], gradient)


def test_a_pool_that_is_only_read_gets_no_gradient_from_the_check(implementation: str) -> None:
    def check(pool: jax.Array) -> jax.Array:
        out = verify_fused(
            records=fresh().records, log=fresh().log, req_pool_indices=np.array([1], np.int32), prefix_lens=np.array([2], np.int32),
            req_to_token=TABLE, launch_tag=0, real_kv_hash_mode=2, real_kv_sources=make_row_source(layer_buffer=pool, read_bytes=64),
            real_kv_buffers=(pool,), implementation=implementation,
        )  # fmt: skip
        return out.verdict.sum().astype(jnp.float32) + pool.sum()

    np.testing.assert_array_equal(jax.grad(check)(fresh().pool), np.ones(fresh().pool.shape))


def test_integer_pools_have_float0_tangents(implementation: str) -> None:
    def check(scale: jax.Array, pool: jax.Array) -> jax.Array:
        out = verify_fused(
            records=fresh().records, log=fresh().log, req_pool_indices=np.array([1], np.int32), prefix_lens=np.array([2], np.int32),
            req_to_token=TABLE, launch_tag=0, real_kv_hash_mode=2, real_kv_sources=make_row_source(layer_buffer=pool, read_bytes=16),
            real_kv_buffers=(pool,), pass_through=True, implementation=implementation,
        )  # fmt: skip
        return scale * out.real_kv_buffers[0].sum()

    assert float(jax.grad(check)(2.0, jnp.ones((SLOTS, 16), jnp.int8))) == SLOTS * 16


# ------------------------------------------------------------------------------------------------ sharding


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(implementation: str, check_vma: bool) -> None:
    """Eight ranks with slots of their own; batch arithmetic is the same on each."""
    if implementation == "jax" and not check_vma:
        pytest.skip("slow to compile, and check_vma=True asks for more")
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"), axis_types=(AxisType.Auto,))
    ranks = jax.tree.map(lambda x: jnp.concatenate([x] * 8), fresh())

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    def one(state: State, number: Any) -> State:
        return step(state, number, implementation=implementation, corrupt=corruption(number))[0]

    for number in range(STEPS):
        ranks = one(ranks, jnp.int32(number))
    for rank in range(8):
        mine = jax.tree.map(lambda x, rank=rank: x.reshape(8, -1, *x.shape[1:])[rank], ranks)
        assert_same(mine, expected(implementation)[0])


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_verdict_is_agreed_by_one_all_reduce(check_vma: bool) -> None:
    """Tensor-parallel ranks hash their own heads: the records of each are its own, the verdict is everyone's."""
    mesh = jax.make_mesh((8,), ("tensor",), devices=jax.devices("cpu"), axis_types=(AxisType.Auto,))
    state = expected("jax")[0]
    ranks = np.stack([state.records] * 8)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P(), check_vma=check_vma)
    def agreed(records: Any, pool: Any, lens: Any) -> Any:
        out = verify_fused(
            records=records[0], log=fresh().log, req_pool_indices=jnp.array([1, 2], jnp.int32), prefix_lens=lens, req_to_token=TABLE,
            launch_tag=2, shard=jax.lax.axis_index("tensor"), real_kv_hash_mode=2, real_kv_buffers=(pool,),
            real_kv_sources=make_row_source(layer_buffer=pool, read_bytes=64),
        )  # fmt: skip
        return jax.lax.pmax(out.verdict, "tensor")

    arguments = (state.pool, state.lens)
    text = agreed.lower(ranks, *arguments).compile().as_text()
    assert "all-gather" not in text and text.count(" all-reduce(") == 1
    assert agreed(ranks, *arguments).tolist() == [2, 1]
    ranks[3, TABLE[2, 1], 0] ^= 1
    assert agreed(ranks, *arguments).tolist() == [2, 2]


def test_explicit_mesh(implementation: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        state = jax.tree.map(jnp.array, jax.device_get(fresh()))
        out, _ = jax.jit(functools.partial(scanned, implementation=implementation))(state)
    assert_same(out, expected(implementation)[0])


# ------------------------------------------------------------------------------------------------ widths, export, caches


def test_x64(implementation: str, x64: None) -> None:
    assert_same(jax.jit(functools.partial(scanned, implementation=implementation))(fresh()), expected(implementation))


def test_forms_of_one_operand_agree(implementation: str) -> None:
    """int32, int64 and uint32 pairs say the same."""
    state = expected(implementation)[0]
    slots, positions = np.arange(4, 8), np.arange(4)

    def check(convert: Any) -> Any:
        return verify_of_entries(state.records, convert(slots), convert(positions), convert(slots - 1), implementation)

    wanted = check(lambda x: jnp.asarray(x, jnp.int32))
    assert int(wanted.log.write_index[0]) == 4
    assert_same(check(lambda x: np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2)), wanted)
    with jax.enable_x64(True):
        assert_same(check(jnp.asarray), wanted)


def verify_of_entries(records: Any, slots: Any, positions: Any, previous: Any, implementation: str) -> Any:
    from jax_kvcanary import VerifyPlan

    entries = VerifyPlan.from_entries(slot_indices=slots, expected_positions=positions, prev_slot_indices=previous)
    return verify(records=records, log=fresh().log, plan=entries, launch_tag=4, padding_slot=None, implementation=implementation)


def test_export_round_trip() -> None:
    pytest.importorskip("flatbuffers")
    jax.export.register_pytree_node_serialization(
        State, serialized_name="test_transforms.State", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
    )
    one = jax.jit(functools.partial(step, implementation="auto"))
    arguments = (fresh(), np.int32(0))
    exported = jax.export.export(one, disabled_checks=export_disabled_checks())(*arguments)
    again = jax.export.deserialize(exported.serialize())
    assert_same(jax.jit(again.call)(*arguments), one(*arguments))


def test_export_is_refused_without_the_disabled_checks() -> None:
    pytest.importorskip("jax_kvcanary._kvcanary_cpu", exc_type=ImportError)
    with pytest.raises(ValueError, match="kvcanary_plan_v1"):
        jax.export.export(jax.jit(functools.partial(step, implementation="ffi")), platforms=["cpu"])(fresh(), np.int32(0))


def test_lowering_for_other_platforms() -> None:
    """One source of truth for every platform; where there is no target the operations are plain JAX."""
    traced = jax.jit(functools.partial(step, implementation="auto")).trace(fresh(), np.int32(0))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call @kvcanary" not in text
    assert "custom_call @kvcanary" not in jax.jit(functools.partial(step, implementation="jax")).lower(fresh(), np.int32(0)).as_text()


CHILD = """
    import sys
    import jax
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    sys.path.insert(0, sys.argv[2])
    import functools
    import hashlib
    import numpy as np
    import test_transforms as t
    out = jax.jit(functools.partial(t.scanned, implementation=sys.argv[3]))(t.fresh())
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(out))).hexdigest()
    print(hits.count("/jax/compilation_cache/cache_hits") > 0, digest)
"""


def test_persistent_compilation_cache(tmp_path: Path) -> None:
    """A second process takes the compiled step from the cache and computes the same bits."""
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), str(here), "auto"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    runs = [subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    first, second = (run.stdout.split() for run in runs)
    assert second == ["True", first[1]]
