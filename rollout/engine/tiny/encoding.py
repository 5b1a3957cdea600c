"""Dialogues to token ids, exactly as a session would have grown them.

The first prompt is rendered; each answer is what the model would sample behind it; the next
prompt is the renderer's bridge from those ids. Where the renderer has no bridge (the agent put
assistant messages into the history) the whole history is rendered, and must begin with the ids kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

from rollout.engine.tiny.dialogues import Dialogue, Message
from rollout.tito.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One dialogue: `tokens_T` int16 ids, `mask_T` int8, 1 where the model itself speaks."""

    tokens_T: np.ndarray
    mask_T: np.ndarray


class Encoder:
    """Tokenizer and renderer of one checkpoint directory; nothing sampled is dropped from history."""

    def __init__(self, directory: Path, *, thinking: bool = False) -> None:
        self.tokenizer = Tokenizer(directory)
        self.renderer = Qwen3Renderer(
            self.tokenizer, Qwen3RendererConfig(enable_thinking=thinking, thinking_retention="all")
        )

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """Ids of a first prompt, generation prompt on."""
        return list(self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True))

    def extend(self, kept: list[int], new: list[Message], history: list[Message], tools: list[Any] | None) -> list[int]:
        """Ids of the next prompt: `kept` (last prompt and completion) with the messages `new` behind them.

        Args:
            history: all messages so far, for the case that the renderer has no bridge for `new`.

        Raises:
            ValueError: the rendered history does not begin with the kept ids.
        """
        bridged = self.renderer.bridge_to_next_turn(kept[:-1], kept[-1:], new, tools=tools)
        if bridged is not None:
            return list(bridged.token_ids)
        full = self.prompt(history, tools)
        if full[: len(kept)] != kept:
            raise ValueError("the history renders to other ids than were kept")
        return full

    def completion(self, message: Message) -> list[int]:
        """Ids that the model samples to say `message`, its stop token among them."""
        rendered = self.renderer.render([{"role": "user", "content": ""}, message])
        opening = len(self.renderer.render_ids([{"role": "user", "content": ""}], add_generation_prompt=True))
        return list(rendered.token_ids[opening:-1])

    def encode(self, dialogue: Dialogue) -> Encoded:
        """A whole dialogue's ids and loss mask."""
        ids: list[int] = []
        mask: list[int] = []
        start = 0
        for position in dialogue.sampled:
            new = dialogue.messages[start:position]
            if ids:
                ids = self.extend(ids, new, dialogue.messages[:position], dialogue.tools)
            else:
                ids = self.prompt(new, dialogue.tools)
            completion = self.completion(dialogue.messages[position])
            mask += [0] * (len(ids) - len(mask)) + [1] * len(completion)
            ids = ids + completion
            start = position + 1
        return Encoded(np.array(ids, np.int16), np.array(mask, np.int8))
