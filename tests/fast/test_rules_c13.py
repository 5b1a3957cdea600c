"""Rules C13 of the reference's session server: what counts as the same message."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from installing import install
from scripted import TOOLS, Conversation, call, tiny_tito, user
from strategies import message_pairs

from rollout.errors import SessionRefused, UnknownPart
from rollout.session import session as session_module
from rollout.session.matching import find_matcher, loose_tool_call, role_content_only, strict

TITO = tiny_tito()
MATCHERS = [strict, loose_tool_call, role_content_only]
VERSIONS = ("v1", "v2")
CODE = """
import time

def anything(stored, replayed):
    return stored.get("role") == replayed.get("role")

async def waits(stored, replayed):
    return True

number = 7
"""


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    entries = {"rollout.matchers": {"c13_any": "anything", "c13_async": "waits", "c13_number": "number"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(tmp_path_factory.mktemp("c13"), "c13-matchers", CODE, entries))
        yield


def assistant(arguments: Any = '{"a": 1}', **more: Any) -> dict[str, Any]:
    one = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [one], **more}


@pytest.mark.parametrize("version", VERSIONS)
def test_c13_a_matcher_that_raises_or_gives_no_bool_is_500(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(stored: Any, replayed: Any) -> bool:
        raise KeyError("boom")

    for bad, text in (
        (raising, "session message matcher raised an exception"),
        (lambda stored, replayed: 1, "session message matcher must return bool, got int"),
        (lambda stored, replayed: None, "session message matcher must return bool, got NoneType"),
        (lambda stored, replayed: "yes", "session message matcher must return bool, got str"),
    ):
        monkeypatch.setattr(session_module, "find_matcher", lambda name, bad=bad: bad)
        talk = Conversation(TITO, version)
        talk.ask(user("a"))
        before = talk.session.metadata()
        with pytest.raises(SessionRefused, match=text) as refused:
            talk.begin([*talk.history, user("b")])
        assert (500, before) == (refused.value.status, talk.session.metadata())


def test_c13_names_are_exact_and_a_users_own_is_found_like_ours() -> None:
    assert MATCHERS == [find_matcher(name) for name in ("strict", "loose_tool_call", "role_content_only")]
    talk = Conversation(TITO, "v2", matcher="c13_any")
    talk.ask(user("a"))
    talk.history[1] = {"role": "assistant", "content": "rewritten"}
    assert talk.begin([*talk.history, user("b")]).parent is talk.session.nodes[0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Strict", "no matcher 'Strict' is installed"),
        ("", "no matcher '' is installed"),
        ("c13_async", "is asynchronous"),
        ("c13_number", "is a int, not a function"),
        ("no_such_module:f", "does not allow"),
    ],
)
def test_c13_what_is_no_matcher_is_a_value_error_at_the_start(name: str, problem: str) -> None:
    with pytest.raises(UnknownPart, match=problem) as refused:
        find_matcher(name)
    assert isinstance(refused.value, ValueError)


def test_c13_strict_takes_null_empty_text_and_empty_list_for_one() -> None:
    for name in ("content", "reasoning_content", "tool_calls"):
        for a in (None, "", []):
            for b in (None, "", [], "absent"):
                if (name == "tool_calls") == ("" in (a, b)) and name != "content":
                    continue
                stored = {"role": "assistant", "content": "x", name: a}
                replayed = {"role": "assistant", "content": "x", name: b}
                if b == "absent":
                    del replayed[name]
                assert all(matcher(stored, replayed) for matcher in MATCHERS), (name, a, b)


def test_c13_strict_drops_the_index_of_calls_and_nothing_else() -> None:
    replayed = assistant()
    replayed["tool_calls"][0]["index"] = 0
    assert all(matcher(assistant(), replayed) for matcher in MATCHERS)
    for arguments in ('{"a":1}', '{"a": 1.0}', '{"a": 1} ', {"a": 1}):
        assert not strict(assistant(), assistant(arguments))
    for a, b in (("a", "a "), ("\u00e9", "e\u0301"), ("a", "A")):
        assert not any(matcher(user(a), user(b)) for matcher in MATCHERS)


def test_c13_other_keys_and_tool_call_ids_of_results_are_compared_by_none() -> None:
    stored = {"role": "tool", "content": "4", "tool_call_id": "a", "name": "f"}
    replayed = {"role": "tool", "content": "4", "tool_call_id": "b", "provider": {"x": 1}}
    assert all(matcher(stored, replayed) for matcher in MATCHERS)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": {"x": 1, "y": [1]}}', '{"a":{"y":[1],"x":1}}', True),
        ("", "{}", True),
        (None, "{}", True),
        ({}, "{}", True),
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1e2}', '{"a": 100}', True),
        ('{"a": 0.1}', '{"a": 0.10000000000000001}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": null}', '{"a": ""}', False),
        ('{"a": null}', "{}", False),
        ('{"a": 1, "a": 1}', '{"a": 1}', False),
        ('{"a": 1, "a": 1}', '{"a": 1, "a": 1}', True),
        ('{"a": NaN}', '{"a":NaN}', False),
        ('{"a": NaN}', '{"a": NaN}', True),
        ('{"a": Infinity}', '{"a":Infinity}', False),
        ("[1]", "[ 1]", False),
        ("1", "1.0", False),
        (" ", "{}", False),
        (" ", " ", True),
        ('{"a" 1}', '{"a"  1}', False),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, '{"a": 1}', True),
        ({"a": float("nan")}, '{"a": NaN}', False),
        ('{"a":' + "[" * 100_000, '{"a": ' + "[" * 100_000, False),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", True),
    ],
)
def test_c13_loose_tool_call_compares_arguments_as_json_objects(a: Any, b: Any, same: bool) -> None:
    assert same is loose_tool_call(assistant(a), assistant(b))
    assert same is loose_tool_call(assistant(b), assistant(a))


def test_c13_loose_tool_call_compares_all_else_of_a_call() -> None:
    for change in (
        {"id": "c2"},
        {"type": "custom"},
        {"extra": 1},
        {"function": {"name": "g", "arguments": '{"a": 1}'}},
        {"function": {"name": "f", "arguments": '{"a": 1}', "extra": None}},
        {"function": {"name": "f"}},
    ):
        replayed = assistant()
        replayed["tool_calls"][0] |= change
        assert not loose_tool_call(assistant(), replayed), change
    twice = assistant()
    twice["tool_calls"] = twice["tool_calls"] * 2
    assert not loose_tool_call(assistant(), twice)
    missing = assistant("{}")
    del missing["tool_calls"][0]["function"]["arguments"]
    assert not loose_tool_call(assistant("{}"), missing)
    for name in ("role", "content", "reasoning_content"):
        assert not loose_tool_call(assistant(), {**assistant(), name: "other"})


def test_c13_no_depth_of_nesting_escapes_as_an_error() -> None:
    def deep() -> Any:
        value: Any = 1
        for _ in range(5000):
            value = [value]
        return value

    for one, same in (
        (lambda: assistant(extra=deep()), [True] * 3),
        (lambda: assistant({"a": deep()}), [False, False, True]),
        (lambda: {"role": "assistant", "content": "", "extra": deep()}, [True] * 3),
    ):
        assert same == [matcher(one(), one()) for matcher in MATCHERS]


def test_c13_role_content_only_reads_role_and_content() -> None:
    assert role_content_only(assistant(), assistant(reasoning_content="x", tool_calls=None))
    assert not role_content_only(assistant(content="a"), assistant(content="b"))
    assert not role_content_only(assistant(), {**assistant(), "role": "user"})


@settings(max_examples=200, deadline=None)
@example(({"role": "a", "content": None}, {"role": "a"}))
@given(message_pairs)
def test_c13_each_matcher_accepts_what_the_stricter_one_does(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    check_monotonic(*pair)


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(message_pairs)
def test_c13_each_matcher_accepts_what_the_stricter_one_does_thousands(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    check_monotonic(*pair)


def check_monotonic(stored: dict[str, Any], replayed: dict[str, Any]) -> None:
    before = copy.deepcopy((stored, replayed))
    for a, b in ((stored, replayed), (replayed, stored)):
        told = [matcher(a, b) for matcher in MATCHERS]
        assert all(type(one) is bool for one in told)
        assert told[0] <= told[1] <= told[2], told
        assert told == [matcher(b, a) for matcher in MATCHERS], "either may be the stored one"
    assert all(matcher(stored, copy.deepcopy(stored)) for matcher in MATCHERS)
    assert repr(before) == repr((stored, replayed)), "nothing is changed"


@pytest.mark.parametrize("version", VERSIONS)
def test_c13_stored_messages_and_ids_stay_on_a_match(version: str) -> None:
    """A loose match takes the stored spelling for the prefix, the client's for what it appends."""
    loose, straight = (Conversation(TITO, version, matcher=name) for name in ("loose_tool_call", "strict"))
    for talk in (loose, straight):
        talk.ask(user("go"), text=call("x"), tools=TOOLS)
    replayed = json.loads(json.dumps(loose.history[1]))
    replayed["tool_calls"][0]["function"]["arguments"] = '{"key":"x"}'
    loose.history[1] = replayed
    for talk in (loose, straight):
        talk.ask(user("b"), tools=TOOLS)
    assert straight.session.nodes[1].appended_ids_P.tobytes() == loose.session.nodes[1].appended_ids_P.tobytes()
    assert straight.history[1] == loose.session.nodes[0].reply
    assert straight.session.metadata()["accumulated_token_ids"] == loose.session.metadata()["accumulated_token_ids"]
