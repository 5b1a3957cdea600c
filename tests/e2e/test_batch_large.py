"""200 prompts x 4 rollouts of all three agents: nothing is missing, nothing stands twice, nothing differs."""

import json

import polars as pl
import pytest

from rollout.engine.tiny.prompts import mixed_prompts
from rollout.lake import scan_batches, scan_parity, scan_samples, scan_trajectories

PROMPTS, PER_PROMPT = 200, 4


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_hundred_prompts_are_published_whole(quick_rollout, tmp_path):
    rows = mixed_prompts(PROMPTS, seed=200)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = quick_rollout.start("run", "--prompts", "prompts.jsonl", "--batch-id", "large", "--shard-size", 64)
    done = run.wait(timeout_s=800)
    assert 0 == done.returncode, done.stderr
    lake, n_rollouts = tmp_path / "lake", PROMPTS * PER_PROMPT
    samples = scan_samples(lake, batch="large").collect()

    assert list(range(n_rollouts)) == sorted(samples["index"].unique())
    assert samples.height == samples.select("batch_id", "rollout_key", "sibling").unique().height
    assert samples.height == samples["sample_id"].n_unique()
    assert 0 == samples["rollout_key"].null_count()
    for (index,), siblings in samples.group_by("index"):
        n = siblings.height
        assert [n] * n == siblings["siblings"].to_list()
        assert list(range(n)) == sorted(siblings["sibling"])
        assert {None if n == 1 else index} == set(siblings["rollout_id"])
        assert {index} == set(siblings["rollout_key"])
        assert 1 == siblings["reward"].n_unique() == siblings["group_index"].n_unique()
    groups = samples.filter(pl.col("sibling") == 0).group_by("group_index").len()
    assert (PROMPTS, {PER_PROMPT}) == (groups.height, set(groups["len"]))
    assert samples.filter(pl.col("siblings") > 1).height and samples.filter(pl.col("siblings") == 1).height

    parity = scan_parity(lake, batch="large").collect()
    assert list(range(n_rollouts)) == sorted(parity["index"])
    assert {"equal", "equal_by_path", "not_comparable"} >= set(parity["verdict"])
    assert set(range(n_rollouts)) == set(scan_trajectories(lake, batch="large").collect()["index"])
    (row,) = scan_batches(lake).collect().to_dicts()
    assert ("published", PROMPTS, n_rollouts) == (row["status"], row["n_prompts"], row["n_rollouts"])
