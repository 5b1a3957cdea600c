"""`rollout up` and `rollout trigger`: a batch by deployment, cancelled, retried, and nothing left at the end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from command import Rollout, reach
from deltalake import DeltaTable
from running_up import Up, running_up, wait_until

from rollout.batch.spool import SPOOLS
from rollout.lake import scan_samples
from rollout.lake.paths import LakePaths
from rollout.lake.publishing import batch_status
from rollout.lake.staging import staged_shards

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
IN_AN_HOUR = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
PAUSED = {
    "type": "PAUSED",
    "name": "Suspended",
    "state_details": {"pause_reschedule": True, "pause_timeout": IN_AN_HOUR, "pause_key": "by-hand"},
}
"""What the pages' Pause sends."""
ENGINE, SERVER = "rollout.engine.embedded", "rollout.session.server"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    return Rollout(home=tmp_path_factory.mktemp("up-home"), cwd=tmp_path_factory.mktemp("up"))


@pytest.fixture(scope="module")
def up(home: Rollout) -> Iterator[Up]:
    with running_up(home) as running:
        yield running


@pytest.fixture
def batch(prompt_file: Path) -> dict[str, Any]:
    """32 rollouts in eight shards, two at once."""
    return {"prompts": str(prompt_file), "shard_size": 4, "seed": 7, "concurrency": 2}


def has(up: Up, *parts: str) -> bool:
    """Whether all of these programs of ours run."""
    lines = up.run.processes()
    return all(any(part in line for line in lines) for part in parts)


def test_a_triggered_batch_is_followed_to_its_publication(up: Up, home: Rollout, batch: dict[str, Any]):
    given = [word for name, value in batch.items() for word in ("--param", f"{name}={value}")]
    done = home("trigger", "--deployment", "rollout-batch", *given, "--param", "batch_id=followed", "--watch", "--json")
    said = json.loads(done.stdout)
    assert (0, "completed", said["flow_run_id"]) == (done.returncode, said["state"], said["url"].rpartition("/")[2])
    assert set(range(32)) == set(scan_samples(up.lake, "followed").collect()["index"])


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("seed=98765432109876543210", "98765432109876543210 is greater than the maximum of 9007199254740991"),
        ("n_samples_per_prompt=0", "0 is less than the minimum of 1"),
        ("session_version=v3", "'v3' is not one of ['v1', 'v2']"),
        ("n_sample=1", "has no parameter 'n_sample'"),
        ("temperature=NaN", "NaN is no number"),
    ],
)
def test_g50_a_wrong_value_is_refused_at_once(up: Up, home: Rollout, parameter: str, says: str):
    assert says in home.refused("trigger", "--deployment", "rollout-batch", "--param", parameter)
    name, _, value = parameter.partition("=")
    if name == "seed":
        with pytest.raises(HTTPError, match="409"):
            up.press_run("rollout-batch", seed=int(value))
    assert up.call("POST", "/flow_runs/filter", {"limit": 5}) is not None, "other polls are answered"


def test_what_only_the_flow_can_see_fails_it_in_its_first_second(up: Up, batch: dict[str, Any]):
    run = up.press_run("rollout-batch", **{**batch, "lake": "somewhere"})
    state, message = up.wait(run, "FAILED", "COMPLETED")
    assert "FAILED" == state and "lake: 'somewhere' is relative, but a worker has no folder of yours" in message


def test_g22_a_cancelled_batch_leaves_no_process_and_a_retry_goes_on(up: Up, home: Rollout, batch: dict[str, Any]):
    run = up.press_run("rollout-batch", **batch, batch_id="cancelled")
    paths = LakePaths(up.lake)
    wait_until(lambda: len(staged_shards(paths, "cancelled")) >= 2, "two shards are staged", 240)
    assert has(up, ENGINE, SERVER)
    up.set_state(run, "CANCELLING")
    wait_until(lambda: not has(up, ENGINE) and not has(up, SERVER) and not has(up, "flow_process"), "all end", 15)
    assert "CANCELLED" == up.wait(run, "CANCELLED", "CRASHED", "COMPLETED")[0]
    # Retried before its worker has done with it, a run stays Scheduled.
    log = home.home / "prefect-up" / "worker.log"
    wait_until(lambda: "Cancelled flow run" in log.read_text(), "the worker has seen the end", 60)
    staged = staged_shards(paths, "cancelled")
    assert 2 <= len(staged) < 8 and list((home.home / SPOOLS / "cancelled").rglob("*.spool"))

    up.retry(run)
    assert "COMPLETED" == up.wait(run, "COMPLETED", "FAILED", "CRASHED")[0]
    again = staged_shards(paths, "cancelled")
    assert staged == {shard: again[shard] for shard in staged}, "what was staged is not made anew"
    assert set(range(32)) == set(scan_samples(up.lake, "cancelled").collect()["index"])


def test_a_killed_flow_is_crashed_and_can_be_retried(up: Up, batch: dict[str, Any]):
    run = up.press_run("rollout-batch", **batch, batch_id="crashed")
    wait_until(lambda: has(up, ENGINE, SERVER), "the engine runs", 240)
    (flow,) = [line for line in up.run.processes() if "flow_process" in line]
    os.kill(int(flow.split()[0]), signal.SIGKILL)
    assert "CRASHED" == up.wait(run, "CRASHED", "COMPLETED", timeout_s=30)[0]
    wait_until(lambda: not has(up, ENGINE) and not has(up, SERVER), "its children end", 10)
    up.retry(run)
    assert "COMPLETED" == up.wait(run, "COMPLETED", "FAILED", "CRASHED")[0]
    assert 32 == scan_samples(up.lake, "crashed").collect()["index"].n_unique()


def test_two_processes_that_execute_one_flow_run_publish_once(up: Up, home: Rollout, batch: dict[str, Any]):
    run = up.press_run("rollout-batch", **batch, batch_id="twice")
    wait_until(lambda: has(up, "flow_process"), "the first runs", 60)
    (line,) = [line for line in up.run.processes() if "flow_process" in line]
    first = Path("/proc", line.split()[0], "environ").read_bytes().decode().split("\0")
    environment = dict(pair.split("=", 1) for pair in first if pair)
    argv = [sys.executable, "-m", "flows.flow_process"]
    second = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)
    up.wait(run, "COMPLETED", "FAILED", "CRASHED")
    assert set(range(32)) == set(scan_samples(up.lake, "twice").collect()["index"]), second.stderr
    commits = [one for one in DeltaTable(f"{up.lake}/tables/samples").history() if one.get("batch_id") == "twice"]
    assert 1 == len(commits)


def test_a_paused_batch_ends_at_its_next_shard_and_goes_on_when_it_is_resumed(up: Up, batch: dict[str, Any]):
    run = up.press_run("rollout-batch", **batch, batch_id="paused")
    paths = LakePaths(up.lake)
    wait_until(lambda: len(staged_shards(paths, "paused")) >= 1, "a shard is staged", 240)
    up.call("POST", f"/flow_runs/{run}/set_state", {"state": PAUSED, "force": False})
    wait_until(lambda: not has(up, ENGINE) and not has(up, "flow_process"), "it ends", 60)
    assert ("PAUSED", None) == (up.state(run)[0], batch_status(paths, "paused"))
    up.call("POST", f"/flow_runs/{run}/resume", {})
    assert "COMPLETED" == up.wait(run, "COMPLETED", "FAILED", "CRASHED")[0]
    assert set(range(32)) == set(scan_samples(up.lake, "paused").collect()["index"])


def test_a_batch_that_is_published_or_keeps_failing_says_so(up: Up, batch: dict[str, Any]):
    run = up.press_run("rollout-batch", **batch, batch_id="told")
    bad = up.press_run("rollout-batch", **batch, batch_id="failing", max_seq_len=8, max_failed_in_a_row=3)
    assert "COMPLETED" == up.wait(run, "COMPLETED", "FAILED", "CRASHED")[0]
    state, message = up.wait(bad, "COMPLETED", "FAILED", "CRASHED")
    assert "FAILED" == state and "rollouts failed in a row" in message  # those under way beside the third count, too
    for name, batch_id in (("published", "told"), ("failing", "failing")):
        wait_until(lambda name=name: bool(up.events(f"rollout.batch.{name}")), f"{name} is told", 30)
        event = up.events(f"rollout.batch.{name}")[0]
        assert (f"rollout.batch.{batch_id}", 32) == (
            event["resource"]["prefect.resource.id"],
            event["payload"]["rollouts"],
        )
        assert any(one["prefect.resource.role"] == "deployment" for one in event["related"])
    wait_until(lambda: bool(up.events("prefect.automation.triggered")), "the automation for failing batches fires", 60)


def test_a_run_without_heartbeat_is_crashed(up: Up, home: Rollout, prompt_file: Path, tmp_path: Path):
    """Of a host that is lost, nobody is left to say so."""
    there = {"PREFECT_API_URL": up.api, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    lost = Rollout(home=tmp_path / "home", cwd=tmp_path, environment=there)
    run = lost.start("run", "--prompts", prompt_file, "--lake", tmp_path / "lake", "--concurrency", 1)
    reach(run, "rolling out", 1.0)
    (flow_run,) = up.call("POST", "/flow_runs/filter", {"limit": 1, "sort": "START_TIME_DESC"})
    run.end(signal.SIGKILL)
    assert "RUNNING" == up.state(flow_run["id"])[0]
    state, message = up.wait(flow_run["id"], "CRASHED", "COMPLETED", "FAILED", timeout_s=240)
    assert "CRASHED" == state and "No heartbeat for 90 s" in message


def turn_on(up: Up, name: str) -> None:
    (schedule,) = up.deployment(name)["schedules"]
    assert not schedule["active"]
    up.call("PATCH", f"/deployments/{up.deployment(name)['id']}/schedules/{schedule['id']}", {"active": True})


def test_a_second_host_leaves_what_is_registered_as_it_is(up: Up, home: Rollout):
    turn_on(up, "nightly")
    another = Rollout(home=home.home.with_name("another"), cwd=home.cwd, environment={"PREFECT_API_URL": up.api})
    with running_up(another, "--lake", home.cwd / "other") as second:
        assert up.api == second.api, "it registers at the user's server and starts only a worker"
        assert second.deployment("nightly")["schedules"][0]["active"]
        assert second.lake != up.lake == second.deployment("nightly")["parameters"]["lake"]
        names = [one["name"] for one in up.call("POST", "/automations/filter", {})]
        assert ["rollout-batch-failing", "rollout-batch-quarantined", "rollout-heartbeat-lost"] == sorted(names)
    assert [] == second.run.left_over()


def test_a_second_one_here_is_refused(up: Up, home: Rollout):
    assert f"`rollout up` runs here already ({up.api})" in home.refused("up", "--port", 4999)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["INT", "KILL"])
def test_nothing_is_left_of_one_that_ends_in_mid_batch(tmp_path: Path, batch: dict[str, Any], number: signal.Signals):
    home = Rollout(home=tmp_path / "home", cwd=tmp_path)
    with running_up(home) as up:
        turn_on(up, "nightly")
        up.press_run("rollout-batch", **batch)
        wait_until(lambda: has(up, ENGINE, SERVER, "flow_process"), "the engine runs", 240)
        code = up.run.end(number)
        assert {signal.SIGINT: 0, signal.SIGKILL: -9}[number] == code
        assert [] == up.run.left_over(10)
        with running_up(home) as again:
            assert [True] == [one["active"] for one in again.deployment("nightly")["schedules"]]
