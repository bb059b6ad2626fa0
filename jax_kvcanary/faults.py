"""Corruption on purpose, to see that a canary sees it: jittable, seeded, with a probability and a warm-up for long runs.

Every fault changes a pool or a batch as a bug of an engine would, and returns what it did, so that a report can be compared with it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import spec, validation
from jax_kvcanary.batch import CanaryBatch, slots_at
from jax_kvcanary.layouts import PoolSources
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import Array, pytree_dataclass
from jax_kvcanary.tables import BlockTable, FlatTable, IdentityTable, ResolvedTable, RowTable, resolve_table

_DRAWS = 8
"""32-bit random numbers of a call: up to six for what is hit, the last for whether anything is."""


class FaultKind(enum.StrEnum):
    """What goes wrong. :attr:`when` says where in a step to inject it."""

    FLIP_IN_USE = "flip_in_use"
    FLIP_IDLE = "flip_idle"
    FLIP_AFTER_STAMP = "flip_after_stamp"
    SWAP_ENTRIES = "swap_entries"
    SHIFT_POSITION = "shift_position"
    FOREIGN_TOKEN = "foreign_token"
    REUSE_EARLY = "reuse_early"
    ZERO_PAGE = "zero_page"
    DROP_WRITE = "drop_write"
    SWAP_LAYERS = "swap_layers"
    SCATTER_MINUS_ONE = "scatter_minus_one"

    @property
    def when(self) -> str:
        """ "step": before the step, for the canary and the model alike. "model": the batch for the model alone, the canary is given the
        right one. "after": after the step, with its batch."""
        if self is FaultKind.FLIP_AFTER_STAMP:
            return "after"
        return "model" if self in (FaultKind.DROP_WRITE, FaultKind.SCATTER_MINUS_ONE) else "step"


@pytree_dataclass
class Injection:
    """What a fault did; scalars on the device, int32, -1 where it does not apply.

    fired: bool, whether anything was changed. batch_row: the request that is hit, position: of it, slot: where that is read or written.
    source, layer: that were changed; layer -1 also where the pool has none. other_row, other_position, other_slot: the second
    request, position or slot of a swap or an early reuse (then: who wrote over it), and the slot that was meant by a write that strayed.
    """

    fired: Array
    batch_row: Array
    position: Array
    slot: Array
    source: Array
    layer: Array
    other_row: Array
    other_position: Array
    other_slot: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Plants faults into the pool or the batch of a step. Frozen and hashable; :meth:`inject` can be jitted.

    Args:
      sources: where a slot's bytes are, of :func:`pool_sources`; at most 2**31 - 1 elements an array.
      page_size: slots a page, for faults of pages; tables of blocks bring their own.
      padding_req: row of padding requests, as the canary has it; -1 is always padding.
      vocabulary: number of tokens.
      probability: of each call to do anything. warmup: steps in which nothing happens.
      leading_bytes: flipped bits lie in these of a slot and source; None: in all that the source reads.

    Example:
      >>> faults = Faults(sources=sources, page_size=16, probability=0.02, warmup=100)  # doctest: +SKIP
      >>> pool, batch, done = faults.inject("flip_in_use", key, pool, batch, step=step)  # doctest: +SKIP
    """

    sources: PoolSources
    page_size: int = 1
    padding_req: int | None = 0
    vocabulary: int = 32000
    probability: float = 1.0
    warmup: int = 0
    leading_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sources, PoolSources):
            raise validation.type_error(f"sources must be a PoolSources, got {type(self.sources).__name__}")
        validation.static_int("page_size", self.page_size, minimum=1)
        validation.static_int("vocabulary", self.vocabulary, minimum=2)
        validation.static_int("warmup", self.warmup, minimum=0)
        if not 0 <= self.probability <= 1:
            raise validation.error(f"probability must be in [0, 1], got {self.probability}")
        for source in self.sources.sources:
            if int(np.prod(source.buffer_shape)) > spec.INT32_MAX:
                raise validation.error(f"faults reach at most 2**31 - 1 elements of an array, got one of shape {source.buffer_shape}")
            if jax.dtypes.itemsize_bits(source.buffer_dtype) % 8:
                raise validation.error(f"faults change whole bytes, got an array of dtype {source.buffer_dtype.name}")

    def inject(
        self, kind: FaultKind | str, key: Array, pool: Any, batch: CanaryBatch, *, step: Any = 0, idle_slots: Array | None = None
    ) -> tuple[Any, CanaryBatch, Injection]:
        """Do one fault, if its time has come and there is something to do it to.

        Args:
          kind: static.
          key: of ``jax.random``; equal keys do equal harm.
          pool: as ``sources`` were made for. batch: of the step; its table is changed by faults of tables.
          step: compared with ``warmup``.
          idle_slots: int32 ``[n]``, cached slots that no running request reads, -1 for padding; for "flip_idle".

        Returns:
          The pool, the batch (**use both in place of the ones given**), and what was done.

        Raises:
          ValueError: an unknown kind, or a batch without an array that the fault changes.
        """
        try:
            kind = FaultKind(kind)
        except ValueError:
            raise validation.error(f"fault must be one of {', '.join(map(repr, map(str, FaultKind)))}, got {kind!r}") from None
        if kind is FaultKind.FLIP_IDLE and idle_slots is None:
            raise validation.error("flip_idle needs idle_slots")
        noise = jax.random.bits(key, (_DRAWS,), jnp.uint32)
        armed = jnp.asarray(step) >= self.warmup
        if self.probability < 1:
            armed &= noise[-1] < np.uint32(self.probability * 2**32)
        view = _View(self, batch, armed, noise)
        doing = {
            FaultKind.FLIP_IN_USE: self._flip_in_use,
            FaultKind.FLIP_AFTER_STAMP: self._flip_after_stamp,
            FaultKind.SWAP_ENTRIES: self._swap_entries,
            FaultKind.SHIFT_POSITION: self._shift_position,
            FaultKind.FOREIGN_TOKEN: self._foreign_token,
            FaultKind.REUSE_EARLY: self._reuse_early,
            FaultKind.ZERO_PAGE: self._zero_page,
            FaultKind.DROP_WRITE: self._drop_write,
            FaultKind.SWAP_LAYERS: self._swap_layers,
            FaultKind.SCATTER_MINUS_ONE: self._scatter_minus_one,
        }
        if kind is FaultKind.FLIP_IDLE:
            return self._flip_idle(view, pool, jnp.asarray(idle_slots))
        return doing[kind](view, pool)

    # ---------------------------------------------------------------------------------------- bytes

    def _flip_in_use(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        row, fire = view.pick_row(view.prefix > 0)
        position = view.below(view.prefix[row])
        return self._flip(view, pool, fire, row, position, view.slot(row, position))

    def _flip_after_stamp(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        row, fire = view.pick_row(view.extend > 0)
        ahead = view.below(view.extend[row])
        return self._flip(view, pool, fire, row, view.prefix[row] + ahead, view.written_slot(row, ahead))

    def _flip_idle(self, view: _View, pool: Any, idle: jax.Array) -> tuple[Any, CanaryBatch, Injection]:
        place, fire = view.pick(idle >= 0)
        slot = idle[place] if idle.shape[0] else jnp.int32(-1)
        return self._flip(view, pool, fire & view.armed, jnp.int32(-1), jnp.int32(-1), slot.astype(jnp.int32))

    def _flip(
        self, view: _View, pool: Any, fire: jax.Array, row: jax.Array, position: jax.Array, slot: jax.Array
    ) -> tuple[Any, CanaryBatch, Injection]:
        count = len(self.sources)
        fire &= (slot >= 0) & (slot < self.sources.num_slots) & (count > 0)
        chosen, place, level = view.below(jnp.int32(max(count, 1))), view.bits(), view.bits()
        buffers = list(self.sources.buffers(pool))
        for number, source in enumerate(self.sources.sources):
            buffer = number if source.buffer_index is None else source.buffer_index
            width = source.buffer_dtype.itemsize
            size = min(source.read_bytes, self.leading_bytes or source.read_bytes)
            places = _element_offsets(source)[: max(1, size // width)]
            within = jnp.asarray(places)[(place % np.uint32(len(places))).astype(jnp.int32)]
            bit = (level % np.uint32(8 * width)).astype(jnp.int32)
            index = _first_element(source, slot) + within
            words = _as_words(buffers[buffer])
            mask = jax.lax.shift_left(jnp.ones((), words.dtype), bit.astype(words.dtype))
            index = jnp.where(fire & (chosen == number), index, words.shape[0])
            changed = words.at[index].get(mode="fill", fill_value=0) ^ mask
            buffers[buffer] = _from_words(words.at[index].set(changed, mode="drop"), buffers[buffer])
        done = view.done(fire, row=row, position=position, slot=slot, source=chosen, layer=self._layer(chosen))
        return self.sources.replace(pool, buffers) if buffers else pool, view.batch, done

    def _zero_page(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        row, fire = view.pick_row(view.prefix > 0)
        position = view.below(view.prefix[row])
        slot = view.slot(row, position)
        fire &= (slot >= 0) & (slot < self.sources.num_slots)
        size = view.page_size
        slots = slot // size * size + jnp.arange(size, dtype=jnp.int32)
        buffers = list(self.sources.buffers(pool))
        for number, source in enumerate(self.sources.sources):
            buffer = number if source.buffer_index is None else source.buffer_index
            words = _as_words(buffers[buffer])
            index = _first_element(source, slots)[:, None] + jnp.asarray(_element_offsets(source))
            index = jnp.where(fire & (slots < source.num_slots)[:, None], index, words.shape[0])
            buffers[buffer] = _from_words(words.at[index].set(0, mode="drop"), buffers[buffer])
        first = position // size * size
        return (
            self.sources.replace(pool, buffers) if buffers else pool,
            view.batch,
            view.done(fire, row=row, position=first, slot=view.slot(row, first)),
        )

    def _swap_layers(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        pairs = self._layer_pairs()
        row, fire = view.pick_row(view.prefix > 0)
        position = view.below(view.prefix[row])
        slot = view.slot(row, position)
        fire &= (slot >= 0) & (slot < self.sources.num_slots) & (len(pairs) > 0)
        chosen = view.below(jnp.int32(max(len(pairs), 1)))
        buffers = list(self.sources.buffers(pool))
        layer = jnp.int32(-1)
        for number, (one, other) in enumerate(pairs):
            a, b = self.sources.sources[one], self.sources.sources[other]
            mine = fire & (chosen == number)
            layer = jnp.where(chosen == number, np.int32(self.sources.source_layers[one]), layer)
            at_a, at_b = (i if s.buffer_index is None else s.buffer_index for i, s in ((one, a), (other, b)))
            index_a = _first_element(a, slot) + jnp.asarray(_element_offsets(a))
            index_b = _first_element(b, slot) + jnp.asarray(_element_offsets(b))
            held_a = _as_words(buffers[at_a])[jnp.where(mine, index_a, 0)]
            held_b = _as_words(buffers[at_b])[jnp.where(mine, index_b, 0)]
            for at, index, held in ((at_a, index_a, held_b), (at_b, index_b, held_a)):
                words = _as_words(buffers[at])
                buffers[at] = _from_words(words.at[jnp.where(mine, index, words.shape[0])].set(held, mode="drop"), buffers[at])
        first = jnp.asarray([one for one, _ in pairs] or [-1], jnp.int32)[chosen]
        done = view.done(fire, row=row, position=position, slot=slot, source=first, layer=layer)
        return self.sources.replace(pool, buffers) if buffers else pool, view.batch, done

    def _layer_pairs(self) -> list[tuple[int, int]]:
        """Sources of one half and size in neighbouring layers."""
        out = []
        for one, (source, name) in enumerate(zip(self.sources.sources, self.sources.names, strict=True)):
            for other in range(one + 1, len(self.sources)):
                theirs = self.sources.sources[other]
                same = self.sources.names[other].half == name.half and self.sources.names[other].layer != name.layer
                if same and theirs.num_bytes_per_token == source.num_bytes_per_token and theirs.buffer_dtype == source.buffer_dtype:
                    out.append((one, other))
                    break
        return out

    def _layer(self, source: jax.Array) -> jax.Array:
        return jnp.asarray(self.sources.source_layers or (-1,), jnp.int32)[source]

    # ---------------------------------------------------------------------------------------- tables and inputs

    def _swap_entries(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        size = view.entry_size
        places = -(-view.prefix // size)
        row, fire = view.pick_row(places >= 2)
        n = places[row]
        a = view.below(n)
        b = (a + 1 + view.below(n - 1)) % jnp.maximum(n, 1)
        batch = view.with_swapped(fire, row, a, b)
        slots = [view.slot(row, place * size) for place in (a, b)]
        done = view.done(fire, row=row, position=a * size, slot=slots[1], other_row=row, other_position=b * size, other_slot=slots[0])
        return pool, batch, done

    def _shift_position(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        positions = view.needed("positions")
        row, fire = view.pick_row(view.extend > 0)
        of_row = view.tokens_of(row, positions.shape[0])
        shifted = jnp.where(fire & of_row, positions + 1, positions)
        done = view.done(fire, row=row, position=view.prefix[row], slot=view.written_slot(row, jnp.int32(0)))
        return pool, dataclasses.replace(view.batch, positions=shifted), done

    def _foreign_token(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        tokens = view.needed("input_ids")
        row, fire = view.pick_row(view.extend > 0)
        ahead = view.below(view.extend[row])
        at = jnp.where(fire, view.starts[row] + ahead, tokens.shape[0])
        other = (tokens.at[at].get(mode="fill", fill_value=0) + 1 + view.below(jnp.int32(self.vocabulary - 1))) % self.vocabulary
        changed = tokens.at[at].set(other.astype(tokens.dtype), mode="drop")
        done = view.done(fire, row=row, position=view.prefix[row] + ahead, slot=view.written_slot(row, ahead))
        return pool, dataclasses.replace(view.batch, input_ids=changed), done

    def _reuse_early(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        """Another request is given a page that the victim still reads, and writes its new tokens there."""
        size = view.page_size
        writer, some = view.pick_row(view.extend > 0)
        victim, fire = view.pick_row((view.prefix > 0) & (jnp.arange(view.bs) != writer))
        fire &= some
        first = view.prefix[writer]
        inside = first % size  # the writer's next place in a page
        last = jnp.minimum(inside + view.extend[writer], size)
        pages = -(-(view.prefix[victim] - inside) // size)  # pages of the victim whose place ``inside`` is in use
        fire &= pages > 0
        position = view.below(pages) * size + inside
        slot = view.slot(victim, position)
        fire &= slot >= 0
        base = slot // size * size
        moved = jnp.arange(size, dtype=jnp.int32)
        batch = view.with_page(fire, writer, first // size * size, jnp.where((moved >= inside) & (moved < last), base + moved, -1))
        if view.batch.out_cache_loc is not None:
            given = jnp.asarray(view.batch.out_cache_loc)
            token = jnp.arange(given.shape[0], dtype=jnp.int32) - view.starts[writer] + inside
            hit = fire & view.tokens_of(writer, given.shape[0]) & (token < size)
            batch = dataclasses.replace(batch, out_cache_loc=jnp.where(hit, (base + token).astype(given.dtype), given))
        meant = view.written_slot(writer, jnp.int32(0))
        done = view.done(fire, row=victim, position=position, slot=slot, other_row=writer, other_position=first, other_slot=meant)
        return pool, batch, done

    def _drop_write(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        """A slot past the pool: what a scatter with ``mode="drop"`` leaves out."""
        return self._stray(view, pool, self.sources.num_slots)

    def _scatter_minus_one(self, view: _View, pool: Any) -> tuple[Any, CanaryBatch, Injection]:
        """Slot -1: what a scatter takes for the pool's last slot."""
        return self._stray(view, pool, -1)

    def _stray(self, view: _View, pool: Any, target: int) -> tuple[Any, CanaryBatch, Injection]:
        slots = view.needed("out_cache_loc")
        row, fire = view.pick_row(view.extend > 0)
        ahead = view.below(view.extend[row])
        meant = view.written_slot(row, ahead)
        at = jnp.where(fire, view.starts[row] + ahead, slots.shape[0])
        changed = slots.at[at].set(np.asarray(target, slots.dtype), mode="drop")
        hit = meant if target >= 0 else jnp.int32(self.sources.num_slots - 1)
        done = view.done(fire, row=row, position=view.prefix[row] + ahead, slot=hit, other_slot=meant)
        return pool, dataclasses.replace(view.batch, out_cache_loc=changed), done


class _View:
    """A batch as faults look at it, and their randomness: lengths int32 [bs], padding taken out."""

    def __init__(self, faults: Faults, batch: CanaryBatch, armed: jax.Array, noise: jax.Array) -> None:
        if not isinstance(batch, CanaryBatch):
            raise validation.type_error(f"batch must be a CanaryBatch, got {type(batch).__name__}")
        self.batch, self.armed = batch, armed
        self._noise, self._drawn = noise, 0
        self.rows = jnp.asarray(batch.req_pool_indices).astype(jnp.int32)
        self.bs = self.rows.shape[0]
        table: ResolvedTable = resolve_table(batch.req_to_token, bs=self.bs)
        self.table = table
        real = self.rows >= 0
        if faults.padding_req is not None:
            real &= self.rows != faults.padding_req
        self.prefix = jnp.where(real, jnp.maximum(jnp.asarray(batch.prefix_lens), 0), 0).astype(jnp.int32)
        self.extend = jnp.where(real, jnp.maximum(jnp.asarray(batch.extend_seq_lens), 0), 0).astype(jnp.int32)
        self.starts = jnp.cumsum(self.extend, dtype=jnp.int32) - self.extend
        self.entry_size = table.page_size if table.kind == spec.TableKind.BLOCKS else 1
        self.page_size = table.page_size if table.kind == spec.TableKind.BLOCKS else faults.page_size

    def bits(self) -> jax.Array:
        """The next 32 random bits."""
        self._drawn += 1
        return self._noise[self._drawn - 1]

    def below(self, bound: jax.Array) -> jax.Array:
        """A number in [0, bound), 0 for an empty range."""
        return (self.bits() % jnp.maximum(bound, 1).astype(jnp.uint32)).astype(jnp.int32)

    def pick(self, eligible: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(index, whether there is one) of an element that is true."""
        if not eligible.shape[0]:
            return jnp.int32(0), jnp.asarray(False)
        rank = jnp.cumsum(eligible, dtype=jnp.int32)
        chosen = self.below(rank[-1]) + 1
        return jnp.argmax(eligible & (rank == chosen)).astype(jnp.int32), rank[-1] > 0

    def pick_row(self, eligible: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(batch row, whether to go on)."""
        row, some = self.pick(eligible)
        return row, some & self.armed

    def slot(self, row: jax.Array, position: jax.Array) -> jax.Array:
        """Slot of a position by the table, -1 if there is none."""
        found = slots_at(self.table, req_pool_indices=self.rows[row][None], batch_rows=row[None], positions=position[None])
        return found[0].astype(jnp.int32)

    def written_slot(self, row: jax.Array, ahead: jax.Array) -> jax.Array:
        """Slot of the row's new token number ``ahead``."""
        if self.batch.out_cache_loc is None:
            return self.slot(row, self.prefix[row] + ahead)
        slots = jnp.asarray(self.batch.out_cache_loc)
        return slots.at[self.starts[row] + ahead].get(mode="fill", fill_value=-1).astype(jnp.int32)

    def tokens_of(self, row: jax.Array, tokens: int) -> jax.Array:
        """bool [tokens], the row's new ones."""
        at = jnp.arange(tokens, dtype=jnp.int32) - self.starts[row]
        return (at >= 0) & (at < self.extend[row])

    def needed(self, name: str) -> jax.Array:
        value = getattr(self.batch, name)
        if value is None:
            raise validation.error(f"this fault changes the batch's {name}, which is None")
        return jnp.asarray(value)

    def with_swapped(self, fire: jax.Array, row: jax.Array, a: jax.Array, b: jax.Array) -> CanaryBatch:
        """The batch with two entries of a row's table exchanged."""
        flat = self._flat()
        index = jnp.stack([self._index(row, a), self._index(row, b)])
        held = flat.at[index[::-1]].get(mode="clip")
        return self._with_flat(flat.at[jnp.where(fire, index, flat.shape[0])].set(held, mode="drop"))

    def with_page(self, fire: jax.Array, row: jax.Array, first: jax.Array, slots: jax.Array) -> CanaryBatch:
        """The batch with the slots of positions from ``first`` on replaced, where not -1; a table of blocks gets the page."""
        flat = self._flat()
        if self.entry_size > 1:
            page = jnp.max(slots) // self.entry_size
            index = self._index(row, first // self.entry_size)
            return self._with_flat(flat.at[jnp.where(fire, index, flat.shape[0])].set(page.astype(flat.dtype), mode="drop"))
        index = self._index(row, first + jnp.arange(slots.shape[0], dtype=jnp.int32))
        index = jnp.where(fire & (slots >= 0), index, flat.shape[0])
        return self._with_flat(flat.at[index].set(slots.astype(flat.dtype), mode="drop"))

    def _flat(self) -> jax.Array:
        if isinstance(self.batch.req_to_token, IdentityTable):
            raise validation.error("this fault changes a table, and an IdentityTable has none")
        return self.table.table.reshape(-1)

    def _index(self, row: jax.Array, place: jax.Array) -> jax.Array:
        if isinstance(self.batch.req_to_token, FlatTable):
            return self.table.starts[row].astype(jnp.int32) + place
        return self.rows[row] * self.table.table.shape[1] + place

    def _with_flat(self, flat: jax.Array) -> CanaryBatch:
        given: Any = self.batch.req_to_token
        made = flat.reshape(self.table.table.shape)
        if isinstance(given, (RowTable, BlockTable, FlatTable)):
            return dataclasses.replace(self.batch, req_to_token=dataclasses.replace(given, table=made))
        return dataclasses.replace(self.batch, req_to_token=made)

    def done(self, fire: jax.Array, *, row: jax.Array, position: jax.Array, slot: jax.Array, **more: jax.Array) -> Injection:
        """What was done, -1 everywhere if nothing was."""
        values = {"batch_row": row, "position": position, "slot": slot, **more}
        names = [field.name for field in dataclasses.fields(Injection) if field.name != "fired"]
        none = jnp.int32(-1)
        return Injection(fired=fire, **{name: jnp.where(fire, jnp.asarray(values.get(name, none), jnp.int32), none) for name in names})


# ---------------------------------------------------------------------------------------------- elements of a slot


def _element_offsets(source: RealKvSource) -> np.ndarray:
    """Elements of a slot after its first run's start, int32, in order of the bytes that are read."""
    width = source.buffer_dtype.itemsize
    offsets = np.arange(source.run_bytes // width, dtype=np.int64) * width
    for count, stride in zip(reversed(source.run_counts), reversed(source.run_strides), strict=True):
        offsets = (np.arange(count, dtype=np.int64)[:, None] * stride + offsets).reshape(-1)
    return (offsets // width).astype(np.int32)


def _first_element(source: RealKvSource, slot: jax.Array) -> jax.Array:
    """Element at which a slot begins."""
    width = source.buffer_dtype.itemsize
    pages = slot // source.page_size * np.int32(source.page_stride // width)
    return np.int32(source.offset // width) + pages + slot % source.page_size * np.int32(source.token_stride // width)


def _as_words(array: jax.Array) -> jax.Array:
    """The elements as unsigned integers, in one row: the same bits, no copy."""
    flat = jnp.asarray(array).reshape(-1)
    return jax.lax.bitcast_convert_type(flat, jnp.dtype(f"uint{8 * flat.dtype.itemsize}"))


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)
