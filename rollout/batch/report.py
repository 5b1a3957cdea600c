"""A summary in words: the rows of the command's last screen and of the flow run's artifacts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollout.batch.summary import Summary

BARS = "▁▂▃▄▅▆▇█"
NO_REWARD = "·"
MOST_BARS = 96
"""Groups that are shown one by one; of more, how many have which mean."""


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """What a batch gave, as (name, value) in the order of interest."""
    rows = [
        ("rollouts", f"{summary.rollouts} in {summary.groups} groups, {summary.turns} turns"),
        ("samples", f"{summary.samples} ({_counts(summary.samples_by_status)})"),
    ]
    if summary.failures:
        rows.append(("failures", _counts(summary.failures)))
    rows += [
        ("reward", f"mean {_number(summary.reward_mean)}, {summary.zero_spread_groups} groups without spread"),
        ("mean by group", group_line(summary.group_rewards)),
        ("pass@k", ", ".join(f"{k}: {at['pass']:.3f}" for k, at in summary.pass_at.items()) or "no rewards"),
        ("parity", f"{_counts(summary.verdicts)}; share equal {_number(summary.equal_share)}"),
    ]
    rows += [(f"  {verdict}", _counts(kinds)) for verdict, kinds in summary.reasons.items()]
    if summary.live:
        rows.append(("live parity", _counts(summary.live)))
        rows += [(f"  {verdict}", _counts(kinds)) for verdict, kinds in summary.live_reasons.items()]
    rows.append(
        (
            "tokens",
            f"{summary.tokens_prompt} prompt, {summary.tokens_sampled} sampled, {summary.tokens_trained} trained",
        )
    )
    return rows


def group_line(means: Sequence[float | None]) -> str:
    """The groups' mean rewards in one line: a bar each (· where none has one), or counts where there are many."""
    known = [mean for mean in means if mean is not None]
    if not known:
        return "no rewards"
    low, high = min(known), max(known)
    if len(means) > MOST_BARS:
        counted = Counter(_number(mean) for mean in means)
        return ", ".join(f"{mean}: {n}" for mean, n in sorted(counted.items())[:MOST_BARS])
    bars = "".join(NO_REWARD if mean is None else _bar(mean, low, high) for mean in means)
    return f"{bars}  ({low:.2f} to {high:.2f})"


def _bar(mean: float, low: float, high: float) -> str:
    place = 0.5 if high == low else (mean - low) / (high - low)
    return BARS[round(place * (len(BARS) - 1))]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
