"""From generations to samples: cutting, merging, picking, and who trains a shared span."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Conversation, play, tiny_tito, user
from strategies import conversations

from rollout.session.node import path_to, tokens_of

TITO = tiny_tito()
VERSIONS = ("v1", "v2")


def two_turns(version: str, **settings: Any) -> Conversation:
    talk = Conversation(TITO, version, **settings)
    talk.ask(user("a"))
    talk.ask(user("b"))
    return talk


@pytest.mark.parametrize("version", VERSIONS)
def test_g11_max_seq_len_cuts_the_last_sampled_id(version: str) -> None:
    talk = two_turns(version)
    whole = talk.session.samples().samples[0]
    cut = talk.session.samples(max_seq_len=len(whole.tokens_T) - 1).samples[0]
    assert whole.tokens_T[:-1].tobytes() == cut.tokens_T.tobytes()
    assert whole.rollout_log_probs_R[:-1].tobytes() == cut.rollout_log_probs_R.tobytes()
    assert whole.loss_mask_R[:-1].tobytes() == cut.loss_mask_R.tobytes()
    assert ("truncated", 2) == (cut.status, cut.turns)
    assert cut.response_length == cut.weight_spans[-1].end
    cut.validate()


@pytest.mark.parametrize("version", VERSIONS)
def test_g58_a_cut_inside_an_observation_ends_with_the_turn_before(version: str) -> None:
    talk = two_turns(version)
    first, second = talk.session.nodes
    for limit in range(first.n_tokens, second.n_prompt + 1):
        cut = talk.session.samples(max_seq_len=limit).samples[0]
        assert ("completed", 1, first.n_tokens) == (cut.status, cut.turns, len(cut.tokens_T))
        cut.validate()


def test_an_aborted_turn_ends_the_sample() -> None:
    talk = Conversation(TITO, "v2")
    talk.ask(user("a"), text="part", finish="abort")
    talk.ask(user("b"))
    sample = talk.session.samples().samples[0]
    assert ("aborted", 1, [0, 1]) == (sample.status, sample.turns, sample.leaf_path)


def test_g27_weight_spans_count_from_the_samples_response() -> None:
    talk = two_turns("v2")
    first, second = talk.session.nodes
    start = len(first.generation.output_ids_O) + len(second.appended_ids_P)
    spans = talk.session.samples().samples[0].weight_spans
    half = len(second.generation.output_ids_O) // 2
    assert ("w0", start, start + half) == (spans[2].version, spans[2].start, spans[2].end)
    assert 4 == len(spans)


def test_routed_experts_come_from_the_last_turn_and_lose_cut_rows() -> None:
    talk = Conversation(TITO, "v2")
    turn = talk.begin([user("a")])
    ids = TITO.tokenizer.encode("some words here")
    rows = turn.n_prompt + len(ids) - 1
    data = np.arange(rows * 2, dtype="<i4").tobytes()
    talk.commit(turn, ids, routed_experts=data, routed_experts_shape=[rows, 2])
    whole, cut = talk.session.samples().samples[0], talk.session.samples(max_seq_len=rows - 1).samples[0]
    assert (data, [rows, 2]) == (whole.routed_experts, whole.routed_experts_shape)
    assert (data[: (rows - 2) * 8], [rows - 2, 2]) == (cut.routed_experts, cut.routed_experts_shape)


def branching() -> Conversation:
    """0 - 1 - 2, then 3 and 4 behind 0 where 3 went no further and 4 is later; 5 is a second root."""
    talk = two_turns("v2")
    start = talk.history[:2]
    talk.ask(user("c"))
    for text in ("x", "y"):
        talk.history = start
        talk.ask(user(text))
    talk.history = []
    talk.ask(user("root"))
    return talk


def test_train_once_gives_a_shared_span_to_the_smallest_kept_leaf() -> None:
    first, second, root = branching().session.samples().samples
    n_shared = len(TITO.tokenizer.encode("ok")) + 1
    assert [1] * n_shared == first.loss_mask_R[:n_shared].tolist()
    assert [0] * n_shared == second.loss_mask_R[:n_shared].tolist()
    assert 1 == second.loss_mask_R[-1]
    assert root.loss_mask_R.all()


@settings(max_examples=40, deadline=None)
@given(conversations, st.none() | st.integers(1, 400))
def test_any_conversation_gives_samples_that_say_what_was_sampled(steps: list[Any], limit: int | None) -> None:
    talk = Conversation(TITO, "v2")
    play(talk, steps)
    samples = talk.session.samples(max_seq_len=limit).samples
    trained: dict[int, int] = {}
    for sample in samples:
        sample.validate()
        path = path_to(talk.session.nodes[sample.leaf_path[-1]])
        whole = tokens_of(path)
        assert whole[: len(sample.tokens_T)].tobytes() == sample.tokens_T.tobytes()
        n_prompt = path[0].n_prompt
        for node in path[: sample.turns]:
            start = node.n_prompt - n_prompt
            end = min(node.n_tokens - n_prompt, sample.response_length)
            log_probs = node.generation.output_log_probs_O[: end - start]
            assert log_probs.tobytes() == sample.rollout_log_probs_R[start:end].tobytes()
            mask = set(sample.loss_mask_R[start:end].tolist())
            assert mask in ({0}, {1})
            trained[node.seq] = trained.get(node.seq, 0) + mask.pop()
    for sample in samples:
        assert all(1 == trained[seq] for seq in sample.leaf_path[: sample.turns])
    sampled = sum(int(sample.loss_mask_R.sum()) for sample in samples)
    if limit is None:
        kept = {seq for sample in samples for seq in sample.leaf_path[: sample.turns]}
        assert sum(len(talk.session.nodes[seq].generation.output_ids_O) for seq in kept) == sampled
