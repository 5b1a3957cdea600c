"""Sampled ids to an assistant message.

- Tool calls are read only if the request has tools and the turn ended by stop.
- If any call of a turn cannot be read, the whole text stays in content and there is no call.
- A turn that was cut inside its reasoning has reasoning only; one that stopped there has content.
- A stop string is cut off the content, its ids stay where they were sampled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from rollout.tito.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """One tool call: the function's name and its arguments as a JSON object's text."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedMessage:
    """What a turn says. `unreadable_calls` counts those whose text stayed in content."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)
    unreadable_calls: int = 0


def parse(
    renderer: Renderer,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    output_ids: list[int],
    *,
    tools: Any,
    stopped: bool,
    matched: str | int | None,
    stop_token_ids: list[int],
) -> ParsedMessage:
    """The message in `output_ids`; arguments as in Tito.parse."""
    if stopped and isinstance(matched, int) and matched not in stop_token_ids and output_ids[-1:] == [matched]:
        output_ids = output_ids[:-1]  # a stop token of the client's: as invisible as a stop string
    try:
        parsed = renderer.parse_response(output_ids, tools=tools, prompt_ids=prompt_ids)
    except (RecursionError, ValueError):  # arguments deeper, or a number longer, than Python's JSON reader goes
        return ParsedMessage(content=_text(tokenizer, output_ids, stop_token_ids), unreadable_calls=1)
    attempts = parsed.tool_calls
    calls = [call for call in map(_read_call, attempts) if call is not None]
    if attempts and tools and stopped and len(calls) == len(attempts):
        return ParsedMessage(content=parsed.content, reasoning_content=parsed.reasoning_content, tool_calls=calls)
    unreadable = len(attempts) - len(calls) if tools and stopped else 0
    if attempts:
        parsed = _without_calls(renderer, tokenizer, prompt_ids, output_ids, attempts, stop_token_ids)
    content, reasoning = (
        _unstripped(parsed.content, _text(tokenizer, output_ids, stop_token_ids)),
        parsed.reasoning_content,
    )
    if parsed.reasoning_complete is False and stopped:
        content, reasoning = _text(tokenizer, output_ids, stop_token_ids), None
    if stopped and isinstance(matched, str):
        content = content[: content.rfind(matched)] if matched in content else content
    return ParsedMessage(content=content, reasoning_content=reasoning, unreadable_calls=unreadable)


def _read_call(attempt: ParsedToolCall) -> ParsedCall | None:
    if attempt.status is not ToolCallParseStatus.OK or not isinstance(attempt.name, str):
        return None
    if not isinstance(attempt.arguments, dict):
        return None
    try:
        arguments = json.dumps(attempt.arguments, ensure_ascii=False, allow_nan=False)
        arguments.encode()
        attempt.name.encode()
    except (ValueError, RecursionError):  # NaN, a lone surrogate, nesting: no JSON that a client could read
        return None
    return ParsedCall(name=attempt.name, arguments=arguments)


def _without_calls(
    renderer: Renderer,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    output_ids: list[int],
    attempts: list[ParsedToolCall],
    stop_token_ids: list[int],
) -> ParsedResponse:
    """The same turn read as if there were no tool calls: their text is content.

    What stands before the first call is parsed as usual, for its reasoning; a call that itself
    closed the reasoning leaves it closed.
    """
    visible = _visible(output_ids, stop_token_ids)
    starts = [attempt.token_span[0] for attempt in attempts if attempt.token_span is not None]
    if not starts:
        return ParsedResponse(content=tokenizer.decode(visible).strip())
    head_ids, tail = visible[: min(starts)], tokenizer.decode(visible[min(starts) :])
    head = renderer.parse_response(head_ids, prompt_ids=prompt_ids)
    if head.reasoning_complete is False:
        reasoning = (head.reasoning_content or "").strip() or None
        return ParsedResponse(content=tail.strip(), reasoning_content=reasoning)
    text = tokenizer.decode(head_ids)
    gap = text[len(text.rstrip()) :] if head.content else ""
    return ParsedResponse(content=(head.content + gap + tail).strip(), reasoning_content=head.reasoning_content)


def _unstripped(content: str, text: str) -> str:
    """The content with the white space that renderers take off its ends: a replay must say what was sampled."""
    if content == text.strip():
        return text
    return content + text[len(text.rstrip()) :] if content else content


def _visible(output_ids: list[int], stop_token_ids: list[int]) -> list[int]:
    for place, number in enumerate(output_ids):
        if number in stop_token_ids:
            return output_ids[:place]
    return output_ids


def _text(tokenizer: Tokenizer, output_ids: list[int], stop_token_ids: list[int]) -> str:
    return tokenizer.decode(_visible(output_ids, stop_token_ids))
