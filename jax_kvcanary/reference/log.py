"""The violation log while a launch runs: rows are appended in entry order, counters add modulo 2**64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_kvcanary.reference.integers import MASK32, MASK64, words_of
from jax_kvcanary.spec import INT32_MAX, NUM_LAUNCH_TAGS, RING_WORDS
from jax_kvcanary.state import ViolationLog


class LogWriter:
    """A copy of a log that one launch reports to."""

    def __init__(self, log: ViolationLog, *, launch_tag: int, step: int, shard: int) -> None:
        if not 0 <= launch_tag < NUM_LAUNCH_TAGS:
            raise ValueError(f"kv-canary: launch_tag must be in [0, {NUM_LAUNCH_TAGS}), got {launch_tag}")
        self.ring = np.array(log.ring)  # [rows, 32] uint32
        self.index = int(np.asarray(log.write_index).reshape(-1)[0])
        self.slot_run_counter = np.array(log.slot_run_counter)  # [12, 2] uint32
        self.kernel_run_counter = np.array(log.kernel_run_counter)  # [12, 2] uint32
        self.launch_tag = int(launch_tag)
        self.step = step & MASK32
        self.shard = shard & MASK32

    def start(self) -> None:
        """Called by every launch that does anything: a negative write index counts as 0."""
        self.index = max(self.index, 0)

    def count_launch(self) -> None:
        """``kernel_run_counter[tag] += 1``."""
        self._add(self.kernel_run_counter, 1)

    def count_slots(self, count: int) -> None:
        """``slot_run_counter[tag] += count``."""
        self._add(self.slot_run_counter, count)

    def _add(self, counter: NDArray[np.uint32], count: int) -> None:
        low, high = counter[self.launch_tag].tolist()
        counter[self.launch_tag] = words_of([((high << 32 | low) + count) & MASK64])

    def row(
        self,
        *,
        slot: int,
        reason: int,
        position: int = 0,
        token: int = 0,
        expected_token: int = -1,
        chain_hash: int = 0,
        aux: int = 0,
        batch_row: int = -1,
        req_pool_idx: int = -1,
        expected_position: int = -1,
        real_kv_hash: int = 0,
        expected_real_kv_hash: int = 0,
        first_bad_source: int = -1,
    ) -> None:
        """Report one violation: stored if the ring has room, counted in any case; the count stops at 2**31 - 1."""
        if self.index < self.ring.shape[0]:
            columns = [
                self.launch_tag,
                slot,
                position,
                token,
                expected_token,
                chain_hash,
                aux,
                int(reason),
                batch_row,
                req_pool_idx,
                self.step,
                expected_position,
                real_kv_hash,
                expected_real_kv_hash,
                first_bad_source,
                self.shard,
            ]
            self.ring[self.index, :RING_WORDS] = words_of(columns)
        self.index = min(self.index + 1, INT32_MAX)

    def result(self) -> ViolationLog:
        """The log after the launch."""
        return ViolationLog(
            ring=self.ring,
            write_index=np.array([self.index], np.int32),
            slot_run_counter=self.slot_run_counter,
            kernel_run_counter=self.kernel_run_counter,
        )


def context_word(value: Any) -> int:
    """``step`` or ``shard``, a Python integer or a one-element array, as uint32."""
    return int(np.asarray(value).reshape(-1)[0]) & MASK32
