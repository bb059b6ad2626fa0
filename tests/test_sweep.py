"""Sweeps from the host: trees as arrays, rounds, evictions, results that are read late, and what is found with its node's tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import Canary, CanaryBatch, CanaryConfig, Layout
from jax_kvcanary.faults import FaultKind, Faults
from jax_kvcanary.layouts import pool_sources
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.engine import make_canary
from jax_kvcanary.serving.fault_run import FaultyEngine
from jax_kvcanary.serving.model import pool_shapes
from jax_kvcanary.serving.sampling import SamplingParams
from jax_kvcanary.serving.weights import random_params
from jax_kvcanary.sweep import UNREACHABLE, SweepEntries, Sweeper, entries_of_nodes

SLOTS, LAYERS = 64, 2
LAYOUT = Layout.from_axes("slot head dim", interleaved="head")
POOL = [jax.ShapeDtypeStruct((SLOTS, 2, 8), jnp.float32)] * LAYERS


def make(capacity: int = 4, **options: Any) -> Canary:
    return Canary(POOL, LAYOUT, config=CanaryConfig(strict=True, sweep_capacity=capacity), **options)


def chain(slots: list[int], tokens: list[int] | None = None) -> SweepEntries:
    return entries_of_nodes(parents=[-1], slots=[slots], tokens=None if tokens is None else [tokens])


def columns(entries: SweepEntries) -> list[tuple[int, int, int, int]]:
    fields = (entries.slots, entries.positions, entries.prev_slots, entries.tokens)
    return list(zip(*(field.tolist() for field in fields), strict=True))


def handed(portion: Any) -> list[int]:
    return [slot for slot in portion.slots.tolist() if slot >= 0]


GOOD = np.ones(4, np.int32)


# ---------------------------------------------------------------------------------------------- trees


def test_entries_of_a_tree_in_any_order() -> None:
    """A root of two tokens with two children, of which one has a child; then the same, children first."""
    want = [(4, 0, -1, 11), (5, 1, 4, 12), (8, 2, 5, 13), (9, 3, 8, 14), (20, 2, 5, 15), (7, 4, 9, 16)]
    entries = entries_of_nodes(
        parents=[-1, 0, 0, 1], slots=[[4, 5], [8, 9], [20], [7]], tokens=[[11, 12], [13, 14], [15], [16]], namespaces=[3, 3, -1, 3]
    )
    assert columns(entries) == want
    assert entries.namespaces.tolist() == [3, 3, 3, 3, 2**64 - 1, 3] and entries.nodes.tolist() == [0, 0, 1, 1, 2, 3]
    turned = entries_of_nodes(parents=[2, 3, 3, -1], slots=[[7], [20], [8, 9], [4, 5]], tokens=[[16], [15], [13, 14], [11, 12]])
    assert sorted(columns(turned)) == sorted(want)
    assert len(entries_of_nodes(parents=[], slots=[], tokens=[])) == 0


def test_what_is_gone_has_no_entry_and_counts() -> None:
    """Evicted in part (a window), evicted as a whole, and nodes without tokens."""
    entries = entries_of_nodes(parents=[-1, 0, 1, 2, 3, -1], slots=[[-1, -1, 6], [-1, -1], [9], [], [10, -1], []])
    assert columns(entries) == [(6, 2, UNREACHABLE, -1), (9, 5, UNREACHABLE, -1), (10, 6, 9, -1)]
    assert columns(entries_of_nodes(parents=[-1, 0], slots=[[], [3]])) == [(3, 0, -1, -1)]


@pytest.mark.parametrize("turned", [False, True])
def test_deep_trees(turned: bool) -> None:
    """10^5 nodes in one chain, also with the leaf first."""
    count = 100_000
    parents = np.arange(count) + 1 if turned else np.arange(count) - 1
    if turned:
        parents[-1] = -1
    entries = entries_of_nodes(parents=parents, slots=np.arange(count)[:, None], tokens=np.arange(count)[:, None] % 7)
    want = np.arange(count)
    np.testing.assert_array_equal(entries.positions, want[::-1] if turned else want)
    np.testing.assert_array_equal(entries.prev_slots[entries.positions > 0], parents[parents >= 0])
    empty = entries_of_nodes(parents=np.arange(count) - 1, slots=[[5]] + [[]] * (count - 2) + [[6]])
    assert columns(empty) == [(5, 0, -1, -1), (6, 1, 5, -1)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parents": [1, 0], "slots": [[1], [2]]}, "nodes must not be their own ancestors"),
        ({"parents": [0], "slots": [[1]]}, "nodes must not be their own ancestors"),
        ({"parents": [2, -1], "slots": [[1], [2]]}, "parents must be -1 or the number of one of 2 nodes, got -1 to 2"),
        ({"parents": [-1], "slots": [[1, 2]], "tokens": [[1]]}, "node 0 has 2 slots and 1 tokens"),
        ({"parents": [-1], "slots": []}, "slots and tokens of each of the 1 nodes, got 0 of slots"),
        ({"parents": [-1], "slots": [[1]], "namespaces": []}, "one of namespaces a node, got 0 for 1 nodes"),
    ],
)
def test_trees_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entries_of_nodes(**given)


# ---------------------------------------------------------------------------------------------- rounds


def test_rounds_coverage_and_age() -> None:
    sweeper = Sweeper(make(), tree=lambda: chain(list(range(10, 20)), list(range(10))))
    assert sweeper.health().coverage is None and sweeper.health().age is None
    assert handed(sweeper.next_portion(3)) == [10, 11, 12, 13]
    assert handed(sweeper.next_portion(4)) == [10, 11, 12, 13]  # it was not launched
    sweeper.launched(GOOD)
    health = sweeper.health(6)
    assert (health.sweeps, health.succeeded, health.coverage, health.age, health.waiting) == (1, 0, 0.0, 3, 1)
    (result,) = sweeper.poll()
    assert result.succeeded and (result.step, result.round) == (4, 0) and result.entries.tokens.tolist() == [0, 1, 2, 3]
    health = sweeper.health()
    assert (health.succeeded, health.coverage, health.age, health.rounds) == (1, 0.4, 3, 0)
    for step, want in ((8, [14, 15, 16, 17]), (9, [18, 19])):
        assert handed(sweeper.next_portion(step)) == want
        sweeper.launched(GOOD)
    assert sweeper.health().rounds == 0 and len(sweeper.flush()) == 2
    health = sweeper.health(10)
    assert (health.rounds, health.coverage, health.age, health.tree) == (1, 1.0, 6, 10)
    assert handed(sweeper.next_portion(11)) == [10, 11, 12, 13]
    health = sweeper.health(11)
    assert (health.coverage, health.age) == (0.0, 7)
    assert health.pairs() == {"sweeps": 3, "sweep_rounds": 1, "sweep_coverage": "0.000", "sweep_age": 7}


def test_a_portion_is_padded_and_fresh() -> None:
    spaces = [2**40 + 5] * 3
    entries = SweepEntries.of(
        slots=[9, 10, 11], positions=[0, 1, 2], prev_slots=[-1, 9, UNREACHABLE], tokens=[5, 2**40, -1], namespaces=spaces
    )
    sweeper = Sweeper(make(), tree=lambda: entries)
    portion = sweeper.next_portion(0)
    assert portion.slots.tolist() == [9, 10, 11, -1] and portion.prev_slots.tolist() == [-1, 9, 0, -1]
    assert portion.tokens.tolist() == [5, -1, -1, -1] and portion.namespaces.tolist() == [[5, 256]] * 3 + [[0, 0]]
    assert sweeper.next_portion(0).slots is not portion.slots
    assert sweeper.blank().slots.tolist() == [-1] * 4


def test_without_a_padding_slot_orphans_are_left_out() -> None:
    entries = entries_of_nodes(parents=[-1], slots=[[-1, 3, 4, 5]])
    trees = [entries, chain([])]
    sweeper = Sweeper(make(padding_slot=None), tree=lambda: trees.pop(0))
    assert handed(sweeper.next_portion(0)) == [4, 5]
    sweeper.evicted([4])
    assert sweeper.next_portion(0) is None and not trees
    at_zero = Sweeper(make(), tree=lambda: chain([0, 1, 2]))
    assert handed(at_zero.next_portion(0)) == [1, 2]  # the padding slot is never checked


def test_evicted_slots_leave_the_round() -> None:
    sweeper = Sweeper(make(), tree=lambda: chain(list(range(10, 20))))
    portion = sweeper.next_portion(0)
    sweeper.evicted([11, 15, 99, -1])
    portion = sweeper.next_portion(0)
    assert handed(portion) == [10, 12, 13] and portion.prev_slots.tolist()[:3] == [-1, 0, 12]
    sweeper.launched(GOOD)
    portion = sweeper.next_portion(1)
    assert handed(portion) == [14, 16, 17, 18] and portion.prev_slots.tolist() == [13, 0, 16, 17]
    sweeper.launched(GOOD)
    sweeper.flush()
    assert sweeper.health().tree == 8 and sweeper.health().coverage == 7 / 8
    sweeper.evicted([19])
    assert sweeper.health().coverage == 1.0
    assert handed(sweeper.next_portion(2)) == [10, 11, 12, 13] and sweeper.health().rounds == 1
    sweeper.evicted(range(SLOTS))
    assert sweeper.health().age is None


def test_evicted_slots_of_a_tree_with_branches_and_shared_slots() -> None:
    """Three children lose one predecessor; a slot in two nodes of other tokens leaves both."""
    entries = entries_of_nodes(parents=[-1, 0, 0, 0, -1], slots=[[4, 5], [8], [9], [10, 11], [11]], tokens=[[1, 2], [3], [4], [5, 6], [7]])
    sweeper = Sweeper(make(16), tree=lambda: entries)
    sweeper.next_portion(0)
    sweeper.launched(np.zeros(16, np.int32))
    sweeper.next_portion(1)
    sweeper.evicted([5, 11])
    portion = sweeper.next_portion(1)
    assert handed(portion) == [4, 8, 9, 10] and portion.prev_slots[:4].tolist() == [-1, 0, 0, 0]


def test_nodes_that_share_slots_are_checked_once() -> None:
    entries = entries_of_nodes(parents=[-1, -1], slots=[[4, 5], [4, 5, 6]], tokens=[[1, 2], [1, 2, 3]])
    assert handed(Sweeper(make(), tree=lambda: entries).next_portion(0)) == [4, 5, 6]


def test_an_empty_tree_and_one_that_fills() -> None:
    held: list[int] = []
    sweeper = Sweeper(make(), tree=lambda: chain(held))
    assert sweeper.next_portion(0) is None and sweeper.health().coverage == 1.0 and sweeper.health().rounds == 0
    held += [7]
    assert handed(sweeper.next_portion(1)) == [7]


class Late:
    """Verdicts that are not ready."""

    def __init__(self, verdicts: np.ndarray) -> None:
        self.verdicts, self.shape, self.ready = verdicts, verdicts.shape, False

    def is_ready(self) -> bool:
        return self.ready

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.verdicts


def test_results_are_read_late_and_few_wait() -> None:
    sweeper = Sweeper(make(), tree=lambda: chain(list(range(10, 30))), max_waiting=2)
    late = [Late(np.array([1, 2, 1, 0], np.int32)), Late(GOOD)]
    for step, verdicts in enumerate(late):
        assert sweeper.next_portion(step) is not None
        sweeper.launched(verdicts)
    assert sweeper.next_portion(2) is None and sweeper.poll() == []
    health = sweeper.health()
    assert (health.sweeps, health.succeeded, health.waiting, health.skipped, health.coverage) == (2, 0, 2, 1, 0.0)
    late[1].ready = True
    assert sweeper.poll() == []  # in order
    late[0].ready = True
    bad, good = sweeper.poll()
    assert not bad.succeeded and bad.bad_slots.tolist() == [11] and bad.unattested == 1 and good.succeeded
    assert sweeper.health().succeeded == 1 and sweeper.health().bad == 1 and sweeper.health().coverage == 7 / 20
    assert handed(sweeper.next_portion(3)) == [18, 19, 20, 21]


def test_portions_by_a_callback() -> None:
    walk = [chain([10, 11, 12]), chain([20]), None, chain([20]), None, chain([20]), None, None]
    sweeper = Sweeper(make(), portions=lambda count: walk.pop(0) if count == 4 else None)
    for step, want in ((0, [10, 11, 12]), (1, [20])):
        assert handed(sweeper.next_portion(step)) == want
        sweeper.launched(GOOD)
        sweeper.poll()
    assert sweeper.health().coverage is None and sweeper.health(5).age == 5
    assert handed(sweeper.next_portion(6)) == [20] and sweeper.health().rounds == 1
    sweeper.launched(GOOD)
    sweeper.poll()
    assert sweeper.health().coverage == 0.25  # of the last round's four slots
    assert handed(sweeper.next_portion(7)) == [20]
    assert sweeper.health().age == 1  # slots that the walk did not come by again are gone
    sweeper.launched(GOOD)
    assert sweeper.next_portion(8) is None  # a whole round without a slot


def test_misuse() -> None:
    with pytest.raises(ValueError, match="takes one of tree and portions"):
        Sweeper(make())
    with pytest.raises(ValueError, match="sweep_capacity 0: there are no sweeps"):
        Sweeper(make(0), tree=lambda: chain([1]))
    sweeper = Sweeper(make(), tree=lambda: chain([SLOTS]))
    with pytest.raises(ValueError, match="launched without a portion"):
        sweeper.launched(GOOD)
    with pytest.raises(ValueError, match=r"slots in \[0, 64\), got 64 to 64"):
        sweeper.next_portion(0)
    sweeper = Sweeper(make(), tree=lambda: SweepEntries.of(slots=[1], positions=[1], prev_slots=[SLOTS]))
    with pytest.raises(ValueError, match="prev_slots below 64, got 64"):
        sweeper.next_portion(0)
    sweeper = Sweeper(make(), portions=lambda count: chain([1, 2, 3, 4, 5]))
    with pytest.raises(ValueError, match="portions returned 5 entries, the config's sweep_capacity is 4"):
        sweeper.next_portion(0)
    sweeper = Sweeper(make(), tree=lambda: [1])  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="must return SweepEntries, got list"):
        sweeper.next_portion(0)
    sweeper = Sweeper(make(), tree=lambda: chain([1]))
    sweeper.next_portion(0)
    with pytest.raises(ValueError, match=r"verdicts must have shape \(4,\), got \(3,\)"):
        sweeper.launched(np.ones(3, np.int32))
    with pytest.raises(ValueError, match="one of tokens a slot, got 1 for 2 slots"):
        SweepEntries.of(slots=[1, 2], positions=[0, 1], prev_slots=[-1, 1], tokens=[1])


@pytest.mark.parametrize("seed", range(5))
def test_every_slot_that_stays_is_checked_in_a_round(seed: int) -> None:
    """Random trees that change, random evictions, random launches: nothing gone is handed out, all that stays is."""
    rng = np.random.default_rng(seed)
    cached: dict[int, int] = {}
    sweeper = Sweeper(make(), tree=lambda: chain(list(cached)))
    since: dict[int, int] = {}
    for step in range(400):
        for slot in rng.choice(np.arange(1, SLOTS), 3, replace=False).tolist():
            if rng.random() < 0.5 and slot not in cached:
                cached[slot] = since[slot] = step
            elif rng.random() < 0.4 and slot in cached:
                del cached[slot], since[slot]
                sweeper.evicted([slot])
        portion = sweeper.next_portion(step)
        if portion is not None and rng.random() < 0.9:
            assert set(handed(portion)) <= set(cached)
            sweeper.launched(GOOD)
            for slot in handed(portion):
                since[slot] = step
        sweeper.poll() if rng.random() < 0.7 else None
        assert all(step - at < 80 for at in since.values())
    health = sweeper.health()
    assert health.rounds > 10 and health.bad == 0 and health.age is not None and health.age < 80


# ---------------------------------------------------------------------------------------------- on a device


def test_a_real_pool_with_evicted_shared_and_windowed_nodes() -> None:
    """Two requests in slots 4 to 11 and 20 to 23; every kind of node is silent, and a flip is found with its node's tokens."""
    canary = make(4)
    kv = [jnp.arange(SLOTS * 16, dtype=jnp.float32).reshape(SLOTS, 2, 8) + layer for layer in range(LAYERS)]
    table = np.zeros((3, 8), np.int32)
    table[1], table[2, :4] = range(4, 12), range(20, 24)
    batch = CanaryBatch(
        req_pool_indices=np.array([1, 2], np.int32),
        prefix_lens=np.zeros(2, np.int32),
        extend_seq_lens=np.array([8, 4], np.int32),
        req_to_token=table,
        input_ids=np.arange(100, 112, dtype=np.int32),
        request_ids=np.array([71, 72], np.int32),
        namespaces=np.array([0, 9], np.int32),
    )
    _, kv, state, _, _ = jax.jit(canary.guard(lambda kv: (None, kv)))(kv, canary.init(), batch)
    nodes: dict[str, Any] = {
        "parents": [-1, 0, 1, -1, -1],
        "slots": [[4, 5], [-1, -1, -1], [9, 10, 11], [20, -1, 22, 23], [4]],
        "tokens": [[100, 101], [102, 103, 104], [105, 106, 107], [108, 109, 110, 111], [100]],
        "namespaces": [0, 0, 0, 9, 0],
    }
    sweeper = Sweeper(canary, tree=lambda: entries_of_nodes(**nodes))
    sweep = jax.jit(canary.sweep)

    def round_of(kv: Any, state: Any) -> tuple[Any, list[Any]]:
        results, rounds, step = [], sweeper.health().rounds, 0
        while sweeper.health().rounds == rounds:
            step += 1
            portion = sweeper.next_portion(step)
            assert portion is not None and step < 10
            state, verdicts = sweep(kv, state, portion)
            sweeper.launched(verdicts)
            results += sweeper.flush()
        return state, results

    state, results = round_of(kv, state)
    assert all(result.succeeded for result in results) and sum(len(result.entries) for result in results) == 8
    kv[1] = kv[1].at[10, 1, 3].add(1)
    state, results = round_of(kv, state)
    (found,) = [finding for result in results for finding in result.bad]
    assert (found.slot, found.position, found.token, found.node) == (10, 6, 106, 2)
    assert found.node_tokens == (105, 106, 107) and found.node_slots == (9, 10, 11)
    assert sum(result.succeeded for result in results) == len(results) - 1


CONFIG = LlamaConfig()
PARAMS = random_params(CONFIG, seed=0)
SIZES = EngineConfig(num_pages=40, max_batch=2, max_context=128, chunk_size=64, decode_steps=1)
GUARD = make_canary(CONFIG, SIZES, CanaryConfig(strict=True, verify_every=4, sweep_capacity=2 * SIZES.page_size))
FAULTS = Faults(
    sources=pool_sources(pool_shapes(CONFIG, SIZES), Layout.from_axes("page slot head dim", interleaved="head")), page_size=SIZES.page_size
)


@pytest.mark.parametrize("seed", range(2))
def test_a_flip_in_an_idle_cached_page_is_reported_within_a_round(seed: int) -> None:
    """With the tokens of its node, and its age and coverage in the monitor's health."""
    monitor = Monitor(GUARD, page_size=SIZES.page_size)
    engine = FaultyEngine(CONFIG, PARAMS, GUARD, engine_config=SIZES, monitor=monitor, faults=FAULTS)
    prompts = [[(7 * i + j) % CONFIG.vocab_size for j in range(70)] for i in range(3)]
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_new_tokens=1))
    engine.run()
    engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=100))
    while engine.sweeper.health().rounds < 2:
        engine.step()
    assert monitor.health().sweep.rounds == 2 and not monitor.events
    assert "sweep_coverage=" in monitor.health().describe()
    engine.plant(FaultKind.FLIP_IDLE, seed=seed)
    engine.step()
    (planted,) = engine.planted
    tree = engine.sweeper.health().tree
    whole = -(-tree // GUARD.config.sweep_capacity)
    steps = 0
    while not monitor.events:
        engine.step()
        monitor.flush()
        steps += 1
        assert steps <= whole + 1
    event = monitor.events[0]
    assert event.slot == planted.slot and event.request == 0 and "sweep" in event.tag_name.lower()
    (found,) = engine.swept[-1].bad
    assert found.slot == planted.slot and len(found.node_tokens) == SIZES.page_size
    assert any(list(found.node_tokens) == prompt[start : start + SIZES.page_size] for prompt in prompts for start in range(0, 70))
    health = monitor.health().sweep
    assert health.bad == 1 and health.age is not None and health.age <= 2 * whole


def test_health_without_a_sweeper() -> None:
    monitor = Monitor(GUARD)
    assert monitor.health().sweep is None and "sweep" not in monitor.health().describe()
    assert dataclasses.asdict(Sweeper(make(), tree=lambda: chain([1])).health())["sweeps"] == 0
