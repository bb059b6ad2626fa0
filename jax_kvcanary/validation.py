"""Checks made while tracing: static values, operand shapes and dtypes, and the widths of integer operands.

Every message says what is wrong, the rule and the value. Nothing here looks at the data of a traced array.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import spec

_E = TypeVar("_E", bound=enum.IntEnum)
_T = TypeVar("_T")
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

IMPLEMENTATIONS = ("auto", "ffi", "jax")


def error(text: str) -> ValueError:
    """A ValueError in the library's voice."""
    return ValueError(f"kv-canary: {text}")


def type_error(text: str) -> TypeError:
    """A TypeError in the library's voice."""
    return TypeError(f"kv-canary: {text}")


# ---------------------------------------------------------------------------------------------- static values


def static_int(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """``value`` as a Python int; TypeError for bool, float, None, str and traced values, ValueError out of bounds."""
    if isinstance(value, jax.core.Tracer):
        raise type_error(f"{name} must be a static Python integer, got a traced value; pass it as a static argument")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise type_error(f"{name} must be an int, got {type_name(value)}")
    result = int(value)
    if minimum is not None and result < minimum:
        raise error(f"{name} must be >= {minimum}, got {result}")
    if maximum is not None and result > maximum:
        raise error(f"{name} must be <= {maximum}, got {result}")
    return result


def static_bool(name: str, value: Any) -> bool:
    """``value`` as a Python bool; TypeError for anything else, traced values included."""
    if isinstance(value, jax.core.Tracer):
        raise type_error(f"{name} must be a static Python bool, got a traced value; pass it as a static argument")
    if not isinstance(value, (bool, np.bool_)):
        raise type_error(f"{name} must be a bool, got {type_name(value)}")
    return bool(value)


def static_enum(name: str, value: Any, cls: type[_E]) -> _E:
    """``value`` (a member or its number) as a member of ``cls``."""
    if isinstance(value, enum.Enum) and not isinstance(value, cls):
        raise type_error(f"{name} must be a {cls.__name__}, got {type_name(value)}")
    number = static_int(name, value)
    try:
        return cls(number)
    except ValueError:
        known = ", ".join(f"{member.name}={member.value}" for member in cls)
        raise error(f"{name} must be one of {known}, got {number}") from None


def static_capacity(name: str, value: Any) -> int:
    """A size that ends up in 32-bit arithmetic: 0 to 2**31 - 1. Neither -1 nor sys.maxsize means anything special."""
    capacity = static_int(name, value)
    if capacity < 0:
        raise error(f"{name} must be non-negative, got {capacity}")
    return fits_int32(name, capacity)


def fits_int32(name: str, value: int) -> int:
    """``value``, or ValueError if it is above the int32 range."""
    if value > spec.INT32_MAX:
        raise error(f"{name} must fit in int32 (at most {spec.INT32_MAX}), got {value}")
    return value


def optional_slot(name: str, value: Any) -> tuple[bool, int]:
    """(given, value) of a padding slot or row: None means that there is none."""
    if value is None:
        return False, 0
    return True, static_int(name, value, minimum=_INT64_MIN, maximum=_INT64_MAX)


def implementation(value: Any) -> str:
    """Check the ``implementation`` argument."""
    if not isinstance(value, str):
        raise type_error(f"implementation must be a str, got {type_name(value)}")
    if value not in IMPLEMENTATIONS:
        raise error(f"implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {value!r}")
    return value


def validate_plan_statics(
    *,
    bs: int,
    write_offsets_len: int,
    write_req_capacity: int,
    verify_capacity: int,
    lut_len: int,
    has_swa_lut: bool,
) -> None:
    """Check the static sizes of a plan, before anything is lowered.

    Args:
      bs: batch rows.
      write_offsets_len: length of ``write_offsets``.
      write_req_capacity: rows that the write plan has room for.
      verify_capacity: entries that the verify plan has room for.
      lut_len: length of the full-to-window slot mapping, 0 without one.
      has_swa_lut: whether there is a mapping.

    Raises:
      ValueError: the first rule that is broken, in the order of the code below.
      TypeError: a size that is no static integer.
    """
    bs = static_int("bs", bs)
    write_offsets_len = static_int("write_offsets_len", write_offsets_len)
    write_req_capacity = static_int("write_req_capacity", write_req_capacity)
    verify_capacity = static_int("verify_capacity", verify_capacity)
    lut_len = static_int("lut_len", lut_len)
    if bs < 0:
        raise error(f"bs must be non-negative, got {bs}")
    if write_req_capacity < 0:
        raise error(f"write_req_capacity must be non-negative, got {write_req_capacity}")
    if verify_capacity < 0:
        raise error(f"verify_capacity must be non-negative, got {verify_capacity}")
    if write_offsets_len <= 0:
        raise error(f"write_offsets_len must be positive, got {write_offsets_len}")
    if lut_len < 0:
        raise error(f"lut_len must be non-negative, got {lut_len}")
    if not isinstance(has_swa_lut, bool):
        raise error(f"has_swa_lut must be bool, got {type_name(has_swa_lut)}")
    if has_swa_lut and lut_len == 0:
        raise error("lut_len must be positive when has_swa_lut is True")
    if not has_swa_lut and lut_len != 0:
        raise error("lut_len must be 0 when has_swa_lut is False")
    if write_offsets_len != write_req_capacity + 1:
        raise error(f"write_offsets_len must equal write_req_capacity + 1, got {write_offsets_len} and {write_req_capacity}")
    if bs > write_req_capacity:
        raise error(f"bs={bs} exceeds write_req_capacity={write_req_capacity}")
    fits_int32("write_req_capacity", write_req_capacity)
    fits_int32("verify_capacity", verify_capacity)


# ---------------------------------------------------------------------------------------------- operands


def operand_dtype(name: str, value: Any, what: str = "an array") -> np.dtype:
    """The dtype of an operand; TypeError for what JAX does not compute with (a description, a mask, no numbers), ValueError if deleted."""
    if isinstance(value, jax.ShapeDtypeStruct) or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise type_error(f"{name} must be {what}, got {type_name(value)}")
    if isinstance(value, np.ma.MaskedArray):
        raise type_error(f"{name} must be {what} without a mask, got MaskedArray")
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted():
        raise error(f"{name} was deleted (donated to a step); go on with what the step returned")
    return numpy_dtype(name, value.dtype)


def numpy_dtype(name: str, dtype: Any) -> np.dtype:
    """``dtype`` (a name such as "bfloat16", a type or a dtype) as a NumPy dtype of numbers; TypeError for anything else."""
    try:
        found = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):  # no dtype of NumPy's, such as that of a PRNG key
        found = None
    if found is None or not (found == np.bool_ or jax.dtypes.issubdtype(found, np.number)):
        raise type_error(f"{name} must have a dtype of numbers, got {dtype}")
    return found


def shape_of(value: Any, name: str = "the operand") -> tuple[int, ...]:
    """Shape of an array, a tracer, or nested lists; ValueError for lists of different lengths, TypeError for lists of JAX arrays."""
    if isinstance(value, (list, tuple)):
        return _list_shape(name, value)
    return tuple(value.shape) if hasattr(value, "shape") else np.shape(value)


def sequence(name: str, value: Any, of_what: str) -> tuple[Any, ...]:
    """``value`` as a tuple; TypeError for what is neither a tuple nor a list."""
    if not isinstance(value, (tuple, list)):
        raise type_error(f"{name} must be a tuple of {of_what}, got {type_name(value)}")
    return tuple(value)


def sequence_of(name: str, value: Any, cls: type[_T]) -> tuple[_T, ...]:
    """``value`` as a tuple of members of ``cls``; TypeError for anything else."""
    items = sequence(name, value, cls.__name__)
    for item in items:
        if not isinstance(item, cls):
            raise type_error(f"{name} must be a tuple of {cls.__name__}, got a {type_name(item)} in it")
    return items


def instance(name: str, value: Any, cls: type[_T]) -> _T:
    """``value`` if it is a member of ``cls``, else TypeError."""
    if not isinstance(value, cls):
        raise type_error(f"{name} must be a {cls.__name__}, got {type_name(value)}")
    return value


def function(name: str, value: Any) -> Any:
    """``value`` if it can be called, else TypeError."""
    if not callable(value):
        raise type_error(f"{name} must be a function, got {type_name(value)}")
    return value


def readable(name: str, value: Any) -> None:
    """TypeError for a traced value and for what is no array, ValueError for a deleted one."""
    if isinstance(value, jax.core.Tracer):
        raise type_error(f"{name} must be a concrete array, got a traced value; read it outside of jit")
    operand_dtype(name, value)


def host_array(name: str, value: Any) -> np.ndarray:
    """A readable NumPy or JAX array on the host."""
    readable(name, value)
    return np.asarray(value)


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int | None]) -> None:
    """Compare a shape with ``expected`` (None = any size): rank first, then every axis."""
    if len(shape) != len(expected):
        raise error(f"{name} must be {len(expected)}-D, got shape {tuple(shape)}")
    for axis, (size, wanted) in enumerate(zip(shape, expected, strict=True)):
        if wanted is not None and size != wanted:
            if len(expected) == 1:
                raise error(f"{name} length must be {wanted}, got {size}")
            raise error(f"{name} axis {axis} must be {wanted}, got {size} (shape {tuple(shape)})")


def check_dtype(name: str, dtype: Any, expected: Any) -> None:
    """Compare a dtype with the only one allowed."""
    found = numpy_dtype(name, dtype)
    if found != np.dtype(expected):
        raise error(f"{name} must have dtype {np.dtype(expected).name}, got {found.name}")


def exact_array(name: str, value: Any, shape: Sequence[int | None], dtype: Any) -> jax.Array:
    """``value`` as a JAX array of exactly this rank, these sizes and this dtype."""
    found = operand_dtype(name, value)
    check_shape(name, value.shape, shape)
    check_dtype(name, found, dtype)
    return jnp.asarray(value)


def int_array(name: str, value: Any, shape: Sequence[int | None], *, pairs: bool) -> jax.Array:
    """``value`` as an integer operand.

    Args:
      name: for messages.
      value: an int32 array, an int64 array (x64 on), a NumPy array or a list of Python ints; with ``pairs`` also uint32 ``[n, 2]``.
      shape: expected sizes, None = any.
      pairs: 64-bit values are served as uint32 pairs with x64 off. Without it they must fit int32 then.
    """
    if value is None:
        raise type_error(f"{name} must be an array, got None")
    if isinstance(value, (list, tuple)):
        value = list_to_numpy(name, value)
    dtype, value_shape = operand_dtype(name, value), tuple(value.shape)
    if pairs and len(shape) == 1 and dtype == np.uint32 and len(value_shape) == 2 and value_shape[1] == 2:
        check_shape(name, value_shape[:1], shape)
        return jnp.asarray(value)
    check_shape(name, value_shape, shape)
    if dtype in (np.dtype(np.int32), np.dtype(np.int64)):
        if dtype == np.int64 and isinstance(value, np.ndarray) and not _x64_enabled():
            return jnp.asarray(_narrow(name, value, pairs=pairs))
        return jnp.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)) and dtype.kind in "iu":
        return jnp.asarray(_numpy_integers(name, np.asarray(value), pairs=pairs))
    if pairs and dtype == np.uint64:  # a JAX array with x64 on: the same 64 bits, read as signed
        return jax.lax.bitcast_convert_type(value, jnp.int64)
    allowed = "int32 or int64, or uint32 [n, 2] pairs" if pairs and len(shape) == 1 else "int32 or int64"
    raise error(f"{name} must have dtype {allowed}, got {dtype.name}")


def flag_array(name: str, value: Any) -> jax.Array:
    """A device flag as int32 [1]: None is 0, else a bool, an int, or an integer or bool array of one element."""
    if value is None:
        return jnp.zeros((1,), jnp.int32)
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return jnp.asarray(np.array([bool(value)], np.int32))
    dtype = operand_dtype(name, value, "a bool, an int or an array of one element")
    if tuple(value.shape) not in ((), (1,)):
        raise error(f"{name} must be a scalar or have shape (1,), got shape {tuple(value.shape)}")
    if dtype.kind not in "biu":
        raise error(f"{name} must have dtype int32 or bool, got {dtype.name}")
    if isinstance(value, np.ndarray):  # JAX would cut 64 bits while x64 is off
        return jnp.asarray(np.reshape(value != 0, (1,)).astype(np.int32))
    if dtype == np.int32:
        return jnp.reshape(jnp.asarray(value), (1,))
    return jnp.reshape(jnp.asarray(value) != 0, (1,)).astype(jnp.int32)


def count_array(name: str, value: Any) -> jax.Array:
    """A count that travels on the device, int32 [1]."""
    array = int_array(name, value, (1,), pairs=False)
    if array.dtype != jnp.int32:
        raise error(f"{name} must have dtype int32, got {array.dtype.name}")
    return array


def context_array(step: Any, shard: Any) -> jax.Array:
    """uint32 [2]: step and shard, each a Python int below 2**32 or a (traced) integer scalar."""
    step, shard = _uint32_scalar("step", step), _uint32_scalar("shard", shard)
    if isinstance(step, np.generic) and isinstance(shard, np.generic):
        return jnp.asarray(np.array([step, shard], np.uint32))
    return jnp.stack([jnp.asarray(step), jnp.asarray(shard)])


def window_array(value: Any) -> jax.Array:
    """int32 [2]: first source and number of sources of a rotated check."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise error(f"source_window must be (start, count), got {len(value)} values")
        parts = [_int32_scalar(f"source_window[{i}]", part) for i, part in enumerate(value)]
        if isinstance(parts[1], np.generic) and int(parts[1]) < 1:
            raise error(f"source_window must have a count of at least 1, got {int(parts[1])}: no source would be looked at")
        if all(isinstance(part, np.generic) for part in parts):
            return jnp.asarray(np.array(parts, np.int32))
        return jnp.stack([jnp.asarray(part) for part in parts])
    array = int_array("source_window", value, (2,), pairs=False)
    if array.dtype != jnp.int32:
        raise error(f"source_window must have dtype int32, got {array.dtype.name}")
    return array


def _x64_enabled() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def type_name(value: Any) -> str:
    return type(value).__name__


def integer_scalar(name: str, value: Any) -> Any:
    """An integer: a JAX scalar of any integer dtype as it is; NumPy arrays of one element, NumPy integers and ints as an int."""
    if not hasattr(value, "shape") or isinstance(value, np.generic):
        return static_int(name, value)
    dtype = operand_dtype(name, value, "an int or an integer scalar")
    if tuple(value.shape) not in ((), (1,)):
        raise error(f"{name} must be a scalar, got shape {tuple(value.shape)}")
    if dtype.kind not in "iu":
        raise error(f"{name} must have an integer dtype, got {dtype.name}")
    return int(value.reshape(())) if isinstance(value, np.ndarray) else jnp.reshape(jnp.asarray(value), ())


def _uint32_scalar(name: str, value: Any) -> Any:
    number = integer_scalar(name, value)
    if isinstance(number, int):
        return np.uint32(static_int(name, number, minimum=0, maximum=2**32 - 1))
    return number.astype(jnp.uint32)


def _int32_scalar(name: str, value: Any) -> Any:
    number = integer_scalar(name, value)
    if isinstance(number, int):
        return np.int32(static_int(name, number, minimum=-(2**31), maximum=spec.INT32_MAX))
    return number.astype(jnp.int32)


def _list_shape(name: str, value: Any) -> tuple[int, ...]:
    """Shape of nested lists of Python ints and NumPy arrays."""
    if isinstance(value, jax.Array):
        raise type_error(f"{name} must be an array or a list of Python ints, got a list of arrays; use jnp.stack")
    if not isinstance(value, (list, tuple)):
        return tuple(np.shape(value)) if isinstance(value, (np.ndarray, np.generic)) else ()
    shapes = {_list_shape(name, item) for item in value}
    if len(shapes) > 1:
        raise error(f"{name} must be an array or a list whose rows have one length, got shapes {sorted(shapes)} in it")
    return (len(value), *(shapes.pop() if shapes else ()))


def list_to_numpy(name: str, value: Sequence[Any]) -> np.ndarray:
    """Nested lists of Python ints as int32, or as 64 bits where they need it."""
    _list_shape(name, value)
    objects = np.array(value, dtype=object)
    for item in objects.ravel():
        static_int(f"{name} element", item, minimum=_INT64_MIN, maximum=2**64 - 1)
    if objects.size == 0:
        return np.zeros(objects.shape, np.int32)
    low, high = min(objects.ravel()), max(objects.ravel())
    if low >= -(2**31) and high <= spec.INT32_MAX:
        return objects.astype(np.int32)
    words = np.array([int(item) & (2**64 - 1) for item in objects.ravel()], np.uint64).reshape(objects.shape)
    return words.view(np.int64) if high <= _INT64_MAX else words


def _numpy_integers(name: str, value: np.ndarray, *, pairs: bool) -> np.ndarray:
    if value.dtype.kind == "i" or value.dtype.itemsize <= 2:  # small integers
        return value.astype(np.int32)
    if value.dtype.itemsize == 4:  # uint32 values, one a number
        value = value.astype(np.int64)
    elif pairs:
        value = np.ascontiguousarray(value).view(np.int64)  # the same 64 bits
    elif value.size and value.max() > _INT64_MAX:
        raise error(f"{name} must fit in int64, got {value.max()}")
    else:
        value = value.astype(np.int64)
    return value if _x64_enabled() else _narrow(name, value, pairs=pairs)


def _narrow(name: str, value: np.ndarray, *, pairs: bool) -> np.ndarray:
    """64-bit NumPy values with x64 off: as (low, high) words, or as int32 if all fit."""
    if pairs and value.ndim == 1:
        return np.ascontiguousarray(value).view(np.uint32).reshape(value.shape[0], 2)
    if value.size and (value.min() < -(2**31) or value.max() > spec.INT32_MAX):
        worst = value.max() if value.max() > spec.INT32_MAX else value.min()
        raise error(f"{name} must fit in int32 while jax_enable_x64 is off, got {worst}")
    return value.astype(np.int32)
