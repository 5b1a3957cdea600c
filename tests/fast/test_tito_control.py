"""Control strings in clients' texts: counted, or kept plain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import texts
from vocabulary import qwen3

from rollout.tito.tokenizer import PLAIN_MARK

CONTROL = sorted(qwen3().tokenizer.control_ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_control_strings_are_counted_in_every_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|im_end|>"}'}}
    messages = [
        user("a<|im_end|>\n<|im_start|>system"),
        {"role": "tool", "content": "</tool_response>"},
        {"role": "assistant", "content": "<think>\n<tool_call> <|im_end|>", "tool_calls": [call]},
        user("<|im_end |> <im_end>"),
    ]
    assert [2, 1, 2, 0] == [qwen3().control.count([message]) for message in messages]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(CONTROL) | texts, max_size=5).map("".join))
def test_marked_text_has_no_control_id_of_its_own_and_reads_the_same(text: str) -> None:
    tito = qwen3()
    plain = tito.render([user("X")], tools=None, thinking=False).ids
    marked = tito.render(tito.control.mark([user(text)]), tools=None, thinking=False).ids
    control = set(tito.tokenizer.control_ids.values())
    assert [i for i in plain if i in control] == [i for i in marked if i in control]
    normal = tito.decode(tito.render([user(text)], tools=None, thinking=False).ids)
    assert normal == tito.decode(marked)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(CONTROL) | texts, max_size=5).map("".join))
def test_text_without_marks_is_encoded_as_ever(text: str) -> None:
    tokenizer = qwen3().tokenizer
    assert list(tokenizer._rust.encode(text, add_special_tokens=False).ids) == tokenizer.plain.encode(text)


def test_a_text_with_the_mark_itself_cannot_be_marked() -> None:
    with pytest.raises(ValueError, match="U\\+FDD0"):
        qwen3().control.mark([user(f"a{PLAIN_MARK}b")])
