"""Python imports go one way: every module may import only modules that stand before it in the list below."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary

PACKAGE = Path(jax_kvcanary.__file__).parent

ORDER = [
    "spec",
    "validation",
    "html",
    "config",
    "state",
    "sources",
    "tables",
    "batch",
    "layouts",
    "presets",
    "reference",
    "pure",
    "backend",
    "lowering",
    "ops",
    "moves",
    "capacities",
    "report",
    "digest",
    "sharding",
    "groups",
    "report_header",
    "canary_state",
    "canary",
    "sweep",
    "recorder",
    "history",
    "causes",
    "events",
    "metrics",
    "monitor",
    "dump",
    "explain",
    "inspection",
    "viz",
    "faults",
    "serving",
    "tour",
    "__init__",
    "doctor",
    "cli",
    "__main__",
]
COMPILED = {"_kvcanary_cpu", "_kvcanary_cuda"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    """The module's name, or its folder's for a module of a subpackage."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_layers(path: Path) -> set[str]:
    """Layers of this package that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the direction"
            names.update([node.module] if node.module != "jax_kvcanary" else [f"jax_kvcanary.{alias.name}" for alias in node.names])
    layers = {name.split(".")[1] for name in names if name.startswith("jax_kvcanary.")}
    return layers | ({"__init__"} if "jax_kvcanary" in names else set())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_backwards(path: Path) -> None:
    layer = layer_of(path)
    assert layer in ORDER, f"give {layer} a place in ORDER"
    for imported in imported_layers(path) - {layer} - COMPILED:
        assert imported in ORDER, f"give {imported} a place in ORDER"
        assert ORDER.index(imported) < ORDER.index(layer), f"{layer} imports {imported}"


@pytest.mark.parametrize("path", [path for path in MODULES if layer_of(path) == "reference"], ids=lambda path: path.name)
def test_the_reference_imports_no_implementation(path: Path) -> None:
    assert imported_layers(path) <= {"reference", "spec", "state"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_holds(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), path


def test_all_is_what_the_package_offers() -> None:
    assert len(set(jax_kvcanary.__all__)) == len(jax_kvcanary.__all__)
    assert [name for name in jax_kvcanary.__all__ if not hasattr(jax_kvcanary, name)] == []
    assert isinstance(jax_kvcanary.__version__, str)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    "name",
    [
        "validation",
        "state",
        "sources",
        "tables",
        "backend",
        "lowering",
        "ops",
        "moves",
        "capacities",
        "report",
        "digest",
        "sharding",
        "groups",
        "layouts",
        "presets",
        "batch",
        "config",
        "canary",
        "report_header",
        "monitor",
        "faults",
    ],
)
def test_the_examples_run(name: str) -> None:
    """Docstring examples, with the names that a user imports."""
    offered = {name: getattr(jax_kvcanary, name) for name in jax_kvcanary.__all__}
    names = offered | {"jax": jax, "jnp": jnp, "np": np, "sys": sys}
    assert doctest.testmod(importlib.import_module(f"jax_kvcanary.{name}"), extraglobs=names).failed == 0


def test_the_two_lines_of_the_readme() -> None:
    """The sketch of a step runs with a pool, a forward pass and a batch put in."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    code = text.split("two lines around the forward pass", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    sketch, last = code.split("monitor.observe(report)", 1)
    kv = [jnp.ones((8, 4, 2, 16), jnp.float32)]
    names = {"jax": jax, "kvc": jax_kvcanary, "functools": functools, "kv": kv, "forward": lambda params, kv, batch: (batch.input_ids, kv)}
    exec(compile(sketch, "README.md", "exec"), names)
    batch = jax_kvcanary.CanaryBatch(
        req_pool_indices=jnp.array([1]),
        prefix_lens=jnp.array([0]),
        extend_seq_lens=jnp.array([2]),
        req_to_token=jnp.array([[0, 0], [4, 5]]),
        input_ids=jnp.array([7, 8]),
    )
    *_, verdict, report = names["step"](None, kv, names["state"], batch)
    assert verdict.verdict.tolist() == [1] and names["monitor"].observe(report) == [] and "names request" in last


def test_the_first_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs as printed, and sees the touched slot alone."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    code = text.split("in fifteen lines that run", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    exec(compile(code, "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1 violation in 2 launches over 6 slots."
    assert second.startswith("HEAD_K_FULL found a violation at slot 3 (position 1, batch row 0, request row 1): its bytes hash to 0x")
