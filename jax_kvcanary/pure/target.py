"""What is being traced for: habits of the platform's compiler decide between arrangements that give the same bits."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Target:
    """How to write a launch for a platform.

    wide: 64-bit arithmetic in one register. XLA:CPU computes the two words of a pair in two loops, each with all that went before.
    lanes_first: gathered bytes stay slot by slot, as they are read; else slots are the last axis, the one that vectors run over.
    gathered_bytes: of the pool at a time, about; the temporary memory of a launch is a few times that. Caches like less, a chip whose
      loops cost more than their work likes more.
    widens_narrow_floats: narrow floats become wider ones before they are gathered, the whole pool at once, and NaNs lose their bits.
    drops_barriers: optimization barriers are gone before it is decided what has to be copied.
    """

    wide: bool
    lanes_first: bool
    gathered_bytes: int
    widens_narrow_floats: bool
    drops_barriers: bool


_CPU = Target(wide=True, lanes_first=True, gathered_bytes=1 << 20, widens_narrow_floats=True, drops_barriers=True)
_ACCELERATOR = Target(wide=False, lanes_first=False, gathered_bytes=1 << 22, widens_narrow_floats=False, drops_barriers=False)
_current = contextvars.ContextVar("target", default=_ACCELERATOR)


def current() -> Target:
    """The target of the function that is being traced."""
    return _current.get()


def per_platform(launch: Callable[..., Sequence[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """``launch`` traced in one way for CPUs and in another for whatever else; lowering keeps the one it needs."""

    @functools.wraps(launch)
    def dispatch(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        def traced(target: Target, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            token = _current.set(target)
            try:
                return tuple(launch(*operands, **params))
            finally:
                _current.reset(token)

        def on_cpu(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # Dtypes are explicit throughout, so this only permits the uint64 values in between.
            with jax.enable_x64(True):
                return traced(_CPU, operands)

        def elsewhere(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return traced(_ACCELERATOR, operands)

        return list(lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere))

    return dispatch
