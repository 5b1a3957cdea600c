"""A chat body of which only what is new is parsed is the body that a parser of the whole gives, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOOLS, user

from rollout.session.incoming import drop_parsed_arguments
from rollout.session.resent import Resent

TRICKY = ["a", '"messages":[', '],"messages":[{}', "\\", "é\u2028", '"}]', "parsed_arguments"]
texts = st.sampled_from(TRICKY) | st.text(max_size=5)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**64) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("messages"), inner, max_size=3),
    max_leaves=6,
)
call = st.fixed_dictionaries({"function": st.fixed_dictionaries({"parsed_arguments": values, "arguments": texts})})
message = (
    values
    | st.fixed_dictionaries({"role": texts, "content": values})
    | st.fixed_dictionaries({"role": texts, "tool_calls": st.lists(call, max_size=2)})
)


@st.composite
def fields(draw: Any, messages: list[Any]) -> str:
    """A body's text: its messages among other fields, some of them twice, in a client's own spelling."""
    spelled = draw(
        st.sampled_from([{"separators": (",", ":"), "ensure_ascii": False}, {}, {"separators": (" , ", " : ")}])
    )
    names = st.sampled_from(['"model"', '"tools"', '"messages"', '"m\\u0065ssages"'])
    others = st.lists(st.tuples(names, values | st.lists(message, max_size=2)), max_size=2)
    pairs = [*draw(others), ('"messages"', messages), *draw(others)]
    return "{" + ",".join(f"{name}:{json.dumps(value, **spelled)}" for name, value in pairs) + "}"


@st.composite
def bodies(draw: Any) -> list[bytes]:
    """Bodies of one session: histories that grow, stay, shrink or change, some of them broken."""
    messages: list[Any] = []
    sent = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["grow", "grow", "grow", "same", "shrink", "change", "broken", "other"]))
        if kind == "shrink":
            messages = messages[:-1]
        elif kind == "change" and messages:
            messages = [*messages[:-1], draw(message)]
        elif kind != "same":
            messages = [*messages, *draw(st.lists(message, min_size=1, max_size=2))]
        text = draw(fields(messages))
        sent.append((text[: draw(st.integers(0, len(text)))] if kind == "broken" else text).encode())
        if kind == "grow":
            text = draw(st.sampled_from(['{"messages":', '{"model":"m","messages":', '{"x":[1],"messages":[[1]],"x":']))
            sent += [f"{text}{json.dumps(messages[:end])}}}".encode() for end in range(1, len(messages) + 1)]
    return sent


def whole(content: bytes) -> Any:
    body = orjson.loads(content)
    drop_parsed_arguments(body)
    return body


@settings(max_examples=150, deadline=None)
@given(bodies())
def test_every_body_reads_as_if_it_were_the_first(sent):
    resent = Resent()
    for content in sent:
        try:
            wanted = whole(content)
        except orjson.JSONDecodeError as error:
            with pytest.raises(orjson.JSONDecodeError) as raised:
                resent.read(content)
            assert str(raised.value) == str(error)
            continue
        body, resent = resent.read(content)
        resent = resent.holding(body.get("messages") if isinstance(body.get("messages"), list) else None)
        assert json.dumps(body) == json.dumps(wanted)  # tells kinds of numbers apart, and the order of keys


@pytest.mark.parametrize("spelled", [{"separators": (",", ":")}, {}, {"ensure_ascii": False}])
@pytest.mark.parametrize("head", [{}, {"model": "m", "tools": TOOLS}])
def test_known_messages_are_the_objects_of_the_bodies_before(head, spelled):
    resent, before, messages = Resent(), [], [user("é]")]
    for turn in range(6):
        content = json.dumps({**head, "messages": messages, "temperature": turn}, **spelled).encode()
        body, resent = resent.read(content)
        same = [a is b for a, b in zip(before, body["messages"], strict=False)]
        assert all(same) or turn == 1  # from the second on it is known where messages end
        assert len(resent.rest) < 400
        before = body["messages"]
        messages = [*messages, {"role": "assistant", "content": "[1]"}, user(f"and {turn}")]


def test_a_sessions_own_objects_stand_for_those_that_were_read():
    resent, messages = Resent(), [user("a")]
    for _ in range(3):
        messages.append(user("b"))
        _, resent = resent.read(orjson.dumps({"messages": messages}))
    for n_held in (0, 1, len(messages)):
        read, _ = resent.holding(messages[:n_held]).read(orjson.dumps({"messages": [*messages, user("c")]}))
        assert [a is b for a, b in zip(messages, read["messages"], strict=False)] == [True] * n_held + [False] * (
            len(messages) - n_held
        )


def test_a_history_sent_again_with_another_end_is_read_from_where_it_ended():
    resent, messages = Resent(), [user("a"), user("b")]
    for _ in range(3):
        messages.append(user("c"))
        body, resent = resent.read(orjson.dumps({"messages": messages}))
    again, _ = resent.read(orjson.dumps({"messages": [*messages[:-1], user("d")]}))
    assert again["messages"][0] is body["messages"][0]
    assert again["messages"][-1] == user("d")


FIRST = b'{"x":[0],"messages":[],"x":[1]}'


@pytest.mark.parametrize("first", [FIRST, FIRST.replace(b"[]", b'[{"role":"user"}]')])
@pytest.mark.parametrize("behind", [b"", b',"messages":[3]', b',"m\\u0065ssages":[3]'])
def test_what_only_looks_like_messages_is_none(first, behind):
    _, resent = Resent().read(first)
    second = first.replace(b"[1]}", b"[1,2]%b}" % behind)  # another field's list goes on
    body, resent = resent.read(second)
    assert body == orjson.loads(second)
    again = second.replace(b"[1,2]", b"[1,2,3]")
    assert resent.read(again)[0] == orjson.loads(again)


def test_another_list_behind_known_messages_may_grow():
    resent, histories = Resent(), [[1], [1, 2], [1, 2, 3]]
    for body in [{"messages": one} for one in histories] + [{"messages": [1, 2], "x": [0] * n} for n in (1, 2)]:
        read, resent = resent.read(orjson.dumps(body))
        assert read == body
