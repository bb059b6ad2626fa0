"""Sizes of a canary's arrays, derived from how an engine is set up."""

from __future__ import annotations

import dataclasses

from jax_kvcanary import validation

_VERIFY_HEADROOM = 3  # shared prefixes are verified once a request, so a step can check more entries than the pool has slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryLaunchCapacities:
    """Room for one forward step; every field is positive and fits int32.

    per_forward_verify_capacity: entries of a verify plan.
    per_forward_write_req_capacity: request rows of a write plan.
    per_forward_write_entry_capacity: tokens of a write.
    """

    per_forward_verify_capacity: int
    per_forward_write_req_capacity: int
    per_forward_write_entry_capacity: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = f"CanaryLaunchCapacities {field.name}"
            value = validation.static_int(name, getattr(self, field.name))
            if value <= 0:
                raise validation.error(f"{name} must be positive, got {value}")
            object.__setattr__(self, field.name, validation.fits_int32(name, value))

    @classmethod
    def from_args(
        cls,
        *,
        pool_slots: int,
        request_rows: int,
        max_prefill_tokens: int,
        graph_batch: int = 0,
        draft_tokens: int = 0,
        chunked_prefill_size: int | None = None,
    ) -> CanaryLaunchCapacities:
        """Capacities of an engine.

        Args:
          pool_slots: slots of the KV pool.
          request_rows: rows of ``req_to_token``.
          max_prefill_tokens: tokens of the largest prefill step.
          graph_batch: largest batch that a decode step is compiled for; 0 if unknown.
          draft_tokens: tokens that speculative decoding writes a request; 0 without it.
          chunked_prefill_size: tokens of a prefill chunk; None if prefills are not cut.

        Raises:
          ValueError: a size that is not positive, or a capacity past int32. TypeError: a size that is no static integer.

        Example:
          >>> CanaryLaunchCapacities.from_args(pool_slots=100, request_rows=8, max_prefill_tokens=64).per_forward_verify_capacity
          300
        """
        slots = _positive("pool_slots", pool_slots)
        rows = _positive("request_rows", request_rows)
        prefill = _positive("max_prefill_tokens", max_prefill_tokens)
        batch = validation.static_capacity("graph_batch", graph_batch)
        draft = validation.static_capacity("draft_tokens", draft_tokens)
        if chunked_prefill_size is not None:
            prefill = min(prefill, _positive("chunked_prefill_size", chunked_prefill_size))
        max_batch = max(batch, rows)
        return cls(
            per_forward_verify_capacity=_VERIFY_HEADROOM * slots,
            per_forward_write_req_capacity=max_batch,
            per_forward_write_entry_capacity=max(max_batch * max(1, draft), prefill),
        )


def _positive(name: str, value: int) -> int:
    size = validation.static_int(name, value)
    if size <= 0:
        raise validation.error(f"{name} must be positive, got {size}")
    return validation.fits_int32(name, size)
