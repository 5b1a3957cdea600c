"""Bar charts as one SVG picture, small enough to be carried by the artifact that shows it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _ROW, _LEFT, _RIGHT = 640, 22, 190, 110


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Counts by label, drawn as a bar each under a title."""

    title: str
    bars: Sequence[tuple[str, int]]


def svg(charts: Sequence[Chart]) -> str:
    """The charts below each other: a bar per label, its count beside it."""
    parts, y = [], 10
    for chart in charts:
        most = max((n for _, n in chart.bars), default=0) or 1
        y += _ROW
        parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(chart.title)}</text>')
        for label, n in chart.bars:
            y += _ROW
            width = (_WIDTH - _LEFT - _RIGHT) * n / most
            parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(label)}</text>')
            parts.append(f'<rect x="{_LEFT}" y="{y - 13}" width="{width:.1f}" height="16" fill="#4878a8"/>')
            parts.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y}">{n}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 14}" '
    style = 'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    return f"{head}{style}{''.join(parts)}</svg>"


def data_url(picture: str) -> str:
    """An SVG picture as a URL that carries it: an image artifact takes nothing else without a server for it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
