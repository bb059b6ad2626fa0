"""Every vector file against every implementation: the NumPy reference, plain JAX, the CPU custom calls, and the CUDA ones.

A file runs with 64-bit arrays and the plain canary's checks, and with 32-bit arrays and the extended checks; under jit on the CPU in one
of the two, in turn. With KVCANARY_VECTORS_ALL=1 every implementation runs in all four combinations. Columns that the files do not know
are compared with those of the reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors_io as io

from jax_kvcanary import reference
from jax_kvcanary.spec import CHAIN_ANCHOR, RING_COLUMNS, Column, FailReason, RealKvHashMode
from jax_kvcanary.state import Plan, VerifyPlan, ViolationLog, WritePlan

# ---------------------------------------------------------------------------------------------- implementations


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation; ``call`` takes and returns NumPy arrays.

    choice: the ``implementation`` argument, None for the reference. platform: where its arrays are.
    """

    name: str
    choice: str | None = None
    platform: str = "cpu"
    jit: bool = False

    @property
    def in_order(self) -> bool:
        """Whether several requests of one write launch run one after the other."""
        return self.platform == "cpu"

    def require(self) -> None:
        """Skip the test, saying why, where this implementation cannot run."""
        if self.choice is None:
            return
        if self.platform == "gpu" and not _devices("gpu"):
            pytest.skip("no GPU: JAX has no gpu device")
        public_api()
        if self.choice == "ffi":
            info = importlib.import_module("jax_kvcanary.backend").backend_info()["cuda" if self.platform == "gpu" else "cpu"]
            if not info.compiled:
                pytest.skip(info.detail)

    def call(self, op: str, arrays: dict[str, Any], static: dict[str, Any]) -> Any:
        """Run ``op`` with keyword arguments; those in ``static`` are hashable."""
        if self.choice is None:
            return getattr(reference, op)(**arrays, **static)
        if "real_kv_sources" in static:
            static = {**static, "real_kv_sources": tuple(_library_source(source) for source in static["real_kv_sources"])}
        static = {**static, "implementation": self.choice}
        device = _devices(self.platform)[0]
        with jax.default_device(device):
            placed = jax.device_put(arrays, device)
            run = _jitted(op, tuple(sorted(static.items()))) if self.jit else functools.partial(getattr(public_api(), op), **static)
            return jax.tree.map(np.asarray, run(**placed))


@functools.cache
def _jitted(op: str, static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    settings = dict(static)
    options = _quick_compile() if settings["implementation"] == "jax" else None
    return jax.jit(functools.partial(getattr(public_api(), op), **settings), compiler_options=options)


@functools.cache
def _quick_compile() -> dict[str, Any]:
    """XLA options for programs that run a few times only, as far as this XLA knows them."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    more = {**options, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x + 1, compiler_options=more).lower(np.int32(0)).compile()
    except jax.errors.JaxRuntimeError:
        return options
    return more


@functools.cache
def _devices(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def public_api() -> Any:
    """The package's public names; skips while there is no ``__init__.py`` (a package that does not import is an error)."""
    package = importlib.import_module("jax_kvcanary")
    if getattr(package, "__file__", None) is None:
        pytest.skip("jax_kvcanary has no __init__.py yet")
    return package


@functools.cache
def _library_source(source: io.GoldenSource) -> Any:
    dtype = io.as_dtype(np.zeros((0, source.row_bytes), np.uint8), source.dtype).dtype
    return public_api().RealKvSource(
        shape=(source.rows, source.row_bytes // dtype.itemsize),
        dtype=dtype,
        page_size=source.page_size,
        num_bytes_per_token=source.num_bytes_per_token,
        read_bytes=source.read_bytes,
    )


REFERENCE = Implementation("reference")
IMPLEMENTATIONS = (
    REFERENCE,
    Implementation("jax", choice="jax", jit=True),
    Implementation("ffi", choice="ffi"),
    Implementation("ffi_jit", choice="ffi", jit=True),
    Implementation("cuda", choice="ffi", platform="gpu", jit=True),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Width of integer arrays, and whether this library's own checks are on."""

    x64: bool
    extended: bool

    @property
    def name(self) -> str:
        return f"{'x64' if self.x64 else 'x32'}-{'extended' if self.extended else 'plain'}"


VARIANTS = tuple(itertools.starmap(Variant, itertools.product((True, False), (False, True))))
CROSSED = (Variant(x64=True, extended=False), Variant(x64=False, extended=True))
ALL_VARIANTS = os.environ.get("KVCANARY_VECTORS_ALL", "") not in ("", "0")


def _variants(implementation: Implementation, number: int) -> tuple[Variant, ...]:
    """The variants in which the ``number``-th file of its kind runs; where that means compiling a program, files take turns."""
    if ALL_VARIANTS:
        return VARIANTS
    if implementation.jit and implementation.platform == "cpu":
        return (CROSSED[(number + (implementation.choice == "jax")) % 2],)
    return CROSSED


def every_run(kind: str) -> Callable[[Any], Any]:
    """Parametrise a test over the files of a kind, every implementation and its variants."""
    runs = []
    for implementation in IMPLEMENTATIONS:
        marks = [pytest.mark.gpu] if implementation.platform == "gpu" else []
        for number, vector in enumerate(io.vectors(kind)):
            for variant in _variants(implementation, number):
                name = f"{implementation.name}-{variant.name}-{vector.id}"
                runs.append(pytest.param(vector, implementation, variant, id=name, marks=marks))
    return pytest.mark.parametrize(("vector", "implementation", "variant"), runs)


@contextlib.contextmanager
def integer_width(implementation: Implementation, variant: Variant) -> Iterator[None]:
    """x64 as the variant says, for the implementations that JAX runs."""
    implementation.require()
    with jax.enable_x64(variant.x64) if implementation.choice is not None else contextlib.nullcontext():
        yield


def narrow(values: np.ndarray, variant: Variant, *, like: np.ndarray | None = None) -> np.ndarray:
    """A file's int64 array as the variant gives it: as it is, as int32 where all of ``like`` fits, or as uint32 pairs."""
    if variant.x64 or values.dtype != np.int64:
        return values
    if io.fits_int32(values if like is None else like):
        return values.astype(np.int32)
    return io.pairs(values)


# ---------------------------------------------------------------------------------------------- hash


@pytest.mark.parametrize("vector", [pytest.param(vector, id=vector.id) for vector in io.vectors("hash")])
def test_hash_reference(vector: io.Vector) -> None:
    arrays = vector.arrays
    assert [reference.splitmix64(int(x)) for x in arrays["x"]] == arrays["splitmix64_out"].tolist()
    np.testing.assert_array_equal(reference.splitmix64_array(arrays["x"]), arrays["splitmix64_out"])
    mixed = [reference.mix3(int(a), int(b), int(c)) for a, b, c in zip(arrays["a"], arrays["b"], arrays["c"], strict=True)]
    assert mixed == arrays["mix3_out"].tolist()
    folded = [reference.fold_bytes(data[:size]) for data, size in zip(arrays["fold_bytes"], arrays["fold_len"], strict=True)]
    assert folded == arrays["fold_out"].tolist()
    assert reference.splitmix64(CHAIN_ANCHOR) == int(arrays["anchor_hash"][0])


@every_run("hash")
def test_hash(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    """The hash through one write launch: heads of namespaces store S, records after a seed mix3, and sources fold bytes."""
    arrays = vector.arrays
    heads, chained = arrays["x"].size, arrays["a"].size
    count, slots = heads + chained, heads + 2 * chained  # one token a request; seeds are behind the slots that are written
    index = np.int64 if variant.x64 else np.int32

    records = np.zeros((slots, 8), np.uint32)
    seed_words = np.stack([arrays["b"], arrays["c"], arrays["a"], np.zeros_like(arrays["a"])], axis=1)
    records[count:] = seed_words.view(np.uint32).reshape(chained, 8)
    namespaces = np.zeros(count, np.uint64)
    namespaces[:heads] = arrays["x"] ^ np.uint64(CHAIN_ANCHOR)
    sources, buffers, folds = [], [], np.zeros(slots, np.uint64)
    for size in sorted({int(n) for n in arrays["fold_len"] if n > 0 and n % 16 == 0}):
        rows = np.resize(np.nonzero(arrays["fold_len"] == size)[0], slots)
        sources.append(io.GoldenSource(slots, size, 1, size, size, "uint8"))
        buffers.append(np.ascontiguousarray(arrays["fold_bytes"][rows, :size]))
        folds = reference.splitmix64_array(folds ^ arrays["fold_out"][rows])

    inputs = {
        "records": records,
        "log": io.empty_log(4),
        "plan": WritePlan(
            write_offsets=np.arange(count + 1, dtype=index),
            write_seed_slot_indices=np.concatenate([np.full(heads, -1), np.arange(count, slots)]).astype(index),
            write_num_valid_reqs=np.array([count], np.int32),
            req_pool_indices=np.zeros(0, index),
        ),
        "input_ids": np.zeros(count, index),
        "positions": np.zeros(count, index),
        "out_cache_loc": np.arange(count, dtype=index),
        "namespaces": io.pairs(namespaces.view(np.int64)),
        "real_kv_buffers": tuple(buffers),
    }
    static = {"launch_tag": 0, "padding_slot": None, "extended_checks": variant.extended}
    static.update(real_kv_hash_mode=RealKvHashMode.ALL, real_kv_sources=tuple(sources))
    with integer_width(implementation, variant):
        result = implementation.call("write", inputs, static)
    stored = np.ascontiguousarray(result.records[:count]).view("<u8")
    np.testing.assert_array_equal(stored[:heads, 2], arrays["splitmix64_out"])
    np.testing.assert_array_equal(stored[heads:, 2], arrays["mix3_out"])
    np.testing.assert_array_equal(stored[:, 3], folds[:count])


# ---------------------------------------------------------------------------------------------- plan


def plan_arguments(vector: io.Vector, variant: Variant) -> tuple[dict[str, Any], dict[str, Any]]:
    params = vector.params
    names = ["req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token"]
    names += ["full_to_swa_index_mapping"] * params["has_lut"]
    names += ["req_to_verify_expected_tokens", "req_to_verify_expected_tokens_valid_lens"] * params["has_expected_pool"]
    arrays = {name: narrow(vector.arrays[name], variant) for name in names}
    static_names = ("swa_window_size", "verify_capacity", "write_req_capacity", "kv_token_id_vs_position_offset")
    return arrays, {"padding_req": 0, **{name: params[name] for name in static_names}}


def assert_plan(got: Plan, wanted: dict[str, np.ndarray], same: Plan, bs: int) -> None:
    """``got`` is what a file holds and, where files are silent, what the reference plans."""
    checks, segments = got.verify, got.write
    np.testing.assert_array_equal(checks.enable, wanted["enable"])
    np.testing.assert_array_equal(checks.num_valid, wanted["verify_num_valid"])
    if int(wanted["enable"][0]):
        live = int(wanted["verify_num_valid"][0])
        for name in ("slot_indices", "expected_tokens", "expected_positions", "prev_slot_indices"):
            np.testing.assert_array_equal(getattr(checks, name)[:live], wanted[f"verify_{name}"][:live], err_msg=name)
        np.testing.assert_array_equal(checks.batch_rows[:live], same.verify.batch_rows[:live])
    np.testing.assert_array_equal(checks.row_status, np.zeros(bs, np.int32))
    np.testing.assert_array_equal(segments.write_offsets, wanted["write_offsets"])
    np.testing.assert_array_equal(segments.write_seed_slot_indices[:bs], wanted["write_seed_slot_indices"][:bs])
    np.testing.assert_array_equal(segments.write_seed_slot_indices[bs:], same.write.write_seed_slot_indices[bs:])
    np.testing.assert_array_equal(segments.write_num_valid_reqs, wanted["write_num_valid_reqs"])
    assert checks.slot_indices.dtype == segments.write_offsets.dtype == same.verify.slot_indices.dtype


@every_run("plan")
def test_plan(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    arrays, static = plan_arguments(vector, variant)
    with integer_width(implementation, variant):
        got = implementation.call("plan", arrays, static)
    wanted = {name.removeprefix("out_"): values for name, values in vector.arrays.items() if name.startswith("out_")}
    assert_plan(got, wanted, REFERENCE.call("plan", arrays, static), bs=vector.arrays["req_pool_indices"].size)


# ---------------------------------------------------------------------------------------------- verify and write


@dataclasses.dataclass(frozen=True)
class Launch:
    """A verify or write launch of a file. tag: its launch tag. most_rows: more rows than it can report."""

    op: str
    tag: int
    arrays: dict[str, Any]
    static: dict[str, Any]
    most_rows: int

    def run(self, implementation: Implementation, log: ViolationLog) -> Any:
        return implementation.call(self.op, {"log": log, **self.arrays}, self.static)

    def rows(self) -> list[io.Row]:
        """All rows that the launch reports, by the reference."""
        result = self.run(REFERENCE, io.empty_log(self.most_rows))
        return io.rows_of(result.log.ring, 0, int(result.log.write_index[0]))


def _sources(vector: io.Vector) -> tuple[dict[str, Any], dict[str, Any]]:
    described = vector.params["sources"]
    sources, buffers = io.sources_and_buffers(described, [vector.arrays[f"src{k}"] for k in range(len(described))])
    return {"real_kv_buffers": buffers}, {"real_kv_sources": sources, "real_kv_hash_mode": vector.params["real_kv_hash_mode"]}


def verify_launch(vector: io.Vector, variant: Variant) -> Launch:
    arrays, tag = vector.arrays, vector.params["kernel_kind"]
    index = np.int64 if variant.x64 else np.int32
    plan = VerifyPlan(
        slot_indices=narrow(arrays["verify_slot_indices"], variant),
        expected_tokens=narrow(arrays["verify_expected_tokens"], variant),
        expected_positions=narrow(arrays["verify_expected_positions"], variant),
        prev_slot_indices=narrow(arrays["verify_prev_slot_indices"], variant),
        batch_rows=np.zeros(0, index),
        num_valid=arrays["verify_num_valid"],
        enable=arrays["enable"],
        row_status=np.zeros(0, np.int32),
        req_pool_indices=np.zeros(0, index),
    )
    more, static = _sources(vector)
    static.update(launch_tag=tag, check_verify_expected_token=vector.params["check_verify_expected_token"], padding_slot=0)
    inputs = {"records": io.records_from(arrays["canary_buf_before"]), "plan": plan, **more}
    return Launch("verify", tag, inputs, {**static, "extended_checks": variant.extended}, arrays["verify_slot_indices"].size + 8)


def write_launch(vector: io.Vector, variant: Variant) -> Launch:
    arrays, tag = vector.arrays, vector.params["kernel_kind"]
    plan = WritePlan(
        write_offsets=narrow(arrays["write_offsets"], variant),
        write_seed_slot_indices=narrow(arrays["write_seed_slot_indices"], variant),
        write_num_valid_reqs=arrays["write_num_valid_reqs"],
        req_pool_indices=np.zeros(0, np.int64 if variant.x64 else np.int32),
    )
    more, static = _sources(vector)
    names = ["input_ids", "positions", "out_cache_loc"]
    names += ["expected_input_tokens", "expected_input_positions"] * vector.params["enable_write_input_assert"]
    more.update({name: narrow(arrays[name], variant) for name in names})
    more["enable_chain_position_assert"] = arrays["enable_chain_position_assert"]
    static.update(launch_tag=tag, enable_write_input_assert=vector.params["enable_write_input_assert"], padding_slot=0)
    inputs = {"records": io.records_from(arrays["canary_buf_before"]), "plan": plan, **more}
    most_rows = 3 * arrays["input_ids"].size + 2 * arrays["write_offsets"].size + 8
    return Launch("write", tag, inputs, {**static, "extended_checks": variant.extended}, most_rows)


def check_launch(vector: io.Vector, launch: Launch, plain: Launch, implementation: Implementation, variant: Variant) -> Any:
    """Run a launch and compare its log with the file, and with the reference where the file is silent.

    plain: the same launch without extended checks.
    """
    arrays, tag = vector.arrays, launch.tag
    before, plain_rows, all_rows = io.log_before(vector, tag), plain.rows(), launch.rows()
    index_before, index_after = int(arrays["violation_write_index_before"][0]), int(arrays["violation_write_index_after"][0])
    golden_ring = io.ring_words(arrays["violation_ring_after"])
    # The reference's rows are the file's: then its full list stands in where the file's ring is too small.
    io.assert_launch_rows(golden_ring, index_before, index_after, plain_rows, io.GOLDEN_COLUMNS)
    io.assert_same_rows(io.golden_rows(all_rows), [row[: io.GOLDEN_COLUMNS] for row in plain_rows])

    with integer_width(implementation, variant):
        result = launch.run(implementation, before)
        # The file's ring may be too small for the rows of more checks: once more with room for all of them.
        room = before.ring.shape[0] - max(index_before, 0)
        roomy = launch.run(implementation, io.empty_log(launch.most_rows)) if variant.extended and len(all_rows) > room else None
    expected = launch.run(REFERENCE, before)

    for counter in ("slot_run_counter", "kernel_run_counter"):
        wanted = io.counters_of(getattr(before, counter))
        wanted[tag] = int(arrays[f"{counter}_after"][0]) % 2**64
        assert io.counters_of(getattr(result.log, counter)) == wanted, counter
    if not variant.extended:
        np.testing.assert_array_equal(result.log.write_index, arrays["violation_write_index_after"])
    index = int(result.log.write_index[0])
    np.testing.assert_array_equal(result.log.write_index, expected.log.write_index)
    io.assert_launch_rows(result.log.ring, index_before, index, all_rows, RING_COLUMNS)
    capacity = before.ring.shape[0]
    for kept in (slice(0, min(index_before, capacity)), slice(min(index, capacity), None)):
        np.testing.assert_array_equal(result.log.ring[kept], before.ring[kept])
    if roomy is not None:
        io.assert_launch_rows(roomy.log.ring, 0, int(roomy.log.write_index[0]), all_rows, RING_COLUMNS)
    np.testing.assert_array_equal(result.verdict, expected.verdict)
    return result


@every_run("verify")
def test_verify(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    plain = verify_launch(vector, dataclasses.replace(variant, extended=False))
    check_launch(vector, verify_launch(vector, variant), plain, implementation, variant)


@every_run("write")
def test_write(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    if vector.params["order_sensitive"] and not implementation.in_order:
        pytest.skip("order_sensitive: requests of the launch write each other's slots")
    plain = write_launch(vector, dataclasses.replace(variant, extended=False))
    result = check_launch(vector, write_launch(vector, variant), plain, implementation, variant)
    before, after = vector.arrays["canary_buf_before"], vector.arrays["canary_buf_after"]
    np.testing.assert_array_equal(io.record_bytes(result.records, before), after)


# ---------------------------------------------------------------------------------------------- scatter


@every_run("scatter")
def test_scatter(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    arrays = {name: narrow(vector.arrays[name], variant) for name in ("flat_in", "offsets", "req_pool_indices")}
    with integer_width(implementation, variant):
        result = implementation.call("scatter_req_token_ids", {**arrays, "pool_out": vector.arrays["pool_before"]}, {})
    np.testing.assert_array_equal(result.pool, vector.arrays["pool_after"])
    np.testing.assert_array_equal(result.status, np.zeros(arrays["req_pool_indices"].shape[0], np.int32))


# ---------------------------------------------------------------------------------------------- traces


class Trace:
    """A run of many steps in one implementation; launches are checked against the file and against a reference run as they happen.

    launches: (step, number in launch_order) to all rows of the launch. total: rows of the whole run.
    """

    def __init__(self, vector: io.Vector, implementation: Implementation, variant: Variant, *, fused: bool, ring_capacity: int) -> None:
        self.vector, self.implementation, self.variant, self.fused = vector, implementation, variant, fused
        self.params, self.arrays = vector.params, vector.arrays
        self.log = io.empty_log(ring_capacity)
        self.pool = self.arrays["expected_pool_init"]
        self.launches: dict[tuple[int, int], list[io.Row]] = {}
        self.verdicts: dict[tuple[int, int], np.ndarray] = {}

    @property
    def total(self) -> int:
        return int(self.log.write_index[0])

    def at(self, name: str, step: int) -> np.ndarray:
        """An array of a step in the variant's width; the width is one for the whole trace."""
        return narrow(self.arrays[name][step], self.variant, like=self.arrays[name])

    def run(self, check_step: Callable[[Trace, int, dict[str, np.ndarray]], None]) -> Trace:
        for step in range(self.params["steps"]):
            check_step(self, step, self._step(step))
        return self

    def _step(self, step: int) -> dict[str, np.ndarray]:
        """One step; returns the buffers at its end by tag."""
        self.pool = self._scatter(step)
        self.plans = {group: self._plan(group, step) for group in self.params["groups"]}
        buffers = {name[4:-7]: self.arrays[name][step] for name in self.arrays if name.startswith("buf_") and name.endswith("_before")}
        for number, launch in enumerate(self.params["launch_order"]):
            op, tag, *on = launch.split()
            if op == "sweep-verify" and not self.arrays["sweep_ran"][step]:
                continue
            before = self.total
            records = io.records_from(buffers[on[-1] if on else tag])
            if op == "write":
                result = self._write(tag, step, records)
                buffers[tag] = io.record_bytes(result.records, buffers[tag])
            else:
                result = self._verify(tag, step, records) if op == "verify" else self._sweep(tag, step, records)
            self.log = result.log
            capacity = self.log.ring.shape[0]
            self.launches[step, number] = io.rows_of(self.log.ring, min(before, capacity), min(self.total, capacity))
            self.verdicts[step, number] = result.verdict
        return buffers

    def _call(self, op: str, arrays: dict[str, Any], **static: Any) -> Any:
        return self.implementation.call(op, arrays, static)

    def _scatter(self, step: int) -> np.ndarray:
        bs = int(self.arrays["scat_bs"][step])
        if not self.params["enable_verify_token_assert"] or bs == 0:
            return self.pool
        # One shape for all steps: rows past the step's are padding.
        offsets, rows = self.at("scat_offsets", step).copy(), self.at("req_pool_indices", step).copy()
        offsets[bs:], rows[bs:] = offsets[bs], -1
        arrays = {"flat_in": self.at("scat_flat", step), "offsets": offsets, "req_pool_indices": rows, "pool_out": self.pool}
        result = self._call("scatter_req_token_ids", arrays)
        assert not result.status.any()
        return result.pool

    def _batch(self, group: str, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {name: self.at(name, step) for name in ("req_pool_indices", "prefix_lens", "req_to_token")}
        static = {"padding_req": 0, "swa_window_size": 0, "kv_token_id_vs_position_offset": self.params["kv_token_id_vs_position_offset"]}
        if group == "SWA":
            arrays["full_to_swa_index_mapping"] = self.at("lut", step)
            static["swa_window_size"] = self.params["swa_window_size"]
        if self.params["enable_verify_token_assert"]:
            arrays["req_to_verify_expected_tokens"] = self.pool
            arrays["req_to_verify_expected_tokens_valid_lens"] = self.at("valid_lens", step)
        return arrays, static

    def _plan(self, group: str, step: int) -> Plan:
        arrays, static = self._batch(group, step)
        arrays["extend_seq_lens"] = self.at("extend_seq_lens", step)
        return self._call(
            "plan", arrays, **static, verify_capacity=self.params["verify_capacity"], write_req_capacity=self.params["write_req_capacity"]
        )

    def _launch(self, tag: str, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all launches of a tag take: HEAD looks at no bytes, TAIL and SWEEP at the sources of their half."""
        when, half, group = tag.split("_")
        static = {"launch_tag": self.params["tags"][tag], "padding_slot": 0, "extended_checks": self.variant.extended}
        arrays: dict[str, Any] = {"log": self.log}
        if when != "HEAD":
            described = self.params["sources"][f"{group}_{half}"]
            data = [self.arrays[f"{group}_{half}_src{k}"][step] for k in range(len(described))]
            static["real_kv_sources"], arrays["real_kv_buffers"] = io.sources_and_buffers(described, data)
            static["real_kv_hash_mode"] = self.params["real_kv_hash_mode"]
        return arrays, static

    def _verify(self, tag: str, step: int, records: np.ndarray) -> Any:
        group = tag.split("_")[2]
        arrays, static = self._launch(tag, step)
        static["check_verify_expected_token"] = self.params["enable_verify_token_assert"]
        if not self.fused:
            return self._call("verify", {**arrays, "records": records, "plan": self.plans[group].verify}, **static)
        batch, batch_static = self._batch(group, step)
        return self._call("verify_fused", {**arrays, **batch, "records": records}, **static, **batch_static)

    def _write(self, tag: str, step: int, records: np.ndarray) -> Any:
        group = tag.split("_")[2]
        arrays, static = self._launch(tag, step)
        asserted = self.params["enable_write_input_assert"]
        for name in ["input_ids", "positions"] + ["expected_input_tokens", "expected_input_positions"] * asserted:
            arrays[name] = self.at(name, step)
        arrays["out_cache_loc"] = self.at(f"{group}_out_cache_loc_canary", step)
        arrays["enable_chain_position_assert"] = self.arrays["enable_chain_position_assert"][step].reshape(1)
        return self._call(
            "write", {**arrays, "records": records, "plan": self.plans[group].write}, **static, enable_write_input_assert=asserted
        )

    def _sweep(self, tag: str, step: int, records: np.ndarray) -> Any:
        group = tag.split("_")[2]
        arrays, static = self._launch(tag, step)
        slots = self.at(f"{group}_sweep_slot_indices", step)
        index = np.int64 if self.variant.x64 else np.int32
        plan = VerifyPlan(
            slot_indices=slots,
            expected_tokens=np.full(slots.shape[0], -1, index),
            expected_positions=self.at(f"{group}_sweep_positions", step),
            prev_slot_indices=self.at(f"{group}_sweep_prev_slot_indices", step),
            batch_rows=np.zeros(0, index),
            num_valid=self.arrays[f"{group}_sweep_num_valid"][step].reshape(1),
            enable=np.ones(1, np.int32),
            row_status=np.zeros(0, np.int32),
            req_pool_indices=np.zeros(0, index),
        )
        return self._call("verify", {**arrays, "records": records, "plan": plan}, **static, check_verify_expected_token=False)


def check_step_against_file(trace: Trace, step: int, buffers: dict[str, np.ndarray]) -> None:
    """Everything that a trace file says about a step, ring rows apart."""
    arrays = trace.arrays
    for tag, buffer in buffers.items():
        np.testing.assert_array_equal(buffer, arrays[f"buf_{tag}_after"][step], err_msg=f"step {step} buf {tag}")
    np.testing.assert_array_equal(trace.pool, arrays["expected_pool"][step], err_msg=f"step {step} expected pool")
    counters = {"slot_run_counter": "slot_run_counters_after", "kernel_run_counter": "kernel_run_counters_after"}
    for counter, name in counters.items():
        assert io.counters_of(getattr(trace.log, counter)) == [int(n) for n in arrays[name][step]], f"step {step} {counter}"


@functools.cache
def reference_trace(vector: io.Vector, *, extended: bool) -> Trace:
    """The reference's run with a ring that holds every row, checked against the file; its log is what the others are compared with."""
    capacity = 1 << 10
    while True:
        trace = Trace(vector, REFERENCE, Variant(x64=True, extended=extended), fused=False, ring_capacity=capacity)
        trace.run(check_step_against_file)
        if trace.total <= capacity:
            return trace
        capacity = trace.total


def check_rows_against_file(trace: Trace, vector: io.Vector) -> None:
    """A run whose ring held every row agrees with the file's smaller ring, launch by launch."""
    index = 0
    for (step, number), rows in sorted(trace.launches.items()):
        after = int(vector.arrays["write_index_after_launch"][step, number])
        io.assert_launch_rows(
            io.ring_words(vector.arrays["violation_ring_after"][step]), index, after, io.golden_rows(rows), io.GOLDEN_COLUMNS
        )
        index = after
    launched = {(int(s), int(n)) for s, n in zip(*np.nonzero(vector.arrays["write_index_after_launch"] >= 0), strict=True)}
    assert set(trace.launches) == launched
    assert [int(n) for n in vector.arrays["violation_write_index_after"][-1]] == [index]


def check_trace(vector: io.Vector, implementation: Implementation, variant: Variant, *, fused: bool) -> None:
    known = reference_trace(vector, extended=variant.extended)
    check_rows_against_file(known, vector)
    params = vector.params
    capacity = known.total + 8 if variant.extended else params["ring_capacity"]

    def check_step(trace: Trace, step: int, buffers: dict[str, np.ndarray]) -> None:
        check_step_against_file(trace, step, buffers)
        for group in params["groups"]:
            wanted = {n.removeprefix(f"{group}_out_"): a[step] for n, a in vector.arrays.items() if n.startswith(f"{group}_out_")}
            assert_plan(trace.plans[group], wanted, trace.plans[group], bs=vector.arrays["req_pool_indices"].shape[1])

    with integer_width(implementation, variant):
        trace = Trace(vector, implementation, variant, fused=fused, ring_capacity=capacity).run(check_step)

    assert set(trace.launches) == set(known.launches)
    index = 0
    for key, rows in known.launches.items():
        after = index + len(rows)
        if after <= capacity:
            io.assert_same_rows(trace.launches[key], rows)
        else:
            assert len(trace.launches[key]) == max(0, capacity - index)
            io.assert_among(trace.launches[key], rows)
        index = after
        np.testing.assert_array_equal(trace.verdicts[key], known.verdicts[key])
    assert trace.total == index
    if not variant.extended:
        np.testing.assert_array_equal(trace.log.write_index, vector.arrays["violation_write_index_after"][-1])


@every_run("trace")
def test_trace(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    check_trace(vector, implementation, variant, fused=False)


@every_run("trace")
def test_trace_fused(vector: io.Vector, implementation: Implementation, variant: Variant) -> None:
    """Same counts and rows when HEAD and TAIL verify straight from the tables; a plan that overflowed verified nothing there."""
    if any(not vector.arrays[f"{group}_out_enable"].all() for group in vector.params["groups"]):
        pytest.skip("the plan overflowed its capacity in some step")
    check_trace(vector, implementation, variant, fused=True)


# ---------------------------------------------------------------------------------------------- source factories


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in io.factory_calls()])
def test_source_factory(call: dict[str, Any]) -> None:
    kvc = public_api()
    arguments = dict(call["args"])

    def buffer() -> Any:
        return jax.ShapeDtypeStruct(tuple(arguments.pop("shape")), jnp.dtype(arguments.pop("dtype")))

    def make() -> Any:
        match call["fn"]:
            case "_clip_read_bytes_aligned":
                return kvc.clip_read_bytes_aligned(**arguments)
            case "make_row_source":
                return kvc.make_row_source(layer_buffer=buffer(), **arguments)
            case "make_packed_source":
                return kvc.make_packed_source(buffer=buffer(), **arguments)
            case "RealKvSource":
                return (kvc.RealKvSource(shape=tuple(arguments.pop("shape")), dtype="uint8", **arguments),)
        raise AssertionError(call["fn"])

    if "error" in call:
        error = {"ValueError": ValueError, "TypeError": TypeError}[call["error"]]
        with pytest.raises(error) as raised:
            make()
        assert str(raised.value).split(" (shape=")[0] == call["message"].split(" (shape=")[0]
        return
    result = make()
    if isinstance(call["result"], list):
        assert isinstance(result, tuple)
        names = ("shape", "page_size", "num_bytes_per_token", "read_bytes")
        result = [{name: getattr(source, name) for name in names} for source in result]
        result = [{**source, "shape": list(source["shape"])} for source in result]
    assert result == call["result"]


# ---------------------------------------------------------------------------------------------- the files themselves


def test_reason_bits_of_the_files_are_the_contract() -> None:
    assert sum(reason for reason in FailReason if reason <= io.GOLDEN_REASONS) == io.GOLDEN_REASONS
    assert Column.REASON == io.GOLDEN_COLUMNS - 1
