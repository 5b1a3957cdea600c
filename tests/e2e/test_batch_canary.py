"""A batch whose first groups must go well before the rest starts; and the policy version that its rows carry."""

import json
import os
import shutil
from pathlib import Path

import pytest
from installing import install

from rollout.lake import scan_batches, scan_samples, scan_trajectories
from rollout.parity.projections import same_rows

AGENT = """
import os
from pathlib import Path
from rollout.agents.single_turn import run as single_turn

async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
    folder = Path(os.environ["AGENT_FOLDER"])
    with (folder / "calls").open("a") as calls:
        calls.write("x")
    if (folder / "broken").exists():
        raise ValueError("a bug in the agent")
    return await single_turn(base_url, prompt, request_kwargs, metadata, **kwargs)
"""
PROMPTS = [{"messages": [{"role": "user", "content": f"What is {n} + 3?"}], "label": str(n + 3)} for n in range(3)]


@pytest.fixture
def mended(quick_rollout, tmp_path: Path):
    """The command with an agent that raises while a file `broken` is beside its prompts, as it is at first."""
    site = install(tmp_path / "site", "mended", AGENT, {"rollout.agents": {"mended": "run"}})
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    quick_rollout.environment = {**quick_rollout.environment, "PYTHONPATH": path, "AGENT_FOLDER": str(tmp_path)}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "broken").touch()
    return quick_rollout


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text())


def command(batch_id: str, *options: object) -> list[object]:
    fixed = ["--n-samples-per-prompt", 2, "--agent", "mended", "--concurrency", 1]
    return ["run", "--prompts", "prompts.jsonl", "--batch-id", batch_id, *fixed, *options]


@pytest.mark.full
def test_a_canary_that_fails_stops_the_batch_and_is_run_anew_when_the_agent_is_mended(mended, tmp_path: Path):
    shown = mended.succeeds(*command("sick", "--canary", 1, "--dry-run"))
    assert "canary_rollouts  2\n" in shown and "shards           2\n" in shown
    for n_runs in (1, 2):
        done = mended(*command("sick", "--canary", 1))
        assert 1 == done.returncode, done.stderr
        line = done.stderr.splitlines()[-1]
        assert "canary: none of the 2 rollouts of group 0 went well (agent_error 2), first: ValueError: a bug" in line
        assert "`rollout run --batch-id sick` runs it again, with `--canary 0`" in line and "Traceback" not in line
        assert 2 * n_runs == calls(tmp_path), "one group is run, and all of it again"
        assert [] == [path for path in (tmp_path / "lake").rglob("*") if path.suffix != ".json" and path.is_file()]
        assert not list((mended.home / "spool").rglob("sick/**/*.spool"))
    (tmp_path / "broken").unlink()
    mended.succeeds("run", "--batch-id", "sick")
    assert 4 + 6 == calls(tmp_path)
    rows = scan_samples(tmp_path / "lake", batch="sick").sort("index").collect()
    assert (list(range(6)), [None] * 6) == (rows["index"].to_list(), rows["failure"].to_list())
    assert [0, 0, 1, 1, 1, 1] == rows["shard"].to_list()


def test_a_good_canary_comes_first_and_changes_no_row(quick_rollout, finished, batch_command, tmp_path: Path):
    lake = tmp_path / "lake"
    run = [*batch_command, "--lake", lake, "--canary", 2, "--policy-version", "step-7"]
    done = quick_rollout(*run)
    assert 0 == done.returncode, done.stderr
    assert "mine canary: shards 0/8, rollouts 0/32" in done.stderr
    plain, canary = (scan_samples(path, batch="mine").collect() for path in (finished[0], lake))
    assert [] == same_rows(plain.to_arrow(), canary.to_arrow())
    turns = scan_trajectories(lake, batch="mine").filter(seq=0).collect()
    first, rest = turns.filter(turns["index"] < 8), turns.filter(turns["index"] >= 8)
    assert first["committed_at"].max() < rest["requested_at"].min()

    assert {"step-7"} == {engine["policy_version"] for engine in canary["engine"]}
    assert {None} == {engine["policy_version"] for engine in plain["engine"]}
    assert "step-7" == json.loads(scan_batches(lake).collect()["config"][0])["policy_version"]
    assert "step-7" == json.loads((lake / "staging/mine/plan.json").read_text())["config"]["policy_version"]
    shown = quick_rollout.succeeds("show", "mine", "--lake", lake)
    assert ["policy_version", "step-7"] in [line.split() for line in shown.splitlines()]


@pytest.mark.full
def test_a_staged_canary_is_decided_on_again(mended, tmp_path: Path):
    mended.succeeds(*command("old", "--shard-size", 2))
    assert 6 == calls(tmp_path)
    lake = tmp_path / "again"
    shutil.copytree(tmp_path / "lake" / "staging", lake / "staging")
    (lake / "staging/old/shards/1.json").unlink()
    (tmp_path / "broken").unlink()
    done = mended("run", "--batch-id", "old", "--lake", lake, "--canary", 1)
    assert 1 == done.returncode, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "(agent_error 2); its rows are staged and stay: `rollout run --batch-id old --canary 0`" in line
    assert 6 == calls(tmp_path), "the rest was started"
    said = mended.refused("run", "--batch-id", "old", "--lake", lake, "--policy-version", "step-8")
    assert "'old' was planned with policy_version None, not step-8" in said
    mended.succeeds("run", "--batch-id", "old", "--lake", lake)
    rows = scan_samples(lake, batch="old").sort("index").collect()
    assert [True, True, False, False, True, True] == [failure is not None for failure in rows["failure"]]
