"""Next turns with Qwen3's own vocabulary: all sampled ids are kept, and every way agrees where two are open."""

from __future__ import annotations

from typing import Any

import pytest
from family_talks import Says, Talk, results
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing_bridge import with_stray_bridge, without_bridge
from strategies import texts
from vocabulary import qwen3

from rollout.tito.rendered import CannotRender

IM_START, IM_END, END_OF_TEXT, NEWLINE = 151644, 151645, 151643, 198

ASSISTANT = {"role": "assistant", "content": "b"}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]

_new = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool", "system"]), texts
    ),
    min_size=1,
    max_size=4,
)
_sampled = st.lists(st.integers(0, 151642), max_size=12) | texts.map(lambda text: qwen3().tokenizer.encode(text))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def extend(prompt: list[int], output: list[int], new: list[dict[str, Any]], **more: Any) -> Any:
    given = {"tools": None, "thinking": False, "history": [user("hi"), {"role": "assistant", "content": "x"}], **more}
    return qwen3().extend(prompt, output, new, **given)


@settings(max_examples=150, deadline=None)
@given(history=_new, sampled=_sampled, new=_new, thinking=st.booleans(), closed=st.booleans(), tools=st.booleans())
def test_the_last_turn_alone_gives_the_same_extension_as_all_ids(
    history: list[dict[str, Any]],
    sampled: list[int],
    new: list[dict[str, Any]],
    thinking: bool,
    closed: bool,
    tools: bool,
) -> None:
    given_tools = TOOLS if tools else None
    prompt = qwen3().render(history, tools=given_tools, thinking=thinking)
    output = [*sampled, IM_END] if closed else [*sampled, 13]
    whole = extend(prompt.ids, output, new, thinking=thinking, tools=given_tools)
    tail = extend(prompt.ids[-prompt.open_length :], output, new, thinking=thinking, tools=given_tools)
    assert whole == tail
    assert IM_START == prompt.ids[-prompt.open_length] == tail.ids[-tail.open_length]


@settings(max_examples=150, deadline=None)
@given(history=_new, reply=texts, new=_new, thinking=st.booleans())
def test_a_full_render_appends_what_the_bridge_could(
    history: list[dict[str, Any]], reply: str, new: list[dict[str, Any]], thinking: bool
) -> None:
    tito, refusing = qwen3(), without_bridge(qwen3())
    prompt = tito.render(history, tools=None, thinking=thinking)
    output = [*tito.tokenizer.encode(reply), IM_END]
    stored = [*history, {"role": "assistant", "content": reply}]
    bridged = tito.extend(prompt.ids, output, new, tools=None, thinking=thinking, history=stored)
    rendered = refusing.extend(prompt.ids, output, new, tools=None, thinking=thinking, history=stored)
    assert bridged is not None and rendered is not None
    assert bridged.refusal is None and rendered.refusal == "bridge_refused"
    assert (bridged.ids, bridged.open_length) == (rendered.ids, rendered.open_length)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("bridge", [True, False])
def test_g31_exactly_one_newline_between_the_sampled_close_and_the_next_turn(
    bridge: bool, version: str, thinking: bool
) -> None:
    """The prompt of turn 2 behind a tool call, by the bridge and by a full render, against the template's own text."""
    tito = qwen3() if bridge else without_bridge(qwen3())
    talk = Talk(tito, version, enable_thinking=thinking)
    message = talk.ask(user("look"), says=Says(keys=("a",), reasoning="Hm." if thinking else None), tools=TOOLS)
    turn = talk.begin(*results(message, "found"), tools=TOOLS)
    assert (None if bridge else "bridge_refused") == turn.refusal
    sampled = talk.session.nodes[0].generation.output_ids_O.tolist()
    n_kept = talk.turns[0].n_prompt + len(sampled)
    assert (IM_END, IM_END) == (sampled[-1], turn.prompt_ids[n_kept - 1])
    assert [NEWLINE, IM_START] == turn.prompt_ids[n_kept : n_kept + 2]
    behind = tito.decode(turn.prompt_ids[n_kept:])
    assert behind.startswith("\n<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n<|im_start|>assi")
    talk.commit(turn, [40, IM_END])
    third = talk.begin(user("more"), tools=TOOLS)
    n_kept = turn.n_prompt + 2
    assert [40, IM_END, NEWLINE, IM_START] == third.prompt_ids[n_kept - 2 : n_kept + 2]


def test_g31_whatever_is_appended() -> None:
    prompt = qwen3().render([user("hi")], tools=None, thinking=False)
    for new in ([user("more")], [{"role": "assistant", "content": "b"}, user("more")], []):
        extension = extend(prompt.ids, [40, IM_END], new)
        assert [NEWLINE, IM_START] == extension.ids[:2]


@pytest.mark.parametrize("faulty", [without_bridge, with_stray_bridge])
def test_g31_a_turn_that_the_bridge_cannot_close_is_closed_as_the_template_does(faulty: Any) -> None:
    prompt = qwen3().render([user("hi")], tools=None, thinking=False)
    history = [user("hi"), {"role": "assistant", "content": "x"}]
    extension = faulty(qwen3()).extend(
        prompt.ids, [40], [ASSISTANT, user("x")], tools=None, thinking=False, history=history
    )
    assert [IM_END, NEWLINE, IM_START] == extension.ids[:3]
    assert (
        qwen3()
        .decode(extension.ids[2:])
        .startswith("<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n<|im_s")
    )


@pytest.mark.parametrize(
    ("output", "new", "start", "refusal"),
    [
        ([40], [user("x")], [IM_END, NEWLINE, IM_START], None),
        ([40], [ASSISTANT, user("x")], [IM_END, NEWLINE, IM_START], "assistant_appended"),
        ([151667, 40], [ASSISTANT, user("x")], [151668, IM_END, NEWLINE, IM_START], "assistant_appended"),
        ([], [ASSISTANT, user("x")], [IM_END, NEWLINE, IM_START], "assistant_appended"),
        ([40, END_OF_TEXT], [user("x")], [NEWLINE, IM_START], None),
        ([40, END_OF_TEXT], [ASSISTANT, user("x")], [IM_START], "assistant_appended"),
        ([40, IM_END], [], [NEWLINE, IM_START], "nothing_appended"),
        ([151667, 40], [user("x")], [151668, IM_END, NEWLINE, IM_START], None),
        ([151667, 40, IM_END], [user("x")], [NEWLINE, IM_START], "bridge_refused"),
        ([40, IM_END, 41], [user("x")], [IM_END, NEWLINE, IM_START], "sampled_ids_dropped"),
    ],
)
def test_what_stands_behind_a_turn(output: list[int], new: Any, start: list[int], refusal: str | None) -> None:
    prompt = qwen3().render([user("hi")], tools=None, thinking=False)
    extension = extend(prompt.ids, output, new)
    assert (start, refusal) == (extension.ids[: len(start)], extension.refusal)


def test_a_cut_turn_is_not_closed() -> None:
    prompt = qwen3().render([user("hi")], tools=None, thinking=False)
    extension = extend(prompt.ids, [40], [user("x")], cut=True)
    assert (IM_START, "cut_turn") == (extension.ids[0], extension.refusal)


def test_a_turn_that_is_cut_at_its_sampled_end_is_closed_already() -> None:
    """SGLang looks at the length before the stop token: such a turn ends by length."""
    prompt = qwen3().render([user("hi")], tools=None, thinking=False)
    extension = extend(prompt.ids, [40, IM_END], [user("x")], cut=True)
    assert ([NEWLINE, IM_START], None) == (extension.ids[:2], extension.refusal)


def test_g33_developer_is_unknown_to_qwen3_and_its_text_is_never_dropped() -> None:
    assert ["assistant", "system", "tool", "user"] == qwen3().roles()
    assert qwen3().drops_role("developer")
    assert qwen3().drops_role("wizard")


def test_tools_are_rendered_as_the_client_sent_them() -> None:
    tool = {"type": "function", "strict": True, "function": {"name": "f", "x-more": [1.0, None]}}
    text = qwen3().decode(qwen3().render([user("hi")], tools=[tool], thinking=False).ids)
    assert '\n{"type": "function", "strict": true, "function": {"name": "f", "x-more": [1.0, null]}}\n' in text


def test_arguments_in_json_text_are_rendered_as_the_family_spells_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1.0,"b":"ü"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = qwen3().decode(qwen3().render([user("hi"), message, user("x")], tools=TOOLS, thinking=False).ids)
    assert '{"name": "f", "arguments": {"a": 1.0, "b": "ü"}}' in text


def test_template_settings_that_the_renderer_lacks_cannot_be_rendered() -> None:
    assert frozenset({"enable_thinking"}) == qwen3().template_fields
    with pytest.raises(CannotRender, match="chat_template_kwargs"):
        qwen3().render([user("hi")], tools=None, thinking=True, template={"add_vision_id": True})
