"""Sources: sizes, clipping, every error text, and the recorded factory calls."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvcanary import (
    RealKvSource,
    ViolationLog,
    allocate_records,
    clip_read_bytes_aligned,
    make_packed_source,
    make_row_source,
    verify_fused,
)

FOLDERS = [Path(__file__).parent / "vectors", *([Path(os.environ["KVCANARY_VECTORS"])] if os.environ.get("KVCANARY_VECTORS") else [])]
CALLS = [
    call
    for folder in FOLDERS
    if (folder / "source_factory.json").exists()
    for call in json.loads((folder / "source_factory.json").read_text())
]


def run_call(name: str, arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    if name.endswith("clip_read_bytes_aligned"):
        return clip_read_bytes_aligned(**arguments)
    buffer = jax.ShapeDtypeStruct(tuple(arguments.pop("shape")), jnp.dtype(arguments.pop("dtype", "uint8")))
    if name == "make_row_source":
        out = make_row_source(layer_buffer=buffer, **arguments)
    elif name == "make_packed_source":
        out = make_packed_source(buffer=buffer, **arguments)
    else:
        out = (RealKvSource(shape=buffer.shape, dtype=buffer.dtype, **arguments),)
    return [
        {
            "shape": list(source.shape),
            "page_size": source.page_size,
            "num_bytes_per_token": source.num_bytes_per_token,
            "read_bytes": source.read_bytes,
        }
        for source in out
    ]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call['fn'].lstrip('_')}-{'error' if 'error' in call else 'ok'}")
def test_recorded_call(call: dict[str, Any]) -> None:
    if "error" not in call:
        assert run_call(call["fn"], call["args"]) == call["result"]
        return
    with pytest.raises(ValueError) as caught:
        run_call(call["fn"], call["args"])
    assert type(caught.value).__name__ == call["error"]
    assert str(caught.value).split(" (shape=")[0] == call["message"].split(" (shape=")[0]


@pytest.mark.parametrize(
    ("requested", "of", "result"),
    [(0, 64, 0), (sys.maxsize, 64, 64), (16, 64, 16), (64, 64, 64), (np.int64(48), np.int32(64), 48), (sys.maxsize, 16, 16)],
)
def test_clip(requested: int, of: int, result: int) -> None:
    assert clip_read_bytes_aligned(requested=requested, num_bytes_per_token=of) == result


@pytest.mark.parametrize(
    ("requested", "of", "message"),
    [
        (0, 0, "kv-canary: num_bytes_per_token must be a positive multiple of 16, got 0"),
        (0, -16, "kv-canary: num_bytes_per_token must be a positive multiple of 16, got -16"),
        (-5, 24, "kv-canary: num_bytes_per_token must be a positive multiple of 16, got 24"),
        (16, sys.maxsize, f"kv-canary: num_bytes_per_token must be a positive multiple of 16, got {sys.maxsize}"),
        (-1, 64, "kv-canary: read_bytes must be non-negative, got -1"),
        (80, 64, "kv-canary: read_bytes must be <= num_bytes_per_token (64), got 80"),
        (sys.maxsize - 1, 64, f"kv-canary: read_bytes must be <= num_bytes_per_token (64), got {sys.maxsize - 1}"),
        (17, 64, "kv-canary: read_bytes must be a multiple of 16, got 17"),
    ],
)
def test_clip_errors(requested: int, of: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        clip_read_bytes_aligned(requested=requested, num_bytes_per_token=of)
    assert str(caught.value) == message


WRONG = [(True, "bool"), (1.0, "float"), (None, "NoneType"), ("16", "str"), (np.bool_(True), "bool"), (np.float32(16), "float32")]


@pytest.mark.parametrize(("value", "kind"), WRONG, ids=[f"{kind}-{i}" for i, (_, kind) in enumerate(WRONG)])
def test_no_integer_is_a_type_error(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^kv-canary: read_bytes must be an int, got {kind}"):
        clip_read_bytes_aligned(requested=value, num_bytes_per_token=16)
    with pytest.raises(TypeError, match=rf"^kv-canary: num_bytes_per_token must be an int, got {kind}"):
        clip_read_bytes_aligned(requested=16, num_bytes_per_token=value)
    with pytest.raises(TypeError, match=rf"^kv-canary: read_bytes must be an int, got {kind}"):
        make_row_source(layer_buffer=((8, 16), "uint8"), read_bytes=value)
    with pytest.raises(TypeError, match=rf"^kv-canary: page_size must be an int, got {kind}"):
        make_packed_source(buffer=((8, 16), "uint8"), page_size=value, bytes_per_token=16, read_bytes=16)
    with pytest.raises(TypeError, match=rf"^kv-canary: page_size must be an int, got {kind}"):
        RealKvSource(shape=(8, 16), page_size=value, num_bytes_per_token=16, read_bytes=16)


def test_a_traced_size_says_so() -> None:
    @jax.jit
    def step(n: jax.Array) -> int:
        return clip_read_bytes_aligned(requested=n, num_bytes_per_token=16)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="read_bytes must be a static Python integer, got a traced value"):
        step(16)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 0}, "RealKvSource.page_size must be >= 1, got 0"),
    ({"page_size": -1}, "RealKvSource.page_size must be >= 1, got -1"),
    ({"num_bytes_per_token": 0}, "RealKvSource.num_bytes_per_token must be a positive multiple of 16, got 0"),
    ({"num_bytes_per_token": 24}, "RealKvSource.num_bytes_per_token must be a positive multiple of 16, got 24"),
    ({"read_bytes": 0}, "RealKvSource.read_bytes must be a positive multiple of 16 in (0, num_bytes_per_token=16], got 0"),
    ({"read_bytes": 32}, "RealKvSource.read_bytes must be a positive multiple of 16 in (0, num_bytes_per_token=16], got 32"),
    ({"read_bytes": sys.maxsize}, "RealKvSource.read_bytes must be a positive multiple of 16 in (0, num_bytes_per_token=16], got"),
    ({"shape": (64,)}, "RealKvSource.tensor must be at least 2-D, got shape (64,)"),
    ({"shape": (4, 40)}, "RealKvSource.tensor row stride must be a multiple of 16 bytes, got 40 bytes (shape=(4, 40), dtype=uint8)"),
    (
        {"shape": (4, 48), "page_size": 4},
        "RealKvSource.tensor row is 48 bytes wide but page_size=4 x num_bytes_per_token=16 needs 64 (shape=(4, 48), dtype=uint8)",
    ),
    ({"page_size": 2**33, "shape": (0, 2**40)}, "RealKvSource.page_size must fit in int32"),
    ({"shape": (2**31, 64)}, "RealKvSource.tensor rows must fit in int32"),
    ({"shape": (0, 2**60)}, f"RealKvSource.tensor row bytes must be at most {2**58}, got {2**60}"),
    ({"shape": (4, 5), "dtype": jnp.int4}, "RealKvSource.tensor row must be a whole number of bytes, got 20 bits (shape=(5,), dtype=int4)"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=range(len(ERRORS)))
def test_source_errors(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shape": (4, 64), "page_size": 1, "num_bytes_per_token": 16, "read_bytes": 16}
    with pytest.raises(ValueError) as caught:
        RealKvSource(**(arguments | changes))
    assert str(caught.value).startswith(f"kv-canary: {message}")


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [
        ("int4", 16),
        ("uint4", 16),
        ("float4_e2m1fn", 16),
        ("int8", 32),
        ("bool", 32),
        ("float8_e4m3fn", 32),
        ("bfloat16", 64),
        ("float32", 128),
        ("complex64", 256),
        ("int2", 8),
    ],
)
def test_sizes_come_from_bits(dtype: str, row_bytes: int) -> None:
    if row_bytes % 16:
        with pytest.raises(ValueError, match="num_bytes_per_token must be a positive multiple of 16, got 8"):
            make_row_source(layer_buffer=((8, 32), jnp.dtype(dtype)), read_bytes=sys.maxsize)
        return
    (source,) = make_row_source(layer_buffer=((8, 32), jnp.dtype(dtype)), read_bytes=sys.maxsize)
    assert source.shape == (8, row_bytes)
    assert (source.num_bytes_per_token, source.read_bytes, source.page_size) == (row_bytes, row_bytes, 1)
    assert source.buffer_shape == (8, 32) and source.buffer_dtype == jnp.dtype(dtype)


def test_a_source_keeps_no_array_and_is_a_key() -> None:
    buffer = jnp.zeros((4, 2, 16), jnp.float32)
    (one,), (same,) = (
        make_row_source(layer_buffer=buffer, read_bytes=16),
        make_row_source(layer_buffer=(buffer.shape, buffer.dtype), read_bytes=16),
    )
    (other,) = make_row_source(layer_buffer=buffer, read_bytes=32)
    assert one == same and hash(one) == hash(same) and one != other
    assert not any(isinstance(value, (jax.Array, np.ndarray)) for value in vars(one).values())
    with pytest.raises(AttributeError):
        one.page_size = 2  # type: ignore[misc]
    assert jax.jit(lambda x, source: x * source.page_size, static_argnames="source")(3, source=one) == 3


@pytest.mark.parametrize("shape", [(0, 16), (0, 2, 8)])
def test_no_slots_no_source(shape: tuple[int, ...]) -> None:
    assert make_row_source(layer_buffer=(shape, "uint8"), read_bytes=16) == ()
    assert make_packed_source(buffer=(shape, "uint8"), page_size=1, bytes_per_token=16, read_bytes=16) == ()


def test_a_flat_buffer_is_one_row() -> None:
    (source,) = make_packed_source(buffer=((64,), "uint8"), page_size=4, bytes_per_token=16, read_bytes=16)
    assert source.shape == (1, 64) and source.buffer_shape == (64,)


def test_what_is_no_buffer() -> None:
    with pytest.raises(TypeError, match=r"layer_buffer must be an array or a \(shape, dtype\) pair, got int"):
        make_row_source(layer_buffer=3, read_bytes=16)
    with pytest.raises(ValueError, match=r"layer_buffer must be at least 2-D, got shape \(4,\)"):
        make_row_source(layer_buffer=((4,), "uint8"), read_bytes=16)
    with pytest.raises(TypeError, match=r"RealKvSource.shape must be a tuple of ints, got int"):
        RealKvSource(shape=4, page_size=1, num_bytes_per_token=16, read_bytes=16)


@pytest.mark.parametrize("dtype", [None, "nope", 3, object, "M8[s]", "V4", [("a", "i4")], jax.random.key(0).dtype], ids=str)
def test_what_is_no_dtype(dtype: Any) -> None:
    general = {"pages": 1, "page_size": 1, "page_stride": 0, "token_stride": 0, "run_bytes": 1}
    for name, call in (
        ("RealKvSource", lambda: RealKvSource(shape=(4, 64), dtype=dtype, page_size=1, num_bytes_per_token=16, read_bytes=16)),
        ("RealKvSource", lambda: RealKvSource.general(buffer_shape=(4,), buffer_dtype=dtype, **general)),
        ("layer_buffer", lambda: make_row_source(layer_buffer=((4, 64), dtype), read_bytes=16)),
        ("buffer", lambda: make_packed_source(buffer=((4, 64), dtype), page_size=1, bytes_per_token=16, read_bytes=16)),
    ):
        with pytest.raises(TypeError, match=f"^kv-canary: {name} must have a dtype of numbers, got "):
            call()


def test_descriptor() -> None:
    (source,) = make_packed_source(buffer=((4, 80), "uint8"), page_size=2, bytes_per_token=32, read_bytes=16)
    assert source.descriptor(3) == (3, 0, 4, 2, 80, 32, (1, 1, 1, 1), (0, 0, 0, 0), 32, 16)
    assert source.num_slots == 8


def test_general_source() -> None:
    head_major = RealKvSource.general(  # [heads 2, pages 4, page size 3, dim 5] int8
        buffer_shape=(2, 4, 3, 5), buffer_dtype="int8", pages=4, page_size=3, page_stride=15, token_stride=5, run_bytes=5,
        run_counts=(2,), run_strides=(60,), buffer_index=1,
    )  # fmt: skip
    assert head_major.descriptor(0) == (1, 0, 4, 3, 15, 5, (1, 1, 1, 2), (0, 0, 0, 60), 5, 10)
    assert head_major.shape == (2, 60) and head_major.num_bytes_per_token == 10 and hash(head_major)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": 5}, "RealKvSource reaches byte 135 but its buffer has 120"),
        ({"offset": 1}, "RealKvSource reaches byte 121 but its buffer has 120"),
        ({"run_strides": (61,)}, "RealKvSource reaches byte 121 but its buffer has 120"),
        ({"page_stride": -1}, "RealKvSource.page_stride must be >= 0, got -1"),
        ({"run_counts": (0,)}, "RealKvSource.run_counts must be >= 1, got 0"),
        ({"read_bytes": 11}, r"RealKvSource.read_bytes must be in \[0, 10\], got 11"),
        ({"run_strides": ()}, "RealKvSource.run_counts and run_strides must have one length of at most 4, got 1 and 0"),
        ({"pages": 2**31}, "RealKvSource.pages must fit in int32"),
        ({"buffer_index": -1}, "RealKvSource.buffer_index must be >= 0, got -1"),
        ({"buffer_index": 2**63}, "RealKvSource.buffer_index must be <= 2147483647, got"),
        *[
            ({"pages": 0, name: 2**58 + 1}, f"RealKvSource.{name} must be at most {2**58}, got {2**58 + 1}")
            for name in ("offset", "page_stride", "token_stride", "run_bytes")
        ],
        ({"pages": 0, "run_strides": (2**63,)}, f"RealKvSource.run_strides must be at most {2**58}, got {2**63}"),
        ({"pages": 0, "run_counts": (2**31 - 1,) * 2, "run_strides": (1, 1)}, "RealKvSource.run_bytes x run_counts must be at most"),
        ({"pages": 0, "run_counts": (2**10,), "run_strides": (2**58,)}, f"RealKvSource extent of a slot must be <= {2**62}, got"),
    ],
)
def test_general_source_errors(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "buffer_shape": (2, 4, 3, 5), "buffer_dtype": "int8", "pages": 4, "page_size": 3, "page_stride": 15, "token_stride": 5,
        "run_bytes": 5, "run_counts": (2,), "run_strides": (60,),
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^kv-canary: {message}"):
        RealKvSource.general(**(arguments | changes))


@pytest.mark.parametrize("name", ["run_counts", "run_strides"])
@pytest.mark.parametrize("value", [None, 3])
def test_runs_that_are_no_tuples(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^kv-canary: RealKvSource.{name} must be a tuple of ints, got {type(value).__name__}"):
        RealKvSource.general(**{
            "buffer_shape": (8,), "buffer_dtype": "int8", "pages": 1, "page_size": 1, "page_stride": 0, "token_stride": 0,
            "run_bytes": 1, "run_counts": (2,), "run_strides": (1,), name: value,
        })  # fmt: skip


def test_the_largest_numbers_are_those_of_the_handler(implementation: str) -> None:
    """A source without pages, whose numbers nothing else bounds."""
    source = RealKvSource.general(
        buffer_shape=(0, 16), buffer_dtype="uint8", pages=0, page_size=2**31 - 1, page_stride=2**58, token_stride=2**58, offset=2**58,
        run_bytes=2**27, run_counts=(2**31 - 1,), run_strides=(2**30,),
    )  # fmt: skip
    out = verify_fused(
        records=allocate_records(slots=4), log=ViolationLog.allocate(ring_capacity=4), req_pool_indices=[1], prefix_lens=[1],
        req_to_token=np.ones((2, 2), np.int32), launch_tag=0, real_kv_hash_mode=2, real_kv_sources=(source,),
        real_kv_buffers=(jnp.zeros((0, 16), jnp.uint8),), implementation=implementation,
    )  # fmt: skip
    assert out.verdict.tolist() == [2]


def test_addresses_are_64_bit() -> None:
    (source,) = make_row_source(layer_buffer=((2**31 - 1, 4096), "bfloat16"), read_bytes=sys.maxsize)
    assert source.descriptor(0)[4] == 8192 and source.shape == (2**31 - 1, 8192)
