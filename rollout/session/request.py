"""A chat body, checked: every refusal names its field, and nothing is dropped in silence that changes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollout.errors import SessionRefused
from rollout.session.sampling import PARAMETERS, read_field, read_sampling, read_seed
from rollout.tito.families import thinking_field

Message = dict[str, Any]

_READ = frozenset({"messages", "tools", "stream", "model", "tool_choice", "chat_template_kwargs", "seed", "n"})
_READ |= frozenset({"response_format", "modalities", "stream_options"}) | frozenset(PARAMETERS)
_NOT_IN_BODY = frozenset({"messages", "tools", "stream", "stream_options", "n", "response_format", "modalities"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """What a session reads of a chat body.

    `messages` are not checked yet: most repeat what was checked before (rollout.session.replayed).
    `tools` are those that count (none with tool_choice "none"), `given_tools` as sent; `sampling` has
    the client's own parameters in SGLang's names; `body` is what a tape keeps; `ignored` names the
    fields that were not read. `include_usage` asks for a chunk of its own in a stream.
    """

    messages: list[Any]
    tools: list[dict[str, Any]] | None
    given_tools: list[dict[str, Any]] | None
    thinking: bool
    template: dict[str, Any]
    sampling: dict[str, Any]
    seed: int | None
    model: str
    stream: bool = False
    include_usage: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def read_request(body: Any, *, vocabulary: int, thinking: bool, template_fields: frozenset[str]) -> ChatRequest:
    """Check a parsed body, its messages apart.

    Args:
        thinking: the session's enable_thinking, where the body does not say.
        template_fields: chat_template_kwargs that the renderer has.

    Raises:
        SessionRefused: 400 that names the field and what it should be.
    """
    _refuse_unserved(body)
    thinking, template = read_template(body.get("chat_template_kwargs"), thinking, template_fields)
    given_tools = _tools(body.get("tools"))
    sampling = _sampling(body, vocabulary)
    stream, include_usage, ignored_options = _stream(body.get("stream"), body.get("stream_options"))
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=given_tools if body.get("tool_choice") != "none" else None,
        given_tools=given_tools,
        thinking=thinking,
        template=template,
        sampling=sampling,
        seed=_seed(body.get("seed"), vocabulary),
        model=_model(body.get("model")),
        stream=stream,
        include_usage=include_usage,
        body={name: body[name] for name in body if name in _READ and name not in _NOT_IN_BODY},
        ignored=[*(name for name in body if name not in _READ), *ignored_options],
    )


def _refuse_unserved(body: Any) -> None:
    if not isinstance(body, dict):
        raise SessionRefused(400, "body: want a JSON object")
    if body.get("input_ids") is not None:
        raise SessionRefused(400, "input_ids: prompt ids are made here, from messages")
    if body.get("n") is not None and (isinstance(body["n"], bool) or body["n"] != 1):
        raise SessionRefused(400, "n: only 1 is served")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise SessionRefused(400, "tool_choice: only auto and none are served")
    if body.get("response_format") not in (None, {"type": "text"}):
        raise SessionRefused(400, "response_format: only text is served")
    if body.get("modalities") not in (None, ["text"]):
        raise SessionRefused(400, "modalities: only text is served")


def _sampling(body: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    sampling = read_sampling(body, vocabulary=vocabulary)
    if sampling.get("min_new_tokens", 0) > sampling.get("max_new_tokens", 2**31):
        raise SessionRefused(400, "min_tokens: more than max_tokens")
    return sampling


def _seed(seed: Any, vocabulary: int) -> int | None:
    return None if seed is None else int(read_field("seed", seed, read_seed, vocabulary))


def _stream(stream: Any, options: Any) -> tuple[bool, bool, list[str]]:
    """Whether to stream, with the usage apart, and the options that are not read."""
    if not isinstance(stream, bool | None):
        raise SessionRefused(400, "stream: want true or false")
    if not isinstance(options, dict | None):
        raise SessionRefused(400, "stream_options: want an object")
    options = options or {}
    include_usage = options.get("include_usage")
    if not isinstance(include_usage, bool | None):
        raise SessionRefused(400, "stream_options.include_usage: want true or false")
    ignored = [f"stream_options.{name}" for name in options if name != "include_usage"]
    return bool(stream), bool(include_usage), ignored


def read_template(given: Any, thinking: bool, fields: frozenset[str]) -> tuple[bool, dict[str, Any]]:
    """Whether to think, and the other chat_template_kwargs.

    A family whose own field for it is `thinking` takes `enable_thinking` too, one of the two.

    Raises:
        SessionRefused: 400, a field that the renderer does not have, both names, or no bool for one.
    """
    if given is None:
        return thinking, {}
    if not isinstance(given, dict):
        raise SessionRefused(400, "chat_template_kwargs must be an object")
    check_text(given, "chat_template_kwargs")
    own = thinking_field(fields)
    switches: set[str] = set() if own is None else {"enable_thinking", own}
    for name in given:
        if name not in fields | switches:
            raise SessionRefused(400, f"chat_template_kwargs.{name}: the renderer has {', '.join(sorted(fields))}")
    named = sorted(name for name in switches if name in given)
    if len(named) > 1:
        raise SessionRefused(400, f"chat_template_kwargs: {' and '.join(named)} are one; give one of them")
    chosen = given[named[0]] if named else thinking
    if not isinstance(chosen, bool):
        raise SessionRefused(400, f"chat_template_kwargs.{named[0]}: want true or false")
    return chosen, {name: value for name, value in given.items() if name not in switches}


def _model(model: Any) -> str:
    if not isinstance(model, str | None):
        raise SessionRefused(400, "model: want a text")
    return model or ""


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SessionRefused(400, "tools: want a list of objects")
    for place, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SessionRefused(400, f"tools[{place}].function.name: want a text")
    return tools or None


def _messages(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise SessionRefused(400, "messages: want a list with at least one message")
    return messages


def check_message(message: Any, place: int) -> None:
    """Refuse what is no chat message.

    Raises:
        SessionRefused: 400 that names its place and the field.
    """
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise SessionRefused(400, f"{where}: want an object")
    if not isinstance(message.get("role"), str):
        raise SessionRefused(400, f"{where}.role: want a text")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        _check_parts(content, f"{where}.content")
    if not isinstance(message.get("reasoning_content"), str | None):
        raise SessionRefused(400, f"{where}.reasoning_content: want a text or null")
    if message.get("tool_calls"):
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise SessionRefused(400, f"{where}.{name}: not served, and no part of a prompt")


def _check_parts(content: Any, where: str) -> None:
    if not isinstance(content, list):
        raise SessionRefused(400, f"{where}: want a text, a list of text parts or null")
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise SessionRefused(400, f"{where}[{place}]: only text parts are served, not {kind!r}")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise SessionRefused(400, f"{where}: want a list")
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SessionRefused(400, f"{where}[{place}].function.name: want a text")
        if not isinstance(function.get("arguments"), str | dict | None):
            raise SessionRefused(400, f"{where}[{place}].function.arguments: want JSON text or an object")


def check_text(value: Any, where: str) -> None:
    """Refuse what no JSON or UTF-8 can carry: lone surrogates, nesting too deep to be told again.

    Raises:
        SessionRefused: 400 that names `where`.
    """
    try:
        orjson.dumps([[[[[[[[value]]]]]]]])  # as deep as records and tapes put it
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise SessionRefused(400, f"{where}: {error}") from error


def order_tool_results(reply: Message | None, appended: Sequence[Message]) -> tuple[list[Message], int]:
    """The appended messages with each run of tool results in the order of their calls.

    A run belongs to the assistant message before it. Where one of its ids is unknown, the client's
    order stands.

    Returns:
        The messages to render, and how many runs had an unknown id.
    """
    ordered: list[Message] = []
    unknown_runs, start, before = 0, 0, reply
    while start < len(appended):
        end = start
        while end < len(appended) and appended[end].get("role") == "tool":
            end += 1
        if end == start:
            ordered.append(appended[start])
            before, start = appended[start], start + 1
            continue
        run = list(appended[start:end])
        places = _call_places(before)
        ids = [message.get("tool_call_id") for message in run]
        if all(isinstance(known, str) and known in places for known in ids):
            run.sort(key=lambda message: places[message["tool_call_id"]])
        else:
            unknown_runs += 1
        ordered.extend(run)
        before, start = run[-1], end
    return ordered, unknown_runs


def _call_places(message: Message | None) -> dict[str, int]:
    calls = (message or {}).get("tool_calls") or []
    return {call.get("id"): place for place, call in enumerate(calls) if isinstance(call.get("id"), str)}
