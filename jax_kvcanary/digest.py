"""Rank digests: a number a request that ranks with the same requests must agree on, its comparison, and who deviates.

A rank that has another length, other records or another capacity than its peers is found even where its own checks are silent.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kvcanary import ops, spec, validation
from jax_kvcanary.pure import hashing, words
from jax_kvcanary.pure.indexing import iota, take, take64, take_rows
from jax_kvcanary.pure.plan import Batch
from jax_kvcanary.pure.words import U64
from jax_kvcanary.report import Violation
from jax_kvcanary.state import Array, ViolationLog, pytree_dataclass
from jax_kvcanary.tables import Table, resolve_table

_LANES = 4096
"""Records read at once, about: bounds the temporary memory of a digest."""

_CHAIN_WORDS = 6  # token, position, prev_hash


@pytree_dataclass
class RankDigest:
    """What one rank says of its requests; 64-bit values are uint32 ``[bs, 2]`` pairs.

    digest: uint32 [bs], what ranks compare; 0 for padding rows. length: tokens. chain: hashes of the sampled records, added up.
    capacity: uint32 [], slots of the rank. slot, position, token: of the record of the last written position (slot -1: there is none).
    req_pool_indices: [bs].
    """

    digest: Array
    length: Array
    chain: Array
    capacity: Array
    slot: Array
    position: Array
    token: Array
    req_pool_indices: Array


@pytree_dataclass
class RankDigestResult:
    """After a comparison: the log to thread on, the verdict int32 [bs], and bool [bs] where ranks disagree."""

    log: ViolationLog
    verdict: Array
    disagree: Array


def rank_digest(
    *,
    records: Array,
    req_pool_indices: Array,
    prefix_lens: Array,
    req_to_token: Array | Table,
    swa_window_size: int = 0,
    full_to_swa_index_mapping: Array | None = None,
    padding_req: int | None = 0,
    padding_slot: int | None = 0,
    page_size: int = 1,
    capacity: int | Array | None = None,
) -> RankDigest:
    """Digest each request of a batch: its length, its chain, and the capacity of this rank.

    ``digest`` is the low word xor the high word of ``mix3(chain, length, capacity)``; ``chain`` adds up ``S(h ^ position)``, each
    word of its own, where ``h`` is the running hash after a record (what the next record of the chain stores). Records are those
    of the last position and of every ``page_size``-th before it, so that each page of the prefix is in it. A slot out of range
    counts as a record of zeros, the padding slot is left out.

    Args:
      records: uint32 ``[slots, 8]`` or wider; only read.
      req_pool_indices, prefix_lens, req_to_token, swa_window_size, full_to_swa_index_mapping, padding_req: as in :func:`plan`.
      padding_slot: static, the slot of dummy writes; None: there is none.
      page_size: static, tokens that are written or loaded together. 1 reads every record.
      capacity: slots that this rank has, an int or a (traced) int32 scalar; None: the length of ``records``.

    Returns:
      The digest.

    Raises:
      ValueError: a shape, dtype or static value that breaks a rule. TypeError: a static argument of the wrong type.

    Example:
      >>> ask = {"req_pool_indices": jnp.array([1], jnp.int32), "req_to_token": jnp.array([[0, 0], [2, 3]], jnp.int32)}
      >>> records = jnp.zeros((4, 8), jnp.uint32)
      >>> one = rank_digest(records=records, prefix_lens=jnp.array([1], jnp.int32), **ask)
      >>> two = rank_digest(records=records, prefix_lens=jnp.array([2], jnp.int32), **ask)
      >>> bool(one.digest[0] == two.digest[0])
      False
    """
    checked = ops.check_records(records)
    rows = validation.int_array("req_pool_indices", req_pool_indices, (None,), pairs=False)
    table = resolve_table(req_to_token, bs=rows.shape[0])
    window = validation.static_capacity("swa_window_size", swa_window_size)
    if window > 0 and full_to_swa_index_mapping is None:
        raise validation.error("full_to_swa_index_mapping is required when swa_window_size > 0")
    has_padding_req, padding_row = validation.optional_slot("padding_req", padding_req)
    has_padding_slot, padding = validation.optional_slot("padding_slot", padding_slot)
    mapping = jnp.zeros((0,), jnp.int32)
    if full_to_swa_index_mapping is not None:
        mapping = validation.int_array("full_to_swa_index_mapping", full_to_swa_index_mapping, (None,), pairs=False)
    operands = {
        "req_pool_indices": rows,
        "prefix_lens": validation.int_array("prefix_lens", prefix_lens, rows.shape, pairs=False),
        "table": table.table,
        "table_starts": table.starts,
        "mapping": mapping,
    }
    params = {
        "swa_window_size": window,
        "kv_token_id_vs_position_offset": 0,
        "has_padding_req": has_padding_req,
        "padding_req": padding_row,
        "has_mapping": full_to_swa_index_mapping is not None,
        "has_expected": False,
        **table.params,
    }
    return _rank_digest(
        checked,
        _capacity(checked.shape[0] if capacity is None else capacity),
        jnp.asarray(np.int32(validation.static_int("page_size", page_size, minimum=1, maximum=spec.INT32_MAX))),
        operands,
        params=tuple(sorted(params.items())),
        padding_slot=padding if has_padding_slot else None,
    )


def check_rank_digests(
    *,
    digest: RankDigest,
    log: ViolationLog,
    verdict: Array,
    axis_names: str | Sequence[str],
    launch_tag: int | spec.CanaryLaunchTag,
    step: int | Array = 0,
    shard: int | Array = 0,
) -> RankDigestResult:
    """Compare digests over the ranks of mesh axes, inside ``shard_map(..., check_vma=False)``, by one all-reduce of ``[bs, 2]``.

    Where ranks disagree, every one of them logs a row with the reason RANK_DIGEST and what it holds itself, and the verdict is BAD
    on all; :func:`find_deviating_ranks` compares the rows of all ranks.

    Columns of such a row: 1 to 3 slot, position and token of the record of the last written position; 5 the chain; 6 the capacity;
    11 length - 1; 12 this rank's digest; 13 the digest of a rank that disagrees; 8 to 10 and 15 as always.

    **Use the returned log and verdict, or jit removes the comparison.**

    Args:
      digest: of this rank.
      log: of this rank.
      verdict: int32 ``[bs]`` of a verify, agreed over the ranks.
      axis_names: mesh axes whose ranks must agree.
      launch_tag: static, which launch of the step this is.
      step, shard: what violation rows say about when and where, as in :func:`verify`.

    Returns:
      Log, verdict, and where ranks disagree; the same on every rank but for the log.

    Example: see :meth:`jax_kvcanary.ShardedOps.check_rank_digests`, which runs this on a mesh.
    """
    tag = validation.static_enum("launch_tag", launch_tag, spec.CanaryLaunchTag)
    if not isinstance(digest, RankDigest):
        raise validation.type_error(f"digest must be a RankDigest, got {type(digest).__name__}")
    names = (axis_names,) if isinstance(axis_names, str) else validation.sequence_of("axis_names", axis_names, str)
    mine = validation.exact_array("digest.digest", digest.digest, (None,), np.uint32)
    for field in ("length", "chain", "slot", "position", "token"):
        validation.exact_array(f"digest.{field}", getattr(digest, field), (*mine.shape, 2), np.uint32)
    validation.exact_array("digest.capacity", digest.capacity, (), np.uint32)
    validation.int_array("digest.req_pool_indices", digest.req_pool_indices, mine.shape, pairs=True)
    validation.instance("log", log, ViolationLog)
    validation.exact_array("log.ring", log.ring, (None, spec.RING_WORDS), np.uint32)
    validation.exact_array("log.write_index", log.write_index, (1,), np.int32)
    before = validation.exact_array("verdict", verdict, mine.shape, np.int32)
    context = validation.context_array(step, shard)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise validation.error(
                f"axis_names names the mesh axis {name!r}, which is not bound here; call this inside shard_map"
            ) from None
    # The largest and (inverted) the smallest in one.
    both = jnp.stack([mine, ~mine], axis=-1)
    top = lax.pmax(both, names) if names else both
    largest, smallest = top[:, 0], ~top[:, 1]
    disagree = largest != smallest

    def of(pairs: jax.Array) -> U64:
        return U64(pairs[:, 0], pairs[:, 1])

    none = words.const(-1)
    columns = [
        words.const(int(tag)),
        of(digest.slot),
        of(digest.position),
        of(digest.token),
        none,
        of(digest.chain),
        words.from_uint32(digest.capacity),
        words.const(int(spec.FailReason.RANK_DIGEST)),
        words.from_int32(iota(mine.shape[0])),
        words.from_operand(digest.req_pool_indices),
        words.from_uint32(context[0]),
        words.sub(of(digest.length), words.const(1, mine.shape)),
        words.from_uint32(mine),
        words.from_uint32(jnp.where(mine == largest, smallest, largest)),
        none,
        words.from_uint32(context[1]),
    ]
    return RankDigestResult(
        log=append_rows(log, disagree, columns),
        verdict=jnp.where(disagree, np.int32(spec.Verdict.BAD), before),
        disagree=disagree,
    )


# ---------------------------------------------------------------------------------------------- on the host


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankView:
    """What one rank holds of a request: its table row, its length in tokens, its chain and its capacity in slots."""

    req_pool_idx: int
    length: int
    chain: int
    capacity: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankDisagreement:
    """One request on which ranks disagree.

    data_rank: which of several groups of ranks. views: by shard. deviating: the shards that do not hold what most hold; all of them
    when no view has a majority.
    """

    tag: spec.CanaryLaunchTag | int
    step: int
    data_rank: int
    batch_row: int
    views: dict[int, RankView]
    deviating: tuple[int, ...]

    def describe(self) -> str:
        """The disagreement as one sentence."""
        text = f"batch row {self.batch_row} (data rank {self.data_rank}, step {self.step}): "
        views = [f"shard {shard} has {self._view(view)}" for shard, view in self.views.items() if shard in self.deviating]
        if len(self.deviating) == len(self.views):
            return text + "no majority, " + ", ".join(views) + "."
        most = next(view for shard, view in self.views.items() if shard not in self.deviating)
        return text + ", ".join(views) + f"; the others have {self._view(most)}."

    @staticmethod
    def _view(view: RankView) -> str:
        return f"request row {view.req_pool_idx}, length {view.length}, chain {view.chain:#018x}, capacity {view.capacity}"


def find_deviating_ranks(
    violations: Iterable[Violation], *, data_rank: Callable[[int], int] = lambda shard: 0
) -> tuple[RankDisagreement, ...]:
    """Name the ranks that deviate from the majority, from the RANK_DIGEST rows of all ranks' logs.

    Args:
      violations: of the decoded logs of all ranks, of launches with different steps or tags. Rows of other reasons are left out; a
        rank whose ring was full has no say.
      data_rank: from a shard's number to the group of ranks that it must agree with.

    Returns:
      One entry a request and launch, in the order in which they were found.
    """
    if not isinstance(violations, Iterable):
        raise validation.type_error(f"violations must be those of a LogReport, got {type(violations).__name__}")
    validation.function("data_rank", data_rank)
    found: dict[tuple[Any, ...], dict[int, RankView]] = collections.defaultdict(dict)
    for violation in validation.sequence_of("violations", tuple(violations), Violation):
        if spec.FailReason.RANK_DIGEST in violation.reasons:
            key = (violation.tag, violation.step, data_rank(violation.shard), violation.batch_row)
            found[key][violation.shard] = RankView(
                req_pool_idx=violation.req_pool_idx,
                length=violation.expected_position + 1,
                chain=violation.chain_hash,
                capacity=violation.aux,
            )
    return tuple(
        RankDisagreement(
            tag=tag,
            step=step,
            data_rank=group,
            batch_row=batch_row,
            views=dict(sorted(views.items())),
            deviating=_deviating(views),
        )
        for (tag, step, group, batch_row), views in found.items()
    )


def _deviating(views: dict[int, RankView]) -> tuple[int, ...]:
    counts = collections.Counter(views.values()).most_common()
    majority = counts[0][0] if 2 * counts[0][1] > len(views) else None
    return tuple(shard for shard in sorted(views) if views[shard] != majority)


# ---------------------------------------------------------------------------------------------- parts


@functools.partial(jax.jit, static_argnames=("params", "padding_slot"), inline=True)
def _rank_digest(
    records: jax.Array,
    capacity: jax.Array,
    step: jax.Array,
    operands: dict[str, Any],
    *,
    params: tuple[tuple[str, Any], ...],
    padding_slot: int | None,
) -> RankDigest:
    no_tokens: dict[str, Any] = {"expected_tokens": jnp.zeros((0, 0), jnp.int32), "valid_lens": jnp.zeros((0,), jnp.int32)}
    batch = Batch(**operands, **no_tokens, **dict(params))
    slots = records.shape[0]

    def read(slot: U64) -> list[jax.Array]:
        inside = words.below(slot, slots)
        found = take_rows(records, jnp.where(inside, words.as_int32(slot.lo), np.int32(0)), _CHAIN_WORDS)
        return [jnp.where(inside, word, np.uint32(0)) for word in found]

    def hashes(row: jax.Array, position: U64) -> U64:
        slot = batch.slot(row, position, _in_ring(batch, row, position))
        token, stored, previous = _pairs(read(slot))
        mixed = hashing.splitmix64(words.xor(hashing.mix3(previous, token, stored), position))
        return mixed if padding_slot is None else words.select(words.equals(slot, padding_slot), words.zeros(slot.shape), mixed)

    chain = _sum_over_samples(batch, step, hashes)
    last = batch.last_slot()
    token, position, _ = _pairs(read(last))
    room = words.from_uint32(jnp.broadcast_to(capacity, (batch.size,)))
    mixed = hashing.mix3(chain, batch.prefix, room)
    return RankDigest(
        digest=jnp.where(batch.padding, np.uint32(0), mixed.lo ^ mixed.hi),
        length=_stacked(batch.prefix),
        chain=_stacked(chain),
        capacity=capacity,
        slot=_stacked(last),
        position=_stacked(position),
        token=_stacked(token),
        req_pool_indices=operands["req_pool_indices"],
    )


def _sum_over_samples(batch: Batch, step: jax.Array, hashes: Callable[[jax.Array, U64], U64]) -> U64:
    """The hashes of positions ``prefix - 1, prefix - 1 - step, ...`` down to the first that is held, added up a word each, ``[bs]``."""
    bs = batch.size
    if bs == 0:
        return words.zeros((0,))
    held = words.clamp_int32(batch.count)
    samples = jnp.where(held > 0, lax.div(held - np.int32(1), jnp.broadcast_to(step, held.shape)) + np.int32(1), np.int32(0))  # [bs]
    wanted = jnp.max(samples)
    at_once = max(1, _LANES // bs)
    row = lax.broadcast_in_dim(iota(bs), (bs, at_once), (0,)).reshape(-1)
    last = words.sub(batch.prefix, words.const(1, (bs,)))

    def body(carry: tuple[jax.Array, U64]) -> tuple[jax.Array, U64]:
        first, total = carry
        number = first + lax.broadcast_in_dim(iota(at_once), (bs, at_once), (1,)).reshape(-1)
        live = (number >= np.int32(0)) & (number < take(samples, row))
        back = words.from_uint32(jnp.where(live, words.as_uint32(number * step), np.uint32(0)))
        found = hashes(row, words.sub(take64(last, row), back))
        kept = [jnp.where(live, word, np.uint32(0)).reshape(bs, at_once) for word in found]
        sums = [jnp.sum(word, axis=1, dtype=jnp.uint32) for word in kept]
        # Never past `wanted`, so it cannot wrap.
        return first + jnp.minimum(np.int32(at_once), wanted - first), U64(total.lo + sums[0], total.hi + sums[1])

    return lax.while_loop(lambda carry: carry[0] < wanted, body, (jnp.zeros((), jnp.int32), words.zeros((bs,))))[1]


def append_rows(log: ViolationLog, flags: jax.Array, columns: Sequence[U64]) -> ViolationLog:
    """The log with one row for each true element of ``flags [n]``; columns are ``[n]`` or scalars."""
    assert len(columns) == spec.RING_COLUMNS
    rows = jnp.stack([jnp.broadcast_to(word, flags.shape) for column in columns for word in column], axis=1)
    capacity = log.ring.shape[0]
    before = jnp.maximum(log.write_index[0], np.int32(0))
    number = jnp.cumsum(flags, dtype=jnp.int32) - np.int32(1)
    # Written so that nothing wraps: the index may be at its end already.
    stored = flags & (before < np.int32(capacity)) & (number < np.int32(capacity) - before)
    place = jnp.where(stored, before + number, np.int32(capacity))
    total = words.as_uint32(before) + jnp.sum(flags, dtype=jnp.uint32)
    index = words.as_int32(jnp.minimum(total, np.uint32(spec.INT32_MAX)))
    return dataclasses.replace(log, ring=log.ring.at[place].set(rows, mode="drop"), write_index=index[None])


def _in_ring(batch: Batch, row: jax.Array, position: U64) -> jax.Array | None:
    """Positions modulo the width of a table that is arithmetic alone."""
    if batch.kind != spec.TableKind.IDENTITY or batch.width == 0:
        return None
    at = take(batch.start_in_ring, row) + words.sub(position, take64(batch.start, row)).lo
    return jnp.where(at >= np.uint32(batch.width), at - np.uint32(batch.width), at)


def _capacity(value: Any) -> jax.Array:
    """A capacity as uint32 []."""
    value = validation.integer_scalar("capacity", value)
    if not isinstance(value, int):
        return lax.convert_element_type(validation.int_array("capacity", jnp.reshape(value, (1,)), (1,), pairs=False)[0], jnp.uint32)
    return jnp.asarray(np.uint32(validation.static_capacity("capacity", value)))


def _pairs(columns: Sequence[jax.Array]) -> list[U64]:
    return [U64(columns[k], columns[k + 1]) for k in range(0, len(columns), 2)]


def _stacked(value: U64) -> jax.Array:
    return jnp.stack([value.lo, value.hi], axis=-1)
