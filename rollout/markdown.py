"""Tables in Markdown, for texts that Prefect's UI shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def cell(text: str) -> str:
    """`text` as it is, within one cell: no tag, no line break and no further cell comes of it."""
    return " ".join(escape(text, quote=False).replace("|", "\\|").split())


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str] = ()) -> list[str]:
    """Lines of a table; `align` has a column's `---:` or `:---`, `---` where it says nothing."""
    rule = [*align, *["---"] * (len(header) - len(align))]
    return [_line(map(cell, header)), "|" + "|".join(rule) + "|", *(_line(map(cell, row)) for row in rows)]


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {text} |" if text else " |" for text in cells)
