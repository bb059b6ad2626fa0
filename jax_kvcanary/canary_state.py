"""What a canary carries through a step and hands out of it, as pytrees."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jax_kvcanary import html
from jax_kvcanary.groups import TaggedLog
from jax_kvcanary.spec import RecordFlag
from jax_kvcanary.state import Array, pytree_dataclass

COUNTERS = ("step", "epoch", "unattested", "unattested_high", "armed_steps", "batch_size")
"""The uint32 counters of a state, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryState:
    """Records, source tags and logs of all groups; what a step threads through and may donate.

    records, source_tags: by group. log: a part for every launch tag. contexts: uint32 ``[rows, 24]`` by place of the part.
    seen: int32 ``[parts]`` rows whose context is taken. counters: uint32 of :data:`COUNTERS`. key: static, the canary's.
    """

    key: int
    records: dict[str, Array]
    source_tags: dict[str, Array]
    log: TaggedLog
    contexts: tuple[Array, ...]
    seen: Array | None
    counters: Array | None

    def _repr_html_(self) -> str:
        """What is stamped and what was reported, for notebooks; waits for the device. Shapes alone if traced or donated."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
        rows: list[tuple[str, object]] = [("bytes", f"{size:,}"), ("groups", ", ".join(self.records) or "none: the mode is off")]
        if any(isinstance(leaf, jax.core.Tracer) or _is_deleted(leaf) for leaf in jax.tree.leaves(self)):
            rows += [(f"records of {name}", records.shape) for name, records in self.records.items()]
            return html.table("CanaryState (no values: traced or donated)", rows)
        for name, records in self.records.items():
            words = np.asarray(records)
            stamped = words.any(axis=1)
            free, adopted = (int(np.sum(stamped & (words[:, 11] & int(flag) != 0))) for flag in (RecordFlag.FREE, RecordFlag.ADOPTED))
            writers = len(np.unique(words[stamped][:, 8:10], axis=0))
            rows.append((f"slots of {name}", f"{int(stamped.sum())} of {len(words)} stamped by {writers} requests"))
            rows.append((f"flags of {name}", f"{free} given back, {adopted} adopted"))
        if self.counters is not None:
            counts = dict(zip(COUNTERS, np.asarray(self.counters).tolist(), strict=True))
            rows.append(("steps", f"{counts['step']}, of which {counts['armed_steps']} stamped"))
            rows.append(("unattested", counts["unattested"] | counts["unattested_high"] << 32))
        rows += [(f"violations of {tag.name}", int(np.asarray(self.log[tag].write_index)[0])) for tag in self.log.tags]
        return html.table("CanaryState", rows)


def _is_deleted(leaf: object) -> bool:
    return bool(getattr(leaf, "is_deleted", bool)())


jax.tree_util.register_dataclass(
    CanaryState, data_fields=["records", "source_tags", "log", "contexts", "seen", "counters"], meta_fields=["key"]
)


@pytree_dataclass
class CanaryVerdict:
    """What a step knows of each request, on the device.

    verdict: int32 ``[bs]``, 0 not checked, 1 ok, 2 bad (:class:`Verdict`). first_bad_position: int32 ``[bs]``, -1 for none.
    first_bad_slot: int32 ``[bs]`` its slot in the table, -1 for none. unattested: int32 ``[bs]`` slots of the prefix that nobody stamped.
    bad_slots: int32 ``[quarantine]`` by group, the slots that this step reported, -1 for padding: not to be used again as they are.
    """

    verdict: Array
    first_bad_position: Array
    first_bad_slot: Array
    unattested: Array
    bad_slots: dict[str, Array]


@pytree_dataclass
class CanaryReport:
    """What a step hands to the host: small, cumulative, never donated.

    header: uint32, see :mod:`jax_kvcanary.report_header`. rows: uint32 ``[parts, rows, 32]`` violation rows of each launch tag.
    context: uint32 ``[parts, rows, 24]`` what was known when a row was found: the slot's record (16 words), request id and namespace of
      the batch row (2 words each), step of the predecessor's record, its request id (2 words), and bits: 1 the batch row is known, 2 the
      predecessor is.
    """

    header: Array
    rows: Array
    context: Array


@pytree_dataclass
class SweepPortion:
    """Idle cached slots to verify, padded with -1 to the config's ``sweep_capacity``; int32, or int64 with x64.

    slots: ``[n]``. positions: ``[n]``. prev_slots: ``[n]`` slot of the predecessor, -1 for the head of a chain.
    tokens: ``[n]`` as the prefix cache knows them, -1 where it does not. namespaces: ``[n]`` or ``[n, 2]``, None: all 0.
    """

    slots: Array
    positions: Array
    prev_slots: Array
    tokens: Array
    namespaces: Array | None = None
