"""Eight virtual CPU devices for every test, and the implementations that a test runs over."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported: devices are counted once.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if Path("/dev/nvidiactl").exists() else "cpu")

import jax
import pytest

from jax_kvcanary import backend_info


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items) or jax.default_backend() == "gpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_module() -> Iterator[None]:
    """Compiled programs go with their file: thousands in one process need more memory maps than the system gives it."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(params=["jax", "ffi"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Plain JAX and the custom call; the latter is skipped by name where its module is not built."""
    info = backend_info()["cuda" if jax.default_backend() == "gpu" else "cpu"]
    if request.param == "ffi" and not info.compiled:
        pytest.skip(info.detail)
    return request.param


@pytest.fixture
def x64():
    """64-bit values for one test."""
    with jax.enable_x64(True):
        yield
