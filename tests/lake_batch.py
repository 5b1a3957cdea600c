"""A planned and staged batch for the tests of the lake: real plans and rows, no engine."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pyarrow as pa

from rollout.batch.plan import Plan, make_plan
from rollout.batch.prompts import parse_prompts
from rollout.columns import BatchStamp, samples_to_table
from rollout.config import make_config
from rollout.lake import scan_batches, scan_parity, scan_samples, scan_trajectories
from rollout.lake.manifest import Manifest
from rollout.lake.paths import LakePaths
from rollout.lake.publishing import Published, publish_batch
from rollout.lake.schema import rows_to_table
from rollout.lake.staging import create_plan, stage_shard
from rollout.sample import Sample, Status

NOW = datetime(2026, 12, 2, 8, 30, 0, 123456, tzinfo=UTC)
ENGINE = {
    "name": "embedded",
    "version": "1",
    "model": "tiny",
    "revision": "r",
    "policy_version": "p",
    "flags_hash": "f",
    "deterministic": True,
}
ROW = {"counts": "{}", "reward_mean": 0.5, "n_shards": 3}
PROMPTS = "\n".join(json.dumps({"messages": [{"role": "user", "content": f"question {k}"}]}) for k in range(6)).encode()


def plan_batch(batch_id: str = "b1", **options: object) -> Plan:
    """Six prompts, two samples each, in three shards of two groups, where `options` say nothing else."""
    defaults = {"batch_id": batch_id, "n_samples_per_prompt": 2, "shard_size": 4}
    return make_plan(
        make_config(**{**defaults, **options}),
        rows=parse_prompts(PROMPTS, "prompts"),
        model_digest="m",
        created_at=NOW,
        flow_run_id="0" * 32,
    )


def rollout_samples(index: int, per_group: int, seed: int = 0) -> list[Sample]:
    """One or, for every third index, two samples of a rollout, with random payload."""
    rng = np.random.default_rng([seed, index])
    siblings = 2 if index % 3 == 0 else 1
    samples = []
    for sibling in range(siblings):
        n_tokens, n_response = 9, int(rng.integers(0, 7))
        samples.append(
            Sample(
                index=index,
                group_index=index // per_group,
                rollout_id=index if siblings > 1 else None,
                sibling=sibling,
                siblings=siblings,
                prompt=[{"role": "user", "content": "ü"}],
                tokens_T=rng.integers(0, 500, n_tokens).astype(np.int32),
                response="x" * n_response,
                response_length=n_response,
                loss_mask_R=rng.integers(0, 2, n_response).astype(np.int8),
                rollout_log_probs_R=-rng.random(n_response),
                status=Status.COMPLETED,
                reward=float(rng.random()),
                metadata={"n": index},
            )
        )
    return samples


def sample_rows(plan: Plan, shard: int, seed: int = 0) -> pa.Table:
    """The samples of a shard, in reverse order: staging has to sort them."""
    per_group = plan.config["n_samples_per_prompt"]
    samples = [s for index in plan.shards[shard].indexes for s in rollout_samples(index, per_group, seed)][::-1]
    return stamp_rows(plan, shard, samples)


def stamp_rows(plan: Plan, shard: int, samples: list[Sample]) -> pa.Table:
    stamp = BatchStamp(batch_id=plan.batch_id, run_date=plan.run_date, shard=shard, engine=ENGINE, created_at=NOW)
    return samples_to_table(samples, stamp, [b"d" * 32] * len(samples))


def tape_rows(plan: Plan, shard: int) -> pa.Table:
    """For every rollout of a shard its session's row and one exchange."""
    rows = []
    for index in plan.shards[shard].indexes:
        common = {"batch_id": plan.batch_id, "index": index, "attempt": 0, "session_id": f"s{index}"}
        rows.append({**common, "seq": 0, "output_ids": [1], "output_log_probs": [-0.5], "requested_at": NOW})
        rows.append({**common, "seq": -1, "session": "{}"})
    return rows_to_table([{**row, "schema_version": 1} for row in rows], "trajectories")


def parity_rows(plan: Plan, verdict: str = "equal") -> pa.Table:
    rows = [
        {"batch_id": plan.batch_id, "index": k, "rollout_key": k, "check": "replay", "verdict": verdict, "paths": []}
        for k in range(plan.n_rollouts)
    ]
    return rows_to_table([{**row, "created_at": NOW, "schema_version": 1} for row in rows], "parity")


def stage_all(paths: LakePaths, plan: Plan, seed: int = 0) -> dict[int, Manifest]:
    """Plan and stage every shard."""
    create_plan(paths, plan)
    return {
        cut.shard: stage_shard(
            paths, plan, cut.shard, sample_rows(plan, cut.shard, seed), tape_rows(plan, cut.shard), {}
        )
        for cut in plan.shards
    }


def publish(paths: LakePaths, plan: Plan, manifests: dict[int, Manifest]) -> Published:
    """Publish with a verdict `equal` on every rollout."""
    return publish_batch(paths, plan, manifests, parity_rows(plan), ROW)


def row_counts(paths: LakePaths) -> list[int]:
    """Rows that readers see of samples, trajectories, parity and batches."""
    scans = (scan_samples, scan_trajectories, scan_parity, scan_batches)
    return [scan(paths).select(pl.len()).collect().item() for scan in scans]


def same_bits(first: pa.Table, second: pa.Table) -> bool:
    """Equal schema and equal bytes of every value: doubles are looked at as integers."""
    if not first.schema.equals(second.schema):
        return False
    return all(_bits(first.column(name)) == _bits(second.column(name)) for name in first.column_names)


def _bits(column: pa.ChunkedArray) -> list[object]:
    return [_value_bits(value) for value in column.to_pylist()]


def _value_bits(value: object) -> object:
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, list):
        return [_value_bits(item) for item in value]
    if isinstance(value, dict):
        return {key: _value_bits(item) for key, item in value.items()}
    return value
