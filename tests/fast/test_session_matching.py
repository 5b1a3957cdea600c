"""Matchers: spellings of one message that all of them take for the same (the rules are in test_rules_c13)."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import TOOLS, Conversation, call, tiny_tito, user

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


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("matcher", ["strict", "loose_tool_call", "role_content_only"])
def test_g02_a_session_knows_such_a_history_again(version: str, matcher: str) -> None:
    talk = Conversation(tiny_tito(), version, matcher=matcher)
    talk.ask(user("go"), text=call("x"), tools=TOOLS)
    called = talk.history[1]
    calls = [{**one, "index": place} for place, one in enumerate(called["tool_calls"])]
    talk.history[1] = {**called, "content": None, "tool_calls": calls}
    talk.ask(user("on"), text="ok", tools=TOOLS)
    assert talk.session.nodes[0] is talk.session.nodes[1].parent
    talk.history[3] = {"role": "assistant", "content": "ok", "tool_calls": [], "reasoning_content": ""}
    without = [{name: value for name, value in one.items() if name != "index"} for one in calls]
    talk.history[1] = {"role": "assistant", "content": "", "tool_calls": without}
    turn = talk.begin([*talk.history, user("more")], tools=TOOLS)
    assert talk.session.nodes[1] is turn.parent


def test_content_as_text_parts_equals_the_joined_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert all(m({"role": "user", "content": "ab"}, {"role": "user", "content": parts}) for m in MATCHERS)
