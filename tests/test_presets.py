"""Presets: each engine's layout on an array of that engine's shape, in every dtype, against a NumPy gather and through the ops."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layouts import DTYPES, Owners, Served, a_byte_of_each, every_byte, random_array, tables_of

from jax_kvcanary import BlockTable, FlatTable, IdentityTable
from jax_kvcanary.layouts import Layout, pool_sources
from jax_kvcanary.presets import PRESETS, preset

PAGES, PAGE, HEADS, DIM, LAYERS = 4, 8, 4, 8, 2
SLOTS = PAGES * PAGE


def shapes_of(name: str, bits: int, *, pages: int = PAGES, page: int = PAGE, heads: int = HEADS, dim: int = DIM) -> list[tuple[int, ...]]:
    """The arrays of one layer, as the engine allocates them."""
    pack = 32 // bits
    combined = (pages, page, 2 * heads, dim)
    packed = (pages, page, 2 * heads // pack, pack, dim)
    latent = (pages, page // pack, pack, 3 * dim)
    return {
        "sglang-jax": [packed],
        "sglang-jax-0.0.2": [(pages * page, 2 * heads, dim)],
        "sglang-jax-mla": [latent],
        "tpu-inference": [packed],
        "tpu-inference-head64": [(pages, page, 2 * heads // pack, pack, 2 * dim)],  # with twice the heads
        "tpu-inference-mla": [latent],
        "tpu-inference-mla-transposed": [(pages, 3 * dim, page)],
        "easydel-v2": [combined],
        "easydel-v3": [packed],
        "easydel-unified": [(pages, page, heads, dim)] * 2,
        "levanter": [combined],
        "pallas-ragged-v2": [combined],
        "pallas-head-major": [(heads, pages, page, dim)] * 2,
        "pallas-head-major-int8": [(heads, pages, page, dim)] * 2 + [(heads, pages, page)] * 2,
        "contiguous": [(pages, page, heads, dim)] * 2,
        "contiguous-length-major": [(page, heads, pages, dim)] * 2,
    }[name]


def dtypes_of(name: str, dtype: str) -> list[str]:
    """Dtypes of the arrays of one layer; scales are float32."""
    return [dtype, dtype, "float32", "float32"] if name == "pallas-head-major-int8" else [dtype] * len(PRESETS[name].parts)


def requests_of(name: str) -> tuple[list[int], list[list[int]]]:
    """Rows and slots of two requests: three pages, one of them begun; contiguous caches have a row a request."""
    if PRESETS[name].table == "identity":
        rows, lens = [2, 0], [PAGE, 3]
        return rows, [[row * PAGE + i for i in range(n)] for row, n in zip(rows, lens, strict=True)]
    free = [page for page in range(PAGES) if page not in PRESETS[name].reserved_pages]
    first, second, third = free[-1], free[-2], free[0]
    return [0, 1], [[first * PAGE + i for i in range(PAGE)] + [second * PAGE + i for i in range(3)], [third * PAGE + i for i in range(5)]]


def served(name: str, dtype: str, *, dim: int = DIM) -> Served:
    """A pool of random bits in the engine's shapes, its requests stamped."""
    rng, chosen = np.random.default_rng(len(name)), preset(name)
    kinds = list(zip(shapes_of(name, DTYPES[dtype][1], dim=dim), dtypes_of(name, dtype), strict=True))
    arrays = [random_array(rng, shape, kind) for _ in range(LAYERS) for shape, kind in kinds]
    width = len(kinds)

    def pack(arrays: list[Any]) -> Any:
        layers = [arrays[i * width : (i + 1) * width] for i in range(LAYERS)]
        return [layer[0] if width == 1 else tuple(layer) for layer in layers]

    rows, used = requests_of(name)
    sources = pool_sources(pack(arrays), chosen.layout)
    return Served(
        sources=sources,
        arrays=arrays,
        layouts=list(chosen.parts) * LAYERS,
        layers=[layer for layer in range(LAYERS) for _ in range(width)],
        pack=pack,
        used=used,
        table=tables_of(used, chosen.table, PAGE, SLOTS),
        rows=rows,
        padding={"padding_slot": chosen.padding_slot, "padding_req": chosen.padding_req},
    )


CASES = [(name, dtype) for name in PRESETS for dtype in DTYPES if (name, dtype) != ("tpu-inference-mla-transposed", "int4")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_stored_hashes_and_flips(name: str, dtype: str) -> None:
    """Bytes hashed equal a gather of the named axes; a flip of any layer, slot and half is reported there and nowhere else."""
    canary = served(name, dtype, dim=4 if dtype == "uint8" else DIM)
    halves = preset(name).halves
    assert canary.sources.labels == tuple(f"layer {layer} {half}" for layer in range(LAYERS) for half in halves)
    assert canary.sources.num_slots == SLOTS and len(canary.sources.leaves) == LAYERS * len(preset(name).parts)
    canary.assert_records_are_gathered()
    assert canary.violations() == ()
    seen = canary.assert_flips_are_named(every_byte if dtype == "uint8" else a_byte_of_each)
    used = sum(map(len, canary.used))
    if dtype == "uint8":  # every byte of the pool, every head with it
        total = sum(array.nbytes for array in canary.arrays)
        assert seen == {"used": total * used // SLOTS, "unused": total * (SLOTS - used) // SLOTS}
    else:
        assert seen == {"used": LAYERS * len(halves) * used, "unused": LAYERS * len(halves) * (SLOTS - used)}


def test_transposed_nibbles_are_refused() -> None:
    (shape,) = shapes_of("tpu-inference-mla-transposed", 4)
    with pytest.raises(
        ValueError, match=r"layout 'page dim slot': along 'slot' the bytes of a slot would begin or end inside a byte, 4 bits"
    ):
        pool_sources([(shape, "int4")], preset("tpu-inference-mla-transposed").layout)


def exchanged(canary: Served, number: int, one: Any, other: Any) -> list[Any]:
    """The arrays with the elements at two index sets of array ``number`` exchanged."""
    changed = canary.arrays[number].reshape(-1).copy()
    changed[one], changed[other] = changed[other], changed[one].copy()
    arrays = list(canary.arrays)
    arrays[number] = changed.reshape(arrays[number].shape)
    return arrays


@pytest.mark.parametrize("name", PRESETS)
def test_swaps_are_seen(name: str) -> None:
    """Two layers, two heads, two slots, two pages: each exchange is reported at the slots it hits, and with its layer and half."""
    canary = served(name, "bfloat16")
    used = sorted(slot for slots in canary.used for slot in slots)
    width = len(preset(name).parts)

    def reported(arrays: list[Any]) -> tuple[set[int], set[str]]:
        found = canary.violations(arrays)
        return {v.slot for v in found}, {canary.sources.describe(v.first_bad_source) for v in found}

    layers = [*canary.arrays[width:], *canary.arrays[:width]]
    assert reported(layers) == (set(used), {f"layer 0 {preset(name).halves[0]}"})
    for number, (array, layout) in enumerate(zip(canary.arrays, canary.layouts, strict=True)):
        owners = Owners.of(layout, array.shape)
        first = f"layer {number // width} {layout.halves[0]}"

        slots = used[0], used[-1]
        one, other = (np.flatnonzero(owners.slot == slot) for slot in slots)
        assert reported(exchanged(canary, number, one, other)) == (set(slots), {first})
        pages = sorted({slot // PAGE for slot in used})[:2]
        one, other = (np.flatnonzero(owners.slot // PAGE == page) for page in pages)
        hit = {slot for slot in used if slot // PAGE in pages}
        assert reported(exchanged(canary, number, one, other)) == (hit, {first})
        if owners.head.max() > 0:
            one, other = (np.flatnonzero(owners.head == head) for head in (0, owners.head.max()))
            assert reported(exchanged(canary, number, one, other)) == (set(used), {first})
        if len(layout.halves) == 2:
            one, other = (np.flatnonzero(owners.half == half) for half in (0, 1))
            assert reported(exchanged(canary, number, one, other)) == (set(used), {first})
        free = [slot for slot in range(SLOTS) if slot not in used]
        one, other = (np.flatnonzero(owners.slot == slot) for slot in free[:2])
        assert reported(exchanged(canary, number, one, other)) == (set(), set()), "neither slot is in use"


@pytest.mark.parametrize("name", PRESETS)
def test_equal_content_never_alarms(name: str) -> None:
    """Every slot, head and layer holds the same; stamped as such, nothing is reported wherever it is read."""
    canary = served(name, "float16")
    arrays = [np.ones_like(array) for array in canary.arrays]
    same = dataclasses.replace(canary, arrays=arrays)
    assert same.violations() == ()
    one_half = [array if i % 2 else np.full_like(array, 2) for i, array in enumerate(arrays)]
    assert dataclasses.replace(canary, arrays=one_half).violations() == ()


SIZES = {"pages": 2048, "page": 16, "heads": 8, "dim": 128}


@pytest.mark.parametrize("name", PRESETS)
def test_the_sizes_of_a_real_engine(name: str) -> None:
    """Thousands of pages, 32 layers: sources come from shapes alone, and each layer's sources cover each byte once."""
    shapes = shapes_of(name, 16, **SIZES)
    layer = [jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in zip(shapes, dtypes_of(name, "bfloat16"), strict=True)]
    sources = pool_sources([layer[0] if len(layer) == 1 else tuple(layer)] * 32, preset(name).layout)
    assert sources.num_slots == 2048 * 16 and len(sources) == 32 * len(preset(name).halves)
    total = sum(source.num_bytes_per_token for source in sources.sources) * sources.num_slots
    assert total == 32 * sum(array.size * array.dtype.itemsize for array in layer)
    assert {source.run_bytes for source in sources.sources} <= {2, 4, 128, 256, 768, 2048, 4096}


def test_the_plain_implementation_stores_the_same_for_every_preset() -> None:
    """All presets in one launch of plain JAX: their hashes equal the gathered bytes and those of the custom call."""
    names = list(PRESETS)
    layouts: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        kinds = zip(preset(name).parts, shapes_of(name, 16), dtypes_of(name, "bfloat16"), strict=True)
        for part, (layout, shape, kind) in enumerate(kinds):
            layouts[f"{number:02} {part}"] = layout.as_half(f"{name} {part}")
            arrays[f"{number:02} {part}"] = random_array(rng, shape, kind)
    keys = sorted(arrays)
    used = [[9, 8, 30, 3], [0]]
    canaries = [
        Served(
            sources=pool_sources(arrays, layouts),
            arrays=[arrays[key] for key in keys],
            layouts=[layouts[key] for key in keys],
            layers=[None] * len(keys),
            pack=lambda arrays: dict(zip(keys, arrays, strict=True)),
            used=used,
            table=tables_of(used, "rows", 1, SLOTS),
            rows=[0, 1],
            implementation=implementation,
        )
        for implementation in ("ffi", "jax")
    ]
    canaries[1].assert_records_are_gathered()
    np.testing.assert_array_equal(canaries[0].records, canaries[1].records)
    np.testing.assert_array_equal(canaries[0].tags, canaries[1].tags)


# ------------------------------------------------------------------------------------------------ conventions


def test_names() -> None:
    with pytest.raises(
        ValueError, match=r"^kv-canary: preset 'vllm' is not known; known are sglang-jax, sglang-jax-0\.0\.2, sglang-jax-mla, "
    ):
        preset("vllm")
    for name in (None, 3, ["sglang-jax"]):
        with pytest.raises(TypeError, match=r"^kv-canary: preset must be a name, got "):
            preset(name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^kv-canary: fields must be a tuple of str, got NoneType"):
        preset("contiguous").with_fields(None)  # type: ignore[arg-type]
    for name, chosen in PRESETS.items():
        assert chosen.name == name and hash(chosen) == hash(preset(name)) and all(isinstance(part, Layout) for part in chosen.parts)
        assert chosen.table in ("rows", "blocks", "flat", "identity")


@pytest.mark.parametrize("name", [name for name in PRESETS if len(PRESETS[name].parts) > 1])
def test_fields_of_a_pool(name: str) -> None:
    chosen = preset(name)
    fields = ["keys", "values", "keys_scale", "values_scale"][: len(chosen.parts)]
    layer = {field: (shape, "int8") for field, shape in zip(fields, shapes_of(name, 8), strict=True)}
    sources = pool_sources(
        {"layers_0": layer, "layers_1": layer}, {f"layers_{i}": None for i in range(2)} | {"layers_1": chosen.with_fields(fields)}
    )
    assert sorted(sources.labels) == sorted(chosen.halves)
    both = pool_sources([layer, layer], chosen.with_fields(fields))
    assert sorted(both.labels) == sorted(f"layer {i} {half}" for i in range(2) for half in chosen.halves)
    with pytest.raises(ValueError, match=f"preset '{name}' has {len(chosen.parts)} arrays .*, got 1 fields"):
        chosen.with_fields(["keys"])


@functools.cache
def by_kind() -> dict[type, set[str]]:
    out: dict[type, set[str]] = {}
    for name, chosen in PRESETS.items():
        out.setdefault(type(tables_of([[0]], chosen.table, PAGE, SLOTS)), set()).add(name)
    return out


def test_tables_of_engines() -> None:
    assert by_kind()[FlatTable] == {"sglang-jax", "sglang-jax-0.0.2", "sglang-jax-mla"}
    assert by_kind()[IdentityTable] == {"contiguous", "contiguous-length-major"}
    assert by_kind()[BlockTable] == set(PRESETS) - by_kind()[FlatTable] - by_kind()[IdentityTable]
