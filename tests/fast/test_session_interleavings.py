"""Requests of one session in any order beside each other: what comes out is what some sequence of them gives.

The engine's side is kept apart from the session: which ids it was asked with, and what it sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from scripted import Conversation, tiny_tito, user
from strategies import SMALL_VOCABULARY
from thousands import twice

from rollout.errors import SessionRefused
from rollout.session.turn import Turn

TITO = tiny_tito()

_ids = st.lists(st.integers(0, SMALL_VOCABULARY - 1), min_size=1, max_size=6)
_steps = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.just("begin"), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.just("commit"), st.integers(0, 9), _ids, st.sampled_from(["stop"] * 5 + ["length", "abort"])),
    st.tuples(st.just("commit"), st.integers(0, 9), _ids, st.just("stop")),
    st.tuples(st.just("release"), st.integers(0, 9)),
)
interleavings = st.lists(_steps, min_size=4, max_size=24)
"""Begin a request on the n-th newest history, let one of the running ones be answered, or fail."""


@dataclass
class Asked:
    """One request as client and engine know it."""

    messages: list[dict[str, Any]]
    turn: Turn
    prompt: list[int]
    sampled: list[int] = field(default_factory=list)
    finish: str = ""


def run(talk: Conversation, steps: list[Any]) -> list[Asked]:
    """Play the steps; the recorded requests in the order of their commits."""
    histories: list[list[dict[str, Any]]] = [[]]
    running: list[Asked] = []
    recorded: list[Asked] = []
    for number, step in enumerate(steps):
        if step[0] == "begin":
            messages = [*histories[-1 - step[1] % len(histories)], *(user(f"{number}.{n}") for n in range(step[2]))]
            try:
                turn = talk.begin(messages)
            except SessionRefused:
                continue
            running.append(Asked(messages, turn, turn.prompt_ids))
        elif running:
            asked = running.pop(step[1] % len(running))
            if step[0] == "release":
                talk.session.release(asked.turn)
                continue
            asked.sampled, asked.finish = step[2], step[3]
            histories.append([*asked.messages, talk.commit(asked.turn, asked.sampled, asked.finish)])
            if asked.turn.recorded:
                recorded.append(asked)
    assert len(running) == talk.session.running
    return recorded


def bits(talk: Conversation) -> list[Any]:
    """Tree, samples and seeds; times and names of requests apart."""
    nodes = [
        (node.seq, node.parent.seq if node.parent else None, node.rolled_back, node.reply, node.sampling_seed)
        for node in talk.session.nodes
    ]
    samples = [
        (s.tokens_T.tobytes(), s.loss_mask_R.tobytes(), s.response, s.status, s.leaf_path, s.turns)
        for s in talk.session.samples().samples
    ]
    return [nodes, samples, talk.session.metadata()["accumulated_token_ids"]]


def check_sequence(version: str, picker: str, steps: list[Any]) -> None:
    beside = Conversation(TITO, version, picker=picker, seed="07")
    recorded = run(beside, steps)
    after = Conversation(TITO, version, picker=picker, seed="07")
    for asked in recorded:
        turn = after.begin(asked.messages)
        assert asked.prompt == turn.prompt_ids
        after.commit(turn, asked.sampled, asked.finish)
        assert turn.recorded
    assert bits(beside) == bits(after)


test_any_interleaving_equals_its_commits_one_after_another, test_any_interleaving_thousands = twice(
    check_sequence,
    st.sampled_from(["v1", "v2"]),
    st.sampled_from(["drop_retries", "keep_all"]),
    interleavings,
    fast=120,
    full=4000,
)


def check_what_was_sampled(version: str, picker: str, steps: list[Any]) -> None:
    """tokens: the engine's prompt, its ids. mask: 1 on sampled ids of the owner leaf. log-probs: the engine's bits."""
    talk = Conversation(TITO, version, picker=picker)
    recorded = run(talk, steps)
    samples = talk.session.samples().samples
    line = [node.seq for node in talk.session.line]
    trained: dict[int, int] = {}
    for sample in samples:
        path = (line if version == "v1" else sample.leaf_path)[: sample.turns]
        last = recorded[path[-1]]
        assert [*last.prompt, *last.sampled] == sample.tokens_T.tolist()
        n_prompt = len(recorded[path[0]].prompt)
        n_sampled = 0
        for seq in path:
            asked, node = recorded[seq], talk.session.nodes[seq]
            start = len(asked.prompt) - n_prompt
            span = slice(start, start + len(asked.sampled))
            assert asked.sampled == sample.tokens_T[n_prompt:][span].tolist()
            given = node.generation.output_log_probs_O
            assert given.tobytes() == sample.rollout_log_probs_R[span].tobytes()
            owned = set(sample.loss_mask_R[span].tolist())
            assert owned in ({0}, {1})
            trained[seq] = trained.get(seq, 0) + owned.pop()
            n_sampled += len(asked.sampled)
        appended = np.ones(sample.response_length, bool)
        for seq in path:
            start = len(recorded[seq].prompt) - n_prompt
            appended[start : start + len(recorded[seq].sampled)] = False
        assert sample.response_length - n_sampled == appended.sum()
        assert not sample.loss_mask_R[appended].any() and not sample.rollout_log_probs_R[appended].any()
    assert set(trained.values()) <= {1}


test_any_interleaving_trains_on_what_the_engine_sampled, test_any_interleaving_trains_thousands = twice(
    check_what_was_sampled,
    st.sampled_from(["v1", "v2"]),
    st.sampled_from(["drop_retries", "keep_all"]),
    interleavings,
    fast=120,
    full=4000,
)
