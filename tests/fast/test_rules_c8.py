"""Rules C8 and C9 of the reference's session server: v2's forest, and the metadata that both versions show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from app_stage import app_stage
from scripted import START, TOOLS, Conversation, tiny_tito, user
from session_dump import dump
from session_stage import Stage

from rollout.errors import SessionRefused
from rollout.session import tree
from rollout.session.node import tokens_of
from rollout.session.views import records_view

TITO = tiny_tito()
VERSIONS = ("v1", "v2")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with app_stage() as made:
        yield made


def talked(*texts: str) -> Conversation:
    talk = Conversation(TITO, "v2")
    for text in texts:
        talk.ask(user(text))
    return talk


def parents(talk: Conversation) -> list[int | None]:
    return [row["parent"] for row in talk.session.metadata()["tree"]["nodes"]]


def test_c8_a_node_is_one_generation_and_its_place() -> None:
    talk = talked("a")
    talk.ask(user("b"), text="cut", finish="length")
    row = talk.session.metadata()["tree"]["nodes"][1]
    node = talk.session.nodes[1]
    assert {
        "id": 1,
        "parent": 0,
        "seq": 1,
        "truncated": True,
        "committed_at": node.committed_at.timestamp(),
        "completion_span": [node.n_prompt, node.n_tokens],
        "num_tokens": len(tokens_of(talk.session.nodes)),
        "response_id": "r1",
    } == row
    assert [user("b")] == node.appended
    assert START.timestamp() < row["committed_at"]


def test_c8_the_cap_is_1024_nodes_and_the_search_has_no_recursion_limit() -> None:
    talk = talked()
    for _ in range(tree.MAX_NODES):
        talk.ask(user("q"), text="")
    with pytest.raises(SessionRefused) as refused:
        talk.begin([*talk.history, user("one more")])
    assert (1024, 409) == (tree.MAX_NODES, refused.value.status)
    assert list(range(1024)) == talk.session.metadata()["tree"]["leaves"][0]["path_node_ids"]


def test_c8_a_request_attaches_to_the_deepest_match_and_of_equals_to_the_latest() -> None:
    talk = talked("a")
    talk.history = []
    talk.ask(user("a"))
    talk.ask(user("b"))
    assert [None, None, 1] == parents(talk)


def test_c8_a_partly_matched_delta_rules_out_node_and_subtree() -> None:
    talk = Conversation(TITO, "v2")
    talk.ask(user("a"), user("b"), text="x")
    talk.ask(user("c"))
    turn = talk.begin([user("a"), user("other"), talk.history[2], user("c"), *talk.history[4:]])
    assert turn.parent is None


def test_c8_no_match_and_a_divergence_inside_a_roots_delta_open_a_new_root() -> None:
    talk = talked("a")
    for messages in ([user("z")], [user("a"), {"role": "assistant", "content": "other"}, user("b")], [user("a")]):
        talk.history = messages
        talk.ask()
    assert [None] * 4 == parents(talk)


def test_c8_the_search_changes_nothing() -> None:
    talk = talked("a", "b")
    before = dump(talk.session)
    talk.session.release(talk.begin([*talk.history[:2], user("other")]))
    with pytest.raises(SessionRefused):
        talk.begin([*talk.history, {"role": "developer", "content": "x"}])
    assert before == dump(talk.session)


def test_c8_a_carried_assistant_attaches_as_a_child_with_its_parents_snapshot() -> None:
    talk = talked("a")
    kept = tokens_of(talk.session.nodes[:1])
    carried = {"role": "assistant", "content": "mine"}
    turn = talk.begin([*talk.history, user("b"), carried, user("c")])
    assert (talk.session.nodes[0], 3) == (turn.parent, len(turn.appended))
    assert kept.tolist() == turn.prompt_ids[: len(kept)]


def test_c8_every_role_of_a_suffix_must_be_one_that_can_be_appended() -> None:
    talk = talked("a")
    for role in ("user", "tool", "system", "assistant"):
        talk.session.release(talk.begin([*talk.history, {"role": role, "content": "x"}]))
    with pytest.raises(SessionRefused) as refused:
        talk.begin([*talk.history, user("b"), {"role": "critic", "content": "x"}])
    assert 400 == refused.value.status


def test_c8_get_shows_the_active_path_and_the_whole_tree() -> None:
    talk = talked("a", "b")
    talk.history = talk.history[:2]
    talk.ask(user("c"))
    assert ["a", "c"] == [r["request"]["messages"][-1]["content"] for r in records_view(talk.session.active_path())]
    shown = talk.session.metadata()["tree"]
    assert [{"node_id": 1, "path_node_ids": [0, 1]}, {"node_id": 2, "path_node_ids": [0, 2]}] == shown["leaves"]
    assert [0, 1, 2] == [row["id"] for row in shown["nodes"]]


def test_c8_a_retry_is_told_from_a_branch_by_the_picker_alone() -> None:
    talk = talked("a", "b")
    talk.history = talk.history[:2]
    talk.ask(user("b"))
    assert 2 == len(talk.session.metadata()["tree"]["leaves"])
    assert [[0, 2]] == [sample.leaf_path for sample in talk.session.samples().samples]


@pytest.mark.parametrize("version", VERSIONS)
async def test_c9_metadata_is_the_same_in_get_and_beside_samples(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version, shadow_matcher="strict")
    _, first, _ = await stage.chat(session, user("a"), tools=TOOLS)
    for text in ("b", "c"):
        await stage.chat(session, user("a"), first["choices"][0]["message"], user(text))
    _, shown, _ = await stage.ask("GET", session)
    _, told, _ = await stage.ask("POST", f"{session}/samples", {}, Accept="application/json")
    metadata = shown["metadata"]
    assert metadata == told["session_metadata"]
    assert {"accumulated_token_ids", "max_trim_tokens", "shadow"} <= metadata.keys()
    assert (version == "v2", 0) == ("tree" in metadata, metadata["max_trim_tokens"])
    assert {"matcher": "strict", "decisions": {"same": 3}} == metadata["shadow"]


def test_c9_an_agents_metadata_stands_beside_v2_samples_only() -> None:
    for version in VERSIONS:
        talk = Conversation(TITO, version)
        talk.ask(user("a"))
        agent: dict[str, Any] = {"note": 1}
        with_it = talk.session.samples(metadata=agent).session_metadata
        assert (version == "v2") == ("agent" in with_it)
        with_it.pop("agent", None)
        assert talk.session.metadata() == with_it
