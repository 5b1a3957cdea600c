"""Rules C7 of the reference's session server: v1's line of generations."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import TOOLS, Conversation, tiny_tito, user

from rollout.errors import SessionRefused
from rollout.session.node import tokens_of
from rollout.session.views import records_view

TITO = tiny_tito()


def talked(*texts: str) -> Conversation:
    talk = Conversation(TITO, "v1")
    for text in texts:
        talk.ask(user(text))
    return talk


def line(talk: Conversation) -> list[int]:
    return [node.seq for node in talk.session.line]


def refused(talk: Conversation, messages: list[dict[str, Any]]) -> SessionRefused:
    before = talk.session.metadata()
    with pytest.raises(SessionRefused) as caught:
        talk.begin(messages)
    assert before == talk.session.metadata()
    return caught.value


def test_c7_token_ids_are_the_last_checkpoint_or_empty() -> None:
    talk = talked()
    assert [] == talk.session.metadata()["accumulated_token_ids"]
    talk.ask(user("a"))
    talk.ask(user("b"))
    assert tokens_of(talk.session.line).tolist() == talk.session.metadata()["accumulated_token_ids"]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_c7_the_same_request_again_is_an_extension_by_nothing(version: str) -> None:
    talk = Conversation(TITO, version)
    talk.ask(user("a"))
    turn = talk.begin(talk.history)
    assert ([], talk.session.nodes[0]) == (turn.appended, turn.parent)
    talk.commit(turn, "again")
    assert 2 == len(records_view(talk.session.active_path()))


def test_c7_a_retry_takes_the_last_generation_back_and_all_that_belongs_to_it() -> None:
    talk = talked("a", "b")
    first, _ = talk.session.nodes
    talk.history = talk.history[:2]
    talk.ask(user("other"), text="new")
    assert [0, 2] == line(talk)
    records = records_view(talk.session.active_path())
    assert (2, "other") == (len(records), records[1]["request"]["messages"][2]["content"])
    accumulated = talk.session.metadata()["accumulated_token_ids"]
    assert tokens_of([first]).tolist() == accumulated[: first.n_tokens]
    assert (1, 2) == (len(talk.session.samples().samples), talk.session.samples().samples[0].turns)


def test_c7_a_rollback_beyond_one_generation_is_400_and_changes_nothing() -> None:
    talk = talked("a", "b", "c")
    assert 400 == refused(talk, [*talk.history[:2], user("x")]).status
    assert 400 == refused(talk, [user("x")]).status
    talk.history = talk.history[:4]
    talk.ask(user("x"))
    assert [0, 1, 3] == line(talk)


def test_c7_a_rollback_goes_to_the_last_generation_that_is_matched_whole() -> None:
    """A request that parts inside a turn's own appended messages takes that turn back, not part of it."""
    talk = talked("a")
    talk.ask(user("b"), {"role": "tool", "content": "1"})
    turn = talk.begin([*talk.history[:3], {"role": "tool", "content": "2"}])
    assert (talk.session.nodes[0], 2) == (turn.parent, len(turn.appended))


def test_c7_first_turn_retry_rolls_back_to_empty() -> None:
    talk = talked("a")
    talk.history = []
    talk.ask(user("a"), text="second")
    assert [1] == line(talk)
    node = talk.session.nodes[1]
    assert TITO.render([user("a")], tools=None, thinking=False).ids == node.appended_ids_P.tolist()
    talk.ask(user("b"))
    assert [1, 2] == line(talk)


def test_c7_injected_assistants_are_prompt_history_and_no_checkpoints() -> None:
    few_shot = {"role": "assistant", "content": "few-shot"}
    talk = talked()
    talk.ask(user("a"), few_shot, user("b"))
    talk.ask(user("c"))
    assert 2 == len(line(talk))
    assert 400 == refused(talk, [user("a"), few_shot, user("z")]).status
    talk.ask(few_shot, user("d"))
    assert 3 == len(line(talk))


def test_c7_an_extension_keeps_the_checkpoint_and_renders_the_suffix_only() -> None:
    talk = talked("a")
    kept = tokens_of(talk.session.line)
    turn = talk.begin([*talk.history, user("b")])
    assert kept.tolist() == turn.prompt_ids[: len(kept)]
    assert "b" in TITO.decode(turn.appended_ids_P.tolist()) and "a<|im_end|>" not in TITO.decode(
        turn.appended_ids_P.tolist()
    )


def test_c7_an_empty_session_takes_any_first_request_also_behind_a_failed_one() -> None:
    talk = talked()
    talk.session.release(talk.begin([user("failed")]))
    talk.ask({"role": "system", "content": "s"}, user("other"))
    assert [0] == line(talk)


def test_c7_tools_may_change_between_turns_and_the_requests_own_count() -> None:
    talk = talked("a")
    with_tools = talk.begin([*talk.history, user("b")], tools=TOOLS)
    without = talk.begin([*talk.history, user("b")])
    assert (TOOLS, None) == (with_tools.request.tools, without.request.tools)
    assert talk.session.nodes[0] is with_tools.parent is without.parent
