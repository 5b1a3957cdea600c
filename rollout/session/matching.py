"""Whether a replayed message is a stored one: matchers, from strict to lenient.

A matcher is a pure function (stored, replayed) -> bool. On a match the stored message and its ids
stay authoritative. Each accepts all that the stricter one does: strict, loose_tool_call, role_content_only.
`tool_call_id`, `name` and provider fields are compared by none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

from rollout.errors import SessionRefused, describe
from rollout.parts import MATCHERS, load_hook
from rollout.tito.content import content_text

Matcher = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


def strict(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    """Same role, content, reasoning_content and tool_calls; null, "" and [] are one; a call's `index` is not read."""
    return _same_message(stored, replayed, _same_json)


def loose_tool_call(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    """strict, but a call's arguments are compared as JSON objects: null, "" and {} are one, key order is free."""
    return _same_message(stored, replayed, _same_call_loosely)


def role_content_only(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    """Same role and content, nothing else: reasoning and tool calls may have been rewritten."""
    if stored.get("role") != replayed.get("role"):
        return False
    a, b = stored.get("content"), replayed.get("content")
    return a == b or content_text(stored) == content_text(replayed)


def find_matcher(name: str) -> Matcher:
    """The installed matcher of this exact name (entry points of rollout.matchers, see rollout.parts).

    Raises:
        UnknownPart: there is none, or it does not take two messages.
    """
    return load_hook(MATCHERS, name, "match(stored, replayed)", 2)


def ask_matcher(matcher: Matcher, stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    """What `matcher` says; a user's own may fail.

    Raises:
        SessionRefused: 500, it raised, or gave anything but true or false.
    """
    try:
        same = matcher(stored, replayed)
    except Exception as error:
        raise SessionRefused(500, f"session message matcher raised an exception: {describe(error)}") from error
    if not isinstance(same, bool):
        raise SessionRefused(500, f"session message matcher must return bool, got {type(same).__name__}")
    return same


def _same_message(
    stored: Mapping[str, Any], replayed: Mapping[str, Any], same_call: Callable[[Any, Any], bool]
) -> bool:
    try:
        if stored == replayed and not stored.get("tool_calls"):
            return True  # nearly every message of a long history: one comparison in C
    except RecursionError:
        pass  # in a key that no matcher reads
    return (
        role_content_only(stored, replayed)
        and (stored.get("reasoning_content") or "") == (replayed.get("reasoning_content") or "")
        and _same_calls(stored.get("tool_calls"), replayed.get("tool_calls"), same_call)
    )


def _same_calls(stored: Any, replayed: Any, same: Callable[[Any, Any], bool]) -> bool:
    stored, replayed = stored or [], replayed or []
    if len(stored) != len(replayed):
        return False
    return all(same(_without_index(a), _without_index(b)) for a, b in zip(stored, replayed, strict=True))


def _without_index(call: Any) -> Any:
    if isinstance(call, dict) and "index" in call:
        return {key: value for key, value in call.items() if key != "index"}
    return call


def _same_json(a: Any, b: Any) -> bool:
    """Equal values of the same kinds; 1 is 1.0, true is not 1. Too deep to walk is not equal."""
    try:
        return _walk(a, b)
    except RecursionError:
        return False


def _walk(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_walk(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_walk(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    numbers = isinstance(a, int | float | Decimal) and isinstance(b, int | float | Decimal)
    return (type(a) is type(b) or numbers) and bool(_exact(a) == _exact(b))


def _exact(value: Any) -> Any:
    """A float as the decimal that its shortest spelling says: 0.1 of an object is 0.1 of a text."""
    return Decimal(repr(value)) if isinstance(value, float) else value


def _same_call_loosely(a: Any, b: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict) or a.keys() != b.keys():
        return _same_json(a, b)
    f, g = a.get("function"), b.get("function")
    if not isinstance(f, dict) or not isinstance(g, dict) or f.keys() != g.keys():
        return _same_json(a, b)
    rest = [key for key in a if key != "function"]
    others = [key for key in f if key != "arguments"]
    return (
        all(_same_json(a[key], b[key]) for key in rest)
        and all(_same_json(f[key], g[key]) for key in others)
        and ("arguments" not in f or _same_arguments(f["arguments"], g["arguments"]))
    )


class _NoObject(Exception):
    """These arguments are no plain JSON object; they are compared raw."""


def _same_arguments(a: Any, b: Any) -> bool:
    if isinstance(a, str) and a == b:
        return True  # nearly always: no text is read twice to be found like itself
    try:
        return _walk(_arguments(a), _arguments(b))
    except (_NoObject, RecursionError):
        return _same_json(a, b)


def _arguments(value: Any) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = _DECODER.decode(value)
        except (JSONDecodeError, ValueError) as error:
            raise _NoObject from error
    if not isinstance(value, dict) or not _is_json(value):
        raise _NoObject
    return value


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, float):
        return value - value == 0.0
    return value is None or isinstance(value, str | bool | int | Decimal)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _NoObject
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _NoObject


_DECODER = JSONDecoder(object_pairs_hook=_unique, parse_float=Decimal, parse_constant=_refuse_constant)
