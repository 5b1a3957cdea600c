"""Deployments as `infra/prefect.yaml` declares them, registered at a real server and run by a real worker."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.importtools import import_object

from flows.server import QUIET
from rollout.lake import scan_parity

ROOT = Path(__file__).parents[2]
FILE = ROOT / "infra" / "prefect.yaml"
DECLARED = [
    "rollout-batch/rollout-batch",
    "rollout-batch/nightly",
    "rollout-cross-engine/cross-engine",
    "rollout-parity-lane/parity-lane",
    "rollout-maintain-lake/maintain-lake",
]


def test_every_deployment_names_a_flow_of_the_package_and_says_what_it_is_for():
    declared = yaml.safe_load(FILE.read_text())["deployments"]
    assert DECLARED == [f"{import_object(one['entrypoint']).name}/{one['name']}" for one in declared]
    for one in declared:
        environment = one["work_pool"]["job_variables"]["env"]
        assert one["description"] and "30" == environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]


def test_schedules_name_their_timezone_and_wait_to_be_turned_on():
    schedules = [s for one in yaml.safe_load(FILE.read_text())["deployments"] for s in one.get("schedules", [])]
    assert [("Europe/Berlin", False)] * 3 == [(schedule["timezone"], schedule["active"]) for schedule in schedules]


@pytest.mark.full
def test_a_triggered_comparison_is_recorded(
    prefect_url: str, finished: Any, rollout_home: Path, engine_url: str, tmp_path
):
    lake = shutil.copytree(finished[0], tmp_path / "lake")
    environment = {
        **os.environ,
        **QUIET,
        "PREFECT_API_URL": prefect_url,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "ROLLOUT_HOME": str(rollout_home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # as infra/README.md says of a worker
    }

    def prefect(*arguments: str) -> str:
        argv = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert 0 == done.returncode, done.stdout + done.stderr
        return done.stdout

    prefect("work-pool", "create", "rollout", "--type", "process", "--overwrite")
    prefect("deploy", "--prefect-file", str(FILE), "--all")
    given = {"batch": "mine", "against": engine_url, "lake": str(lake), "rollouts": "4"}
    parameters = [word for name, value in given.items() for word in ("--param", f"{name}={value}")]
    prefect("deployment", "run", "rollout-cross-engine/cross-engine", *parameters)
    prefect("worker", "start", "--pool", "rollout", "--run-once")
    rows = scan_parity(lake, "mine").collect().filter(check="cross_engine")
    assert ["equal"] * 4 == rows["verdict"].to_list()
