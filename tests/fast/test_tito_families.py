"""One suite of conversations for every family whose real vocabulary can be had."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from family_talks import Says, Talk, keys_of, results
from refusing_bridge import without_bridge
from scripted import TOOLS, user
from vocabulary import FAMILIES, family

from rollout.errors import BadConfig, SessionRefused
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.parity.verdict import judge
from rollout.session.node import tokens_of
from rollout.tito.families import family_names
from rollout.tito.renderer import Tito

UNICODE = "Grüße, 世界 👋🏽 e\u0301 \u200d \u0000"
REASONING = "Let me think: ß."


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a family's own format makes of the suite.

    `calls` in one message at most; `drift` in any conversation; `beside_calls` is what is left of the
    text "Now" before a call, `drift_beside_calls` what its template then writes otherwise; `refuses`
    names roles that cannot be appended; `two_results` is the bridge's refusal of two tool results.
    """

    calls: int = 2
    drift: frozenset[str] = frozenset()
    beside_calls: str = "Now"
    drift_beside_calls: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()
    two_results: str | None = None
    control: str = "<|im_end|>"


DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
EXPECTED = {
    "qwen3": Expected(refuses=frozenset({"developer"})),
    "prime-qwen3": Expected(),
    "qwen3-vl": Expected(refuses=frozenset({"developer", "system"})),
    "qwen3.5": Expected(refuses=frozenset({"developer"})),
    "qwen3.6": Expected(refuses=frozenset({"developer"})),
    "deepseek-v3": Expected(refuses=frozenset({"developer"}), control=DEEPSEEK),
    # Its template writes no reasoning of any turn, the last one's included.
    "deepseek-r1": Expected(
        drift=frozenset({"non_assistant_text"}), refuses=frozenset({"developer"}), control=DEEPSEEK
    ),
    # It puts a blank line before calls, and its parser leaves that line in the text.
    "deepseek-v4": Expected(
        beside_calls="Now\n\n",
        drift_beside_calls=frozenset({"non_assistant_text"}),
        two_results="bridge_refused",
        control=DEEPSEEK,
    ),
    "llama-3": Expected(calls=1, beside_calls="", control="<|eot_id|>"),
}


def _cases() -> Iterator[Any]:
    for name in EXPECTED:
        for thinking in (False, True) if name in ("qwen3", "qwen3.5", "qwen3.6", "deepseek-v4") else (False,):
            # The plain Qwen3 and Llama 3 stand for all in the fast tests.
            marks = [] if name in ("qwen3", "deepseek-v3") else [pytest.mark.full]
            yield pytest.param(name, thinking, marks=marks, id=f"{name}{'-thinking' if thinking else ''}")


every_family = pytest.mark.parametrize(("name", "thinking"), list(_cases()))


def says(talk: Talk, text: str = "", keys: tuple[str, ...] = ()) -> Says:
    reasons = talk.thinking or talk.tito.name == "deepseek-r1"
    return Says(text=text, keys=keys, reasoning=REASONING if reasons else None)


def check(talk: Talk, drift: frozenset[str], verdict: str = "equal") -> None:
    """All that holds for any conversation: kept ids, the bridge, the replay, the comparator."""
    for turn in talk.turns:
        if turn.parent is None:
            continue
        path = tokens_of([*_path(turn.parent)]).tolist()
        assert path == turn.prompt_ids[: len(path)]
        _check_bridge(talk, turn)
    outcome = Outcome(
        input=RolloutInput(index=0, group_index=0, messages=[user("x")], label=None, metadata={}),
        attempt=0,
        session_version=talk.settings.version,
        agent_result={},
        reward=1.0,
    )
    reply = talk.session.samples()
    outcome.empty_reason = reply.empty_reason
    found = judge(talk.session.tape(), outcome, finish(reply.samples, outcome), talk.tito)
    assert (verdict, []) == (found.verdict, found.paths), found
    seen = {entry["type"] for sample in reply.samples for entry in json.loads(sample.drift or "null")}
    assert drift == seen
    assert talk.session.metadata() == reply.session_metadata


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _path(node: Any) -> list[Any]:
    return [*(_path(node.parent) if node.parent else []), node]


def _check_bridge(talk: Talk, turn: Any) -> None:
    """The last turn's ids alone give the same extension as all; so does a full render where the bridge could."""
    parent, tito = turn.parent, talk.tito
    if parent.truncated:
        return
    output = parent.generation.output_ids_O.tolist()
    given: dict[str, Any] = {
        "tools": turn.request.tools,
        "thinking": talk.thinking,
        "history": turn.request.messages[: parent.n_messages],
    }
    appended = turn.request.messages[parent.n_messages :]
    whole = tito.extend(tokens_of(_path(parent)).tolist()[: parent.n_prompt], output, appended, **given)
    alone = tito.extend(parent.open_ids, output, appended, **given)
    assert whole == alone and alone is not None
    assert turn.appended_ids_P.tolist() == alone.ids
    rendered = without_bridge(tito).extend(parent.open_ids, output, appended, **given)
    assert rendered is not None and rendered.ids == alone.ids


@every_family
def test_turns_of_text(name: str, thinking: bool) -> None:
    talk = Talk(family(name), "v2", enable_thinking=thinking)
    for number in range(3):
        message = talk.ask(user(f"{number} {UNICODE}"), says=says(talk, f"{number}: {UNICODE}"))
        assert _nfc(f"{number}: {UNICODE}") == _nfc(message["content"])  # Qwen's vocabularies normalise
        assert (REASONING if thinking else None) == message.get("reasoning_content") or name == "deepseek-r1"
    assert [None] * 3 == [turn.refusal for turn in talk.turns]
    check(talk, EXPECTED[name].drift)


@every_family
def test_tool_calls_and_their_results(name: str, thinking: bool) -> None:
    expected, talk = EXPECTED[name], Talk(family(name), "v2", enable_thinking=thinking)
    message = talk.ask(user("look"), says=says(talk, keys=("a ü",)), tools=TOOLS)
    assert ("", ("a ü",)) == (message["content"] or "", keys_of(message))
    message = talk.ask(*results(message, "one"), says=says(talk, "done"), tools=TOOLS)
    talk.ask(user("thanks"), says=says(talk, "bye"), tools=TOOLS)
    assert [None] * 3 == [turn.refusal for turn in talk.turns]
    check(talk, expected.drift)


@every_family
def test_text_and_two_calls(name: str, thinking: bool) -> None:
    expected, talk = EXPECTED[name], Talk(family(name), "v2", enable_thinking=thinking)
    keys = ("b", "c")[: expected.calls]
    message = talk.ask(user("look"), says=says(talk, "Now", keys=keys), tools=TOOLS)
    assert (expected.beside_calls, keys) == (message["content"] or "", keys_of(message))
    talk.ask(*results(message, *("two", "three")[: len(keys)]), says=says(talk, "done"), tools=TOOLS)
    assert [None, expected.two_results] == [turn.refusal for turn in talk.turns]
    check(talk, expected.drift | expected.drift_beside_calls)
    if expected.calls == 1:
        two = Says(keys=("a", "b")).message()
        with pytest.raises(SessionRefused, match="single tool call") as refused:
            Talk(family(name), "v2").begin(user("x"), two, user("y"), tools=TOOLS)
        assert 400 == refused.value.status


@every_family
def test_what_clients_put_between_turns(name: str, thinking: bool) -> None:
    expected, talk = EXPECTED[name], Talk(family(name), "v2", enable_thinking=thinking)
    talk.ask(user("a"), says=says(talk, "b"))
    for role in ("system", "developer"):
        if role in expected.refuses or (role == "developer" and name == "deepseek-v4" and thinking):
            before = talk.history
            with pytest.raises(SessionRefused) as refused:
                talk.begin({"role": role, "content": "be brief"}, user("c"))
            assert 400 == refused.value.status
            talk.history = before
        else:
            talk.ask({"role": role, "content": "be brief"}, user("c"), says=says(talk, "d"))
            assert "be brief" in talk.tito.decode(talk.turns[-1].appended_ids_P.tolist())
    talk = Talk(family(name), "v2", enable_thinking=thinking)
    talk.ask(user("a"), says=says(talk, "b"))
    talk.ask({"role": "assistant", "content": "injected"}, user("e"), says=says(talk, "f"))
    assert "assistant_appended" == talk.turns[-1].refusal
    assert tokens_of(talk.session.active_path()).tolist()[: talk.turns[0].n_prompt] == talk.turns[0].prompt_ids


@every_family
def test_branches_and_compaction(name: str, thinking: bool) -> None:
    talk = Talk(family(name), "v2", enable_thinking=thinking)
    talk.ask(user("a"), says=says(talk, "b"))
    stem = talk.history
    talk.ask(user("c"), says=says(talk, "d"))
    talk.ask(user("e"), says=says(talk, "f"))
    talk.history = stem
    talk.ask(user("g"), says=says(talk, "h"))
    talk.history = [user("summary: b, d")]
    talk.ask(user("i"), says=says(talk, "j"))
    assert [None, 0, 1, 0, None] == [node.parent.seq if node.parent else None for node in talk.session.nodes]
    check(talk, EXPECTED[name].drift, verdict="equal_by_path")


@every_family
def test_a_cut_turn(name: str, thinking: bool) -> None:
    for version in ("v1", "v2"):
        talk = Talk(family(name), version, enable_thinking=thinking)
        turn = talk.begin(user("a"))
        talk.commit(turn, talk.tito.tokenizer.encode("never ends, because"), finish="length")
        if version == "v2":
            with pytest.raises(SessionRefused) as refused:
                talk.begin(user("b"))
            assert 409 == refused.value.status
        else:
            talk.ask(user("b"), says=says(talk, "c"))
            assert "cut_turn" == talk.turns[-1].refusal


@every_family
def test_control_text(name: str, thinking: bool) -> None:
    tito, control = family(name), EXPECTED[name].control
    number, text = tito.tokenizer.control_ids[control], f"a {control} b"
    counts = {}
    for setting in ("reference", "plain"):
        talk = Talk(tito, "v2", enable_thinking=thinking, control_text=setting)
        talk.ask(user(text), says=says(talk, "ok"))
        talk.ask(user(text), says=says(talk, "ok"))
        counts[setting] = [turn.appended_ids_P.tolist().count(number) for turn in talk.turns]
        assert [int(setting == "reference")] * 2 == [turn.control_text for turn in talk.turns]
        drift = json.loads(talk.session.samples().samples[0].drift or "null")
        assert EXPECTED[name].drift == {entry["type"] for entry in drift}
    assert [1, 1] == [a - b for a, b in zip(counts["reference"], counts["plain"], strict=True)]
    with pytest.raises(SessionRefused) as refused:
        Talk(tito, "v2", control_text="refuse").begin(user(text))
    assert 400 == refused.value.status


def test_every_family_with_a_vocabulary_has_its_expectations() -> None:
    assert set(FAMILIES) == set(EXPECTED) <= set(family_names())


def test_an_unknown_family_is_refused_with_the_names_there_are() -> None:
    for name in ("nope", "auto", "default", "custom"):
        with pytest.raises(BadConfig, match=r"deepseek-r1, .*qwen3\.8"):
            Tito(family("qwen3").tokenizer, name)
