"""What a batch gave, spread out: groups one by one, and how rewards and lengths are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl

from rollout.batch.summary import PASS_REWARD
from rollout.plot import Chart

MOST_ROWS = 50
"""Rows of a list that an artifact shows; the rest is counted."""
_BINS = 10


def group_rows(facts: pl.DataFrame) -> tuple[list[dict[str, Any]], int]:
    """The groups with the lowest pass rate, MOST_ROWS at most, and how many more there are.

    Args:
        facts: one row per sample (rollout.batch.summary.sample_facts).
    """
    reward = pl.col("reward")
    groups = (
        _rollouts(facts)
        .group_by("group_index")
        .agg(
            rollouts=pl.len(),
            failed=pl.col("failure").count(),
            passed=(reward >= PASS_REWARD).sum(),
            pass_rate=(reward >= PASS_REWARD).sum() / pl.when(reward.count() > 0).then(reward.count()),
            mean_reward=reward.mean(),
        )
        .rename({"group_index": "group"})
        .sort("pass_rate", "group", nulls_last=False)
    )
    return groups.head(MOST_ROWS).to_dicts(), max(0, groups.height - MOST_ROWS)


def distributions(facts: pl.DataFrame) -> list[Chart]:
    """Rewards of rollouts and response lengths of samples (tokens), those of failed rollouts left out."""
    rewards = _rollouts(facts)["reward"].drop_nulls().to_list()
    lengths = facts.filter(pl.col("failure").is_null())["response_length"].to_list()
    return [
        Chart(title="reward: rollouts", bars=reward_bins(rewards)),
        Chart(title="response length in tokens: samples", bars=length_bins(lengths)),
    ]


def reward_bins(rewards: Sequence[float]) -> list[tuple[str, int]]:
    """Each reward by itself where there are few, else ten bins of one width; an end counts in the bin above it."""
    if len(counted := Counter(rewards)) <= _BINS:
        return [(f"{reward:g}", n) for reward, n in sorted(counted.items())]
    low, high = min(rewards), max(rewards)
    width = (high - low) / _BINS
    places = Counter(min(_BINS - 1, int((reward - low) / width)) for reward in rewards)
    return [(f"{low + k * width:.3g} to {low + (k + 1) * width:.3g}", places[k]) for k in range(_BINS)]


def length_bins(lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Bins that double: 0, 1, 2-3, 4-7, ...; empty ones below the first are left out."""
    places = Counter(length.bit_length() for length in lengths)
    if not places:
        return []
    return [(_doubling(k), places[k]) for k in range(min(places), max(places) + 1)]


def _doubling(k: int) -> str:
    low, high = 2**k // 2, max(2**k - 1, 0)
    return str(low) if low == high else f"{low}-{high}"


def _rollouts(facts: pl.DataFrame) -> pl.DataFrame:
    return facts.sort("index", "sibling").unique("index", keep="first", maintain_order=True)
