"""Rank digests: their value, what they see and what not, their comparison over ranks, and who is named."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kvcanary import BlockTable, FlatTable, IdentityTable, ViolationLog, decode_log
from jax_kvcanary.digest import RankView, check_rank_digests, find_deviating_ranks, rank_digest
from jax_kvcanary.reference.hashing import mix3, splitmix64
from jax_kvcanary.spec import CanaryLaunchTag, FailReason, Verdict

MASK = 2**64 - 1
SLOTS, WIDTH = 48, 12
TABLE = np.array([[0] * WIDTH, [*range(4, 16)], [*range(30, 42)]], np.int32)
ROWS = np.array([1, 2], np.int32)
LENS = np.array([7, 12], np.int32)
HEAD = CanaryLaunchTag.HEAD_K_FULL


def some_records(slots: int = SLOTS) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2**32, (slots, 8), np.uint32)


def digest_of(records: Any, **changes: Any) -> Any:
    ask = {"req_pool_indices": ROWS, "prefix_lens": LENS, "req_to_token": TABLE, **changes}
    return jax.tree.map(np.asarray, rank_digest(records=records, **ask))


def by_hand(records: np.ndarray, slot_of: dict[int, int], length: int, page_size: int, capacity: int, start: int = 0) -> tuple[int, int]:
    """Chain and digest of one request, from Python integers."""
    sums = [0, 0]
    for position in range(length - 1, start - 1, -page_size):
        slot = slot_of[position]
        if slot == 0:  # padding
            continue
        token = position_word = previous = 0
        if 0 <= slot < len(records):
            token, position_word, previous = (int(low) | int(high) << 32 for low, high in records[slot, :6].reshape(3, 2))
        found = splitmix64(mix3(previous, token, position_word) ^ position)
        sums = [(sums[0] + (found & 0xFFFFFFFF)) & 0xFFFFFFFF, (sums[1] + (found >> 32)) & 0xFFFFFFFF]
    chain = sums[0] | sums[1] << 32
    mixed = mix3(chain, length, capacity)
    return chain, (mixed ^ mixed >> 32) & 0xFFFFFFFF


def words(pairs: np.ndarray) -> list[int]:
    return [int(low) | int(high) << 32 for low, high in pairs]


@pytest.mark.parametrize("page_size", [1, 3, 4, 12, 2**31 - 1])
def test_value(page_size: int) -> None:
    records = some_records()
    got = digest_of(records, page_size=page_size)
    for row in range(2):
        slot_of = dict(enumerate(TABLE[ROWS[row]].tolist()))
        assert (words(got.chain)[row], int(got.digest[row])) == by_hand(records, slot_of, int(LENS[row]), page_size, SLOTS)
    assert words(got.length) == LENS.tolist()
    assert words(got.slot) == [10, 41]
    assert words(got.token) == words(records[[10, 41], :2])
    assert words(got.position) == words(records[[10, 41], 2:4])
    assert int(got.capacity) == SLOTS


def test_tables_say_the_same() -> None:
    records = some_records()
    wanted = digest_of(records, page_size=5)
    flat = np.concatenate([TABLE[1], TABLE[2]])
    starts = np.array([0, 12, 24], np.int32)
    identity = IdentityTable(rows=3, width=WIDTH)
    assert digest_of(records, page_size=5, req_to_token=FlatTable(flat, starts)).digest.tolist() == wanted.digest.tolist()
    blocks = np.array([[0, 0, 0], [1, 2, 3], [7, 8, 9]], np.int32)
    moved = records.copy()
    moved[28:40] = records[30:42]
    assert digest_of(moved, page_size=5, req_to_token=BlockTable(blocks, 4)).digest.tolist() == wanted.digest.tolist()
    laid_out = np.zeros_like(records)
    laid_out[12:24], laid_out[24:36] = records[4:16], records[30:42]
    assert digest_of(laid_out, page_size=5, req_to_token=identity).digest.tolist() == wanted.digest.tolist()


def test_a_ring_is_read_where_it_holds() -> None:
    """Longer than the table: positions modulo its width."""
    records = some_records()
    got = digest_of(records, req_to_token=IdentityTable(rows=3, width=8), prefix_lens=np.array([7, 21], np.int32))
    held = {position: 16 + position % 8 for position in range(14, 21)}
    assert (words(got.chain)[1], int(got.digest[1])) == by_hand(records, held, 21, 1, SLOTS, start=14)


@pytest.mark.parametrize("page_size", [1, 4])
def test_window_and_mapping(page_size: int) -> None:
    records = some_records(20)
    mapping = np.full(SLOTS, 0, np.int32)
    mapping[TABLE[1]] = np.arange(1, 13)
    mapping[TABLE[2]] = np.arange(5, 17)
    got = digest_of(records, swa_window_size=5, full_to_swa_index_mapping=mapping, page_size=page_size)
    for row in range(2):
        slot_of = {position: int(mapping[slot]) for position, slot in enumerate(TABLE[ROWS[row]])}
        length = int(LENS[row])
        assert int(got.digest[row]) == by_hand(records, slot_of, length, page_size, 20, start=length - 5)[1]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_every_page_of_the_prefix_is_seen(page_size: int) -> None:
    records = some_records()
    healthy = digest_of(records, page_size=page_size).digest
    for row, request in enumerate(ROWS):
        length = int(LENS[row])
        for page in range(-(-length // page_size)):
            missed = records.copy()
            missed[TABLE[request, page * page_size : min(length, (page + 1) * page_size)]] = 0
            changed = digest_of(missed, page_size=page_size).digest != healthy
            assert changed.tolist() == [row == 0, row == 1], (row, page)


@pytest.mark.parametrize("word", range(6))
def test_a_flipped_bit_of_a_chain_word_is_seen_and_real_kv_is_not_compared(word: int) -> None:
    records = some_records()
    healthy = digest_of(records).digest
    flipped = records.copy()
    flipped[TABLE[1, 3], word] ^= 1 << 9
    assert (digest_of(flipped).digest != healthy).tolist() == [True, False]
    other_bytes = records.copy()
    other_bytes[:, 6:] ^= 5
    assert digest_of(other_bytes).digest.tolist() == healthy.tolist()


def test_swapped_slots_are_seen() -> None:
    table = TABLE.copy()
    table[1, [2, 5]] = table[1, [5, 2]]
    assert (digest_of(some_records(), req_to_token=table).digest != digest_of(some_records()).digest).tolist() == [True, False]


def test_padding_rows_and_slots() -> None:
    records, rows = some_records(), np.array([0, -1, 1, 7], np.int32)
    lens = np.array([3, 3, 3, 3], np.int32)
    got = digest_of(records, req_pool_indices=rows, prefix_lens=lens)
    assert got.digest[:2].tolist() == [0, 0]
    assert words(got.length) == [0, 0, 3, 0]
    assert words(got.slot) == [MASK, MASK, 6, MASK]
    other = records.copy()
    other[0] ^= 1  # dummy writes differ from rank to rank
    table = TABLE.copy()
    table[1, 1] = 0
    one, two = (digest_of(x, req_pool_indices=rows, prefix_lens=lens, req_to_token=table).digest for x in (records, other))
    assert one.tolist() == two.tolist()
    strict = [digest_of(x, req_to_token=table, padding_slot=None).digest[0] for x in (records, other)]
    assert strict[0] != strict[1]


def test_capacity() -> None:
    records = some_records()
    assert digest_of(records).digest.tolist() == digest_of(records, capacity=SLOTS).digest.tolist()
    assert (digest_of(records, capacity=np.int32(SLOTS - 2)).digest != digest_of(records).digest).all()
    traced = jax.jit(lambda n: rank_digest(records=records, req_pool_indices=ROWS, prefix_lens=LENS, req_to_token=TABLE, capacity=n).digest)
    assert traced(jnp.array([46], jnp.int32)).tolist() == digest_of(records, capacity=46).digest.tolist()


def test_slots_out_of_range_and_empty_batches() -> None:
    table = TABLE.copy()
    table[1, 2:5] = [SLOTS, -5, 2**31 - 1]
    slot_of = dict(enumerate(table[1].tolist()))
    got = digest_of(some_records(), req_to_token=table)
    assert int(got.digest[0]) == by_hand(some_records(), slot_of, 7, 1, SLOTS)[1]
    assert digest_of(some_records()[:0], req_to_token=table).digest.shape == (2,)
    none = np.zeros((0,), np.int32)
    assert digest_of(some_records(), req_pool_indices=none, prefix_lens=none).digest.shape == (0,)
    assert words(digest_of(some_records(), prefix_lens=np.array([-3, 0], np.int32)).length) == [0, 0]


def test_longer_than_what_is_read_at_once() -> None:
    slots = 10_000
    records = some_records(slots)
    table = np.arange(slots, dtype=np.int32)[None].repeat(2, 0)
    ask = {"req_to_token": table, "prefix_lens": np.array([0, slots], np.int32), "padding_slot": None, "padding_req": None}
    got = digest_of(records, req_pool_indices=np.array([0, 1], np.int32), **ask)
    everything = {position: position + 1 for position in range(slots)}  # by_hand leaves slot 0 out
    shifted = np.concatenate([records[:1], records])
    assert int(got.digest[1]) == by_hand(shifted, everything, slots, 1, slots)[1]
    missed = records.copy()
    missed[4095] = 0
    assert (digest_of(missed, req_pool_indices=np.array([0, 1], np.int32), **ask).digest != got.digest).tolist() == [False, True]


def test_x64(x64: None) -> None:
    records = some_records()
    wide = digest_of(records, req_pool_indices=ROWS.astype(np.int64), prefix_lens=LENS.astype(np.int64), page_size=3)
    assert wide.digest.dtype == np.uint32
    slot_of = dict(enumerate(TABLE[1].tolist()))
    assert int(wide.digest[0]) == by_hand(records, slot_of, 7, 3, SLOTS)[1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "page_size must be >= 1, got 0"),
        ({"page_size": True}, TypeError, "page_size must be an int, got bool"),
        ({"swa_window_size": 4}, ValueError, "full_to_swa_index_mapping is required when swa_window_size > 0"),
        ({"prefix_lens": np.zeros(3, np.int32)}, ValueError, "prefix_lens length must be 2, got 3"),
        ({"capacity": -1}, ValueError, "capacity must be non-negative, got -1"),
        ({"capacity": np.zeros(2, np.int32)}, ValueError, r"capacity must be a scalar, got shape \(2,\)"),
        ({"capacity": np.array(2**40)}, ValueError, "capacity must fit in int32"),
        ({"capacity": np.array([2**32 + 1])}, ValueError, "capacity must fit in int32"),
        ({"capacity": np.array(-1)}, ValueError, "capacity must be non-negative, got -1"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        digest_of(some_records(), **changes)


# ------------------------------------------------------------------------------------------------ over ranks

RANKS = 8


@functools.cache
def compare(page_size: int, ring: int, axis: str = "tensor") -> Any:
    mesh = jax.make_mesh((RANKS,), ("tensor",), devices=jax.devices("cpu"), axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("tensor"),) * 4, out_specs=(P("tensor"), P("tensor"), P()), check_vma=False)
    def run(records: Any, lens: Any, capacity: Any, index: Any) -> Any:
        shard = jax.lax.axis_index("tensor").astype(jnp.uint32)
        log = ViolationLog.allocate(ring_capacity=ring)
        log = ViolationLog(
            ring=log.ring, write_index=index, slot_run_counter=log.slot_run_counter, kernel_run_counter=log.kernel_run_counter
        )
        mine = rank_digest(
            records=records[0], req_pool_indices=ROWS, prefix_lens=lens[0], req_to_token=TABLE, page_size=page_size, capacity=capacity
        )
        ok = jnp.full((2,), np.int32(Verdict.OK))
        out = check_rank_digests(digest=mine, log=log, verdict=ok, axis_names=axis, launch_tag=HEAD, step=9, shard=shard)
        return out.log, out.verdict, out.disagree

    return run


def compared(*, page_size: int = 1, ring: int = 4, records: Any = None, lens: Any = None, capacity: Any = None, index: Any = 0) -> Any:
    """Logs by rank, verdicts [ranks, 2], disagreement [2]."""
    log, verdict, disagree = compare(page_size, ring)(
        np.stack([some_records()] * RANKS) if records is None else records,
        np.stack([LENS] * RANKS) if lens is None else lens,
        np.full((RANKS,), SLOTS, np.int32) if capacity is None else capacity,
        np.full((RANKS,), index, np.int32),
    )
    logs = [jax.tree.map(lambda x, rank=rank: np.asarray(x).reshape(RANKS, -1, *x.shape[1:])[rank], log) for rank in range(RANKS)]
    return logs, np.asarray(verdict).reshape(RANKS, 2), np.asarray(disagree)


def test_ranks_that_agree_are_silent() -> None:
    logs, verdict, disagree = compared()
    assert not disagree.any()
    assert (verdict == Verdict.OK).all()
    assert [int(log.write_index[0]) for log in logs] == [0] * RANKS


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_rank_that_misses_a_page_load_is_seen(page: int) -> None:
    """Its records are unwritten where the others have loaded them."""
    records = np.stack([some_records()] * RANKS)
    records[5, TABLE[2, 4 * page : 4 * page + 4]] = 0
    logs, verdict, disagree = compared(page_size=4, records=records)
    assert disagree.tolist() == [False, True]
    assert verdict.tolist() == [[Verdict.OK, Verdict.BAD]] * RANKS
    violations = [violation for log in logs for violation in decode_log(log).violations]
    assert [violation.shard for violation in violations] == list(range(RANKS))
    (found,) = find_deviating_ranks(violations)
    assert (found.deviating, found.batch_row, found.step, found.tag) == ((5,), 1, 9, HEAD)
    assert {view.length for view in found.views.values()} == {12}
    assert found.describe().startswith("batch row 1 (data rank 0, step 9): shard 5 has request row 2, length 12, chain 0x")
    assert "; the others have request row 2, length 12, chain 0x" in found.describe()


def test_row_of_a_disagreement() -> None:
    records, lens = np.stack([some_records()] * RANKS), np.stack([LENS] * RANKS)
    lens[2, 0] = 5
    logs, _, disagree = compared(lens=lens)
    assert disagree.tolist() == [True, False]
    mine, other = digest_of(records[2], prefix_lens=lens[2]), digest_of(records[0])
    (row,) = decode_log(logs[2]).violations
    assert (row.tag, row.slot, row.reasons, row.batch_row, row.req_pool_idx) == (HEAD, 8, FailReason.RANK_DIGEST, 0, 1)
    assert (row.position & MASK, row.token & MASK) == (words(records[2, [8], 2:4])[0], words(records[2, [8], :2])[0])
    assert (row.expected_token, row.chain_hash, row.aux) == (-1, words(mine.chain)[0], SLOTS)
    assert (row.step, row.expected_position, row.first_bad_source, row.shard) == (9, 4, -1, 2)
    assert (row.real_kv_hash, row.expected_real_kv_hash) == (int(mine.digest[0]), int(other.digest[0]))
    assert (
        f"this rank's digest is {int(mine.digest[0]):#010x} (length 5, chain {words(mine.chain)[0]:#018x}, capacity 48), "
        f"that of another rank is {int(other.digest[0]):#010x}; step 9, shard 2."
    ) in row.describe()
    (row,) = decode_log(logs[0]).violations
    assert (row.real_kv_hash, row.expected_real_kv_hash) == (int(other.digest[0]), int(mine.digest[0]))


def test_capacity_of_a_rank() -> None:
    capacity = np.full((RANKS,), SLOTS, np.int32)
    capacity[6] -= 2
    logs, verdict, disagree = compared(capacity=capacity)
    assert disagree.all() and (verdict == Verdict.BAD).all()
    found = find_deviating_ranks(violation for log in logs for violation in decode_log(log).violations)
    assert [(entry.batch_row, entry.deviating, entry.views[6].capacity) for entry in found] == [(0, (6,), 46), (1, (6,), 46)]


@pytest.mark.parametrize(
    ("ring", "index", "stored", "reported"), [(0, 0, 0, 2), (1, 0, 1, 2), (4, 3, 1, 5), (4, -7, 2, 2), (4, 2**31 - 2, 0, 2**31 - 1)]
)
def test_the_log_counts_on_when_it_is_full(ring: int, index: int, stored: int, reported: int) -> None:
    capacity = np.arange(RANKS, dtype=np.int32)
    logs, _, _ = compared(ring=ring, index=index, capacity=capacity)
    for log in logs:
        assert log.write_index.tolist() == [reported]
        assert (log.ring[:, 14] == int(FailReason.RANK_DIGEST)).sum() == stored


def test_no_majority_names_all() -> None:
    capacity = np.array([SLOTS] * 4 + [SLOTS - 1] * 4, np.int32)
    logs, _, _ = compared(capacity=capacity)
    found = find_deviating_ranks(violation for log in logs for violation in decode_log(log).violations)
    assert found[0].deviating == tuple(range(RANKS))
    assert found[0].describe().startswith("batch row 0 (data rank 0, step 9): no majority, shard 0 has ")


def test_groups_of_ranks_are_judged_apart() -> None:
    records = np.stack([some_records()] * RANKS)
    records[7, TABLE[1, 0]] = 0
    logs, _, _ = compared(records=records)
    violations = [violation for log in logs for violation in decode_log(log).violations]
    first, second = find_deviating_ranks(violations, data_rank=lambda shard: shard // 4)
    assert (first.data_rank, first.deviating) == (0, ())
    assert (second.data_rank, second.deviating) == (1, (7,))
    assert isinstance(second.views[7], RankView) and list(second.views) == [4, 5, 6, 7]


def test_one_all_reduce_and_no_gather() -> None:
    arguments = (
        np.stack([some_records()] * RANKS),
        np.stack([LENS] * RANKS),
        np.full((RANKS,), SLOTS, np.int32),
        np.zeros((RANKS,), np.int32),
    )
    text = compare(4, 4).lower(*arguments).compile().as_text()
    assert text.count(" all-reduce(") == 1 and "all-gather" not in text
    assert "u32[2,2]{1,0} all-reduce(" in text


def test_wrong_types() -> None:
    log, ok = ViolationLog.allocate(ring_capacity=1), np.ones((2,), np.int32)
    with pytest.raises(TypeError, match=r"^kv-canary: digest must be a RankDigest, got int"):
        check_rank_digests(digest=1, log=log, verdict=ok, axis_names="x", launch_tag=0)  # type: ignore[arg-type]
    mine = rank_digest(records=some_records(), req_pool_indices=ROWS, prefix_lens=LENS, req_to_token=TABLE)
    with pytest.raises(ValueError, match=r"^kv-canary: verdict length must be 2, got 3"):
        check_rank_digests(digest=mine, log=log, verdict=np.ones((3,), np.int32), axis_names="x", launch_tag=0)
    with pytest.raises(
        ValueError, match=r"^kv-canary: axis_names names the mesh axis 'x', which is not bound here; call this inside shard_map"
    ):
        check_rank_digests(digest=mine, log=log, verdict=ok, axis_names="x", launch_tag=0)
    for changes, message in (
        ({"axis_names": None}, "axis_names must be a tuple of str, got NoneType"),
        ({"axis_names": (3,)}, "axis_names must be a tuple of str, got a int in it"),
        ({"log": None}, "log must be a ViolationLog, got NoneType"),
        ({"verdict": None}, "verdict must be an array, got NoneType"),
        ({"digest": dataclasses.replace(mine, chain=None)}, "digest.chain must be an array, got NoneType"),
    ):
        with pytest.raises(TypeError, match=f"^kv-canary: {message}"):
            check_rank_digests(**({"digest": mine, "log": log, "verdict": ok, "axis_names": (), "launch_tag": 0} | changes))
    for violations, message in (
        (None, "violations must be those of a LogReport, got NoneType"),
        ([3], "violations must be a tuple of Violation"),
    ):
        with pytest.raises(TypeError, match=f"^kv-canary: {message}"):
            find_deviating_ranks(violations)
    with pytest.raises(TypeError, match=r"^kv-canary: data_rank must be a function, got int"):
        find_deviating_ranks([], data_rank=3)  # type: ignore[arg-type]
