"""What one prompt row must be: shapes, bounds and text that every later step can rely on."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import orjson

from rollout.row_sampling import Bounds, row_sampling

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 100
"""Nesting of a row: below what JSON readers and writers of the later steps refuse."""


class RowRefused(ValueError):
    """A prompt row that cannot run; says where and why, without file and line."""


def check_row(row: dict[str, Any], text: bytes | None = None) -> bytes:
    """Check a row whose keys are known.

    Args:
        text: what `plain_json` gave for the row, where the caller has it.

    Returns:
        The row as JSON, which reads back as the same row.

    Raises:
        RowRefused: naming the place, e.g. `messages[2].content`.
    """
    if row.get("messages") is None:
        raise RowRefused("messages is missing")
    text = text or plain_json(row)
    if text is None:
        _check_json(row, "", 0)
    _check_messages(row["messages"])
    if row.get("tools") is not None:
        _check_tools(row["tools"])
    _want(row.get("metadata"), dict, "metadata", "an object")
    _want(row.get("agent"), str, "agent", "the name of an agent")
    if row.get("agent") == "":
        raise RowRefused("agent is empty")
    _check_rollout_id(row.get("rollout_id"))
    return text or orjson.dumps(row)


def check_sampling(row: dict[str, Any], bounds: Bounds | None) -> None:
    """Check what a row, which `check_row` let pass, sets in metadata.sampling.

    Raises:
        RowRefused: naming the parameter and what is allowed.
    """
    try:
        row_sampling(row.get("metadata") or {}, bounds)
    except ValueError as error:
        raise RowRefused(str(error)) from error


def plain_json(value: Any) -> bytes | None:
    """`value` as JSON if it needs no closer look, in a tenth of the time that one takes; null if it may need one.

    Not null means: an object or a list of nothing but text without lone surrogates, 64-bit integers, booleans,
    nulls and doubles below 2^63, nested at most MAX_DEPTH deep.
    """
    if type(value) not in (dict, list) or not _is_plain(value, 1):
        return None
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson's error for surrogates, larger integers and keys that are no text
        return None


def _is_plain(value: Any, depth: int) -> bool:
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if kind in _ATOMS:
            continue
        if kind is float:
            if not abs(item) < 2.0**63:  # larger ones may have been integers, and NaN is none of the smaller
                return False
        elif kind not in (dict, list) or depth >= MAX_DEPTH or not _is_plain(item, depth + 1):
            return False
    return True


_ATOMS = frozenset((str, int, bool, NoneType))


def _want(value: Any, kind: type, where: str, wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise RowRefused(f"{where} is {_kind(value)}, want {wanted}")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def _check_messages(messages: Any) -> None:
    _want(messages, list, "messages", "a list of messages")
    if not messages:
        raise RowRefused("messages is empty")
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, dict):
            raise RowRefused(f"{where} is {_kind(message)}, want an object")
        if message.get("role") not in ROLES:
            found = repr(message["role"]) if isinstance(message.get("role"), str) else "missing or no text"
            raise RowRefused(f"{where}.role is {found}, want one of {', '.join(ROLES)}")
        _check_content(message, where)
        if message.get("tool_calls") is not None:
            _check_calls(message["tool_calls"], f"{where}.tool_calls")


def _check_content(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if message["role"] != "assistant" or not message.get("tool_calls"):
            raise RowRefused(f"{where}.content is missing")
        return
    if not isinstance(content, list):
        raise RowRefused(f"{where}.content is {_kind(content)}, want text")
    for position, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowRefused(f"{where}.content[{position}] is no text part")


def _check_calls(calls: Any, where: str) -> None:
    _want(calls, list, where, "a list of tool calls")
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowRefused(f"{where}[{position}] has no function with a name")


def _check_tools(tools: Any) -> None:
    _want(tools, list, "tools", "a list of tools")
    for position, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise RowRefused(f"tools[{position}] is no function with a name")


def _check_rollout_id(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowRefused(f"rollout_id is {_kind(value)}, want an integer")
    if not 0 <= value < 2**63:
        raise RowRefused(f"rollout_id {value} is not within 0..2^63-1")


def _check_json(value: Any, where: str, depth: int) -> None:
    """Refuse what cannot be written as JSON and UTF-8 again without a change."""
    if depth > MAX_DEPTH:
        raise RowRefused(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):  # of an Arrow map
                raise RowRefused(f"{where or 'the row'} has a key that is {type(key).__name__}, no text")
            _check_text(key, where)
            _check_json(item, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _check_json(item, f"{where}[{position}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowRefused(f"{where} is beyond a double")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64 and where != "rollout_id":
        raise RowRefused(f"{where} is beyond 64 bits")
    elif not isinstance(value, int | float | None):
        raise RowRefused(f"{where} is {type(value).__name__}, no JSON value")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowRefused(f"{where or 'a key'} has a lone surrogate at character {error.start + 1}") from error
