"""The drift comparator's rules, one by one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scripted import Conversation, user
from vocabulary import qwen3

from rollout.session.metrics import Metrics
from rollout.tito.drift import Segment, Spelling, compare, strip_tail

START, END = Segment(1, "<s>"), Segment(2, "<e>")
OPEN = "<s>assistant\n"


def text(said: str) -> Segment:
    return Segment(None, said)


@pytest.mark.parametrize(
    ("actual", "types"),
    [
        ([START, text("assistant\nhi"), END], []),
        ([START, text("assistant\nho"), END], [("assistant_text", 1)]),
        ([START, text("user\nhi"), END], [("non_assistant_text", 1)]),
        ([START, text("assistant\nhi"), START], [("special_token_type", 2)]),
        ([START, text("assistant\nho"), START], [("assistant_text", 1), ("special_token_type", 2)]),
        ([START, text("assistant\nho")], [("special_token_count", -1)]),
        ([START, END, text("assistant\nhi")], [("special_token_count", -1)]),
    ],
)
def test_c15_each_difference_has_its_type_and_place(actual: list[Segment], types: list[tuple[str, int]]) -> None:
    found = compare([START, text("assistant\nhi"), END], actual, OPEN)
    assert types == [(entry.type, entry.segment_index) for entry in found]


def test_c15_tails_are_stripped_of_trailing_text_and_of_a_cut_turns_end() -> None:
    segments = [text("a"), END, text("\n\n")]
    assert [text("a"), END] == strip_tail(segments, "\n", frozenset())
    assert [text("a")] == strip_tail(segments, "\n", frozenset({2}))
    assert segments == strip_tail(segments, "", frozenset({2}))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_c9_a_session_shows_the_same_drift_everywhere(version: str) -> None:
    talk = Conversation(qwen3(), version)
    assert "tito_session_mismatch" not in talk.session.metadata()
    talk.ask(user("a"))
    assert [] == talk.session.metadata()["tito_session_mismatch"]
    talk.ask(user("b"), text="<think>\nhm\n</think>\n\n\n\nok")
    reply = talk.session.samples()
    drift = json.loads(reply.samples[0].drift or "null")
    assert ["assistant_text"] == [entry["type"] for entry in drift]
    assert {"type", "segment_index", "expected_text", "actual_text", "detail"} == set(drift[0])
    assert drift == reply.session_metadata["tito_session_mismatch"] == talk.session.metadata()["tito_session_mismatch"]


def test_c15_each_special_token_is_a_segment_and_think_tags_are_content() -> None:
    tokenizer = qwen3().tokenizer
    spelling = Spelling(tokenizer, marked=False)
    ids = tokenizer.encode("<|im_start|>assistant\n<think>\nhm</think>ok<|im_end|><|im_end|>")
    segments = spelling.segments(np.array(ids, np.int64))
    start, end = (tokenizer.control_ids[name] for name in ("<|im_start|>", "<|im_end|>"))
    assert [start, None, end, end] == [segment.special for segment in segments]
    assert "assistant\n<think>\nhm</think>ok" == segments[1].text


def test_c15_content_is_compared_as_text_and_not_by_ids() -> None:
    talk = Conversation(qwen3(), "v2")
    ids = [*(number for letter in "jsonprenderer" for number in qwen3().tokenizer.encode(letter))]
    talk.ask(user("a"), text=[*ids, qwen3().tokenizer.control_ids["<|im_end|>"]])
    assert ids != qwen3().tokenizer.encode("jsonprenderer")
    assert "[]" == talk.session.samples().samples[0].drift


def test_c15_a_cut_last_turn_is_no_drift() -> None:
    talk = Conversation(qwen3(), "v2")
    talk.ask(user("a"), text="never ends, because", finish="length")
    assert "[]" == talk.session.samples().samples[0].drift


def test_c9_a_failure_to_compare_is_logged_and_leaves_the_column_null(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr("rollout.session.drift.find_drift", failing)
    talk = Conversation(qwen3(), "v2")
    talk.ask(user("a"))
    reply = talk.session.samples()
    assert reply.samples[0].drift is None and "tito_session_mismatch" not in reply.session_metadata
    assert "cannot be computed" in caplog.text


def test_c17_metrics_give_a_rate_per_version_and_type() -> None:
    metrics = Metrics()
    metrics.compared("v1", ["assistant_text", "assistant_text"])
    metrics.compared("v1", [])
    shown = metrics.text({})
    assert 'tito_session_mismatch_rate{version="v1",type="any"} 0.5' in shown
    assert 'tito_session_mismatch_rate{version="v1",type="special_token_count"} 0.0' in shown
    assert 'tito_session_mismatch_total{version="v1",type="assistant_text"} 1' in shown
