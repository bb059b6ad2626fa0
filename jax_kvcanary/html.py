"""Small escaped tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Names and values, one pair a line; everything is escaped.

    Example:
      >>> table("a", [("b", "<c>")]).count("&lt;c&gt;")
      1
    """
    body = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th><td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption><b>{html.escape(title)}</b></caption>{body}</table>"


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a line of headings; everything is escaped."""
    head = "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(f'<td style="text-align:left">{html.escape(str(cell))}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><caption><b>{html.escape(title)}</b></caption><tr>{head}</tr>{body}</table>"
