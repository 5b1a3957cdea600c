"""Conversations of a mixture of experts: a script in the engine's place gives each id's row as SGLang does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scripted import Conversation

from rollout.engine.tiny import CHECKPOINT
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer

ROUTED = (3, 2)
"""Layers and experts per token."""


def routed_tito() -> Tito:
    """The shipped tokenizer as that of a mixture of experts."""
    tokenizer = Tokenizer(CHECKPOINT)
    tokenizer.routed = ROUTED
    return Tito(tokenizer, "qwen3")


def rows_of(ids: list[int]) -> NDArray[np.int32]:
    """Rows of all ids but the last; each depends on its id and on all before it, as a forward pass does."""
    seen = np.cumsum(np.array(ids, np.int64) * 31 + 7)[:-1, None]
    return ((seen + np.arange(6)) % 128).astype("<i4").reshape(-1, *ROUTED)


class RoutedConversation(Conversation):
    """Every turn gives the rows that it asked for; an aborted one none. `whole` gives all, asked for or not."""

    whole = False

    def __init__(self, tito: Tito, version: str, **settings: Any) -> None:
        super().__init__(tito, version, routed_experts=True, **settings)

    def commit(self, turn: Any, text: str | list[int], finish: str = "stop", **given: Any) -> dict[str, Any] | None:
        ids = self.tito.tokenizer.encode(text) if isinstance(text, str) else list(text)
        if finish == "stop" and isinstance(text, str):
            ids.append(self.tito.tokenizer.control_ids["<|im_end|>"])
        if finish != "abort":
            start = 0 if self.whole else turn.experts.start
            rows = rows_of([*turn.prompt_ids, *ids])[start:]
            given = {"routed_experts": rows.tobytes(), "routed_experts_shape": list(rows.shape), **given}
        return super().commit(turn, ids, finish, **given)
