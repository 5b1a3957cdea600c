"""Session servers that die: how often in a row one is started again, and when a row of deaths begins anew."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.background import beside
from rollout.batch import sessions
from rollout.batch.sessions import STEADY_S, SessionKeeper
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import SessionUnreachable
from rollout.session import fleet
from rollout.session.client import SessionClient
from rollout.session.fleet import RESTART_WINDOW_S, Fleet, bind_range
from rollout.session.options import ServerOptions

LIVES = 'import time; print(\'{"ready": true, "port": 9}\', flush=True); time.sleep(600)'
LIVES_ONCE = f"import sys; sys.exit('has lived') if '--port' in sys.argv else None; {LIVES}"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Dying:
    """A server that is killed as often as a test says, and a driver's client that waits for it."""

    def __init__(self, keeper: SessionKeeper, clock: Clock, log: Path) -> None:
        self.keeper, self.clock, self.log = keeper, clock, log
        self.client = SessionClient("http://127.0.0.1:9", patience_s=600)
        self.pids: list[int] = []

    async def start(self) -> None:
        self.pids.append((await self.keeper.start()).process.pid)

    async def die(self, after_s: float) -> None:
        """The server that runs now dies so many seconds after its start; waits for the next one."""
        child = self.child()
        self.clock.now += after_s
        child.process.send_signal(signal.SIGKILL)
        await until(lambda: self.child() is not child)
        self.pids.append(self.child().process.pid)

    async def die_for_good(self, after_s: float) -> str:
        """It dies and stays down; what the waiting client is told."""
        opening = asyncio.create_task(self.client.open({}))
        await asyncio.sleep(0)
        self.clock.now += after_s
        self.child().process.send_signal(signal.SIGKILL)
        with pytest.raises(SessionUnreachable) as caught:
            await asyncio.wait_for(opening, 60)
        return str(caught.value)

    def child(self) -> Any:
        assert self.keeper._child is not None
        return self.keeper._child


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def dying(code: str, tmp_path: Path) -> AsyncIterator[Dying]:
    clock, log = Clock(), tmp_path / "log"
    keeper = SessionKeeper([sys.executable, "-S", "-c", code], log, {}, clock=clock)
    made = Dying(keeper, clock, log)
    await made.start()
    try:
        async with made.client, beside(keeper.watch(made.client)):
            yield made
    finally:
        await keeper.stop()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Dying]:
    async with dying(LIVES, tmp_path) as made:
        yield made


async def test_one_that_dies_too_often_in_a_row_is_given_up_and_the_failure_says_so(
    server: Dying, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "MAX_RESTARTS", 2)
    for _ in range(2):
        await server.die(STEADY_S - 1)
    said = await server.die_for_good(STEADY_S - 1)
    assert f"it died 3 times in a row, the last time with -9; see {server.log}" in said
    assert "gave no answer to GET /health" in said
    assert [logging.ERROR] == [record.levelno for record in caplog.records if "not started again" in record.message]
    began = time.monotonic()
    with pytest.raises(SessionUnreachable, match="it died 3 times in a row"):
        await server.client.samples("s")
    assert time.monotonic() - began < 30, "who asks later waits for nothing"


async def test_one_that_lived_for_long_begins_a_new_row(server: Dying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_RESTARTS", 1)
    await server.die(1.0)
    for _ in range(2):
        await server.die(STEADY_S)
    assert "it died 2 times in a row" in await server.die_for_good(STEADY_S - 1)
    assert 4 == len(set(server.pids))


@pytest.mark.parametrize("fault", ["it ends at once", "no process can be had"])
async def test_one_that_does_not_start_again_is_one_more_in_a_row(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_RESTARTS", 2)
    async with dying(LIVES_ONCE if fault == "it ends at once" else LIVES, tmp_path) as server:
        if fault == "no process can be had":
            server.log.unlink()
            server.log.mkdir()  # nobody can write to it
        assert "it died 3 times in a row" in await server.die_for_good(10 * STEADY_S)


class DyingFleet(Fleet):
    """Its processes end at once, at the times that a test says."""

    def __init__(self, times: Iterator[float], *args: Any) -> None:
        super().__init__(*args, clock=lambda: next(times))
        self.starts = 0

    async def _start(self, slot: int) -> None:
        self.starts += 1
        self._running[slot] = await asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize(
    ("times", "starts"),
    [
        ([0.0, 1.0, 2.0], 3),
        ([0.0, 30.0, RESTART_WINDOW_S], 3),
        ([0.0, 30.0, RESTART_WINDOW_S + 1, RESTART_WINDOW_S + 31, RESTART_WINDOW_S + 32], 5),
        ([100.0 * n for n in range(8)] + [701.0, 702.0], 10),
    ],
)
async def test_a_process_of_a_range_stays_down_after_too_many_deaths_within_a_minute(
    times: list[float], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RESTARTS", 2)
    bound = bind_range("127.0.0.1", 0, 2)
    options = ServerOptions(engine="http://127.0.0.1:9", tokenizer=CHECKPOINT)
    processes = DyingFleet(iter(times), options, bound)
    await processes._start(1)
    async with asyncio.timeout(60):
        await processes._keep(1)
    assert (starts, -1) == (processes.starts, bound[1].fileno())
    assert bound[0].fileno() >= 0, "only its own socket is closed"
    bound[0].close()
