"""One JAX primitive an operation: result shapes, aliases, lowering to custom calls or to plain JAX, and transformations.

A primitive takes the flat operands of its operation. On a platform with a registered target it becomes one custom call
whose state operands are aliased to the results, elsewhere the plain JAX implementation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.extend.core
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_kvcanary import backend, pure, spec
from jax_kvcanary.sources import DESCRIPTOR_NUMBERS, flatten_descriptor

backend.load()

Params = dict[str, Any]
Shape = tuple[int, ...]
_FFI_PLATFORMS = ("cpu", "cuda")
_SOURCE_SCRATCH_WORDS = 32


@dataclasses.dataclass(frozen=True)
class Operation:
    """What the rules need to know about one primitive.

    plain: the operation in plain JAX.
    results: (shape, dtype) of a new array or the number of the operand that a result repeats, from shapes and params.
    scratch: number of the result whose content is unspecified, None without one.
    first_buffer: number of the first pool operand, None where there are none.
    """

    name: str
    results: Callable[[Sequence[Any], Params], list[tuple[Shape, Any] | int]]
    plain: Callable[..., Sequence[jax.Array]]
    scratch: int | None = None
    first_buffer: int | None = None

    @property
    def target(self) -> str:
        return spec.TARGETS[self.name]


def _plan_results(avals: Sequence[Any], params: Params) -> list[tuple[Shape, Any] | int]:
    index = jnp.dtype("int64") if params["wide"] else jnp.dtype("int32")
    (bs,) = avals[0].shape
    entries, rows = params["verify_capacity"], params["write_req_capacity"]
    return [
        *[((entries,), index)] * 5,
        ((1,), np.int32),  # num_valid
        ((1,), np.int32),  # enable
        ((rows + 1,), index),  # write_offsets
        ((rows,), index),  # seeds
        ((1,), np.int32),  # num_valid_reqs
        ((bs,), np.int32),  # row_status
        ((bs + 1, 2), np.uint32),  # scratch
    ]


def _verify_results(avals: Sequence[Any], params: Params) -> list[tuple[Shape, Any] | int]:
    (bs,) = avals[13].shape
    scratch = _source_scratch(params)
    return [2, 3, 4, 5, *[((bs,), np.int32)] * 4, ((scratch,), np.uint32), *_passed(18, avals, params)]


def _verify_fused_results(avals: Sequence[Any], params: Params) -> list[tuple[Shape, Any] | int]:
    (bs,) = avals[6].shape
    scratch = 2 * (bs + 1) + _source_scratch(params)
    return [2, 3, 4, 5, *[((bs,), np.int32)] * 4, ((scratch,), np.uint32), *_passed(16, avals, params)]


def _write_results(avals: Sequence[Any], params: Params) -> list[tuple[Shape, Any] | int]:
    rows, tokens, tags = avals[7].shape[0], avals[9].shape[0], avals[1].shape[1]
    words = tokens * (2 + tags) + 1 + -(-tokens // 32)  # hashes and tags of tokens, and how far they are
    scratch = 4 * -(-words // 4) + _source_scratch(params)
    return [0, 1, 2, 3, 4, 5, ((rows,), np.int32), ((scratch,), np.uint32)]


def _scatter_results(avals: Sequence[Any], params: Params) -> list[tuple[Shape, Any] | int]:
    return [3, ((avals[2].shape[0],), np.int32)]


def _source_scratch(params: Params) -> int:
    """Words that hold the source table on a device: an address and a geometry each."""
    return _SOURCE_SCRATCH_WORDS * len(params["sources"])


def _passed(first: int, avals: Sequence[Any], params: Params) -> list[int]:
    return list(range(first, len(avals))) if params["pass_through"] else []


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("plan", _plan_results, pure.plan, scratch=11),
        Operation("verify", _verify_results, pure.verify, scratch=8, first_buffer=18),
        Operation("verify_fused", _verify_fused_results, pure.verify_fused, scratch=8, first_buffer=16),
        Operation("write", _write_results, pure.write, scratch=7, first_buffer=19),
        Operation("scatter", _scatter_results, pure.scatter),
    )
}


def bind(name: str, operands: Sequence[Any], **params: Any) -> list[jax.Array]:
    """Apply the primitive of an operation to its flat operands."""
    return PRIMITIVES[name].bind(*_match_varying([_without_empty_constants(jnp.asarray(x)) for x in operands]), **params)


def _without_empty_constants(x: jax.Array) -> jax.Array:
    # jax 0.11 hoists constants out of shard_map, and XLA's partitioner crashes on a hoisted one without elements.
    return jnp.zeros(x.shape, x.dtype) if 0 in x.shape else x


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export.export(..., disabled_checks=...)`` needs to accept the library's custom calls.

    Example:
      >>> len(export_disabled_checks())
      5
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in spec.TARGETS.values()]


# ---------------------------------------------------------------------------------------------- rules


def _abstract_eval(operation: Operation, *avals: Any, **params: Any) -> list[Any]:
    out = []
    for result in operation.results(avals, params):
        if isinstance(result, int):
            out.append(avals[result].update(weak_type=False))
        else:
            out.append(_like(avals[0], *result))
    return out


def _like(aval: Any, shape: Shape, dtype: Any) -> Any:
    """An abstract array that varies over the same mesh axes as ``aval``."""
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def _aliases(operation: Operation, avals: Sequence[Any], params: Params) -> dict[int, int]:
    """Operand number to result number, for every result that repeats an operand."""
    return {source: i for i, source in enumerate(operation.results(avals, params)) if isinstance(source, int)}


def _impl(operation: Operation, *operands: Any, **params: Any) -> Sequence[jax.Array]:
    with jax.disable_jit(False):  # a custom call needs a compiled program even where jit is off
        return _jitted(operation.name, tuple(sorted(params.items())))(*operands)


@functools.lru_cache(maxsize=1024)
def _jitted(name: str, params: tuple[tuple[str, Any], ...]) -> Callable[..., Sequence[jax.Array]]:
    def call(*operands: Any) -> Sequence[jax.Array]:
        return PRIMITIVES[name].bind(*operands, **dict(params))

    call.__name__ = f"kvcanary_{name}"
    return jax.jit(call)


def _attributes(params: Params) -> dict[str, Any]:
    """Params as custom call attributes: int64 scalars, and the sources as one table."""
    out: dict[str, Any] = {"abi": np.int64(spec.TARGET_VERSION)}
    for name, value in params.items():
        if name == "implementation":
            continue
        if name == "sources":
            numbers = [number for descriptor in value for number in flatten_descriptor(descriptor)]
            assert len(numbers) == DESCRIPTOR_NUMBERS * len(value)
            out["num_sources"] = np.int64(len(value))
            out["source_table"] = np.array(numbers or [0], np.int64)
        else:
            out[name] = np.int64(int(value))
    return out


def _plain(operation: Operation, avals: Sequence[Any], params: Params) -> Callable[..., Sequence[jax.Array]]:
    static = {name: value for name, value in params.items() if name != "implementation"}
    shapes = operation.results(avals, params)

    def call(*operands: jax.Array) -> Sequence[jax.Array]:
        out = list(operation.plain(*operands, **static))
        if operation.scratch is not None:
            shape, dtype = shapes[operation.scratch]  # type: ignore[misc]
            out[operation.scratch] = jnp.zeros(shape, dtype)
        return out

    return call


def _lower_plain(operation: Operation, ctx: Any, *operands: Any, **params: Any) -> Any:
    # Inside the rule nothing tracks meshes any more: trace with bare shapes under none.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    rule = mlir.lower_fun(_plain(operation, avals, params), multiple_results=True)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return rule(ctx.replace(avals_in=avals), *operands)


def _lower_default(operation: Operation, ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["implementation"] == "ffi":
        platforms = ctx.platforms or ctx.module_context.platforms
        raise _no_target(operation, ", ".join(platforms))
    return _lower_plain(operation, ctx, *operands, **params)


def _lower_platform(operation: Operation, platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    available = backend.has_target(platform, operation.target)
    if params["implementation"] == "ffi" and not available:
        raise _no_target(operation, platform)
    if params["implementation"] == "jax" or not available:
        return _lower_plain(operation, ctx, *operands, **params)
    rule = jax.ffi.ffi_lowering(operation.target, operand_output_aliases=_aliases(operation, ctx.avals_in, params))
    return rule(ctx, *operands, **_attributes(params))


def _no_target(operation: Operation, platform: str) -> NotImplementedError:
    info = backend.backend_info().get(platform)
    detail = f" ({info.detail})" if info is not None else ""
    return NotImplementedError(
        f"kv-canary: implementation='ffi' asks for the custom call {operation.target}, which platform {platform!r} does not have{detail}; "
        "use implementation='auto' or 'jax'"
    )


def _jvp(operation: Operation, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """Results are constants, but a pool that is handed on keeps its tangent."""
    out = PRIMITIVES[operation.name].bind(*primals, **params)
    repeated = operation.results([jax.typeof(x) for x in primals], params)
    out_tangents = []
    for result, value in zip(repeated, out, strict=True):
        is_buffer = isinstance(result, int) and operation.first_buffer is not None and result >= operation.first_buffer
        out_tangents.append(tangents[result] if is_buffer else ad.Zero(jax.typeof(value).to_tangent_aval()))  # type: ignore[index]
    return out, out_tangents


def _batch(operation: Operation, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    """One launch after the other."""
    mapped = [dim is not None for dim in dims]
    batched = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]

    def one(slices: Sequence[Any]) -> Sequence[jax.Array]:
        rest = iter(slices)
        full = [next(rest) if is_mapped else x for x, is_mapped in zip(operands, mapped, strict=True)]
        return PRIMITIVES[operation.name].bind(*full, **params)

    out = jax.lax.map(one, batched)
    return list(out), [0] * len(out)


def _varying(x: Any) -> frozenset[Any]:
    aval = jax.typeof(x)
    vma = getattr(aval, "vma", None)
    if vma is None:
        vma = getattr(getattr(aval, "mat", None), "varying", None)
    return frozenset(vma or ())


def _match_varying(operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Inside ``shard_map`` with ``check_vma=True`` all operands must vary over the same mesh axes."""
    axes = [_varying(x) for x in operands]
    union = frozenset().union(*axes)
    if not union:
        return operands
    return [
        jax.lax.pcast(x, tuple(sorted(union - own, key=str)), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    ]


def _make_primitive(operation: Operation) -> jax.extend.core.Primitive:
    primitive = jax.extend.core.Primitive(f"kvcanary_{operation.name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_impl, operation))
    primitive.def_abstract_eval(functools.partial(_abstract_eval, operation))
    mlir.register_lowering(primitive, functools.partial(_lower_default, operation))
    for platform in _FFI_PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(_lower_platform, operation, platform), platform=platform)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, operation)
    batching.primitive_batchers[primitive] = functools.partial(_batch, operation)
    return primitive


PRIMITIVES = {name: _make_primitive(operation) for name, operation in OPERATIONS.items()}
