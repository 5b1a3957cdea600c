"""Requests wait at our side while the engine's queue is long: before an engine whose queue a test holds up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from faulty_engine import wait_until
from loopback import served

from rollout.engine import pressure
from rollout.engine.client import EngineClient
from rollout.engine.pressure import Gate, Load, read_loads
from rollout.errors import EngineError

MAX_RUNNING, BOUND = 4, 2
CLOSED = 1_000_000


class StuckEngine:
    """An engine that injects a fault: it ends no generation until `release` is called for so many.

    Its /v1/loads counts what is there, or says what `loads` says. `others` wait in it for somebody else.
    """

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.aborted: list[str] = []
        self.ended = self.asked = self.others = self.most = 0
        self.loads: Callable[[], Awaitable[web.Response]] = self.count
        self._may_end = asyncio.Semaphore(0)

    @property
    def here(self) -> int:
        return len(self.arrived) - self.ended

    def release(self, number: int) -> None:
        for _ in range(number):
            self._may_end.release()

    async def count(self) -> web.Response:
        everyone = self.here + self.others
        running = min(everyone, MAX_RUNNING)
        load = {
            "num_running_reqs": running,
            "num_waiting_reqs": everyone - running,
            "max_running_requests": MAX_RUNNING,
        }
        return web.json_response({"loads": [load]})

    async def handle(self, http: web.Request) -> web.Response:
        if http.path == "/v1/loads":
            self.asked += 1
            return await self.loads()
        if http.path == "/abort_request":
            self.aborted.append((await http.json())["rid"])
        if http.path != "/generate":
            return web.json_response({"model_path": "stuck"}, status=404 if http.path == "/workers" else 200)
        self.arrived.append(orjson.loads(await http.read())["rid"])
        self.most = max(self.most, self.here)
        try:
            await self._may_end.acquire()
        finally:
            self.ended += 1
        return web.json_response({"text": ""})


@asynccontextmanager
async def stuck(**options: Any) -> AsyncIterator[tuple[StuckEngine, EngineClient]]:
    engine, app = StuckEngine(), web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    given = {"queue_bound": BOUND, **options}
    async with served(app, handler_cancellation=True) as url, EngineClient(url, **given) as client:
        yield engine, client


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "POLL_S", 0.02)


def ask(client: EngineClient, first: int, number: int) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(client.generate({}, rid=f"r{n:03}", session_id=None)) for n in range(first, first + number)
    ]


async def leave(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_small_load_asks_nothing():
    async with stuck(queue_bound=16) as (engine, client):
        tasks = ask(client, 0, 16)
        await wait_until(lambda: 16 == engine.here)
        engine.release(16)
        await asyncio.gather(*tasks)
        assert (0, 0) == (engine.asked, client.held)


async def test_a_burst_waits_here_in_its_order_and_all_of_it_is_answered(quick_polls: None):
    async with stuck() as (engine, client):
        tasks = ask(client, 0, 60)
        await wait_until(lambda: engine.here >= BOUND + MAX_RUNNING)
        await asyncio.sleep(0.2)
        assert 60 == engine.here + client.held
        for _ in range(60):
            engine.release(1)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        # The first look may be answered before the engine has read the first requests.
        assert engine.most <= 2 * BOUND + MAX_RUNNING
        order = [f"r{n:03}" for n in range(60)]
        assert order == sorted(engine.arrived)
        places = [abs(engine.arrived.index(rid) - n) for n, rid in enumerate(order)]
        assert max(places) < engine.most  # several connections at once may overtake each other
        assert 0 == client.held


async def test_others_queue_holds_ours_up_but_for_a_few(quick_polls: None):
    async with stuck() as (engine, client):
        engine.others = 50
        tasks = ask(client, 0, 10)
        await wait_until(lambda: engine.asked > 2)
        assert (BOUND, 10 - BOUND) == (engine.here, client.held)
        engine.others = 0
        await wait_until(lambda: BOUND + MAX_RUNNING == engine.here)
        engine.release(10)
        await asyncio.gather(*tasks)


async def test_whoever_leaves_is_never_sent_and_the_next_one_goes(quick_polls: None):
    async with stuck() as (engine, client):
        engine.others = CLOSED
        first, waiting = ask(client, 0, BOUND), []
        await wait_until(lambda: BOUND == engine.here)
        waiting = ask(client, BOUND, 3)
        await wait_until(lambda: 3 == client.held)
        await leave(waiting[:1])
        assert 2 == client.held
        engine.release(1)
        await wait_until(lambda: len(engine.arrived) == BOUND + 1)
        assert f"r{BOUND + 1:03}" == engine.arrived[-1]
        await leave([*first, *waiting])
        assert 0 == client.held and f"r{BOUND:03}" not in engine.arrived


async def test_the_deadline_counts_while_a_request_waits(quick_polls: None):
    async with stuck(timeout_s=0.5) as (engine, client):
        engine.others = CLOSED
        ended = await asyncio.gather(*ask(client, 0, BOUND + 1), return_exceptions=True)
        assert [True] * (BOUND + 1) == [isinstance(end, EngineError) for end in ended]
        assert "had no room for 0.5 s" in str(ended[-1])
        assert (BOUND, 0) == (len(engine.arrived), client.held)
        assert ["r000", "r001"] == sorted(engine.aborted)


async def test_aborts_and_facts_are_never_held_back(quick_polls: None):
    async with stuck() as (engine, client):
        engine.others = CLOSED
        tasks = ask(client, 0, 5)
        await wait_until(lambda: 5 - BOUND == client.held)
        await client.abort("r000")
        assert (["r000"], "stuck") == (engine.aborted, (await client.model_info())["model_path"])
        await leave(tasks)


@pytest.mark.parametrize("status", [404, 500, 200])
async def test_an_engine_that_does_not_tell_gets_everything(
    quick_polls: None, caplog: pytest.LogCaptureFixture, status: int
):
    async def answer() -> web.Response:
        return web.json_response({}, status=status)

    async with stuck() as (engine, client):
        engine.loads = answer
        tasks = ask(client, 0, 40)
        await wait_until(lambda: 40 == engine.here)
        await wait_until(lambda: status == 404 or engine.asked > 1)
        tasks += ask(client, 40, 20)
        await wait_until(lambda: 60 == engine.here)
        engine.release(60)
        await asyncio.gather(*tasks)
    assert [1 if status == 404 else 0] == [sum("no /v1/loads" in one.getMessage() for one in caplog.records)]
    assert status != 404 or 1 == engine.asked


async def test_nobody_waits_long_to_learn_whether_there_is_room(monkeypatch: pytest.MonkeyPatch):
    async def never() -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    monkeypatch.setattr(pressure, "_ANSWER_S", 0.1)
    async with stuck() as (engine, client):
        engine.loads = never
        tasks = ask(client, 0, 10)
        await wait_until(lambda: 10 == engine.here)
        await leave(tasks)


async def test_the_looks_end_with_the_load(quick_polls: None, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with stuck() as (engine, client):
        tasks = ask(client, 0, 12)
        engine.release(12)
        await asyncio.gather(*tasks)
        polling = client._gate._polling
        assert polling is not None
        await wait_until(polling.done)
        asked = engine.asked
        engine.release(BOUND)
        await asyncio.gather(*ask(client, 12, BOUND))
        assert (asked, True) == (engine.asked, polling.done())


async def test_a_turn_that_comes_as_its_request_leaves_goes_to_the_next():
    async def full() -> list[Load]:
        return [Load(running=1, waiting=9, max_running=1)]

    gate = Gate(full, bound=1)
    await gate.enter(1.0)
    second, third = (asyncio.create_task(gate.enter(60.0)) for _ in range(2))
    await asyncio.sleep(0)
    gate.leave()  # the second's turn, which it has not seen yet
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    async with asyncio.timeout(5):
        await third
    assert second.cancelled() and 0 == gate.held
    await gate.close()


def test_room_is_what_fits_until_so_many_wait():
    def room(**load: Any) -> float:
        (read,) = read_loads({"loads": [load]})
        return read.room(16)

    assert 16 + 2 == room(num_running_reqs=30, num_waiting_reqs=0, max_running_requests=32)
    assert 6 == room(num_running_reqs=32, num_waiting_reqs=10, max_running_requests=32)
    assert 0 == room(num_running_reqs=32, num_waiting_reqs=99, max_running_requests=32)
    assert (
        6
        == room(num_running_reqs=32, num_waiting_reqs=10)
        == room(num_running_reqs=32, num_waiting_reqs=10, max_running_requests=0)
    )
    assert float("inf") == room(num_running_reqs=32, num_waiting_reqs=0)
    most = {"max_running_requests": 2048, "max_total_num_tokens": 100_000}
    assert 16 + 10 == room(num_running_reqs=90, num_waiting_reqs=0, num_used_tokens=90_000, **most)
    assert 16 == room(num_running_reqs=90, num_waiting_reqs=0, num_used_tokens=100_001, **most)
    assert 16 + 2047 == room(num_running_reqs=1, num_waiting_reqs=0, num_used_tokens=10, **most)
    assert [] == read_loads({"loads": [{}, "x", {"num_running_reqs": 1}]}) == read_loads({"loads": 3}) == read_loads({})
