"""write: stamp the records of the tokens of a step and report inputs that are not what the engine expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_kvcanary.reference.hashing import head_hash, mix3
from jax_kvcanary.reference.integers import clamp, integers, item, require_length, scalar, signed
from jax_kvcanary.reference.log import LogWriter, context_word
from jax_kvcanary.reference.record import Provenance, Record, as_records, is_blank, read_record, store_record
from jax_kvcanary.reference.source import SourceReader, as_source_tags
from jax_kvcanary.spec import FailReason, RealKvHashMode, Verdict
from jax_kvcanary.state import Plan, ViolationLog, WritePlan, WriteResult


def write(
    *,
    records: Any,
    log: ViolationLog,
    plan: WritePlan | Plan,
    input_ids: Any,
    positions: Any,
    out_cache_loc: Any,
    launch_tag: int,
    real_kv_hash_mode: int = RealKvHashMode.NONE,
    real_kv_sources: Sequence[Any] = (),
    real_kv_buffers: Sequence[Any] = (),
    source_tags: Any = None,
    enable_write_input_assert: bool = False,
    expected_input_tokens: Any = None,
    expected_input_positions: Any = None,
    enable_chain_position_assert: Any = None,
    request_ids: Any = None,
    namespaces: Any = None,
    record_flags: int = 0,
    step: Any = 0,
    shard: Any = 0,
    padding_slot: int | None = 0,
    extended_checks: bool = True,
    strict: bool = True,
) -> WriteResult:
    """Stamp the entries of a plan, requests in order and entries in order; records, tags and log are returned, not changed in place."""
    has_expected = expected_input_tokens is not None or expected_input_positions is not None
    if enable_write_input_assert and (expected_input_tokens is None or expected_input_positions is None):
        raise ValueError("kv-canary: enable_write_input_assert requires expected_input_tokens and expected_input_positions")
    if has_expected and not enable_write_input_assert:
        raise ValueError("kv-canary: expected_input_tokens and expected_input_positions require enable_write_input_assert")

    new_records = as_records(records).copy()
    reader = SourceReader(real_kv_sources, real_kv_buffers, real_kv_hash_mode)
    tags = as_source_tags(source_tags, new_records.shape[0], len(reader))
    new_tags = None if tags is None else tags.copy()
    slots = reader.slots(new_records.shape[0])

    segments = plan.write if isinstance(plan, Plan) else plan
    seeds = integers(segments.write_seed_slot_indices)
    offsets = integers(segments.write_offsets)
    require_length("write_offsets", offsets, len(seeds) + 1)
    req_pool_indices = integers(segments.req_pool_indices)
    ids, namespace_of = integers(request_ids), integers(namespaces)

    tokens, token_positions, locations = integers(input_ids), integers(positions), integers(out_cache_loc)
    expected_tokens, expected_positions = integers(expected_input_tokens), integers(expected_input_positions)
    total = len(tokens)
    require_length("positions", token_positions, total)
    require_length("out_cache_loc", locations, total)
    if enable_write_input_assert:
        require_length("expected_input_tokens", expected_tokens, total)
        require_length("expected_input_positions", expected_positions, total)
    chain_position_assert = scalar(enable_chain_position_assert) != 0

    writer = LogWriter(log, launch_tag=launch_tag, step=context_word(step), shard=context_word(shard))
    writer.count_launch()
    writer.start()
    hashes = reader.hashes(slot for slot in locations if 0 <= slot < slots)  # the pool does not change during the launch
    verdict = [int(Verdict.NOT_CHECKED)] * len(seeds)

    for r in range(clamp(scalar(segments.write_num_valid_reqs), 0, len(seeds))):
        who = {"batch_row": r, "req_pool_idx": item(req_pool_indices, r, -1)}
        reported = stored = False

        begin, end = max(offsets[r], 0), min(offsets[r + 1], total)
        if extended_checks and (offsets[r] < 0 or offsets[r + 1] > total or offsets[r + 1] < offsets[r]):
            writer.row(slot=-1, reason=FailReason.TABLE_OUT_OF_RANGE, aux=-1, **who)
            reported = True

        # Where the chain starts: after the seed's record, or as a head of the request's namespace.
        namespace, seed = item(namespace_of, r, 0), seeds[r]
        running, previous_position, asserts_positions = head_hash(namespace), None, False
        if begin < end and 0 <= seed < slots:
            seed_record = read_record(new_records, seed)
            running, previous_position = seed_record.chain_hash, seed_record.position
            asserts_positions = chain_position_assert
            if extended_checks and not strict and is_blank(new_records, seed):
                previous_position = None  # nobody wrote it: its position is not known
        elif begin < end and seed != -1 and extended_checks:
            writer.row(slot=seed, reason=FailReason.SLOT_OUT_OF_RANGE, chain_hash=running, aux=-1, **who)
            reported = True

        for i in range(begin, end):
            slot, token, position = locations[i], tokens[i], token_positions[i]
            in_range = 0 <= slot < slots
            if slot == -1 or (not in_range and padding_slot is not None and slot == padding_slot):
                continue  # a dummy write without a slot in this pool
            actual = {"slot": slot, "position": position, "token": token, "chain_hash": running}

            bits, expected_token, expected_position = 0, -1, -1
            if enable_write_input_assert:
                expected_token, expected_position = expected_tokens[i], expected_positions[i]
                bits |= FailReason.WRITE_TOKEN if token != expected_token else 0
                bits |= FailReason.WRITE_POSITION if position != expected_position else 0
            expected = {"expected_token": expected_token, "aux": expected_position, "expected_position": expected_position}

            if not in_range:
                if extended_checks:
                    writer.row(reason=bits | FailReason.SLOT_OUT_OF_RANGE, **expected, **actual, **who)
                    reported = True
                continue

            real_kv = hashes[slot]
            both_hashes = {"real_kv_hash": real_kv.combined, "expected_real_kv_hash": real_kv.combined}
            if bits:
                writer.row(reason=bits, **expected, **actual, **both_hashes, **who)
                reported = True
            if asserts_positions:
                wanted = position if previous_position is None else signed(previous_position + 1)
                if position != wanted:
                    chain = {"expected_token": token, "aux": wanted, "expected_position": wanted}
                    writer.row(reason=FailReason.WRITE_POSITION, **chain, **actual, **both_hashes, **who)
                    reported = True
                previous_position = position

            provenance = Provenance(item(ids, r, 0), context_word(step), record_flags, namespace)
            store_record(new_records, slot, Record(token, position, running, real_kv.combined), provenance)
            if new_tags is not None:
                new_tags[slot] = real_kv.tags
            writer.count_slots(1)
            stored = True
            running = mix3(running, token, position)

        verdict[r] = int(Verdict.BAD if reported else Verdict.OK if stored else Verdict.NOT_CHECKED)

    return WriteResult(records=new_records, source_tags=new_tags, log=writer.result(), verdict=np.array(verdict, np.int32))
