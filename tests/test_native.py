"""The kernels without XLA or Python: native drivers feed them exact-size buffers full of hostile values (tests/native).

One seed is one case; a failure prints it, and ``driver_cpu --seed N --cases 1`` repeats it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent / "native"
CASES = 3000
REACHED = [
    *(f"verify_bit_{bit}" for bit in (1, 2, 4, 32, 64, 128, 256)),
    *(f"write_bit_{bit}" for bit in (8, 16, 64, 128)),
    *(f"{op}_chunked" for op in ("plan", "verify", "verify_fused", "write")),
    *("plan_enabled", "plan_disabled", "verify_quiet", "write_quiet", "scatter"),
    *("first_bad_source", "ring_overflow", "index_saturated", "order_sensitive"),
    *("verify_tolerated", "write_tolerated", "strided"),
]


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def require_sanitizers(flags: str, folder: Path) -> None:
    """Skip where the compiler cannot build with the sanitizers, or what it builds does not start."""
    if shutil.which(compiler()) is None:
        pytest.skip(f"no {compiler()}")
    source, program = folder / "probe.cc", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    for command in ([compiler(), flags, str(source), "-o", str(program)], [str(program)]):
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if result.returncode != 0:
            pytest.skip(f"{compiler()} {flags} does not work here: {(result.stderr.strip() or 'no message').splitlines()[0]}")


def build(kind: str, folder: Path) -> None:
    """Build a driver; a warning is a failure."""
    result = subprocess.run(["sh", str(NATIVE / "build.sh"), kind, str(folder)], capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr


def run(program: Path, *arguments: str) -> dict[str, int]:
    """Run a driver; how often it reached what its coverage line names."""
    result = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=1200)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("the thread sanitizer cannot place its memory under this kernel's address randomisation")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    coverage, summary = result.stdout.splitlines()[-2:]
    assert summary.endswith(" passed, 0 failed"), summary
    return {name: int(count) for name, count in (item.split("=") for item in coverage.split() if "=" in item)}


def test_cpu_kernels_stay_in_their_buffers(tmp_path: Path) -> None:
    require_sanitizers("-fsanitize=address,undefined", tmp_path)
    build("cpu-sanitized", tmp_path)
    coverage = run(tmp_path / "driver_cpu", "--cases", str(CASES))
    assert [name for name in REACHED if name not in coverage] == []


def test_cpu_kernels_do_not_race(tmp_path: Path) -> None:
    require_sanitizers("-fsanitize=thread", tmp_path)
    build("cpu-threads", tmp_path)
    coverage = run(tmp_path / "driver_cpu", "--cases", str(CASES // 3), "--seed", "100001")
    assert coverage["verify_chunked"] > 0 and coverage["verify_fused_chunked"] > 0 and coverage["write_chunked"] > 0


@pytest.mark.gpu
def test_cuda_kernels_leave_what_the_cpu_kernels_leave(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("NVCC", "nvcc")) is None:
        pytest.skip("no nvcc")
    build("cuda", tmp_path)
    coverage = run(tmp_path / "driver_cuda", "--cases", str(2 * CASES))
    assert [name for name in REACHED if name not in coverage] == []
