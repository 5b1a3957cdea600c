"""Sampled ids to messages: which calls are read, and where text stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vocabulary import qwen3

from rollout.tito.parsing import ParsedMessage

IM_END = 151645
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def parse(text: str, *, stopped: bool = True, tools: Any = TOOLS, thinking: bool = False, **more: Any) -> ParsedMessage:
    prompt = qwen3().render([{"role": "user", "content": "hi"}], tools=None, thinking=thinking)
    ids = [*qwen3().tokenizer.encode(text), *([IM_END] if stopped else [])]
    return qwen3().parse(prompt.ids, ids, tools=tools, stopped=stopped, thinking=thinking, **more)


def block(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_read_if_there_are_tools_and_the_turn_stopped() -> None:
    parsed = parse(f"see\n{block('{}')}\n{block(json.dumps({'n': 7, 't': 'ü', 'b': False}, ensure_ascii=False), 'g')}")
    assert ("see", 0) == (parsed.content, parsed.unreadable_calls)
    assert [("f", "{}"), ("g", '{"n": 7, "t": "ü", "b": false}')] == [(c.name, c.arguments) for c in parsed.tool_calls]


def test_without_tools_a_call_is_text() -> None:
    text = f"see\n{block('{}')}"
    assert ParsedMessage(content=text) == parse(text, tools=None)


def test_g43_a_cut_turn_never_shows_a_call() -> None:
    for text in (f"see\n{block('{}')}", '<tool_call>\n{"name": "f", "arguments": {"cmd": "ec'):
        assert ParsedMessage(content=text) == parse(text, stopped=False)


@pytest.mark.parametrize(
    "bad",
    [
        block('{"cmd": "ls" "x": 1}'),
        '<tool_call>\n{"name": "f", "arguments": {"cmd": "ec',
        "<tool_call>\n[1]\n</tool_call>",
        "<tool_call>\n</tool_call>",
        block('"text"'),
        block('{"a": NaN}'),
        block('{"a": "\\ud800"}'),
        block('{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
        block('{"a": ' + "9" * 5000 + "}"),
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
    ],
)
def test_g39_one_unreadable_call_leaves_the_whole_text_in_content(bad: str) -> None:
    text = f"see\n{block('{}')}\n{bad}"
    parsed = parse(text)
    assert (text, []) == (parsed.content, parsed.tool_calls)
    assert parsed.unreadable_calls == 1


def test_reasoning_is_told_apart_and_its_drafts_of_calls_are_no_calls() -> None:
    parsed = parse(f"<think>\nhm {block('{}')}\n</think>\n\nyes", thinking=True)
    assert (f"hm {block('{}')}", "yes", []) == (parsed.reasoning_content, parsed.content, parsed.tool_calls)


def test_g44_stopped_without_a_closer_is_content_and_cut_without_one_is_reasoning() -> None:
    assert ParsedMessage(content="42") == parse("42", thinking=True)
    assert ParsedMessage(content="<think>\n42") == parse("<think>\n42", thinking=True)
    assert "42" == (parse("<think>\n42", thinking=True, stopped=False).reasoning_content or "").strip()
    assert "" == parse("<think>\n42", thinking=True, stopped=False).content


def test_an_unreadable_call_behind_reasoning_keeps_the_reasoning() -> None:
    parsed = parse("<think>\nhm\n</think>\n\nsee <tool_call>\nx\n</tool_call>", thinking=True)
    assert ("hm", "see <tool_call>\nx\n</tool_call>", 1) == (
        parsed.reasoning_content,
        parsed.content,
        parsed.unreadable_calls,
    )


def test_white_space_of_an_answer_is_kept() -> None:
    assert " a\n\n" == parse(" a\n\n").content
    assert "a\n" == parse("<think>\nhm\n</think>\n\na\n", thinking=True).content


def test_g30_only_the_stop_token_is_an_empty_answer() -> None:
    assert ParsedMessage(content="") == parse("")


def test_a_stop_string_is_cut_off_the_content() -> None:
    assert "one " == parse("one END", stopped=True, matched="END").content


def test_a_clients_stop_token_is_cut_off_the_content() -> None:
    ids = qwen3().tokenizer.encode("one!")
    prompt = qwen3().render([{"role": "user", "content": "hi"}], tools=None, thinking=False)
    parsed = qwen3().parse(prompt.ids, ids, tools=None, stopped=True, matched=ids[-1])
    assert "one" == parsed.content


def test_g26_a_turn_that_ends_inside_a_character_shows_the_replacement_character() -> None:
    ids = qwen3().tokenizer.encode("\U00013000")[:-1]
    prompt = qwen3().render([{"role": "user", "content": "hi"}], tools=None, thinking=False)
    parsed = qwen3().parse(prompt.ids, ids, tools=None, stopped=False)
    assert parsed.content.endswith("\ufffd")
