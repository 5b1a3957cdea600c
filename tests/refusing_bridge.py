"""Renderers whose bridge injects a fault: it always refuses, or ends otherwise behind a turn that was not closed."""

from __future__ import annotations

from typing import Any

from rollout.tito.renderer import Tito


class _RefusingBridge:
    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> Any:
        return None


class _StrayBridge(_RefusingBridge):
    """Puts a stray id behind a turn that did not sample its end."""

    def bridge_to_next_turn(self, prompt_ids: list[int], output_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        bridged = self._renderer.bridge_to_next_turn(prompt_ids, output_ids, *args, **kwargs)
        if bridged is not None and output_ids[-1] not in self._renderer.get_stop_token_ids():
            bridged.token_ids.append(0)
        return bridged


def without_bridge(tito: Tito) -> Tito:
    """Another of the same family and vocabulary; all but its bridge, which refuses, is the real renderer's."""
    return _with(tito, _RefusingBridge)


def with_stray_bridge(tito: Tito) -> Tito:
    """Another whose bridge does not end alike behind a turn that closed itself and one that did not."""
    return _with(tito, _StrayBridge)


def _with(tito: Tito, faulty: type[_RefusingBridge]) -> Tito:
    other = Tito(tito.tokenizer, tito.name)
    build = other._renderer_of
    other._renderer_of = lambda *given: faulty(build(*given))  # type: ignore[assignment]
    return other
