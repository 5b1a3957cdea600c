"""The Prefect server of `infra/compose.yaml`, on a real PostgreSQL and Valkey: two batches at once lose no state."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import valkey
from command import Rollout
from postgres import PrefectServer, compose_services, serve_prefect

from rollout.engine.tiny import CHECKPOINT
from rollout.lake import scan_parity, scan_samples
from rollout.lake.paths import LakePaths
from rollout.lake.publishing import batch_status
from rollout.lake.staging import staged_shards

SHARDS = 250
"""Of each batch, one rollout in each: what is at stake is Prefect's state."""
BATCHES = ("left", "right")

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with serve_prefect(tmp_path_factory.mktemp("prefect")) as serving:
        yield serving


def test_two_batches_at_once_lose_no_state(server: PrefectServer, engine_url: str, rollout: Rollout, tmp_path: Path):
    rollout.environment = server.environment
    row = {"messages": [{"role": "user", "content": "1+1"}], "label": "2", "agent": "single_turn"}
    (tmp_path / "prompts.jsonl").write_text((json.dumps(row) + "\n") * SHARDS)
    options = ["--prompts", "prompts.jsonl", "--n-samples-per-prompt", 1, "--shard-size", 1, "--max-new-tokens", 2]
    options += ["--engine", "external", "--engine-url", engine_url, "--model", CHECKPOINT]
    runs = [rollout.start("run", *options, "--batch-id", name) for name in BATCHES]
    for done in [run.wait(timeout_s=1000) for run in runs]:
        assert 0 == done.returncode, done.stderr

    paths = LakePaths(str(tmp_path / "lake"))
    for name in BATCHES:
        assert "published" == batch_status(paths, name)
        assert list(range(SHARDS)) == list(staged_shards(paths, name))
        assert list(range(SHARDS)) == sorted(scan_samples(paths.uri, batch=name).collect()["index"])
        assert list(range(SHARDS)) == sorted(scan_parity(paths.uri, name).collect()["index"])
    server.wait_completed("flow_runs", len(BATCHES))
    shard_tasks = len(BATCHES) * SHARDS * len(("roll out shard", "check shard"))
    others = len(BATCHES) * len(("plan", "start engine and sessions", "write plan", "publish", "report"))
    server.wait_completed("task_runs", shard_tasks + others)


def test_the_server_has_the_settings_of_the_compose_file(server: PrefectServer):
    """PostgreSQL instead of SQLite, leases and messages in Valkey, no analytics, no promotion, and a password."""
    settings = server.ask("GET", "admin/settings")["server"]
    recorder = settings["services"]["task_run_recorder"]
    declared = compose_services()["server"]["environment"]
    found = {
        "PREFECT_MESSAGING_BROKER": settings["events"]["messaging_broker"],
        "PREFECT_MESSAGING_CACHE": settings["events"]["messaging_cache"],
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": settings["events"]["causal_ordering"],
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": settings["concurrency"]["lease_storage"],
        "PREFECT_SERVER_WORKER_CHANNEL_CLEANUP_QUEUE_STORAGE": settings["worker_channel"]["cleanup_queue_storage"],
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": str(recorder["batch_size"]),
        "PREFECT_SERVER_ANALYTICS_ENABLED": str(settings["analytics_enabled"]).lower(),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": str(settings["ui"]["show_promotional_content"]).lower(),
    }
    assert {name: declared[name] for name in found} == found
    assert server.uri.startswith("postgresql+asyncpg://")
    assert 401 == httpx.post(f"{server.url}/flow_runs/filter", json={}).status_code


def test_a_lease_is_kept_outside_the_server(server: PrefectServer):
    server.ask("POST", "v2/concurrency_limits/", {"name": "gpu:host", "limit": 1})
    asked = {"names": ["gpu:host"], "slots": 1, "mode": "concurrency", "lease_duration": 60}
    lease = server.ask("POST", "v2/concurrency_limits/increment-with-lease", asked)["lease_id"]
    with valkey.from_url(server.valkey) as client:
        assert 1 == client.exists(f"prefect:concurrency:lease:{lease}")
