"""Prefect's own cost on a server with PostgreSQL, by shard size, and a batch of a million rollouts.

README.md says how to read it. From BENCH_ROLLOUTS=1024 on it is full size, else a smoke test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.figures import publish, table
from bench.usage import command_environment
from postgres import PrefectServer, serve_prefect

from rollout.config import MAX_SHARDS, BatchConfig
from rollout.lake.paths import LakePaths
from rollout.lake.publishing import batch_status
from rollout.lake.staging import staged_shards
from rollout.process import stat_fields

FULL = int(os.environ.get("BENCH_ROLLOUTS", "64")) >= 1024
ROLLOUTS = 10_000 if FULL else 640
LARGE, LARGE_SHARDS = (1_000_000, MAX_SHARDS) if FULL else (800, 100)
PER_PROMPT = 8
DEFAULT = BatchConfig.model_fields["shard_size"].default
SIZES = (16, 32, 64, 128, 512) if FULL else (DEFAULT,)
MEMORY_MB = 1000
SIDE = Path(__file__).with_name("fixed_shards.py")
TESTS = Path(__file__).parents[1]
Figures = dict[str, float]

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with serve_prefect(tmp_path_factory.mktemp("prefect")) as serving:
        yield serving


def test_prefects_own_cost_by_shard_size(server: PrefectServer, tmp_path: Path):
    run_flow(server, tmp_path / "first", "tasks", ROLLOUTS, ROLLOUTS)  # what a server does once is in no figure
    found = {size: _cost(server, tmp_path / str(size), size) for size in SIZES}
    head = ["shard size", "shards", "client CPU ms", "server CPU ms", "both", "API calls"]
    rows = [
        (size, int(one["shards"]), client, serving, client + serving, f"{one['calls']:.4f}")
        for size, one in found.items()
        for client, serving in [(one["client_ms"], one["server_ms"])]
    ]
    text = f"{ROLLOUTS} rollouts without an engine, per rollout. Targets: 2 ms, 0.05 calls.\n\n{table(head, rows)}"
    publish("prefect", text, {"rollouts": ROLLOUTS, "sizes": {str(size): one for size, one in found.items()}})


def test_a_large_batch_fits_the_memory(server: PrefectServer, tmp_path: Path):
    found = run_flow(server, tmp_path, "tasks", LARGE, LARGE // LARGE_SHARDS)
    text = (
        f"{LARGE} rollouts in {found['shards']:.0f} shards: {found['peak_mb']:.0f} MB at most, {found['wall_s']:.0f} s"
    )
    publish("prefect-large", text, found)
    assert LARGE_SHARDS == found["shards"]
    assert found["peak_mb"] < MEMORY_MB


def _cost(server: PrefectServer, folder: Path, size: int) -> Figures:
    """CPU milliseconds and API calls a rollout, of what Prefect adds to the same work without it."""
    before = _cpu_s(server)
    flow = run_flow(server, folder / "tasks", "tasks", ROLLOUTS, size)
    spent = _cpu_s(server) - before
    plain = run_flow(server, folder / "plain", "plain", ROLLOUTS, size)
    assert 0 == plain["calls"]
    return {
        "shards": flow["shards"],
        "client_ms": 1000 * (flow["cpu_s"] - plain["cpu_s"]) / ROLLOUTS,
        "server_ms": 1000 * spent / ROLLOUTS,
        "calls": flow["calls"] / ROLLOUTS,
    }


def run_flow(server: PrefectServer, folder: Path, side: str, rollouts: int, size: int) -> Figures:
    """A batch of its own lake; returns when the server has recorded all of its task runs."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"messages": [{"role": "user", "content": "1+1"}], "label": "2", "agent": "single_turn"}
    (folder / "prompts.jsonl").write_text((json.dumps(row) + "\n") * (rollouts // PER_PROMPT))
    options = {"prompts": str(folder / "prompts.jsonl"), "lake": str(folder / "lake"), "batch_id": "fixed"}
    options |= {"n_samples_per_prompt": PER_PROMPT, "shard_size": size}
    recorded = server.states("task_runs").get("COMPLETED", 0)
    marks = _run_side(server, folder, side, options)
    paths = LakePaths(options["lake"])
    marks["shards"] = len(staged_shards(paths, "fixed"))
    assert "published" == batch_status(paths, "fixed")
    if side == "tasks":
        once = ("plan", "start engine and sessions", "write plan", "publish", "report")
        server.wait_completed("task_runs", recorded + 2 * int(marks["shards"]) + len(once), timeout_s=300)
    return marks


def _run_side(server: PrefectServer, folder: Path, side: str, options: dict[str, Any]) -> Figures:
    marks = folder / "marks.json"
    environment = {**command_environment(folder), **server.environment, "PYTHONPATH": str(TESTS)}
    argv = [sys.executable, str(SIDE), str(marks), side, json.dumps(options)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr[-2000:]
    found: Figures = json.loads(marks.read_text())
    return found


def _cpu_s(server: PrefectServer) -> float:
    """CPU seconds of Prefect's two processes; PostgreSQL and Valkey are not Prefect's own."""
    fields = [stat_fields(pid) for pid in server.pids.values()]
    return sum(int(one[11]) + int(one[12]) for one in fields if one is not None) / os.sysconf("SC_CLK_TCK")
