"""Answers as server-sent events. Pure: an answer is streamed once it is whole, and says what the plain one says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

KEEP_ALIVE = b": generating\n\n"
"""A comment: clients pass over it, and know that the server is there."""

DONE = b"data: [DONE]\n\n"

_LINE_ENDS = [(mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029"]
"""What some clients' line readers take for the end of a line: escaped, as JSON may have it."""


def event(value: Any, name: str | None = None) -> bytes:
    """One event with `value` as compact JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    content = orjson.dumps(value)
    for mark, escaped in _LINE_ENDS:
        content = content.replace(mark, escaped)
    return head + b"data: " + content + b"\n\n"


def chat_events(reply: dict[str, Any], *, include_usage: bool = False) -> Iterator[bytes]:
    """A chat.completion as its clients stream it: one chunk that has all of it, then [DONE].

    Args:
        include_usage: the usage comes in a chunk of its own, as OpenAI's stream_options say; else it
            stands in the one chunk.
    """
    choice = reply["choices"][0]
    message = choice["message"]
    delta = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning_content") is not None:
        delta["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    head = {"id": reply["id"], "object": "chat.completion.chunk", "created": reply["created"], "model": reply["model"]}
    whole = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": choice["finish_reason"]}
    yield event({**head, "choices": [whole], "usage": None if include_usage else reply["usage"]})
    if include_usage:
        yield event({**head, "choices": [], "usage": reply["usage"]})
    yield DONE


def message_events(message: dict[str, Any]) -> Iterator[bytes]:
    """A Messages answer as its clients stream it: each block with its own index, started, filled and stopped."""
    usage = message["usage"]
    start = {
        **message,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield _named({"type": "message_start", "message": start})
    yield _named({"type": "ping"})
    for index, block in enumerate(message["content"]):
        empty, deltas = _filled(block)
        yield _named({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield _named({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield _named({"type": "message_delta", "delta": ending, "usage": usage})
    yield _named({"type": "message_stop"})


def _named(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


def _filled(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and what fills it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}]
