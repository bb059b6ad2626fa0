"""verify and verify_fused in plain JAX: entries are checked a chunk at a time, so nothing grows with the plan or the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary.pure import log as log_
from jax_kvcanary.pure import words
from jax_kvcanary.pure.indexing import iota, put_max, put_min, take, take64, take_rows, window64
from jax_kvcanary.pure.log import Log
from jax_kvcanary.pure.plan import Batch, Entries
from jax_kvcanary.pure.source import SourceHasher
from jax_kvcanary.pure.words import U64
from jax_kvcanary.spec import INT32_MAX, PROVENANCE_RECORD_WORDS, RECORD_WORDS, FailReason, Verdict


class _State(NamedTuple):
    """What a launch carries from chunk to chunk. bad_position: int32 [bs], as uint32 order: -1 is none."""

    log: Log
    verdict: jax.Array
    bad_position: jax.Array


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
        rotate: bool,
    ) -> None:
        self.records = records
        self.hasher = SourceHasher(sources, real_kv_hash_mode, buffers)
        self.source_tags = source_tags if source_tags.shape[0] > 0 and self.hasher.count > 0 else None
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

    def chunk(self, entries: int) -> int:
        return self.hasher.chunk(entries, one_source=self.rotate)

    # ------------------------------------------------------------------------------------------ one chunk

    def check(self, state: _State, entries: Entries, live: jax.Array) -> _State:
        """Check those of ``entries [n]`` that are ``live``."""
        n = live.shape[0]
        slot = entries.slot
        live = live & ~self._is_padding(slot)
        inside = words.below(slot, self.slots)
        checked, outside = live & inside, live & ~inside
        known = (entries.batch_row >= np.int32(0)) & (entries.batch_row < np.int32(self.bs))
        row = jnp.where(known, entries.batch_row, np.int32(0))

        bits = jnp.zeros((n,), jnp.uint32)

        def raise_bit(bits: jax.Array, reason: FailReason, where: jax.Array) -> jax.Array:
            return bits | jnp.where(where, np.uint32(reason), np.uint32(0))

        if self.slots == 0:
            record, aux = [words.zeros((n,))] * 4, words.zeros((n,))
            real = _RealKv(jnp.zeros((n,), bool), words.zeros((n,)), words.zeros((n,)), jnp.full((n,), np.int32(-1)))
        else:
            index = jnp.where(checked, words.as_int32(slot.lo), np.int32(0))
            stored = take_rows(self.records, index, self.record_words)
            record = [U64(stored[2 * k], stored[2 * k + 1]) for k in range(4)]
            token, position, prev_hash, real_kv_hash = record
            aux, reachable, prev_outside = self._expected_chain_hash(entries.prev_slot, checked, known, row)
            bits = raise_bit(bits, FailReason.VERIFY_CHAIN_HASH, reachable & words.not_equal(prev_hash, aux))
            aux = words.select(reachable, aux, prev_hash)
            bits = raise_bit(bits, FailReason.VERIFY_POSITION, words.not_equal(position, entries.expected_position))
            real = self._real_kv(index, real_kv_hash)
            bits = raise_bit(bits, FailReason.VERIFY_REAL_KV_HASH, real.bad)
            if self.check_token:
                wanted = ~words.equals(entries.expected_token, -1)
                bits = raise_bit(bits, FailReason.VERIFY_TOKEN, wanted & words.not_equal(token, entries.expected_token))
            if self.extended:
                any_word = stored[0]
                for word in stored[1:]:
                    any_word = any_word | word
                bits = raise_bit(bits, FailReason.UNWRITTEN, any_word == np.uint32(0))
                bits = raise_bit(bits, FailReason.SLOT_OUT_OF_RANGE, prev_outside)
            bits = jnp.where(checked, bits, np.uint32(0))
        if self.extended:
            bits = raise_bit(bits, FailReason.SLOT_OUT_OF_RANGE, outside)
        bad = bits != np.uint32(0)

        def columns(which: jax.Array) -> list[U64]:
            """Ring columns of some entries; what was read of a slot out of range is left out."""
            read = take(checked, which)
            blank = words.zeros(which.shape)

            def of(value: U64) -> U64:
                return take64(value, which)

            def stored_of(value: U64) -> U64:
                return words.select(read, of(value), blank)

            who = take(jnp.where(known, entries.batch_row, np.int32(-1)), which)
            first_bad = jnp.where(read, take(real.first_bad_source, which), np.int32(-1))
            return self._columns(
                slot=of(slot),
                position=stored_of(record[1]),
                token=stored_of(record[0]),
                expected_token=of(entries.expected_token) if self.check_token else words.const(-1),
                chain_hash=stored_of(record[2]),
                aux=stored_of(aux),
                reason=words.from_uint32(take(bits, which)),
                batch_row=who,
                expected_position=of(entries.expected_position),
                real_kv_hash=stored_of(real.stored),
                expected_real_kv_hash=stored_of(real.now),
                first_bad_source=words.from_int32(first_bad),
            )

        nobody = np.int32(self.bs)
        verdict = put_max(
            state.verdict,
            jnp.where(known, row, nobody),
            jnp.where(bad, np.int32(Verdict.BAD), jnp.where(checked, np.int32(Verdict.OK), np.int32(Verdict.NOT_CHECKED))),
        )
        bad_position = put_min(
            state.bad_position,
            jnp.where(known & bad, row, nobody),
            words.as_uint32(words.clamp_int32(entries.expected_position)),
        )
        return _State(log_.append(state.log, bad, columns), verdict, bad_position)

    def _is_padding(self, slot: U64) -> jax.Array:
        return jnp.zeros(slot.shape, bool) if self.padding_slot is None else words.equals(slot, self.padding_slot)

    def _expected_chain_hash(
        self, prev: U64, checked: jax.Array, known: jax.Array, row: jax.Array
    ) -> tuple[U64, jax.Array, jax.Array]:
        """The expected hash, whether the predecessor can be reached, and whether ``prev`` itself is out of range."""
        head = words.is_negative(prev)
        evicted = self._is_padding(prev)
        readable = ~head & ~evicted & words.below(prev, self.slots)
        before = take_rows(self.records, jnp.where(checked & readable, words.as_int32(prev.lo), np.int32(0)), 6)
        token, position, prev_hash = (U64(before[2 * k], before[2 * k + 1]) for k in range(3))
        chained = words.mix3(prev_hash, token, position)
        anchor = self._head_hash(known, row)
        outside = (head & ~words.equals(prev, -1)) | (~head & ~evicted & ~readable)
        return words.select(head, anchor, chained), head | readable, outside

    def _head_hash(self, known: jax.Array, row: jax.Array) -> U64:
        """What a head stores, by the namespace of its batch row."""
        given = self.namespaces.shape[0]
        if given == 0:
            return U64(*(jnp.broadcast_to(word, row.shape) for word in words.head_hash(words.zeros(()))))
        has = known & (row < np.int32(given))
        namespace = take64(self.namespaces, jnp.where(has, row, np.int32(0)))
        return words.head_hash(words.select(has, namespace, words.zeros(row.shape)))

    def _real_kv(self, index: jax.Array, stored: U64) -> _RealKv:
        n = index.shape[0]
        if self.rotate:
            return self._rotated(index, stored)
        own = self.hasher.own_hashes(index)
        now = self.hasher.combined(own, n)
        bad = words.not_equal(stored, now)
        first = jnp.full((n,), np.int32(-1))
        if self.source_tags is not None:
            tags = jnp.stack(take_rows(self.source_tags, index, self.hasher.count))  # [sources, n]
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
            combined: U64
            first: jax.Array  # lowest source that differs, -1 if none so far
            stored: jax.Array
            now: jax.Array
            any_differs: jax.Array

        def step(j: jax.Array, carry: Carry) -> Carry:
            source = jnp.where(j < wrapped, j, start + (j - wrapped))
            own = self.hasher.hash_one(source, index)
            combined = words.select(take(reads, source[None])[0], words.splitmix64(words.xor(carry.combined, own)), carry.combined)
            tag = take(tags, index, jnp.broadcast_to(source, (n,)))
            new = (tag != own.lo) & (carry.first < np.int32(0))
            return Carry(
                combined,
                jnp.where(new, source, carry.first),
                jnp.where(new, tag, carry.stored),
                jnp.where(new, own.lo, carry.now),
                carry.any_differs | new,
            )

        none, zero = jnp.full((n,), np.int32(-1)), jnp.zeros((n,), jnp.uint32)
        init = Carry(words.zeros((n,)), none, zero, zero, jnp.zeros((n,), bool))
        carry = lax.fori_loop(np.int32(0), size, step, init)
        full = size == np.int32(total)
        bad = jnp.where(full, words.not_equal(stored, carry.combined), carry.any_differs)
        return _RealKv(
            bad,
            words.select(full, stored, words.from_uint32(carry.stored)),
            words.select(full, carry.combined, words.from_uint32(carry.now)),
            jnp.where(bad, carry.first, none),
        )

    # ------------------------------------------------------------------------------------------ whole launches

    def _columns(
        self,
        *,
        slot: U64,
        position: U64,
        token: U64,
        expected_token: U64,
        chain_hash: U64,
        aux: U64,
        reason: U64,
        batch_row: jax.Array,
        expected_position: U64,
        real_kv_hash: U64,
        expected_real_kv_hash: U64,
        first_bad_source: U64,
    ) -> list[U64]:
        given = self.req_pool_indices.shape[0]
        has = (batch_row >= np.int32(0)) & (batch_row < np.int32(given))
        none = words.const(-1, batch_row.shape)
        owner = none
        if given > 0:
            owner = words.select(has, take64(self.req_pool_indices, jnp.where(has, batch_row, np.int32(0))), none)
        return [
            words.const(self.launch_tag),
            slot,
            position,
            token,
            expected_token,
            chain_hash,
            aux,
            reason,
            words.from_int32(batch_row),
            owner,
            words.from_uint32(self.context[0]),
            expected_position,
            real_kv_hash,
            expected_real_kv_hash,
            first_bad_source,
            words.from_uint32(self.context[1]),
        ]

    def begin(self, log: Log, row_status: jax.Array, enabled: jax.Array) -> _State:
        """The state before the first entry: one row for each batch row for which no entries could be made."""
        verdict = jnp.zeros((self.bs,), jnp.int32)
        bad_position = jnp.full((self.bs,), np.uint32(2**32 - 1))
        log = Log(log.ring, jnp.where(enabled, log_.started(log).write_index, log.write_index))
        if not self.extended:
            return _State(log, verdict, bad_position)
        bad = (row_status != np.int32(0)) & enabled
        none, zero = words.const(-1), words.zeros(())

        def columns(which: jax.Array) -> list[U64]:
            return self._columns(
                slot=none,
                position=zero,
                token=zero,
                expected_token=none,
                chain_hash=zero,
                aux=zero,
                reason=words.const(FailReason.TABLE_OUT_OF_RANGE),
                batch_row=which,
                expected_position=none,
                real_kv_hash=zero,
                expected_real_kv_hash=zero,
                first_bad_source=none,
            )

        return _State(log_.append(log, bad, columns), jnp.where(bad, np.int32(Verdict.BAD), verdict), bad_position)

    def results(
        self, state: _State, slot_runs: jax.Array, kernel_runs: jax.Array, total: U64, buffers: Sequence[jax.Array], pass_through: bool
    ) -> list[jax.Array]:
        slot_runs = log_.add_to_counter(slot_runs, self.launch_tag, total)
        kernel_runs = log_.add_to_counter(kernel_runs, self.launch_tag, words.const(1))
        bad_position = words.as_int32(state.bad_position)
        out = [*state.log, slot_runs, kernel_runs, state.verdict, bad_position, jnp.zeros((0,), jnp.uint32)]
        if not pass_through:
            return out
        if self.hasher.limit is not None:
            out[1], buffers = _after(out[1], buffers)
        return [*out, *buffers]


def _after(result: jax.Array, buffers: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """``buffers`` as values that exist only after ``result``, without a copy: whoever updates them does so after they were read.

    XLA:CPU drops optimization barriers before it decides about copies, so there one element of each buffer, chosen by the result,
    is written back to its place.
    """

    def barrier(result: jax.Array, *buffers: jax.Array) -> tuple[jax.Array, ...]:
        return lax.optimization_barrier((result, *buffers))

    def rewrite(result: jax.Array, *buffers: jax.Array) -> tuple[jax.Array, ...]:
        out = []
        for buffer in buffers:
            if buffer.size == 0 or buffer.ndim == 0:
                out.append(buffer)
                continue
            # Any place will do, as long as the compiler cannot know it; slices clamp it to the buffer.
            at = (result[0], *(np.int32(0) for _ in range(buffer.ndim - 1)))
            element = lax.dynamic_slice(buffer, at, (1,) * buffer.ndim)
            out.append(lax.dynamic_update_slice(buffer, lax.optimization_barrier(element), at))
        return (result, *out)

    result, *buffers = lax.platform_dependent(result, *buffers, cpu=rewrite, default=barrier)
    return result, buffers


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
                given = window64(batch_rows, start, chunk)
                row = jnp.where(words.below(given, min(bs, INT32_MAX)), words.as_int32(given.lo), np.int32(-1))
            columns = (expected_tokens, expected_positions, prev_slot_indices)
            entries = Entries(window64(slot_indices, start, chunk), *(window64(x, start, chunk) for x in columns), row)
            live = (number >= first) & (number < n)
            return first + jnp.minimum(np.int32(chunk), n - first), verifier.check(state, entries, live)

        _, state = lax.while_loop(lambda carry: carry[0] < n, body, (np.int32(0), state))
    return verifier.results(state, slot_run_counter, kernel_run_counter, words.from_int32(n), buffers, pass_through)


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
    return max(1, min(bs * max(batch.width, 1), INT32_MAX))


