"""A process of a range that is down: what others answer for it, and what the SDKs and our own client make of that."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from loopback import served
from scripted import tiny_tito, user
from sdk_clients import ask_chat, ask_message

from rollout.engine.client import EngineClient
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import SessionRefused, SessionUnreachable
from rollout.session.app import SessionServer
from rollout.session.client import SessionClient
from rollout.session.fleet import bind_range
from rollout.session.options import ServerOptions
from rollout.session.routing import Place, Router

ENGINE = "http://127.0.0.1:9"
DOWN = "01" + "0" * 30
WORDS = "process 1 of this server does not answer"


@dataclass
class Half:
    """A range of two whose second process is down."""

    url: str
    asked: int = 0

    @property
    def base_url(self) -> str:
        return f"{self.url}/sessions/{DOWN}"


@pytest.fixture
async def half() -> AsyncIterator[Half]:
    bound = bind_range("127.0.0.1", 0, 2)
    port = bound[0].getsockname()[1]
    app = SessionServer(
        EngineClient(ENGINE), tiny_tito(), ServerOptions(engine=ENGINE, tokenizer=CHECKPOINT, port=port)
    ).app()
    Router(Place(slot=0, size=2, host="127.0.0.1", first_port=port)).install(app)
    made = Half(f"http://127.0.0.1:{port}")

    @web.middleware
    async def counted(request: web.Request, handler: Any) -> web.StreamResponse:
        made.asked += 1
        return await handler(request)  # type: ignore[no-any-return]

    app.middlewares.insert(0, counted)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, bound[0]).start()
        yield made
    finally:
        await runner.cleanup()
        for one in bound:
            one.close()


async def test_it_is_503_and_a_repeat_is_not_forbidden(half: Half) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [user("a")], "stream": True}
        async with http.post(f"{half.base_url}/v1/chat/completions", json=body) as reply:
            error = (await reply.json())["error"]
            assert (503, False) == (reply.status, "x-should-retry" in reply.headers)
    assert ("server_error", None, True) == (error["type"], error["code"], error["message"].startswith(WORDS))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("retries", [0, 1])
async def test_openais_client_repeats_and_then_says_why(half: Half, stream: bool, retries: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"{half.base_url}/v1", api_key="k", max_retries=retries) as client:
        with pytest.raises(openai.InternalServerError, match=WORDS) as caught:
            await ask_chat(client, stream, messages=[user("a")])
    assert (503, retries + 1) == (caught.value.status_code, half.asked)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("retries", [0, 1])
async def test_anthropics_client_repeats_and_then_says_why(half: Half, stream: bool, retries: int) -> None:
    async with anthropic.AsyncAnthropic(base_url=half.base_url, api_key="k", max_retries=retries) as client:
        with pytest.raises(anthropic.InternalServerError, match=WORDS) as caught:
            await ask_message(client, stream, messages=[user("a")])
    assert (503, retries + 1) == (caught.value.status_code, half.asked)


async def test_the_drivers_client_calls_it_unreachable(half: Half) -> None:
    """A rollout takes another attempt then, as with a server that gives no answer at all."""
    async with SessionClient(half.url) as client:
        for ask in (client.tape, client.samples, client.delete):
            with pytest.raises(SessionUnreachable, match=WORDS):
                await ask(DOWN)
        assert 3 == half.asked, "without patience it asks once"
        with pytest.raises(SessionRefused, match="session not found"):
            await client.tape("00" + "0" * 30)


@pytest.mark.parametrize(("status", "header"), [(503, "false"), (500, None), (429, None), (502, None)])
async def test_no_other_answer_is_waited_out(status: int, header: str | None) -> None:
    async def refuses(request: web.Request) -> web.Response:
        asked.append(request.path)
        headers = {} if header is None else {"x-should-retry": header}
        return web.json_response({"error": {"message": "so it is", "code": "c"}}, status=status, headers=headers)

    asked: list[str] = []
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuses)
    async with served(app) as url, SessionClient(url, patience_s=600) as client:
        with pytest.raises(SessionRefused, match="so it is") as caught:
            await client.tape("s")
    assert (status, "c", 1) == (caught.value.status, caught.value.code, len(asked))


async def test_the_drivers_client_is_patient_while_it_is_started_again() -> None:
    async def comes_back(request: web.Request) -> web.Response:
        asked.append(time.monotonic())
        if len(asked) < 3:
            return web.json_response({"error": {"message": WORDS}}, status=503)
        return web.Response(status=204)

    asked: list[float] = []
    app = web.Application()
    app.router.add_delete("/sessions/{session_id}", comes_back)
    async with served(app) as url, SessionClient(url, patience_s=600) as client:
        await client.delete(DOWN)
    assert 3 == len(asked) and asked[2] - asked[0] >= 0.3, "with pauses"
