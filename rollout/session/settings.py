"""What is fixed when a session is opened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rollout.identity import SessionVersion

DEFAULT_MATCHER = "loose_tool_call"
DEFAULT_PICKER = "drop_retries"
DEFAULT_FINISHER = "train_once"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """Settings of one session; a tape carries them, so a replay needs nothing else.

    `sampling` pins parameters over the client's own values; `seed` is hex, null samples without one.
    `shadow_matcher` names a matcher that is asked beside `matcher` and only counted; null asks none.
    `lora` names an adapter at the engine; with `routed_experts` the engine is asked which experts of a mixture it
    used. `renderer` and `enable_thinking` come from the server: they decide every prompt id.
    """

    version: SessionVersion = "v2"
    matcher: str = DEFAULT_MATCHER
    shadow_matcher: str | None = None
    picker: str = DEFAULT_PICKER
    finisher: str = DEFAULT_FINISHER
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: str | None = None
    max_seq_len: int | None = None
    max_turns: int | None = None
    control_text: str = "reference"
    lora: str | None = None
    routed_experts: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    renderer: str = "qwen3"
    enable_thinking: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
