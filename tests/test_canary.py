"""The canary around a jitted step: clean traffic is silent, faults are found where they are, nothing is copied or recompiled."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import (
    BlockTable,
    Canary,
    CanaryBatch,
    CanaryConfig,
    CanaryLaunchCapacities,
    CanaryLaunchTag,
    FailReason,
    FlatTable,
    IdentityTable,
    Layout,
    PoolGroup,
    RowTable,
    SweepPortion,
    Verdict,
    decode_log,
)
from jax_kvcanary.report_header import header_fields

PAGES, PAGE, LAYERS, HEADS, DIM = 8, 4, 3, 2, 8
SLOTS = PAGES * PAGE
LAYOUT = Layout.from_axes("page slot head dim", interleaved="head")
ROW_LAYOUT = Layout.from_axes("slot head dim", interleaved="head")
TABLE = np.array([[0] * 8, [4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19], [20, 21, 22, 23, 24, 25, 26, 27]], np.int32)
TOKENS = 8


def make_pool(layers: int = LAYERS) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(3), layers)
    return [jax.random.normal(key, (PAGES, PAGE, 2 * HEADS, DIM), jnp.float32) for key in keys]


def make(config: CanaryConfig | None = None, **options: Any) -> Canary:
    return Canary(make_pool(), LAYOUT, config=config or CanaryConfig(strict=True, verify_every=2), **options)


def make_batch(rows: list[int], prefix: list[int], extend: list[int], tokens: list[int], table: Any = TABLE, **more: Any) -> CanaryBatch:
    ids = np.zeros(TOKENS, np.int32)
    ids[: len(tokens)] = tokens
    fields = {
        "req_pool_indices": np.array(rows, np.int32),
        "prefix_lens": np.array(prefix, np.int32),
        "extend_seq_lens": np.array(extend, np.int32),
        "req_to_token": table,
        "input_ids": ids,
        "request_ids": np.array([1000 + row for row in rows], np.int32),
    }
    return jax.tree.map(jnp.asarray, CanaryBatch(**(fields | more)))


def slots_of(batch: CanaryBatch) -> np.ndarray:
    """Slots that the step writes, ``SLOTS`` where there is no token."""
    out = np.full(TOKENS, SLOTS, np.int32)
    place = 0
    for row, prefix, extend in zip(
        *(np.asarray(x) for x in (batch.req_pool_indices, batch.prefix_lens, batch.extend_seq_lens)), strict=True
    ):
        if row <= 0:
            continue
        out[place : place + extend] = TABLE[row, prefix : prefix + extend]
        place += extend
    return out


def model(kv: list[jax.Array], batch: CanaryBatch, slots: jax.Array) -> list[jax.Array]:
    """Writes a row that depends on token and layer to every slot."""
    rows = new_rows(batch, len(kv))
    return [layer.at[slots // PAGE, slots % PAGE].set(row, mode="drop") for layer, row in zip(kv, rows, strict=True)]


def new_rows(batch: CanaryBatch, layers: int) -> list[jax.Array]:
    base = jnp.asarray(batch.input_ids, jnp.float32)[:, None, None] + jnp.arange(2 * HEADS * DIM, dtype=jnp.float32).reshape(2 * HEADS, DIM)
    return [base * (layer + 1) for layer in range(layers)]


@functools.lru_cache(maxsize=64)
def compiled(canary: Canary) -> Any:
    def step(kv: Any, state: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        kv, state, verdict = canary.head(kv, state, batch)
        kv = model(kv, batch, slots)
        state, verdict, report = canary.tail(kv, state, batch, verdict)
        return kv, state, verdict, report

    return jax.jit(step)


class Run:
    """A pool and a state that go through steps."""

    def __init__(self, canary: Canary) -> None:
        self.canary, self.kv, self.state = canary, make_pool(), canary.init()

    def step(self, batch: CanaryBatch, slots: np.ndarray | None = None) -> Any:
        at = jnp.asarray(slots_of(batch) if slots is None else slots)
        self.kv, self.state, verdict, report = compiled(self.canary)(self.kv, self.state, batch, at)
        self.report = report
        return verdict

    def prefill(self) -> Any:
        return self.step(make_batch([1, 2], [0, 0], [5, 3], [11, 12, 13, 14, 15, 21, 22, 23]))

    def idle(self, **more: Any) -> Any:
        return self.step(make_batch([1, 2], [5, 3], [0, 0], [], **more))

    def rows(self, tag: CanaryLaunchTag = CanaryLaunchTag.HEAD_K_FULL) -> tuple[Any, ...]:
        labels = self.canary.source_labels(tag)
        return decode_log(self.state.log[tag], records=self.state.records[self.canary.group_of_part(tag)], source_names=labels).violations

    @property
    def reported(self) -> int:
        return sum(int(part.write_index[0]) for part in self.state.log.parts)

    def change(self, layer: int, slot: int, head: int, by: float = 1.0) -> None:
        self.kv[layer] = self.kv[layer].at[slot // PAGE, slot % PAGE, head, DIM - 1].add(by)


# ---------------------------------------------------------------------------------------------- clean traffic


def tables() -> dict[str, Any]:
    blocks = TABLE[:, ::PAGE] // PAGE
    flat = np.concatenate([TABLE[1], TABLE[2], np.full(3, 2_000_000, np.int32)])
    return {
        "rows": RowTable(TABLE),
        "blocks": BlockTable(blocks, PAGE),
        "flat": FlatTable(flat, np.array([0, 8, 16], np.int32)),
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rows", {"checks": "head"}),
        ("blocks", {"checks": "tail"}),
        ("flat", {"checks": "both"}),
        ("rows", {"partial_layers": 0}),
        ("rows", {"partial_layers": 0, "verify_every": 0}),
        ("rows", {"real_kv": "none"}),
        ("rows", {"real_kv": "partial", "partial_layers": 2}),
        ("rows", {"real_kv": "partial", "partial_layers": 0}),
        ("rows", {"verify_every": 1}),
    ],
)
def test_clean_steps_are_silent(kind: str, options: dict[str, Any]) -> None:
    run = Run(make(CanaryConfig(**({"strict": True, "verify_every": 2} | options))))
    table = tables()[kind]
    steps = [
        make_batch([1, 2], [0, 0], [3, 2], [11, 12, 13, 21, 22], table),
        make_batch([1, 2], [3, 2], [2, 1], [14, 15, 23], table),
        make_batch([1, 2], [5, 3], [1, 1], [16, 24], table),
        make_batch([1, 2], [5, 4], [1, 0], [17], table),  # a rejected speculative token is written again
        make_batch([1, 2], [6, 4], [1, 1], [18, 25], table),
        make_batch([-1, 2], [6, 5], [1, 1], [26], table),
    ]
    for batch in steps:
        verdict = run.step(batch)
        assert int(Verdict.BAD) not in verdict.verdict.tolist()
    assert run.reported == 0
    assert verdict.verdict.tolist() == [int(Verdict.NOT_CHECKED), int(Verdict.OK)]
    assert verdict.first_bad_position.tolist() == verdict.first_bad_slot.tolist() == [-1, -1]
    header = header_fields(run.report.header, run.canary)
    assert header.step == len(steps) and header.unattested == 0
    assert header.slot_runs[CanaryLaunchTag.TAIL_K_FULL] >= 3 + 2 + 3 + 2 + 1 + 2 + 1


def test_a_contiguous_cache_and_derived_slots() -> None:
    """Slot = row * length + position % length: no table, no slot map, a ring that turns over."""
    shape = (2, 4, HEADS, DIM)
    pool = [jnp.zeros(shape, jnp.float32)]
    canary = Canary(
        pool, Layout.from_axes("page slot head dim"), config=CanaryConfig(strict=True, verify_every=1), padding_req=None, padding_slot=None
    )
    state, table = canary.init(), IdentityTable(2, 4)

    @jax.jit
    def step(kv: Any, state: Any, position: jax.Array) -> Any:
        batch = CanaryBatch(
            req_pool_indices=jnp.arange(2), prefix_lens=jnp.stack([position, position]), extend_seq_lens=jnp.ones(2, jnp.int32),
            req_to_token=table, input_ids=jnp.stack([position + 7, position + 9]),
        )  # fmt: skip
        kv, state, verdict = canary.head(kv, state, batch)
        kv = [layer.at[jnp.arange(2), position % 4].set(position.astype(jnp.float32) + 1) for layer in kv]
        state, verdict, _ = canary.tail(kv, state, batch, verdict)
        return kv, state, verdict

    for position in range(11):
        pool, state, verdict = step(pool, state, jnp.int32(position))
    assert verdict.verdict.tolist() == [1, 1]
    assert sum(int(part.write_index[0]) for part in state.log.parts) == 0
    pool = [pool[0].at[1, 2, 0, 0].add(1)]
    pool, state, verdict = step(pool, state, jnp.int32(11))
    assert verdict.verdict.tolist() == [1, 2] and verdict.first_bad_slot.tolist() == [-1, 6]


def test_prefix_sharing() -> None:
    """Two requests with the same first page: the second one's chain goes on from the first one's records."""
    shared = TABLE.copy()
    shared[2, :4] = shared[1, :4]
    run = Run(make())
    run.step(make_batch([1], [0], [5], [11, 12, 13, 14, 15], shared))
    out = slots_of(make_batch([1, 2], [5, 4], [1, 2], [16, 25, 26]))
    out[:3] = [shared[1, 5], shared[2, 4], shared[2, 5]]
    run.step(make_batch([1, 2], [5, 4], [1, 2], [16, 25, 26], shared), out)
    assert run.step(make_batch([1, 2], [6, 6], [0, 0], [], shared)).verdict.tolist() == [1, 1]
    assert run.reported == 0


# ---------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("head", range(2 * HEADS))
def test_a_changed_byte_is_found_within_the_coverage(layer: int, head: int) -> None:
    canary = make(CanaryConfig(strict=True, verify_every=4))
    period = canary.coverage().all_bytes
    for slot, position in ((4, 0), (8, 4)):
        run = Run(canary)
        run.prefill()
        run.change(layer, slot, head)
        seen = [step for step in range(period) if run.idle().verdict.tolist() == [2, 1]]
        assert len(seen) >= 1
        (violation, *_) = run.rows()
        half = "KV"[head % 2]
        assert violation.source_name == f"layer {layer} {half}"
        assert (violation.slot, violation.expected_position) == (slot, position)
        assert violation.reasons == FailReason.VERIFY_REAL_KV_HASH
        assert violation.writer is not None and violation.writer.request_id == 1001


def test_leading_bytes_rotate_over_layers() -> None:
    canary = make(CanaryConfig(strict=True, real_kv="partial", partial_layers=1))
    assert canary.coverage() == dataclasses.replace(canary.coverage(), leading_bytes=LAYERS, all_bytes=0)
    run = Run(canary)
    run.prefill()
    run.kv[2] = run.kv[2].at[1, 0, 0, 0].add(1)  # slot 4, K of layer 2
    verdicts = [run.idle().verdict.tolist() for _ in range(LAYERS)]
    assert sorted(verdicts) == [[1, 1], [1, 1], [2, 1]]
    assert run.rows()[0].source_name == "layer 2 K (leading bytes)"


def test_the_verdict_names_slot_and_quarantine() -> None:
    run = Run(make(CanaryConfig(strict=True, verify_every=1)))
    run.prefill()
    run.change(1, 6, 0)
    run.change(1, 8, 0)
    verdict = run.idle()
    assert (verdict.verdict.tolist(), verdict.first_bad_position.tolist(), verdict.first_bad_slot.tolist()) == ([2, 1], [2, -1], [6, -1])
    assert sorted(verdict.bad_slots["full"].tolist())[-2:] == [6, 8]
    assert set(verdict.bad_slots["full"].tolist()) == {-1, 6, 8}


def test_a_swapped_table_entry() -> None:
    run = Run(make())
    run.prefill()
    swapped = TABLE.copy()
    swapped[1, 2], swapped[2, 1] = swapped[2, 1], swapped[1, 2]
    verdict = run.step(make_batch([1, 2], [5, 3], [0, 0], [], swapped))
    assert verdict.verdict.tolist() == [2, 2] and verdict.first_bad_position.tolist() == [2, 1]


def test_a_slot_outside_the_pool_and_a_prefix_past_the_table() -> None:
    run = Run(make())
    run.prefill()
    wild = TABLE.copy()
    wild[1, 2], wild[2, 1] = 2_000_000, -7
    verdict = run.step(make_batch([1, 2], [5, 99], [0, 0], [], wild))
    assert verdict.verdict.tolist() == [2, 2] and verdict.first_bad_slot.tolist() == [2_000_000, -1]
    reasons = {violation.reasons for violation in run.rows()}
    assert FailReason.SLOT_OUT_OF_RANGE in reasons and FailReason.TABLE_OUT_OF_RANGE in reasons


def test_expected_tokens_and_inputs() -> None:
    run = Run(make())
    expected = np.zeros((4, 8), np.int32)
    expected[1, :5], expected[2, :3] = [11, 12, 13, 14, 15], [21, 22, 23]
    known = {"expected_tokens": expected, "expected_valid_lens": np.array([5, 3], np.int32)}
    run.step(
        make_batch(
            [1, 2],
            [0, 0],
            [5, 3],
            [11, 12, 99, 14, 15, 21, 22, 23],
            expected_input_tokens=np.array([11, 12, 13, 14, 15, 21, 22, 23], np.int32),
        )
    )
    assert [violation.reasons for violation in run.rows(CanaryLaunchTag.TAIL_K_FULL)] == [FailReason.WRITE_TOKEN]
    assert run.idle(**known).verdict.tolist() == [2, 1]
    assert [violation.reasons for violation in run.rows()] == [FailReason.VERIFY_TOKEN] * len(run.rows())


def test_a_gap_between_positions() -> None:
    run = Run(make())
    run.prefill()
    verdict = run.step(make_batch([1, 2], [5, 3], [1, 0], [16], positions=np.full(TOKENS, 9, np.int32)))
    assert verdict.verdict.tolist() == [2, 1]
    assert run.rows(CanaryLaunchTag.TAIL_K_FULL)[0].reasons == FailReason.WRITE_POSITION


def test_namespaces_do_not_chain() -> None:
    run = Run(make())
    batch = make_batch([1], [0], [4], [1, 2, 3, 4], namespaces=np.array([5], np.int32))
    run.step(batch)
    assert run.step(make_batch([1], [4], [0], [], namespaces=np.array([5], np.int32))).verdict.tolist() == [1]
    verdict = run.step(make_batch([1], [4], [0], [], namespaces=np.array([6], np.int32)))
    assert verdict.verdict.tolist() == [2] and verdict.first_bad_position.tolist() == [0]


@pytest.mark.parametrize("dropped", [0, 6])
def test_a_write_that_does_not_land(dropped: int) -> None:
    canary = make()

    @jax.jit
    def step(kv: Any, state: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        kv, state, verdict = canary.head(kv, state, batch)
        kv = model(kv, batch, slots)
        return canary.tail(kv, state, batch, verdict, new_kv=new_rows(batch, LAYERS), new_kv_layout=ROW_LAYOUT)

    batch = make_batch([1, 2], [0, 0], [5, 3], [11, 12, 13, 14, 15, 21, 22, 23])
    slots = slots_of(batch)
    _, verdict, _ = step(make_pool(), canary.init(), batch, slots)
    assert verdict.verdict.tolist() == [1, 1]
    where = int(slots[dropped])
    slots[dropped] = SLOTS
    state, verdict, _ = step(make_pool(), canary.init(), batch, slots)
    assert verdict.verdict.tolist() == ([2, 1] if dropped < 5 else [1, 2])
    (violation,) = decode_log(state.log[CanaryLaunchTag.TAIL_K_FULL]).violations
    assert (violation.slot, violation.reasons, violation.expected_position) == (where, FailReason.LANDING, dropped % 5)
    assert "handed to the writer" in violation.describe()


# ---------------------------------------------------------------------------------------------- moves


def test_announced_copies_and_releases() -> None:
    """Copy-on-write of a page of four slots, announced with the step."""
    canary = make(copy_page_size=PAGE)
    run = Run(canary)
    run.prefill()
    forked = TABLE.copy()
    forked[3, :5] = [12, 13, 14, 15, 24]  # request 3 took over request 2's pages, copied
    run.kv = [layer.at[5].set(layer[1]) for layer in run.kv]  # page 5 is slots 20 to 23
    forked[3, :4] = [20, 21, 22, 23]
    copies = {"copy_src": np.array([1, -1], np.int32), "copy_dst": np.array([5, -1], np.int32)}
    assert run.step(make_batch([3, 2], [4, 3], [0, 0], [], forked, **copies)).verdict.tolist() == [1, 1]
    assert run.reported == 0
    run.step(make_batch([2], [3], [0], [], released_slots=np.array([5, -1], np.int32)))
    assert np.asarray(run.state.records["full"])[20:24, 11].tolist() == [1, 1, 1, 1]
    assert run.reported == 0


def test_unannounced_copies_are_unattested_or_violations() -> None:
    moved = TABLE.copy()
    moved[3, :4] = [20, 21, 22, 23]
    for strict in (False, True):
        run = Run(make(CanaryConfig(strict=strict, verify_every=2)))
        run.prefill()
        run.kv = [layer.at[5].set(layer[1]) for layer in run.kv]
        verdict = run.step(make_batch([3, 2], [4, 3], [0, 0], [], moved))
        assert verdict.verdict.tolist() == ([2, 1] if strict else [0, 1])
        assert verdict.unattested.tolist() == ([0, 0] if strict else [4, 0])
        assert header_fields(run.report.header, run.canary).unattested == (0 if strict else 4)
        assert (run.reported == 0) is not strict


@pytest.mark.parametrize("room", [3, 16])
def test_unattested_prefixes_are_adopted_where_they_fit(room: int) -> None:
    run = Run(make(CanaryConfig(verify_every=2, adopt_capacity=room)))
    run.prefill()
    first = run.step(make_batch([3, 2], [4, 3], [1, 1], [35, 24]))
    assert first.unattested.tolist() == [4, 0]
    again = run.step(make_batch([3, 2], [5, 4], [0, 0], []))
    assert again.unattested.tolist() == ([4, 0] if room < 4 else [0, 0])
    assert run.reported == 0
    if room >= 4:
        flags = np.asarray(run.state.records["full"])[20:24, 11]
        assert flags.tolist() == [2] * 4
        run.change(0, 21, 1)
        assert 2 in [run.step(make_batch([3, 2], [5, 4], [0, 0], [])).verdict.tolist()[0] for _ in range(2)]


def test_moves_between_steps() -> None:
    canary = make()
    run = Run(canary)
    run.prefill()
    exported = canary.export(run.state, slots=[4, 5, 6, 7, 8])
    run.kv = [layer.at[5].set(layer[1]).at[6, 0].set(layer[2, 0]) for layer in run.kv]
    run.state, status = canary.import_(run.state, run.kv, exported, slots=[20, 21, 22, 23, 24])
    assert status.tolist() == [0] * 5
    assert run.step(make_batch([3, 2], [5, 3], [0, 0], [])).verdict.tolist() == [1, 1]
    _, status = canary.import_(run.state, make_pool(), exported, slots=[20, 21, 22, 23, 24])
    assert set(status.tolist()) == {int(FailReason.VERIFY_REAL_KV_HASH)}
    run.state = canary.copy(run.state, src=[8], dst=[25])
    assert np.array_equal(run.state.records["full"][8], run.state.records["full"][25])
    run.state = canary.release(run.state, slots=[25])
    assert int(run.state.records["full"][25, 11]) == 1
    run.state = canary.reset(run.state, slots=[25])
    assert not np.asarray(run.state.records["full"][25]).any()
    order = np.arange(SLOTS, dtype=np.int32)
    order[[4, 5]] = order[[5, 4]]
    moved = canary.permute(run.state, permutation=order)
    assert np.array_equal(moved.records["full"][4], run.state.records["full"][5])


def test_adopt_stamps_what_is_there() -> None:
    canary = make()
    run = Run(canary)
    run.state = canary.adopt(run.state, run.kv, make_batch([1], [0], [5], [11, 12, 13, 14, 15]))
    assert run.step(make_batch([1], [5], [1], [16])).verdict.tolist() == [1]
    assert np.asarray(run.state.records["full"])[4:9, 11].tolist() == [2] * 5


# ---------------------------------------------------------------------------------------------- conventions


def test_unarmed_steps_leave_no_trace() -> None:
    run = Run(make())
    run.prefill()
    records, reported = np.asarray(run.state.records["full"]), run.reported
    verdict = run.step(make_batch([1, 2], [7, 7], [1, 1], [1, 2], armed=np.array(False)))
    assert verdict.verdict.tolist() == [0, 0] and run.reported == reported
    assert np.array_equal(run.state.records["full"], records)
    header = header_fields(run.report.header, run.canary)
    assert (header.step, header.armed_steps) == (2, 1)


def test_reserved_slots_are_not_stamped() -> None:
    canary = make(reserved_slots=4)
    run = Run(canary)
    table = TABLE.copy()
    table[1, 1] = 2
    run.step(make_batch([1], [0], [3], [11, 12, 13], table), np.array([4, 2, 6] + [SLOTS] * 5, np.int32))
    assert not np.asarray(run.state.records["full"])[:4].any()
    assert run.step(make_batch([1], [3], [0], [], table)).verdict.tolist() == [2]


def two_groups() -> Canary:
    pool = make_pool()
    groups = (PoolGroup(name="full", layers=(0, 2)), PoolGroup(name="swa", layers=(1,), swa_window_size=3))
    return Canary(pool, LAYOUT, config=CanaryConfig(strict=True, verify_every=1), groups=groups)


def test_two_attention_groups() -> None:
    canary = two_groups()
    assert canary.parts == (
        CanaryLaunchTag.HEAD_K_FULL,
        CanaryLaunchTag.TAIL_K_FULL,
        CanaryLaunchTag.HEAD_K_SWA,
        CanaryLaunchTag.TAIL_K_SWA,
    )
    mapping = np.arange(SLOTS, dtype=np.int32)
    mapping[4:12] = [20, 21, 22, 23, 20, 21, 22, 23]  # the window pool uses four slots for request 1, over and over

    @jax.jit
    def step(kv: Any, state: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        kv, state, verdict = canary.head(kv, state, batch)
        inside = jnp.where(slots < SLOTS, jnp.asarray(mapping)[jnp.minimum(slots, SLOTS - 1)], SLOTS)
        rows = new_rows(batch, LAYERS)
        kv = [
            layer.at[at // PAGE, at % PAGE].set(row, mode="drop") for layer, row, at in zip(kv, rows, (slots, inside, slots), strict=True)
        ]
        state, verdict, report = canary.tail(kv, state, batch, verdict)
        return kv, state, verdict, report

    kv, state = make_pool(), canary.init()
    for position in range(7):
        batch = make_batch([1], [position], [1], [30 + position], full_to_swa_index_mapping=mapping)
        kv, state, verdict, report = step(kv, state, batch, slots_of(batch))
    assert verdict.verdict.tolist() == [1]
    assert header_fields(report.header, canary).write_index == dict.fromkeys(canary.parts, 0)
    batch = make_batch([1], [7], [0], [], full_to_swa_index_mapping=mapping)
    kv[1] = kv[1].at[5, 1, 3, 0].add(1)  # slot 21 of the window pool: position 5
    kv, state, verdict, report = step(kv, state, batch, slots_of(batch))
    assert verdict.verdict.tolist() == [2] and verdict.first_bad_position.tolist() == [5]
    assert 21 in verdict.bad_slots["swa"].tolist() and set(verdict.bad_slots["full"].tolist()) == {-1}
    (violation,) = decode_log(
        state.log[CanaryLaunchTag.HEAD_K_SWA], source_names=canary.source_labels(CanaryLaunchTag.HEAD_K_SWA)
    ).violations
    assert violation.source_name == "layer 1 V"


def test_a_ring_that_is_full_is_reported_and_cleared() -> None:
    run = Run(make(CanaryConfig(strict=True, verify_every=1, ring_capacity=2)))
    run.prefill()
    for slot in (4, 5, 6):
        run.change(0, slot, 0)
    run.idle()
    header = header_fields(run.report.header, run.canary)
    assert header.write_index[CanaryLaunchTag.HEAD_K_FULL] == 3 and run.report.rows.shape[1] == 2
    run.state = run.canary.clear_log(run.state)
    run.idle()
    header = header_fields(run.report.header, run.canary)
    assert (header.epoch, header.write_index[CanaryLaunchTag.HEAD_K_FULL]) == (1, 3)


def test_many_steps_in_one_while_loop() -> None:
    canary = make()

    def decode(kv: Any, state: Any, steps: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            number, kv, state, worst, report = carry
            batch = make_batch([1, 2], [0, 0], [1, 1], [])
            batch = dataclasses.replace(
                batch, prefix_lens=jnp.stack([number, number]), input_ids=jnp.full((TOKENS,), 40, jnp.int32) + number
            )
            kv, state, verdict = canary.head(kv, state, batch)
            slots = jnp.concatenate([jnp.asarray(TABLE)[jnp.array([1, 2]), number], jnp.full((TOKENS - 2,), SLOTS)])
            kv = model(kv, batch, slots)
            state, verdict, report = canary.tail(kv, state, batch, verdict)
            return number + 1, kv, state, jnp.maximum(worst, verdict.verdict), report

        start = (jnp.int32(0), kv, state, jnp.zeros(2, jnp.int32), canary.report(state))
        return jax.lax.while_loop(lambda carry: carry[0] < steps, body, start)

    loop = jax.jit(decode, donate_argnums=(0, 1))
    _, _kv, _state, worst, report = loop(make_pool(), canary.init(), jnp.int32(8))
    assert worst.tolist() == [1, 1]
    assert header_fields(report.header, canary).step == 8
    text = loop.lower(make_pool(), canary.init(), jnp.int32(8)).compile().as_text()
    assert pool_copies(text) == []


# ---------------------------------------------------------------------------------------------- the program


def pool_copies(text: str) -> list[str]:
    """Copies, transposes and conversions of a pool-sized array in compiled text."""
    shape = rf"f32\[(?:{PAGES},{PAGE},{2 * HEADS},{DIM}|{SLOTS},{2 * HEADS * DIM}|{SLOTS * 2 * HEADS * DIM})\]"
    return re.findall(rf"= {shape}\S* (?:copy|copy-start|transpose|convert|all-gather)\(.*", text)


@pytest.mark.parametrize("checks", ["head", "both"])
def test_no_copy_of_the_pool_and_no_recompile(checks: str) -> None:
    canary = make(CanaryConfig(strict=True, verify_every=2, checks=checks))

    def step(kv: Any, state: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        kv, state, verdict = canary.head(kv, state, batch)
        kv = model(kv, batch, slots)
        state, verdict, report = canary.tail(kv, state, batch, verdict)
        return kv, state, verdict, report

    jitted = jax.jit(step, donate_argnums=(0, 1))
    kv, state = make_pool(), canary.init()
    for prefix in range(5):
        batch = make_batch([1, 2], [prefix, prefix], [1, 1], [prefix + 1, prefix + 2])
        kv, state, verdict, _ = jitted(kv, state, batch, slots_of(batch))
    assert verdict.verdict.tolist() == [1, 1]
    assert jitted._cache_size() == 1
    text = jitted.lower(kv, state, batch, slots_of(batch)).compile().as_text()
    assert pool_copies(text) == []
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text


def plain(text: str) -> list[str]:
    """Program text without names and source lines."""
    text = re.sub(r"loc\(.*?\)$|#loc.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"@\w+", "@f", re.sub(r"jax\.(?:result_info|arg_info)\s*=\s*\"[^\"]*\"", "", text))
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_mode_off_adds_nothing() -> None:
    canary = make(CanaryConfig(mode="off"))
    assert jax.tree.leaves(canary.init()) == [] and canary.state_bytes() == 0
    batch = make_batch([1], [0], [3], [1, 2, 3])

    def forward(kv: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        return jnp.sum(kv[0]), model(kv, batch, slots)

    def unguarded(kv: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        return forward(kv, batch, slots)

    guarded = canary.guard(forward)

    def with_canary(kv: Any, batch: CanaryBatch, slots: jax.Array) -> Any:
        out, kv, _state, verdict, report = guarded(kv, canary.init(), batch, batch, slots)
        assert verdict is None and report is None
        return out, kv

    arguments = (make_pool(), batch, slots_of(batch))
    texts = [plain(jax.jit(f).lower(*arguments).as_text()) for f in (unguarded, with_canary)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("x64", [False, True])
def test_guard_and_x64(x64: bool) -> None:
    with jax.enable_x64(x64):
        canary = make()
        step = jax.jit(canary.guard(lambda kv, batch, slots: (jnp.sum(batch.input_ids), model(kv, batch, slots))))
        batch = make_batch([1, 2], [0, 0], [5, 3], [11, 12, 13, 14, 15, 21, 22, 23])
        if x64:
            batch = jax.tree.map(lambda x: x.astype(jnp.int64) if x.dtype == jnp.int32 else x, batch)
        _, _kv, state, verdict, report = step(make_pool(), canary.init(), batch, batch, slots_of(batch))
        assert verdict.verdict.tolist() == [1, 1]
        assert np.asarray(state.records["full"])[4:9, 2].tolist() == [0, 1, 2, 3, 4]
        assert report.header.dtype == jnp.uint32


def test_under_grad() -> None:
    """The canary adds nothing to a gradient, and the pool's own goes through."""
    canary, batch = make(), make_batch([1], [0], [3], [1, 2, 3])
    slots = slots_of(batch)

    def loss(kv: Any, guarded: bool) -> jax.Array:
        if not guarded:
            return sum(jnp.sum(layer**2) for layer in model(kv, batch, slots))
        state = canary.init()
        kv, state, verdict = canary.head(kv, state, batch)
        kv = model(kv, batch, slots)
        state, verdict, _ = canary.tail(kv, state, batch, verdict)
        return sum(jnp.sum(layer**2) for layer in kv) + 0 * verdict.verdict.sum()

    want, got = (jax.grad(loss)(make_pool(), guarded) for guarded in (False, True))
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


def test_the_plain_implementation_agrees() -> None:
    runs = []
    for implementation in ("auto", "jax"):
        run = Run(make(CanaryConfig(strict=True, verify_every=2, implementation=implementation)))
        run.prefill()
        run.change(1, 6, 1)
        verdicts = [run.idle().verdict.tolist() for _ in range(2)]
        runs.append(
            (verdicts, [dataclasses.replace(row, writer=None) for row in run.rows()], np.asarray(run.state.records["full"]).tolist())
        )
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------------------------------- facts and errors


def test_state_bytes_and_coverage() -> None:
    shapes = [jax.ShapeDtypeStruct(layer.shape, layer.dtype) for layer in make_pool()]
    canary = Canary(shapes, LAYOUT, config=CanaryConfig(verify_every=16, partial_layers=2))
    assert canary.state_bytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(canary.init()))
    assert canary.coverage().describe() == "records every step, leading bytes of every layer within 2 steps, all bytes within 16 steps"
    assert hash(canary) == hash(Canary(shapes, LAYOUT, config=CanaryConfig(verify_every=16, partial_layers=2)))
    assert (
        Canary(shapes, LAYOUT, config=CanaryConfig(real_kv="none"))
        .coverage()
        .describe()
        .startswith("records every step, leading bytes of every layer never")
    )


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"mode": "lgo"}, ValueError, "mode must be one of 'off', 'log', 'raise', got 'lgo'"),
        ({"real_kv": "some"}, ValueError, "real_kv must be one of"),
        ({"checks": 3}, TypeError, "checks must be a str, got int"),
        ({"verify_every": -1}, ValueError, "verify_every must be"),
        ({"verify_every": 2.0}, TypeError, "verify_every must be an int"),
        ({"strict": 1}, TypeError, "strict must be a bool"),
        ({"ring_capacity": 0}, ValueError, "ring_capacity must be positive"),
        ({"adopt_capacity": 4, "strict": True}, ValueError, "adopt_capacity must be 0 with strict"),
        ({"implementation": "cuda"}, ValueError, "implementation"),
    ],
)
def test_bad_configs(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        CanaryConfig(**fields)


def test_configs_from_the_environment() -> None:
    config = CanaryConfig.from_environment(
        {"JAX_KVCANARY_MODE": "raise", "JAX_KVCANARY_VERIFY_EVERY": "8", "JAX_KVCANARY_STRICT": "on"}, checks="tail"
    )
    assert config == CanaryConfig(mode="raise", verify_every=8, strict=True, checks="tail")
    for name, value, text in (
        ("STRICT", "maybe", "must be 0 or 1"),
        ("VERIFY_EVERY", "x", "must be an integer"),
        ("MODE", "x", "mode must be"),
    ):
        with pytest.raises(ValueError, match=text):
            CanaryConfig.from_environment({f"JAX_KVCANARY_{name}": value})


def test_bad_use_is_named() -> None:
    canary, other = make(), make(name="other")
    batch = make_batch([1], [0], [3], [1, 2, 3])
    with pytest.raises(ValueError, match="state belongs to another canary"):
        canary.head(make_pool(), other.init(), batch)
    with pytest.raises(TypeError, match="state must be a CanaryState, got dict"):
        canary.head(make_pool(), {}, batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have shape \(8, 4, 4, 8\)"):
        canary.head([layer[:4] for layer in make_pool()], canary.init(), batch)
    with pytest.raises(TypeError, match="batch must be a CanaryBatch"):
        canary.head(make_pool(), canary.init(), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="verdict must be what head returned"):
        canary.tail(make_pool(), canary.init(), batch, None)
    with pytest.raises(ValueError, match="must be given together"):
        canary.head(make_pool(), canary.init(), dataclasses.replace(batch, copy_src=jnp.array([1])))
    with pytest.raises(ValueError, match="must be given together"):
        canary.head(make_pool(), canary.init(), dataclasses.replace(batch, expected_tokens=jnp.zeros((4, 8), jnp.int32)))
    with pytest.raises(ValueError, match="armed must be a bool scalar"):
        canary.head(make_pool(), canary.init(), dataclasses.replace(batch, armed=jnp.array([True])))
    small = make(capacities=CanaryLaunchCapacities.from_args(pool_slots=8, request_rows=1, max_prefill_tokens=4))
    with pytest.raises(ValueError, match="batch has room for 8 tokens, the canary was made for 4"):
        small.head(make_pool(), small.init(), batch)
    with pytest.raises(ValueError, match="group is required, there are 'full', 'swa'"):
        two_groups().reset(two_groups().init(), slots=[1])
    with pytest.raises(ValueError, match="there is no group 'x'"):
        canary.reset(canary.init(), slots=[1], group="x")
    with pytest.raises(ValueError, match="full_to_swa_index_mapping of the batch is required"):
        two_groups().head(make_pool(), two_groups().init(), batch)
    with pytest.raises(ValueError, match="groups must have different names"):
        make(groups=(PoolGroup(), PoolGroup()))
    with pytest.raises(ValueError, match="at most one pool"):
        make(groups=(PoolGroup(name="a"), PoolGroup(name="b")))
    with pytest.raises(TypeError, match="config must be a CanaryConfig"):
        make("log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="new_kv must hold 8 slots of 6 sources"):
        canary.tail(
            make_pool(), canary.init(), batch, canary.head(make_pool(), canary.init(), batch)[2],
            new_kv=[row[:4] for row in new_rows(batch, LAYERS)], new_kv_layout=ROW_LAYOUT,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- sweeps


def test_sweeps_find_what_no_request_reads() -> None:
    canary = make(CanaryConfig(strict=True, sweep_capacity=6))
    run = Run(canary)
    run.prefill()
    sweep = jax.jit(canary.sweep)
    portion = SweepPortion(
        slots=np.array([4, -1, 5, 12, 6, -1]),
        positions=np.array([0, -1, 1, 0, 2, -1]),
        prev_slots=np.array([-1, -1, 4, -1, 5, -1]),
        tokens=np.array([11, -1, 12, 21, -1, -1]),
    )
    state, verdicts = sweep(run.kv, run.state, portion)
    assert verdicts.tolist() == [1, 0, 1, 1, 1, 0]
    run.change(2, 5, 3)
    wrong = dataclasses.replace(portion, tokens=np.array([11, -1, 12, 99, -1, -1]))
    state, verdicts = sweep(run.kv, state, wrong)
    assert verdicts.tolist() == [1, 0, 2, 2, 1, 0]
    labels = canary.source_labels(CanaryLaunchTag.SWEEP_K_FULL)
    found = decode_log(state.log[CanaryLaunchTag.SWEEP_K_FULL], source_names=labels).violations
    assert {(row.slot, row.reasons) for row in found} == {(5, FailReason.VERIFY_REAL_KV_HASH), (12, FailReason.VERIFY_TOKEN)}
    assert next(row for row in found if row.slot == 5).source_name == "layer 2 V"
    report = canary.report(state)
    place = canary.parts.index(CanaryLaunchTag.SWEEP_K_FULL)
    assert {int(report.context[place, row, 8]) for row in range(2)} == {1001, 1002}
    with pytest.raises(ValueError, match="portion has 6 slots, the config's sweep_capacity is 0"):
        make().sweep(run.kv, make().init(), portion)
