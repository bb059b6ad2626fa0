"""The example engine with one small bug at a time under random traffic: is it seen, and is its cause named rightly?

``python tests/test_mutations.py [id ...]`` prints the table, with ``-v`` the event of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import re
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutations import MUTATIONS, Mutation

import jax_kvcanary.serving
from jax_kvcanary.causes import Cause
from jax_kvcanary.events import Event
from jax_kvcanary.monitor import Monitor
from jax_kvcanary.serving import LlamaConfig, Traffic, drive, make_canary, model, random_params
from jax_kvcanary.serving.batching import StepInput
from jax_kvcanary.serving.soak import SIZES, canary_config, traffic_config
from jax_kvcanary.serving.steps import StepStatics, compiled_steps

MODEL = LlamaConfig(vocab_size=128, num_layers=3)
CONFIG = dataclasses.replace(SIZES, num_pages=36, max_context=128, page_buckets=(6, 16), batch_buckets=(), on_bad="ignore")
TRAFFIC = dataclasses.replace(
    traffic_config(MODEL, SIZES),
    max_context=128, arrivals=1.2, cancels=0.05, forks=0.15, share=0.8, cut=0.5, parallel=0.2, sampled=0.0,
    prompt_length=(1, 30), output_length=(2, 24),
)  # fmt: skip
SEED, STEPS = 0, 140
HOST_MODULES = ("plan", "batching", "pages", "offload", "prefix_cache", "scheduler", "engine")
JITTED_MODULES = ("model", "steps")
PROGRAMS = ("mixed", "decode", "take_page", "put_page", "sweep")
WHOLE = Mutation("none", "engine", "class Engine:", "class Engine:", "nothing", silent="no bug")

EXPECTED = {
    mutation: outcome
    for outcome, mutations in {
        ("event", "unknown", True): """
            frees_too_early cache_takes_no_reference reader_takes_no_reference double_free fork_shares_one_page_less
            decode_without_reserve first_page_not_in_table partial_match_too_long caches_pages_shifted key_of_two_tokens
            pads_rows_with_minus_one
        """,
        ("silent", "-", False): """
            release_not_announced release_announced_twice evicts_what_is_read evicts_and_frees_what_is_read
            host_page_dropped_in_use quarantine_stays_cached source_freed_before_copy copy_of_preempted_request copy_into_released
            fork_one_page_short stale_table_row keeps_row_of_before table_not_copied padded_moves_with_zero
        """,
        ("event", "unknown", False): """
            evicts_newest_parent_first namespace_not_in_key
        """,
        ("event", "right", True): """
            forgets_copy_on_write copies_wrong_way_round copy_not_in_batch table_keeps_shared_page copy_skips_a_layer
            copy_after_the_step chunk_skips_a_token preemption_keeps_computed caches_unwritten_page row_given_twice
            wrong_page_in_table matched_pages_reversed loads_one_load_late loads_wrong_host_page loads_into_wrong_page
            pads_slots_with_minus_one position_off_by_one token_before slots_off_by_one slots_of_other_row
            prefix_lens_of_other_row extend_lens_one_short shares_column_buffers next_slot_is_the_last stale_out_cache_loc
            stale_input_ids writes_first_tokens_only write_skips_a_layer writes_v_before_k
        """,
        ("event", "right", False): """
            copies_again_and_again saves_bytes_without_records
        """,
        ("load", "-", True): """
            bytes_one_load_late
        """,
        ("load", "-", False): """
            saves_wrong_page saves_records_of_other_page saves_one_layer_thrice saves_into_shared_buffer load_skips_a_layer
            load_swaps_k_and_v
        """,
        ("silent", "-", True): """
            page_bucket_cuts_last_page rope_from_chunk_start attention_of_other_prefix
        """,
    }.items()
    for mutation in mutations.split()
}
"""How each is seen, what its cause is worth, and whether it makes a request read wrong K and V."""

# ---------------------------------------------------------------------------------------------- a copy of the package


def mutated(mutation: Mutation) -> str:
    """The text of the mutated module."""
    source = (Path(jax_kvcanary.serving.__file__).parent / f"{mutation.module}.py").read_text()
    assert source.count(mutation.old) == 1, f"{mutation.id}: its text stands {source.count(mutation.old)} times in {mutation.module}.py"
    return source.replace(mutation.old, mutation.new)


def load(mutation: Mutation) -> types.ModuleType:
    """The engine module of a copy of the package; what is jitted is copied only if the mutation is there."""
    jitted = JITTED_MODULES if mutation.module == "model" else JITTED_MODULES[1:] if mutation.module == "steps" else ()
    names = [*HOST_MODULES[:2], *jitted, *HOST_MODULES[2:]]  # in order of their imports
    package = f"mutant_{mutation.id}"
    sys.modules[package] = types.ModuleType(package)
    imports = re.compile(rf"jax_kvcanary\.serving\.({'|'.join(names)})\b")
    for name in names:
        path = Path(jax_kvcanary.serving.__file__).parent / f"{name}.py"
        source = mutated(mutation) if name == mutation.module else path.read_text()
        module = sys.modules[f"{package}.{name}"] = types.ModuleType(f"{package}.{name}")
        exec(compile(imports.sub(rf"{package}.\1", source), f"{package}/{name}.py", "exec"), module.__dict__)
        if name == "batching":
            module.StepInput = StepInput  # type: ignore[attr-defined]  # what the shared programs were traced with
    return sys.modules[f"{package}.engine"]


def unload(mutation: Mutation) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == f"mutant_{mutation.id}"]:
        del sys.modules[name]


# ---------------------------------------------------------------------------------------------- what is really in the pool


@functools.partial(jax.jit, static_argnums=0)
def deviation(config: LlamaConfig, params: Any, pool: Any, tokens: jax.Array, slots: jax.Array, computed: jax.Array) -> jax.Array:
    """How far K and V of requests in the pool are from a dense pass, ``[n]``. tokens, slots: ``[n, context]``. computed: ``[n]``."""

    def of_one(tokens: jax.Array, slots: jax.Array, computed: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[0])
        tables = model.rope_tables(config, positions)
        x, worst = params["embedding"][tokens], jnp.float32(0)
        for layer, pages in zip(params["layers"], pool, strict=True):
            q, k, v = model.project_qkv(config, layer, x, tables)
            held = pages.reshape(-1, *pages.shape[2:])[slots]
            apart = jnp.max(jnp.abs(held - model.kv_rows(k, v, held.dtype)), axis=(1, 2))
            worst = jnp.maximum(worst, jnp.max(jnp.where(positions < computed, apart, 0)))
            attended = model.attend(q[None], k[None], v[None], positions[None])[0].reshape(tokens.shape[0], -1)
            x = x + attended @ layer["attn_output"].T
            x = x + model.feed_forward(config, layer, x)
        return worst

    return jax.vmap(of_one)(tokens, slots, computed)


def is_corrupt(engine: Any) -> bool:
    """Whether a running request's table leads to K and V that are not those of its tokens. Knows nothing of the canary."""
    rows, context = CONFIG.max_batch, CONFIG.max_context
    tokens, slots, computed = np.zeros((rows, context), np.int32), np.zeros((rows, context), np.int32), np.zeros(rows, np.int32)
    for i, request in enumerate(engine.scheduler.running[:rows]):
        tokens[i, : len(request.tokens)] = request.tokens[:context]
        slots[i] = engine.scheduler.req_to_token[request.row]
        computed[i] = request.computed
    apart = np.asarray(deviation(MODEL, params(), engine.device.pool, tokens, slots, computed))
    return bool((apart > 1e-3).any() or np.isnan(apart).any())


# ---------------------------------------------------------------------------------------------- one run


@dataclasses.dataclass
class Outcome:
    """What became of a mutation.

    how: "event" (a violation), "load" (the import of a page from the host failed), "crash" (the engine raised), "silent". seen:
    model steps until then. corrupt: model steps until a request's table led to wrong K and V, None if that never was. events: root
    events of the step that was seen first. error: of the engine.
    """

    mutation: Mutation
    how: str = "silent"
    seen: int | None = None
    corrupt: int | None = None
    events: list[Event] = dataclasses.field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def cause(self) -> str:
        """ "right", "unknown", "wrong", or "-" where no event tells one."""
        if self.how != "event":
            return "-"
        causes = [event.cause for event in self.events]
        if any(cause is not Cause.UNKNOWN and cause not in self.mutation.right for cause in causes):
            return "wrong"
        return "unknown" if causes[0] is Cause.UNKNOWN else "right"

    @property
    def stored(self) -> tuple[str, str, bool]:
        """What the table of expectations holds."""
        return self.how, self.cause, self.corrupt is not None


class _Stop(Exception):
    """The run has shown what it can show."""


@functools.lru_cache
def params() -> Any:
    return random_params(MODEL, seed=0)


@functools.lru_cache
def canary() -> Any:
    return make_canary(MODEL, CONFIG, canary_config(CONFIG))


def run(mutation: Mutation) -> Outcome:
    """Random traffic on a mutated engine, until something is seen and it is known whether K and V are wrong."""
    start, outcome = time.perf_counter(), Outcome(mutation)
    monitor = Monitor(canary(), page_size=CONFIG.page_size)
    config = dataclasses.replace(CONFIG, page_buckets=()) if mutation.programs else CONFIG  # fewer programs to compile
    try:
        engine = load(mutation).Engine(MODEL, params(), canary(), engine_config=config, monitor=monitor)
        share_programs(engine, mutation)
        _serve(engine, monitor, outcome)
    finally:
        unload(mutation)
        outcome.seconds = time.perf_counter() - start
    return outcome


def share_programs(engine: Any, mutation: Mutation) -> None:
    whole = compiled_steps(StepStatics.of(MODEL, CONFIG, canary()))
    for name in PROGRAMS:
        if name not in mutation.programs:
            setattr(engine.compiled, name, getattr(whole, name))


def _serve(engine: Any, monitor: Monitor, outcome: Outcome) -> None:
    calls = 0

    def after(number: int, _: Any) -> None:
        nonlocal calls
        calls += 1
        _look(engine, monitor, outcome, number)
        if (outcome.seen is not None and outcome.corrupt is not None) or calls > 2 * STEPS:
            raise _Stop

    try:
        if not outcome.mutation.programs:
            engine.warm_up()
        drive(engine, Traffic(TRAFFIC, seed=SEED), steps=STEPS, on_step=after)
    except _Stop:
        pass
    except Exception as error:  # a mutated engine may fail in any way
        if outcome.seen is None:
            outcome.how, outcome.seen, outcome.error = "crash", engine.num_steps, f"{type(error).__name__}: {error}"


def _look(engine: Any, monitor: Monitor, outcome: Outcome, number: int) -> None:
    monitor.flush()
    if outcome.corrupt is None and (outcome.seen is not None or engine.num_steps % 2) and is_corrupt(engine):
        outcome.corrupt = number
    if outcome.seen is not None:
        return
    roots = [event for event in monitor.events if event.kind == "violation" and event.root is None]
    if roots:
        outcome.how, outcome.seen = "event", number
        outcome.events = [event for event in roots if event.step == roots[0].step]
    elif engine.scheduler.load_failures:
        outcome.how, outcome.seen = "load", number


# ---------------------------------------------------------------------------------------------- table


HEADER = f"{'mutation':32} {'module':13} {'how':7} {'steps':>5} {'wrong KV':>8} {'cause':8} {'said':22} reason"


def lines_of(o: Outcome, *, verbose: bool = False) -> Iterator[str]:
    """A line of the table, and with ``verbose`` what was said."""
    said = ",".join(dict.fromkeys(event.cause.value for event in o.events)) or "-"
    reason = "|".join(o.events[0].reason_names) if o.events else o.error[:60] or "-"
    steps, wrong = ("-" if n is None else str(n) for n in (o.seen, o.corrupt))
    yield f"{o.mutation.id:32} {o.mutation.module:13} {o.how:7} {steps:>5} {wrong:>8} {o.cause:8} {said:22} {reason}"
    if verbose:
        yield f"    {o.mutation.truth}; {o.seconds:.1f} s {o.error}"
        shown = [event for event in o.events if event.run is None]
        yield from (f"    {line}" for event in shown[:8] for line in event.describe().splitlines())


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The counts, then the silent ones and why."""
    yield counts(outcomes)
    for o in outcomes:
        if o.how == "silent":
            yield f"silent: {o.mutation.id}: {o.mutation.truth}; {o.mutation.silent or 'NO REASON KNOWN'}"


def counts(outcomes: Sequence[Outcome]) -> str:
    how = {kind: sum(o.how == kind for o in outcomes) for kind in ("event", "load", "crash", "silent")}
    cause = {kind: sum(o.cause == kind for o in outcomes) for kind in ("right", "unknown", "wrong")}
    corrupt = [o for o in outcomes if o.corrupt is not None]
    seen = sum(o.how in ("event", "load") for o in corrupt)
    return (
        f"{len(outcomes)} mutations: {how['event'] + how['load']} seen ({how['event']} as violations, {how['load']} as failed loads), "
        f"{how['crash']} crashes, {how['silent']} silent; causes: {cause['right']} right, {cause['unknown']} unknown, "
        f"{cause['wrong']} wrong; {len(corrupt)} make a request read wrong K and V, {seen} of them seen"
    )


# ---------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module", autouse=True)
def _compile_fast() -> Iterator[None]:
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def outcome_of(mutation: Mutation) -> Outcome:
    return run(mutation)


def test_a_copy_without_a_bug_is_silent() -> None:
    outcome = outcome_of(WHOLE)
    assert outcome.stored == ("silent", "-", False), "\n".join(event.describe() for event in outcome.events) or outcome.error


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_mutation(mutation: Mutation) -> None:
    """As the table of expectations says; a cause that is wrong is a defect whatever the table says."""
    outcome = outcome_of(mutation)
    said = "\n".join(event.describe() for event in outcome.events if event.run is None) or outcome.error
    assert outcome.cause != "wrong", said
    assert outcome.stored == EXPECTED[mutation.id], said


def test_score(capsys: pytest.CaptureFixture[str]) -> None:
    """Four of five bugs that make a request read wrong K and V are seen; the silent ones have a reason."""
    outcomes = [outcome_of(mutation) for mutation in MUTATIONS]
    with capsys.disabled():
        print("", HEADER, *(line for o in outcomes for line in lines_of(o)), *summary(outcomes), sep="\n")
    corrupt = [o for o in outcomes if o.corrupt is not None]
    assert len(MUTATIONS) >= 30 and len(corrupt) >= 30
    assert sum(o.how in ("event", "load") for o in corrupt) >= 0.8 * len(corrupt)
    assert all(o.mutation.silent for o in outcomes if o.how == "silent")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args(argv)
    logging.getLogger("jax_kvcanary").setLevel(logging.CRITICAL)
    logging.getLogger("mutant").setLevel(logging.CRITICAL)
    start = time.perf_counter()
    jax.config.update("jax_disable_most_optimizations", True)
    print(HEADER, flush=True)
    outcomes = []
    for mutation in [WHOLE, *MUTATIONS]:
        if not options.ids or mutation.id in options.ids:
            outcomes.append(run(mutation))
            print(*lines_of(outcomes[-1], verbose=options.verbose), sep="\n", flush=True)
    print(*summary(outcomes), sep="\n")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(any(o.cause == "wrong" for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
