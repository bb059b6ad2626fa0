"""Layouts of the pools of known serving engines, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_kvcanary import validation
from jax_kvcanary.layouts import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """How an engine lays out its pool, and its conventions where they differ from the ops' defaults.

    name: of the preset. shape: of one layer's arrays in words. layout: what :func:`pool_sources` takes for one array or one layer; a
    list of layers needs nothing more. table: the kind of its tables: "rows", "blocks", "flat" or "identity". reserved_pages: pages that
    hold no request. padding_slot, padding_req: what to pass to the ops as such (None: there is none, -1 is always skipped).
    """

    name: str
    shape: str
    layout: Any
    table: str
    reserved_pages: tuple[int, ...] = ()
    padding_slot: int | None = None
    padding_req: int | None = None

    @property
    def halves(self) -> tuple[str, ...]:
        """Names of the sources that a layer has."""
        return tuple(half for layout in self.parts for half in layout.halves)

    @property
    def parts(self) -> tuple[Layout, ...]:
        """The layouts of a layer's arrays."""
        return self.layout if isinstance(self.layout, tuple) else (self.layout,)

    def with_fields(self, fields: Sequence[str]) -> dict[str, Layout]:
        """The layout of a pool that keeps its arrays in a dict or in named fields: K, V, then their scales.

        Example:
          >>> sorted(preset("contiguous").with_fields(("cached_key", "cached_value")))
          ['cached_key', 'cached_value']
        """
        fields = validation.sequence_of("fields", fields, str)
        if len(fields) != len(self.parts):
            raise validation.error(
                f"preset {self.name!r} has {len(self.parts)} arrays ({', '.join(self.halves)}), got {len(fields)} fields"
            )
        return dict(zip(fields, self.parts, strict=True))


def _pair(axes: str, **options: Any) -> tuple[Layout, Layout]:
    layout = Layout.from_axes(axes, **options)
    return layout.as_half("K"), layout.as_half("V")


def _scaled_pair(axes: str, scale_axes: str) -> tuple[Layout, ...]:
    scale = Layout.from_axes(scale_axes)
    return (*_pair(axes), scale.as_half("K scale"), scale.as_half("V scale"))


_PACKED = Layout.from_axes("page slot group pack dim", interleaved="group pack")
_PACKED_LANES = Layout.from_axes("page slot group pack dim", concatenated="dim")
_PACKED_LATENT = Layout.from_axes("page slot_outer slot_pack dim", half="latent")
_COMBINED = Layout.from_axes("page slot head dim", interleaved="head")

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(name="sglang-jax", shape="[P, S, 2H/p, p, D]", layout=_PACKED, table="flat"),
        Preset(name="sglang-jax-0.0.2", shape="[T + S, 2H, D]", layout=Layout.from_axes("slot head dim", interleaved="head"), table="flat"),
        Preset(name="sglang-jax-mla", shape="[P, S/p, p, rank + rope]", layout=_PACKED_LATENT, table="flat"),
        Preset(name="tpu-inference", shape="[P, S, 2H/p, p, D]", layout=_PACKED, table="blocks", reserved_pages=(0,)),
        Preset(name="tpu-inference-head64", shape="[P, S, H/p, p, 128]", layout=_PACKED_LANES, table="blocks", reserved_pages=(0,)),
        Preset(name="tpu-inference-mla", shape="[P, S/p, p, dim]", layout=_PACKED_LATENT, table="blocks", reserved_pages=(0,)),
        Preset(
            name="tpu-inference-mla-transposed",
            shape="[P, dim, S]",
            layout=Layout.from_axes("page dim slot", half="latent"),
            table="blocks",
            reserved_pages=(0,),
        ),
        Preset(name="easydel-v2", shape="[P, S, 2H, D]", layout=_COMBINED, table="blocks"),
        Preset(name="easydel-v3", shape="[P, S, 2H/p, p, D]", layout=_PACKED, table="blocks"),
        Preset(name="easydel-unified", shape="K and V [P, S, H, D]", layout=_pair("page slot head dim"), table="blocks"),
        Preset(name="levanter", shape="[P, S, 2H, D]", layout=_COMBINED, table="blocks"),
        Preset(name="pallas-ragged-v2", shape="[P, S, 2H, D]", layout=_COMBINED, table="blocks"),
        Preset(name="pallas-head-major", shape="K and V [H, P, S, D]", layout=_pair("head page slot dim"), table="blocks"),
        Preset(
            name="pallas-head-major-int8",
            shape="K and V [H, P, S, D], their scales [H, P, S]",
            layout=_scaled_pair("head page slot dim", "head page slot"),
            table="blocks",
        ),
        Preset(name="contiguous", shape="K and V [B, L, H, D]", layout=_pair("batch length head dim"), table="identity"),
        Preset(name="contiguous-length-major", shape="K and V [L, H, B, D]", layout=_pair("length head batch dim"), table="identity"),
    )
}
"""Every preset by its name. P pages, S page size, T tokens, B batch rows, L length, H KV heads, D head dim, p = 32 / bits of the dtype."""


def preset(name: str) -> Preset:
    """The preset of an engine.

    Args:
      name: one of :data:`PRESETS`.

    Raises:
      ValueError: a name that is not known; the message lists those that are. TypeError: no name.

    Example:
      >>> preset("sglang-jax").layout.text, preset("sglang-jax").halves
      ('page slot group pack dim', ('K', 'V'))
    """
    if not isinstance(name, str):
        raise validation.type_error(f"preset must be a name, got {type(name).__name__}")
    if name not in PRESETS:
        raise validation.error(f"preset {name!r} is not known; known are {', '.join(PRESETS)}")
    return PRESETS[name]
