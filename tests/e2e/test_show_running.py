"""`rollout show` beside a batch that runs: it counts up to what the batch gives in the end, and costs it nothing."""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command import Rollout
from faulty_proxy import FaultyProxy


async def slow(request: dict[str, Any]) -> None:
    """No fault, but the pace of a real engine."""
    await asyncio.sleep(0.1)


def facts_of(rollout: Rollout, lake: Path) -> dict[str, Any]:
    return json.loads(rollout.succeeds("show", "mine", "--lake", lake, "--json"))


@pytest.mark.full
def test_a_running_batch_is_shown_as_far_as_it_is(
    quick_rollout: Rollout, engine_url: str, batch_command: list[str], tmp_path: Path
):
    lake = tmp_path / "lake"
    with FaultyProxy(engine_url).in_thread() as proxy:
        proxy.fault = slow
        options = ("--lake", lake, "--shard-size", 16, "--concurrency", 2, "--engine", "external")
        run = quick_rollout.start(*batch_command, *options, "--engine-url", proxy.url)
        end, seen = time.monotonic() + 120, {}
        while not seen.get("rollouts_spooled"):
            assert run.process.poll() is None and time.monotonic() < end, run.wait().stderr
            if (lake / "staging" / "mine" / "plan.json").exists():
                seen = facts_of(quick_rollout, lake)
        (listed,) = json.loads(quick_rollout.succeeds("show", "--lake", lake, "--json"))["batches"]
        assert (True, "running", "running") == (seen["running"], seen["status"], listed["status"])
        assert 0 < seen["rollouts_finished"] < 32 and seen["groups"]
        run.end(signal.SIGKILL)
        assert [] == run.left_over()
        stopped = facts_of(quick_rollout, lake)
        assert stopped["running"] is False and stopped["rollouts_finished"] >= seen["rollouts_finished"]
        done = quick_rollout(*batch_command, *options, "--engine-url", proxy.url)
        assert 0 == done.returncode, done.stderr
    published = facts_of(quick_rollout, lake)
    assert ("published", 32) == (published["status"], sum(group["rollouts"] for group in published["groups"]))
