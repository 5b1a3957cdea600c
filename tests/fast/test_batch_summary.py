"""The summary counts rollouts once, whatever their siblings, and invents no reward."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from rollout.batch.summary import exchange_facts, sample_facts, summarise
from rollout.columns import BatchStamp, samples_to_table
from rollout.errors import Failure
from rollout.parity.validate import ParitySummary
from rollout.sample import Sample, Status, empty_sample
from rollout.session.settings import SessionSettings
from rollout.session.tape import Exchange, Tape, tape_to_table
from rollout.tape_columns import TAPE_SCHEMA

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STAMP = BatchStamp(batch_id="b", run_date=NOW.date(), shard=0, engine={"name": "embedded"}, created_at=NOW)


def make_sample(index: int, reward: float | None, sibling: int = 0, siblings: int = 1, mask: str = "101") -> Sample:
    return Sample(
        group_index=index // 4,
        index=index,
        rollout_id=index if siblings > 1 else None,
        sibling=sibling,
        siblings=siblings,
        tokens_T=np.arange(len(mask) + 2, dtype=np.int32),
        response_length=len(mask),
        loss_mask_R=np.array([int(bit) for bit in mask], np.int8),
        rollout_log_probs_R=np.full(len(mask), -0.5),
        status=Status.COMPLETED,
        reward=reward,
        turns=2,
    )


def make_failed(index: int) -> Sample:
    sample = empty_sample()
    sample.group_index, sample.index, sample.remove_sample = index // 4, index, True
    sample.failure = Failure(type="engine_error", message="gone")
    return sample


def facts_of(samples: list[Sample]) -> pl.DataFrame:
    return sample_facts(samples_to_table(samples, STAMP, [bytes(32)] * len(samples)))


def parity_of(n: int, share: float | None = 1.0) -> ParitySummary:
    return ParitySummary(n_rollouts=n, verdicts={"equal": n}, reasons={}, share=share, seconds=0.5 * n)


NO_EXCHANGES = exchange_facts(tape_to_table(Tape(session_id="s", settings=SessionSettings())))


def test_siblings_are_one_rollout_with_one_reward():
    samples = [make_sample(0, 1.0, k, 3) for k in range(3)] + [make_sample(i, 0.0) for i in (1, 2, 3)]
    summary = summarise(facts_of(samples), NO_EXCHANGES, parity_of(4))
    assert (4, 6, 1) == (summary.rollouts, summary.samples, summary.groups)
    assert 0.25 == summary.reward_mean and [0.25] == summary.group_rewards
    assert {"completed": 4} == summary.rollouts_by_status and {"completed": 6} == summary.samples_by_status
    assert {"1": 0.25, "2": 0.5, "4": 1.0} == {k: at["pass"] for k, at in summary.pass_at.items()}


def test_a_failed_rollout_has_no_reward_and_trains_nothing():
    samples = [make_sample(0, 1.0), make_sample(1, 1.0), make_failed(2), make_failed(3)]
    summary = summarise(facts_of(samples), NO_EXCHANGES, parity_of(4))
    assert 1.0 == summary.reward_mean
    assert {"engine_error": 2} == summary.failures
    assert 4 == summary.tokens_trained
    assert 1 == summary.zero_spread_groups
    assert 1.0 == summary.equal_share


def test_groups_without_any_reward_are_shown_as_such():
    summary = summarise(facts_of([make_failed(0), make_sample(4, 0.0)]), NO_EXCHANGES, parity_of(2, None))
    assert [None, 0.0] == summary.group_rewards
    assert summary.equal_share is None and 1 == summary.zero_spread_groups


def exchange(seq: int, parent: int | None, appended: int, sampled: int, **more: Any) -> Exchange:
    return Exchange(
        seq=seq,
        parent=parent,
        appended_messages=[],
        appended_ids_P=np.zeros(appended, np.int32),
        output_ids_O=np.zeros(sampled, np.int32),
        output_log_probs_O=np.zeros(sampled),
        finish="stop",
        requested_at=NOW,
        committed_at=NOW,
        **more,
    )


def test_prompt_tokens_follow_each_exchange_to_its_root():
    tape = Tape(session_id="s", settings=SessionSettings())
    tape.exchanges = [
        exchange(0, None, 10, 5, engine_seconds=0.25, cached_tokens=0),
        exchange(1, 0, 3, 2, engine_seconds=0.5, cached_tokens=15),
        exchange(2, 0, 4, 1),
    ]
    (row,) = exchange_facts(tape_to_table(tape)).to_dicts()
    assert {"turns": 3, "prompt": 10 + 18 + 19, "sampled": 8, "cached": 15, "seconds": 0.75} == row


def test_a_damaged_tape_is_counted_as_far_as_it_goes_and_never_hides_its_verdict():
    tape = Tape(session_id="s", settings=SessionSettings(), exchanges=[exchange(0, 7, 10, 5)])
    rows = tape_to_table(tape).to_pylist()
    rows[1]["output_ids"] = None
    (row,) = exchange_facts(pa.Table.from_pylist(rows, schema=TAPE_SCHEMA)).to_dicts()
    assert (1, 10, 0) == (row["turns"], row["prompt"], row["sampled"])
