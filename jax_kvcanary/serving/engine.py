"""The engine: requests in, tokens out, one jitted call a step, with a canary around the forward pass if one is given."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_kvcanary.canary import Canary
from jax_kvcanary.canary_state import SweepPortion
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.events import KvCanaryError
from jax_kvcanary.layouts import Layout
from jax_kvcanary.serving.batching import Bucket, StepInput, all_buckets, build_batch, choose_bucket, dummy_batch
from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.model import Params, make_pool, pool_shapes
from jax_kvcanary.serving.offload import DeviceState, HostStore
from jax_kvcanary.serving.pages import DUMMY_PAGE, PageAllocator
from jax_kvcanary.serving.plan import Request, StepPlan
from jax_kvcanary.serving.prefix_cache import PrefixCache
from jax_kvcanary.serving.sampling import SamplingParams
from jax_kvcanary.serving.scheduler import Scheduler
from jax_kvcanary.serving.steps import VERDICT_BAD, StepStatics, compiled_steps
from jax_kvcanary.sweep import Sweeper, SweepResult


@dataclasses.dataclass(frozen=True)
class Result:
    """What a request came to. status: "waiting", "running", "finished", "cancelled", "dropped" or "failed"."""

    request_id: int
    prompt: list[int]
    output: list[int]
    status: str
    finish_reason: str
    cached_tokens: int
    preemptions: int
    recomputes: int


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a call of :meth:`Engine.step` did.

    tokens: new tokens of each request. finished: requests that came to an end. bad: requests that the canary called bad, with the
    first bad position of each, -1 if unknown. quarantined: pages that are not used again. num_steps: model steps, 0 if there was
    nothing to do. events: what the monitor returned.
    """

    tokens: dict[int, list[int]]
    finished: list[int]
    bad: dict[int, int]
    quarantined: list[int]
    num_steps: int
    is_decode: bool
    events: list[Any] = dataclasses.field(default_factory=list)


def make_canary(config: LlamaConfig, engine_config: EngineConfig, canary_config: CanaryConfig | None = None, *, name: str = "kv") -> Canary:
    """A canary that fits an engine: its pool, page 0 for dummy writes, moves counted in pages."""
    return Canary(
        pool_shapes(config, engine_config),
        Layout.from_axes("page slot head dim", interleaved="head"),
        config=canary_config,
        name=name,
        reserved_slots=engine_config.page_size,
        copy_page_size=engine_config.page_size,
    )


class Engine:
    """Serves a Llama model from a paged pool.

    Args:
      config: the model's shapes. params: its weights, see :mod:`jax_kvcanary.serving.weights`.
      canary: of :func:`make_canary`, or another ``Canary`` for :func:`pool_shapes` that counts copies in slots or in pages; or None.
      engine_config: sizes and policies.
      monitor: reads the canary's reports, or None.
      dumper: a :class:`jax_kvcanary.dump.Dumper` that saves what the monitor's events are about, or None.

    Example:
      >>> config = LlamaConfig()
      >>> engine = Engine(config, random_params(config, seed=0), engine_config=EngineConfig(num_pages=16, max_context=64))
      >>> request_id = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=4))
      >>> len(engine.run()[request_id].output)
      4
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Params,
        canary: Canary | None = None,
        *,
        engine_config: EngineConfig | None = None,
        monitor: Any = None,
        dumper: Any = None,
    ) -> None:
        _check_canary(canary, engine_config or EngineConfig())
        self.config = config
        self.engine_config = engine_config or EngineConfig()
        self.canary = canary
        self.monitor, self.dumper = monitor, dumper
        self.params = params
        self.num_steps = 0
        self.compiled = compiled_steps(StepStatics.of(config, self.engine_config, canary))
        self.device = DeviceState(make_pool(config, self.engine_config), None if canary is None else canary.init())
        self.store = HostStore(self.device, self.compiled, canary, page_size=self.engine_config.page_size)
        self.allocator = PageAllocator(self.engine_config.num_pages)
        self.cache = PrefixCache(
            self.allocator, page_size=self.engine_config.page_size, store=self.store, host_pages=self.engine_config.host_pages
        )
        self.scheduler = Scheduler(self.engine_config, self.allocator, self.cache)
        self.requests: dict[int, Request] = {}
        self._calls = 0
        self.canary_step = 0  # steps that the canary has counted, dummy ones included
        sweeps = canary is not None and canary.config.mode != "off" and canary.config.sweep_capacity > 0
        self.sweeper = Sweeper(canary, tree=self.cache.entries) if canary is not None and sweeps else None
        self.swept: list[SweepResult] = []  # of the last step
        self._bad_sweeps: collections.deque[SweepResult] = collections.deque(maxlen=8)  # until their events come
        if monitor is not None and hasattr(monitor, "sweeper"):
            monitor.sweeper = self.sweeper
        self._ids = itertools.count((self.engine_config.engine_id << 32) + 1)

    # -------------------------------------------------------------------------------------------- requests

    def add_request(self, prompt: Sequence[int], sampling: SamplingParams | None = None, *, namespace: int = 0) -> int:
        """Queue a prompt of token ids; returns the request's id, which is never used again.

        namespace: 64 bits; requests of different ones (adapters, tenants) never share pages.
        """
        request = self._new_request(prompt, sampling or SamplingParams(), namespace)
        self.scheduler.enqueue(request)
        return request.request_id

    def add_parallel(self, prompt: Sequence[int], sampling: SamplingParams | None = None, *, n: int, namespace: int = 0) -> list[int]:
        """Queue ``n`` samples of one prompt, which is computed once; sample i has the seed ``sampling.seed + i``."""
        base = sampling or SamplingParams()
        samplings = [dataclasses.replace(base, seed=(base.seed + i) % 2**32) for i in range(n)]
        leader, *siblings = [self._new_request(prompt, each, namespace) for each in samplings]
        leader.siblings = siblings
        self.scheduler.enqueue(leader)
        return [request.request_id for request in (leader, *siblings)]

    def fork(self, request_id: int, *, seed: int = 0) -> int:
        """Another continuation of a request from where it is now; both go on from shared pages."""
        leader = self.requests[request_id]
        child = self._new_request(leader.prompt, dataclasses.replace(leader.sampling, seed=seed), leader.namespace)
        child.tokens = list(leader.tokens)
        if leader.is_done:
            raise ValueError(f"request {request_id} cannot fork, it is {leader.status.value}")
        self.scheduler.fork(leader, child, upto=leader.computed)
        return child.request_id

    def cancel(self, request_id: int) -> bool:
        """End a request; False if it had ended already."""
        request = self.requests[request_id]
        if request.is_done:
            return False
        self.scheduler.cancel(request)
        return True

    def result(self, request_id: int) -> Result:
        """What a request has come to so far."""
        request = self.requests[request_id]
        return Result(
            request_id=request_id,
            prompt=request.prompt,
            output=request.output,
            status=request.status.value,
            finish_reason=request.finish_reason,
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
            recomputes=request.recomputes,
        )

    @property
    def results(self) -> dict[int, Result]:
        """All requests that were not forgotten."""
        return {request_id: self.result(request_id) for request_id in self.requests}

    def forget(self, request_id: int) -> None:
        """Let go of a request that has ended."""
        if not self.requests[request_id].is_done:
            raise ValueError(f"request {request_id} is {self.requests[request_id].status.value}")
        del self.requests[request_id]

    @property
    def compile_count(self) -> int:
        """Programs compiled so far, shared with engines of the same statics; constant after :meth:`warm_up`."""
        return self.compiled.compile_count

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    # -------------------------------------------------------------------------------------------- steps

    def warm_up(self) -> int:
        """Compile every bucket with an unarmed batch of padding; returns the number of compiled programs."""
        for bucket, is_decode in all_buckets(self.engine_config):
            self._launch(dummy_batch(self.engine_config, bucket), bucket, is_decode=is_decode)
            self.canary_step += 1
        if self.sweeper is not None:
            self._sweep(self.sweeper.blank())
        if self.engine_config.host_pages:
            self.store.load(self.store.save(DUMMY_PAGE), DUMMY_PAGE)
        self._announce_releases([])
        return self.compile_count

    def step(self) -> StepResult:
        """One scheduling decision and one jitted call: prefill chunks with decode rows, or several decode steps."""
        plan = self.scheduler.schedule()
        if plan is None:
            return StepResult({}, [], {}, [], 0, False)
        bucket = choose_bucket(self.engine_config, plan)
        batch = build_batch(
            self.engine_config,
            plan,
            bucket,
            req_to_token=self.scheduler.req_to_token,
            token_ids=self.scheduler.token_ids,
            released=self._releases_for_batch(),
        )
        self._launch_sweep()
        results, report = self._launch(batch, bucket, is_decode=plan.is_decode)
        gone = self.scheduler.take_released()
        self.scheduler.launched()
        results = jax.device_get(results)
        self.swept = [] if self.sweeper is None else self.sweeper.flush()
        self._bad_sweeps.extend(result for result in self.swept if result.bad)
        self._record(batch, len(plan.entries), steps=int(results["steps"]), gone=gone)
        quarantined = {*self._quarantine(results["verdict"], int(results["steps"])), *self._quarantine_swept()}
        outcome = self._commit(plan, results, sorted(quarantined))
        return dataclasses.replace(outcome, events=self._observe(report, batch, len(plan.entries)))

    def run(self, *, max_steps: int | None = None, on_step: Callable[[StepResult], None] | None = None) -> dict[int, Result]:
        """Step until all requests have ended, or ``max_steps`` calls were made."""
        calls = 0
        while self.has_work and (max_steps is None or calls < max_steps):
            result = self.step()
            calls += 1
            if on_step is not None:
                on_step(result)
        return self.results

    def check(self) -> None:
        """Invariants of scheduler, cache and allocator between two steps; a test calls this."""
        self.scheduler.check()

    # -------------------------------------------------------------------------------------------- inside

    def _new_request(self, prompt: Sequence[int], sampling: SamplingParams, namespace: int) -> Request:
        request = self.scheduler.make_request(next(self._ids), prompt, sampling, namespace)
        self.requests[request.request_id] = request
        return request

    def _launch(self, batch: StepInput, bucket: Bucket, *, is_decode: bool) -> tuple[dict[str, Any], Any]:
        """Dispatch a step; the pool and the canary's state are donated and replaced."""
        step = self.compiled.decode if is_decode else self.compiled.mixed
        self.device.pool, self.device.canary_state, results, report = step(
            self.params, self.device.pool, self.device.canary_state, batch, pages=bucket.pages
        )
        return results, report

    def _commit(self, plan: StepPlan, results: dict[str, Any], quarantined: list[int]) -> StepResult:
        """Give each request its tokens, or what its verdict asks for."""
        steps = int(results["steps"])
        tokens: dict[int, list[int]] = {}
        bad: dict[int, int] = {}
        for i, entry in enumerate(plan.entries):
            request = entry.request
            position = self._first_bad_position(results["verdict"], steps, i)
            if position is not None:
                bad[request.request_id] = position
            if position is not None and self.engine_config.on_bad != "ignore":
                self._handle_bad(request)
            else:
                tokens[request.request_id] = self.scheduler.commit(entry, results["tokens"][:steps, i].tolist())
        self.num_steps += steps
        finished = [entry.request.request_id for entry in plan.entries if entry.request.is_done]
        return StepResult(tokens, finished, bad, quarantined, steps, plan.is_decode)

    def _first_bad_position(self, verdict: Any, steps: int, row: int) -> int | None:
        """First bad position of a batch row in the first step that found it bad, or None."""
        if verdict is None:
            return None
        for step in range(steps):
            if verdict.verdict[step, row] == VERDICT_BAD:
                return int(verdict.first_bad_position[step, row])
        return None

    def _quarantine(self, verdict: Any, steps: int) -> list[int]:
        """Take the pages of bad slots out of use, unless bad requests are ignored."""
        if verdict is None or self.engine_config.on_bad == "ignore":
            return []
        named = [verdict.first_bad_slot, *jax.tree.leaves(verdict.bad_slots)]  # the latter by group
        return self._quarantine_slots(np.concatenate([np.ravel(each[:steps]) for each in named]))

    def _quarantine_swept(self) -> list[int]:
        """The same for idle pages that a sweep found bad."""
        if self.engine_config.on_bad == "ignore":
            return []
        return [page for result in self.swept for page in self._quarantine_slots(result.bad_slots)]

    def _quarantine_slots(self, slots: np.ndarray) -> list[int]:
        usable = slots[(slots >= 0) & (slots < self.engine_config.num_pages * self.engine_config.page_size)]
        pages = sorted({int(slot) // self.engine_config.page_size for slot in usable} - {DUMMY_PAGE})
        self.scheduler.quarantine(pages)
        return pages

    def _handle_bad(self, request: Request) -> None:
        """Nothing that the step sampled for a bad request counts."""
        if self.engine_config.on_bad == "recompute" and request.recomputes < self.engine_config.max_recomputes:
            self.scheduler.recompute(request)
        else:
            self.scheduler.drop(request, "bad KV")

    def _releases_for_batch(self) -> list[int]:
        """Freed pages for this batch; those past its capacity are announced before it."""
        released = self.allocator.take_released()
        capacity = self.engine_config.release_capacity
        for start in range(capacity, len(released), capacity):
            self._announce_releases(released[start : start + capacity])
        return released[:capacity]

    def _announce_releases(self, pages: Sequence[int]) -> None:
        if self.canary is not None:
            padded = np.full(self.engine_config.release_capacity, -1, np.int32)
            padded[: len(pages)] = pages
            self.device.canary_state = self.canary.release(self.device.canary_state, slots=padded, page_size=self.engine_config.page_size)

    def _launch_sweep(self) -> None:
        """Check the next cached pages, if the canary sweeps and it is time."""
        every, calls = self.engine_config.sweep_every, self._calls
        self._calls += 1
        if self.sweeper is None:
            return
        size = self.engine_config.page_size
        gone = np.array(self.cache.take_given_up(), np.int64)
        self.sweeper.evicted(gone[:, None] * size + np.arange(size))
        if every == 0 or calls % every:
            return
        portion = self.sweeper.next_portion(self.canary_step)
        if portion is not None:
            self.sweeper.launched(self._sweep(portion))

    def _sweep(self, portion: SweepPortion) -> Any:
        """Dispatch a sweep; returns the verdicts on the device."""
        self.device.canary_state, verdicts = self.compiled.sweep(self.device.pool, self.device.canary_state, portion)
        return verdicts

    def _record(self, batch: StepInput, count: int, *, steps: int, gone: Sequence[int]) -> None:
        """Give the monitor the tables of each model step as the host has them: evidence for the cause of a violation."""
        if self.monitor is not None and hasattr(self.monitor, "record_batch"):
            size = self.engine_config.page_size
            ids = batch.request_ids[:count].astype(np.uint64)
            tables = self._page_tables(batch, count)
            for step in range(steps):
                self.monitor.record_batch(
                    self.canary_step + step,
                    request_ids=(ids[:, 0] | ids[:, 1] << np.uint64(32)).tolist(),
                    tables=tables,
                    lengths=batch.prefix_lens[:count] + batch.extend_lens[:count] + step,
                    prefix_lengths=batch.prefix_lens[:count] + step,
                    copies=self._copied_slots(batch) if step == 0 else None,
                    finished=gone if step == 0 else (),
                    released=batch.released[batch.released >= 0] if step == 0 else (),
                    page_size=size,
                )
        self.canary_step += steps

    def _page_tables(self, batch: StepInput, count: int) -> np.ndarray:
        """Pages ``[count, places]`` of the batch's requests."""
        size = self.engine_config.page_size
        return np.asarray(batch.req_to_token)[batch.req_pool_indices[:count], ::size] // size

    def _copied_slots(self, batch: StepInput) -> tuple[np.ndarray, np.ndarray]:
        """From and to of all slots that were copied with their pages."""
        size = self.engine_config.page_size
        used = batch.copy_dst >= 0
        src, dst = ((pages[used][:, None] * size + np.arange(size)).reshape(-1) for pages in (batch.copy_src, batch.copy_dst))
        return src, dst

    def _observe(self, report: Any, batch: StepInput, count: int) -> list[Any]:
        """Hand the report to the monitor, which never waits for the device, and save what its events are about."""
        if self.monitor is None or report is None:
            return []
        try:
            events = self.monitor.observe(report)
        except KvCanaryError as error:
            self._dump(error.events, batch, count)
            raise
        self._dump(events, batch, count)
        self.device.canary_state = self.monitor.service(self.device.canary_state)
        return events

    def _dump(self, events: Sequence[Any], batch: StepInput, count: int) -> None:
        """Save before the next step: pool and state are whole now, and the step donates them."""
        if self.dumper is not None and events:
            ids = batch.request_ids[:count].astype(np.uint64)
            self.dumper.save(
                self.device.pool,
                self.device.canary_state,
                events,
                request_ids=(ids[:, 0] | ids[:, 1] << np.uint64(32)).tolist(),
                tables=self._page_tables(batch, count),
                lengths=batch.prefix_lens[:count] + batch.extend_lens[:count],
                page_size=self.engine_config.page_size,
                swept=self._bad_sweeps,
            )


def _check_canary(canary: Canary | None, engine_config: EngineConfig) -> None:
    if canary is not None and canary.copy_page_size not in (1, engine_config.page_size):
        raise ValueError(f"the canary's copy_page_size must be 1 or page_size={engine_config.page_size}, got {canary.copy_page_size}")
