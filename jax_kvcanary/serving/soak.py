"""Random traffic for thousands of steps under a canary: silent without faults, and with a fault now and then every one seen and named."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_kvcanary.causes import Cause
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.events import Event
from jax_kvcanary.faults import FaultKind, Faults
from jax_kvcanary.layouts import Layout, pool_sources
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.serving import console
from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.engine import Engine, make_canary
from jax_kvcanary.serving.fault_run import FaultyEngine, Outcome, Planted, judge
from jax_kvcanary.serving.model import pool_shapes
from jax_kvcanary.serving.traffic import Traffic, TrafficConfig, drive
from jax_kvcanary.serving.weights import random_params

MODEL = LlamaConfig(vocab_size=128, hidden_size=32, num_layers=3)
SIZES = EngineConfig(
    page_size=8,
    num_pages=44,
    max_batch=6,
    max_context=176,
    chunk_size=32,
    decode_steps=4,
    batch_buckets=(2, 6),
    host_pages=16,
    on_bad="recompute",
    check_writes=True,
)
"""Few pages for many requests: eviction, preemption and loads from the host happen all the time."""


@dataclasses.dataclass
class Summary:
    """What a soak came to.

    steps: model steps. programs: compiled after warm-up. events: those that no planted fault explains. unattested: slots.
    planted: faults. seen: of them. gone: whose slot was freed before anything read it again. missed, misnamed: what must not be.
    unknown: seen, at the right place, without a cause. delays: steps until each was seen. counts: of what the engine did.
    """

    steps: int = 0
    programs: int = 0
    events: list[Event] = dataclasses.field(default_factory=list)
    unattested: int = 0
    planted: int = 0
    seen: int = 0
    gone: int = 0
    unknown: int = 0
    missed: list[Planted] = dataclasses.field(default_factory=list)
    misnamed: list[Outcome] = dataclasses.field(default_factory=list)
    delays: dict[FaultKind, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Nothing alarmed without a fault, and no fault was missed or misnamed."""
        return not (self.events or self.unattested or self.programs or self.missed or self.misnamed)


def canary_config(sizes: EngineConfig) -> CanaryConfig:
    """All checks, all bytes within four steps, four pages a sweep."""
    return CanaryConfig(strict=True, verify_every=4, sweep_capacity=4 * sizes.page_size)


def traffic_config(model: LlamaConfig, sizes: EngineConfig) -> TrafficConfig:
    """Traffic that fits the engine."""
    return TrafficConfig(
        vocab_size=model.vocab_size, max_context=sizes.max_context, prompt_length=(1, 50), output_length=(2, 40), prefix_length=(8, 70)
    )


def run_clean(*, steps: int, seed: int, on_step: Callable[[int], Any] | None = None, sizes: EngineConfig = SIZES) -> Summary:
    """Traffic without faults."""
    canary = make_canary(MODEL, sizes, canary_config(sizes))
    monitor = Monitor(canary, page_size=sizes.page_size)
    engine = Engine(MODEL, random_params(MODEL, seed=0), canary, engine_config=sizes, monitor=monitor)
    programs = engine.warm_up()
    start = time.perf_counter()
    done = drive(
        engine,
        Traffic(traffic_config(MODEL, sizes), seed=seed),
        steps=steps,
        on_step=None if on_step is None else lambda number, _: on_step(number),
    )
    monitor.flush()
    summary = Summary(steps=done, programs=engine.compile_count - programs, seconds=time.perf_counter() - start)
    summary.events = list(monitor.events)
    summary.unattested = monitor.health().unattested
    summary.counts = _counts(engine)
    return summary


def run_faulty(*, steps: int, seed: int, every: int, on_step: Callable[[int], Any] | None = None, sizes: EngineConfig = SIZES) -> Summary:
    """Traffic with a fault every so many steps, each kind in turn; bad requests are recomputed, bad pages wiped and used again."""
    sizes = dataclasses.replace(sizes, decode_steps=1)
    canary = make_canary(MODEL, sizes, canary_config(sizes))
    monitor = Monitor(canary, page_size=sizes.page_size, history=100_000)
    sources = pool_sources(pool_shapes(MODEL, sizes), Layout.from_axes("page slot head dim", interleaved="head"))
    faults = Faults(sources=sources, page_size=sizes.page_size, vocabulary=MODEL.vocab_size)
    engine = FaultyEngine(MODEL, random_params(MODEL, seed=0), canary, engine_config=sizes, monitor=monitor, faults=faults)
    engine.warm_up()
    summary, run, start = Summary(), _FaultRun(engine, monitor, every, seed), time.perf_counter()

    def after(number: int, _: Any) -> None:
        monitor.flush()
        run.after_step(summary)
        if on_step is not None:
            on_step(number)

    summary.steps = drive(engine, Traffic(traffic_config(MODEL, sizes), seed=seed), steps=steps, on_step=after)
    summary.seconds = time.perf_counter() - start
    summary.unattested = monitor.health().unattested
    summary.counts = _counts(engine)
    return summary


class _FaultRun:
    """Plants one fault after the other and judges each before the next."""

    def __init__(self, engine: FaultyEngine, monitor: Monitor, every: int, seed: int) -> None:
        self.engine, self.monitor, self.every = engine, monitor, every
        self.kinds = list(FaultKind)
        self.number = seed
        self.next_at = every
        self.judged = 0  # of engine.planted
        self.told = 0  # of the monitor's events
        self.freed = False
        self.allocations = engine.allocator.allocations.copy()
        self.mine: list[Event] = []
        cached = engine.engine_config.num_pages * engine.engine_config.page_size
        assert engine.canary is not None
        sweep = 2 * cached // max(1, engine.canary.config.sweep_capacity) * max(1, engine.engine_config.sweep_every)
        self.period = engine.canary.coverage().all_bytes + sweep + 2

    def after_step(self, summary: Summary) -> None:
        engine = self.engine
        fresh = list(self.monitor.events)[self.told :]
        self.told += len(fresh)
        waiting = engine.planted[self.judged :]
        if waiting:
            self.mine += fresh
            self._judge(waiting[0], summary)
        summary.events += [event for event in fresh if not self._explained(event)]
        if not waiting and engine.num_steps >= self.next_at:
            engine.plant(self.kinds[self.number % len(self.kinds)], seed=self.number)
            self.number += 1
            self.next_at = engine.num_steps + self.every
            self.allocations = engine.allocator.allocations.copy()

    def _judge(self, planted: Planted, summary: Summary) -> None:
        page = planted.slot // self.engine.engine_config.page_size
        allocator = self.engine.allocator
        self.freed = self.freed or allocator.refcounts[page] == 0 or allocator.allocations[page] != self.allocations[page]
        outcome = judge(planted, self.mine)
        late = self.engine.canary_step - planted.step > self.period
        if outcome.steps is None and not self.freed and not late:
            return
        summary.planted += 1
        if outcome.steps is not None:
            summary.seen += 1
            summary.delays[planted.kind].append(max(0, outcome.steps))
            assert outcome.event is not None
            if outcome.event.cause is Cause.UNKNOWN:
                summary.unknown += 1
            elif not outcome.cause_right:
                summary.misnamed.append(outcome)
        elif self.freed:
            summary.gone += 1
        else:
            summary.missed.append(planted)
        self.judged += 1
        self.mine, self.freed = [], False
        self.engine.wipe_quarantine()

    def _explained(self, event: Event) -> bool:
        """Whether a planted fault is behind an event: its request, one that shares the slot, or a page that it touched."""
        size = self.engine.engine_config.page_size
        for planted in self.engine.planted[-8:]:
            pages = {slot // size for slot in (planted.slot, planted.other_slot) if slot >= 0}
            requests = {planted.request, planted.other_request} - {0}
            if event.request in requests or event.slot // size in pages or requests & {request for request, _ in event.sharers}:
                return True
        return False


def _counts(engine: Engine) -> dict[str, int]:
    """What happened in the engine, so that a soak that tests nothing shows."""
    names = ("preemptions", "cow_copies", "chunks", "finished", "cancelled", "forks")
    scheduler = {name: int(getattr(engine.scheduler, name)) for name in names if hasattr(engine.scheduler, name)}
    return scheduler | {name: getattr(engine.cache, name) for name in ("evictions", "offloads", "loads")}


@console.quiet()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; 0 if it is good."""
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="model steps (default 10,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults-every", type=int, default=0, metavar="N", help="plant a fault every N steps (default: none)")
    options = parser.parse_args(argv)
    out = console.console()
    with console.progress(out) as bars:
        task = bars.add_task("soak", total=options.steps)

        def advance(number: int) -> None:
            bars.update(task, completed=min(number, options.steps))

        if options.faults_every:
            summary = run_faulty(steps=options.steps, seed=options.seed, every=options.faults_every, on_step=advance)
        else:
            summary = run_clean(steps=options.steps, seed=options.seed, on_step=advance)
    for line in describe(summary):
        out.print(line)
    return 0 if summary.good else 1


def describe(summary: Summary) -> list[str]:
    """The summary in lines."""
    lines = [
        f"{summary.steps} steps in {summary.seconds:.0f} s, {summary.programs} programs compiled after warm-up",
        "traffic: " + ", ".join(f"{count} {name}" for name, count in summary.counts.items()),
        f"{len(summary.events)} unexplained events, {summary.unattested} unattested slots",
    ]
    lines += [f"  {event.line()}" for event in summary.events[:10]]
    if summary.planted:
        lines.append(
            f"{summary.planted} faults: {summary.seen} seen ({summary.unknown} of unknown cause), {summary.gone} gone before anything read "
            f"them, {len(summary.missed)} missed, {len(summary.misnamed)} misnamed"
        )
        lines += [f"  {kind.value}: seen after {np.mean(steps):.1f} steps, at most {max(steps)}" for kind, steps in summary.delays.items()]
        lines += [f"  missed: {planted}" for planted in summary.missed[:10]]
        lines += [f"  misnamed: {o.planted} as {o.event.line() if o.event else '-'}" for o in summary.misnamed[:10]]
    lines.append("good" if summary.good else "NOT GOOD")
    return lines
