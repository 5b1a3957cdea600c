"""Matchers: what counts as the same message, and that each accepts all that the stricter one does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import UnknownPart
from rollout.session.matching import find_matcher, loose_tool_call, role_content_only, strict

MATCHERS = [strict, loose_tool_call, role_content_only]


def assistant(arguments: Any = '{"a": 1, "b": 2}', **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def test_g02_null_empty_text_and_no_calls_are_one_in_every_matcher() -> None:
    stored = {"role": "assistant", "content": "", "reasoning_content": ""}
    replayed = {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": None}
    for matcher in MATCHERS:
        assert matcher(stored, replayed)
        assert matcher(replayed, stored)


def test_g02_the_index_of_a_call_is_not_compared() -> None:
    replayed = assistant()
    replayed["tool_calls"][0]["index"] = 0
    assert all(matcher(assistant(), replayed) for matcher in MATCHERS)


def test_content_as_text_parts_equals_the_joined_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert all(m({"role": "user", "content": "ab"}, {"role": "user", "content": parts}) for m in MATCHERS)


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "\u00e9"}, {"role": "user", "content": "e\u0301"}),
    ],
)
def test_role_and_every_character_of_content_count_in_all(stored: Any, replayed: Any) -> None:
    assert not any(matcher(stored, replayed) for matcher in MATCHERS)


def test_reasoning_counts_unless_only_role_and_content_do() -> None:
    stored, replayed = assistant(reasoning_content="x"), assistant(reasoning_content="y")
    assert [False, False, True] == [matcher(stored, replayed) for matcher in MATCHERS]


def test_tool_call_id_of_a_result_is_compared_by_none() -> None:
    stored = {"role": "tool", "content": "4", "tool_call_id": "a", "name": "f"}
    assert strict(stored, {"role": "tool", "content": "4", "tool_call_id": "b", "extra": 1})


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ("", "{}", True),
        (None, "{}", True),
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1e2}', '{"a": 100}', True),
        ('{"a": 0.1}', '{"a": 0.10000000000000001}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": null}', '{"a": ""}', False),
        ('{"a": null}', "{}", False),
        ('{"a": 1, "a": 1}', '{"a": 1}', False),
        ('{"a": NaN}', '{"a":NaN}', False),
        ("[1]", "[1]", True),
        ("[1]", "[ 1]", False),
        (" ", "{}", False),
        ('{"a" 1}', '{"a" 1}', True),
        ('{"a" 1}', '{"a"  1}', False),
        ({"a": 1}, '{"a": 1}', True),
        ({"a": True}, {"a": 1}, False),
        ("[" * 100_000, "[" * 100_000, True),
        ('{"a":' + "[" * 100_000, '{"a": ' + "[" * 100_000, False),
    ],
)
def test_loose_tool_call_compares_arguments_as_json_objects(a: Any, b: Any, same: bool) -> None:
    assert same == loose_tool_call(assistant(a), assistant(b))


def test_loose_tool_call_still_compares_all_else_of_a_call() -> None:
    for change in ({"id": "c2"}, {"type": "custom"}, {"extra": 1}, {"function": {"name": "g", "arguments": "{}"}}):
        replayed = assistant("{}")
        replayed["tool_calls"][0] |= change
        assert not loose_tool_call(assistant("{}"), replayed)
    two = assistant()
    two["tool_calls"] = two["tool_calls"] * 2
    assert not loose_tool_call(assistant(), two)


def test_a_missing_arguments_key_is_no_empty_object() -> None:
    replayed = assistant("{}")
    del replayed["tool_calls"][0]["function"]["arguments"]
    assert not loose_tool_call(assistant("{}"), replayed)


def test_strict_wants_the_arguments_as_spelled() -> None:
    assert not strict(assistant('{"a": 1}'), assistant('{"a":1}'))


def test_an_unknown_matcher_is_refused_by_name() -> None:
    with pytest.raises(UnknownPart, match=r"no matcher 'Strict' is installed .*loose_tool_call, role_.*, strict"):
        find_matcher("Strict")
    assert MATCHERS == [find_matcher(name) for name in ("strict", "loose_tool_call", "role_content_only")]


_argument = st.none() | st.sampled_from(["", "{}", '{"a": 1}', '{"a":1}', '{"a": 1.0}', '{"a": true}', "x", "[1]"])
_contents = st.none() | st.sampled_from(["", "a", "b"])


@st.composite
def _messages(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": draw(st.sampled_from(["assistant", "user"])), "content": draw(_contents)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(_contents)
    if draw(st.booleans()):
        count = draw(st.integers(0, 2))
        message["tool_calls"] = [assistant(draw(_argument))["tool_calls"][0] for _ in range(count)]
    return message


@given(_messages(), _messages())
def test_each_matcher_accepts_all_that_the_stricter_one_does(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert strict(a, b) <= loose_tool_call(a, b) <= role_content_only(a, b)
    assert all(matcher(a, a) for matcher in MATCHERS)
