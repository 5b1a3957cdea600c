"""An engine that crashes, hangs, will not end or forks, played by a child that injects just that."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faulty_server
import pytest

from rollout.engine.keeping import EngineKeeper
from rollout.engine.launch import MARK, ready, start_marked
from rollout.engine.outages import Outages
from rollout.engine.ports import HeldPort
from rollout.engine.watch import HangWatch, Limits
from rollout.process import ChildFailed, children, started_at

QUICK = Limits(probe_s=0.05, hang_s=0.6, backoff_s=0.02, max_restarts=2)


def marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if started_at(pid) is not None]


class Faulty:
    """Starts the faulty server on one port, as a keeper wants it started."""

    def __init__(self, home: Path, fault: str) -> None:
        self.home, self.fault, self.port = home, fault, HeldPort()
        self.log = home / "log"

    async def start(self, deadline_s: float = 20.0):
        argv = [sys.executable, faulty_server.__file__, "--port", str(self.port.port)]
        argv += ["--fault", self.fault, "--home", str(self.home)]
        child = start_marked(argv, log=self.log, environment={}, facts={"port": self.port.port})
        try:
            await ready(child, deadline_s=deadline_s)
        except BaseException:
            child.stop(grace_s=0.0)
            raise
        child.parts = {k: v for k, v in children(child.process.pid).items() if v.startswith("sglang::")}
        return child

    @property
    def starts(self) -> int:
        path = self.home / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def faulty(tmp_path):
    made = []

    def make(fault: str) -> Faulty:
        made.append(Faulty(tmp_path, fault))
        return made[-1]

    yield make
    for one in made:
        one.port.close()


async def until(condition, timeout_s=20.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def test_one_that_crashes_at_its_start_is_not_waited_for_and_its_last_words_are_told(faulty):
    began = time.monotonic()
    with pytest.raises(ChildFailed, match=r"ended with 1.*cannot start, as it was told"):
        await faulty("crash").start(deadline_s=60.0)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("fault", ["stubborn", "forks"])
async def test_nothing_of_it_is_left_whatever_it_does(faulty, fault):
    child = await faulty(fault).start()
    assert len(marked(child.mark)) == (2 if fault == "forks" else 1)
    await asyncio.to_thread(child.stop, 0.2)
    assert [] == marked(child.mark)
    assert not child.alive() and child.watcher.poll() is not None


async def test_a_dead_part_is_found_although_its_main_process_lives(faulty):
    child = await faulty("part").start()
    assert child.lost() is None
    (part,) = child.parts
    os.kill(part, signal.SIGKILL)
    await until(lambda: child.lost() is not None, 5.0)
    assert "its sglang::scheduler" in child.lost() and child.alive()
    await asyncio.to_thread(child.stop)


async def test_a_killed_one_is_noticed_and_comes_back_on_its_port(faulty):
    engine, changes = faulty("none"), []
    keeper = EngineKeeper("it", engine.start, limits=QUICK, changed=lambda: changes.append((keeper.up, keeper.losses)))
    first = await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    os.kill(first.process.pid, signal.SIGKILL)
    assert await until(lambda: keeper.losses == 1) < 5.0
    await until(lambda: keeper.up)
    assert [(True, 0), (False, 1), (True, 1)] == changes
    assert first.url == keeper.child.url and first.process.pid != keeper.child.process.pid
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await keeper.stop()
    assert [] == marked(first.mark) and [] == marked(keeper.child.mark)


async def test_one_that_dies_again_and_again_is_given_up(faulty):
    engine = faulty("none")
    keeper = EngineKeeper("it", engine.start, limits=QUICK)
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    for death in range(3):
        await until(lambda: keeper.up)
        os.kill(keeper.child.process.pid, signal.SIGKILL)
        await until(lambda death=death: keeper.losses == death + 1)
    await asyncio.wait_for(keeping, 20)
    assert "it was lost 3 times in a row, the last time: it ended with -9" == keeper.failure
    assert 3 == engine.starts and not keeper.up
    await keeper.stop()


async def test_a_hang_with_a_green_health_is_found_and_ended(faulty, tmp_path):
    engine = faulty("hang")
    keeper = EngineKeeper("it", engine.start, limits=QUICK)
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(3 * QUICK.hang_s)
    assert (0, 1) == (keeper.losses, engine.starts), "one that has nothing to do does not hang"
    (tmp_path / "hang").touch()
    await until(lambda: keeper.losses == 1)
    (tmp_path / "hang").unlink()
    await until(lambda: keeper.up)
    assert 2 == engine.starts
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await keeper.stop()


async def test_a_long_queue_is_no_hang(faulty):
    engine = faulty("queue")
    argv = [sys.executable, faulty_server.__file__, "--port", str(engine.port.port)]
    argv += ["--fault", "queue", "--home", str(engine.home)]
    child = start_marked(argv, log=engine.log, environment={}, facts={"port": engine.port.port})
    await until(lambda: engine.starts == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(HangWatch(child.url, QUICK).until_hung(), 5 * QUICK.hang_s)
    await asyncio.to_thread(child.stop)


PARENT = """
import asyncio, sys, time
from pathlib import Path
from rollout.engine.launch import start_marked
argv = [sys.executable, sys.argv[1], "--port", "0", "--fault", "forks", "--home", sys.argv[2]]
child = start_marked(argv, log=Path(sys.argv[2]) / "log", environment={}, facts={"port": 0})
print(child.mark, flush=True)
time.sleep(600)
"""


async def test_a_killed_parent_leaves_none_of_its_processes(faulty, tmp_path):
    argv = [sys.executable, "-c", PARENT, faulty_server.__file__, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        mark = parent.stdout.readline().strip()
        await until(lambda: len(marked(mark)) == 2)
        os.kill(parent.pid, signal.SIGKILL)
    assert await until(lambda: marked(mark) == [], 10.0) < 10.0


async def test_a_loss_is_told_once_and_waited_for():
    outages = Outages(notice_s=0.1)
    assert not await outages.since(0)
    asyncio.get_running_loop().call_later(0.05, outages.lost)
    assert await outages.since(0)
    asyncio.get_running_loop().call_later(0.1, setattr, outages, "up", True)
    assert 0.05 < await outages.wait_up(10.0) < 5.0
    outages.gave_up("it is broken")
    assert await outages.wait_up(10.0) < 1.0
