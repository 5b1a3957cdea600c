"""Control strings in text that the template did not write.

A chat template turns `<|im_end|>` inside a user's text into the control token, as it does with its
own. This module counts such strings and, where wanted, marks them so that they stay plain text.
An assistant's own markup (`<think>`, `<tool_call>`) is no control string in an assistant message;
only strings that the checkpoint flags as special are. Arguments of tool calls are searched as they are
rendered: read from their JSON text, so an escape hides nothing. Tools are the harness's own and are
not searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args

from rollout.tito.arguments import read_arguments
from rollout.tito.tokenizer import PLAIN_MARK, Tokenizer

ControlTextSetting = Literal["reference", "plain", "refuse"]
CONTROL_TEXT_SETTINGS: tuple[str, ...] = get_args(ControlTextSetting)

Message = dict[str, Any]


class ControlText:
    """Finds and marks the control strings of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._any = _either(tokenizer.control_ids)
        self._special = _either(tokenizer.special)

    def count(self, messages: Iterable[Message]) -> int:
        """How many control strings stand in these messages' texts.

        Raises:
            ValueError: arguments of a call are nested too deeply.
        """
        total = 0
        for message in messages:
            pattern = self._pattern(message)
            if pattern is not None:
                total += sum(len(pattern.findall(text)) for text in _texts(message))
        return total

    def mark(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with every control string that `count` counts marked as plain text.

        Raises:
            ValueError: a text holds PLAIN_MARK itself, so marks would be ambiguous; or as for `count`.
        """
        marked = []
        for message in messages:
            pattern = self._pattern(message)
            marked.append(message if pattern is None else _map(message, partial(_marked, pattern)))
        return marked

    def _pattern(self, message: Message) -> re.Pattern[str] | None:
        return self._special if message.get("role") == "assistant" else self._any


def _marked(pattern: re.Pattern[str], text: str) -> str:
    if PLAIN_MARK in text:
        raise ValueError("a text has the noncharacter U+FDD0")
    return pattern.sub(_mark, text)


def _mark(found: re.Match[str]) -> str:
    return found[0][0] + PLAIN_MARK + found[0][1:]


def _either(texts: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _texts(message: Message) -> list[str]:
    texts: list[str] = []

    def keep(text: str) -> str:
        texts.append(text)
        return text

    _map(message, keep)
    return texts


def _map(message: Message, change: Callable[[str], str]) -> Message:
    """The message with every text of it that a template writes into the prompt changed.

    Raises:
        ValueError: arguments of a call are nested too deeply.
    """
    try:
        return _mapped(message, change)
    except RecursionError:
        raise ValueError("arguments of a tool call are nested too deeply") from None


def _mapped(message: Message, change: Callable[[str], str]) -> Message:
    mapped = dict(message)
    for key in ("content", "reasoning_content"):
        if key in mapped:
            mapped[key] = _map_value(mapped[key], change)
    if mapped.get("tool_calls"):
        mapped["tool_calls"] = [_map_call(call, change) for call in mapped["tool_calls"]]
    return mapped


def _map_call(call: Any, change: Callable[[str], str]) -> Any:
    function = {**call["function"], "name": change(call["function"]["name"])}
    if "arguments" in function:
        function["arguments"] = _map_value(read_arguments(function["arguments"]), change)
    return {**call, "function": function}


def _map_value(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: _map_value(item, change) for key, item in value.items()}
    return [_map_value(item, change) for item in value] if isinstance(value, list) else value
