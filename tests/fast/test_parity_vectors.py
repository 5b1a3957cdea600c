"""The 240 recorded conversations, played in this process with the real Qwen3 vocabulary and judged."""

from __future__ import annotations

import gzip
import json
from collections import Counter

from scripted import START, VECTORS, Conversation, play_vector, tables
from vocabulary import qwen3

from rollout.parity.validate import summarize, validate_tables


def test_no_recorded_conversation_differs():
    tito = qwen3()
    turns: Counter[str] = Counter()
    results = []
    with gzip.open(VECTORS / "reference.jsonl.gz") as lines:
        for index, line in enumerate(lines):
            vector = json.loads(line)
            talk = Conversation(tito, vector["version"], matcher=vector["matcher"], sampling={})
            play_vector(talk, vector)
            outcome = talk.outcome()
            outcome.input.index = index
            results.append(talk.result(outcome))
            turns[vector["version"]] += len(results[-1].tape.exchanges)
    samples, trajectories = tables(*results)
    parity = validate_tables(samples, trajectories, tito, batch_id="b", engine="scripted", created_at=START)
    assert [] == [row for row in parity.to_pylist() if row["verdict"] == "differs"]
    assert {"v1": 331, "v2": 838} == dict(turns)
    summary = summarize(parity)
    assert {"equal": 111, "equal_by_path": 129} == summary.verdicts
    assert 1.0 == summary.share
