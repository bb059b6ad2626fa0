"""Records and tags on the move: what lands, what is refused, and that nothing is clamped, wrapped or stamped anew."""
# ruff: noqa: E501 - tables of cases, a case a line

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import (
    FailReason,
    MoveStatus,
    RecordFlag,
    ViolationLog,
    allocate_records,
    allocate_source_tags,
    copy_records,
    export_records,
    import_records,
    make_packed_source,
    moves,
    permute_records,
    plan,
    put_records,
    release_records,
    reset_records,
    take_records,
    verify_fused,
    write,
)

SLOTS, PAGE = 32, 4
OUT, OVERWRITTEN = int(MoveStatus.SLOT_OUT_OF_RANGE), int(MoveStatus.OVERWRITTEN)


def numbered(words: int = 8, slots: int = SLOTS) -> np.ndarray:
    """Every word of every record differs."""
    return (np.arange(slots * words, dtype=np.uint32) + 1).reshape(slots, words)


def tags_of(slots: int = SLOTS) -> np.ndarray:
    return (np.arange(slots * 3, dtype=np.uint32) + 5000).reshape(slots, 3)


def both(function: Any, jit: bool, **arguments: Any) -> Any:
    """Call with arrays as traced operands of one jitted function, or eagerly."""
    traced = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in arguments.items() if name not in traced}
    call = functools.partial(function, **static)
    return (jax.jit(lambda kw: call(**kw)) if jit else lambda kw: call(**kw))(traced)


def index(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


JIT = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])

# ------------------------------------------------------------------------------------------------ copy, permute


@JIT
@pytest.mark.parametrize("words", [8, 11, 16, 20])
def test_copy_slots(jit: bool, words: int) -> None:
    records, tags = numbered(words), tags_of()
    out = both(copy_records, jit, records=records, source_tags=tags, src=index(1, 2, 0, -1), dst=index(31, 2, 7, -1))
    for before, after in ((records, out.records), (tags, out.source_tags)):
        wanted = before.copy()
        wanted[[31, 7]] = before[[1, 0]]
        np.testing.assert_array_equal(after, wanted)
    assert out.status.tolist() == [0, 0, 0, 0]


@JIT
def test_copy_pages(jit: bool) -> None:
    records = numbered()
    out = both(copy_records, jit, records=records, src=index(0, 7), dst=index(3, 0), page_size=PAGE)
    wanted = records.reshape(8, PAGE, 8).copy()
    wanted[[3, 0]] = records.reshape(8, PAGE, 8)[[0, 7]]
    np.testing.assert_array_equal(out.records, wanted.reshape(SLOTS, 8))
    assert out.source_tags is None


@JIT
def test_overlapping_entries_move_at_once(jit: bool) -> None:
    records = numbered()
    out = both(copy_records, jit, records=records, src=index(1, 2, 3, 1), dst=index(2, 3, 1, 4))
    wanted = records.copy()
    wanted[[2, 3, 1, 4]] = records[[1, 2, 3, 1]]
    np.testing.assert_array_equal(out.records, wanted)


@JIT
def test_of_equal_destinations_the_last_counts(jit: bool) -> None:
    records = numbered()
    out = both(copy_records, jit, records=records, src=index(1, 2, 3, 4, 99), dst=index(9, 8, 9, 9, 9))
    wanted = records.copy()
    wanted[[8, 9]] = records[[2, 4]]
    np.testing.assert_array_equal(out.records, wanted)
    assert out.status.tolist() == [OVERWRITTEN, 0, OVERWRITTEN, 0, OUT]


OUTSIDE = [-2, -(2**31), SLOTS, SLOTS + 1, 2**31 - 1]


@JIT
@pytest.mark.parametrize("bad", [*OUTSIDE, -1])
def test_nothing_is_clamped_or_wrapped(jit: bool, bad: int) -> None:
    """One end out of range, or -1 without the other end: nothing moves, and the entry says so."""
    records = numbered(16)
    for src, dst in ((bad, 3), (3, bad)):
        out = both(copy_records, jit, records=records, src=index(src), dst=index(dst))
        np.testing.assert_array_equal(out.records, records)
        assert out.status.tolist() == [OUT]
    status = [0] if bad == -1 else [OUT]
    for function in (functools.partial(reset_records, source_tags=tags_of()), release_records):
        out = both(function, jit, records=records, slots=index(bad))
        np.testing.assert_array_equal(out.records, records)
        assert out.status.tolist() == status
    taken = both(take_records, jit, records=records, slots=index(bad))
    assert not np.asarray(taken.records).any() and taken.taken.tolist() == [False] and taken.status.tolist() == status
    good = take_records(records=records, slots=index(1))
    out = put_records(records=records, taken=good, slots=index(bad))
    np.testing.assert_array_equal(out.records, records)
    assert out.status.tolist() == status
    out = both(permute_records, jit, records=records, permutation=index(bad))
    np.testing.assert_array_equal(out.records, records)
    assert out.status.tolist() == status


@JIT
@pytest.mark.parametrize("slots", [30, 32])
def test_pages_out_of_range(jit: bool, slots: int) -> None:
    """A page that does not lie in the pool as a whole does not exist."""
    records, pages = numbered(16, slots), slots // PAGE
    for bad in (pages, pages + 1, 2**31 - 1, 2**30, -2):
        assert both(reset_records, jit, records=records, slots=index(bad), page_size=PAGE).status.tolist() == [OUT]
    out = both(reset_records, jit, records=records, slots=index(pages - 1, -1), page_size=PAGE)
    assert out.status.tolist() == [0, 0]
    assert (np.asarray(out.records) == 0).all(axis=1).nonzero()[0].tolist() == list(range((pages - 1) * PAGE, pages * PAGE))


def test_64_bit_entries(x64: None) -> None:
    records = numbered()
    out = copy_records(records=records, src=np.array([1, 2**32 + 1]), dst=np.array([3, 4]))
    assert out.status.tolist() == [0, OUT] and out.records[3].tolist() == records[1].tolist()
    np.testing.assert_array_equal(out.records[4], records[4])


@JIT
def test_permute(jit: bool) -> None:
    records, tags = numbered(), tags_of()
    order = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    out = both(permute_records, jit, records=records, source_tags=tags, permutation=order)
    np.testing.assert_array_equal(out.records, records[order])
    np.testing.assert_array_equal(out.source_tags, tags[order])
    pages = index(2, -1, 0)
    out = both(permute_records, jit, records=records, permutation=pages, page_size=PAGE)
    wanted = records.reshape(8, PAGE, 8)[[2, 1, 0, 3, 4, 5, 6, 7]].reshape(SLOTS, 8)
    np.testing.assert_array_equal(out.records, wanted)


@JIT
def test_moves_of_nothing(jit: bool) -> None:
    records, none = numbered(16), index()
    for out in (
        both(copy_records, jit, records=records, src=none, dst=none),
        both(permute_records, jit, records=records, permutation=none),
        both(reset_records, jit, records=records, slots=none),
        both(release_records, jit, records=records, slots=none),
        put_records(records=records, taken=take_records(records=records, slots=none), slots=none),
    ):
        np.testing.assert_array_equal(out.records, records)
        assert out.status.shape == (0,)
    empty = allocate_records(slots=0)
    assert copy_records(records=empty, src=index(0), dst=index(0)).status.tolist() == [OUT]


def test_one_bucket_compiles_once() -> None:
    step = jax.jit(lambda records, src, dst: copy_records(records=records, src=src, dst=dst).records)
    for n in range(3):
        step(numbered(), index(n, -1, -1), index(n + 1, -1, -1))
    assert step._cache_size() == 1


# ------------------------------------------------------------------------------------------------ take, put, release, reset


@JIT
def test_take_and_put(jit: bool) -> None:
    records, tags = numbered(16), tags_of()
    taken = both(take_records, jit, records=records, source_tags=tags, slots=index(1, -1, 7, 99), page_size=PAGE)
    assert taken.taken.tolist() == [True, False, True, False] and taken.status.tolist() == [0, 0, 0, OUT]
    np.testing.assert_array_equal(taken.records[:PAGE], records[PAGE : 2 * PAGE])
    there, there_tags = np.zeros_like(records), np.zeros_like(tags)
    out = both(
        functools.partial(put_records, taken=taken), jit, records=there, source_tags=there_tags, slots=index(0, 2, 0, 3), page_size=PAGE
    )  # fmt: skip
    assert out.status.tolist() == [OVERWRITTEN, OUT, 0, OUT]
    there[:PAGE], there_tags[:PAGE] = records[28:], tags[28:]
    np.testing.assert_array_equal(out.records, there)
    np.testing.assert_array_equal(out.source_tags, there_tags)


@JIT
def test_release_flags_and_keeps(jit: bool) -> None:
    records = numbered(20)
    records[4, moves.FLAGS_WORD] = RecordFlag.ADOPTED
    out = both(release_records, jit, records=records, slots=index(4, 4, 9, -1))
    wanted = records.copy()
    wanted[[4, 9], moves.FLAGS_WORD] |= np.uint32(RecordFlag.FREE)
    np.testing.assert_array_equal(out.records, wanted)
    assert out.records[4, moves.FLAGS_WORD] == RecordFlag.ADOPTED | RecordFlag.FREE


@JIT
def test_reset(jit: bool) -> None:
    out = both(reset_records, jit, records=numbered(16), source_tags=tags_of(), slots=index(1, 1), page_size=PAGE)
    for after, before in ((out.records, numbered(16)), (out.source_tags, tags_of())):
        wanted = before.copy()
        wanted[PAGE : 2 * PAGE] = 0
        np.testing.assert_array_equal(after, wanted)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: release_records(records=numbered(8), slots=index(1)), ValueError, r"release needs records of at least 16 words"),
        (lambda: release_records(records=numbered(15), slots=index(1)), ValueError, r"release needs records of at least 16 words"),
        (lambda: copy_records(records=numbered(), src=index(1), dst=index(1, 2)), ValueError, "dst length must be 1, got 2"),
        (lambda: copy_records(records=numbered(), src=index(1)[None], dst=index(1)), ValueError, r"src must be 1-D, got shape \(1, 1\)"),
        (lambda: copy_records(records=numbered(), src=np.ones(1), dst=index(1)), ValueError, "src must have dtype int32 or int64, got float64"),
        (lambda: copy_records(records=numbered(7), src=index(1), dst=index(1)), ValueError, "records must have at least 8 words"),
        (lambda: copy_records(records=numbered(), source_tags=tags_of(3), src=index(1), dst=index(1)), ValueError, "source_tags must have shape"),
        (lambda: copy_records(records=numbered(), src=index(1), dst=index(1), page_size=0), ValueError, "page_size must be >= 1, got 0"),
        (lambda: copy_records(records=numbered(), src=index(1), dst=index(1), page_size=True), TypeError, "page_size must be an int, got bool"),
        (lambda: copy_records(records=numbered(), src=index(1), dst=index(1), page_size=33), ValueError, "page_size must be at most 32, the slots of the records, got 33"),
        (lambda: reset_records(records=numbered(), slots=index(1), page_size=2**31 - 1), ValueError, "page_size must be at most 32, the slots of the records"),
        (lambda: take_records(records=numbered(slots=0), slots=index(0), page_size=2), ValueError, "page_size must be at most 0, the slots of the records, got 2"),
        (lambda: put_records(records=numbered(), taken=None, slots=index(1)), TypeError, "taken must be a TakenRecords, got NoneType"),
        (lambda: take_records(records=numbered(), slots=None), TypeError, "slots must be an array, got None"),
        (lambda: permute_records(records=numbered(), permutation=np.arange(33)), ValueError, "permutation length must be at most 32, got 33"),
        (lambda: put_records(records=numbered(), taken=take_records(records=numbered(), slots=index(1)), slots=index(1, 2)), ValueError, "taken.records axis 0 must be 2, got 1"),
        (lambda: put_records(records=numbered(16), taken=take_records(records=numbered(), slots=index(1)), slots=index(1)), ValueError, "taken.records axis 1 must be 16, got 8"),
        (lambda: put_records(records=numbered(), source_tags=tags_of(), taken=take_records(records=numbered(), slots=index(1)), slots=index(1)), ValueError, "taken.source_tags is required"),
    ],
    ids=range(18),
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        call()


# ------------------------------------------------------------------------------------------------ real chains

TABLE = np.array([[0] * 8, [8, 9, 10, 11, 20, 21, 22, 23]], np.int32)
TOKENS = np.array([5, 6, 7, 8, 9, 10, 11, 12], np.int32)


def stamped(words16: bool = True, namespace: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A request of eight tokens on pages 2 and 5: records, tags and pool."""
    pool = np.random.default_rng(1).integers(0, 256, (SLOTS // PAGE, PAGE * 32), dtype=np.uint8)
    source = make_packed_source(buffer=pool, page_size=PAGE, bytes_per_token=32, read_bytes=32)
    laid_out = plan(
        req_pool_indices=[1], prefix_lens=[0], extend_seq_lens=[8], req_to_token=TABLE, verify_capacity=8, write_req_capacity=1
    )  # fmt: skip
    out = write(
        records=allocate_records(slots=SLOTS, provenance=words16), source_tags=allocate_source_tags(slots=SLOTS, sources=1),
        log=ViolationLog.allocate(ring_capacity=1), plan=laid_out.write, input_ids=TOKENS, positions=np.arange(8), out_cache_loc=TABLE[1],
        launch_tag=2, real_kv_hash_mode=2, real_kv_sources=source, real_kv_buffers=(pool,), request_ids=[77], namespaces=[namespace],
    )  # fmt: skip
    return np.array(out.records), np.array(out.source_tags), pool


def verdict(records: Any, pool: np.ndarray, table: np.ndarray, tags: Any = None) -> int:
    source = make_packed_source(buffer=pool, page_size=PAGE, bytes_per_token=32, read_bytes=32)
    out = verify_fused(
        records=records, log=ViolationLog.allocate(ring_capacity=9), req_pool_indices=[1], prefix_lens=[8], req_to_token=table, launch_tag=0,
        real_kv_hash_mode=2, real_kv_sources=source, real_kv_buffers=(pool,), source_tags=tags,
    )  # fmt: skip
    return int(out.verdict[0])


def test_a_moved_request_verifies_and_one_whose_bytes_moved_alone_does_not() -> None:
    records, tags, pool = stamped()
    moved_pool = pool.copy()
    moved_pool[[1, 6]] = pool[[2, 5]]
    moved_table = TABLE.copy()
    moved_table[1] = [4, 5, 6, 7, 24, 25, 26, 27]
    out = copy_records(records=records, source_tags=tags, src=index(2, 5), dst=index(1, 6), page_size=PAGE)
    assert verdict(records, pool, TABLE, tags) == 1
    assert verdict(out.records, moved_pool, moved_table, out.source_tags) == 1
    assert verdict(records, moved_pool, moved_table, tags) == 2
    assert verdict(out.records, pool, moved_table, out.source_tags) == 2


def export_of(records: np.ndarray, tags: np.ndarray | None) -> dict[str, np.ndarray]:
    return export_records(records=records, source_tags=tags, slots=index(2, 5), page_size=PAGE)


def imported(exported: dict[str, np.ndarray], pool: np.ndarray, pages: np.ndarray, *, jit: bool, tags: bool = True, words: int = 16) -> Any:
    """Into a fresh pool whose bytes have arrived already."""
    source = make_packed_source(buffer=pool, page_size=PAGE, bytes_per_token=32, read_bytes=32)
    arguments: dict[str, Any] = {"source_tags": np.zeros((SLOTS, 1), np.uint32)} if tags else {}
    call = functools.partial(import_records, exported=exported, page_size=PAGE, real_kv_hash_mode=2, real_kv_sources=source)
    return both(
        lambda pool, **rest: call(real_kv_buffers=(pool,), **rest), jit, records=np.zeros((SLOTS, words), np.uint32), slots=pages, pool=pool,
        **arguments,
    )  # fmt: skip


@JIT
@pytest.mark.parametrize("words16", [False, True])
@pytest.mark.parametrize("namespace", [0, 2**63 + 9])
def test_import_of_a_sound_export(jit: bool, words16: bool, namespace: int) -> None:
    records, tags, pool = stamped(words16, namespace)
    there = np.zeros_like(pool)
    there[[3, 0]] = pool[[2, 5]]
    out = imported(export_of(records, tags), there, index(3, 0), jit=jit, words=records.shape[1])
    assert out.status.tolist() == [0] * 8
    np.testing.assert_array_equal(out.records[12:16], records[8:12])
    np.testing.assert_array_equal(out.records[0:4], records[20:24])
    np.testing.assert_array_equal(out.source_tags[12:16], tags[8:12])
    assert not np.asarray(out.records[16:]).any()


@JIT
def test_import_sees_what_is_wrong(jit: bool) -> None:
    records, tags, pool = stamped()
    there = np.zeros_like(pool)
    there[[3, 0]] = pool[[2, 5]]
    chain, real, unwritten = int(FailReason.VERIFY_CHAIN_HASH), int(FailReason.VERIFY_REAL_KV_HASH), int(FailReason.UNWRITTEN)

    changed = export_of(records, tags)
    changed["records"] = changed["records"].copy()
    changed["records"][2, 0] ^= 1  # a token: its successor's link breaks
    assert imported(changed, there, index(3, 0), jit=jit).status.tolist() == [0, 0, 0, chain, 0, 0, 0, 0]

    changed["records"] = export_of(records, tags)["records"].copy()
    changed["records"][0, 12] ^= 1  # the head's namespace
    assert imported(changed, there, index(3, 0), jit=jit).status.tolist() == [chain] + [0] * 7

    changed["records"] = export_of(records, tags)["records"].copy()
    changed["records"][5] = 0  # lost on the way
    assert imported(changed, there, index(3, 0), jit=jit).status.tolist() == [0, 0, 0, 0, 0, chain | real | unwritten, 0, 0]

    damaged = there.copy()
    damaged[0, 32] ^= 1
    assert imported(export_of(records, tags), damaged, index(3, 0), jit=jit).status.tolist() == [0, 0, 0, 0, 0, real, 0, 0]

    swapped = imported(export_of(records, tags), there, index(0, 3), jit=jit)  # bytes and records on different pages
    assert swapped.status.tolist() == [real] * 8
    assert verdict(swapped.records, there, TABLE, swapped.source_tags) == 2, "an import never stamps anew"


@JIT
def test_import_leaves_out_and_refuses_entries(jit: bool) -> None:
    records, tags, pool = stamped()
    out = imported(export_of(records, tags), pool, index(-1, 5), jit=jit)
    assert out.status.tolist() == [0] * 8 and not np.asarray(out.records[:20]).any()
    out = imported(export_of(records, tags), pool, index(99, 5), jit=jit)
    assert out.status.tolist() == [OUT] * 4 + [0] * 4
    partly = export_records(records=records, source_tags=tags, slots=index(2, 99), page_size=PAGE)
    out = imported(partly, pool, index(2, 5), jit=jit)
    assert out.status.tolist() == [0] * 4 + [OUT] * 4 and not np.asarray(out.records[20:24]).any()
    twice = imported(export_of(records, tags), pool, index(5, 5), jit=jit)
    assert twice.status.tolist() == [OVERWRITTEN] * 4 + [0] * 4


def test_import_without_bytes_checks_the_chain_only() -> None:
    records, tags, _ = stamped()
    out = import_records(records=np.zeros_like(records), exported=export_of(records, None), slots=index(0, 1), page_size=PAGE)
    assert out.status.tolist() == [0] * 8 and out.source_tags is None
    changed = export_of(records, tags)["records"].copy()
    changed[1, 5] ^= 1  # a stored chain hash: its own link breaks, and its successor's
    out = import_records(
        records=np.zeros_like(records), exported=export_of(records, None) | {"records": changed}, slots=index(0, 1), page_size=PAGE
    )
    assert out.status.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


def test_an_export_survives_a_file(tmp_path: Any) -> None:
    records, tags, pool = stamped()
    np.savez(tmp_path / "sidecar.npz", **export_of(records, tags))
    with np.load(tmp_path / "sidecar.npz") as loaded:
        out = imported(dict(loaded), pool, index(2, 5), jit=False)
    np.testing.assert_array_equal(out.records, records)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": np.array(2)}, ValueError, "exported has version 2, this package reads version 1"),
        ({"shape": np.array([2, PAGE, 8, 1])}, ValueError, "exported records have 8 words, these have 16"),
        ({"shape": np.array([2, 2, 16, 1])}, ValueError, "exported holds 2 entries of page_size 2, slots names 2 of page_size 4"),
        ({"shape": np.array([2, PAGE, 16, -1])}, ValueError, "exported has no source tags, here there are 1 sources"),
        ({"shape": np.array([2, PAGE, 16, 7])}, ValueError, "exported has source tags of 7 sources, here there are 1 sources"),
        ({"shape": np.array([2, PAGE, 16])}, ValueError, "exported shape must have 4 numbers, got 3"),
        ({"shape": np.array([2.0, PAGE, 16, 1])}, ValueError, "exported shape must be integers, got float64"),
        ({"shape": np.array(4)}, ValueError, "exported shape must be integers, got int64 of shape"),
        ({"shape": None}, TypeError, "exported shape must be an array, got NoneType"),
        ({"shape": [2, PAGE, 16, None]}, TypeError, "exported shape element must be an int, got NoneType"),
        ({"version": None}, TypeError, "exported version must be an int, got NoneType"),
        ({"version": "1"}, TypeError, "exported version must be an int, got str"),
        ({"version": np.zeros(3, np.int32)}, ValueError, "exported version must be a scalar, got shape"),
        ({"records": None}, TypeError, "taken.records must be an array, got NoneType"),
        ({"source_tags": None}, ValueError, "taken.source_tags is required when source_tags is set"),
        ({"source_tags": 3}, TypeError, "taken.source_tags must be an array, got int"),
        ({"taken": "all"}, TypeError, "taken.taken must be an array, got str"),
        ({"records": np.zeros((7, 16), np.uint32)}, ValueError, "taken.records axis 0 must be 8, got 7"),
        ({"records": np.zeros((8, 16), np.int32)}, ValueError, "taken.records must have dtype uint32, got int32"),
    ],
)
def test_import_errors(changes: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    records, tags, pool = stamped()
    with pytest.raises(error, match=f"^kv-canary: {message}"):
        imported(export_of(records, tags) | changes, pool, index(2, 5), jit=False)


def test_import_of_something_else() -> None:
    with pytest.raises(ValueError, match=r"^kv-canary: exported lacks version, shape, records, source_tags, taken, status"):
        import_records(records=numbered(), exported={}, slots=index())
    for exported in (None, 3, [1]):
        with pytest.raises(TypeError, match=r"^kv-canary: exported must be a mapping as export_records returns it, got "):
            import_records(records=numbered(), exported=exported, slots=index())


def test_export_is_for_the_host() -> None:
    with pytest.raises(
        TypeError, match=r"^kv-canary: export_records needs concrete arrays, got a traced value; inside jit use take_records"
    ):
        jax.jit(lambda records: export_records(records=records, slots=index(1)))(numbered())
    with pytest.raises(TypeError, match=r"^kv-canary: export_records needs concrete arrays"):  # of concrete arrays, inside jit
        jax.jit(lambda x: (export_records(records=jnp.asarray(numbered()), slots=index(1)), x)[1])(1)


def test_in_a_scan_with_donation() -> None:
    """Moves thread through a loop like any other state."""

    def body(carry: Any, n: Any) -> Any:
        records, tags = carry
        out = copy_records(records=records, source_tags=tags, src=n[None], dst=n[None] + 1)
        return (out.records, out.source_tags), out.status

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(4, dtype=jnp.int32)), donate_argnums=0)
    (records, _), _ = run((jnp.asarray(numbered()), jnp.asarray(tags_of())))
    assert records[:5, 0].tolist() == [1] * 5


def test_what_was_free_there_is_not_free_here() -> None:
    records = allocate_records(slots=4, provenance=True).at[1].set(jnp.arange(16, dtype=jnp.uint32) + 1)
    records = records.at[1, 11].set(0)
    free = release_records(records=records, slots=[1]).records
    exported = export_records(records=free, slots=[1])
    assert exported["records"][0, 11] == 1
    here = import_records(records=allocate_records(slots=4, provenance=True), exported=exported, slots=[2]).records
    assert np.array_equal(here[2], records[1])
