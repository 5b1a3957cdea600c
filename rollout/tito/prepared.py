"""Messages as every renderer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.tito.arguments import read_arguments
from rollout.tito.content import content_text

Message = dict[str, Any]


def prepared(messages: Sequence[Message]) -> Any:
    """Messages as every renderer takes them: content is text, tool arguments are objects where they can be read."""
    made = []
    for message in messages:
        if not isinstance(message.get("content"), str):
            message = {**message, "content": content_text(message)}
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
        made.append(message)
    return made


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its JSON text read: a family spells arguments its own way. Other text stays as it is."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": read_arguments(function["arguments"])}}
