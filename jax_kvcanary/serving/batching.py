"""Batches of a step, padded to buckets: plain NumPy from the scheduler's plan, in buffers that are fresh every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_kvcanary.serving.config import EngineConfig
from jax_kvcanary.serving.plan import Entry, StepPlan

PADDING_ROW = 0
PADDING_SLOT = 0
PADDING_MOVE = -1


@dataclasses.dataclass(frozen=True)
class StepInput:
    """Operands of a step. bs, tokens, copies and releases are padded sizes.

    req_pool_indices, prefix_lens, extend_lens, valid_lens: int32 ``[bs]``, row 0 is padding. input_ids, positions, out_cache_loc:
    int32 ``[tokens]``. req_to_token, token_ids: int32 ``[rows, context]``, the slot and the token of each position. request_ids,
    namespaces: uint32 ``[bs, 2]``, low word first. copy_src, copy_dst, released: int32 pages, padded with -1. temperature, top_p:
    float32 ``[bs]``. top_k: int32 ``[bs]``. seeds: uint32 ``[bs]``. armed: bool scalar, False for a dummy batch. stop_on_bad: bool scalar,
    whether a bad request ends the decode loop. num_steps: int32 scalar, decode steps. model_cache_loc: int32 ``[tokens]``, where the
    model writes if that is not out_cache_loc, for faults on purpose; None in all others.
    """

    req_pool_indices: Any
    prefix_lens: Any
    extend_lens: Any
    valid_lens: Any
    input_ids: Any
    positions: Any
    out_cache_loc: Any
    req_to_token: Any
    token_ids: Any
    request_ids: Any
    namespaces: Any
    copy_src: Any
    copy_dst: Any
    released: Any
    temperature: Any
    top_k: Any
    top_p: Any
    seeds: Any
    armed: Any
    stop_on_bad: Any
    num_steps: Any
    model_cache_loc: Any = None


jax.tree_util.register_dataclass(StepInput, data_fields=[field.name for field in dataclasses.fields(StepInput)], meta_fields=[])


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Static sizes of a compiled step."""

    bs: int
    tokens: int
    pages: int


def pick_bucket(count: int, buckets: Sequence[int]) -> int:
    """The smallest padded size that holds ``count``."""
    for bucket in buckets:
        if count <= bucket:
            return bucket
    raise ValueError(f"no bucket of {tuple(buckets)} holds {count}")


def choose_bucket(config: EngineConfig, plan: StepPlan) -> Bucket:
    """Padded sizes of a plan; a decode step has one token a row."""
    bs = pick_bucket(len(plan.entries), config.batch_buckets)
    tokens = bs if plan.is_decode else pick_bucket(sum(entry.extend for entry in plan.entries), config.token_buckets)
    return Bucket(bs=bs, tokens=tokens, pages=pick_bucket(_pages_seen(config, plan), config.page_buckets))


def all_buckets(config: EngineConfig) -> list[tuple[Bucket, bool]]:
    """Every bucket that a plan can have, and whether it is a decode step."""
    buckets = []
    for pages in config.page_buckets:
        for bs in config.batch_buckets:
            buckets.append((Bucket(bs=bs, tokens=bs, pages=pages), True))
            buckets.extend((Bucket(bs=bs, tokens=tokens, pages=pages), False) for tokens in config.token_buckets)
    return buckets


def _pages_seen(config: EngineConfig, plan: StepPlan) -> int:
    """Most pages that attention of one request reaches within the step."""
    return max(-(-(entry.request.computed + entry.extend + plan.num_steps - 1) // config.page_size) for entry in plan.entries)


def build_batch(
    config: EngineConfig, plan: StepPlan, bucket: Bucket, *, req_to_token: np.ndarray, token_ids: np.ndarray, released: Sequence[int]
) -> StepInput:
    """The operands of a plan. The tables are copied: the device may read them after the scheduler has gone on."""
    entries = plan.entries
    return StepInput(
        req_pool_indices=_column(bucket.bs, [entry.request.row for entry in entries], np.int32, PADDING_ROW),
        prefix_lens=_column(bucket.bs, [entry.request.computed for entry in entries], np.int32),
        extend_lens=_column(bucket.bs, [entry.extend for entry in entries], np.int32),
        valid_lens=_column(bucket.bs, [entry.request.computed + entry.extend for entry in entries], np.int32),
        input_ids=_flat_tokens(bucket, entries),
        positions=_flat_positions(bucket, entries),
        out_cache_loc=_flat_slots(bucket, entries, req_to_token),
        req_to_token=req_to_token.copy(),
        token_ids=token_ids.copy(),
        request_ids=_words(bucket.bs, [entry.request.request_id for entry in entries]),
        namespaces=_words(bucket.bs, [entry.request.namespace for entry in entries]),
        copy_src=_column(config.max_batch, [src for src, _ in plan.copies], np.int32, PADDING_MOVE),
        copy_dst=_column(config.max_batch, [dst for _, dst in plan.copies], np.int32, PADDING_MOVE),
        released=_column(config.release_capacity, released, np.int32, PADDING_MOVE),
        temperature=_column(bucket.bs, [entry.request.sampling.temperature for entry in entries], np.float32),
        top_k=_column(bucket.bs, [entry.request.sampling.top_k for entry in entries], np.int32),
        top_p=_column(bucket.bs, [entry.request.sampling.top_p for entry in entries], np.float32, 1),
        seeds=_column(bucket.bs, [entry.request.sampling.seed for entry in entries], np.uint32),
        armed=np.bool_(True),
        stop_on_bad=np.bool_(config.on_bad != "ignore"),
        num_steps=np.int32(plan.num_steps),
    )


def dummy_batch(config: EngineConfig, bucket: Bucket) -> StepInput:
    """An unarmed batch of padding alone, to compile a bucket before any request comes."""
    tables = np.zeros((config.rows, config.max_context), np.int32)
    plan = StepPlan(entries=[], copies=[], num_steps=1, is_decode=bucket.tokens == bucket.bs)
    batch = build_batch(config, plan, bucket, req_to_token=tables, token_ids=tables, released=[])
    return dataclasses.replace(batch, armed=np.bool_(False))


def _column(size: int, values: Sequence[Any], dtype: Any, padding: Any = 0) -> np.ndarray:
    column = np.full(size, padding, dtype)
    column[: len(values)] = values
    return column


def _words(size: int, values: Sequence[int]) -> np.ndarray:
    """64-bit numbers as uint32 ``[size, 2]``, low word first."""
    words = np.zeros((size, 2), np.uint32)
    for i, value in enumerate(values):
        words[i] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    return words


def _flat_tokens(bucket: Bucket, entries: Sequence[Entry]) -> np.ndarray:
    flat = [token for entry in entries for token in entry.request.tokens[entry.request.computed : entry.request.computed + entry.extend]]
    return _column(bucket.tokens, flat, np.int32)


def _flat_positions(bucket: Bucket, entries: Sequence[Entry]) -> np.ndarray:
    flat = [position for entry in entries for position in range(entry.request.computed, entry.request.computed + entry.extend)]
    return _column(bucket.tokens, flat, np.int32)


def _flat_slots(bucket: Bucket, entries: Sequence[Entry], req_to_token: np.ndarray) -> np.ndarray:
    flat = [
        slot
        for entry in entries
        for slot in req_to_token[entry.request.row, entry.request.computed : entry.request.computed + entry.extend].tolist()
    ]
    return _column(bucket.tokens, flat, np.int32, PADDING_SLOT)
