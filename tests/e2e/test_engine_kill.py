"""The embedded engine: nothing of a killed batch is left, and a killed engine costs no row.

50 kills by hand: ROLLOUT_TEST_KILLS=50.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from command import Rollout, reach
from killing import GRACE_S, end_at, find, kill_part, moments, wait_for

from rollout.lake import scan_samples
from rollout.parity.projections import same_rows

KILLS = int(os.environ.get("ROLLOUT_TEST_KILLS", "10"))
HOWS = ("KILL", "TERM", "INT", "rollout.engine.embedded", "rollout.session.server")
ENGINE = "rollout.engine.embedded"


@pytest.mark.full
@pytest.mark.timeout(60 * KILLS)
def test_nothing_is_left_of_a_batch_that_is_ended_at_any_moment(
    quick_rollout: Rollout, batch_command: list[str], tmp_path: Path
):
    hows = [HOWS[k % len(HOWS)] for k in range(KILLS)]
    left: list[object] = []
    for number, moment in enumerate(moments(hows, {"starting the engine": 2.0, "rolling out": 3.0}, seed=12)):
        run = quick_rollout.start(*batch_command, "--lake", tmp_path / f"lake-{number}", "--concurrency", 4)
        end_at(run, *moment)
        if found := run.left_over(GRACE_S):
            left.append((moment, found))
    assert [] == left


def greedy(batch_command: list[str], lake: Path) -> list[str]:
    return [*batch_command, "--lake", str(lake), "--temperature", "0", "--concurrency", "16"]


@pytest.mark.full
def test_a_batch_whose_engine_is_killed_has_the_rows_of_an_undisturbed_one(
    quick_rollout: Rollout, batch_command: list[str], tmp_path: Path
):
    quick_rollout.succeeds(*greedy(batch_command, tmp_path / "calm"))
    run = quick_rollout.start(*greedy(batch_command, tmp_path / "disturbed"))
    kills, killed, rng = 5, 0, random.Random(5)
    reach(run, "rolling out", 0.2)
    while killed < kills and run.process.poll() is None:
        wait_for(lambda: find(run, ENGINE) or run.process.poll() is not None, 60.0)
        threading.Event().wait(1.2 + 0.4 * rng.random())  # torch takes the first second of an engine's life
        killed += bool(kill_part(run, ENGINE))
    assert 0 == run.process.wait(240)
    assert [] == run.left_over(GRACE_S)
    assert kills == killed, "the batch was over before its engine was killed as often as it should be"
    calm, disturbed = (
        scan_samples(tmp_path / name, batch="mine").collect().to_arrow() for name in ("calm", "disturbed")
    )
    assert [] == same_rows(calm, disturbed)
    assert 0 < max(disturbed.column("attempt").to_pylist()), "no rollout was under way when the engine died"
    run.end(signal.SIGKILL)


FLOW = """
import asyncio, sys
from flows.batch import rollout_batch
asyncio.run(rollout_batch(prompts=sys.argv[1], lake=sys.argv[2], agent="command", agent_command=sys.argv[3]))
"""
AGENT = """
import json, os, subprocess, sys, urllib.request
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # grandchild"], start_new_session=True)
body = json.dumps({"model": "m", "messages": json.load(sys.stdin)["messages"]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, headers))
    except OSError:
        pass
"""
"""Keeps the engine generating for as long as it lives, and has a child where no group signal finds it."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_g22_a_flow_run_that_is_cancelled_in_mid_generation_leaves_nothing(
    quick_rollout: Rollout, tmp_path: Path, number: int
):
    """Prefect's cancel signals the flow's own process, as a runner does; nobody else ends its children."""
    for name, text in (("flow.py", FLOW), ("agent.py", AGENT)):
        (tmp_path / name).write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "What is 2 + 2?"}]}\n')
    command = f"{sys.executable} {tmp_path / 'agent.py'}"
    quick_rollout.environment = {**quick_rollout.environment, "ROLLOUT_ALLOWED_COMMANDS": sys.executable}
    arguments = (tmp_path / "flow.py", tmp_path / "prompts.jsonl", tmp_path / "lake", command)
    run = quick_rollout.start(*arguments, program=sys.executable)
    try:
        wait_for(lambda: find(run, "# grandchild") or run.process.poll() is not None, 120.0)
        time.sleep(1.0)
        assert 1 == len(find(run, ENGINE)) and find(run, "rollout.session.server") and find(run, "agent.py")
    finally:
        run.end(number)
    assert [] == run.left_over(GRACE_S)


@pytest.mark.full
def test_an_engine_that_cannot_come_back_stops_the_batch_with_a_reason(
    quick_rollout: Rollout, batch_command: list[str], tmp_path: Path
):
    """It is killed the moment it is there, more often than it is started again; the batch stays to be gone on with."""
    run = quick_rollout.start(*batch_command, "--lake", tmp_path / "lake", "--max-attempts", "1")
    lines = reach(run, "rolling out", 0.0)
    while run.process.poll() is None:
        kill_part(run, ENGINE)
        threading.Event().wait(0.05)
    assert 1 == run.end(0)
    assert "the embedded engine was lost 7 times in a row" in "".join(lines)
    assert [] == run.left_over(GRACE_S)
