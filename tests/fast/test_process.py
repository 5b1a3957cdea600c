"""Children end with their parent and say when they are ready."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rollout.process import ChildFailed, start

SERVER = "from rollout.process import say_ready\nsay_ready(port=1)\nimport time\ntime.sleep(60)"
PARENT = f"""
import asyncio, pathlib, sys
from rollout.process import start
child = asyncio.run(start([sys.executable, "-c", {SERVER!r}], log=pathlib.Path(sys.argv[1])))
print(child.process.pid, flush=True)
import time
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_child_that_is_ready_is_stopped_with_its_group(tmp_path):
    child = await start([sys.executable, "-c", SERVER], log=tmp_path / "log")
    assert child.alive() and child.url == "http://127.0.0.1:1"
    child.stop()
    assert not child.alive()


async def test_a_child_that_ends_early_quotes_its_log(tmp_path):
    with pytest.raises(ChildFailed, match="ZeroDivisionError"):
        await start([sys.executable, "-c", "1/0"], log=tmp_path / "log")


async def test_a_silent_child_is_ended_at_the_deadline(tmp_path):
    with pytest.raises(ChildFailed, match="its log is empty"):
        await start([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log", deadline_s=0.5)


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 5
    while not gone(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert gone(child)


async def test_a_start_that_is_cancelled_leaves_no_child(tmp_path):
    note = tmp_path / "pid"
    silent = f"import os, time; open({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    starting = asyncio.create_task(start([sys.executable, "-c", silent], log=tmp_path / "log"))
    async with asyncio.timeout(30):
        while not note.exists() or not note.read_text().endswith("\n"):
            await asyncio.sleep(0.01)
    assert not gone(int(note.read_text()))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert gone(int(note.read_text()))
