"""The notebooks run from top to bottom. ``python tests/test_notebooks.py`` runs them and writes what they show into them."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDED = ("nbclient", "nbformat", "ipykernel", "matplotlib")
LARGEST_PNG = 60 * 1024
SECONDS = 300
"""Of one notebook."""

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
runs = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (extra 'notebooks')")
asked = pytest.mark.skipif(os.environ.get("KVCANARY_NOTEBOOKS") != "1", reason="executes notebooks where KVCANARY_NOTEBOOKS=1")


def execute(path: Path) -> Any:
    """The notebook with new outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def cells(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["cells"])


@runs
@asked
@pytest.mark.filterwarnings("ignore")  # of the client's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = execute(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.execution_count for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_clean(path: Path) -> None:
    """Executed in order, pictures small, no errors, warnings or paths of a machine."""
    text = path.read_text()
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not re.search(rf"Warning|Traceback|/home/|{re.escape(str(Path.home()))}/|/tmp/|site-packages", text)
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures and all(len(base64.b64decode("".join(picture))) <= LARGEST_PNG for picture in pictures)


def test_there_are_four() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


def rewrite(path: Path) -> None:
    """Execute in place, without what differs between machines."""
    import nbformat

    notebook = execute(path)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                data = output.get("data", {})
                if "image/png" in data or "text/html" in data:
                    data.pop("text/plain", None)
                    data["text/plain"] = "<picture>" if "image/png" in data else "<table>"
                output.get("metadata", {}).clear()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in sys.argv[1:] or [path.stem for path in NOTEBOOKS]:
        rewrite(ROOT / "notebooks" / f"{name}.ipynb")
