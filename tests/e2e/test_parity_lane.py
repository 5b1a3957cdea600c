"""The flows of the parity lane and of upkeep, run as a worker runs them: against a Prefect server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.server import QUIET
from rollout.lake import scan_batches, scan_samples

pytestmark = pytest.mark.full

RUN = """
import asyncio, json, sys
from flows.lane import parity_lane
from flows.maintain import maintain_lake
flow = {"lane": parity_lane, "maintain": maintain_lake}[sys.argv[1]]
print(json.dumps(asyncio.run(flow(lake=sys.argv[2]))))
"""


def run(name: str, lake: Path, prefect_url: str, home: Path) -> dict[str, object]:
    environment = {**os.environ, **QUIET, "PREFECT_API_URL": prefect_url, "ROLLOUT_HOME": str(home)}
    argv = [sys.executable, "-c", RUN, name, str(lake)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=280)
    assert 0 == done.returncode, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_reference_case_is_proven_and_published_on_both_paths(prefect_url: str, rollout_home: Path, tmp_path: Path):
    said = run("lane", tmp_path / "lake", prefect_url, rollout_home)
    one, other = said["batches"]
    assert (16, "-v1", "-v2") == (said["inputs"], one[-3:], other[-3:])
    for batch_id in (one, other):
        assert 16 == scan_samples(tmp_path / "lake", batch_id).collect().height
    assert ["published"] * 2 == scan_batches(tmp_path / "lake").collect()["status"].to_list()
    assert 0 == run("maintain", tmp_path / "lake", prefect_url, rollout_home)["orphans"]
