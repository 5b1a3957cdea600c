"""`rollout run` from options to a published batch, and what the other commands show of it."""

import json
import re
import shutil
from pathlib import Path

import polars as pl
from prefect_seen import artifacts_of

from rollout.lake import scan_batches, scan_parity, scan_samples, scan_trajectories

KEYS = {f"rollout-batch-{name}" for name in ("progress", "summary", "report", "lake", "groups", "histograms")}
KEYS |= {"rollout-batch-parity", "rollout-batch-parity-plot"}


def test_the_batch_is_published_whole(finished):
    lake, _ = finished
    samples = scan_samples(lake, batch="mine").collect()
    assert set(range(32)) == set(samples["index"])
    keys = samples.select("batch_id", "rollout_key", "sibling")
    assert keys.height == keys.unique().height
    for (_,), rows in samples.group_by("index"):
        expected = None if rows.height == 1 else rows["index"][0]
        assert {expected} == set(rows["rollout_id"])
    assert samples.filter(pl.col("siblings") > 1).height, "the branching agent gave no rollout with several samples"
    parity = scan_parity(lake, batch="mine").collect()
    assert list(range(32)) == sorted(parity["index"])
    assert "differs" not in parity["verdict"].to_list()
    assert set(range(32)) == set(scan_trajectories(lake, batch="mine").collect()["index"])
    (row,) = scan_batches(lake).collect().to_dicts()
    assert ("published", 8, 32, 8) == (row["status"], row["n_prompts"], row["n_rollouts"], row["n_shards"])
    counts = json.loads(row["counts"])
    assert (32, samples.height) == (counts["rollouts"]["total"], counts["samples"]["total"])
    assert row["tokens_sampled"] >= row["tokens_trained"] > 0
    assert 0 < row["seconds_held"] < row["seconds_wall"]
    assert (0.0, None, None) == (row["gpu_seconds"], row["tokens_per_gpu_second"], row["cost"])


def test_the_last_screen_says_what_came_out(finished):
    lake, done = finished
    screen = done.stdout
    assert re.search(r"^rollouts +32 in 8 groups", screen, re.M)
    for name in ("samples", "reward", "mean by group", "parity", "tokens"):
        assert re.search(rf"^{name} ", screen, re.M), name
    assert f"version 1 of {lake}/tables/samples" in screen
    assert f"rollout show mine --lake {lake}" in screen
    assert "Traceback" not in done.stderr and "prefect" not in done.stderr.replace("starting Prefect", "")
    progress = [line for line in done.stderr.splitlines() if "shards 8/8, rollouts 32/32" in line]
    assert progress and all(" turns, " in line and " tokens/s" in line for line in progress)


def test_a_published_batch_run_again_says_so(rollout, finished):
    lake, _ = finished
    assert "batch mine is published already (version 1" in rollout.succeeds("run", "--batch-id", "mine", "--lake", lake)
    again = json.loads(rollout.succeeds("run", "--batch-id", "mine", "--lake", lake, "--json"))
    assert (True, 1, "published") == (again["already"], again["version"], again["status"])
    line = rollout.refused("run", "--batch-id", "mine", "--lake", lake, "--seed", 8)
    assert "planned with another configuration" in line and "seed: 7 != 8" in line


def test_a_second_batch_in_one_lake_without_id_and_as_json(quick_rollout, finished, prompt_file, tmp_path):
    (tmp_path / "two.jsonl").write_text("".join(prompt_file.read_text().splitlines(keepends=True)[-2:]))
    lake = shutil.copytree(finished[0], tmp_path / "lake")  # other tests count what is in theirs
    options = [
        "--prompts",
        "two.jsonl",
        "--n-samples-per-prompt",
        2,
        "--lake",
        lake,
        "--session-version",
        "v1",
        "--json",
    ]
    result = json.loads(quick_rollout.succeeds("run", *options))
    shown = artifacts_of(quick_rollout.environment["PREFECT_API_URL"], result["batch_id"])
    assert KEYS == {key for key in shown if key.startswith("rollout-batch-")}
    assert 100.0 == shown["rollout-batch-progress"] and "rollouts 4/4" in shown["progress-text"]
    assert [0, 1] == sorted(group["group"] for group in json.loads(shown["rollout-batch-groups"]))
    assert f"| version | {result['version']} |" in shown["rollout-batch-lake"]
    assert re.fullmatch(r"\d{8}t\d{6}-[0-9a-f]{8}", result["batch_id"])
    assert (4, 4, False) == (result["rollouts"], result["summary"]["samples"], result["already"])
    assert 4 == scan_samples(lake, batch=result["batch_id"]).collect().height
    assert {"v1"} == set(scan_samples(lake, batch=result["batch_id"]).collect()["session_version"])


def test_what_show_and_parity_say(rollout, finished):
    lake, _ = finished
    batches = json.loads(rollout.succeeds("show", "--lake", lake, "--json"))["batches"]
    assert ("mine", "published") == (batches[0]["batch_id"], batches[0]["status"])
    assert "mine" in rollout.succeeds("show", "--lake", lake)
    screen = rollout.succeeds("show", "mine", "--lake", lake)
    assert "published" in screen and re.search(r"^7 ", screen, re.M)
    assert re.search(r"^gpu_seconds +0$", screen, re.M) and re.search(r"^cost +-$", screen, re.M)
    group = json.loads(rollout.succeeds("show", "mine", "--lake", lake, "--group", 4, "--json"))["samples"]
    assert {16, 17, 18, 19} == {row["rollout_key"] for row in group}
    one = group[0]["sample_id"]
    conversation = rollout.succeeds("show", "mine", "--lake", lake, "--sample", one[:16])
    assert f"sample {one}" in conversation and "[trained, " in conversation and "<|im_start|>user" in conversation
    row = json.loads(rollout.succeeds("show", "mine", "--lake", lake, "--sample", one, "--json"))
    assert len(row["loss_mask"]) == row["response_length"]
    assert "no sample 'zz'" in rollout.refused("show", "mine", "--lake", lake, "--sample", "zz")
    verdicts = json.loads(rollout.succeeds("parity", "mine", "--lake", lake, "--json"))
    assert 32 == sum(verdicts["verdicts"].values()) and [] == verdicts["differing"]


def test_a_staged_batch_can_be_looked_at_and_is_only_published(quick_rollout, staged_lake: Path):
    lake = staged_lake
    before = {path: path.stat().st_mtime_ns for path in (lake / "staging").rglob("*.json")}
    assert "8 of 8" in quick_rollout.succeeds("show", "mine", "--lake", lake)
    shown = json.loads(quick_rollout.succeeds("parity", "mine", "--lake", lake, "--json"))
    assert ("staged", 32) == (shown["status"], sum(shown["verdicts"].values()))
    assert not (lake / "tables").exists()
    assert "version 1 of" in quick_rollout.succeeds("run", "--batch-id", "mine", "--lake", lake)
    assert before == {path: path.stat().st_mtime_ns for path in (lake / "staging").rglob("*.json")}


def test_a_refused_row_becomes_a_failed_rollout_where_that_is_asked_for(quick_rollout, prompt_file, tmp_path):
    good = prompt_file.read_text().splitlines()[-1]
    (tmp_path / "half.jsonl").write_text(f'{good}\n{{"messages": []}}\n')
    options = ["--prompts", "half.jsonl", "--n-samples-per-prompt", 2, "--batch-id", "half", "--skip-bad-prompts"]
    summary = json.loads(quick_rollout.succeeds("run", *options, "--json"))["summary"]
    assert {"bad_prompt": 2} == summary["failures"] and {"no_sample": 2} == summary["reasons"]["not_comparable"]
    rows = scan_samples(tmp_path / "lake", batch="half").collect()
    assert [2, 3] == rows.filter(pl.col("failure").is_not_null())["index"].to_list()


def test_a_row_sets_its_own_sampling_within_the_batchs_bounds(quick_rollout, tmp_path):
    row = {"messages": [{"role": "user", "content": "Say a poem."}], "agent": "single_turn"}
    own = {**row, "metadata": {"sampling": {"temperature": 0, "max_new_tokens": 3}}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(own)}\n")
    options = ["run", "--prompts", "rows.jsonl", "--batch-id", "own", "--n-samples-per-prompt", 2]
    assert "rows.jsonl, line 2: metadata.sampling is given" in quick_rollout.refused(*options)
    refused = quick_rollout.refused(*options, "--sampling-bounds", "max_new_tokens=4:64,temperature=0:1")
    assert "rows.jsonl, line 2: metadata.sampling.max_new_tokens is 3, want 4 to 64" in refused
    quick_rollout.succeeds(*options, "--sampling-bounds", "max_new_tokens=1:64,temperature=0:1", "--reward", "none")
    rows = scan_samples(tmp_path / "lake", batch="own").sort("index").collect()
    assert [1.0, 1.0, 0.0, 0.0] == rows["temperature"].to_list()
    assert rows["tokens"][2].equals(rows["tokens"][3]) and max(rows["response_length"][2:]) <= 3
    assert {"equal"} == set(scan_parity(tmp_path / "lake", batch="own").collect()["verdict"])
