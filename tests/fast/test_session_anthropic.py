"""Anthropic's form: the same prompts, turns and refusals as OpenAI's, and a client's own history is recognised."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import TOOLS, Conversation, answered, call, tiny_tito, user
from strategies import answers

from rollout.errors import SessionRefused
from rollout.session.anthropic import chat_body, to_message
from rollout.session.matching import strict
from rollout.session.tape import tape_to_table
from rollout.tito.parsing import ParsedMessage

TITO = tiny_tito()
MESSAGES_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
    for tool in TOOLS
]
USE = {"type": "tool_use", "id": "call_1", "name": "lookup", "input": {"key": "a"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "7"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": list(messages) or [user("hi")], **more}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": None}, "messages: want a list"),
        ({"messages": [], "system": "x"}, "messages: want a list with at least one"),
        ({"messages": ["oops"]}, r"messages\[0\]: want an object"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role: want user, assistant or system"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\].role: want user"),
        ({"messages": [user("a"), {"role": ["user"], "content": "a"}]}, r"messages\[1\].role: want user"),
        ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content: want a text or a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: want a text or a list"),
        ({"messages": [user(["a"])]}, r"content\[0\]: want a block with its type"),
        ({"messages": [user([text("a"), IMAGE])]}, r"content\[1\]: only text and tool_result.*'image'"),
        ({"messages": [user([{"type": "document"}])]}, r"content\[0\]: only text and tool_result.*'document'"),
        ({"messages": [user([{**RESULT, "content": [IMAGE]}])]}, r"content\[0\].content\[0\]: only text .*'image'"),
        ({"messages": [user([{"type": "tool_result"}])]}, r"content\[0\].tool_use_id: want a text"),
        ({"messages": [user([{"type": "text"}])]}, r"content\[0\].text: want a text"),
        ({"messages": [said({"type": "redacted_thinking", "data": "x"}), user("a")]}, "not 'redacted_thinking'"),
        ({"messages": [said(RESULT), user("a")]}, "only text, thinking and tool_use .* not 'tool_result'"),
        ({"messages": [said({**USE, "input": "{}"}), user("a")]}, r"content\[0\].input: want an object"),
        ({"messages": [said({**USE, "id": None}), user("a")]}, r"content\[0\].id: want a text"),
        ({"messages": [user("a"), said(text("The answer is"))]}, "messages: the last one is the assistant's"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "only text blocks are served here, not 'image'"),
        ({"system": 7}, "system: want a text or a list"),
        ({"system": [IMAGE]}, r"system\[0\]: only text blocks"),
        ({"tools": {}}, "tools: want a list of objects"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type: only custom tools"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema: want an object"),
        ({"tools": [{"input_schema": {}}]}, r"tools\[0\].name: want a text"),
        ({"tools": [{"name": "f", "description": 1, "input_schema": {}}]}, r"tools\[0\].description: want a text"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: only auto and none"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: only auto and none"),
        ({"tool_choice": "auto"}, "tool_choice: only auto and none"),
        ({"stop_sequences": [""]}, "stop_sequences: want a text or a list of texts"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: want one of enabled"),
        ({"thinking": True}, "thinking.type: want one of"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config: only text is served"),
        ({"output_format": {"type": "json_schema"}}, "output_format: only text is served"),
        ({"max_tokens": 0}, "max_tokens: want an integer from 1"),
        ({"temperature": -1}, "temperature: want a number"),
        ({"stream": "yes"}, "stream: want true or false"),
        ({"n": 2}, "n: only 1"),
    ],
)
def test_what_has_no_meaning_here_is_400_by_name_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    talk = Conversation(TITO, "v2")
    with pytest.raises(SessionRefused, match=message) as caught:
        begin(talk, body(**change) if "messages" not in change else {**body(), **change})
    assert (400, 0) == (caught.value.status, talk.session.running)


@pytest.mark.parametrize("value", [None, [], "x", 7])
def test_a_body_that_is_no_object_is_400(value: Any) -> None:
    with pytest.raises(SessionRefused, match="body: want a JSON object"):
        chat_body(value)


def begin(talk: Conversation, given: Any) -> Any:
    return talk.session.begin(chat_body(given), requested_at=talk.tick())


def test_the_whole_form_and_what_it_means() -> None:
    given = body(
        user([text("a"), text("b")]),
        said({"type": "thinking", "thinking": "hm", "signature": "s"}, text("see"), USE),
        user([{**RESULT, "content": [text("7"), text("8")], "is_error": True}, text("and?")]),
        {"role": "system", "content": "be brief"},
        system=[text("You are "), {**text("exact."), "cache_control": {"type": "ephemeral"}}],
        tools=MESSAGES_TOOLS,
        tool_choice={"type": "none", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=4,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        metadata={"user_id": "u"},
        stream=True,
    )
    function = {"name": "lookup", "arguments": '{"key": "a"}'}
    messages = [
        {"role": "system", "content": "You are exact."},
        user("ab"),
        {
            "role": "assistant",
            "content": "see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "78"},
        user("and?"),
        {"role": "system", "content": "be brief"},
    ]
    chat = chat_body(given)
    assert messages == chat["messages"]
    assert (TOOLS, "none", ["END"]) == (chat["tools"], chat["tool_choice"], chat["stop"])
    assert {"enable_thinking": True} == chat["chat_template_kwargs"]
    turn = begin(Conversation(TITO, "v2"), given)
    assert ["output_config", "metadata"] == turn.request.ignored
    assert {"max_new_tokens": 9, "temperature": 0.5, "top_k": 4, "stop": ["END"]} == turn.request.sampling
    assert (True, True) == (turn.request.stream, turn.request.thinking)


def test_texts_and_results_keep_their_order_and_an_empty_message_its_place() -> None:
    given = body(user([text("a"), RESULT, text("b"), text("c")]), user([]), said(), user([{**RESULT, "content": None}]))
    expected = [("user", "a"), ("tool", "7"), ("user", "bc"), ("user", ""), ("assistant", ""), ("tool", "")]
    assert expected == [(message["role"], message["content"]) for message in chat_body(given)["messages"]]


def test_thinking_is_switched_where_the_renderer_can() -> None:
    off = body(thinking={"type": "disabled"})
    assert {"enable_thinking": False} == chat_body(off)["chat_template_kwargs"]
    assert "chat_template_kwargs" not in chat_body(off, can_think=False)
    assert "chat_template_kwargs" not in chat_body(body())
    own = body(thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": False})
    assert {"enable_thinking": False} == chat_body(own)["chat_template_kwargs"]
    with pytest.raises(SessionRefused, match="thinking: this server's renderer cannot"):
        chat_body(body(thinking={"type": "enabled", "budget_tokens": 1024}), can_think=False)


@pytest.mark.parametrize(
    ("finish", "matched", "reason", "sequence"),
    [
        ("stop", 3, "end_turn", None),
        ("stop", None, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("abort", None, "max_tokens", None),
    ],
)
def test_why_a_turn_ended(finish: str, matched: Any, reason: str, sequence: str | None) -> None:
    message = to_message(answered(ParsedMessage(content="ok"), finish, matched))
    assert (reason, sequence) == (message["stop_reason"], message["stop_sequence"])
    assert ("msg_ab", "message", "assistant", "m") == tuple(message[name] for name in ("id", "type", "role", "model"))
    counts = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3}
    assert counts == message["usage"]


def test_an_empty_answer_has_no_block() -> None:
    assert [] == to_message(answered(ParsedMessage(content="")))["content"]


@given(answers)
def test_an_answer_that_is_sent_back_is_the_stored_message(parsed: ParsedMessage) -> None:
    reply = answered(parsed)
    blocks = json.loads(orjson.dumps(to_message(reply)))["content"]
    back = chat_body(body(user("a"), said(*blocks), user("b")))["messages"][1]
    assert strict(reply["choices"][0]["message"], back)


SCRIPTS = [
    "ok",
    "",
    call("a"),
    f"two\n\n{call('b')}\n{call('ü')}",
    "<think>\nhm\n</think>\n\nyes",
    f"<think>\nhm\n</think>\n\n{call('a')}",
    '<tool_call>\n{"name": "lookup", "arguments": {"key" "b"}}\n</tool_call>',
    "a <|im_end|> inside",
    "ü東 \n\n",
]


@given(
    st.sampled_from(["v1", "v2"]),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(SCRIPTS), st.booleans()), min_size=1, max_size=5),
)
def test_both_forms_make_the_same_conversation(version: str, thinking: bool, turns: list[tuple[str, bool]]) -> None:
    """Turn by turn the same prompt ids, each extending the last turn; samples are equal bit for bit."""
    talks = [Conversation(TITO, version, enable_thinking=thinking, seed="00") for _ in range(2)]
    chat, messages = [{"role": "system", "content": "Be exact."}, user("go")], [user([text("g"), text("o")])]
    for script, brief in turns:
        begun = [
            talks[0].session.begin({"model": "m", "messages": chat, "tools": TOOLS}, requested_at=talks[0].tick()),
            begin(talks[1], {"model": "m", "system": "Be exact.", "messages": messages, "tools": MESSAGES_TOOLS}),
        ]
        assert begun[0].prompt_ids == begun[1].prompt_ids
        assert begun[0].sampling_seed == begun[1].sampling_seed
        for talk, turn in zip(talks, begun, strict=True):
            assert (talk.session.nodes or [None])[-1] is turn.parent
            talk.commit(turn, script)
        reply = talks[0].last_reply["choices"][0]["message"]
        blocks = json.loads(orjson.dumps(to_message(talks[1].last_reply)))["content"]
        calls = reply.get("tool_calls") or []
        chat += [reply, *({"role": "tool", "tool_call_id": one["id"], "content": "7"} for one in calls)]
        results = [{"type": "tool_result", "tool_use_id": one["id"], "content": [text("7")]} for one in calls]
        messages += [said(*blocks), *([user(results)] if results else [])]
        if brief:
            chat.append({"role": "system", "content": "Be brief."})
            messages.append({"role": "system", "content": [text("Be "), text("brief.")]})
        chat.append(user("on"))
        messages.append(user("on"))
    first, second = (talk.session.samples().samples[0] for talk in talks)
    assert first.tokens_T.tobytes() == second.tokens_T.tobytes()
    assert first.rollout_log_probs_R.tobytes() == second.rollout_log_probs_R.tobytes()
    assert [node.appended for node in talks[0].session.nodes] == [node.appended for node in talks[1].session.nodes]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_count_is_the_prompts_length_and_changes_nothing(version: str) -> None:
    talk = Conversation(TITO, version, max_turns=1, max_seq_len=190)
    talk.ask(user("go"), text=call("a"), tools=TOOLS)
    history = [*talk.history, {"role": "tool", "tool_call_id": "x", "content": "7 " * 40}]
    before = (tape_to_table(talk.session.tape()), talk.session.metadata())
    other = Conversation(TITO, version)
    other.ask(user("go"), text=call("a"), tools=TOOLS)
    expected = len(other.begin(history, tools=TOOLS).prompt_ids)
    assert expected == talk.session.count({"messages": history, "tools": TOOLS}) > 190
    assert before == (tape_to_table(talk.session.tape()), talk.session.metadata())
    assert 0 == talk.session.running
    with pytest.raises(SessionRefused, match="messages: want a list"):
        talk.session.count({"messages": []})
