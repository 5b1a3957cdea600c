"""kill -9 of the session server of a whole `rollout run`, again and again: the batch is published, and is whole."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from command import Rollout, reach

from rollout.lake import scan_parity, scan_samples

KILLS = 3

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def session_servers(lines: list[str]) -> list[int]:
    return [int(line.split(" ", 1)[0]) for line in lines if "rollout.session.server" in line]


def test_a_batch_whose_session_server_is_killed_is_published_whole(
    rollout: Rollout, finished, batch_command: list[str], tmp_path: Path
):
    run = rollout.start(*batch_command, "--lake", tmp_path / "lake", "--concurrency", 2, "--rollout-timeout-s", 120)
    lines = reach(run, "rolling out", 0.3)
    killed: set[int] = set()
    while len(killed) < KILLS and run.process.poll() is None:
        for pid in session_servers(run.processes()):
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(1.5)  # until the next one serves, and some turns more
    assert 0 == run.process.wait(300), lines
    run.end(0)
    assert [] == run.left_over()
    assert 2 <= len(killed), "the batch was over too early to tell"
    wanted, found = (scan_samples(lake, batch="mine").collect() for lake in (finished[0], tmp_path / "lake"))
    assert sorted(set(wanted["index"])) == sorted(set(found["index"])), "a rollout was lost"
    assert all(failure is None for failure in found["failure"])
    keys = Counter(zip(found["rollout_key"], found["sibling"], strict=True))
    assert {1} == set(keys.values()), "a rollout stands there twice"
    verdicts = scan_parity(tmp_path / "lake", batch="mine").collect()["verdict"]
    assert set(verdicts) <= {"equal", "equal_by_path"}
    assert len(set(found["index"])) == len(verdicts)
