"""How KV caches break in practice, one scenario after the other: what is seen, by which reason, how soon, and what is not seen yet.

``python tests/test_fault_scenarios.py`` prints the table. Each scenario has a twin without its fault, which must be silent.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scenarios import PAGE, PERIOD, SLOTS, WIDTH, WINDOW, Block, Request, Seen, World, hybrid, slots_of, small

from jax_kvcanary import CanaryLaunchTag, FailReason
from jax_kvcanary.causes import Cause

SCENARIOS: dict[str, Callable[[World], None]] = {}

A, B, C = (Request.make(row) for row in (1, 2, 3))
P1, P2, P3 = slots_of([1]), slots_of([2]), slots_of([3])


def scenario(name: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def keep(function: Callable[[World], None]) -> Callable[[World], None]:
        SCENARIOS[name] = function
        return function

    return keep


# ---------------------------------------------------------------------------------------------- pages reused in flight


def _late_transfer(w: World, *, records: bool, freed: bool = False) -> None:
    prefill, n = w.node("prefill"), w.node()
    prefill.admit(A, [1, 2])
    prefill.step({A: 32})
    if freed:
        prefill.finish(A, release=[1, 2])
    block = prefill.save(P2)
    n.admit(A, [1, 2])
    n.step({A: 32})
    n.finish(A, release=[1, 2])
    n.admit(B, [1, 2])
    n.step({B: 32})
    if w.broken():
        if records:
            n.load(block, P2)
        else:
            n.put(block.part([4]), [36])
    n.verify()


@scenario("B01")
def _(w: World) -> None:
    """The target pages of a transfer are given to B when A is cancelled; a row of it lands later."""
    _late_transfer(w, records=False)


@scenario("B01 records travel")
def _(w: World) -> None:
    """The same, and the transfer brings a page with its records."""
    _late_transfer(w, records=True)


@scenario("B01 records of a free page travel")
def _(w: World) -> None:
    """The same, and the source had given the page back when it was read."""
    _late_transfer(w, records=True, freed=True)


@scenario("B03")
def _(w: World) -> None:
    """A step that was launched before A ended writes into a page that a transfer has filled for B."""
    prefill, n = w.node("prefill"), w.node("decode")
    prefill.admit(B, [1])
    prefill.step({B: 16})
    block = prefill.save(P1)
    n.admit(A, [1, 2, 3])
    n.step({A: 32})
    if w.broken():
        ended = n.finish(A, release=[1, 2, 3])
        n.admit(B, [3], length=16)
        n.load(block, P3)
        n.step({A: 1}, stale=[ended])
    else:
        n.step({A: 1})
        n.finish(A, release=[1, 2, 3])
        n.admit(B, [3], length=16)
        n.load(block, P3)
    n.verify()


@scenario("B05")
def _(w: World) -> None:
    """B is loaded back into a page that the last step of A still writes."""
    n = w.node()
    n.admit(B, [3])
    n.step({B: 16})
    block = n.save(P3)
    n.finish(B, release=[3])
    n.admit(A, [1, 2])
    n.step({A: 20})
    if w.broken():
        ended = n.finish(A, release=[1, 2])
        n.admit(B, [2], length=16)
        n.load(block, P2)
        n.step({A: 1}, stale=[ended])
    else:
        n.step({A: 1})
        n.finish(A, release=[1, 2])
        n.admit(B, [2], length=16)
        n.load(block, P2)
    n.verify()


@scenario("B07")
def _(w: World) -> None:
    """A node of the prefix tree is split while it is written to storage: its first half loses the lock on its host page."""
    n = w.node()
    n.admit(A, [1, 2])
    n.step({A: 32})
    host = {"h1": n.save(P1), "h2": n.save(P2)}
    n.admit(B, [3])
    n.step({B: 16})
    host["h1" if w.broken() else "h3"] = n.save(P3)
    stored = Block.join(host["h1"], host["h2"])
    n.finish(B, release=[3])
    n.finish(A, release=[1, 2])
    n.admit(A, [1, 2], length=32)
    n.load(stored, slots_of([1, 2]))
    n.verify()


def _two_pages_in_one_host_block(w: World, *, records: bool) -> None:
    n = w.node()
    n.admit(A, [1])
    n.admit(B, [2])
    n.step({A: 16, B: 16})
    of_a, of_b = n.save(P1), n.save(P2)
    host = of_a
    if w.broken():
        mixed = Block.join(of_a.part(slice(0, 8)), of_b.part(slice(8, 16)))
        host = mixed if records else Block(mixed.kv, of_a.records)
    n.finish(A, release=[1])
    n.admit(A, [3], length=16)
    n.load(host, P3)
    n.verify()


@scenario("B09")
def _(w: World) -> None:
    """Two pages are offloaded to one host block in one step: the block is a mix. Records are kept with the key."""
    _two_pages_in_one_host_block(w, records=False)


@scenario("B09 records in the block")
def _(w: World) -> None:
    """The same, where records lie in the block."""
    _two_pages_in_one_host_block(w, records=True)


@scenario("B11")
def _(w: World) -> None:
    """One host loads a chunk before its save of it has run, and gets what was there before."""
    ranks = [w.node("rank 0"), w.node("rank 1")]
    for number, n in enumerate(ranks):
        n.admit(B, [2])
        n.step({B: 16})
        chunk = n.save(P2)
        n.finish(B, release=[2])
        n.admit(A, [1])
        n.step({A: 16})
        late = number == 1 and w.broken()
        if not late:
            chunk = n.save(P1)
        n.finish(A, release=[1])
        n.admit(A, [3], length=16)
        n.load(chunk, P3)
    w.digest(ranks)
    for n in ranks:
        n.verify()


@scenario("B13")
def _(w: World) -> None:
    """A cancel drops the count of a shared page to zero while B reads it."""
    b = Request.make(2, prefix=A)
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    n.admit(b, [1, 2], length=16)
    n.step({b: 4})
    if w.broken():
        n.finish(A, release=[1])
        n.admit(C, [1])
    else:
        n.finish(A, release=[])
        n.admit(C, [3])
    n.step({C: 16})
    n.verify()


# ---------------------------------------------------------------------------------------------- positions


@scenario("B68")
def _(w: World) -> None:
    """Two context shifts; K is rotated by the last one only, and what stands there is stamped again."""
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    n.finish(A, release=[])
    rotation = 2 if w.broken() else 6
    for layer in n.kv:
        layer["kv"][P1, ::2] = (layer["kv"][P1, ::2] - 7 * rotation) % 251
    shifted = Request(A.id, A.row, A.tokens[6:].copy())
    shifted = dataclasses.replace(shifted, tokens=np.pad(shifted.tokens, (0, 6)))
    seat = n.admit(shifted, slots=P1[6:], length=10)
    n.restamp(seat)
    n.verify()


@scenario("B70")
def _(w: World) -> None:
    """The length is taken from a layer with a window: 16 where there are 40 tokens."""
    n = w.node("node", hybrid())
    n.admit(A, [1, 2, 3])
    n.step({A: 32})
    n.step({A: 8})
    n.step({A: 1}, positions={A: WINDOW} if w.broken() else None)
    n.verify()


# ---------------------------------------------------------------------------------------------- bytes that nobody wrote


@scenario("B72")
def _(w: World) -> None:
    """Rows behind the last token hold what another data type left there."""
    n = w.node()
    if w.broken():
        for layer in n.kv:
            layer["kv"][P1[4:]] = np.nan
    n.admit(A, [1])
    n.step({A: 4})
    n.verify()


@scenario("B74")
def _(w: World) -> None:
    """Padding rows store what is not a number to slot 0."""
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    if w.broken():
        for layer in n.kv:
            layer["kv"][0] = np.nan
    n.verify()


# ---------------------------------------------------------------------------------------------- ranks


@scenario("B75")
def _(w: World) -> None:
    """Each rank sizes its own pool, and the table names a slot that one of them does not have."""
    ranks = [w.node("rank 0"), w.node("rank 1", small())]
    wrong = w.broken()
    for n in ranks:
        n.admit(A, slots=P3 if wrong else P2)
        n.step({A: 16})
    w.digest(ranks, capacity=None if wrong else [SLOTS - 2] * 2)
    for n in ranks:
        n.verify()


@scenario("B77")
def _(w: World) -> None:
    """The writer takes the slot map of the whole cache for that of its shard: twice the slot."""
    n = w.node()
    n.admit(A, [1])
    n.admit(B, [3])
    n.step({A: 8, B: 16})

    def whole(slots: np.ndarray) -> None:
        slots[:, 0] *= 2

    n.step({A: 1}, writer=whole if w.broken() else None)
    n.verify()


@scenario("B79")
def _(w: World) -> None:
    """Only the first rank loads."""
    source = w.node("source")
    source.admit(A, [2])
    source.step({A: 16})
    block = source.save(P2)
    ranks = [w.node("rank 0"), w.node("rank 1")]
    for n in ranks:
        n.admit(A, [1], length=16)
        if n is ranks[0] or not w.broken():
            n.load(block, P1)
    w.digest(ranks)
    for n in ranks:
        n.verify()


# ---------------------------------------------------------------------------------------------- the allocator


@scenario("B80")
def _(w: World) -> None:
    """A page stands in the free list twice."""
    n = w.node()
    n.admit(A, [2, 3])
    n.step({A: 17})
    n.admit(B, [2] if w.broken() else [1])
    n.step({B: 16})
    n.verify()


@scenario("B82")
def _(w: World) -> None:
    """A page of look-ahead is never given back."""
    n = w.node()
    n.admit(A, [1, 2])
    n.step({A: 16})
    n.finish(A, release=[1] if w.broken() else [1, 2])
    n.admit(B, [1])
    n.step({B: 16})
    n.verify()


# ---------------------------------------------------------------------------------------------- tables and maps


@scenario("B14")
def _(w: World) -> None:
    """The page table that attention reads was overwritten by the next step's; the canary has the host's."""
    n = w.node()
    n.admit(A, [1])
    n.admit(B, [2])
    n.step({A: 16, B: 16})
    n.step({A: 1}, attention={A: P2} if w.broken() else None)
    n.verify()


@scenario("B14 one table")
def _(w: World) -> None:
    """The canary is given the array that attention reads."""
    n = w.node()
    n.admit(A, [1])
    n.admit(B, [2])
    n.step({A: 16, B: 16})
    n.step(table={A: P2}, attention={A: P2}) if w.broken() else n.step()
    n.verify()


@scenario("B16")
def _(w: World) -> None:
    """Pages moved when the pool was compacted, and the sender takes the ids of the request's table for places."""
    p, d = w.node("prefill"), w.node("decode")
    p.admit(A, [1, 2])
    p.step({A: 32})
    p.copy([1], [3])
    p.seat(A).slots[:PAGE] = P3
    p.admit(B, [1])
    p.step({B: 16})
    block = p.save(slots_of([1, 2] if w.broken() else [3, 2]))
    d.admit(A, [1, 2], length=32)
    d.load(block, slots_of([1, 2]))
    d.verify()


@scenario("B18")
def _(w: World) -> None:
    """A fully cached prompt: its last token is computed again in a slot of its own, which de-duplication then exchanges."""
    a = Request.make(1, prefix=C)
    n = w.node()
    n.admit(C, [1])
    n.step({C: 16})
    n.finish(C, release=[])
    n.admit(a, slots=[*P1[:15], 47, *P3], length=15)
    n.step({a: 1})
    if w.broken():
        n.seat(a).slots[15] = P1[15]
    n.step({a: 1})
    n.verify()


@scenario("B20")
def _(w: World) -> None:
    """The sender lists the pages of the window's pool with a page size of 16, the receiver reads pages of 4."""
    p, d = w.node("prefill", hybrid()), w.node("decode", hybrid())
    p.admit(A, [1, 2, 3])
    p.step({A: 32})
    p.step({A: 16})
    listed = P3[0] // 16 * 4 if w.broken() else P3[0]
    full, window = p.save(slots_of([1, 2, 3])), p.save(range(listed, listed + 16), group="swa")
    d.admit(A, [1, 2, 3], length=48)
    d.load(full, slots_of([1, 2, 3]))
    d.load(window, P3, group="swa")
    d.mapping[16:48] = 0
    d.verify()


@scenario("B21")
def _(w: World) -> None:
    """A load puts the window's rows elsewhere, and the map still names their old place, which is B's by now."""
    n = w.node("node", hybrid())
    n.admit(A, [1, 2])
    n.step({A: 24})
    rows = n.save(P2[:8], group="swa")
    n.load(rows, P3[:8], group="swa")
    if not w.broken():
        n.mapping[P2] = P3
    n.mapping[P3] = P2
    n.admit(B, [3])
    n.step({B: 16})
    n.step({A: 1})
    n.verify()


@scenario("B23")
def _(w: World) -> None:
    """A page before the window goes to B; the device's map still names it for A."""
    n = w.node("node", hybrid())
    n.admit(A, [1, 2])
    n.step({A: 32})
    if not w.broken():
        n.mapping[P1] = 0
    n.mapping[P3] = P1
    n.admit(B, [3])
    n.step({B: 8})
    n.verify()


@scenario("B23 up to the window")
def _(w: World) -> None:
    """The same, and B's tokens reach the slot just before the window."""
    n = w.node("node", hybrid())
    n.admit(A, [1, 2])
    n.step({A: 32})
    if not w.broken():
        n.mapping[P1] = 0
    n.mapping[P3] = P1
    n.admit(B, [3])
    n.step({B: 16})
    n.verify()


def _freed_in_the_window(w: World, null: int) -> None:
    n = w.node("node", hybrid())
    n.admit(A, [1, 2, 3])
    n.step({A: 32})
    n.step({A: 15})
    n.mapping[P1] = null
    if w.broken():
        n.mapping[P2] = null  # 48 tokens were counted: position 31 seems to be out of the window
    n.verify()


@scenario("B25")
def _(w: World) -> None:
    """The window's frontier is taken from a count that is one too high, and a page goes that is still in the window."""
    _freed_in_the_window(w, 0)


@scenario("B25 entries of -1")
def _(w: World) -> None:
    """The same, and the map marks what is gone with -1."""
    _freed_in_the_window(w, -1)


@scenario("B27")
def _(w: World) -> None:
    """A and C share the window's slots without a count; they go when A ends."""
    c = Request.make(3, prefix=A)
    n = w.node("node", hybrid())
    n.mapping[P2] = P1
    n.admit(A, [1])
    n.step({A: 16})
    n.admit(c, [2, 3])
    n.step({c: 17})
    n.finish(A, release=[1])
    n.mapping[P1] = P1 if w.broken() else P2
    n.admit(B, [1])
    n.step({B: 16})
    n.verify()


def _chunk_for_window(w: World, *, reused: bool) -> None:
    n = w.node("node", hybrid())
    n.admit(A, [1, 2])
    for _ in range(3):
        n.step({A: 8})
    freed = slice(16, 32) if w.broken() else slice(16, 24)  # the window holds positions 8 to 23
    if not reused:
        n.mapping[freed] = 0
    else:
        if not w.fault:
            n.mapping[16:24] = 0
        n.mapping[P3] = [*P1[:8], *(P1[8:] if w.fault else P3[8:])]
        n.admit(B, [3])
        n.step({B: 16})
    n.verify()


@scenario("B29")
def _(w: World) -> None:
    """Eviction keeps a chunk of 8 tokens where the window has 16."""
    _chunk_for_window(w, reused=False)


@scenario("B29 reused")
def _(w: World) -> None:
    """The same, and the slots go to B."""
    _chunk_for_window(w, reused=True)


@scenario("B31")
def _(w: World) -> None:
    """A ring of 16 rows: the row of position 6 is one too far."""
    n = w.node("node", hybrid())
    n.mapping[32:64] = 16 + np.arange(32) % 16
    n.admit(C, [2, 3])
    n.step({C: 16})
    n.step({C: 7})
    n.finish(C, release=[2, 3])
    n.admit(A, [1])
    n.step({A: 6})
    wrong = n.mapping.copy()
    wrong[22] = 23
    n.step({A: 1}, mapping=wrong if w.broken() else None)
    n.verify()


# ---------------------------------------------------------------------------------------------- speculative decoding


@scenario("B32")
def _(w: World) -> None:
    """At a chunk's edge the draft model is given the predicted token, not the prompt's."""
    n = w.draft()
    n.admit(A, [1, 2])
    n.step({A: 16}, tokens={A: {15: 7}} if w.broken() else None)
    n.step({A: 4})
    n.verify()


@scenario("B34")
def _(w: World) -> None:
    """The draft's positions are one ahead of its slots."""
    n = w.draft()
    n.admit(A, [1])
    n.step({A: 8})
    n.step({A: 1}, positions={A: 9} if w.broken() else None)
    n.verify()


@scenario("B36")
def _(w: World) -> None:
    """Four tokens ahead do not fit into the page, and the entry behind it is stale: it names B's page."""
    n = w.node()
    n.admit(B, [3])
    n.step({B: 16})
    n.admit(A, slots=[*P1, *(P3 if w.broken() else P2)])
    n.step({A: 14})
    n.step({A: 4})
    n.verify()


@scenario("B38")
def _(w: World) -> None:
    """The target's prefix is shared, the draft's KV of it was never computed."""
    b = Request.make(2, prefix=A)
    target, n = w.node(), w.draft()
    target.admit(A, [1])
    target.step({A: 16})
    n.admit(A, [1])
    if not w.broken():
        n.step({A: 15})  # the last one is known when B's next token is
    for node in (target, n):
        node.finish(A, release=[])
        length = 16 if node is target else 15
        node.admit(b, [1, 2], length=length)
        node.step({b: 20 - length})
        node.verify()


def _one_page_ahead(w: World, *, restamp: bool) -> None:
    p, d = w.node("prefill"), w.node("decode")
    p.admit(A, [1, 2])
    p.step({A: 32})
    block = p.save(P2 if w.broken() else P1)
    seat = d.admit(A, [1], length=16)
    if restamp:
        d.put(block, P1)
        d.restamp(seat)
    else:
        d.load(block, P1)
    d.verify()


@scenario("B40")
def _(w: World) -> None:
    """The producer has one block of look-ahead more, and the trimming drops the first block of data."""
    _one_page_ahead(w, restamp=False)


@scenario("B40 stamped at load")
def _(w: World) -> None:
    """The same, where the receiver stamps what it gets."""
    _one_page_ahead(w, restamp=True)


# ---------------------------------------------------------------------------------------------- transfer and offload


def _other_layout(w: World, *, restamp: bool) -> None:
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    block = n.save(P1)
    n.finish(A, release=[1])
    if w.broken():
        for layer in block.kv:
            kv = layer["kv"]  # [slots, K0 V0 K1 V1, dim] saved as K0 K1 V0 V1
            layer["kv"] = np.ascontiguousarray(kv.reshape(len(kv), 2, 2, -1).swapaxes(1, 2)).reshape(kv.shape)
    seat = n.admit(A, [2], length=16)
    if restamp:
        n.put(block, P2)
        n.restamp(seat)
    else:
        n.load(block, P2)
    n.verify()


@scenario("B42")
def _(w: World) -> None:
    """The connector reads a page in an older layout of the same shape."""
    _other_layout(w, restamp=False)


@scenario("B42 stamped at load")
def _(w: World) -> None:
    """The same, where the receiver stamps what it gets."""
    _other_layout(w, restamp=True)


@scenario("B44")
def _(w: World) -> None:
    """Rows of layer 1 arrive in layer 2, and the other way round."""
    p, d = w.node("prefill"), w.node("decode")
    p.admit(A, [1])
    p.step({A: 16})
    block = p.save(P1)
    if w.broken():
        block.kv[1], block.kv[2] = block.kv[2], block.kv[1]
    d.admit(A, [1], length=16)
    d.load(block, P1)
    d.verify()


@scenario("B46")
def _(w: World) -> None:
    """KV is restored from the host, the keys of the index are not."""
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    block = n.save(P1)
    n.finish(A, release=[1])
    if w.broken():
        for layer, there in zip(block.kv, n.kv, strict=True):
            layer["index"] = there["index"][P2].copy()
    n.admit(A, [2], length=16)
    n.load(block, P2)
    n.verify()


@scenario("B48")
def _(w: World) -> None:
    """One key is loaded twice, and one of the targets holds other bytes."""
    c = Request.make(3, prefix=A)
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    block = n.save(P1)
    n.finish(A, release=[1])
    n.admit(A, [1], length=16)
    n.load(block, P1)
    again = block.part(slice(None))
    if w.broken():
        n.raw(P3[:4], B, range(4))
        for layer, there in zip(again.kv, n.kv, strict=True):
            for name, values in layer.items():
                values[4:8] = there[name][P3[:4]]
    n.admit(c, [2], length=16)
    n.load(again, P2)
    n.verify()


# ---------------------------------------------------------------------------------------------- writes out of range


@scenario("B49")
def _(w: World) -> None:
    """The scheduler believes in more slots than there are, and the update clamps them to the last one."""
    n = w.node()
    n.admit(C, [3])
    n.step({C: 16})
    wrong = w.broken()
    n.admit(A, slots=range(70, 74) if wrong else range(16, 20))
    n.admit(B, slots=range(80, 84) if wrong else range(32, 36))

    def clamp(slots: np.ndarray) -> None:
        slots[:, :8] = np.minimum(slots[:, :8], SLOTS - 1)

    n.step({A: 4, B: 4}, writer=clamp)
    n.verify()


@scenario("B51")
def _(w: World) -> None:
    """Padding of -1 is an index from the end: the last slot of the pool."""
    n = w.node()
    n.admit(B, [3])
    n.admit(A, [1])
    n.step({B: 16, A: 8})

    def wrap(slots: np.ndarray) -> None:
        slots[:, 1:] = -1

    n.step({A: 1}, writer=wrap if w.broken() else None)
    n.verify()


def _idle_victim(w: World, *, swept: bool) -> None:
    n = w.node()
    n.admit(B, [3])
    n.admit(A, [1])
    n.step({B: 16, A: 8})
    n.finish(B, release=[])  # cached

    def wrap(slots: np.ndarray) -> None:
        slots[:, 1:] = -1

    n.step({A: 1}, writer=wrap if w.broken() else None)
    if swept:
        n.sweep(B, P3)
    n.verify()


@scenario("B51 idle victim")
def _(w: World) -> None:
    """The same, where the last slot is cached and nobody reads it."""
    _idle_victim(w, swept=False)


@scenario("B51 idle victim, sweep")
def _(w: World) -> None:
    """The same, with a sweep over cached slots."""
    _idle_victim(w, swept=True)


@scenario("B53")
def _(w: World) -> None:
    """The writer counts 8 rows where the slot map has 5: the rest is what lies behind it."""
    n = w.node()
    n.admit(B, [3])
    n.step({B: 16})
    n.admit(A, [1])

    def run_on(slots: np.ndarray) -> None:
        slots[:, 5:8] = [50, 1_000_000, 70]

    n.step({A: 5}, writer=run_on if w.broken() else None)
    n.verify()


@scenario("B53 counted by the canary")
def _(w: World) -> None:
    """The same count and the same slot map are given to the canary."""
    n = w.node()
    n.admit(A, [1])

    def garbage(slots: np.ndarray) -> None:
        slots[5:8] = [1_000_000, 70, -7]

    seat = n.seat(A)
    if w.broken():
        n.step({A: 8}, out=garbage)
        seat.length = 5
    else:
        n.step({A: 5})
    n.verify()


@scenario("B54")
def _(w: World) -> None:
    """An address in 32 bits wraps: the row of slot 30 lands in B's slot 46."""
    n = w.node()
    n.admit(A, [1])
    n.admit(B, [2])
    n.step({A: 14, B: 16})

    def wrap(slots: np.ndarray) -> None:
        slots[:, 0] = 46

    n.step({A: 1}, writer=wrap if w.broken() else None)
    n.verify()


@scenario("B56")
def _(w: World) -> None:
    """The offset wraps where attention reads: KV is right, what is read is not."""
    n = w.node()
    n.admit(A, [2, 3])
    n.step({A: 32})
    n.step(attention={A: np.concatenate([P2, P3 - 48])} if w.broken() else None)
    n.verify()


# ---------------------------------------------------------------------------------------------- scales


@scenario("B58")
def _(w: World) -> None:
    """The scales at the end of each row are filled with ones after the first layer wrote them."""
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    if w.broken():
        n.kv[1]["kv"][P1, -1, -1] = 1
    n.verify()


@scenario("B60")
def _(w: World) -> None:
    """A page is saved without its scales and loaded where those of B are."""
    n = w.node()
    n.admit(A, [1])
    n.admit(B, [2])
    n.step({A: 16, B: 16})
    block = n.save(P1)
    n.finish(A, release=[1])
    n.finish(B, release=[2])
    if w.broken():
        for layer, there in zip(block.kv, n.kv, strict=True):
            layer["scale"] = there["scale"][P2].copy()
    n.admit(A, [2], length=16)
    n.load(block, P2)
    n.verify()


@scenario("B62")
def _(w: World) -> None:
    """A's page is evicted and used by B; A comes back with the scales that B left at the end of each row."""
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    block = n.save(P1)
    n.finish(A, release=[1])
    n.admit(B, [1])
    n.step({B: 16})
    n.finish(B, release=[1])
    if w.broken():
        for layer, there in zip(block.kv, n.kv, strict=True):
            layer["kv"][:, -1, -1] = there["kv"][P1, -1, -1]
    n.admit(A, [1], length=16)
    n.load(block, P1)
    n.verify()


# ---------------------------------------------------------------------------------------------- identity


def _wrong_key(w: World, *, named: bool, rows: tuple[int, int]) -> None:
    first = Request.make(rows[0], namespace=1 if named else 0)
    second = Request.make(rows[1], prefix=first, namespace=2 if named else 0)
    n = w.node()
    n.admit(first, [1])
    n.step({first: 16})
    n.finish(first, release=[])
    if w.broken():
        n.admit(second, [1, 2], length=16)
    else:
        n.admit(second, [2, 3])
        n.step({second: 16})
    n.step({second: 1})
    n.verify()


@scenario("B64")
def _(w: World) -> None:
    """KV of another adapter is served: the tokens are the same. The adapter is the namespace."""
    _wrong_key(w, named=True, rows=(1, 2))


@scenario("B64 without namespaces")
def _(w: World) -> None:
    """The same, where the canary does not know of adapters."""
    _wrong_key(w, named=False, rows=(1, 2))


@scenario("B66")
def _(w: World) -> None:
    """The prefix cache is kept over an update of the weights, whose version is the namespace."""
    _wrong_key(w, named=True, rows=(2, 1))


@scenario("B83")
def _(w: World) -> None:
    """The prefix is a whole page, the output differs between runs, and the KV is right: numerics."""
    b = Request.make(2, prefix=A)
    n = w.node()
    n.admit(A, [1])
    n.step({A: 16})
    n.finish(A, release=[])
    w.broken()
    n.admit(b, [1, 2], length=16)
    n.step({b: 8})
    n.verify()


# ---------------------------------------------------------------------------------------------- what is expected

CHAIN, POSITION, TOKEN = FailReason.VERIFY_CHAIN_HASH, FailReason.VERIFY_POSITION, FailReason.VERIFY_TOKEN
BYTES, UNWRITTEN, LANDING = FailReason.VERIFY_REAL_KV_HASH, FailReason.UNWRITTEN, FailReason.LANDING
WRITE_TOKEN, WRITE_POSITION = FailReason.WRITE_TOKEN, FailReason.WRITE_POSITION
RANGE, RANKS = FailReason.SLOT_OUT_OF_RANGE, FailReason.RANK_DIGEST
NO_REASON = FailReason(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What comes of a scenario's fault.

    by, after, slot, request, reasons: where it is seen first: the launch (or "load", "digest"), steps since the fault, and the
    violation of the lowest position there; a request of 0 is not known. also: reasons that follow. victims: of all violations.
    sources: what must be among the sources named. causes: right ones; UNKNOWN is no mistake. writer: named by the event at the slot.
    wrong: causes that a monitor "bare" or "told" the tables names today, and that are not right. needs: for what is silent, the check
    that would see it.
    """

    by: str = ""
    after: int = 0
    slot: int = -1
    request: int = 0
    reasons: FailReason = NO_REASON
    also: FailReason = NO_REASON
    victims: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    writer: int | None = None
    wrong: tuple[tuple[str, Cause], ...] = ()
    needs: str = ""

    @property
    def silent(self) -> bool:
        return bool(self.needs)


def seen(by: str, after: int, slot: int, request: int, reasons: FailReason, **more: Any) -> Expected:
    return Expected(by=by, after=after, slot=slot, request=request, reasons=reasons, **more)


def silent(needs: str) -> Expected:
    return Expected(needs=needs)


OVERWRITTEN, CHANGED, NEVER = Cause.OVERWRITTEN, Cause.BYTES_CHANGED, Cause.NEVER_WRITTEN
STALE, ENTRY, INPUT = Cause.STALE_PAGE, Cause.TABLE_ENTRY, Cause.WRONG_INPUT
SHIFTED, NOT_LANDED, OUTSIDE, MOVED = Cause.SHIFTED, Cause.WRITE_NOT_LANDED, Cause.OUT_OF_RANGE, Cause.MOVED

TABLE: dict[str, Expected] = {
    "B01": seen("head", 1, 36, 102, BYTES, victims=(102,), causes=(CHANGED,)),
    "B01 records travel": seen("head", 1, 32, 102, CHAIN | TOKEN, victims=(102,), causes=(OVERWRITTEN,), writer=101),
    "B01 records of a free page travel": seen(
        "head", 1, 32, 102, CHAIN | TOKEN, victims=(102,), causes=(OVERWRITTEN,), writer=101
    ),
    "B03": seen("head", 2, 48, 102, CHAIN | POSITION | TOKEN, victims=(102,), causes=(OVERWRITTEN,), writer=101),
    "B05": seen(
        "head",
        1,
        32,
        101,
        CHAIN | POSITION | TOKEN,
        also=WRITE_POSITION,
        victims=(101, 102),
        causes=(OVERWRITTEN,),
        writer=102,
    ),
    "B07": seen("load", 0, 32, 101, CHAIN, also=TOKEN, victims=(101,), causes=(OVERWRITTEN, STALE)),
    "B09": seen("load", 0, 56, 101, BYTES, victims=(101,), causes=(CHANGED,)),
    "B09 records in the block": seen("load", 0, 56, 101, CHAIN, also=TOKEN, victims=(101,), causes=(OVERWRITTEN,), writer=102),
    "B11": seen("digest", 0, -1, 101, RANKS, also=TOKEN, victims=(101,), causes=(STALE,)),
    "B13": seen("head", 2, 16, 102, TOKEN, also=CHAIN, victims=(102,), causes=(OVERWRITTEN,), writer=103),
    "B68": silent("a move that shifts positions and checks what it stamps"),
    "B70": seen("tail", 1, 56, 101, WRITE_POSITION, also=POSITION, victims=(101,), causes=(INPUT, SHIFTED), writer=101),
    "B72": silent("finite check of the unwritten end of a page"),
    "B74": silent("reserved slot is constant and finite"),
    "B75": seen("tail", 1, 62, 101, RANGE, also=RANKS, victims=(101,), causes=(OUTSIDE,)),
    "B77": seen("tail", 1, 24, 101, LANDING, also=BYTES, victims=(101, 102), causes=(NOT_LANDED, CHANGED)),
    "B79": seen("digest", 0, -1, 101, RANKS, also=CHAIN | POSITION | TOKEN | UNWRITTEN, victims=(101,), causes=(NEVER,)),
    "B80": seen("head", 2, 32, 101, TOKEN, also=CHAIN, victims=(101,), causes=(OVERWRITTEN,), writer=102),
    "B82": silent("accounting of pages: owned ones that no table names"),
    "B14": silent("attention view: the table that attention reads"),
    "B14 one table": seen("head", 1, 32, 101, TOKEN, victims=(101,), causes=(ENTRY,), writer=102),
    "B16": seen("load", 0, 32, 101, CHAIN, also=TOKEN, victims=(101,), causes=(ENTRY, STALE)),
    "B18": silent("mapping stability: a position may change its slot only with a note"),
    "B20": seen("load", 0, 48, 101, CHAIN | UNWRITTEN, also=POSITION | TOKEN, victims=(101,), causes=(ENTRY, NEVER)),
    "B21": seen(
        "head",
        2,
        32,
        101,
        CHAIN | POSITION | TOKEN,
        also=WRITE_POSITION,
        victims=(101, 102),
        causes=(ENTRY, OVERWRITTEN),
        writer=102,
    ),
    "B23": silent("attention view: entries before the window"),
    "B23 up to the window": seen("head", 2, 32, 101, CHAIN, victims=(101,), causes=(OVERWRITTEN,), writer=102),
    "B25": silent("window residency: a slot for each position in the window"),
    "B25 entries of -1": seen("head", 1, -1, 101, RANGE, also=CHAIN, victims=(101,), causes=(OUTSIDE,)),
    "B27": seen("head", 2, 17, 103, TOKEN, also=CHAIN, victims=(103,), causes=(OVERWRITTEN,), writer=102),
    "B29": silent("window residency: a slot for each position in the window"),
    "B29 reused": seen("head", 2, 24, 101, TOKEN, also=CHAIN, victims=(101,), causes=(OVERWRITTEN,), writer=102),
    "B31": seen("head", 2, 22, 101, CHAIN | POSITION | TOKEN, victims=(101,), causes=(STALE,), writer=103),
    "B32": seen("tail", 1, 31, 101, WRITE_TOKEN, also=TOKEN, victims=(101,), causes=(INPUT,), writer=101),
    "B34": seen("tail", 1, 24, 101, WRITE_POSITION, also=POSITION, victims=(101,), causes=(INPUT, SHIFTED), writer=101),
    "B36": seen("head", 3, 48, 102, CHAIN | POSITION | TOKEN, victims=(102,), causes=(OVERWRITTEN,), writer=101),
    "B38": seen("head", 1, 16, 102, CHAIN | TOKEN | UNWRITTEN, also=POSITION | WRITE_POSITION, victims=(102,), causes=(NEVER,)),
    "B40": seen("head", 1, 16, 101, CHAIN | POSITION | TOKEN, victims=(101,), causes=(ENTRY, STALE)),
    "B40 stamped at load": silent("records that travel with the bytes, instead of a new stamp"),
    "B42": seen("load", 0, 32, 101, BYTES, victims=(101,), causes=(CHANGED,)),
    "B42 stamped at load": silent("records that travel with the bytes, instead of a new stamp"),
    "B44": seen("load", 0, 16, 101, BYTES, victims=(101,), causes=(CHANGED,)),
    "B46": seen("load", 0, 32, 101, BYTES, victims=(101,), sources=("layer 0 index", "layer 1 index", "layer 2 index"), causes=(CHANGED,)),
    "B48": seen("load", 0, 36, 103, BYTES, victims=(103,), causes=(CHANGED,)),
    "B49": seen("tail", 1, 70, 101, RANGE, also=BYTES, victims=(101, 102, 103), causes=(OUTSIDE, CHANGED)),
    "B51": seen("head", 2, 63, 102, BYTES, victims=(102,), causes=(CHANGED,)),
    "B51 idle victim": silent("a sweep over cached slots"),
    "B51 idle victim, sweep": seen("sweep", 2, 63, 0, BYTES, victims=(0,), causes=(CHANGED,)),
    "B53": seen("head", 2, 50, 102, BYTES, victims=(102,), causes=(CHANGED,)),
    "B53 counted by the canary": seen("tail", 1, 1_000_000, 101, RANGE, victims=(101,), causes=(OUTSIDE,)),
    "B54": seen("tail", 1, 30, 101, LANDING, also=BYTES, victims=(101, 102), causes=(NOT_LANDED, CHANGED)),
    "B56": silent("boot probe: a pattern read back through the real kernels"),
    "B58": seen("head", 1, 17, 101, BYTES, victims=(101,), sources=("layer 1 V",), causes=(CHANGED,)),
    "B60": seen("load", 0, 32, 101, BYTES, victims=(101,), sources=("layer 0 scale", "layer 1 scale", "layer 2 scale"), causes=(CHANGED,)),
    "B62": seen("load", 0, 16, 101, BYTES, victims=(101,), sources=("layer 0 V",), causes=(CHANGED,)),
    "B64": seen("head", 1, 16, 102, CHAIN, victims=(102,), causes=(Cause.NAMESPACE,), writer=101),
    "B64 without namespaces": silent("the adapter as the namespace"),
    "B66": seen("head", 1, 16, 101, CHAIN, victims=(101,), causes=(Cause.NAMESPACE,), writer=102),
    "B83": silent("nothing: the KV is right, and a silent canary says so"),
}
"""Of every scenario; one that becomes visible, sooner or later than here, fails its test until it is moved."""

UNWRITTEN_BY_DEFAULT = {"B38": 15 * (1 + PERIOD), "B79": 16 * PERIOD}
"""Positions that a canary without ``strict`` counts as unattested where a strict one reports them: every step counts its own."""

ROWS = """B01 B03 B05 B07 B09 B11 B13 B14 B16 B18 B20 B21 B23 B25 B27 B29 B31 B32 B34 B36 B38 B40 B42 B44 B46 B48 B49 B51 B53 B54 B56 B58
B60 B62 B64 B66 B68 B70 B72 B74 B75 B77 B79 B80 B82 B83""".split()
"""The reports that the scenarios come from. Those with words after the number are the same report under another use of the canary."""


# ---------------------------------------------------------------------------------------------- tests


@functools.lru_cache
def run(name: str, *, fault: bool) -> World:
    world = World(fault)
    SCENARIOS[name](world)
    return world


def first_seen(world: World) -> Seen:
    """The violation of the lowest position in the launch that saw the fault first."""
    start = world.seen[0]
    launch = [row for row in world.seen if (row.by, row.node, row.group, row.steps) == (start.by, start.node, start.group, start.steps)]
    return min(launch, key=lambda row: (row.position, row.slot))


def outcome(world: World) -> Expected:
    """What came of a scenario, as far as rows tell."""
    if not world.seen:
        return Expected()
    first = first_seen(world)
    reasons = functools.reduce(operator.or_, (row.reasons for row in world.seen))
    return Expected(
        by=first.by,
        after=first.steps,
        slot=first.slot,
        request=first.request,
        reasons=first.reasons,
        also=reasons & ~first.reasons,
        victims=tuple(sorted({row.request for row in world.seen})),
    )


def test_every_report_has_its_scenarios() -> None:
    assert set(TABLE) == set(SCENARIOS)
    assert sorted({name.split()[0] for name in SCENARIOS}) == sorted(ROWS)
    assert all(function.__doc__ for function in SCENARIOS.values())


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_twin_is_silent(name: str) -> None:
    """The same traffic without the fault: no violation, nothing unattested, no event, no failure of the monitor."""
    world = run(name, fault=False)
    assert world.seen == []
    assert world.unattested == 0
    assert world.events() == []
    healths = [monitor.health() for node in world.nodes.values() for monitor in node.monitors.values()]
    assert [health.last_failure for health in healths] == [None] * len(healths)
    assert all(health.rows_reported == health.rows_lost == health.repeats == 0 for health in healths)


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_seen(name: str) -> None:
    world, expected = run(name, fault=True), TABLE[name]
    keep = ("by", "after", "slot", "request", "reasons", "also", "victims")
    got, wanted = ({field: getattr(of, field) for field in keep} for of in (outcome(world), expected))
    assert got == wanted
    assert world.unattested == 0
    if expected.silent:
        assert world.events() == []
    if expected.sources:
        assert tuple(sorted({row.source.removesuffix(" (leading bytes)") for row in world.seen if row.source})) == expected.sources


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "B83"])
def test_the_fault_does_something(name: str) -> None:
    """Bytes, tables, maps, free pages or what attention read are others than in the twin: seen or not, the scenario is no play."""
    assert run(name, fault=True).fingerprint() != run(name, fault=False).fingerprint()


@pytest.mark.parametrize("name", [name for name, expected in TABLE.items() if not expected.silent])
def test_causes_are_right_or_unknown(name: str) -> None:
    """With and without the host's tables. What is wrong today is listed, and must really be so."""
    world, expected = run(name, fault=True), TABLE[name]
    found = {(which, event.cause) for which, event in world.events() if event.kind == "violation"}
    assert {cause for _, cause in found} and expected.causes
    wrong = {(which, cause) for which, cause in found if cause not in (*expected.causes, Cause.UNKNOWN)}
    assert wrong == set(expected.wrong)
    at_slot = [event for _, event in world.events() if event.slot == expected.slot]
    if expected.writer is not None:
        assert at_slot and {event.writer for event in at_slot} == {expected.writer}
    assert {event.request for event in at_slot} <= {expected.request}
    assert all(event.page == (event.slot // PAGE if event.slot >= 0 else None) for _, event in world.events())
    assert all(monitor.health().failures == 0 for node in world.nodes.values() for monitor in node.monitors.values())


@pytest.mark.parametrize("ahead", [(0, 5), (1, 2), (2, 2), (7, 0)])
@pytest.mark.parametrize("name", ["B01 records travel", "B03", "B11", "B16", "B20", "B40", "B44"])
def test_causes_hold_with_clocks_that_differ(name: str, ahead: tuple[int, int]) -> None:
    """Records that travel keep the step of the node that stamped them."""
    source, target = ahead
    steps = {"prefill": source, "rank 0": source, "decode": target, "node": target, "rank 1": target}
    clean, world = World(False, ahead=steps), World(True, ahead=steps)
    for of in (clean, world):
        SCENARIOS[name](of)
    assert clean.seen == []
    assert world.seen and {event.cause for _, event in world.events()} <= {*TABLE[name].causes, Cause.UNKNOWN}


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_strict_only_missing_loads_are_lost(name: str) -> None:
    """By default what nobody stamped is counted, not reported; everything else is seen as soon, and as the same."""
    world = World(True, strict=False)
    SCENARIOS[name](world)
    if any(node.canary.config.strict for node in world.nodes.values()):
        pytest.skip("the scenario has a pool of another shape, whose canary is strict in all tests")
    if name not in UNWRITTEN_BY_DEFAULT:
        assert world.unattested == 0
        assert outcome(world) == outcome(run(name, fault=True))
        return
    assert {row.by for row in world.seen} <= {"digest"}
    assert world.unattested == UNWRITTEN_BY_DEFAULT[name]
    clean = World(False, strict=False)
    SCENARIOS[name](clean)
    assert (clean.seen, clean.unattested) == ([], 0)


@pytest.mark.xfail(strict=True, reason="a predecessor of -1 is taken for the beginning of a chain, also at a window's start")
def test_a_map_may_mark_what_left_the_window_with_minus_one() -> None:
    """No fault: the window begins at a page's edge, the page before it is given back."""
    world = World(False)
    n = world.node("node", hybrid())
    n.admit(A, [1, 2, 3])
    n.step({A: 32})
    n.step({A: 16})
    n.mapping[slots_of([1, 2])] = -1
    n.verify()
    assert world.seen == []


@pytest.mark.xfail(
    strict=True, reason="the slot before the window was never stamped, and the first one in it is reported as not chained to it"
)
def test_only_the_rows_of_the_window_are_loaded() -> None:
    """No fault: a transfer brings the window's rows alone, and the map keeps the others' slots."""
    world = World(False)
    prefill, n = world.node("prefill", hybrid()), world.node("decode", hybrid())
    prefill.admit(A, [1, 2, 3])
    prefill.step({A: 32})
    prefill.step({A: 16})
    n.admit(A, [1, 2, 3], length=48)
    n.load(prefill.save(slots_of([1, 2, 3])), slots_of([1, 2, 3]))
    n.load(prefill.save(P3, group="swa"), P3, group="swa")
    n.verify()
    assert world.seen == []


def test_a_full_ring_is_told_and_checking_goes_on() -> None:
    """Both requests read each other's pages: more rows than the ring has room for, in one step after the other."""
    world = World(True)
    n = world.node()
    n.admit(A, [1, 2])
    n.admit(B, [3])
    n.step({A: 16, B: 16})
    n.step({A: 16})
    swapped = {A: np.concatenate([P3, P2]), B: P1}
    wrong = {request: np.pad(row, (0, WIDTH - len(row))) for request, row in swapped.items()}
    n.clears = False
    for _ in range(4):
        n.step(table=wrong)
    health = n.monitors["told"].health()
    capacity = n.canary.config.ring_capacity
    assert health.rows_reported >= 4 * (16 + 16 + 1) > capacity
    assert health.rows_lost == health.rows_reported - capacity
    kinds = [event.kind for which, event in world.events() if which == "told"]
    assert kinds.count("overflow") == 1
    assert health.launches[CanaryLaunchTag.HEAD_K_FULL] == 2 * n.number  # records and leading bytes, then all bytes of a part
    assert health.slots[CanaryLaunchTag.HEAD_K_FULL] > 0 and health.unchecked_steps[CanaryLaunchTag.HEAD_K_FULL] == 0


# ---------------------------------------------------------------------------------------------- the table


def names_of(reasons: FailReason) -> str:
    return " ".join(reason.name.lower().removeprefix("verify_") for reason in FailReason if reason & reasons and reason.name) or "-"


def table() -> str:
    """What really happens, a line a scenario."""
    rows = [("scenario", "seen by", "steps", "reasons (then)", "cause without / with tables", "what")]
    for name, function in SCENARIOS.items():
        world, expected = run(name, fault=True), TABLE[name]
        got = outcome(world)
        what = (function.__doc__ or "").splitlines()[0]
        if not world.seen:
            rows.append((name, "silent", "-", f"needs: {expected.needs}", "-", what))
            continue
        causes = {which: {event.cause for of, event in world.events() if of == which} - {Cause.UNKNOWN} for which in ("bare", "told")}
        said = " / ".join(
            ", ".join(f"{cause.value}{'' if cause in expected.causes else ' (WRONG)'}" for cause in sorted(causes[which])) or "unknown"
            for which in causes
        )
        rows.append((name, got.by, str(got.after), names_of(got.reasons) + (f" ({names_of(got.also)})" if got.also else ""), said, what))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    first = [TABLE[row] for row in ROWS]
    lines.append(
        f"{len(ROWS)} reports: {sum(not kept.silent for kept in first)} seen, {sum(kept.silent for kept in first)} silent; "
        f"{sum(bool(kept.wrong) for kept in TABLE.values())} scenarios with a wrong cause"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.stdout.write(table() + "\n")
