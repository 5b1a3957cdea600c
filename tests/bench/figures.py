"""Tables of figures: medians over repetitions, as markdown to read and as JSON for machines."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

OUT = Path(__file__).parents[2] / ".cache" / "bench"
"""Where figures are written, one file of each kind per benchmark."""

Row = Sequence[str | float | int | None]


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """A markdown table; floats with two digits, null as nothing."""
    lines = [[_cell(value) for value in row] for row in [head, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the repetitions; one that a repetition lacks counts as 0 there."""
    names = list(dict.fromkeys(name for one in figures for name in one))
    return {name: median(one.get(name, 0.0) for one in figures) for name in names}


def machine() -> str:
    """The machine in words that name nobody's."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def publish(name: str, text: str, facts: dict[str, Any]) -> None:
    """Print a benchmark's tables and write them to OUT."""
    taken = datetime.now(UTC).strftime("%Y-%m-%d")
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.md").write_text(f"{taken}, {machine()}\n\n{text}\n")
    (OUT / f"{name}.json").write_text(json.dumps({"date": taken, "machine": machine(), **facts}, indent=1) + "\n")
    print(f"\n\n{taken}, {machine()}\n\n{text}\n")
