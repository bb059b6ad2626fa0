"""Progress bars and tables of the example engine's commands, by rich."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from jax_kvcanary.serving.weights import require


def console() -> Any:
    """Where the commands print; ImportError naming the extra without ``rich``."""
    made = require("rich.console").Console(soft_wrap=True, markup=False, highlight=False)
    if not made.is_terminal:
        made.width = 150
    return made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log lines below ERROR are left out: the command prints what it found itself."""
    log = logging.getLogger("jax_kvcanary")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def progress(out: Any) -> Any:
    """A progress bar to use as a context manager."""
    bars = require("rich.progress")
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    return bars.Progress(*columns, console=out, transient=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    """A table to print."""
    made = require("rich.table").Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made
