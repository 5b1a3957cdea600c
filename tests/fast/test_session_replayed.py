"""Long histories: what a client repeats is found by value, kept once, and costs little."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from scripted import TOOLS, Conversation, tiny_tito, user

from rollout.errors import SessionRefused
from rollout.session import session as session_module
from rollout.session.tape import ClientSide
from rollout.session.views import records_view

TITO = tiny_tito()
VERSIONS = ("v1", "v2")


def as_an_sdk_sends_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the OpenAI SDK's model_dump gives it: keys without a value, parsed anew each time."""
    if message["role"] == "assistant":
        message = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, **message}
    return orjson.loads(orjson.dumps(message))


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_is_linear_a_spelling_that_stays_is_kept_once(version: str) -> None:
    talk = Conversation(TITO, version)
    sent = []
    for turn in range(12):
        sent.append([*map(as_an_sdk_sends_it, talk.history), user(str(turn))])
        talk.history = sent[-1]
        talk.ask(text=f"answer {turn}")
    assert [{}] + [{2 * place - 1: sent[place][-2]} for place in range(1, 12)] == [
        node.respelled for node in talk.session.nodes
    ]
    assert sent == [record["request"]["messages"] for record in records_view(talk.session.active_path())]
    client = ClientSide(talk.session.tape())
    for exchange, node in zip(client.body(0)["messages"], talk.session.nodes, strict=False):
        assert exchange == node.appended[0]
    for seq, messages in enumerate(sent):
        assert messages == client.body(seq)["messages"]
        client.answered(seq, talk.session.nodes[seq].reply)


@pytest.mark.parametrize("version", VERSIONS)
def test_going_back_to_the_stored_spelling_is_told_too(version: str) -> None:
    talk = Conversation(TITO, version)
    talk.ask(user("a"))
    stored = talk.history
    talk.history = list(map(as_an_sdk_sends_it, stored))
    talk.ask(user("b"))
    talk.history = [*stored, *talk.history[2:]]
    talk.ask(user("c"))
    assert stored[1] == talk.session.nodes[2].respelled[1]
    shown = records_view(talk.session.active_path())
    assert stored == shown[2]["request"]["messages"][:2]


@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_are_told_apart_by_their_kind(version: str) -> None:
    """1, 1.0 and true are equal in Python: the spelling that was sent is kept nevertheless."""
    talk = Conversation(TITO, version)
    arguments: list[Any] = [{"a": 1}, {"a": 1.0}]
    spelled = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": one}}]}
        for one in arguments
    ]
    talk.ask(user("a"), spelled[0], user("b"))
    talk.history[1] = spelled[1]
    talk.ask(user("c"))
    assert [0] * 2 == [node.seq - place for place, node in enumerate(talk.session.nodes)]
    assert b'{"a":1.0}' in orjson.dumps(talk.session.nodes[1].respelled[1])
    true = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": True}}}]}
    talk.history[1] = true
    if version == "v2":
        assert talk.begin([*talk.history, user("d")]).parent is None
    else:
        with pytest.raises(SessionRefused, match="rollback failed"):
            talk.begin([*talk.history, user("d")])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_message_that_is_no_message_is_400_by_its_place(version: str) -> None:
    talk = Conversation(TITO, version)
    for text in "abc":
        talk.ask(user(text))
    for bad, text in ((None, "want an object"), ({"role": "user", "content": 7}, "content: want a text")):
        with pytest.raises(SessionRefused, match=rf"messages\[2\].*{text}") as refused:
            talk.begin([*talk.history[:2], bad, *talk.history[3:], user("d")])
        assert 400 == refused.value.status


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_message_that_no_json_can_carry_is_400(version: str) -> None:
    """The place, or the nesting, does not matter to the matcher, but it could not be told again."""
    talk = Conversation(TITO, version)
    talk.ask(user("a"))
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    for extra in ({"extra": deep}, {"extra": "\ud800"}):
        with pytest.raises(SessionRefused, match="messages: ") as refused:
            talk.begin([{**talk.history[0], **extra}, talk.history[1], user("b")])
        assert 400 == refused.value.status


@pytest.mark.parametrize("number", [0.1, 1e22, 1e-7, -0.0, 5e-324, 2**53 + 1, 1.0, 100])
def test_loose_arguments_in_an_object_equal_those_in_text(number: float) -> None:
    """A client that reads arguments and sends the object back repeats what it read, whatever the numbers."""
    text = orjson.dumps({"n": number}).decode()
    talk = Conversation(TITO, "v2")
    talk.ask(user("go"), text=f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>', tools=TOOLS)
    reply = orjson.loads(orjson.dumps(talk.history[1]))
    function = reply["tool_calls"][0]["function"]
    function["arguments"] = orjson.loads(function["arguments"])
    assert talk.begin([talk.history[0], reply, user("b")]).parent is talk.session.nodes[0]
    function["arguments"]["n"] = 0.25
    assert talk.begin([talk.history[0], reply, user("b")]).parent is None


@pytest.mark.parametrize("version", VERSIONS)
def test_a_history_that_is_repeated_as_it_was_is_compared_once_and_matched_never(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    matcher = session_module.find_matcher("loose_tool_call")
    counting = lambda name: lambda a, b: asked.append(1) or matcher(a, b)  # noqa: E731
    monkeypatch.setattr(session_module, "find_matcher", counting)
    talk = Conversation(TITO, version)
    for turn in range(30):
        talk.history = list(map(as_an_sdk_sends_it, talk.history))
        before = len(asked)
        talk.ask(user(str(turn)))
        assert len(asked) - before <= 2, "only the last generation's own messages are new to the matcher"
