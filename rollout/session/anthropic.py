"""Anthropic's Messages form to the session's own chat form, and an answer back. Pure.

A session stores chat messages only, so a conversation has the same ids, tape and samples whichever of
the two its client speaks, and a client that replays its own blocks extends the generation they came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import orjson

from rollout.errors import SessionRefused
from rollout.session.sampling import PARAMETERS, read_field

Message = dict[str, Any]

_MAPPED = frozenset({"system", "messages", "tools", "tool_choice", "stop_sequences", "thinking"})
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def chat_body(body: Any, *, can_think: bool = True) -> dict[str, Any]:
    """The chat body that a Messages body means. Fields that both have, and unknown ones, are passed on.

    Args:
        can_think: whether the renderer can switch thinking on.

    Raises:
        SessionRefused: 400 that names the field or block that has no meaning here.
    """
    if not isinstance(body, dict):
        raise SessionRefused(400, "body: want a JSON object")
    chat = {name: value for name, value in body.items() if name not in _MAPPED}
    for name in ("output_config", "output_format"):
        given = body.get(name)
        if (given.get("format") if name == "output_config" and isinstance(given, dict) else given) is None:
            continue
        raise SessionRefused(400, f"{name}: only text is served")
    chat["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
    if body.get("tools") is not None:
        chat["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    if body.get("stop_sequences") is not None:
        chat["stop"] = read_field("stop_sequences", body["stop_sequences"], PARAMETERS["stop"][1], 0)
    if body.get("thinking") is not None:
        _set_thinking(chat, body["thinking"], can_think)
    return chat


def _system(system: Any) -> list[Message]:
    text = "" if system is None else _text(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise SessionRefused(400, "messages: want a list with at least one message")
    chat: list[Message] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise SessionRefused(400, f"{where}: want an object")
        read = _ROLES.get(message["role"]) if isinstance(message.get("role"), str) else None
        if read is None:
            raise SessionRefused(400, f"{where}.role: want user, assistant or system")
        chat.extend(read(message.get("content"), f"{where}.content"))
    if chat[-1]["role"] == "assistant":
        raise SessionRefused(400, "messages: the last one is the assistant's; an answer that it begins is not served")
    return chat


def _system_message(content: Any, where: str) -> list[Message]:
    return [{"role": "system", "content": _text(content, where)}]


def _user_messages(content: Any, where: str) -> list[Message]:
    """Texts that stand together are one user message, each tool result is a message of its own."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    for block, place in _blocks(content, where):
        if block["type"] == "text":
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": ""})
            messages[-1]["content"] += _string(block, "text", place)
        elif block["type"] == "tool_result":
            result = block.get("content")
            text = "" if result is None else _text(result, f"{place}.content")
            call = _string(block, "tool_use_id", place)
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            raise _unserved(block, place, "text and tool_result")
    return messages or [{"role": "user", "content": ""}]


def _assistant_messages(content: Any, where: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    message: Message = {"role": "assistant", "content": ""}
    for block, place in _blocks(content, where):
        if block["type"] == "text":
            message["content"] += _string(block, "text", place)
        elif block["type"] == "thinking":
            thought = message.get("reasoning_content", "")
            message["reasoning_content"] = thought + _string(block, "thinking", place)
        elif block["type"] == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, place))
        else:
            raise _unserved(block, place, "text, thinking and tool_use")
    return [message]


_ROLES: dict[str, Callable[[Any, str], list[Message]]] = {
    "user": _user_messages,
    "assistant": _assistant_messages,
    "system": _system_message,
}


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    """The call as we spell one: a client that got its input as an object gives the same text back."""
    if not isinstance(block.get("input"), dict):
        raise SessionRefused(400, f"{where}.input: want an object")
    try:
        arguments = json.dumps(block["input"], ensure_ascii=False)
    except RecursionError:
        raise SessionRefused(400, f"{where}.input: nested too deeply") from None
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    """A text, or the joined text of its text blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for block, place in _blocks(content, where):
        if block["type"] != "text":
            raise _unserved(block, place, "text")
        texts.append(_string(block, "text", place))
    return "".join(texts)


def _blocks(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    if not isinstance(content, list):
        raise SessionRefused(400, f"{where}: want a text or a list of blocks")
    for place, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise SessionRefused(400, f"{where}[{place}]: want a block with its type")
    return [(block, f"{where}[{place}]") for place, block in enumerate(content)]


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise SessionRefused(400, f"{where}.{name}: want a text")
    return value


def _unserved(block: dict[str, Any], where: str, served: str) -> SessionRefused:
    return SessionRefused(400, f"{where}: only {served} blocks are served here, not {block['type']!r}")


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Tools as OpenAI's clients spell them, so that a prompt has the same ids."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SessionRefused(400, "tools: want a list of objects")
    chat = []
    for place, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise SessionRefused(400, f"tools[{place}].type: only custom tools are served, not {tool['type']!r}")
        if not isinstance(tool.get("input_schema"), dict):
            raise SessionRefused(400, f"tools[{place}].input_schema: want an object")
        function: dict[str, Any] = {"name": _string(tool, "name", f"tools[{place}]")}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", f"tools[{place}]")
        chat.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return chat


def _tool_choice(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none"):
        raise SessionRefused(400, "tool_choice: only auto and none are served")
    return str(kind)


def _set_thinking(chat: dict[str, Any], thinking: Any, can_think: bool) -> None:
    """Set enable_thinking, unless the body's own chat_template_kwargs do."""
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    wanted = _THINKING.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise SessionRefused(400, f"thinking.type: want one of {', '.join(_THINKING)}")
    if not can_think:
        if wanted:
            raise SessionRefused(400, "thinking: this server's renderer cannot switch it on")
        return
    template = chat.get("chat_template_kwargs")
    if template is None or isinstance(template, dict):
        chat["chat_template_kwargs"] = {"enable_thinking": wanted, **(template or {})}


def to_message(reply: dict[str, Any]) -> dict[str, Any]:
    """The Messages answer of a chat.completion: thinking, text, then a block for each tool call.

    An `input` is the call's own JSON text as an orjson.Fragment: its numbers keep their spelling.
    """
    choice = reply["choices"][0]
    finish, matched = choice["finish_reason"], choice["matched_stop"]
    by_text = finish == "stop" and isinstance(matched, str)
    return {
        "id": reply["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": reply["model"],
        "content": _answer_blocks(choice["message"]),
        # An aborted answer was cut, as one that ran out of tokens was.
        "stop_reason": "stop_sequence" if by_text else _STOP_REASONS.get(finish, "max_tokens"),
        "stop_sequence": matched if by_text else None,
        "usage": _usage(reply["usage"]),
    }


def _answer_blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thought = message["reasoning_content"]
        # Clients drop thinking without a signature; ours is never read.
        signature = blake2b(thought.encode(), digest_size=16).hexdigest()
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        given = orjson.Fragment(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """Anthropic counts what the cache had apart from the other input."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
