"""One supervisor per host and its users, with a faulty server in SGLang's place."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import faulty_server
import pytest

from rollout.background import beside
from rollout.engine.job import EngineJob
from rollout.engine.server import EngineLease, use_engines
from rollout.engine.supervision import EngineStatus, Status, SupervisionFolder
from rollout.engine.watch import Limits
from rollout.errors import EngineInUse
from rollout.process import ChildFailed, started_at

MARK = "ROLLOUT_TEST_SUPERVISION"


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """Everything that this test starts carries it; nothing of it is left at the end."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield str(tmp_path)
    end = time.monotonic() + 10.0
    while (left := marked(str(tmp_path))) and time.monotonic() < end:
        time.sleep(0.05)
    assert [] == left


def marked(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes().decode()}")
        except OSError:
            continue
    return [one for one in found if started_at(int(one.split()[0])) is not None]


def make_job(folder: Path, fault: str = "none", *, flags: tuple[str, ...] = ("--a",), engines: int = 1) -> EngineJob:
    """A job whose interpreter is a script that runs the faulty server with the port that SGLang would get."""
    script = folder / f"python-{fault}"
    script.write_text(
        f'#!/bin/sh\nshift 2\nexec {sys.executable} {faulty_server.__file__} --fault {fault} --home {folder} "$@"\n'
    )
    script.chmod(0o755)
    return EngineJob(
        recipe="faulty",
        flags=flags,
        environment={},
        model=str(folder),
        python=str(script),
        gpus=((),) * engines,
        deadline_s=30.0,
        limits=Limits(probe_s=0.1, backoff_s=0.02, max_restarts=2),
    )


def status(home: Path):
    return SupervisionFolder(home).read()


async def until(condition, timeout_s=20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def answers(url: str) -> bool:
    async with aiohttp.ClientSession() as http:
        try:
            async with http.get(f"{url}/health_generate") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False


async def test_users_share_engines_and_the_last_one_ends_them(mark, tmp_path):
    job = make_job(tmp_path, engines=2)
    async with use_engines(job, home=tmp_path) as (urls, outages):
        assert 2 == len(set(urls)) and all([await answers(url) for url in urls])
        first = status(tmp_path)
        async with use_engines(job, home=tmp_path) as (others, _):
            assert urls == others
        assert all([await answers(url) for url in urls]), "the first user is still there"
        assert first.pid == status(tmp_path).pid and (0, True) == (outages.count, outages.up)
        assert (job.flags_hash, str(tmp_path)) == (first.flags_hash, first.model)
    assert not any([await answers(url) for url in urls]) and status(tmp_path) is None


async def test_other_flags_are_refused_while_the_engines_are_used_and_not_afterwards(mark, tmp_path):
    job, other = make_job(tmp_path), make_job(tmp_path, flags=("--b",))
    async with use_engines(job, home=tmp_path) as (urls, _):
        with pytest.raises(EngineInUse) as refused:
            async with use_engines(other, home=tmp_path):
                pass
        assert job.flags_hash in str(refused.value) and other.flags_hash in str(refused.value)
        assert await answers(urls[0])
    async with use_engines(other, home=tmp_path) as (urls, _):
        assert other.flags_hash == status(tmp_path).flags_hash


async def test_an_engine_that_does_not_start_says_why(mark, tmp_path):
    with pytest.raises(ChildFailed, match="cannot start, as it was told"):
        async with use_engines(make_job(tmp_path, "crash"), home=tmp_path):
            pass
    async with use_engines(make_job(tmp_path), home=tmp_path) as (urls, _):  # and stands in nobody's way
        assert await answers(urls[0])


async def test_a_killed_engine_comes_back_and_its_users_are_told(mark, tmp_path):
    async with use_engines(make_job(tmp_path), home=tmp_path) as (urls, outages):
        os.kill(status(tmp_path).engines[0].pid, signal.SIGKILL)
        assert await outages.since(0)
        await outages.wait_up(20.0)
        assert outages.up and await answers(urls[0])


async def test_a_killed_supervisor_takes_its_engines_along_and_comes_back_on_their_ports(mark, tmp_path):
    async with use_engines(make_job(tmp_path), home=tmp_path) as (urls, outages):
        before = status(tmp_path)
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: started_at(before.engines[0].pid) is None, 5.0)
        await until(lambda: outages.count)
        await outages.wait_up(20.0)
        after = status(tmp_path)
        assert before.pid != after.pid and before.engines[0].port == after.engines[0].port
        assert outages.up and await answers(urls[0])


async def test_engines_that_die_too_often_are_given_up_with_a_reason(mark, tmp_path):
    async with use_engines(make_job(tmp_path), home=tmp_path) as (_, outages):
        for death in range(3):
            await until(lambda death=death: (one := status(tmp_path)).losses == death and one.up)
            os.kill(status(tmp_path).engines[0].pid, signal.SIGKILL)
        await until(lambda: outages.failure is not None)
        assert "engine 0 was lost 3 times in a row" in outages.failure


async def test_a_failure_that_comes_after_its_last_loss_was_seen_is_still_told(tmp_path):
    """The supervisor writes a loss, and a moment later that it gives up: a user may look in between."""
    folder, job = SupervisionFolder(tmp_path), make_job(tmp_path)
    own = Status(
        pid=os.getpid(),
        started=started_at(os.getpid()),
        key=job.key,
        model=job.model,
        recipe=job.recipe,
        flags=[],
        flags_hash=job.flags_hash,
        state="ready",
        engines=[EngineStatus(port=1, losses=3)],
    )
    folder.write(own)
    lease = EngineLease(folder, job, None)
    async with beside(lease.watch()):
        await until(lambda: not lease.outages.up)
        folder.write(replace(own, state="failed", message="lost 3 times"))
        await until(lambda: lease.outages.failure is not None)
    assert lease.outages.failure.startswith("lost 3 times")


USER = """
import asyncio, sys
from pathlib import Path
from rollout.background import beside
from rollout.engine.job import EngineJob
from rollout.engine.server import use_engines
async def main():
    async with use_engines(EngineJob.from_json(sys.argv[1]), home=Path(sys.argv[2])):
        print("in", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["KILL", "TERM", "INT"])
async def test_a_user_that_is_killed_leaves_nothing(mark, tmp_path, number):
    argv = [sys.executable, "-c", USER, make_job(tmp_path, "forks").to_json(), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as user:
        assert user.stdout is not None
        assert "in\n" == await asyncio.to_thread(user.stdout.readline)
        assert 3 < len(marked(mark))
        user.send_signal(number)
        await asyncio.to_thread(user.wait)
    await until(lambda: marked(mark) == [], 10.0)
