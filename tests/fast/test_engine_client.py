"""The engine client against engines that fail in every way, in this process."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from loopback import served

from rollout.engine.client import ROUTING_HEADER, EngineClient
from rollout.errors import EngineError, EngineRefused, EngineUnreachable

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FaultyEngine:
    """Injects a fault: answers /generate as told, and keeps what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.peers: set[Any] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path in ("/workers", "/v1/loads"):
            raise web.HTTPNotFound
        self.seen.append((request.path, orjson.loads(body) if body else {}, dict(request.headers)))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        return web.Response() if request.path == "/abort_request" else await self.answer(request)


@asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[tuple[FaultyEngine, str]]:
    faulty, app = FaultyEngine(answer), web.Application()
    app.router.add_route("*", "/{path:.*}", faulty.handle)
    async with served(app) as url:
        yield faulty, url


def answers(body: bytes, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    return answer


async def _generate(url: str, **kwargs: Any) -> dict[str, Any]:
    client = EngineClient(url, **kwargs)
    try:
        return await client.generate({"input_ids": [1]}, rid="r1", session_id="s1")
    finally:
        await client.close()


async def test_a_request_carries_its_rid_and_its_session() -> None:
    async with engine(answers(b'{"text": ""}')) as (faulty, url):
        client = EngineClient(url + "/")
        assert await client.generate({"input_ids": [1], "rid": "old"}, rid="r1", session_id="s1") == {"text": ""}
        await client.generate({"input_ids": [1]}, rid="r2", session_id=None)
        await client.abort("r2")
        await client.close()
    (path, body, headers), (_, second, second_headers), third = faulty.seen
    assert (path, body) == ("/generate", {"input_ids": [1], "rid": "r1"})
    assert headers[ROUTING_HEADER] == "s1"
    assert second["rid"] == "r2"
    assert ROUTING_HEADER not in second_headers
    assert third[:2] == ("/abort_request", {"rid": "r2"})


async def test_doubles_keep_their_bits() -> None:
    bits = [0x0000000000000001, 0x8000000000000000, 0xBFB999999999999A, 0xC03E000000000001, 0x7FEFFFFFFFFFFFFF]
    values = [struct.unpack("<d", struct.pack("<Q", pattern))[0] for pattern in bits]
    async with engine(answers(orjson.dumps({"values": values}))) as (_, url):
        reply = await _generate(url)
    assert [struct.unpack("<Q", struct.pack("<d", value))[0] for value in reply["values"]] == bits


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_a_4xx_is_the_requests_fault(status: int) -> None:
    async with engine(answers(b'{"message": "no"}', status)) as (_, url):
        with pytest.raises(EngineRefused) as refusal:
            await _generate(url)
    assert refusal.value.status == status
    assert refusal.value.body == b'{"message": "no"}'


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"boom", 500, "answered 500: boom"),
        (b"", 503, "answered 503"),
        (b"{}", 204, "answered 204"),
        (b"{", 200, "answered no JSON"),
        (b'{"a": NaN}', 200, "answered no JSON"),
        (b"", 200, "answered no JSON"),
        (b"[1]", 200, "answered list, not an object"),
    ],
)
async def test_anything_else_is_the_engines_fault(body: bytes, status: int, words: str) -> None:
    async with engine(answers(body, status)) as (_, url):
        with pytest.raises(EngineError, match=words) as failure:
            await _generate(url)
    assert not isinstance(failure.value, EngineRefused)


async def test_a_lost_connection_is_an_engine_error() -> None:
    async def half_an_answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"text":')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with engine(half_an_answer) as (_, url):
        with pytest.raises(EngineError, match="/generate failed") as lost:
            await _generate(url)
    assert not isinstance(lost.value, EngineUnreachable), "it may have begun"
    with pytest.raises(EngineUnreachable, match="/generate failed"):
        await _generate(url)


async def test_a_passed_deadline_aborts_the_generation() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with engine(never) as (faulty, url):
        with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
            await _generate(url, timeout_s=0.2)
        assert faulty.seen[-1][:2] == ("/abort_request", {"rid": "r1"})


async def test_connections_are_reused_and_not_limited() -> None:
    arrived, everyone = 0, asyncio.Event()

    async def together(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == 150:
            everyone.set()
        await everyone.wait()
        return web.Response(body=b"{}")

    async with engine(together) as (faulty, url):
        client = EngineClient(url, timeout_s=20)
        await asyncio.gather(*[client.generate({}, rid=str(n), session_id=None) for n in range(150)])
        assert len(faulty.peers) == 150
        for n in range(20):
            await client.generate({}, rid=f"again{n}", session_id=None)
        assert len(faulty.peers) == 150
        await client.close()
