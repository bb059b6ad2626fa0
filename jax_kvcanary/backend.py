"""The compiled modules: which are there, whether they fit this jaxlib and this package, and registration of their targets.

"Not built" and "broken" differ. Without a module the operations are plain JAX and :func:`backend_info` says so; a module
that is there and does not load, or disagrees with :mod:`jax_kvcanary.spec`, raises.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jax
import jaxlib

from jax_kvcanary import spec

MIN_JAXLIB = (0, 10, 0)
"""Oldest jaxlib whose FFI runs the compiled modules."""

_MODULES = {"cpu": ("jax_kvcanary._kvcanary_cpu", "cpu"), "cuda": ("jax_kvcanary._kvcanary_cuda", "CUDA")}


@dataclasses.dataclass(frozen=True)
class BackendInfo:
    """What serves a platform.

    platform: "cpu" or "cuda". compiled: whether custom calls are registered. detail: one sentence for people.
    """

    platform: str
    compiled: bool
    detail: str


_CONSTANTS: dict[str, int] = {
    "ABI": spec.TARGET_VERSION,
    "SPLITMIX_MULTIPLIER_1": spec.SPLITMIX_MULTIPLIERS[0],
    "SPLITMIX_MULTIPLIER_2": spec.SPLITMIX_MULTIPLIERS[1],
    **{name: value for name, value in vars(spec).items() if name.isupper() and isinstance(value, int)},
    **{reason.name: int(reason) for reason in spec.FailReason if reason.name},
    **{verdict.name: int(verdict) for verdict in spec.Verdict},
    **{f"FLAG_{flag.name}": int(flag) for flag in spec.RecordFlag},
    **{f"MODE_{mode.name}": int(mode) for mode in spec.RealKvHashMode},
    **{f"TABLE_{kind.name}": int(kind) for kind in spec.TableKind},
}

_targets: dict[str, frozenset[str]] = {}
_info: dict[str, BackendInfo] = {}


def check_jaxlib(version: str) -> None:
    """Raise ImportError if jaxlib is older than the compiled modules need."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < MIN_JAXLIB:
        wanted = ".".join(map(str, MIN_JAXLIB))
        raise ImportError(f"kv-canary: jaxlib >= {wanted} is required, found {version}; upgrade jax and jaxlib together")


def check_constants(module_name: str, constants: dict[str, int]) -> None:
    """Raise ImportError if a compiled module's numbers differ from :mod:`jax_kvcanary.spec`."""
    for name, value in constants.items():
        expected = expected_constant(name)
        if expected is not None and expected != value:
            raise ImportError(
                f"kv-canary: {module_name} was built for another version of this package: {name} is {value}, expected {expected}; "
                "reinstall jax_kvcanary"
            )


def expected_constant(name: str) -> int | None:
    """What :mod:`jax_kvcanary.spec` says a constant of a compiled module is, None for one that it does not know."""
    return _CONSTANTS.get(name)


def check_ffi_version(module_name: str, constants: dict[str, int]) -> None:
    """Raise ImportError if a module was built with newer XLA FFI headers than this jaxlib's: it would break the whole backend."""
    built = (constants["FFI_API_MAJOR"], constants["FFI_API_MINOR"])
    header = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    try:
        found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
        runs = (int(found["MAJOR"]), int(found["MINOR"]))
    except (OSError, KeyError):
        return  # a jaxlib without headers says nothing; its runtime checks the version itself
    if built > runs:
        raise ImportError(
            f"kv-canary: {module_name} was built with XLA FFI {built[0]}.{built[1]}, jaxlib {jaxlib.__version__} runs {runs[0]}.{runs[1]}; "
            "upgrade jax and jaxlib, or reinstall jax_kvcanary with build isolation (it then builds with the oldest supported headers)"
        )


def load() -> None:
    """Load the compiled modules and register their targets; called once, when the package is imported."""
    if _info:
        return
    check_jaxlib(jaxlib.__version__)
    loaded = {platform: _load_module(name) for platform, (name, _) in _MODULES.items()}
    for module in loaded.values():
        if module is not None:
            check_constants(module.__name__, module.constants())
            check_ffi_version(module.__name__, module.constants())
    for platform, module in loaded.items():
        name, ffi_platform = _MODULES[platform]
        if module is None:
            _targets[platform] = frozenset()
            _info[platform] = BackendInfo(platform, False, f"{name} is not built: {platform} runs the plain JAX implementation")
            continue
        registrations = module.registrations()
        for target, capsule in registrations.items():
            jax.ffi.register_ffi_target(target, capsule, platform=ffi_platform)
        _targets[platform] = frozenset(registrations)
        _info[platform] = BackendInfo(platform, True, f"{name} is loaded, {len(registrations)} targets registered")


def has_target(platform: str, target: str) -> bool:
    """Whether a custom call of this name is registered for a JAX platform."""
    return target in _targets.get(platform, frozenset())


def backend_info() -> dict[str, BackendInfo]:
    """What serves each platform, "cpu" and "cuda"; any other platform runs the plain JAX implementation.

    Example:
      >>> sorted(backend_info())
      ['cpu', 'cuda']
    """
    return dict(_info)


def _load_module(name: str) -> ModuleType | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as cause:
        raise ImportError(f"kv-canary: {name} is installed but does not load: {cause}") from cause
