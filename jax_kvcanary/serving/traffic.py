"""Random traffic for soak runs: arrivals, shared prefixes, parallel samples, forks and cancels, the same for the same seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jax_kvcanary.serving.engine import Engine, StepResult
from jax_kvcanary.serving.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """Rates and sizes. arrivals, cancels, forks: mean number a call of step. Lengths are inclusive ranges of tokens.

    prefixes: shared beginnings, of which a prompt takes one with probability share; cut: probability that it leaves the prefix early,
    at any token. parallel: probability of two to max_parallel samples of a prompt. sampled: probability of a temperature above 0.
    namespaces: how many name spaces there are. max_queue: arrivals pause while that many requests wait.
    """

    vocab_size: int = 256
    max_context: int = 256
    arrivals: float = 0.6
    cancels: float = 0.02
    forks: float = 0.03
    prompt_length: tuple[int, int] = (1, 60)
    output_length: tuple[int, int] = (1, 40)
    prefixes: int = 6
    prefix_length: tuple[int, int] = (8, 70)
    share: float = 0.6
    cut: float = 0.3
    parallel: float = 0.1
    max_parallel: int = 3
    sampled: float = 0.3
    namespaces: int = 2
    max_queue: int = 12

    def __post_init__(self) -> None:
        longest = self.prompt_length[1] + self.prefix_length[1] + self.output_length[1]
        if longest > self.max_context:
            raise ValueError(f"TrafficConfig: prefix, prompt and output must fit max_context={self.max_context}, got {longest}")
        if self.max_parallel < 2:
            raise ValueError(f"TrafficConfig.max_parallel must be at least 2, got {self.max_parallel}")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A prompt to queue, ``n`` samples of it."""

    prompt: list[int]
    sampling: SamplingParams
    n: int
    namespace: int


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Cancel a live request; ``pick`` in [0, 1) says which."""

    pick: float


@dataclasses.dataclass(frozen=True)
class Fork:
    """Fork a live request; ``pick`` in [0, 1) says which."""

    pick: float
    seed: int


Event = Arrival | Cancel | Fork


class Traffic:
    """An endless stream of events, drawn from the seed alone."""

    def __init__(self, config: TrafficConfig, *, seed: int) -> None:
        self.config = config
        self._rng = np.random.default_rng(seed)
        self._prefixes = [self._tokens(config.prefix_length) for _ in range(config.prefixes)]

    def next_events(self) -> list[Event]:
        """What happens before the next step."""
        events: list[Event] = [self._arrival() for _ in range(self._rng.poisson(self.config.arrivals))]
        events += [Cancel(float(self._rng.random())) for _ in range(self._rng.poisson(self.config.cancels))]
        events += [Fork(float(self._rng.random()), self._seed()) for _ in range(self._rng.poisson(self.config.forks))]
        return events

    def _arrival(self) -> Arrival:
        n = int(self._rng.integers(2, self.config.max_parallel + 1)) if self._happens(self.config.parallel) else 1
        namespace = int(self._rng.integers(self.config.namespaces))
        return Arrival(self._prompt(), self._sampling(), n, namespace)

    def _prompt(self) -> list[int]:
        own = self._tokens(self.config.prompt_length)
        if not self.config.prefixes or not self._happens(self.config.share):
            return own
        prefix = self._prefixes[int(self._rng.integers(self.config.prefixes))]
        if self._happens(self.config.cut):
            prefix = prefix[: int(self._rng.integers(1, len(prefix) + 1))]
        return prefix + own

    def _sampling(self) -> SamplingParams:
        low, high = self.config.output_length
        length = int(self._rng.integers(low, high + 1))
        if not self._happens(self.config.sampled):
            return SamplingParams(max_new_tokens=length)
        top_k, top_p = int(self._rng.integers(0, 50)), float(self._rng.uniform(0.5, 1.0))
        return SamplingParams(max_new_tokens=length, temperature=1.0, top_k=top_k, top_p=top_p, seed=self._seed())

    def _tokens(self, lengths: tuple[int, int]) -> list[int]:
        count = int(self._rng.integers(lengths[0], lengths[1] + 1))
        return self._rng.integers(self.config.vocab_size, size=count).tolist()

    def _happens(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _seed(self) -> int:
        return int(self._rng.integers(2**32))


def apply_event(engine: Engine, event: Event) -> list[int]:
    """Let one event happen; returns the ids of new requests."""
    if isinstance(event, Arrival):
        return engine.add_parallel(event.prompt, event.sampling, n=event.n, namespace=event.namespace)
    live = [request_id for request_id, request in engine.requests.items() if not request.is_done]
    if not live:
        return []
    target = live[int(event.pick * len(live))]
    if isinstance(event, Fork):
        return [engine.fork(target, seed=event.seed)]
    engine.cancel(target)
    return []


def drive(
    engine: Engine,
    traffic: Traffic,
    *,
    steps: int,
    on_step: Callable[[int, StepResult], None] | None = None,
    forget: bool = True,
) -> int:
    """Run an engine under traffic for at least ``steps`` model steps; returns how many there were.

    on_step: called with the number of model steps so far and the step's result. forget: let go of ended requests, so that a long run
    needs no more memory than a short one.
    """
    start = engine.num_steps
    while engine.num_steps - start < steps:
        events = traffic.next_events()
        if len(engine.scheduler.waiting) >= traffic.config.max_queue:
            events = [event for event in events if not isinstance(event, Arrival)]
        for event in events:
            apply_event(engine, event)
        result = engine.step()
        if on_step is not None:
            on_step(engine.num_steps - start, result)
        if forget:
            for request_id in [request_id for request_id, request in engine.requests.items() if request.is_done]:
                engine.forget(request_id)
    return engine.num_steps - start
