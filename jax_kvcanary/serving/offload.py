"""Idle pages in host memory: their bytes of all layers and the canary's records travel together, both ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_kvcanary.serving.model import Pool
from jax_kvcanary.serving.steps import CompiledSteps


@dataclasses.dataclass
class DeviceState:
    """What lives on the device between steps; every step and every move replaces it."""

    pool: Pool
    canary_state: Any


@dataclasses.dataclass(frozen=True)
class HostPage:
    """kv: one ``[page_size, 2 * kv_heads, head_dim]`` a layer. records: what the canary exported with it, or None without a canary."""

    kv: tuple[np.ndarray, ...]
    records: dict[str, Any] | None


class HostStore:
    """Moves single pages between the pool and the host, outside the step."""

    def __init__(self, device: DeviceState, steps: CompiledSteps, canary: Any, *, page_size: int) -> None:
        self.device = device
        self.steps = steps
        self.canary = canary
        self.page_size = page_size

    def save(self, page: int) -> HostPage:
        """A copy of a page and its records."""
        kv = jax.device_get(self.steps.take_page(self.device.pool, np.int32(page)))
        return HostPage(kv=tuple(np.array(rows) for rows in kv), records=self._export(page))

    def load(self, host: HostPage, page: int) -> bool:
        """Put a page back, bytes first, then the records, which the canary checks against them; False if they disagree."""
        self.device.pool = self.steps.put_page(self.device.pool, np.int32(page), host.kv)
        return self._import(host, page)

    def _export(self, page: int) -> dict[str, Any] | None:
        if self.canary is None:
            return None
        return self.canary.export(self.device.canary_state, slots=_one(page), page_size=self.page_size)

    def _import(self, host: HostPage, page: int) -> bool:
        if self.canary is None or host.records is None:
            return True
        self.device.canary_state, status = self.canary.import_(
            self.device.canary_state, self.device.pool, host.records, slots=_one(page), page_size=self.page_size
        )
        return not np.any(np.asarray(status))


def _one(page: int) -> np.ndarray:
    return np.array([page], np.int32)
