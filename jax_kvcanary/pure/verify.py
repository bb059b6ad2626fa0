"""verify and verify_fused in plain JAX: entries are checked a chunk at a time, so nothing grows with the plan or the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import hashing, words
from jax_kvcanary.pure import log as log_
from jax_kvcanary.pure.indexing import iota, put_add, put_max, put_min, row64, take, take64, take_columns, take_rows, window
from jax_kvcanary.pure.log import Log
from jax_kvcanary.pure.plan import Batch, Entries
from jax_kvcanary.pure.source import SourceHasher
from jax_kvcanary.pure.target import current, per_platform
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import INT32_MAX, PROVENANCE_RECORD_WORDS, RECORD_WORDS, FailReason, RealKvHashMode, Verdict

# Columns of rows, see spec.Column.
_CHECKED_ROW = (
    "tag slot position token expected_token prev_hash aux reason "
    "batch_row req_pool_idx step expected_position stored_bytes bytes_now first_bad shard"
)
_OUTSIDE_ROW = "tag slot zero zero expected_token zero zero reason batch_row req_pool_idx step expected_position zero zero none shard"
_TABLE_ROW = "tag none zero zero none zero zero reason batch_row req_pool_idx step none zero zero none shard"


class _State(NamedTuple):
    """What a launch carries from chunk to chunk, ``[bs]``; positions are uint32, the largest is none."""

    log: Log
    verdict: jax.Array
    bad_position: jax.Array
    unattested: jax.Array
    unattested_position: jax.Array


class _RealKv(NamedTuple):
    """The bytes of each entry's slot: whether they differ from what was stamped, and what a row says about it."""

    bad: jax.Array
    stored: U64
    now: U64
    first_bad_source: jax.Array


class _Verifier:
    """One launch: its operands, and the check of a chunk of entries."""

    def __init__(
        self,
        *,
        records: jax.Array,
        source_tags: jax.Array,
        req_pool_indices: jax.Array,
        namespaces: jax.Array,
        context: jax.Array,
        source_window: jax.Array,
        buffers: Sequence[jax.Array],
        bs: int,
        launch_tag: int,
        real_kv_hash_mode: int,
        sources: Sequence[tuple[Any, ...]],
        check_expected_token: bool,
        has_padding_slot: bool,
        padding_slot: int,
        extended_checks: bool,
        strict: bool,
        rotate: bool,
    ) -> None:
        self.records = records
        self.hasher = SourceHasher(sources, real_kv_hash_mode, buffers)
        # In mode NONE no source is read: there is nothing to compare tags with.
        self.source_tags = source_tags if source_tags.size > 0 and real_kv_hash_mode != RealKvHashMode.NONE else None
        self.rotate = rotate and self.source_tags is not None
        self.source_window = source_window
        self.req_pool_indices = words.from_operand(req_pool_indices)
        self.namespaces = words.from_operand(namespaces)
        self.context = context
        self.bs = bs
        self.slots = self.hasher.slots(records.shape[0])
        self.record_words = PROVENANCE_RECORD_WORDS if extended_checks and records.shape[1] >= PROVENANCE_RECORD_WORDS else RECORD_WORDS
        self.launch_tag = launch_tag
        self.check_token = check_expected_token
        self.padding_slot = padding_slot if has_padding_slot else None
        self.extended = extended_checks
        self.tolerant = extended_checks and not strict

    def chunk(self, entries: int) -> int:
        return self.hasher.chunk(entries, one_source=self.rotate)

    # ------------------------------------------------------------------------------------------ one chunk

    def check(self, state: _State, entries: Entries, live: jax.Array) -> _State:
        """Check those of ``entries [n]`` that are ``live``."""
        n = live.shape[0]
        slot, expected_position = words.from_operand(entries.slot), words.from_operand(entries.expected_position)
        live = live & ~self._is_padding(slot)
        inside = words.below(slot, self.slots)
        checked, outside = live & inside, live & ~inside
        known = (entries.batch_row >= np.int32(0)) & (entries.batch_row < np.int32(self.bs))
        row = jnp.where(known, entries.batch_row, np.int32(0))

        bits = jnp.zeros((n,), jnp.uint32)
        stored = jnp.zeros((self.record_words, n), jnp.uint32)
        aux, real, unattested = words.zeros((n,)), None, jnp.zeros((n,), bool)

        def raise_bit(bits: jax.Array, reason: FailReason, where: jax.Array) -> jax.Array:
            return bits | jnp.where(where, np.uint32(reason), np.uint32(0))

        if self.slots > 0:
            index = jnp.where(checked, words.as_int32(slot.lo), np.int32(0))
            stored = take_rows(self.records, index, self.record_words)
            unwritten = ~jnp.any(stored != np.uint32(0), axis=0)
            if self.tolerant:
                unattested, checked = checked & unwritten, checked & ~unwritten
            token, position, prev_hash, real_kv_hash = (row64(stored, k) for k in range(4))
            aux, reachable, prev_outside = self._expected_chain_hash(words.from_operand(entries.prev_slot), checked, known, row)
            bits = raise_bit(bits, FailReason.VERIFY_CHAIN_HASH, reachable & words.not_equal(prev_hash, aux))
            aux = words.select(reachable, aux, prev_hash)
            bits = raise_bit(bits, FailReason.VERIFY_POSITION, words.not_equal(position, expected_position))
            real = self._real_kv(index, real_kv_hash)
            bits = raise_bit(bits, FailReason.VERIFY_REAL_KV_HASH, real.bad)
            if self.check_token:
                expected_token = words.from_operand(entries.expected_token)
                wanted = ~words.equals(expected_token, -1)
                bits = raise_bit(bits, FailReason.VERIFY_TOKEN, wanted & words.not_equal(token, expected_token))
            if self.extended:
                bits = raise_bit(bits, FailReason.UNWRITTEN, unwritten)
                bits = raise_bit(bits, FailReason.SLOT_OUT_OF_RANGE, prev_outside)
            bits = jnp.where(checked, bits, np.uint32(0))
        if self.extended:
            bits = raise_bit(bits, FailReason.SLOT_OUT_OF_RANGE, outside)
        bad = bits != np.uint32(0)

        def rows(which: jax.Array) -> jax.Array:
            """Rows of some entries: the operands are converted again, so that nothing is kept for entries that are fine."""
            facts = self._facts(jnp.where(known, entries.batch_row, np.int32(-1)), which)
            values = (entries.slot, entries.expected_token, entries.expected_position)
            names = "slot expected_token expected_position token position prev_hash real_kv_hash aux reason first_bad"
            parts = [log_.matrix(*(words.from_operand(x) for x in values)), stored[:8]]
            first_bad_source = real.first_bad_source if real else jnp.full((n,), np.int32(-1))
            parts.append(log_.matrix(aux, words.from_uint32(bits), words.from_int32(first_bad_source)))
            if real:
                names += " stored_bytes bytes_now"
                parts.append(log_.matrix(real.stored, real.now))
            facts.add(names, take_columns(jnp.concatenate(parts), which))
            kinds = [_OUTSIDE_ROW, _CHECKED_ROW if real else _OUTSIDE_ROW]
            if not self.check_token:
                kinds = [kind.replace("expected_token", "none") for kind in kinds]
            return facts.rows(kinds, lax.convert_element_type(take(checked, which), jnp.int32))

        nobody = np.int32(self.bs)
        verdict = put_max(
            state.verdict,
            jnp.where(known, row, nobody),
            jnp.where(bad, np.int32(Verdict.BAD), jnp.where(checked, np.int32(Verdict.OK), np.int32(Verdict.NOT_CHECKED))),
        )
        bad_position = put_min(
            state.bad_position,
            jnp.where(known & bad, row, nobody),
            words.as_uint32(words.clamp_int32(expected_position)),
        )
        count, first = state.unattested, state.unattested_position
        if self.tolerant:
            owner = jnp.where(known & unattested, row, nobody)
            count = put_add(count, owner, jnp.ones((n,), jnp.int32))
            first = put_min(first, owner, words.as_uint32(words.clamp_int32(expected_position)))
        return _State(log_.append(state.log, bad, rows), verdict, bad_position, count, first)

    def _is_padding(self, slot: U64) -> jax.Array:
        return jnp.zeros(slot.shape, bool) if self.padding_slot is None else words.equals(slot, self.padding_slot)

    def _expected_chain_hash(
        self, prev: U64, checked: jax.Array, known: jax.Array, row: jax.Array
    ) -> tuple[U64, jax.Array, jax.Array]:
        """The expected hash, whether the predecessor can be reached, and whether ``prev`` itself is out of range."""
        head = words.is_negative(prev)
        evicted = self._is_padding(prev)
        readable = ~head & ~evicted & words.below(prev, self.slots)
        # All of the record where it matters whether there is one.
        before = take_rows(self.records, jnp.where(checked & readable, words.as_int32(prev.lo), np.int32(0)), 8 if self.tolerant else 6)
        token, position, prev_hash = (row64(before, k) for k in range(3))
        chained = hashing.chain_hash(prev_hash, token, position)
        anchor = self._head_hash(known, row)
        outside = (head & ~words.equals(prev, -1)) | (~head & ~evicted & ~readable)
        if self.tolerant:
            readable = readable & jnp.any(before != np.uint32(0), axis=0)
        return words.select(head, anchor, chained), head | readable, outside

    def _head_hash(self, known: jax.Array, row: jax.Array) -> U64:
        """What a head stores, by the namespace of its batch row."""
        given = self.namespaces.shape[0]
        if given == 0:
            return U64(*(jnp.broadcast_to(word, row.shape) for word in hashing.head_hash(words.zeros(()))))
        has = known & (row < np.int32(given))
        namespace = take64(self.namespaces, jnp.where(has, row, np.int32(0)))
        return hashing.head_hash(words.select(has, namespace, words.zeros(row.shape)))

    def _real_kv(self, index: jax.Array, stored: U64) -> _RealKv:
        n = index.shape[0]
        if self.rotate:
            return self._rotated(index, stored)
        own = self.hasher.own_hashes(index)
        now = self.hasher.combined(own, n)
        bad = words.not_equal(stored, now)
        first = jnp.full((n,), np.int32(-1))
        if self.source_tags is not None:
            tags = take_rows(self.source_tags, index, self.hasher.count)  # [sources, n]
            differ = tags != self.hasher.tags(own, n)
            lowest = lax.argmax(differ, 0, jnp.int32)
            first = jnp.where(bad & jnp.any(differ, axis=0), lowest, np.int32(-1))
        return _RealKv(bad, stored, now, first)

    def _rotated(self, index: jax.Array, stored: U64) -> _RealKv:
        """Check the sources of the window by their tags, in rising order; a window of all of them by the combined hash."""
        assert self.source_tags is not None
        n, total = index.shape[0], self.hasher.count
        start = lax.rem(self.source_window[0], np.int32(total))
        start = jnp.where(start < np.int32(0), start + np.int32(total), start)
        size = jnp.clip(self.source_window[1], np.int32(0), np.int32(total))
        wrapped = jnp.maximum(start + (size - np.int32(total)), np.int32(0))
        reads = jnp.asarray(np.array([read > 0 for read in self.hasher.read_bytes]))
        tags = self.source_tags

        class Carry(NamedTuple):
            combined: hashing.Hash
            first: jax.Array  # lowest source that differs, -1 if none so far
            stored: jax.Array
            now: jax.Array
            any_differs: jax.Array

        def step(j: jax.Array, carry: Carry) -> Carry:
            source = jnp.where(j < wrapped, j, start + (j - wrapped))
            own = self.hasher.hash_one(source, index)
            combined = hashing.select(take(reads, source[None])[0], hashing.fold_word(carry.combined, own), carry.combined)
            own_tag = hashing.unpack(own).lo
            tag = take(tags, index, jnp.broadcast_to(source, (n,)))
            new = (tag != own_tag) & (carry.first < np.int32(0))
            return Carry(
                combined,
                jnp.where(new, source, carry.first),
                jnp.where(new, tag, carry.stored),
                jnp.where(new, own_tag, carry.now),
                carry.any_differs | new,
            )

        none, zero = jnp.full((n,), np.int32(-1)), jnp.zeros((n,), jnp.uint32)
        init = Carry(hashing.zeros((n,)), none, zero, zero, jnp.zeros((n,), bool))
        carry = words.repeat(size, step, init)
        full, combined = size == np.int32(total), hashing.unpack(carry.combined)
        bad = jnp.where(full, words.not_equal(stored, combined), carry.any_differs)
        return _RealKv(
            bad,
            words.select(full, stored, words.from_uint32(carry.stored)),
            words.select(full, combined, words.from_uint32(carry.now)),
            jnp.where(bad, carry.first, none),
        )

    # ------------------------------------------------------------------------------------------ whole launches

    def _facts(self, batch_row: jax.Array, which: jax.Array) -> log_.Facts:
        """What every row says, of those of the batch rows ``batch_row`` that ``which [m]`` names."""
        facts = log_.Facts(which.shape[0], self.context, self.launch_tag)
        row, given = take(batch_row, which), self.req_pool_indices.shape[0]
        has = (row >= np.int32(0)) & (row < np.int32(given))
        none = words.const(-1, row.shape)
        owner = words.select(has, take64(self.req_pool_indices, jnp.where(has, row, np.int32(0))), none) if given else none
        facts.add("batch_row req_pool_idx", log_.matrix(words.from_int32(row), owner))
        return facts

    def begin(self, log: Log, row_status: jax.Array, enabled: jax.Array) -> _State:
        """The state before the first entry: one row for each batch row for which no entries could be made."""
        verdict = unattested = jnp.zeros((self.bs,), jnp.int32)
        bad_position = first_unattested = jnp.full((self.bs,), np.uint32(2**32 - 1))
        log = Log(log.ring, jnp.where(enabled, log_.started(log).write_index, log.write_index))
        if not self.extended:
            return _State(log, verdict, bad_position, unattested, first_unattested)
        bad = (row_status != np.int32(0)) & enabled

        def rows(which: jax.Array) -> jax.Array:
            facts = self._facts(iota(self.bs), which)
            facts.add_scalars(reason=words.const(FailReason.TABLE_OUT_OF_RANGE))
            return facts.rows([_TABLE_ROW], jnp.zeros(which.shape, jnp.int32))

        verdict = jnp.where(bad, np.int32(Verdict.BAD), verdict)
        return _State(log_.append(log, bad, rows), verdict, bad_position, unattested, first_unattested)

    def results(
        self, state: _State, slot_runs: jax.Array, kernel_runs: jax.Array, total: U64, buffers: Sequence[jax.Array], pass_through: bool
    ) -> list[jax.Array]:
        slot_runs = log_.add_to_counter(slot_runs, self.launch_tag, total)
        kernel_runs = log_.add_to_counter(kernel_runs, self.launch_tag, words.const(1))
        bad_position, first_unattested = words.as_int32(state.bad_position), words.as_int32(state.unattested_position)
        rows = [state.verdict, bad_position, state.unattested, first_unattested]
        out = [*state.log, slot_runs, kernel_runs, *rows, jnp.zeros((0,), jnp.uint32)]
        if not pass_through:
            return out
        if self.hasher.limit is not None:
            out[1], buffers = _after(out[1], buffers)
        return [*out, *buffers]


def _after(result: jax.Array, buffers: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """``buffers`` as values that exist only after ``result``, without a copy: whoever updates them does so after they were read."""

    order = [i for i, buffer in enumerate(buffers) if buffer.size > 0 and buffer.ndim > 0]
    if not order:
        return result, list(buffers)
    chosen = tuple(buffers[i] for i in order)
    if current().drops_barriers:
        # A condition that never holds orders as well, as long as the compiler cannot know it and the branch could update the pool:
        # here by what is there already.
        places = [(result[0], *(np.int32(0) for _ in range(buffer.ndim - 1))) for buffer in chosen]
        elements = [lax.dynamic_slice(buffer, at, (1,) * buffer.ndim) for buffer, at in zip(chosen, places, strict=True)]

        def rewrite(*chosen: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(lax.dynamic_update_slice(*update) for update in zip(chosen, elements, places, strict=True))

        ordered = lax.cond(result[0] == np.int32(-(2**31)), rewrite, lambda *chosen: chosen, *chosen)
    else:
        result, *ordered = lax.optimization_barrier((result, *chosen))
    out = list(buffers)
    for i, buffer in zip(order, ordered, strict=True):
        out[i] = buffer
    return result, out


@per_platform
def verify(
    records: jax.Array,
    source_tags: jax.Array,
    ring: jax.Array,
    write_index: jax.Array,
    slot_run_counter: jax.Array,
    kernel_run_counter: jax.Array,
    slot_indices: jax.Array,
    expected_tokens: jax.Array,
    expected_positions: jax.Array,
    prev_slot_indices: jax.Array,
    batch_rows: jax.Array,
    num_valid: jax.Array,
    enable: jax.Array,
    row_status: jax.Array,
    req_pool_indices: jax.Array,
    namespaces: jax.Array,
    context: jax.Array,
    source_window: jax.Array,
    *buffers: jax.Array,
    pass_through: bool,
    **params: Any,
) -> list[jax.Array]:
    """The verify primitive: check the entries of a plan."""
    bs, capacity = row_status.shape[0], slot_indices.shape[0]
    verifier = _Verifier(
        records=records,
        source_tags=source_tags,
        req_pool_indices=req_pool_indices,
        namespaces=namespaces,
        context=context,
        source_window=source_window,
        buffers=buffers,
        bs=bs,
        **params,
    )
    enabled = enable[0] != np.int32(0)
    n = jnp.where(enabled, jnp.clip(num_valid[0], np.int32(0), np.int32(capacity)), np.int32(0))
    state = verifier.begin(Log(ring, write_index), row_status, enabled)
    if capacity > 0:
        chunk = verifier.chunk(capacity)

        def body(carry: tuple[jax.Array, _State]) -> tuple[jax.Array, _State]:
            first, state = carry
            start = jnp.minimum(first, np.int32(capacity - chunk))
            number = start + iota(chunk)
            row = jnp.full((chunk,), np.int32(-1))
            if batch_rows.shape[0] == capacity:
                given = words.from_operand(window(batch_rows, start, chunk))
                row = jnp.where(words.below(given, min(bs, INT32_MAX)), words.as_int32(given.lo), np.int32(-1))
            columns = (expected_tokens, expected_positions, prev_slot_indices)
            entries = Entries(*(window(x, start, chunk) for x in (slot_indices, *columns)), row)
            live = (number >= first) & (number < n)
            return first + jnp.minimum(np.int32(chunk), n - first), verifier.check(state, entries, live)

        _, state = lax.while_loop(lambda carry: carry[0] < n, body, (np.int32(0), state))
    return verifier.results(state, slot_run_counter, kernel_run_counter, words.from_int32(n), buffers, pass_through)


@per_platform
def verify_fused(
    records: jax.Array,
    source_tags: jax.Array,
    ring: jax.Array,
    write_index: jax.Array,
    slot_run_counter: jax.Array,
    kernel_run_counter: jax.Array,
    req_pool_indices: jax.Array,
    prefix_lens: jax.Array,
    table: jax.Array,
    table_starts: jax.Array,
    mapping: jax.Array,
    expected_tokens: jax.Array,
    valid_lens: jax.Array,
    namespaces: jax.Array,
    context: jax.Array,
    source_window: jax.Array,
    *buffers: jax.Array,
    pass_through: bool,
    swa_window_size: int,
    kv_token_id_vs_position_offset: int,
    has_padding_req: bool,
    padding_req: int,
    table_kind: int,
    table_page_size: int,
    table_rows: int,
    table_width: int,
    has_mapping: bool,
    has_expected: bool,
    position_stride: int,
    **params: Any,
) -> list[jax.Array]:
    """The fused verify primitive: entries come straight from tables and lengths, a chunk at a time."""
    bs = req_pool_indices.shape[0]
    batch = Batch(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        table=table,
        table_starts=table_starts,
        mapping=mapping,
        expected_tokens=expected_tokens,
        valid_lens=valid_lens,
        swa_window_size=swa_window_size,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        has_padding_req=has_padding_req,
        padding_req=padding_req,
        table_kind=table_kind,
        table_page_size=table_page_size,
        table_rows=table_rows,
        table_width=table_width,
        has_mapping=has_mapping,
        has_expected=has_expected,
        position_stride=position_stride,
        step=context[0],
    )
    verifier = _Verifier(
        records=records,
        source_tags=source_tags,
        req_pool_indices=req_pool_indices,
        namespaces=namespaces,
        context=context,
        source_window=source_window,
        buffers=buffers,
        bs=bs,
        **params,
    )
    state = verifier.begin(Log(ring, write_index), batch.status, jnp.ones((), bool))
    total = words.zeros(())
    if bs > 0:
        totals = batch.totals()
        total = U64(totals.lo[bs - 1], totals.hi[bs - 1])
        chunk = verifier.chunk(_fused_entries(batch, bs))

        def body(carry: tuple[U64, _State]) -> tuple[U64, _State]:
            first, state = carry
            entries = batch.entries(totals, first, chunk)
            left = words.clamp_int32(words.sub(total, first))
            state = verifier.check(state, entries, iota(chunk) < left)
            return words.add(first, words.from_int32(jnp.minimum(np.int32(chunk), left))), state

        more: Callable[[tuple[U64, _State]], jax.Array] = lambda carry: words.less_unsigned(carry[0], total)  # noqa: E731
        _, state = lax.while_loop(more, body, (words.zeros(()), state))
    return verifier.results(state, slot_run_counter, kernel_run_counter, total, buffers, pass_through)


def _fused_entries(batch: Batch, bs: int) -> int:
    """The most entries that the tables could name, to keep the chunks of small ones small."""
    return max(1, min(bs * max(-(-batch.width // batch.stride), 1), INT32_MAX))


