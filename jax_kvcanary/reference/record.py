"""Records: what a slot's uint32 words mean, and how one is read and stored.

Words 0..7 are token, position, prev_hash and real_kv_hash as (low, high) pairs. A row of 16 words or more also holds provenance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jax_kvcanary.reference.hashing import mix3
from jax_kvcanary.reference.integers import MASK32, signed, words_of
from jax_kvcanary.spec import PROVENANCE_RECORD_WORDS, RECORD_WORDS


class Record(NamedTuple):
    """One slot's record: token and position are signed, the hashes are not."""

    token: int
    position: int
    prev_hash: int
    real_kv_hash: int

    @property
    def chain_hash(self) -> int:
        """What the record after this one stores as its ``prev_hash``."""
        return mix3(self.prev_hash, self.token, self.position)


class Provenance(NamedTuple):
    """Who wrote a record: words 8..15, the last two of which are zero."""

    request_id: int
    step: int
    flags: int
    namespace: int


def as_records(records: Any) -> NDArray[np.uint32]:
    """``records`` as ``[slots, words >= 8] uint32``."""
    array = np.asarray(records)
    if array.ndim != 2 or array.dtype != np.uint32 or array.shape[1] < RECORD_WORDS:
        raise ValueError(f"kv-canary: records must be uint32 [slots, >= {RECORD_WORDS}], got {array.dtype} {array.shape}")
    return array


def has_provenance(records: NDArray[np.uint32]) -> bool:
    """Whether the rows are wide enough for provenance."""
    return records.shape[1] >= PROVENANCE_RECORD_WORDS


def read_record(records: NDArray[np.uint32], slot: int) -> Record:
    """The record of a slot that is in range."""
    words = records[slot, :RECORD_WORDS].tolist()
    token, position, prev_hash, real_kv_hash = (words[2 * k] | words[2 * k + 1] << 32 for k in range(4))
    return Record(signed(token), signed(position), prev_hash, real_kv_hash)


def is_blank(records: NDArray[np.uint32], slot: int) -> bool:
    """Whether the record's own words are zero, whatever its provenance says."""
    return not records[slot, :RECORD_WORDS].any()


def is_unwritten(records: NDArray[np.uint32], slot: int) -> bool:
    """Whether every word of the record, provenance included, is zero."""
    words = PROVENANCE_RECORD_WORDS if has_provenance(records) else RECORD_WORDS
    return not records[slot, :words].any()


def store_record(records: NDArray[np.uint32], slot: int, record: Record, provenance: Provenance) -> None:
    """Store a record in place, with its provenance where the row has room for it; further words are left alone."""
    records[slot, :RECORD_WORDS] = words_of(record)
    if has_provenance(records):
        records[slot, RECORD_WORDS:PROVENANCE_RECORD_WORDS] = [
            *words_of([provenance.request_id]),
            provenance.step & MASK32,
            provenance.flags & MASK32,
            *words_of([provenance.namespace]),
            0,
            0,
        ]
