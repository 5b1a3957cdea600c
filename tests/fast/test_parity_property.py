"""Whatever a client does, a rollout's replay never differs: the property that lets a batch be published."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from scripted import START, Conversation, play, tables, tiny_tito
from strategies import conversations
from thousands import twice

from rollout.parity.validate import validate_tables

TITO = tiny_tito()
SEEN: Counter[str] = Counter()


def check_replay(steps, version, matcher, max_seq_len, thinking, rollout_id):
    talk = Conversation(TITO, version, matcher=matcher, max_seq_len=max_seq_len, enable_thinking=thinking)
    play(talk, steps)
    outcome = talk.outcome()
    outcome.input.rollout_id = rollout_id
    samples, trajectories = tables(talk.result(outcome))
    (row,) = validate_tables(samples, trajectories, TITO, batch_id="b", engine="scripted", created_at=START).to_pylist()
    SEEN[f"{row['versions']} {row['verdict']} {(row['reason'] or '').split(':')[0]}"] += 1
    assert row["verdict"] != "differs", (row["reason"], row["paths"])
    if version == "v2" and row["verdict"] == "not_comparable":
        assert "no_sample" == row["reason"]


_replay_never_differs, test_replay_never_differs_thousands = twice(
    check_replay,
    steps=conversations,
    version=st.sampled_from(["v1", "v2"]),
    matcher=st.sampled_from(["strict", "loose_tool_call", "role_content_only"]),
    max_seq_len=st.sampled_from([None, None, 60, 120]),
    thinking=st.booleans(),
    rollout_id=st.sampled_from([None, 0, 9]),
    fast=150,
    full=2000,
)


def test_replay_never_differs_whatever_the_verdict():
    """A generator that only made easy conversations would prove nothing: every kind of verdict must be seen."""
    SEEN.clear()
    _replay_never_differs()
    kinds = {name.split()[1] for name in SEEN}
    assert {"equal", "equal_by_path", "not_comparable"} <= kinds, SEEN
    assert any(name.startswith("v1/v2 equal_by_path") for name in SEEN), SEEN
