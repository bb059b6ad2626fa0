"""write in plain JAX: hashes of slots in chunks, the chains of all requests side by side, records stored in one scatter.

Requests count in order. Where one starts from a record that an earlier one of the launch writes (or segments overlap), the launch
is cut into groups of requests there: one pass of the same code each, in most launches a single one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import hashing, words
from jax_kvcanary.pure import log as log_
from jax_kvcanary.pure.indexing import (
    count,
    count_not_above,
    cummax,
    cumsum,
    exclusive,
    iota,
    put,
    put_max,
    put_window,
    row,
    row64,
    search,
    take,
    take64,
    take_columns,
    take_rows,
)
from jax_kvcanary.pure.log import Log
from jax_kvcanary.pure.source import SourceHasher
from jax_kvcanary.pure.target import per_platform
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import PROVENANCE_RECORD_WORDS, FailReason, Verdict

_NO_SLOT = np.uint32(2**32 - 1)


class _Tokens(NamedTuple):
    """The entries of a launch, ``[T]``; ``inside``: its slot can be written, ``outside``: it names a slot that does not exist."""

    token: U64
    position: U64
    slot: U64
    inside: jax.Array
    outside: jax.Array
    expected_token: U64
    expected_position: U64
    assert_bits: jax.Array  # uint32
    real_kv_hash: U64
    last_stored: jax.Array  # int32, the entry stored before it, -1 if none
    key: jax.Array  # uint32, slots in rising order
    order: jax.Array  # int32, the entries in the order of key


class _Requests(NamedTuple):
    """The requests of a launch, ``[R]``: clamped segments, seeds, and what their rows and records say."""

    begin: jax.Array
    end: jax.Array
    active: jax.Array  # counts and has entries
    cut: jax.Array  # its segment had to be clamped
    seed: U64
    req_pool_idx: U64
    request_id: U64
    namespace: U64


# Columns of rows, see spec.Column: an input, an input whose slot is out of range, a chain position, a cut segment, a seed.
_ENTRY = "tag slot position token {} running {} {} request req_pool_idx step {} {} {} none shard"
_ROWS = (
    _ENTRY.format("expected_token", "expected_position", "reason", "expected_position", "real_kv", "real_kv"),
    _ENTRY.format("expected_token", "expected_position", "reason", "expected_position", "zero", "zero"),
    _ENTRY.format("token", "next_position", "wrong_position", "next_position", "real_kv", "real_kv"),
    "tag none zero zero none zero none segment request req_pool_idx step none zero zero none shard",
    "tag seed zero zero none head none out_of_range request req_pool_idx step none zero zero none shard",
)


class _State(NamedTuple):
    records: jax.Array
    log: Log
    verdict: jax.Array
    stored: U64


class _Writer:
    """One launch: its static facts, and one pass over a group of its requests."""

    def __init__(
        self,
        *,
        tokens: _Tokens,
        requests: _Requests,
        chain_position_assert: jax.Array,
        context: jax.Array,
        slots: int,
        launch_tag: int,
        record_flags: int,
        extended: bool,
        tolerant: bool,
    ) -> None:
        self.tokens = tokens
        self.requests = requests
        self.chain_position_assert = chain_position_assert
        self.context = context
        self.slots = slots
        self.launch_tag = launch_tag
        self.record_flags = record_flags
        self.extended = extended
        self.tolerant = tolerant
        self.size, self.rows = tokens.inside.shape[0], requests.begin.shape[0]
        # Entries a request and loop iteration: enough to hide the loop, few where requests have one or two each.
        self.unroll = min(self.size, 4 if self.size <= 4 * self.rows else 8)
        stored = lax.convert_element_type(tokens.inside, jnp.uint32)
        packed = jnp.stack([*tokens.token, *tokens.position, stored])
        self.packed = jnp.concatenate([packed, jnp.zeros((5, self.unroll), jnp.uint32)], axis=1)  # [5, T + unroll]

    def groups(self, state: _State, group_start: jax.Array, first: jax.Array, end: jax.Array) -> _State:
        """Write requests ``first .. end - 1``, a group at a time; ``group_start [R]``: the earliest group start that a request allows."""

        def body(carry: tuple[jax.Array, _State]) -> tuple[jax.Array, _State]:
            first, state = carry
            number = iota(self.rows)
            breaks = (number > first) & (group_start > first)
            last = jnp.minimum(jnp.min(jnp.where(breaks, number, end)), end)
            return last, self.group(state, first, last)

        return lax.while_loop(lambda carry: carry[0] < end, body, (first, state))[1]

    def group(self, state: _State, first: jax.Array, last: jax.Array) -> _State:
        """Write requests ``first .. last - 1``, whose segments follow each other and none of which reads what another writes."""
        t, q = self.tokens, self.requests
        number, entry = iota(self.rows), iota(self.size)
        mine = (number >= first) & (number < last)
        active = mine & q.active

        # Which request an entry belongs to.
        starts = jnp.where(number < first, np.int32(0), jnp.where(number < last, q.begin, np.int32(self.size)))
        owner = count_not_above(starts, entry) - np.int32(1)
        owned = (owner >= first) & (owner < last)
        owner = jnp.maximum(owner, np.int32(0))
        owned = owned & (entry < take(jnp.where(active, q.end, np.int32(0)), owner))
        stored, outside = owned & t.inside, owned & t.outside

        # Where the chains start.
        readable = words.below(q.seed, self.slots) & active
        seed = take_rows(state.records, jnp.where(readable, words.as_int32(q.seed.lo), np.int32(0)), 8 if self.tolerant else 6)
        seed_token, seed_position, seed_hash = (row64(seed, k) for k in range(3))
        start = words.select(readable, hashing.chain_hash(seed_hash, seed_token, seed_position), hashing.head_hash(q.namespace))
        running = self.chains(active, start, owner)

        # The position before each entry: that of the request's last stored one, or of its seed.
        follows = t.last_stored >= take(q.begin, owner)
        before = words.select(follows, take64(t.position, jnp.maximum(t.last_stored, np.int32(0))), take64(seed_position, owner))
        wanted = words.add(before, words.const(1, (self.size,)))
        chain_checked = stored & take(readable, owner) & self.chain_position_assert
        if self.tolerant:  # a seed that nobody wrote has no position
            chain_checked = chain_checked & (follows | take(jnp.any(seed != np.uint32(0), axis=0), owner))
        chain_bad = chain_checked & words.not_equal(t.position, wanted)

        reasons = t.assert_bits
        if self.extended:
            reasons = reasons | jnp.where(outside, np.uint32(FailReason.SLOT_OUT_OF_RANGE), np.uint32(0))
            input_bad = (stored | outside) & (reasons != np.uint32(0))
            cut = mine & q.cut
            seed_bad = active & ~readable & ~words.equals(q.seed, -1)
        else:
            input_bad = stored & (reasons != np.uint32(0))
            cut = seed_bad = jnp.zeros((self.rows,), bool)

        # Before each entry: rows that entries report, entries that are stored.
        sums = exclusive(cumsum(jnp.stack([_int(input_bad) + _int(chain_bad), _int(stored)])))  # [2, T + 1]
        row_sums = row(sums, 0)
        at_end, at_begin = (take_columns(sums, jnp.where(active, at, np.int32(0))) for at in (q.end, q.begin))
        reported, written = at_end[0] > at_begin[0], at_end[1] > at_begin[1]
        bad = cut | seed_bad | reported
        verdict = jnp.where(bad, np.int32(Verdict.BAD), jnp.where(written, np.int32(Verdict.OK), np.int32(Verdict.NOT_CHECKED)))
        total_rows = row_sums[self.size] + count(cut) + count(seed_bad)

        def rows(room: int) -> jax.Array:
            """The first rows of the group, in the order of a sequential launch: those of a request before those of its entries."""
            request_sums = exclusive(cumsum(_int(cut) + _int(seed_bad)))  # [R + 1]
            entry_place = row_sums[: self.size] + take(request_sums[1:], owner)
            request_place = request_sums[: self.rows] + take(row_sums, jnp.where(mine, q.begin, np.int32(0)))
            flags = jnp.concatenate([input_bad, chain_bad, cut, seed_bad])
            place = [entry_place, entry_place + _int(input_bad), request_place, request_place + _int(cut)]
            place, every = jnp.concatenate(place), iota(flags.shape[0])
            place = jnp.where(flags & (place < np.int32(room)), place, np.int32(room) + every)
            which = put(jnp.zeros((room,), jnp.int32), place, every)

            size, is_entry = np.int32(self.size), which < np.int32(2 * self.size)
            i = jnp.where(is_entry, jnp.where(which < size, which, which - size), np.int32(0))
            is_seed = which >= np.int32(2 * self.size + self.rows)
            request = which - jnp.where(is_seed, np.int32(2 * self.size + self.rows), np.int32(2 * self.size))
            r = jnp.where(is_entry, take(owner, i), jnp.clip(request, np.int32(0), np.int32(self.rows - 1)))
            facts = log_.Facts(room, self.context, self.launch_tag)
            entry_facts = log_.matrix(
                t.slot, t.expected_token, t.expected_position, wanted, running, t.real_kv_hash, words.from_uint32(reasons)
            )
            facts.add("token position", take_columns(self.packed, i)[:4])
            facts.add("slot expected_token expected_position next_position running real_kv reason", take_columns(entry_facts, i))
            facts.add("req_pool_idx seed head", take_columns(log_.matrix(q.req_pool_idx, q.seed, start), r))
            facts.add("request", log_.matrix(words.from_int32(r)))
            facts.add_scalars(
                wrong_position=words.const(FailReason.WRITE_POSITION),
                out_of_range=words.const(FailReason.SLOT_OUT_OF_RANGE),
                segment=words.const(FailReason.TABLE_OUT_OF_RANGE),
            )
            of_input = jnp.where(take(stored, i), np.int32(0), np.int32(1))
            of_request = jnp.where(is_seed, np.int32(4), np.int32(3))
            return facts.rows(_ROWS, jnp.where(which < size, of_input, jnp.where(is_entry, np.int32(2), of_request)))

        return _State(
            self.store(state.records, stored, owner, running),
            log_.append_rows(state.log, total_rows, 2 * (self.size + self.rows), rows),
            jnp.where(mine, verdict, state.verdict),
            words.add(state.stored, words.from_int32(row(sums, 1)[self.size])),
        )

    def chains(self, active: jax.Array, start: U64, owner: jax.Array) -> U64:
        """The running hash before each entry.

        Segments are cut into blocks of ``unroll`` entries, and blocks are laid out step by step, the longest requests first: what an
        iteration of the chain reads and keeps is then one slice. It keeps the hash before each block; a second pass over all blocks
        side by side gives the hashes inside them.
        """
        q, unroll = self.requests, self.unroll
        length = jnp.where(active, q.end - q.begin, np.int32(0))
        blocks = lax.div(length + np.int32(unroll - 1), jnp.full_like(length, unroll))
        negated, order = lax.sort((-blocks, iota(self.rows)), num_keys=2)
        rank = put(jnp.zeros((self.rows,), jnp.int32), order, iota(self.rows))
        steps = -(-self.size // unroll)
        lanes = count_not_above(negated, np.int32(-1) - iota(steps))  # requests that are still busy at each step
        step_end = cumsum(lanes)
        step_start = step_end - lanes

        # Every step reads and writes all requests' lanes: those past its own are overwritten by the next one.
        place = iota(self.size // unroll + 2 * self.rows)
        step = jnp.minimum(count_not_above(step_end, place), np.int32(steps - 1))
        request = take(order, jnp.clip(place - take(step_start, step), np.int32(0), np.int32(self.rows - 1)))
        first = jnp.clip(take(q.begin, request) + step * np.int32(unroll), np.int32(0), np.int32(self.size))
        numbers = lax.GatherDimensionNumbers(offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(1,))
        in_bounds = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        rows = lax.gather(self.packed, first[:, None], numbers, (5, unroll), mode=in_bounds)  # [5, unroll, blocks]
        links = (hashing.pack(U64(rows[0], rows[1])), hashing.pack(U64(rows[2], rows[3])), rows[4] != np.uint32(0))

        def advance(running: hashing.Hash, link: Any) -> hashing.Hash:
            token, position, stored = link
            return hashing.select(stored, hashing.mix3(running, token, position), running)

        def body(carry: tuple[jax.Array, jax.Array, Any, Any]) -> tuple[jax.Array, jax.Array, Any, Any]:
            step, at, running, kept = carry
            kept = jax.tree.map(lambda x, y: put_window(x, y, at), kept, running)
            here = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, self.rows, axis=1), links)
            for k in range(unroll):
                running = advance(running, jax.tree.map(lambda x, k=k: x[k], here))
            return step + np.int32(1), at + lax.dynamic_index_in_dim(lanes, step, keepdims=False), running, kept

        running = jax.tree.map(lambda x: take(x, order), hashing.pack(start))
        kept = hashing.zeros(place.shape)
        kept = lax.while_loop(lambda carry: carry[0] < -negated[0], body, (np.int32(0), np.int32(0), running, kept))[3]
        inside = lax.scan(lambda running, link: (advance(running, link), running), kept, links)[1]  # [unroll, blocks]

        since = iota(self.size) - take(q.begin, owner)  # garbage for entries that belong to nobody
        step = jnp.clip(lax.div(since, jnp.full_like(since, unroll)), np.int32(0), np.int32(steps - 1))
        block = take(step_start, step) + take(rank, owner)
        within = jnp.clip(since - step * np.int32(unroll), np.int32(0), np.int32(unroll - 1))
        return hashing.unpack(jax.tree.map(lambda x: take(x, within, block), inside))

    def store(self, records: jax.Array, stored: jax.Array, owner: jax.Array, running: U64) -> jax.Array:
        """Records with the entries that no later entry of the group overwrites."""
        if self.slots == 0:
            return records
        t, q = self.tokens, self.requests
        sorted_stored = take(stored, t.order)
        again = jnp.concatenate([(t.key[1:] == t.key[:-1]) & sorted_stored[1:], jnp.zeros((1,), bool)])
        kept = put(jnp.zeros((self.size,), bool), t.order, sorted_stored & ~again)
        columns = [self.packed[:4, : self.size], log_.matrix(running, t.real_kv_hash)]
        if records.shape[1] >= PROVENANCE_RECORD_WORDS:
            step = jnp.broadcast_to(self.context[0], (self.rows,))
            step_and_flags = U64(step, lax.full_like(step, np.uint32(self.record_flags)))
            provenance = log_.matrix(q.request_id, step_and_flags, q.namespace, words.zeros((self.rows,)))
            columns.append(take_columns(provenance, owner))
        place = jnp.where(kept, words.as_int32(t.slot.lo), np.int32(records.shape[0]) + iota(self.size))
        numbers = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
        updates = lax.transpose(jnp.concatenate(columns), (1, 0))  # [T, 8 or 16]
        return lax.scatter(records, place[:, None], updates, numbers, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _int(mask: jax.Array) -> jax.Array:
    return lax.convert_element_type(mask, jnp.int32)


def _per_request(x: jax.Array, rows: int, default: int) -> U64:
    """A value a request; those that are not given are ``default``."""
    given = words.from_operand(x)
    fill = words.const(default, (rows - given.shape[0],))
    return U64(*(jnp.concatenate(pair) for pair in zip(given, fill, strict=True)))


def _hash_slots(
    hasher: SourceHasher, tags: jax.Array | None, slot: jax.Array, stored: jax.Array, end: jax.Array
) -> tuple[U64, jax.Array | None]:
    """The real-KV hash of the slots of entries below ``end``, ``[T]``, and the tags of those slots stored."""
    size = slot.shape[0]
    chunk = hasher.chunk(size)

    def body(carry: tuple[jax.Array, U64, jax.Array | None]) -> tuple[jax.Array, U64, jax.Array | None]:
        first, hashes, tags = carry
        start = jnp.minimum(first, np.int32(size - chunk))
        here, valid = (lax.dynamic_slice_in_dim(x, start, chunk) for x in (slot, stored))
        own = hasher.own_hashes(jnp.where(valid, here, np.int32(0)))
        hashes = U64(*(put_window(x, y, start) for x, y in zip(hashes, hasher.combined(own, chunk), strict=True)))
        if tags is not None:
            place = jnp.where(valid, here, np.int32(tags.shape[0]))
            numbers = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
            new = lax.transpose(hasher.tags(own, chunk), (1, 0))
            tags = lax.scatter(tags, place[:, None], new, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
        return first + jnp.minimum(np.int32(chunk), end - first), hashes, tags

    return lax.while_loop(lambda carry: carry[0] < end, body, (np.int32(0), words.zeros((size,)), tags))[1:]


@per_platform
def write(
    records: jax.Array,
    source_tags: jax.Array,
    ring: jax.Array,
    write_index: jax.Array,
    slot_run_counter: jax.Array,
    kernel_run_counter: jax.Array,
    write_offsets: jax.Array,
    seeds: jax.Array,
    num_valid_reqs: jax.Array,
    input_ids: jax.Array,
    positions: jax.Array,
    out_cache_loc: jax.Array,
    expected_input_tokens: jax.Array,
    expected_input_positions: jax.Array,
    enable_chain_position_assert: jax.Array,
    req_pool_indices: jax.Array,
    request_ids: jax.Array,
    namespaces: jax.Array,
    context: jax.Array,
    *buffers: jax.Array,
    launch_tag: int,
    real_kv_hash_mode: int,
    sources: tuple[tuple[Any, ...], ...],
    enable_write_input_assert: bool,
    has_padding_slot: bool,
    padding_slot: int,
    extended_checks: bool,
    strict: bool,
    record_flags: int,
) -> list[jax.Array]:
    """The write primitive: stamp the records of the entries of a launch."""
    rows, total = seeds.shape[0], input_ids.shape[0]
    log = log_.started(Log(ring, write_index))
    kernel_run_counter = log_.add_to_counter(kernel_run_counter, launch_tag, words.const(1))
    verdict, scratch = jnp.zeros((rows,), jnp.int32), jnp.zeros((0,), jnp.uint32)
    if rows == 0:
        return [records, source_tags, *log, slot_run_counter, kernel_run_counter, verdict, scratch]

    hasher = SourceHasher(sources, real_kv_hash_mode, buffers)
    slots = hasher.slots(records.shape[0])
    valid_rows = jnp.clip(num_valid_reqs[0], np.int32(0), np.int32(rows))
    valid = iota(rows) < valid_rows

    # Segments.
    offsets = words.from_operand(write_offsets)
    lower, upper = U64(*(w[:rows] for w in offsets)), U64(*(w[1:] for w in offsets))
    begin, end = words.clamp_int32(lower, total), words.clamp_int32(upper, total)
    active = valid & (begin < end)
    cut = valid & (words.is_negative(lower) | words.less(words.const(total, (rows,)), upper) | words.less(upper, lower))
    in_order = jnp.all(~valid | (begin <= end))

    # Entries; with none there is a dummy that belongs to nobody.
    size = max(total, 1)
    token, position, slot = (_entries(x, total, fill) for x, fill in ((input_ids, 0), (positions, 0), (out_cache_loc, -1)))
    inside = words.below(slot, slots)
    skipped = words.equals(slot, -1)
    if has_padding_slot:
        skipped = skipped | words.equals(slot, padding_slot)
    expected_token = expected_position = words.const(-1, (size,))
    assert_bits = jnp.zeros((size,), jnp.uint32)
    if enable_write_input_assert:
        expected_token, expected_position = _entries(expected_input_tokens, total, -1), _entries(expected_input_positions, total, -1)
        assert_bits = jnp.where(words.not_equal(token, expected_token), np.uint32(FailReason.WRITE_TOKEN), np.uint32(0))
        wrong = jnp.where(words.not_equal(position, expected_position), np.uint32(FailReason.WRITE_POSITION), np.uint32(0))
        assert_bits = assert_bits | wrong
    entry = iota(size)
    # How far the segments that began so far reach, and the last entry before that can be stored.
    reach = put_max(jnp.zeros((size,), jnp.int32), jnp.where(active, begin, np.int32(size)), end)
    reach, last_inside = cummax(jnp.stack([reach, jnp.where(inside, entry, np.int32(-1))]))
    last_inside = jnp.concatenate([jnp.full((1,), np.int32(-1)), last_inside[:-1]])
    stored = inside & (entry < reach)

    # Hashes of the slots: the pool does not change during the launch, so duplicates of a slot agree.
    real_kv_hash, tags = words.zeros((size,)), source_tags if source_tags.size > 0 and slots > 0 else None
    if slots > 0 and (tags is not None or any(hasher.read_bytes)):
        index = jnp.where(stored, words.as_int32(slot.lo), np.int32(0))
        last = jnp.max(jnp.where(active, end, np.int32(0)))
        real_kv_hash, tags = _hash_slots(hasher, tags, index, stored, last)

    key, order = lax.sort((jnp.where(stored, slot.lo, _NO_SLOT), entry), num_keys=2)
    seed = words.from_operand(seeds)
    writer = _Writer(
        tokens=_Tokens(
            token=token,
            position=position,
            slot=slot,
            inside=inside,
            outside=~inside & ~skipped,
            expected_token=expected_token,
            expected_position=expected_position,
            assert_bits=assert_bits,
            real_kv_hash=real_kv_hash,
            last_stored=last_inside,
            key=key,
            order=order,
        ),
        requests=_Requests(
            begin=begin,
            end=end,
            active=active,
            cut=cut,
            seed=seed,
            req_pool_idx=_per_request(req_pool_indices, rows, -1),
            request_id=_per_request(request_ids, rows, 0),
            namespace=_per_request(namespaces, rows, 0),
        ),
        chain_position_assert=enable_chain_position_assert[0] != np.int32(0),
        context=context,
        slots=slots,
        launch_tag=launch_tag,
        record_flags=record_flags,
        extended=extended_checks,
        tolerant=extended_checks and not strict,
    )

    # A request whose seed an earlier one writes starts a new group. Entries before its segment are those of earlier requests.
    def precedes(place: jax.Array) -> jax.Array:
        slot_there, entry_there = take(key, place), take(order, place)
        return (slot_there < seed.lo) | ((slot_there == seed.lo) & (entry_there < begin))

    place = search(size, (rows,), precedes) - np.int32(1)
    found = jnp.maximum(place, np.int32(0))
    depends = active & words.below(seed, slots) & (place >= np.int32(0)) & (take(key, found) == seed.lo)
    writer_of = count_not_above(jnp.where(valid, begin, np.int32(size)), take(order, found))  # one past the request
    group_start = jnp.where(depends, writer_of, np.int32(0))
    group_start = jnp.where(in_order, group_start, iota(rows))

    state = writer.groups(_State(records, log, verdict, words.zeros(())), group_start, np.int32(0), valid_rows)
    slot_run_counter = log_.add_to_counter(slot_run_counter, launch_tag, state.stored)
    tags = source_tags if tags is None else tags
    return [state.records, tags, *state.log, slot_run_counter, kernel_run_counter, state.verdict, scratch]


def _entries(x: jax.Array, total: int, fill: int) -> U64:
    return words.from_operand(x) if total > 0 else words.const(fill, (1,))
