"""A renderer whose bridge always refuses, so that every extension takes the way of the full render."""

from __future__ import annotations

from typing import Any

from rollout.tito.renderer import Tito


class _RefusingBridge:
    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> None:
        return None


def without_bridge(tito: Tito) -> Tito:
    """Another of the same family and vocabulary; all but its bridge is the real renderer's."""
    other = Tito(tito.tokenizer, tito.name)
    build = other._renderer_of
    other._renderer_of = lambda *given: _RefusingBridge(build(*given))  # type: ignore[assignment]
    return other
