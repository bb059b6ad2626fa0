"""What a canary in serving code does in a step, and how that is rotated. The one place that reads the environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jax_kvcanary import validation

MODES = ("off", "log", "raise")
REAL_KV = ("none", "partial", "all")
CHECKS = ("head", "tail", "both")
ENVIRONMENT = "JAX_KVCANARY_"
"""Prefix of the environment variables that :meth:`CanaryConfig.from_environment` reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """How a :class:`Canary` works; frozen and hashable, all fields static.

    Args:
      mode: "off" adds nothing to a program; "log" reports; "raise" reports, and the monitor raises.
      real_kv: bytes of a new token that its record covers, in every layer: "none", "partial" (16 leading bytes of each source)
        or "all".
      checks: where the prefix of every request is verified: at the "head" of a step, at its "tail" (with the new tokens), or "both".
      partial_layers: layers whose leading bytes are checked in a step, for the whole prefix; they rotate. 0 checks none.
      verify_every: all bytes of all layers are checked for every N-th position in a step, a different part in each: a position is
        met once in N steps. 1 checks all in every step, 0 none. Needs ``real_kv="all"``.
      input_asserts: a step's tokens and positions are compared with the expected ones of the batch, where it has them.
      position_asserts: new positions must follow each other and the prefix.
      token_asserts: verified tokens are compared with the expected ones of the batch, where it has them.
      strict: a prefix that was never stamped is a violation; else it is unattested: counted, and adopted where there is room.
      adopt_capacity: slots of unattested prefixes that a step can adopt; 0 adopts none.
      ring_capacity: violation rows that each launch tag has room for until the log is cleared.
      sweep_capacity: idle cached slots that one :meth:`Canary.sweep` checks; 0: there are no sweeps.
      quarantine: bad slots that a step's verdict has room for.
      implementation: "auto", "ffi" or "jax", see :func:`verify`.

    Raises:
      ValueError, TypeError: a value that breaks a rule.

    Example:
      >>> CanaryConfig(mode="raise", verify_every=16).verify_every
      16
    """

    mode: str = "log"
    real_kv: str = "all"
    checks: str = "head"
    partial_layers: int = 1
    verify_every: int = 64
    input_asserts: bool = True
    position_asserts: bool = True
    token_asserts: bool = True
    strict: bool = False
    adopt_capacity: int = 0
    ring_capacity: int = 256
    sweep_capacity: int = 0
    quarantine: int = 64
    implementation: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("real_kv", REAL_KV), ("checks", CHECKS)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise validation.type_error(f"{name} must be a str, got {type(value).__name__}")
            if value not in allowed:
                raise validation.error(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        for name in ("partial_layers", "verify_every", "adopt_capacity", "ring_capacity", "sweep_capacity", "quarantine"):
            object.__setattr__(self, name, validation.static_capacity(name, getattr(self, name)))
        for name in ("input_asserts", "position_asserts", "token_asserts", "strict"):
            object.__setattr__(self, name, validation.static_bool(name, getattr(self, name)))
        validation.implementation(self.implementation)
        if self.ring_capacity < 1 and self.mode != "off":
            raise validation.error("ring_capacity must be positive, got 0: violations would be counted and never shown")
        if self.adopt_capacity and self.strict:
            raise validation.error("adopt_capacity must be 0 with strict: an unattested prefix is then a violation")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **defaults: Any) -> CanaryConfig:
        """A config from ``JAX_KVCANARY_<FIELD>`` variables over ``defaults``, for switching without a change of code.

        Args:
          environ: None reads ``os.environ``.
          defaults: fields.

        Raises:
          ValueError: a variable that does not parse, or names no field.

        Example:
          >>> CanaryConfig.from_environment({"JAX_KVCANARY_MODE": "raise", "JAX_KVCANARY_STRICT": "1"}).strict
          True
        """
        source = os.environ if environ is None else environ
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values = dict(defaults)
        for name, field in fields.items():
            text = source.get(ENVIRONMENT + name.upper())
            if text is not None:
                values[name] = _parse(ENVIRONMENT + name.upper(), text, type(field.default))
        return cls(**values)


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise validation.error(f"{name} must be 0 or 1, got {text!r}")
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise validation.error(f"{name} must be an integer, got {text!r}") from None
    return text
