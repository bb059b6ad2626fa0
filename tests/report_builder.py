"""Reports built by hand for the tests of the host side: a stand-in canary, rows with their contexts, headers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_kvcanary.report_header import CONTEXT_WORDS, HEADER_MAGIC, RowFacts, decode_rows, header_words
from jax_kvcanary.spec import CanaryLaunchTag, Column, FailReason

HEAD, TAIL = CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL
CHAIN, POSITION, TOKEN = FailReason.VERIFY_CHAIN_HASH, FailReason.VERIFY_POSITION, FailReason.VERIFY_TOKEN
BYTES, UNWRITTEN = FailReason.VERIFY_REAL_KV_HASH, FailReason.UNWRITTEN


@dataclasses.dataclass(frozen=True)
class Config:
    mode: str = "log"


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What a monitor needs of a canary."""

    key: int = 0xABCD1234
    name: str = "kv"
    parts: tuple[CanaryLaunchTag, ...] = (HEAD, TAIL)
    config: Config = Config()
    page_size: int = 16

    def group_of_part(self, tag: CanaryLaunchTag) -> str:
        return "full"

    def source_labels(self, tag: CanaryLaunchTag) -> tuple[str, ...]:
        return ("layer 0 K", "layer 0 V", "layer 1 K", "layer 1 V")

    def clear_log(self, state: Any) -> Any:
        return ("cleared", state)


@dataclasses.dataclass(frozen=True)
class Report:
    header: Any
    rows: Any
    context: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A violation of a verify: where it was read, the record that was found there, and the predecessor's writer."""

    reasons: int
    slot: int
    at: int  # the expected position
    reader: int = 1
    step: int = 20
    tag: CanaryLaunchTag = HEAD
    position: int | None = None  # of the record
    token: int = 7
    expected_token: int = -1
    writer: int = 1
    writer_step: int = 5
    flags: int = 0
    namespace: int = 0
    reader_namespace: int = 0
    chain_hash: int = 0x1111
    previous: tuple[int, int] | None = (1, 5)  # writer, step
    source: int = -1
    batch_row: int = 0
    shard: int = 0
    written: bool = True

    def words(self) -> tuple[np.ndarray, np.ndarray]:
        position = self.at if self.position is None else self.position
        written = self.written and not self.reasons & UNWRITTEN
        columns = {
            Column.TAG: self.tag,
            Column.SLOT: self.slot,
            Column.POSITION: position if written else 0,
            Column.TOKEN: self.token if written else 0,
            Column.EXPECTED_TOKEN: self.expected_token,
            Column.CHAIN_HASH: self.chain_hash if written else 0,
            Column.AUX: 0x2222,
            Column.REASON: self.reasons,
            Column.BATCH_ROW: self.batch_row,
            Column.REQ_POOL_IDX: self.batch_row + 1,
            Column.STEP: self.step,
            Column.EXPECTED_POSITION: self.at,
            Column.REAL_KV_HASH: 5,
            Column.EXPECTED_REAL_KV_HASH: 6 if self.reasons & BYTES else 5,
            Column.FIRST_BAD_SOURCE: self.source,
            Column.SHARD: self.shard,
        }
        row = np.array([int(value) & (2**64 - 1) for _, value in sorted(columns.items())], np.uint64).view(np.uint32)
        context = np.zeros(CONTEXT_WORDS, np.uint32)
        if written:
            context[:8] = row[[6, 7, 4, 5, 10, 11, 24, 25]]
            context[8:14] = [*_pair(self.writer), self.writer_step, self.flags, *_pair(self.namespace)]
        context[16:20] = [*_pair(self.reader), *_pair(self.reader_namespace)]
        context[23] = 1
        if self.previous is not None:
            context[20] = self.previous[1]
            context[21:23] = _pair(self.previous[0])
            context[23] = 3
        return row, context


def _pair(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32


def facts(*rows: Row) -> list[RowFacts]:
    words, contexts = zip(*(row.words() for row in rows), strict=True)
    return decode_rows(np.array(words), np.array(contexts), [(row.tag, "full") for row in rows])


def report(
    *rows: Row,
    canary: StandIn | None = None,
    step: int = 20,
    epoch: int = 0,
    capacity: int = 64,
    index: dict[CanaryLaunchTag, int] | None = None,
    runs: int = 100,
    unattested: int = 0,
    key: int | None = None,
    magic: int = HEADER_MAGIC,
) -> Report:
    """The cumulative report of a step; ``index`` overrides how many rows the launches reported."""
    canary = canary or StandIn()
    ring = np.zeros((len(canary.parts), capacity, 32), np.uint32)
    context = np.zeros((len(canary.parts), capacity, CONTEXT_WORDS), np.uint32)
    header = np.zeros(header_words(len(canary.parts)), np.uint32)
    header[:8] = [magic, canary.key if key is None else key, step, epoch, *_pair(unattested), step, 2]
    for part, tag in enumerate(canary.parts):
        mine = [row for row in rows if row.tag == tag]
        for i, row in enumerate(mine[:capacity]):
            ring[part, i], context[part, i] = row.words()
        reported = len(mine) if index is None or tag not in index else index[tag]
        header[header_words(part) : header_words(part + 1)] = [reported, *_pair(runs * step), *_pair(step), 0]
    return Report(header, ring, context)
