"""Matchers: spellings of one message that all of them take for the same (the rules are in test_rules_c13)."""

from __future__ import annotations

from typing import Any

from rollout.session.matching import loose_tool_call, role_content_only, strict

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
