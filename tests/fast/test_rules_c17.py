"""Rules C17 of the reference's session server: where v1 and v2 part ways on the same requests."""

from __future__ import annotations

from typing import Any

import pytest
from app_stage import app_stage
from scripted import START, Conversation, tables, tiny_tito, user

from rollout.errors import SessionRefused
from rollout.parity.validate import validate_tables

TITO = tiny_tito()


def both() -> tuple[Conversation, Conversation]:
    return Conversation(TITO, "v1"), Conversation(TITO, "v2")


def verdict(talk: Conversation) -> tuple[str, str | None]:
    samples, trajectories = tables(talk.result())
    (row,) = validate_tables(samples, trajectories, TITO, batch_id="b", engine="scripted", created_at=START).to_pylist()
    return row["verdict"], row["reason"]


def n_samples(talk: Conversation) -> int:
    return len(talk.session.samples().samples)


def test_c17_behind_a_cut_turn_v1_goes_on_without_training_on_it_and_v2_refuses() -> None:
    one, two = both()
    for talk in (one, two):
        talk.ask(user("a"), text="cut", finish="length")
    one.ask(user("b"))
    (sample,) = one.session.samples().samples
    assert ("truncated", 1, 2) == (sample.status, sample.turns, len(one.session.line))
    assert ("not_comparable", "truncated_extension") == verdict(one)
    with pytest.raises(SessionRefused) as refused:
        two.begin([*two.history, user("b")])
    assert 409 == refused.value.status


def test_c17_of_generations_beside_each_other_v1_records_the_first_and_v2_keeps_both() -> None:
    for talk, recorded in zip(both(), ([True, False], [True, True]), strict=True):
        talk.ask(user("a"))
        turns = [talk.begin([*talk.history, user(text)]) for text in "xy"]
        for turn in turns:
            talk.commit(turn, "ok")
        assert recorded == [turn.recorded for turn in turns]
        (sample,) = talk.session.samples().samples
        assert sample.turns == 2
        if talk.settings.version == "v2":
            assert [0, 2] == sample.leaf_path


def test_c17_a_retry_behind_a_later_turn_is_400_in_v1_and_a_second_sample_in_v2() -> None:
    one, two = both()
    for talk in (one, two):
        for text in "abc":
            talk.ask(user(text))
        talk.history = talk.history[:2]
    with pytest.raises(SessionRefused) as refused:
        one.begin([*one.history, user("b")])
    assert (400, 3) == (refused.value.status, len(one.session.line))
    two.ask(user("b"))
    assert [[0, 1, 2], [0, 3]] == [sample.leaf_path for sample in two.session.samples().samples]
    assert ("equal_by_path", "several samples: v2 gave 2, v1 gives one") == verdict(two)


def test_c17_a_first_turn_sent_again_is_replaced_by_v1_and_a_second_root_in_v2() -> None:
    for talk, expected in zip(both(), (1, 2), strict=True):
        for _ in range(2):
            talk.history = []
            talk.ask(user("a"))
        assert expected == n_samples(talk)


def test_c17_template_kwargs_of_a_request_hold_for_it_alone() -> None:
    for talk in both():
        talk.ask(user("a"), chat_template_kwargs={"enable_thinking": True})
        turn = talk.begin([*talk.history, user("b")])
        assert "<think>\n\n</think>" in TITO.decode(turn.appended_ids_P.tolist())


async def test_c17_samples_neither_close_nor_delete_a_session() -> None:
    async with app_stage() as stage:
        session, _ = await stage.open()
        _, first, _ = await stage.chat(session, user("a"))
        told: list[Any] = [(await stage.ask("POST", f"{session}/samples"))[1] for _ in range(2)]
        assert told[0] == told[1]
        reply = first["choices"][0]["message"]
        assert 200 == (await stage.chat(session, user("a"), reply, user("b")))[0]
