"""Full and window groups: one step over both pools, whose fault it is, a share of the log for every launch, and bad input."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvcanary import RealKvHashMode, RealKvSource, Violation, ViolationLog, backend_info, export_disabled_checks, make_row_source
from jax_kvcanary.groups import Group, GroupsState, KvGroups, TaggedLog, join_layers, split_layers, translate_slots
from jax_kvcanary.sharding import ShardedOps, pack_verdicts
from jax_kvcanary.spec import CanaryLaunchTag, FailReason

FULL_SLOTS, SWA_SLOTS, WIDTH, WINDOW, STEPS = 40, 20, 12, 4, 9
TABLE = np.array([[0] * WIDTH, range(4, 4 + WIDTH), range(20, 20 + WIDTH)], np.int32)
ROWS = np.array([1, 2], np.int32)
LAYERS = ("full", "swa", None, "swa", None)  # layers 2 and 4 read the KV of others
HEAD_FULL, TAIL_FULL, HEAD_SWA, TAIL_SWA = (
    CanaryLaunchTag.HEAD_K_FULL,
    CanaryLaunchTag.TAIL_K_FULL,
    CanaryLaunchTag.HEAD_K_SWA,
    CanaryLaunchTag.TAIL_K_SWA,
)


def mapping_of() -> np.ndarray:
    """Window slots of both requests, used in turn: position p lives in one of 8 slots of its request."""
    mapping = np.zeros((FULL_SLOTS,), np.int32)
    for request in (1, 2):
        mapping[TABLE[request]] = 1 + 8 * (request - 1) + np.arange(WIDTH) % 8
    return mapping


MAPPING = mapping_of()


def source_of(slots: int) -> tuple[RealKvSource, ...]:
    return make_row_source(layer_buffer=((slots, 2, 8), "float32"), read_bytes=64)


@functools.cache
def groups_of(ring: int = 16, **changes: Any) -> KvGroups:
    common = {"real_kv_hash_mode": RealKvHashMode.ALL, "provenance": True, "keep_source_tags": True, "ring_capacity": ring, **changes}
    return KvGroups(
        (
            Group(name="full", sources=source_of(FULL_SLOTS), layers=(0,), **common),
            Group(name="swa", swa_window_size=WINDOW, sources=source_of(SWA_SLOTS) * 2, layers=(1, 3), **common),
        )
    )


def new_layers() -> list[Any]:
    random = np.random.default_rng(1)
    slots = {"full": FULL_SLOTS, "swa": SWA_SLOTS}
    return [None if group is None else jnp.asarray(random.standard_normal((slots[group], 2, 8)), jnp.float32) for group in LAYERS]


def step(
    groups: KvGroups, state: GroupsState, layers: Any, lens: Any, number: Any, mapping: Any = MAPPING, implementation: str = "auto"
) -> Any:
    """Head check, one token a request in every layer that has KV of its own, tail stamp."""
    layout = {"req_pool_indices": ROWS, "prefix_lens": lens, "req_to_token": TABLE, "full_to_swa_index_mapping": mapping}
    ask = {"step": number, "implementation": implementation}
    buffers = split_layers(layer_groups=LAYERS, values=layers)
    checked = groups.verify_fused(state=state, launch="head", real_kv_buffers=buffers, pass_through=True, **layout, **ask)
    layers = join_layers(layer_groups=LAYERS, values=checked.real_kv_buffers)
    slots = jnp.asarray(TABLE)[ROWS, lens]
    at = {"full": slots, "swa": jnp.asarray(mapping)[slots]}
    layers = [None if group is None else layer.at[at[group]].mul(0.5) for group, layer in zip(LAYERS, layers, strict=True)]
    plans = groups.plan(
        **layout, extend_seq_lens=jnp.ones_like(lens), verify_capacity=0, write_req_capacity=2, implementation=implementation
    )
    written = groups.write(
        state=checked.state, plans=plans, out_cache_loc=slots, full_to_swa_index_mapping=mapping, input_ids=slots * 3, positions=lens,
        real_kv_buffers=split_layers(layer_groups=LAYERS, values=layers), request_ids=ROWS + 70, **ask,
    )  # fmt: skip
    return written.state, layers, lens + 1, checked


@functools.cache
def jitted(groups: KvGroups, implementation: str = "auto") -> Any:
    return jax.jit(functools.partial(step, groups, implementation=implementation))


@functools.cache
def served(ring: int = 16) -> tuple[Any, Any, Any]:
    """State, layers and lengths after STEPS healthy steps."""
    groups = groups_of(ring)
    carry = (groups.allocate(), new_layers(), jnp.zeros((2,), jnp.int32))
    for number in range(STEPS):
        *carry, checked = jitted(groups)(*carry, np.int32(number))
        assert checked.verdict.tolist() == [int(number > 0)] * 2
        assert checked.first_bad_position.tolist() == [-1, -1]
    return tuple(carry)  # type: ignore[return-value]


def check(groups: KvGroups, state: GroupsState, layers: Any, **changes: Any) -> Any:
    ask = {
        "launch": "head", "real_kv_buffers": split_layers(layer_groups=LAYERS, values=layers), "req_pool_indices": ROWS,
        "prefix_lens": np.full((2,), STEPS, np.int32), "req_to_token": TABLE, "full_to_swa_index_mapping": MAPPING, "step": 50,
    }  # fmt: skip
    return groups.verify_fused(state=state, **{**ask, **changes})


def rows_of(groups: KvGroups, state: GroupsState) -> list[tuple[str, int]]:
    """(group, slot) of every stored violation."""
    rows = groups.decode(state).violations
    return [(groups.group_of(row).name, row.slot) for row in rows]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ two groups


def test_what_nobody_wrote_over_groups() -> None:
    """Counts add up over the groups; the first position is the lowest."""
    state, layers, _ = served()
    groups = groups_of()
    records = {name: np.array(state.records[name]) for name in groups.names}
    records["full"][TABLE[ROWS[1], [1, STEPS - 1]]] = 0
    records["swa"][MAPPING[TABLE[ROWS[1], STEPS - 1]]] = 0
    state = dataclasses.replace(state, records={name: jnp.asarray(array) for name, array in records.items()})
    result = check(groups, state, layers, strict=False)
    assert result.verdict.tolist() == [1, 1] and rows_of(groups, result.state) == []
    assert result.unattested.tolist() == [0, 3] and result.first_unattested_position.tolist() == [-1, 1]
    assert {name: count.tolist() for name, count in result.unattested_by_group.items()} == {"full": [0, 2], "swa": [0, 1]}


def test_a_healthy_hybrid_model_is_silent() -> None:
    groups = groups_of()
    state, layers, lens = served()
    report = groups.decode(state)
    assert report.violations == () and report.reported == 0 and lens.tolist() == [STEPS] * 2
    # Every step checks the whole prefix in the full group and at most the window in the other.
    assert report.slot_runs[HEAD_FULL] == 2 * sum(range(STEPS))
    assert report.slot_runs[HEAD_SWA] == 2 * sum(min(n, WINDOW) for n in range(STEPS))
    assert report.slot_runs[TAIL_FULL] == report.slot_runs[TAIL_SWA] == 2 * STEPS
    assert report.kernel_runs[TAIL_SWA] == STEPS
    assert [layer is None for layer in layers] == [False, False, True, False, True]


def test_every_launch_is_asked_for_its_implementation() -> None:
    carry = (groups_of().allocate(), new_layers(), jnp.zeros((2,), jnp.int32), np.int32(0))
    assert "custom_call @kvcanary" not in jitted(groups_of(), "jax").lower(*carry).as_text()
    if backend_info()["cpu"].compiled:
        text = jitted(groups_of(), "ffi").lower(*carry).as_text()
        assert all(f"custom_call @kvcanary_{name}_v1" in text for name in ("plan", "verify_fused", "write"))


def test_a_fault_in_one_layer_names_group_and_layer() -> None:
    groups = groups_of()
    state, layers, _ = served()
    for layer in (0, 1, 3):
        group, position = LAYERS[layer], STEPS - 2
        slot = int(TABLE[2, position]) if group == "full" else int(MAPPING[TABLE[2, position]])
        broken = [x.at[slot, 0, 0].add(1) if i == layer else x for i, x in enumerate(layers)]
        result = check(groups, state, broken)
        assert (result.verdict.tolist(), result.first_bad_position.tolist()) == ([1, 2], [-1, position])
        other = "swa" if group == "full" else "full"
        assert (result.verdicts[group].tolist(), result.verdicts[other].tolist()) == ([1, 2], [1, 1])
        (row,) = groups.decode(result.state).violations
        assert (groups.group_of(row), groups.layer_of(row)) == (groups[group], layer)  # type: ignore[index]
        assert (row.slot, row.reasons, row.batch_row) == (slot, FailReason.VERIFY_REAL_KV_HASH, 1)
        assert row.tag == (HEAD_FULL if group == "full" else HEAD_SWA)
        assert row.writer is not None and (row.writer.request_id, row.writer.step) == (72, position)


def test_the_window_group_checks_its_window_only() -> None:
    groups = groups_of()
    state, layers, _ = served()
    records = {name: np.array(array) for name, array in state.records.items()}
    records["swa"][MAPPING[TABLE[1, STEPS - WINDOW - 1]], 2] ^= 1  # one position before the window
    silent = check(groups, dataclasses.replace(state, records=records), layers)
    assert silent.verdicts["swa"].tolist() == [2, 1] and silent.first_bad_positions["swa"].tolist() == [STEPS - WINDOW, -1]
    (row,) = groups.decode(silent.state).violations
    assert row.reasons == FailReason.VERIFY_CHAIN_HASH  # a window start keeps its true predecessor
    records["swa"] = np.array(state.records["swa"])
    records["swa"][MAPPING[TABLE[1, STEPS - WINDOW - 2]], 2] ^= 1
    silent = check(groups, dataclasses.replace(state, records=records), layers)
    assert silent.verdict.tolist() == [1, 1]


@pytest.mark.parametrize("loud", ["full", "swa"])
def test_a_storm_in_one_group_never_hides_the_other(loud: str) -> None:
    """The loud group fills its own rows only, step after step."""
    groups = groups_of(4)
    state, layers, _ = served(4)
    quiet = "swa" if loud == "full" else "full"
    records = {name: np.array(array) for name, array in state.records.items()}
    records[loud][:, 2] += 1
    storm = dataclasses.replace(state, records=records)
    for _ in range(3):
        storm = check(groups, storm, layers).state
    assert set(rows_of(groups, storm)) and {name for name, _ in rows_of(groups, storm)} == {loud}
    slot = int(TABLE[1, STEPS - 1]) if quiet == "full" else int(MAPPING[TABLE[1, STEPS - 1]])
    records[quiet][slot, 2] ^= 1
    result = check(groups, dataclasses.replace(storm, records=records), layers)
    found = [slot for name, slot in rows_of(groups, result.state) if name == quiet]
    assert found == [slot]
    parts = groups.decode_parts(result.state)
    loud_tag, quiet_tag = (groups[name].head_tag for name in (loud, quiet))
    assert parts[loud_tag].stored == 4 and parts[loud_tag].lost > 0 and parts[quiet_tag].lost == 0  # type: ignore[index]
    report = groups.decode(result.state)
    assert report.reported == parts[loud_tag].reported + 1 and report.stored == 5  # type: ignore[index]


def test_a_storm_in_one_launch_never_hides_another() -> None:
    """The head's rows and the tail's are apart, too."""
    groups = groups_of(4)
    state, layers, _ = served(4)
    records = {name: np.array(array) for name, array in state.records.items()}
    for array in records.values():
        array[:, 2] += 1
    state = check(groups, dataclasses.replace(state, records=records), layers).state
    swept = check(groups, state, layers, launch="sweep", prefix_lens=np.array([1, 0], np.int32)).state
    parts = groups.decode_parts(swept)
    assert parts[HEAD_FULL].stored == parts[HEAD_SWA].stored == 4
    assert parts[CanaryLaunchTag.SWEEP_K_FULL].stored == parts[CanaryLaunchTag.SWEEP_K_SWA].stored == 1


def test_planned_and_fused_verify_say_the_same() -> None:
    groups = groups_of()
    state, layers, _ = served()
    records = {name: np.array(array) for name, array in state.records.items()}
    records["full"][TABLE[1, 3], 2] += 1
    records["swa"][MAPPING[TABLE[2, STEPS - 1]], 2] += 1
    state = dataclasses.replace(state, records=records)
    fused = check(groups, state, layers)
    layout = {"req_pool_indices": ROWS, "prefix_lens": np.full((2,), STEPS, np.int32), "req_to_token": TABLE}
    plans = groups.plan(
        **layout, extend_seq_lens=np.zeros((2,), np.int32), full_to_swa_index_mapping={"swa": MAPPING}, write_req_capacity=2,
        verify_capacity={"full": 2 * WIDTH, "swa": 2 * WINDOW},
    )  # fmt: skip
    assert {name: int(plan.verify.num_valid[0]) for name, plan in plans.items()} == {"full": 2 * STEPS, "swa": 2 * WINDOW}
    buffers = split_layers(layer_groups=LAYERS, values=layers)
    planned = groups.verify(state=state, plans=plans, launch="head", real_kv_buffers=buffers, step=50)
    assert fused.verdict.tolist() == [2, 2] and fused.first_bad_position.tolist() == [3, STEPS - 1]
    for a, b in zip(jax.tree.leaves(planned), jax.tree.leaves(fused), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_worst_verdict_of_the_groups_counts() -> None:
    """BAD in one and not checked in the other is BAD; the smaller position wins."""
    groups = groups_of()
    state, layers, _ = served()
    records = {name: np.array(array) for name, array in state.records.items()}
    records["full"][TABLE[1, 2], 2] += 1
    records["swa"][MAPPING[TABLE[1, STEPS - 1]], 2] += 1
    result = check(groups, dataclasses.replace(state, records=records), layers)
    assert (result.verdict.tolist(), result.first_bad_position.tolist()) == ([2, 1], [2, -1])
    packed = [pack_verdicts(result.verdicts[name], result.first_bad_positions[name]) for name in groups.names]
    assert np.max(packed, axis=0).tolist() == pack_verdicts(result.verdict, result.first_bad_position).tolist()
    none = check(groups, state, layers, prefix_lens=np.array([0, STEPS], np.int32))
    assert none.verdict.tolist() == [0, 1]


def test_slots_that_the_mapping_does_not_know_are_reported() -> None:
    groups = groups_of()
    state, layers, _ = served()
    short = MAPPING[: int(TABLE[2, STEPS - 2])]
    result = check(groups, state, layers, full_to_swa_index_mapping=short)
    assert result.verdicts["swa"].tolist() == [1, 2] and result.verdicts["full"].tolist() == [1, 1]
    assert {row.slot for row in groups.decode(result.state).violations} == {-2}
    lens = jnp.full((2,), STEPS, jnp.int32)
    plans = groups.plan(
        req_pool_indices=ROWS, prefix_lens=lens, extend_seq_lens=lens * 0 + 1, req_to_token=TABLE, full_to_swa_index_mapping=MAPPING,
        verify_capacity=0, write_req_capacity=2,
    )  # fmt: skip
    slots = TABLE[ROWS, STEPS]
    ask = {
        "state": state,
        "plans": plans,
        "input_ids": slots,
        "positions": lens,
        "real_kv_buffers": split_layers(layer_groups=LAYERS, values=layers),
    }
    written = groups.write(out_cache_loc=slots, full_to_swa_index_mapping=short, **ask)
    assert (written.verdict.tolist(), written.verdicts["full"].tolist(), written.verdicts["swa"].tolist()) == ([1, 2], [1, 1], [1, 2])
    by_group = groups.write(out_cache_loc={"full": slots, "swa": MAPPING[slots]}, **ask)
    translated = groups.write(out_cache_loc=slots, full_to_swa_index_mapping=MAPPING, **ask)
    for a, b in zip(jax.tree.leaves(by_group), jax.tree.leaves(translated), strict=True):
        np.testing.assert_array_equal(a, b)


def test_groups_without_sources_check_chains() -> None:
    groups = KvGroups((Group(name="full", slots=FULL_SLOTS), Group(name="swa", swa_window_size=WINDOW, slots=SWA_SLOTS)))
    state = groups.allocate()
    assert state.source_tags == {"full": None, "swa": None}
    result = groups.verify_fused(
        state=state, launch="head", full_to_swa_index_mapping=MAPPING, req_pool_indices=ROWS, prefix_lens=np.array([1, 0], np.int32),
        req_to_token=TABLE,
    )  # fmt: skip
    assert result.verdict.tolist() == [2, 0] and result.real_kv_buffers == {"full": (), "swa": ()}
    assert groups.layer_of(groups.decode(result.state).violations[0]) is None


# ------------------------------------------------------------------------------------------------ inside jit


def test_donated_scan() -> None:
    groups = groups_of()

    def body(carry: Any, number: Any) -> Any:
        *carry, checked = step(groups, *carry, number)
        return tuple(carry), checked.verdict

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(STEPS)), donate_argnums=0)
    first = (groups.allocate(), new_layers(), jnp.zeros((2,), jnp.int32))
    carry, verdicts = run(first)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert np.asarray(verdicts).tolist() == [[0, 0]] + [[1, 1]] * (STEPS - 1)
    for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(served()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_groups_are_a_static_argument() -> None:
    first, second = groups_of.__wrapped__(), groups_of.__wrapped__()
    assert first is not second and first == second and hash(first) == hash(second)
    run = jax.jit(lambda groups, state, layers: check(groups, state, layers).verdict, static_argnums=0)
    state, layers, _ = served()
    assert run(first, state, layers).tolist() == run(second, state, layers).tolist() == [1, 1]
    assert run._cache_size() == 1


def test_export_of_a_step() -> None:
    pytest.importorskip("flatbuffers")
    groups = groups_of()
    state, layers, _ = served()
    one = jax.jit(lambda log, records: check(groups, dataclasses.replace(state, log=log, records=records), layers).state.log)
    exported = jax.export.export(one, disabled_checks=export_disabled_checks())(state.log, state.records)
    again = jax.export.deserialize(exported.serialize())
    log = jax.jit(again.call)(state.log, state.records)
    assert log.tags == state.log.tags
    for a, b in zip(jax.tree.leaves(log), jax.tree.leaves(one(state.log, state.records)), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------ on a mesh


@functools.cache
def groups_on_a_mesh() -> tuple[KvGroups, jax.sharding.Mesh]:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), devices=jax.devices("cpu"), axis_types=(AxisType.Auto,) * 2)

    def ops(slots: int, layers: int) -> ShardedOps:
        buffers = (jax.ShapeDtypeStruct((2 * slots, 4, 16), jnp.float32),) * layers
        return ShardedOps(
            mesh=mesh, data_axes="data", buffers=buffers, buffer_specs=P("data", "tensor"),
            sources=lambda local: tuple(s for layer in local for s in make_row_source(layer_buffer=layer, read_bytes=64)),
        )  # fmt: skip

    common = {"real_kv_hash_mode": RealKvHashMode.ALL, "ring_capacity": 4, "keep_source_tags": True}
    full = Group(name="full", sharding=ops(FULL_SLOTS, 1), layers=(0,), **common)
    swa = Group(name="swa", sharding=ops(SWA_SLOTS, 2), layers=(1, 3), swa_window_size=WINDOW, **common)
    return KvGroups((full, swa)), mesh


def test_groups_on_a_mesh() -> None:
    """Tensor- and data-parallel pools of both kinds: the shard and the layer are named, the verdict is one."""
    groups, mesh = groups_on_a_mesh()
    random, place = np.random.default_rng(2), NamedSharding(mesh, P("data", "tensor"))
    pools = {
        group.name: tuple(
            jax.device_put(random.standard_normal(shape).astype(np.float32), place)
            for shape in group.sharding.buffer_shapes  # type: ignore[union-attr]
        )
        for group in groups.groups
    }
    lens, table, mapping = np.array([6, 3, 5, 2], np.int32), np.concatenate([TABLE] * 2), np.concatenate([MAPPING] * 2)
    flat = [TABLE[1, :6], TABLE[2, :3], TABLE[1, :5], TABLE[2, :2], [-1, -1]]
    slots = np.concatenate(flat).astype(np.int32)
    positions = np.concatenate([np.arange(len(part)) for part in flat]).astype(np.int32)
    layout = {"req_pool_indices": np.concatenate([ROWS] * 2), "req_to_token": table, "full_to_swa_index_mapping": mapping}
    plans = groups.plan(**layout, prefix_lens=lens * 0, extend_seq_lens=lens, verify_capacity=0, write_req_capacity=2)
    written = groups.write(
        state=groups.allocate(), plans=plans, out_cache_loc=slots, full_to_swa_index_mapping=mapping, input_ids=slots, positions=positions,
        real_kv_buffers=pools,
    )  # fmt: skip
    assert written.verdict.tolist() == [1] * 4
    host = np.array(pools["swa"][1])
    slot = int(MAPPING[TABLE[1, 3]])
    host[SWA_SLOTS + slot, 2, 7] += 1  # data rank 1, tensor rank 2
    broken = {**pools, "swa": (pools["swa"][0], jax.device_put(host, place))}
    ask = {"launch": "head", "prefix_lens": lens, **layout}
    assert groups.verify_fused(state=written.state, real_kv_buffers=pools, **ask).verdict.tolist() == [1] * 4
    result = groups.verify_fused(state=written.state, real_kv_buffers=broken, **ask)
    assert (result.verdict.tolist(), result.first_bad_position.tolist()) == ([1, 1, 2, 1], [-1, -1, 3, -1])
    (row,) = groups.decode(result.state).violations
    assert (row.shard, row.slot, row.tag, groups.layer_of(row)) == (6, slot, HEAD_SWA, 3)
    records = {name: np.array(array).reshape(8, -1, 8) for name, array in written.state.records.items()}
    records["swa"][3, MAPPING[TABLE[2, :3]]] = 0  # shard 3 has missed a load of the window pool
    state = dataclasses.replace(written.state, records={name: array.reshape(-1, 8) for name, array in records.items()})
    compare = {"launch": "head", "verdict": np.ones(4, np.int32), "prefix_lens": lens, "step": 8, **layout}
    healthy = groups.check_rank_digests(state=written.state, **compare)
    assert healthy.verdict.tolist() == [1] * 4 and groups.decode(healthy.state).reported == 0
    digests = groups.check_rank_digests(state=state, **compare)
    assert digests.verdict.tolist() == [1, 2, 1, 1]
    assert {name: array.tolist() for name, array in digests.disagree.items()} == {"full": [False] * 4, "swa": [False, True, False, False]}
    (found,) = groups["swa"].sharding.find_deviating_ranks(groups.decode(digests.state))  # type: ignore[union-attr]
    assert (found.deviating, found.tag, found.step) == ((3,), HEAD_SWA, 8)
    with pytest.raises(ValueError, match=r"^kv-canary: group 'full' has no sharding: there are no ranks to compare"):
        groups_of().check_rank_digests(state=groups_of().allocate(), **compare)
    with pytest.raises(ValueError, match=r"^kv-canary: group 'swa' \(.*\) needs its .*, an array of shape \(80,\) with"):
        groups.verify_fused(state=written.state, **{**ask, "full_to_swa_index_mapping": None})


# ------------------------------------------------------------------------------------------------ parts


def test_tagged_log() -> None:
    log = TaggedLog.allocate(quotas={HEAD_SWA: 4, HEAD_FULL: 2})
    assert log.tags == (HEAD_FULL, HEAD_SWA)
    assert [log[tag].ring.shape[0] for tag in log.tags] == [2, 4]
    assert log.reported.tolist() == [0, 0]
    other = dataclasses.replace(log[6], write_index=jnp.array([9], jnp.int32))
    changed = log.replace(6, other)
    assert changed.reported.tolist() == [0, 9] and log.reported.tolist() == [0, 0]
    report = changed.decode()
    assert (report.reported, report.stored, report.lost) == (9, 4, 5)
    leaves, tree = jax.tree.flatten(changed)
    assert len(leaves) == 8 and jax.tree.unflatten(tree, leaves).tags == changed.tags
    assert TaggedLog.of({tag: ViolationLog.allocate(ring_capacity=0) for tag in CanaryLaunchTag}).tags == tuple(CanaryLaunchTag)
    with pytest.raises(ValueError, match=r"^kv-canary: the log has no part for TAIL_K_FULL, it has HEAD_K_FULL, HEAD_K_SWA"):
        log[TAIL_FULL]
    with pytest.raises(ValueError, match=r"^kv-canary: launch_tag must be one of"):
        log.replace(12, other)


def test_layers() -> None:
    by_group = split_layers(layer_groups=LAYERS, values=["a", "b", "?", "c", None])
    assert by_group == {"full": ("a",), "swa": ("b", "c")}
    assert join_layers(layer_groups=LAYERS, values=by_group) == ["a", "b", None, "c", None]
    with pytest.raises(ValueError, match=r"^kv-canary: layer_groups must name a group a layer, got 5 for 2 values"):
        split_layers(layer_groups=LAYERS, values=[1, 2])
    with pytest.raises(ValueError, match=r"^kv-canary: group 'swa' has 2 layers, got 1 values"):
        join_layers(layer_groups=LAYERS, values={"full": [1], "swa": [2]})
    with pytest.raises(ValueError, match=r"^kv-canary: group 'swa' has layers, but no values; there are those of 'full'"):
        join_layers(layer_groups=LAYERS, values={"full": [1]})
    for call, message in (
        (lambda: split_layers(layer_groups=None, values=[1]), "layer_groups must be a tuple of group names, got NoneType"),
        (lambda: split_layers(layer_groups=(3,), values=[1]), "layer_groups must be a tuple of group names and None, got a int in it"),
        (lambda: split_layers(layer_groups=LAYERS, values=None), "values must be a sequence, got NoneType"),
        (lambda: join_layers(layer_groups=None, values={}), "layer_groups must be a tuple of group names, got NoneType"),
        (lambda: join_layers(layer_groups=LAYERS, values=None), "values must be a mapping from groups, got NoneType"),
        (lambda: join_layers(layer_groups=LAYERS, values={"full": None}), "values of group 'full' must be a sequence, got NoneType"),
        (lambda: TaggedLog.allocate(quotas=None), "quotas must be a mapping from launch tags, got NoneType"),
        (lambda: TaggedLog.of({0: None}), "a part of the log must be a ViolationLog, got NoneType"),
    ):
        with pytest.raises(TypeError, match=f"^kv-canary: {message}"):
            call()


def test_translated_slots() -> None:
    mapping, slots = np.array([7, -1, 5], np.int32), np.array([0, 1, 2, 3, -1, -9, 2**31 - 1], np.int32)
    wanted = [7, -1, 5, -2, -1, -9, -2]
    assert translate_slots(slots=slots, mapping=mapping).tolist() == wanted
    pairs = translate_slots(slots=np.ascontiguousarray(slots.astype(np.int64)).view(np.uint32).reshape(-1, 2), mapping=mapping)
    assert np.asarray(pairs).view(np.int64)[:, 0].tolist() == wanted
    assert translate_slots(slots=slots, mapping=mapping[:0]).tolist() == [-2, -2, -2, -2, -1, -9, -2]
    with jax.enable_x64(True):
        wide = translate_slots(slots=jnp.asarray([1, 2**40], jnp.int64), mapping=mapping)
        assert wide.dtype == jnp.int64 and wide.tolist() == [-1, -2]


def test_groups_of_violations_of_other_launches() -> None:
    groups = groups_of()
    fields = {field.name: 0 for field in dataclasses.fields(Violation) if field.name not in ("writer", "num_slots")}
    row = Violation(**{**fields, "tag": CanaryLaunchTag.HEAD_V_FULL, "reasons": FailReason.UNWRITTEN})  # type: ignore[arg-type]
    assert groups.group_of(row) is None and groups.layer_of(row) is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, TypeError, "Group.name must be a str that is not empty, got ''"),
        ({"swa_window_size": -1}, ValueError, "swa_window_size of group 'g' must be non-negative, got -1"),
        (
            {"swa_window_size": 4, "needs_mapping": False},
            ValueError,
            "needs_mapping of group 'g' must be True with swa_window_size 4: a window pool has slots of its own",
        ),
        ({"slots": None}, ValueError, "slots of group 'g' is required without sources: the slots of its pool"),
        ({"layers": (1, 2)}, ValueError, "layers of group 'g' must name one layer a source, got 2 for 0 sources"),
        ({"layers": 3}, TypeError, "layers of group 'g' must be a tuple of ints, got int"),
        ({"layers": ("a",)}, TypeError, "layers of group 'g' must be an int, got str"),
        ({"sources": None}, TypeError, "sources of group 'g' must be a tuple of RealKvSource, got NoneType"),
        ({"sources": (3,)}, TypeError, "sources of group 'g' must be a tuple of RealKvSource, got a int in it"),
        ({"sharding": 3, "slots": None}, TypeError, "sharding of group 'g' must be a ShardedOps, got int"),
        ({"padding_slot": "0"}, TypeError, "padding_slot of group 'g' must be an int, got str"),
        ({"padding_slot": 2**63}, ValueError, "padding_slot of group 'g' must be <= 9223372036854775807"),
        ({"provenance": 1}, TypeError, "provenance of group 'g' must be a bool, got int"),
        ({"keep_source_tags": None}, TypeError, "keep_source_tags of group 'g' must be a bool, got NoneType"),
        ({"ring_capacity": -1}, ValueError, "ring_capacity of group 'g' must be non-negative, got -1"),
        ({"real_kv_hash_mode": 3}, ValueError, "real_kv_hash_mode of group 'g' must be one of"),
        ({"head_tag": 12}, ValueError, "head_tag of group 'g' must be one of"),
        (
            {"sharding": ShardedOps(mesh=jax.sharding.AbstractMesh((1,), ("x",)), slots=4)},
            ValueError,
            "sources and slots of group 'g' must not be given with sharding, which has its own",
        ),
    ],
)
def test_bad_groups(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Group(**{"name": "g", "slots": 8, **changes})
    assert str(caught.value).startswith(f"kv-canary: {message}")


def test_groups_that_do_not_go_together() -> None:
    full, swa = Group(name="full", slots=8), Group(name="swa", slots=8, swa_window_size=2)
    with pytest.raises(ValueError, match=r"^kv-canary: KvGroups must have at least one group"):
        KvGroups(())
    with pytest.raises(ValueError, match=r"^kv-canary: groups must have different names, got 'full' twice"):
        KvGroups((full, full))
    with pytest.raises(
        ValueError, match=r"^kv-canary: groups must have different launch tags, got HEAD_K_SWA in 'swa' and 'chunked': their"
    ):
        KvGroups((full, swa, dataclasses.replace(swa, name="chunked", head_tag=None, tail_tag=None, sweep_tag=None)))
    with pytest.raises(TypeError, match=r"^kv-canary: groups\[1\] must be a Group, got str"):
        KvGroups((full, "swa"))  # type: ignore[arg-type]
    for value in (None, 3, full):
        with pytest.raises(TypeError, match=r"^kv-canary: groups must be a tuple of Group, got "):
            KvGroups(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^kv-canary: there is no group 'window', there are 'full', 'swa'"):
        KvGroups((full, swa))["window"]
    values = {"head_tag": 1, "tail_tag": 3, "sweep_tag": 5}
    assert KvGroups((full, Group(name="full_v", slots=8, **values), swa)).groups[1].tags == (1, 3, 5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"full_to_swa_index_mapping": None},
            ValueError,
            "group 'swa' (swa_window_size 4, pool of 20 slots) needs its full_to_swa_index_mapping, an array of shape (40,) with its slot "
            "for each slot of the full pool; got none",
        ),
        ({"full_to_swa_index_mapping": {}}, ValueError, "group 'swa' (swa_window_size 4, pool of 20 slots) needs its full_to_swa"),
        (
            {"full_to_swa_index_mapping": {"full": MAPPING, "swa": MAPPING}},
            ValueError,
            "group 'full' takes no full_to_swa_index_mapping (needs_mapping is False), got one of shape (40,)",
        ),
        (
            {"full_to_swa_index_mapping": {"sww": MAPPING}},
            ValueError,
            "full_to_swa_index_mapping names the group 'sww', there are 'full', 'swa'",
        ),
        (
            {"full_to_swa_index_mapping": MAPPING.reshape(4, 10)},
            ValueError,
            "full_to_swa_index_mapping of group 'swa' must be 1-D, got shape (4, 10)",
        ),
        ({"launch": "middle"}, ValueError, "launch must be one of 'head', 'tail', 'sweep', got 'middle'"),
        (
            {"real_kv_buffers": None},
            ValueError,
            "group 'full' needs its real_kv_buffers in mode ALL (1 sources, buffers of shape (40, 2, 8))",
        ),
        ({"real_kv_buffers": ()}, TypeError, "real_kv_buffers must be a mapping from group names to buffers, got tuple"),
        ({"real_kv_buffers": {"x": ()}}, ValueError, "real_kv_buffers names the group 'x', there are 'full', 'swa'"),
        ({"launch_tag": 3}, TypeError, "launch_tag is known to the groups and must not be given to verify_fused"),
        ({"swa_window_size": 3}, TypeError, "swa_window_size is known to the groups and must not be given to verify_fused"),
        ({"prefix_lens": np.ones(3, np.int32)}, ValueError, "prefix_lens length must be 2, got 3"),
        ({"full_to_swa_index_mapping": [[1], [1, 2]]}, ValueError, "full_to_swa_index_mapping of group 'swa' must be an array or a list"),
        ({"full_to_swa_index_mapping": "x"}, ValueError, "full_to_swa_index_mapping of group 'swa' must be 1-D, got shape ()"),
        ({"real_kv_buffers": {"full": None}}, TypeError, "real_kv_buffers of group 'full' must be a tuple of arrays, got NoneType"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    state, layers, _ = served()
    with pytest.raises(error) as caught:
        check(groups_of(), state, layers, **changes)
    assert str(caught.value).startswith(f"kv-canary: {message}")


def test_buffers_of_a_group_without_sources() -> None:
    groups = KvGroups((Group(name="chain", slots=8),))
    with pytest.raises(
        ValueError, match=r"^kv-canary: real_kv_buffers must hold one array a source, got 1 for 0 sources \(group 'chain'\)"
    ):
        groups.verify_fused(
            state=groups.allocate(), launch="head", real_kv_buffers={"chain": (np.zeros((8, 16)),)}, req_pool_indices=ROWS,
            prefix_lens=ROWS * 0, req_to_token=TABLE,
        )  # fmt: skip


def test_plans_and_slots_of_every_group() -> None:
    groups, (state, _, _) = groups_of(), served()
    with pytest.raises(ValueError, match=r"^kv-canary: plans must hold every group, group 'swa' is missing; there are 'full'"):
        groups.verify(state=state, plans={"full": None}, launch="head")  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"^kv-canary: out_cache_loc must hold every group, group 'full' is missing; there are 'swa'"):
        groups.write(state=state, plans=dict.fromkeys(groups.names), out_cache_loc={"swa": ROWS})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^kv-canary: plans of group 'full' must be a Plan, got NoneType"):
        groups.verify(state=state, plans=None, launch="head")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^kv-canary: state must be a GroupsState, got NoneType"):
        groups.decode(None)  # type: ignore[arg-type]
