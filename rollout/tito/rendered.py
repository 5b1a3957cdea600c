"""What a render gives, and where the parts of a rendered conversation lie."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from renderers.base import RenderedTokens


class CannotRender(ValueError):
    """The family's renderer refuses these messages, tools or template settings; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Ids of a prompt, or of what is appended to one.

    The last `open_length` of them are the generation prompt. `refusal` says why the bridge could not
    be used, None where it was.
    """

    ids: list[int]
    open_length: int
    refusal: str | None = None


def open_length_of(rendered: RenderedTokens) -> int:
    """Ids behind the last one that belongs to a message: the generation prompt."""
    indices = rendered.message_indices
    for place in range(len(indices) - 1, -1, -1):
        if indices[place] >= 0:
            return len(indices) - 1 - place
    return len(indices)


def end_of(rendered: RenderedTokens, message: int, stop_ids: Container[int]) -> tuple[int, int] | None:
    """Where a rendered assistant message ends: the place of its close token, and the end of all its ids.

    The close token is its last id that a model would sample; what follows is the template's. A renderer
    that does not say what a model would sample is taken to mean the family's stop tokens.
    """
    indices, mask = rendered.message_indices, rendered.sampled_mask
    if len(indices) != len(rendered.token_ids):
        return None
    end = None
    for place in range(len(indices) - 1, -1, -1):
        if indices[place] == message:
            end = end or place + 1
            if mask[place] if len(mask) == len(indices) else rendered.token_ids[place] in stop_ids:
                return place, end
    return None
