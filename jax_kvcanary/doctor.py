"""What is installed, what is loaded, what runs where, and what is missing: the report of ``python -m jax_kvcanary doctor``."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import jax
import jaxlib
import numpy as np

import jax_kvcanary
from jax_kvcanary import backend, spec

_OPTIONAL = {
    "pytest": "runs the tests (extra 'test')",
    "hypothesis": "runs the property tests (extra 'test')",
}


def report() -> tuple[list[str], list[str]]:
    """Lines of the report, and what is missing."""
    missing: list[str] = []
    lines = [
        f"jax_kvcanary {jax_kvcanary.__version__}, contract version {spec.TARGET_VERSION}",
        f"Python {platform.python_version()} ({sys.executable})",
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__} (supported: {'.'.join(map(str, backend.MIN_JAXLIB))} to the newest)",
        f"x64 {'on' if jax.dtypes.canonicalize_dtype(np.int64) == np.int64 else 'off'}",
        *_modules(missing),
        *_devices(missing),
        *_tools(),
    ]
    for name, purpose in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name}: {purpose}")
    return lines, missing


def _modules(missing: list[str]) -> Iterator[str]:
    for name, info in backend.backend_info().items():
        yield f"{name}: {info.detail}"
        if name == "cpu" and not info.compiled:
            missing.append("the CPU module: install the package with a C++17 compiler (pip install .)")
    yield "targets: " + ", ".join(spec.TARGETS.values())
    yield "other platforms (TPU): the plain JAX implementation"


def _devices(missing: list[str]) -> Iterator[str]:
    try:
        devices = jax.devices()
    except RuntimeError as cause:
        missing.append(f"a usable JAX backend: {cause}")
        return
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    yield f"devices: {len(devices)}: " + ", ".join(kinds)
    if any(device.platform == "gpu" for device in devices) and not backend.backend_info()["cuda"].compiled:
        missing.append("the CUDA module: there is a GPU, but the package was built without nvcc (JAX_KVCANARY_CUDA=ON pip install .)")


def _tools() -> Iterator[str]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        yield "nvcc: not found (needed only to build the CUDA module)"
        return
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = [line.strip() for line in out.splitlines() if "release" in line]
    yield f"nvcc: {release[0] if release else nvcc}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 if something that the package needs is missing."""
    lines, missing = report()
    print("\n".join(lines))
    print("missing: " + ("; ".join(missing) if missing else "nothing"))
    return 1 if any("module" in item or "backend" in item for item in missing) else 0
