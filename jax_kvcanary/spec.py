"""Numbers, codes and names of the KV canary contract.

The compiled module exports the same numbers from ``xla_ffi/spec.h``; a test compares the two.
"""

from __future__ import annotations

import enum
from typing import Final

CHAIN_ANCHOR: Final = 0xC0FFEE1234567890
"""Seed of every chain: a head record stores ``splitmix64(CHAIN_ANCHOR ^ namespace)``."""

SPLITMIX_SHIFTS: Final = (30, 27, 31)
SPLITMIX_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

RECORD_WORDS: Final = 8
"""uint32 words of a plain record: token, position, prev_hash, real_kv_hash as (low, high) pairs."""

PROVENANCE_RECORD_WORDS: Final = 16
"""uint32 words of a record with provenance: 8 more for request id, step, flags, namespace, zero."""

RING_COLUMNS: Final = 16
"""64-bit columns of a violation row."""

RING_WORDS: Final = 2 * RING_COLUMNS

NUM_LAUNCH_TAGS: Final = 12
PARTIAL_BYTES: Final = 16
SOURCE_ALIGNMENT: Final = 16
INT32_MAX: Final = 2**31 - 1

PLAN_INVALID_SLOT: Final = -2
"""What a plan emits for a slot whose index mapping is out of range."""

TARGET_VERSION: Final = 1
TARGETS: Final = {
    "plan": f"kvcanary_plan_v{TARGET_VERSION}",
    "verify": f"kvcanary_verify_v{TARGET_VERSION}",
    "verify_fused": f"kvcanary_verify_fused_v{TARGET_VERSION}",
    "write": f"kvcanary_write_v{TARGET_VERSION}",
    "scatter": f"kvcanary_scatter_v{TARGET_VERSION}",
}
"""Custom call target of every op; the version changes with operands, attributes or record layout."""


class FailReason(enum.IntFlag):
    """Reason bits of a violation row (column 7)."""

    VERIFY_CHAIN_HASH = 1
    VERIFY_POSITION = 2
    VERIFY_REAL_KV_HASH = 4
    WRITE_TOKEN = 8
    WRITE_POSITION = 16
    VERIFY_TOKEN = 32
    SLOT_OUT_OF_RANGE = 64
    TABLE_OUT_OF_RANGE = 128
    UNWRITTEN = 256
    # Reserved: OWNERSHIP 512, VIEW 2048.
    LANDING = 1024
    RANK_DIGEST = 4096


class CanaryLaunchTag(enum.IntEnum):
    """Which launch of a step wrote a violation row or a counter."""

    HEAD_K_FULL = 0
    HEAD_V_FULL = 1
    TAIL_K_FULL = 2
    TAIL_V_FULL = 3
    SWEEP_K_FULL = 4
    SWEEP_V_FULL = 5
    HEAD_K_SWA = 6
    HEAD_V_SWA = 7
    TAIL_K_SWA = 8
    TAIL_V_SWA = 9
    SWEEP_K_SWA = 10
    SWEEP_V_SWA = 11


class RealKvHashMode(enum.IntEnum):
    """How many leading bytes of each source go into a slot's real-KV hash."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


class RecordFlag(enum.IntFlag):
    """Flag bits of a record with provenance."""

    NONE = 0
    FREE = 1
    ADOPTED = 2


class Verdict(enum.IntEnum):
    """State of one request after a verify or write launch."""

    NOT_CHECKED = 0
    OK = 1
    BAD = 2


class TableKind(enum.IntEnum):
    """How a request's positions are mapped to slots."""

    ROWS = 0
    BLOCKS = 1
    FLAT = 2
    IDENTITY = 3


class Column(enum.IntEnum):
    """64-bit columns of a violation row."""

    TAG = 0
    SLOT = 1
    POSITION = 2
    TOKEN = 3
    EXPECTED_TOKEN = 4
    CHAIN_HASH = 5
    AUX = 6
    REASON = 7
    BATCH_ROW = 8
    REQ_POOL_IDX = 9
    STEP = 10
    EXPECTED_POSITION = 11
    REAL_KV_HASH = 12
    EXPECTED_REAL_KV_HASH = 13
    FIRST_BAD_SOURCE = 14
    SHARD = 15
