"""Shards as tasks of a real Ray cluster on this machine: its nodes have state folders of their own, and one is lost."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from command import Rollout
from killing import wait_for
from ray_cluster import RayCluster, RayNode, ray_cluster

from rollout.lake import LakePaths, scan_batches, scan_samples
from rollout.lake.staging import staged_shards
from rollout.parity.projections import same_rows

TEMPLATE = Path(__file__).parents[2] / "examples" / "own_agent"

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        yield started


@pytest.fixture
def ray_options(cluster: RayCluster) -> list[str]:
    return ["--task-runner", "ray", "--ray-address", cluster.address, "--ray-resources", "H200=1"]


def is_rolling(node: RayNode) -> bool:
    """Whether the node is in the midst of a shard."""
    return any(path.is_file() for path in (node.home / "spool").rglob("*"))


def shard_states(prefect_url: str, flow_run: str) -> list[str]:
    """The states of a flow run's shards at the Prefect server."""
    query = {"flow_runs": {"id": {"any_": [flow_run]}}, "task_runs": {"name": {"like_": "roll out shard"}}}
    request = Request(
        f"{prefect_url}/task_runs/filter", json.dumps(query).encode(), {"content-type": "application/json"}
    )
    with urlopen(request) as answer:
        return [run["state_type"] for run in json.load(answer)]


def test_a_batch_that_loses_a_node_ends_complete_and_exact(
    quick_rollout: Rollout,
    prefect_url: str,
    cluster: RayCluster,
    ray_options: list[str],
    finished: Any,
    batch_command: list[str],
    tmp_path: Path,
):
    lake, lost = tmp_path / "lake", cluster.add()
    run = quick_rollout.start(*batch_command, "--lake", lake, *ray_options, "--concurrency", 1)
    wait_for(
        lambda: run.process.poll() is not None or (staged_shards(LakePaths(lake), "mine") and is_rolling(lost)), 300
    )
    lost.lose()
    assert 8 > len(staged_shards(LakePaths(lake), "mine")), "the node was lost in mid-batch"
    done = run.wait(400)
    assert 0 == done.returncode, done.stderr
    assert [] == run.left_over()
    for node in cluster.nodes:
        assert (node.home / "logs" / "mine" / "worker" / "session.log").exists(), "each had shards"
    wait_for(lambda: not cluster.nodes[0].ours(), 10)
    undisturbed, disturbed = (scan_samples(path, batch="mine").collect() for path in (finished[0], lake))
    assert [] == same_rows(undisturbed.to_arrow(), disturbed.to_arrow())
    assert undisturbed["payload_digest"].to_list() == disturbed["payload_digest"].to_list()
    provenance = json.loads(scan_batches(lake, "mine").collect()["provenance"][0])
    assert ["COMPLETED"] * 8 == shard_states(prefect_url, provenance["flow_run_id"])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the template of a user's package, installed as pip does."""
    copy = shutil.copytree(TEMPLATE, tmp_path / "own_agent", ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", tmp_path / "site", copy], check=True)
    return tmp_path / "site"


def test_a_package_of_the_users_own_is_brought_to_the_nodes(quick_rollout: Rollout, ray_options: list[str], site: Path):
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    quick_rollout.environment = {**quick_rollout.environment, "PYTHONPATH": path}
    options = ["--agent", "careful", "--reward", "graded", "--reward-key", "right", "--n-samples-per-prompt", 1]
    command = ["run", "--prompts", TEMPLATE / "prompts.jsonl", "--batch-id", "own", *options, *ray_options]
    without = quick_rollout(*command)
    said = without.stderr.splitlines()[-1]
    assert 2 == without.returncode and "no agent 'careful' is installed" in said and "ray_modules brings" in said
    assert "published        own, version " in quick_rollout.succeeds(*command, "--ray-modules", "own_agent")
    rows = scan_samples(quick_rollout.cwd / "lake", batch="own").collect()
    assert {"careful"} == set(rows["agent"]) and rows["reward"].is_not_null().all()
