"""A shadow matcher is asked and counted; prompts, samples, tape and what clients see stay as without it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from app_stage import app_stage
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import START, TOOLS, Conversation, call, play, tables, tiny_tito, user
from session_stage import END
from strategies import conversations

from rollout.errors import BadConfig, SessionRefused, UnknownPart
from rollout.parity.validate import validate_tables
from rollout.session import shadow as shadow_module
from rollout.session.opening import read_settings
from rollout.session.options import ServerOptions
from rollout.session.settings import SessionSettings
from rollout.session.tape import table_to_tape, tape_to_table
from rollout.session.views import records_view

TITO = tiny_tito()
VERSIONS = ("v1", "v2")
NAMES = ("strict", "loose_tool_call", "role_content_only")


def respelled(message: dict[str, Any], arguments: str) -> dict[str, Any]:
    copy = orjson.loads(orjson.dumps(message))
    copy["tool_calls"][0]["function"]["arguments"] = arguments
    return copy


def counts(talk: Conversation) -> dict[str, int]:
    return talk.session.metadata()["shadow"]["decisions"]


@pytest.mark.parametrize("version", VERSIONS)
def test_g01_the_shadow_counts_where_it_would_have_gone(version: str) -> None:
    """loose goes on where strict would open a root; strict opens one where loose would go on."""
    for matcher, shadow, other in (
        ("loose_tool_call", "strict", "new_root"),
        ("strict", "loose_tool_call", "other_node"),
        ("loose_tool_call", "role_content_only", "same"),
    ):
        talk = Conversation(TITO, version, matcher=matcher, shadow_matcher=shadow)
        talk.ask(user("go"), text=call("x"), tools=TOOLS)
        assert {"same": 1} == counts(talk)
        talk.history[1] = respelled(talk.history[1], '{"key":"x"}')
        talk.ask(user("b"))
        expected = {"same": 2} if other == "same" else {"same": 1, other: 1}
        assert ({"matcher": shadow, "decisions": expected}) == talk.session.metadata()["shadow"]


def test_a_shadow_that_would_go_back_too_far_refuses() -> None:
    talk = Conversation(TITO, "v1", shadow_matcher="strict")
    talk.ask(user("go"), text=call("x"), tools=TOOLS)
    talk.ask(user("b"))
    talk.history[1] = respelled(talk.history[1], '{"key":"x"}')
    talk.ask(user("c"))
    assert {"refused": 1, "same": 2} == counts(talk)


def test_a_shadow_that_would_extend_a_cut_turn_refuses() -> None:
    talk = Conversation(TITO, "v2", matcher="strict", shadow_matcher="role_content_only")
    talk.ask(user("a"), text="<think>\nhm\n</think>\n\nyes", finish="length")
    talk.history[1] = {**talk.history[1], "reasoning_content": "other"}
    talk.ask(user("b"))
    assert {"refused": 1, "same": 1} == counts(talk)


def test_a_shadow_that_fails_costs_the_client_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(stored: Any, replayed: Any) -> bool:
        raise KeyError("boom")

    for bad in (raising, lambda stored, replayed: 1):
        monkeypatch.setattr(shadow_module, "find_matcher", lambda name, bad=bad: bad)
        talk = Conversation(TITO, "v2", shadow_matcher="bad")
        talk.ask(user("a"))
        talk.ask(user("b"))
        assert ([0, 1], {"refused": 1, "same": 1}) == ([node.seq for node in talk.session.nodes], counts(talk))


def test_only_committed_turns_count() -> None:
    talk = Conversation(TITO, "v1", shadow_matcher="strict")
    talk.ask(user("a"))
    turn = talk.begin([*talk.history, user("b")])
    assert "same" == turn.shadow
    talk.session.release(turn)
    with pytest.raises(SessionRefused):
        talk.begin([{"role": "developer", "content": "x"}])
    assert {"same": 1} == counts(talk)


def test_a_session_without_a_shadow_shows_nothing_of_it() -> None:
    talk = Conversation(TITO, "v2")
    talk.ask(user("a"))
    assert "shadow" not in talk.session.metadata()
    assert None is talk.begin([*talk.history, user("b")]).shadow


def test_an_unknown_shadow_is_refused_when_the_session_opens_and_when_the_server_starts(tmp_path: Any) -> None:
    with pytest.raises(UnknownPart, match="no matcher 'Strict' is installed"):
        Conversation(TITO, "v2", shadow_matcher="Strict")
    with pytest.raises(UnknownPart, match="no matcher 'Strict' is installed"):
        ServerOptions(engine="http://localhost:1", tokenizer=tmp_path, shadow_matcher="Strict")
    with pytest.raises(BadConfig):
        ServerOptions(engine="http://localhost:1", tokenizer=tmp_path, shadow_matcher="strict", idle_s=0)
    with pytest.raises(SessionRefused, match="shadow_matcher: want a text"):
        read_settings({"shadow_matcher": 1}, SessionSettings())
    assert "strict" == read_settings({}, SessionSettings(shadow_matcher="strict")).shadow_matcher


def seen_of(talk: Conversation) -> Any:
    """All that a client, a trainer or a tape has of a session; the shadow's own word apart."""
    reply = talk.session.samples()
    meta = {key: value for key, value in reply.session_metadata.items() if key != "shadow"}
    tape = tape_to_table(talk.session.tape()).drop_columns(["session"]).to_pylist()
    rows = [(s.tokens_T.tobytes(), s.loss_mask_R.tobytes(), s.rollout_log_probs_R.tobytes()) for s in reply.samples]
    return meta, rows, [s.metadata for s in reply.samples], tape, records_view(talk.session.active_path())


@settings(max_examples=60, deadline=None)
@given(conversations, st.sampled_from(VERSIONS), st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_whatever_the_conversation_a_shadow_changes_nothing_but_its_count(
    steps: list[Any], version: str, matcher: str, shadow: str
) -> None:
    plain = Conversation(TITO, version, matcher=matcher)
    shadowed = Conversation(TITO, version, matcher=matcher, shadow_matcher=shadow)
    for talk in (plain, shadowed):
        play(talk, steps)
    assert seen_of(plain) == seen_of(shadowed)
    told = counts(shadowed)
    assert len(shadowed.session.nodes) == sum(told.values())
    if matcher == shadow:
        assert told.keys() <= {"same"}
    assert shadowed.session.metadata() == shadowed.session.samples().session_metadata
    samples, trajectories = tables(shadowed.result())
    (verdict,) = validate_tables(
        samples, trajectories, TITO, batch_id="b", engine="scripted", created_at=START
    ).to_pylist()
    assert "differs" != verdict["verdict"]
    tape, _ = table_to_tape(tape_to_table(shadowed.session.tape()))
    assert shadow == tape.settings.shadow_matcher


async def test_g01_the_server_counts_what_its_shadow_would_have_decided() -> None:
    async with app_stage(shadow_matcher="strict") as stage:
        session, _ = await stage.open()
        stage.engine.ids = [*TITO.tokenizer.encode(call("x")), END]
        _, first, _ = await stage.chat(session, user("go"), tools=TOOLS)
        reply = first["choices"][0]["message"]
        for replayed in (reply, respelled(reply, '{"key":"x"}')):
            assert 200 == (await stage.chat(session, user("go"), replayed, user("b"), tools=TOOLS))[0]
        _, metrics, _ = await stage.ask("GET", "/metrics")
        lines = metrics.decode().splitlines()
        for decision, count in (("same", 2), ("new_root", 1)):
            name = "rollout_session_shadow_decisions_total"
            assert f'{name}{{matcher="strict",decision="{decision}"}} {count}' in lines
        _, shown, _ = await stage.ask("GET", session)
        assert {"matcher": "strict", "decisions": {"new_root": 1, "same": 2}} == shown["metadata"]["shadow"]
