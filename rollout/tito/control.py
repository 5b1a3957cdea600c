"""Control strings in text that the template did not write.

A chat template turns `<|im_end|>` inside a user's text into the control token, as it does with its
own. This module counts such strings and, where wanted, marks them so that they stay plain text.
An assistant's own markup (`<think>`, `<tool_call>`) is no control string in an assistant message;
only strings that the checkpoint flags as special are. Tools are the harness's own and are not searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

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
        """How many control strings stand in these messages' texts."""
        total = 0
        for message in messages:
            pattern = self._pattern(message)
            if pattern is not None:
                total += sum(len(pattern.findall(text)) for text in _texts(message))
        return total

    def mark(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with every control string outside assistant messages marked as plain text.

        Raises:
            ValueError: a text holds PLAIN_MARK itself, so marks would be ambiguous.
        """
        marked = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and message.get("role") != "assistant" and self._any is not None:
                if PLAIN_MARK in content:
                    raise ValueError("content has the noncharacter U+FDD0")
                message = {**message, "content": self._any.sub(_mark, content)}
            marked.append(message)
        return marked

    def _pattern(self, message: Message) -> re.Pattern[str] | None:
        return self._special if message.get("role") == "assistant" else self._any


def _mark(found: re.Match[str]) -> str:
    return found[0][0] + PLAIN_MARK + found[0][1:]


def _either(texts: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _texts(message: Message) -> Iterator[str]:
    for key in ("content", "reasoning_content"):
        if isinstance(message.get(key), str):
            yield message[key]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        for key in ("name", "arguments"):
            if isinstance(function.get(key), str):
                yield function[key]
