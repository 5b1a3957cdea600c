"""Where the parts of a rendered conversation lie."""

from __future__ import annotations

from renderers.base import RenderedTokens


def open_length_of(rendered: RenderedTokens) -> int:
    """Ids behind the last one that belongs to a message: the generation prompt."""
    indices = rendered.message_indices
    for place in range(len(indices) - 1, -1, -1):
        if indices[place] >= 0:
            return len(indices) - 1 - place
    return len(indices)


def end_of(rendered: RenderedTokens, message: int) -> tuple[int, int] | None:
    """Where a rendered assistant message ends: the place of its close token, and the end of all its ids.

    The close token is its last id that a model would sample; what follows is the template's.
    """
    if not len(rendered.message_indices) == len(rendered.sampled_mask) == len(rendered.token_ids):
        return None
    end = None
    for place in range(len(rendered.token_ids) - 1, -1, -1):
        if rendered.message_indices[place] == message:
            end = end or place + 1
            if rendered.sampled_mask[place]:
                return place, end
    return None
