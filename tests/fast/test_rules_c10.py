"""Rules C10 of the reference's session server: from turns to samples; pickers and finishers."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from scripted import Conversation, tiny_tito, user

from rollout.errors import SessionRefused
from rollout.parity.compare import diff_values
from rollout.session import picking
from rollout.session.picking import LeafSample

TITO = tiny_tito()
VERSIONS = ("v1", "v2")


def talked(version: str, *texts: str, **more: Any) -> Conversation:
    talk = Conversation(TITO, version, **more)
    for text in texts:
        talk.ask(user(text))
    return talk


def retried(*answers: str, picker: str = "drop_retries") -> Conversation:
    """A first turn, then its second asked for again and again."""
    talk = talked("v2", "a", picker=picker)
    start = talk.history
    for text in answers:
        talk.history = start
        talk.ask(user("b"), text=text)
    return talk


def leaf_paths(talk: Conversation) -> list[list[int] | None]:
    return [sample.leaf_path for sample in talk.session.samples().samples]


@pytest.mark.parametrize("version", VERSIONS)
def test_c10_empty_replies_say_why(version: str) -> None:
    talk = Conversation(TITO, version)
    assert ("no_records", []) == (talk.session.samples().empty_reason, talk.session.samples().samples)
    talk.ask(user("a"))
    reply = talk.session.samples(max_seq_len=talk.session.nodes[0].n_prompt)
    assert ("all_truncated", []) == (reply.empty_reason, reply.samples)


def test_c10_a_picker_that_keeps_none_is_all_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "find_picker", lambda name: lambda leaves: [])
    reply = talked("v2", "a").session.samples()
    assert ("all_truncated", []) == (reply.empty_reason, reply.samples)


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
@pytest.mark.parametrize("version", VERSIONS)
def test_c10_a_turns_sample_and_its_status(version: str, finish: str, status: str) -> None:
    talk = Conversation(TITO, version)
    talk.ask(user("a"), text="one two", finish=finish)
    node, (sample,) = talk.session.nodes[0], talk.session.samples().samples
    output = node.generation.output_ids_O
    assert [*node.appended_ids_P.tolist(), *output.tolist()] == sample.tokens_T.tolist()
    assert node.generation.output_log_probs_O.tobytes() == sample.rollout_log_probs_R.tobytes()
    assert (TITO.decode(output.tolist()), len(output), status) == (
        sample.response,
        sample.response_length,
        sample.status,
    )
    assert sample.loss_mask_R.all() and ["w1"] == sample.weight_versions
    assert (node.n_prompt, node.n_prompt // 2) == (sample.prompt_tokens, sample.cached_tokens)


@pytest.mark.parametrize("version", VERSIONS)
def test_c10_lifecycle_is_a_dict_for_one_turn_and_a_list_for_more(version: str) -> None:
    talk = talked(version, "a")
    (single,) = (sample.metadata["lifecycle"] for sample in talk.session.samples().samples)
    node = talk.session.nodes[0]
    t1 = node.committed_at.timestamp()
    assert {"t0": t1 - 0.25, "t1": t1, "turn": 1, "req_ts": node.requested_at.timestamp()} == single
    talk.commit(talk.begin([*talk.history, user("b")]), "x", engine_seconds=0.0)
    first, second = talk.session.samples().samples[0].metadata["lifecycle"]
    assert (single, None, 2, t1) == (first, second["t0"], second["turn"], second["prev_t1"])


@pytest.mark.parametrize("version", VERSIONS)
def test_c10_truncation_comes_before_merging(version: str) -> None:
    """The golden case: one id too many costs the last turn its last id."""
    talk = talked(version, "a", "b")
    whole = talk.session.samples().samples[0]
    cut = talk.session.samples(max_seq_len=len(whole.tokens_T) - 1).samples[0]
    assert whole.tokens_T[:-1].tobytes() == cut.tokens_T.tobytes()
    assert whole.rollout_log_probs_R[:-1].tobytes() == cut.rollout_log_probs_R.tobytes()
    assert ("truncated", whole.response_length - 1) == (cut.status, cut.response_length)
    first = talk.session.nodes[0]
    within = talk.session.samples(max_seq_len=first.n_tokens - 1).samples[0]
    assert ("truncated", 1, first.n_tokens - 1) == (within.status, within.turns, len(within.tokens_T))


@pytest.mark.parametrize("version", VERSIONS)
def test_c10_merging_puts_zeros_on_what_the_client_appended(version: str) -> None:
    talk = talked(version, "a", "b", "c")
    (sample,) = talk.session.samples().samples
    mask: list[int] = []
    log_probs: list[bytes] = []
    for place, node in enumerate(talk.session.nodes):
        n_between = len(node.appended_ids_P) if place else 0
        mask += [0] * n_between + [1] * len(node.generation.output_ids_O)
        log_probs += [np.zeros(n_between).tobytes(), node.generation.output_log_probs_O.tobytes()]
    assert (mask, b"".join(log_probs)) == (sample.loss_mask_R.tolist(), sample.rollout_log_probs_R.tobytes())
    assert (3, ["w1"] * 3, "completed") == (sample.turns, sample.weight_versions, sample.status)
    assert sum(node.n_prompt for node in talk.session.nodes) == sample.prompt_tokens
    assert sum(node.n_prompt // 2 for node in talk.session.nodes) == sample.cached_tokens
    n_prompt = talk.session.nodes[0].n_prompt
    assert TITO.decode(sample.tokens_T[n_prompt:].tolist()) == sample.response
    assert [1, 2, 3] == [entry["turn"] for entry in sample.metadata["lifecycle"]]


def test_c10_merging_stops_behind_a_turn_that_is_not_completed() -> None:
    talk = talked("v1", "a")
    talk.ask(user("b"), text="cut", finish="length")
    talk.ask(user("c"))
    (sample,) = talk.session.samples().samples
    assert ("truncated", 2) == (sample.status, sample.turns)


def test_c10_merging_stops_before_a_turn_without_the_replay_tensors_of_those_before() -> None:
    talk = Conversation(TITO, "v2")
    turn = talk.begin([user("a")])
    ids = TITO.tokenizer.encode("words")
    shape = [turn.n_prompt + len(ids) - 1, 1]
    data = np.zeros(shape, "<i4").tobytes()
    reply = talk.commit(turn, ids, routed_experts=data, routed_experts_shape=shape)
    talk.commit(talk.begin([user("a"), reply, user("b")]), "x")
    (sample,) = talk.session.samples().samples
    assert (1, data) == (sample.turns, sample.routed_experts)


def test_c10_v1_gives_exactly_one_sample_and_v2_one_per_leaf_in_creation_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picking, "find_picker", lambda name: list)
    talk = retried("x", "y")
    talk.ask(user("c"))
    talk.history = []
    talk.ask(user("root"))
    assert [[0, 1], [0, 2, 3], [4]] == leaf_paths(talk)
    one = talked("v1", "a", "b")
    one.history = one.history[:2]
    one.ask(user("c"))
    assert 1 == len(one.session.samples().samples)


def test_c10_leaves_without_a_turn_that_fits_are_dropped() -> None:
    talk = talked("v2", "a")
    talk.history = []
    talk.ask(user("a much longer first message " * 3))
    limit = talk.session.nodes[0].n_tokens
    assert [[0]] == [sample.leaf_path for sample in talk.session.samples(max_seq_len=limit).samples]


def test_c10_a_leafs_metadata_names_it() -> None:
    talk = retried("x", "y")
    (sample,) = talk.session.samples().samples
    assert {"node_id": 2, "parent": 0, "path_node_ids": [0, 2], "response_id": "r2"} == sample.metadata["leaf"]


def test_c10_a_picker_may_reorder_and_leave_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = retried("x", "y", picker="keep_all")
    for good, expected in (
        (lambda leaves: list(leaves)[::-1], [[0, 2], [0, 1]]),
        (lambda leaves: tuple(leaves)[:1], [[0, 1]]),
    ):
        monkeypatch.setattr(picking, "find_picker", lambda name, good=good: good)
        assert expected == leaf_paths(talk)
    for bad in (
        lambda leaves: [*leaves, leaves[0]],
        lambda leaves: [LeafSample(leaf.path, leaf.sample) for leaf in leaves],
        lambda leaves: [leaf.sample for leaf in leaves],
        lambda leaves: [leaves],
    ):
        monkeypatch.setattr(picking, "find_picker", lambda name, bad=bad: bad)
        with pytest.raises(SessionRefused) as refused:
            talk.session.samples()
        text = "pick hook must return a subset of its input samples without duplicates (pure selection)"
        assert (422, text) == (refused.value.status, refused.value.message)
    monkeypatch.setattr(picking, "find_picker", lambda name: lambda leaves: None)
    with pytest.raises(SessionRefused, match="session sample hook failed") as refused:
        talk.session.samples()
    assert 422 == refused.value.status


@pytest.mark.parametrize("answers", [("x", "y"), ("a much longer answer", "y")])
def test_c10_drop_retries_keeps_the_last_of_chained_retries(answers: tuple[str, ...]) -> None:
    assert [[0, len(answers) + 1]] == leaf_paths(retried(*answers, "last"))


def test_c10_drop_retries_keeps_roots_and_deep_abandoned_branches_deepest_first() -> None:
    talk = talked("v2", "a", "b", "c")
    start = talk.history[:2]
    for text in ("x", "y"):
        talk.history = start
        talk.ask(user(text))
    for text in ("a", "root"):
        talk.history = []
        talk.ask(user(text))
    assert [[0, 1, 2], [0, 4], [6], [5]] == leaf_paths(talk)


def test_c10_drop_retries_of_siblings_in_flight_keeps_the_one_committed_last() -> None:
    talk = talked("v2", "a")
    turns = [talk.begin([*talk.history, user(text)]) for text in "xyz"]
    for turn in (turns[1], turns[2], turns[0]):
        talk.commit(turn, "ok")
    assert [[0, 3]] == leaf_paths(talk)
    assert user("x") == talk.session.nodes[3].appended[0]


def test_c10_drop_retries_logs_a_longer_attempt_and_a_clock_that_ran_backwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talk = talked("v2", "a")
    start = talk.history
    for text in ("a much longer answer than the other", "y"):
        talk.history = start
        talk.ask(user("b"), text=text)
        talk.now -= timedelta(seconds=30)
    with caplog.at_level(logging.WARNING):
        assert [[0, 2]] == leaf_paths(talk)
    texts = [record.getMessage() for record in caplog.records]
    assert any("longer than every later sibling's deepest leaf" in text for text in texts)
    assert any("wall-clock rollback" in text for text in texts)
    assert all(text.endswith("continuing by seq") for text in texts) and 2 == len(texts)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        retried("x", "a longer answer").session.samples()
    assert [] == caplog.records


def test_c10_keep_all_keeps_every_leaf() -> None:
    assert [[0, 3], [0, 2], [0, 1]] == leaf_paths(retried("x", "y", "z", picker="keep_all"))


def test_c10_agent_metadata_overlays_v2_samples_but_for_the_servers_keys() -> None:
    kept = {"accumulated_token_ids": 9, "tito_session_mismatch": 9, "leaf": 9, "lifecycle": 9}
    talk = talked("v2", "a", "b")
    (sample,) = talk.session.samples(metadata={"note": 1, **kept}).samples
    assert (1, 1) == (sample.metadata["note"], sample.metadata["leaf"]["node_id"])
    assert not {"accumulated_token_ids", "tito_session_mismatch"} & sample.metadata.keys()
    (one,) = talked("v1", "a").session.samples(metadata={"note": 1, "reward": 1.0}).samples
    assert ("note" in one.metadata, one.reward) == (False, None)


def test_c10_an_agents_reward_is_every_kept_samples_and_zero_counts() -> None:
    talk = retried("x", "y", picker="keep_all")
    for reward in (0.0, 0.5):
        assert [reward] * 2 == [s.reward for s in talk.session.samples(metadata={"reward": reward}).samples]
    assert [None] * 2 == [s.reward for s in talk.session.samples(metadata={"reward": None}).samples]


def test_c10_samples_change_nothing_and_are_the_same_again() -> None:
    talk = retried("x", "y", picker="keep_all")
    first, second = talk.session.samples(), talk.session.samples()
    for a, b in zip(first.samples, second.samples, strict=True):
        a.loss_mask_R[:] = 0
        assert b.loss_mask_R.any()
        assert [] == diff_values(a.tokens_T, b.tokens_T, "tokens")
    assert first.session_metadata == second.session_metadata
