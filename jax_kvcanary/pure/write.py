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

from jax_kvcanary.pure import log as log_
from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import (
    count_not_above,
    cumsum,
    exclusive,
    iota,
    put,
    put_add,
    put_window,
    search,
    take,
    take64,
    take_rows,
)
from jax_kvcanary.pure.log import Log
from jax_kvcanary.pure.source import SourceHasher
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import PROVENANCE_RECORD_WORDS, FailReason, Verdict

_NO_SLOT = np.uint32(2**32 - 1)
_PACKED = 5  # token and position words, whether the entry is stored


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
    """The requests of a launch, ``[R]``: clamped segments, seeds, and what their records say."""

    begin: jax.Array
    end: jax.Array
    active: jax.Array  # has entries
    valid: jax.Array  # below the number of valid requests
    cut: jax.Array  # its segment had to be clamped
    seed: U64
    req_pool_idx: U64
    request_id: U64
    namespace: U64


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
    ) -> None:
        self.tokens = tokens
        self.requests = requests
        self.chain_position_assert = chain_position_assert
        self.context = context
        self.slots = slots
        self.launch_tag = launch_tag
        self.record_flags = record_flags
        self.extended = extended
        self.size, self.rows = tokens.inside.shape[0], requests.begin.shape[0]
        # Entries a request and loop iteration: enough to hide the loop, few where requests have one each.
        self.unroll = 1 if self.size == 1 else 4 if self.size <= 4 * self.rows else 16
        stored = lax.convert_element_type(tokens.inside, jnp.uint32)
        packed = jnp.stack([*tokens.token, *tokens.position, stored])
        self.packed = jnp.concatenate([packed, jnp.zeros((_PACKED, self.unroll), jnp.uint32)], axis=1)  # [5, T + unroll]

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
        seed = take_rows(state.records, jnp.where(readable, words.as_int32(q.seed.lo), np.int32(0)), 6)
        seed_token, seed_position, seed_hash = (U64(seed[2 * k], seed[2 * k + 1]) for k in range(3))
        start = words.select(readable, words.mix3(seed_hash, seed_token, seed_position), words.head_hash(q.namespace))
        running = self.chains(active, start, owner)

        # The position before each entry: that of the request's last stored one, or of its seed.
        follows = t.last_stored >= take(q.begin, owner)
        before = words.select(follows, take64(t.position, jnp.maximum(t.last_stored, np.int32(0))), take64(seed_position, owner))
        wanted = words.add(before, words.const(1, (self.size,)))
        chain_checked = stored & take(readable, owner) & self.chain_position_assert
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

        # Rows in the order of a sequential launch: those of a request before those of its entries.
        of_entry = exclusive(cumsum(_int(input_bad) + _int(chain_bad)))  # [T + 1]
        of_request = exclusive(cumsum(_int(cut) + _int(seed_bad)))  # [R + 1]
        row_at = U64(*self.bounds(of_entry, active))
        stored_at = self.bounds(exclusive(cumsum(_int(stored))), active)
        bad = cut | seed_bad | (row_at.hi > row_at.lo)
        some = stored_at[1] > stored_at[0]
        verdict = jnp.where(bad, np.int32(Verdict.BAD), jnp.where(some, np.int32(Verdict.OK), np.int32(Verdict.NOT_CHECKED)))
        total_rows = of_entry[self.size] + of_request[self.rows]
        stored_count = jnp.sum(_int(stored), dtype=jnp.int32)

        def numbers(room: int) -> jax.Array:
            """Which row comes where: input rows 0 .., chain rows T .., cut rows 2 T .., seed rows 2 T + R .."""
            entry_place = of_entry[: self.size] + take(of_request[1:], owner)
            request_place = of_request[: self.rows] + take(of_entry, jnp.where(mine, q.begin, np.int32(0)))
            places = [
                jnp.where(input_bad, entry_place, np.int32(-1)),
                jnp.where(chain_bad, entry_place + _int(input_bad), np.int32(-1)),
                jnp.where(cut, request_place, np.int32(-1)),
                jnp.where(seed_bad, request_place + _int(cut), np.int32(-1)),
            ]
            place = jnp.concatenate(places)
            every = iota(place.shape[0])
            room_for = (place >= np.int32(0)) & (place < np.int32(room))
            return put(jnp.zeros((room,), jnp.int32), jnp.where(room_for, place, np.int32(room) + every), every)

        def columns(which: jax.Array) -> list[U64]:
            is_entry = which < np.int32(2 * self.size)
            is_input, is_chain = which < np.int32(self.size), is_entry & (which >= np.int32(self.size))
            i = jnp.where(is_input, which, jnp.where(is_chain, which - np.int32(self.size), np.int32(0)))
            is_cut = ~is_entry & (which < np.int32(2 * self.size + self.rows))
            request = jnp.where(is_cut, which - np.int32(2 * self.size), which - np.int32(2 * self.size + self.rows))
            r = jnp.clip(jnp.where(is_entry, take(owner, i), request), np.int32(0), np.int32(self.rows - 1))
            none, zero = words.const(-1, which.shape), words.zeros(which.shape)
            is_stored = is_entry & take(stored, i)
            token, real_kv = take64(t.token, i), words.select(is_stored, take64(t.real_kv_hash, i), zero)
            expected_position = words.select(is_chain, take64(wanted, i), take64(t.expected_position, i))
            expected_position = words.select(is_entry, expected_position, none)
            request_reason = jnp.where(is_cut, np.uint32(FailReason.TABLE_OUT_OF_RANGE), np.uint32(FailReason.SLOT_OUT_OF_RANGE))
            reason = jnp.where(is_input, take(reasons, i), jnp.where(is_chain, np.uint32(FailReason.WRITE_POSITION), request_reason))
            request_slot = words.select(is_cut, none, take64(q.seed, r))
            request_hash = words.select(is_cut, zero, take64(start, r))
            return [
                words.const(self.launch_tag),
                words.select(is_entry, take64(t.slot, i), request_slot),
                words.select(is_entry, take64(t.position, i), zero),
                words.select(is_entry, token, zero),
                words.select(is_entry, words.select(is_chain, token, take64(t.expected_token, i)), none),
                words.select(is_entry, take64(running, i), request_hash),
                expected_position,
                words.from_uint32(reason),
                words.from_int32(r),
                take64(q.req_pool_idx, r),
                words.from_uint32(self.context[0]),
                expected_position,
                real_kv,
                real_kv,
                none,
                words.from_uint32(self.context[1]),
            ]

        log = log_.append_numbered(state.log, total_rows, 2 * (self.size + self.rows), numbers, columns)
        return _State(
            self.store(state.records, stored, owner, running),
            log,
            jnp.where(mine, verdict, state.verdict),
            words.add(state.stored, words.from_int32(stored_count)),
        )

    def bounds(self, sums: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Exclusive sums ``[T + 1]`` at both ends of each active request's segment."""
        return tuple(take(sums, jnp.where(active, at, np.int32(0))) for at in (self.requests.begin, self.requests.end))  # type: ignore[return-value]

    def chains(self, active: jax.Array, start: U64, owner: jax.Array) -> U64:
        """The running hash before each entry: ``unroll`` entries of every request an iteration, keeping the hash before those.

        A second pass over all these blocks at once gives the hashes inside them.
        """
        q, unroll = self.requests, self.unroll
        length = jnp.where(active, q.end - q.begin, np.int32(0))
        blocks = lax.div(length + np.int32(unroll - 1), jnp.full_like(length, unroll))
        block_end = cumsum(blocks)
        first_block = block_end - blocks
        most = self.size // unroll + self.rows

        def body(carry: tuple[jax.Array, U64, U64]) -> tuple[jax.Array, U64, U64]:
            step, running, kept = carry
            busy = step < blocks
            place = jnp.where(busy, first_block + step, np.int32(most) + iota(self.rows))
            kept = U64(*(put(x, place, y) for x, y in zip(kept, running, strict=True)))
            at = step * np.int32(unroll)
            rows = self.packed_rows(jnp.where(busy, q.begin + at, np.int32(self.size)))  # [unroll, 5, R]
            for j in range(unroll):
                running = _advance(running, rows[j], at + np.int32(j) < length)
            return step + np.int32(1), running, kept

        longest = jnp.max(blocks)
        init = (np.int32(0), start, words.zeros((most,)))
        kept = lax.while_loop(lambda carry: carry[0] < longest, body, init)[2]

        since = iota(self.size) - take(q.begin, owner)  # garbage for entries that belong to nobody
        if unroll == 1:
            return take64(kept, jnp.clip(take(first_block, owner) + since, np.int32(0), np.int32(most - 1)))
        block = iota(most)
        block_owner = jnp.minimum(count_not_above(block_end, block), np.int32(self.rows - 1))
        block_start = take(q.begin, block_owner) + (block - take(first_block, block_owner)) * np.int32(unroll)
        rows = self.packed_rows(jnp.clip(block_start, np.int32(0), np.int32(self.size)))

        def inside(running: U64, row: jax.Array) -> tuple[U64, U64]:
            return _advance(running, row, None), running

        running = lax.scan(inside, kept, rows)[1]  # [unroll, blocks]
        number = lax.div(since, jnp.full_like(since, unroll))
        block = jnp.clip(take(first_block, owner) + number, np.int32(0), np.int32(most - 1))
        within = jnp.clip(since - number * np.int32(unroll), np.int32(0), np.int32(unroll - 1))
        return U64(take(running.lo, within, block), take(running.hi, within, block))

    def packed_rows(self, start: jax.Array) -> jax.Array:
        """``unroll`` packed entries from each of ``start [n]``: ``[unroll, 5, n]``."""
        numbers = lax.GatherDimensionNumbers(offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(1,))
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.transpose(lax.gather(self.packed, start[:, None], numbers, (_PACKED, self.unroll), mode=mode), (1, 0, 2))

    def store(self, records: jax.Array, stored: jax.Array, owner: jax.Array, running: U64) -> jax.Array:
        """Records with the entries that no later entry of the group overwrites."""
        if self.slots == 0:
            return records
        t, q = self.tokens, self.requests
        sorted_stored = take(stored, t.order)
        again = jnp.concatenate([(t.key[1:] == t.key[:-1]) & sorted_stored[1:], jnp.zeros((1,), bool)])
        kept = put(jnp.zeros((self.size,), bool), t.order, sorted_stored & ~again)
        columns = [*t.token, *t.position, *running, *t.real_kv_hash]
        if records.shape[1] >= PROVENANCE_RECORD_WORDS:
            zero = jnp.zeros((self.size,), jnp.uint32)
            step, flags = jnp.broadcast_to(self.context[0], (self.size,)), jnp.full((self.size,), np.uint32(self.record_flags))
            columns += [*take64(q.request_id, owner), step, flags, *take64(q.namespace, owner), zero, zero]
        place = jnp.where(kept, words.as_int32(t.slot.lo), np.int32(records.shape[0]) + iota(self.size))
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
        )
        mode = lax.GatherScatterMode.FILL_OR_DROP
        return lax.scatter(records, place[:, None], jnp.stack(columns, axis=1), numbers, unique_indices=True, mode=mode)


def _int(mask: jax.Array) -> jax.Array:
    return lax.convert_element_type(mask, jnp.int32)


def _advance(running: U64, row: jax.Array, inside: jax.Array | None) -> U64:
    """The hash after one packed entry ``[5, n]``."""
    token, position = U64(row[0], row[1]), U64(row[2], row[3])
    stored = row[4] != np.uint32(0)
    return words.select(stored if inside is None else stored & inside, words.mix3(running, token, position), running)


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
    edges = put_add(jnp.zeros((size + 1,), jnp.int32), jnp.where(active, begin, np.int32(size + 1)), jnp.ones((rows,), jnp.int32))
    edges = put_add(edges, jnp.where(active, end, np.int32(size + 1)), jnp.full((rows,), np.int32(-1)))
    stored = inside & (cumsum(edges)[:size] > np.int32(0))

    # Hashes of the slots: the pool does not change during the launch, so duplicates of a slot agree.
    real_kv_hash, tags = words.zeros((size,)), source_tags if source_tags.size > 0 and slots > 0 else None
    if slots > 0 and (tags is not None or any(hasher.read_bytes)):
        index = jnp.where(stored, words.as_int32(slot.lo), np.int32(0))
        last = jnp.max(jnp.where(active, end, np.int32(0)))
        real_kv_hash, tags = _hash_slots(hasher, tags, index, stored, last)

    entry = iota(size)
    key, order = lax.sort((jnp.where(stored, slot.lo, _NO_SLOT), entry), num_keys=2)
    last_inside = exclusive(lax.cummax(jnp.where(inside, entry, np.int32(-1))) + np.int32(1))[:size] - np.int32(1)
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
            valid=valid,
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
