"""The jitted steps: one pass over a mixed batch, and several decode steps in one loop, each with the canary's two lines."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary.batch import CanaryBatch
from jax_kvcanary.canary_state import SweepPortion
from jax_kvcanary.layouts import Layout
from jax_kvcanary.serving.batching import StepInput
from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.model import Params, Pool, copy_pages, forward, page_table, put_page, take_page
from jax_kvcanary.serving.sampling import sample

VERDICT_BAD = 2


@dataclasses.dataclass(frozen=True)
class StepStatics:
    """What a step is compiled for, besides its shapes. canary: a ``Canary`` or None. max_steps: of the decode loop."""

    model: LlamaConfig
    canary: Any
    page_size: int
    max_steps: int
    eos_token_ids: tuple[int, ...]
    check_writes: bool

    @classmethod
    def of(cls, model: LlamaConfig, engine: EngineConfig, canary: Any) -> StepStatics:
        return cls(
            model=model,
            canary=canary,
            page_size=engine.page_size,
            max_steps=engine.decode_steps,
            eos_token_ids=engine.eos_token_ids,
            check_writes=engine.check_writes,
        )


class CompiledSteps:
    """The jitted functions of an engine, and how many programs they were compiled to. The pool and the canary's state are donated.

    Engines of equal statics share them, see :func:`compiled_steps`.
    """

    def __init__(self, statics: StepStatics) -> None:
        self.compile_count = 0
        self.mixed = self._jit(functools.partial(mixed_step, statics), donate=(1, 2), static=("pages",))
        self.decode = self._jit(functools.partial(decode_steps, statics), donate=(1, 2), static=("pages",))
        self.take_page = self._jit(take_page)
        self.put_page = self._jit(put_page, donate=(0,))
        self.sweep = self._jit(functools.partial(sweep, statics), donate=(1,))

    def _jit(self, function: Callable[..., Any], *, donate: tuple[int, ...] = (), static: tuple[str, ...] = ()) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.compile_count += 1  # runs when traced
            return function(*args, **kwargs)

        return jax.jit(counted, donate_argnums=donate, static_argnames=static)


@functools.lru_cache(maxsize=8)
def compiled_steps(statics: StepStatics) -> CompiledSteps:
    """The jitted functions for some statics."""
    return CompiledSteps(statics)


def canary_batch(statics: StepStatics, batch: StepInput) -> CanaryBatch:
    """The batch in the canary's terms."""
    moved = pages_in_canary_units(statics)
    expected = expected_inputs(batch)
    return CanaryBatch(
        req_pool_indices=batch.req_pool_indices,
        prefix_lens=batch.prefix_lens,
        extend_seq_lens=batch.extend_lens,
        req_to_token=batch.req_to_token,
        input_ids=batch.input_ids,
        positions=batch.positions,
        out_cache_loc=batch.out_cache_loc,
        request_ids=batch.request_ids,
        namespaces=batch.namespaces,
        expected_tokens=batch.token_ids,
        expected_valid_lens=batch.valid_lens,
        expected_input_tokens=expected[0],
        expected_input_positions=expected[1],
        released_slots=moved(batch.released),
        copy_src=moved(batch.copy_src),
        copy_dst=moved(batch.copy_dst),
        armed=batch.armed,
    )


def expected_inputs(batch: StepInput) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions ``[tokens]`` that the tables say this step writes; those past the last one mean nothing."""
    starts = jnp.cumsum(batch.extend_lens) - batch.extend_lens
    index = jnp.arange(batch.input_ids.shape[0])
    owner = jnp.clip(jnp.searchsorted(starts, index, side="right") - 1, 0)
    positions = batch.prefix_lens[owner] + index - starts[owner]
    return batch.token_ids.at[batch.req_pool_indices[owner], positions].get(mode="clip"), positions


def pages_in_canary_units(statics: StepStatics) -> Callable[[jax.Array], jax.Array]:
    """How moved pages are announced: as pages if the canary counts in pages of this size, else as their slots."""
    page_size = statics.page_size
    if statics.canary.copy_page_size == page_size:
        return lambda pages: pages
    return functools.partial(slots_of_pages, page_size=page_size)


def slots_of_pages(pages: jax.Array, page_size: int) -> jax.Array:
    """All slots ``[n * page_size]`` of pages ``[n]``; -1 stays -1."""
    slots = pages[:, None] * page_size + jnp.arange(page_size, dtype=pages.dtype)
    return jnp.where(pages[:, None] < 0, -1, slots).reshape(-1)


def guarded_forward(
    statics: StepStatics, params: Params, pool: Pool, state: Any, batch: StepInput, *, pages: int, max_extend: int
) -> tuple[jax.Array, Pool, Any, Any, Any]:
    """Forward pass between the canary's head and tail.

    Returns:
      Logits ``[bs, vocab]``, the pool, the canary's state, its verdict and its report; the last three None without a canary.
    """
    canary, verdict, report = statics.canary, None, None
    marks = None if canary is None or canary.config.mode == "off" else canary_batch(statics, batch)
    if canary is not None:
        pool, state, verdict = canary.head(pool, state, marks)
    logits, pool, new_kv = forward(
        statics.model,
        params,
        tuple(pool),
        input_ids=batch.input_ids,
        positions=batch.positions,
        out_cache_loc=batch.out_cache_loc if batch.model_cache_loc is None else batch.model_cache_loc,
        pages=page_table(batch.req_to_token, batch.req_pool_indices, page_size=statics.page_size, pages=pages),
        prefix_lens=batch.prefix_lens,
        extend_lens=batch.extend_lens,
        max_extend=max_extend,
    )
    if canary is not None:
        state, verdict, report = canary.tail(pool, state, marks, verdict, **written_rows(statics, new_kv))
    return logits, pool, state, verdict, report


def written_rows(statics: StepStatics, new_kv: Pool) -> dict[str, Any]:
    """What the tail compares the pool with, if it is to check that writes have landed."""
    return {"new_kv": list(new_kv), "new_kv_layout": Layout.from_axes("slot head dim", interleaved="head")} if statics.check_writes else {}


def sweep(statics: StepStatics, pool: Pool, state: Any, portion: SweepPortion) -> tuple[Any, jax.Array]:
    """Verify idle cached slots; returns the canary's state and a verdict ``[n]``."""
    return statics.canary.sweep(pool, state, portion)


def mixed_step(
    statics: StepStatics, params: Params, pool: Pool, state: Any, batch: StepInput, *, pages: int
) -> tuple[Pool, Any, dict[str, Any], Any]:
    """Prefill chunks and decode rows in one pass. Results have a leading axis of one step, as those of :func:`decode_steps`."""
    pool = copy_pages(pool, batch.copy_src, batch.copy_dst)
    logits, pool, state, verdict, report = guarded_forward(
        statics, params, pool, state, batch, pages=pages, max_extend=batch.input_ids.shape[0]
    )
    tokens = sample_next(batch, logits)
    results = {"tokens": tokens, "verdict": verdict}
    return pool, state, jax.tree.map(lambda x: x[None], results) | {"steps": jnp.int32(1)}, report


def decode_steps(
    statics: StepStatics, params: Params, pool: Pool, state: Any, batch: StepInput, *, pages: int
) -> tuple[Pool, Any, dict[str, Any], Any]:
    """``num_steps`` decode steps in one loop, which ends early when a request does.

    Returns:
      The pool, the canary's state, ``tokens`` int32 ``[decode_steps, bs]`` and ``verdict`` with the same leading axis, of which the
      first ``steps`` count, and the canary's last report.
    """
    pool = copy_pages(pool, batch.copy_src, batch.copy_dst)
    verdict, report = blank_results(statics, pool, state, batch)
    rows = {"tokens": jnp.zeros_like(batch.req_pool_indices), "verdict": verdict}
    results = jax.tree.map(lambda x: jnp.zeros((statics.max_steps, *x.shape), x.dtype), rows)

    def running(carry: tuple[Any, ...]) -> jax.Array:
        step, stop = carry[:2]
        return (step < batch.num_steps) & ~stop

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, _, pool, state, batch, results, _ = carry
        logits, pool, state, verdict, report = guarded_forward(statics, params, pool, state, batch, pages=pages, max_extend=1)
        tokens = sample_next(batch, logits)
        rows = {"tokens": tokens, "verdict": verdict}
        results = jax.tree.map(lambda all_steps, x: all_steps.at[step].set(x), results, rows)
        return step + 1, must_stop(statics, batch, tokens, verdict), pool, state, advance(batch, tokens), results, report

    carry = (jnp.int32(0), jnp.bool_(False), pool, state, batch, results, report)
    steps, _, pool, state, _, results, report = jax.lax.while_loop(running, body, carry)
    return pool, state, results | {"steps": steps}, report


def sample_next(batch: StepInput, logits: jax.Array) -> jax.Array:
    """The next token ``[bs]`` of each request."""
    return sample(
        logits,
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        seeds=batch.seeds,
        positions=batch.prefix_lens + batch.extend_lens,
    )


def advance(batch: StepInput, tokens: jax.Array) -> StepInput:
    """The batch of the next decode step: the sampled tokens go in, one position further; copies and releases are done."""
    prefix_lens = batch.prefix_lens + batch.extend_lens
    return dataclasses.replace(
        batch,
        prefix_lens=prefix_lens,
        valid_lens=batch.valid_lens + batch.extend_lens,
        input_ids=tokens,
        positions=prefix_lens,
        out_cache_loc=next_slots(batch, prefix_lens),
        model_cache_loc=None if batch.model_cache_loc is None else next_slots(batch, prefix_lens),
        token_ids=batch.token_ids.at[batch.req_pool_indices, prefix_lens].set(tokens, mode="drop"),
        copy_src=jnp.full_like(batch.copy_src, -1),
        copy_dst=jnp.full_like(batch.copy_dst, -1),
        released=jnp.full_like(batch.released, -1),
    )


def next_slots(batch: StepInput, prefix_lens: jax.Array) -> jax.Array:
    """Slots ``[bs]`` of the next tokens; padding rows lead to slot 0."""
    return batch.req_to_token.at[batch.req_pool_indices, prefix_lens].get(mode="fill", fill_value=0)


def must_stop(statics: StepStatics, batch: StepInput, tokens: jax.Array, verdict: Any) -> jax.Array:
    """Whether a request of the batch has reached its end, or is bad and must not go on."""
    stop = jnp.isin(tokens, jnp.array(statics.eos_token_ids, jnp.int32))
    if verdict is not None:
        stop |= batch.stop_on_bad & (verdict.verdict == VERDICT_BAD)
    return jnp.any(stop & (batch.extend_lens > 0))


def blank_results(statics: StepStatics, pool: Pool, state: Any, batch: StepInput) -> tuple[Any, Any]:
    """Zeros in the shape of a verdict and a report, to start a loop with."""
    if statics.canary is None:
        return None, None

    def marks_only(pool: Pool, state: Any, batch: StepInput) -> tuple[Any, Any]:
        marks = canary_batch(statics, batch)
        pool, state, verdict = statics.canary.head(pool, state, marks)
        _, verdict, report = statics.canary.tail(pool, state, marks, verdict)
        return verdict, report

    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(marks_only, pool, state, batch))
