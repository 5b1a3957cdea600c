"""What a batch gave, in numbers: the `batches` row, the report and the command's last screen.

Each shard is boiled down to two small frames where it is read; the summary is made of those, so
that no process ever holds a whole batch. Rewards are per rollout, never per sample: a rollout's
siblings carry the same reward and must not count twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout.columns import SCHEMA_VERSION, dump_json
from rollout.lake.planfile import Plan
from rollout.lake.schema import BatchStatus
from rollout.parity.validate import ParitySummary

PASS_REWARD = 1.0
"""A rollout passes with at least this reward."""

SAMPLE_COLUMNS = (
    "group_index",
    "index",
    "sibling",
    "status",
    "reward",
    "response_length",
    "failure",
    "remove_sample",
    "loss_mask",
)
EXCHANGE_COLUMNS = (
    "session_id",
    "seq",
    "parent",
    "appended_ids",
    "output_ids",
    "cached_tokens",
    "engine_seconds",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts and means of one batch. Seconds are summed over what ran side by side; `None` means nothing to average.

    `group_rewards` holds one mean reward per group, in the groups' order; `pass_at` maps k to the
    probability that one of k rollouts passes and to their mean reward; `reasons` has a verdict's reasons by kind.
    `live` and `live_reasons` are the verdicts and reasons of live parity.
    """

    rollouts: int
    samples: int
    groups: int
    turns: int
    rollouts_by_status: dict[str, int]
    samples_by_status: dict[str, int]
    failures: dict[str, int]
    verdicts: dict[str, int]
    reasons: dict[str, dict[str, int]]
    equal_share: float | None
    reward_mean: float | None
    group_rewards: list[float | None]
    pass_at: dict[str, dict[str, float]]
    zero_spread_groups: int
    tokens_prompt: int
    tokens_cached: int
    tokens_sampled: int
    tokens_trained: int
    seconds_engine: float
    seconds_parity: float
    live: dict[str, int]
    live_reasons: dict[str, dict[str, int]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def counts(self) -> dict[str, Any]:
        """The `counts` column of the batches table."""
        return {
            "rollouts": {"total": self.rollouts, **self.rollouts_by_status},
            "samples": {"total": self.samples, **self.samples_by_status},
            "turns": self.turns,
            "failures": self.failures,
            "verdicts": self.verdicts,
            "reasons": self.reasons,
            "equal_share": self.equal_share,
            "live": self.live,
            "live_reasons": self.live_reasons,
        }


def sample_facts(samples: pa.Table) -> pl.DataFrame:
    """One small row per sample of SAMPLES_SCHEMA: all that the summary needs of it."""
    table = samples.select(list(SAMPLE_COLUMNS))
    failures = pc.struct_field(table.column("failure"), "type")
    frame = pl.from_arrow(table.drop(["failure"]).append_column("failure", failures))
    assert isinstance(frame, pl.DataFrame)
    return frame.with_columns(
        trained=pl.when(pl.col("remove_sample")).then(0).otherwise(pl.col("loss_mask").list.sum().cast(pl.Int64))
    ).drop("loss_mask", "remove_sample")


def exchange_facts(trajectories: pa.Table) -> pl.DataFrame:
    """Turns, tokens and engine seconds of rows of TRAJECTORIES_SCHEMA, as one row."""
    table = trajectories.select(list(EXCHANGE_COLUMNS)).filter(pc.greater_equal(trajectories.column("seq"), 0))
    rows = table.select(["session_id", "seq", "parent"]).to_pydict()
    appended = pc.list_value_length(table.column("appended_ids")).to_pylist()
    sampled = pc.list_value_length(table.column("output_ids")).to_pylist()
    prompts = _prompt_lengths(rows["session_id"], rows["seq"], rows["parent"], appended, sampled)
    return pl.DataFrame(
        {
            "turns": pl.Series([1] * table.num_rows, dtype=pl.Int64),
            "prompt": pl.Series(prompts, dtype=pl.Int64),
            "sampled": pl.Series(sampled, dtype=pl.Int64),
            "cached": pl.Series(table.column("cached_tokens").to_pylist(), dtype=pl.Int64),
            "seconds": pl.Series(table.column("engine_seconds").to_pylist(), dtype=pl.Float64),
        }
    ).sum()


def _prompt_lengths(
    sessions: Sequence[str],
    seqs: Sequence[int],
    parents: Sequence[int | None],
    appended: Sequence[int | None],
    sampled: Sequence[int | None],
) -> list[int]:
    """Prompt tokens of each exchange: its parent's prompt and output, and what it appended itself.

    What is missing from a damaged tape counts nothing here; its verdict says that it is damaged.
    """
    ends: dict[tuple[str, int], int] = {}
    prompts = [0] * len(seqs)
    for row in sorted(range(len(seqs)), key=lambda r: (sessions[r], seqs[r])):
        parent = parents[row]
        kept = 0 if parent is None else ends.get((sessions[row], parent), 0)
        prompts[row] = kept + (appended[row] or 0)
        ends[sessions[row], seqs[row]] = prompts[row] + (sampled[row] or 0)
    return prompts


def summarise(facts: pl.DataFrame, exchanges: pl.DataFrame, parity: ParitySummary) -> Summary:
    """The summary of a batch from the stacked facts of its shards and the summary of its verdicts."""
    rollouts = facts.sort("index", "sibling").unique("index", keep="first", maintain_order=True)
    groups = _groups(rollouts)
    return Summary(
        rollouts=rollouts.height,
        samples=facts.height,
        groups=groups.height,
        turns=int(exchanges["turns"].sum()),
        rollouts_by_status=_counts(rollouts, "status"),
        samples_by_status=_counts(facts, "status"),
        failures=_counts(rollouts, "failure"),
        verdicts=parity.verdicts,
        reasons=parity.reasons,
        equal_share=parity.share,
        reward_mean=_mean(rollouts["reward"]),
        group_rewards=groups["mean"].to_list(),
        pass_at=_pass_at(groups),
        zero_spread_groups=groups.filter(pl.col("spread") == 0).height,
        tokens_prompt=int(exchanges["prompt"].sum()),
        tokens_cached=int(exchanges["cached"].sum()),
        tokens_sampled=int(exchanges["sampled"].sum()),
        tokens_trained=int(facts["trained"].sum()),
        seconds_engine=float(exchanges["seconds"].sum()),
        seconds_parity=parity.seconds,
        live=parity.live,
        live_reasons=parity.live_reasons,
    )


def batch_row(
    summary: Summary,
    *,
    status: BatchStatus,
    plan: Plan,
    seconds_wall: float,
    costs: dict[str, float | None],
    provenance: dict[str, Any],
    created_at: datetime,
) -> dict[str, Any]:
    """The row of the batches table that says how the batch ended. Seconds; `costs` by column; `created_at` in UTC."""
    return {
        "batch_id": plan.batch_id,
        "status": status,
        "run_date": plan.run_date,
        "slot": plan.slot,
        "config": dump_json(plan.config),
        "config_hash": plan.config_hash,
        "n_prompts": plan.n_prompts,
        "n_rollouts": plan.n_rollouts,
        "n_shards": len(plan.shards),
        "counts": dump_json(summary.counts),
        "reward_mean": summary.reward_mean,
        "pass_at": dump_json(summary.pass_at),
        "zero_spread_groups": summary.zero_spread_groups,
        "tokens_prompt": summary.tokens_prompt,
        "tokens_cached": summary.tokens_cached,
        "tokens_sampled": summary.tokens_sampled,
        "tokens_trained": summary.tokens_trained,
        "seconds_wall": seconds_wall,
        "seconds_engine": summary.seconds_engine,
        "seconds_parity": summary.seconds_parity,
        **costs,
        "provenance": dump_json(provenance),
        "derived_from": plan.derived_from,
        "created_at": created_at,
        "schema_version": SCHEMA_VERSION,
    }


def _groups(rollouts: pl.DataFrame) -> pl.DataFrame:
    reward = pl.col("reward")
    return (
        rollouts.group_by("group_index")
        .agg(
            scored=reward.count(),
            passed=(reward >= PASS_REWARD).sum(),
            mean=reward.mean(),
            spread=reward.max() - reward.min(),
        )
        .sort("group_index")
    )


def _pass_at(groups: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Per k: pass@k by the unbiased estimator 1 - C(n-c, k)/C(n, k) (Chen et al. 2021), and the mean reward.

    n counts a group's scored rollouts, c those that pass; a group with fewer than k scored rollouts
    is left out, since a failed rollout has no reward to count with.
    """
    most = int(groups["scored"].max() or 0)  # type: ignore[arg-type]
    sizes = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if k <= most} | ({most} - {0}))
    result = {}
    for k in sizes:
        enough = groups.filter(pl.col("scored") >= k)
        chances = [
            1.0 - math.comb(n - c, k) / math.comb(n, k)
            for n, c in zip(enough["scored"].to_list(), enough["passed"].to_list(), strict=True)
        ]
        result[str(k)] = {"pass": math.fsum(chances) / len(chances), "mean": float(enough["mean"].mean())}  # type: ignore[arg-type]
    return result


def _counts(frame: pl.DataFrame, column: str) -> dict[str, int]:
    counted = frame.filter(pl.col(column).is_not_null()).group_by(column).len().sort(column)
    return dict(zip(counted[column].to_list(), counted["len"].to_list(), strict=True))


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return None if mean is None else float(mean)  # type: ignore[arg-type]
