"""A generation is sent again where nothing was begun, and only there: against engines that inject faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import orjson
import pytest
from aiohttp import web
from faulty_engine import FaultyEngine
from loopback import served

from rollout.engine import retrying
from rollout.engine.client import EngineClient
from rollout.engine.retrying import unbegun
from rollout.errors import EngineError, EngineFailed, EngineRefused, EngineUnreachable
from rollout.process import free_port

SGLANG_FULL = {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}


def routers(code: str) -> dict[str, Any]:
    return {"error": {"type": "server_error", "code": code, "message": "no", "param": None}}


UNBEGUN: list[tuple[int, dict[str, Any], str]] = [
    (503, routers("no_available_workers"), "nobody"),
    (500, routers("call_upstream_connection_failed"), "nobody"),
    (429, routers("admission_queue_full"), "full"),
    (503, routers("admission_queue_timeout"), "full"),
    (503, SGLANG_FULL, "full"),
]
BEGUN: list[tuple[int, Any]] = [
    (500, routers("call_upstream_request_error")),
    (504, routers("call_upstream_timeout")),
    (503, {**SGLANG_FULL, "message": "Request waiting timeout reached."}),
    (503, {**SGLANG_FULL, "message": "The request is aborted by a higher priority request."}),
    (500, SGLANG_FULL),
    (503, {}),
    (503, [1]),
    (502, routers("no_available_workers")),
    (429, {}),
    (400, routers("admission_queue_full")),
]


@asynccontextmanager
async def answering(*answers: tuple[int, Any], **options: Any) -> AsyncIterator[tuple[FaultyEngine, EngineClient]]:
    """An engine that gives these faulty answers first, and a client of it."""
    engine, left = FaultyEngine([5, 6]), list(answers)

    async def answer(request: dict[str, Any]) -> web.Response | None:
        if not left:
            return None
        status, body = left.pop(0)
        return web.json_response(body, status=status)

    engine.answer = answer
    async with served(engine.app()) as url, EngineClient(url, **options) as client:
        yield engine, client


async def ask(client: EngineClient) -> dict[str, Any]:
    return await client.generate({"input_ids": [1]}, rid="r1", session_id="s1")


@pytest.mark.parametrize(("status", "body", "why"), UNBEGUN)
async def test_what_began_nothing_is_sent_again_as_it_was(status: int, body: dict[str, Any], why: str) -> None:
    async with answering((status, body), (status, body)) as (engine, client):
        assert "meta_info" in await ask(client)
    assert [({"input_ids": [1], "rid": "r1"}, "s1")] * 3 == [
        (request, headers["X-SMG-Routing-Key"]) for request, headers in engine.seen
    ]
    kind = EngineRefused if status < 500 else EngineFailed
    assert why == unbegun(kind(status, orjson.dumps(body)))


@pytest.mark.parametrize(("status", "body"), BEGUN)
async def test_what_may_have_begun_is_sent_once(status: int, body: Any) -> None:
    async with answering((status, body)) as (engine, client):
        with pytest.raises(EngineRefused if status < 500 else EngineFailed):
            await ask(client)
    assert 1 == len(engine.seen)


async def test_a_lost_connection_is_never_repeated() -> None:
    engine = FaultyEngine([5, 6])

    async def lose(request: dict[str, Any]) -> None:
        assert engine.request is not None and engine.request.transport is not None
        engine.request.transport.abort()
        await asyncio.sleep(30)

    engine.answer = lose
    async with served(engine.app(), handler_cancellation=True) as url, EngineClient(url) as client:
        with pytest.raises(EngineError, match="/generate failed"):
            await ask(client)
    assert 1 == len(engine.seen)


async def test_an_engine_that_comes_back_gets_the_request() -> None:
    engine, port = FaultyEngine([5, 6]), free_port()
    async with EngineClient(f"http://127.0.0.1:{port}", patience_s=60.0) as client:
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0.3)
        assert not asking.done()
        runner = web.AppRunner(engine.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert "meta_info" in await asking
        await runner.cleanup()
    assert 1 == len(engine.seen)


async def test_without_patience_nobody_is_an_error_at_once_and_a_full_queue_is_waited_for() -> None:
    async with EngineClient(f"http://127.0.0.1:{free_port()}", patience_s=0.0) as client:
        with pytest.raises(EngineUnreachable):
            await ask(client)
    async with answering((503, SGLANG_FULL), (503, routers("no_available_workers")), patience_s=0.0) as (
        engine,
        client,
    ):
        with pytest.raises(EngineFailed, match="no_available_workers"):
            await ask(client)
    assert 2 == len(engine.seen)


async def test_all_tries_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_PAUSE_LIMIT_S", 0.1)
    begun = time.monotonic()
    async with answering(*[(503, SGLANG_FULL)] * 1000, timeout_s=1.0) as (engine, client):
        with pytest.raises(EngineFailed, match="The request queue is full"):
            await ask(client)
        assert 0.5 < time.monotonic() - begun < 10
        assert 1 < len(engine.seen) < 25
        engine.answer = _never
        engine.seen.clear()
        with pytest.raises(EngineError, match=r"no answer within 1 s"):
            await ask(client)
    assert ["r1"] == engine.aborted


async def test_the_next_try_gets_what_is_left() -> None:
    lefts: list[float] = []

    async def send(left_s: float) -> None:
        lefts.append(left_s)
        await asyncio.sleep(0.05)
        raise EngineFailed(503, orjson.dumps(SGLANG_FULL))

    with pytest.raises(EngineFailed):
        await retrying.persist(send, timeout_s=1.0, patience_s=0.0)
    assert 1.0 == lefts[0]
    assert all(later < sooner - 0.05 for sooner, later in pairwise(lefts))


async def _never(request: dict[str, Any]) -> None:
    await asyncio.sleep(30)
