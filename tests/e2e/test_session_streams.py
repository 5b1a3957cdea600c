"""Streams of a real server whose engine is slow or fails, read by the real SDKs and byte by byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from faulty_engine import wait_until
from scripted import user
from sdk_clients import ask_chat, ask_message, chat_client, messages_client
from session_stage import TITO, Stage, failing, staged

KEEPALIVE_S = 0.1
COMMENT = b": generating\n\n"
PATHS = {"v1/chat/completions": b"data: [DONE]\n\n", "v1/messages": b'data: {"type":"message_stop"}\n\n'}


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async for made in staged(tmp_path, "driver-secret", "--keepalive-s", str(KEEPALIVE_S)):
        yield made


async def test_a_stream_has_its_first_byte_long_before_its_answer(stage: Stage) -> None:
    session, key = await stage.open()
    for path, ending in PATHS.items():
        go = asyncio.Event()

        async def wait(request: dict[str, Any], go: asyncio.Event = go) -> None:
            await go.wait()

        stage.engine.answer = wait
        body = {"model": "m", "max_tokens": 9, "messages": [user("hi")], "stream": True}
        asked = time.monotonic()
        async with stage.http.post(f"{stage.url}{session}/{path}", json=body, headers={"x-api-key": key}) as reply:
            assert COMMENT == await reply.content.readexactly(len(COMMENT))
            assert 1.0 > time.monotonic() - asked
            assert (200, "text/event-stream", "no-cache", "no") == (
                reply.status,
                *(reply.headers[name] for name in ("Content-Type", "Cache-Control", "X-Accel-Buffering")),
            )
            assert COMMENT == await reply.content.readexactly(len(COMMENT)), "and it goes on"
            assert 0 == await stage.n_turns(session) - list(PATHS).index(path)
            go.set()
            assert (await reply.content.read()).replace(COMMENT, b"").endswith(ending)


async def test_the_sdks_pass_over_comments(stage: Stage) -> None:
    session, key = await stage.open()

    async def slow(request: dict[str, Any]) -> None:
        await asyncio.sleep(4 * KEEPALIVE_S)

    stage.engine.answer = slow
    async with chat_client(stage.url + session, key) as client:
        assert "ok" == (await ask_chat(client, True, messages=[user("hi")])).choices[0].message.content
    async with messages_client(stage.url + session, key) as client:
        assert "ok" == (await ask_message(client, True, messages=[user("hi")])).content[0].text
    assert 2 == await stage.n_turns(session)


async def test_g45_a_generation_that_fails_late_ends_its_stream_as_an_error(stage: Stage) -> None:
    session, key = await stage.open()
    stage.engine.answer = failing(500, 4 * KEEPALIVE_S)
    async with chat_client(stage.url + session, key) as client:
        with pytest.raises(openai.APIError, match="the engine answered 500: boom"):
            await ask_chat(client, True, messages=[user("hi")])
    async with messages_client(stage.url + session, key) as client:
        with pytest.raises(anthropic.APIStatusError, match="the engine answered 500: boom"):
            await ask_message(client, True, messages=[user("hi")])
    for path in PATHS:
        body = {"model": "m", "max_tokens": 9, "messages": [user("hi")], "stream": True}
        async with stage.http.post(f"{stage.url}{session}/{path}", json=body, headers={"x-api-key": key}) as reply:
            content = await reply.content.read()
        assert content.startswith(COMMENT)
        assert b'"error":{' in content and b"[DONE]" not in content and b"message_stop" not in content
    assert 0 == await stage.n_turns(session)
    _, metrics, _ = await stage.ask("GET", "/metrics")
    assert 'rollout_session_refused_total{status="500"} 4' in metrics.decode().splitlines()


async def test_a_session_that_is_deleted_ends_its_streams_as_errors(stage: Stage) -> None:
    session, key = await stage.open()
    stage.engine.answer = failing(500, 30)
    async with chat_client(stage.url + session, key) as client:
        asked = asyncio.create_task(ask_chat(client, True, messages=[user("hi")]))
        await wait_until(lambda: stage.engine.seen)
        await asyncio.sleep(4 * KEEPALIVE_S)
        assert 204 == (await stage.ask("DELETE", session))[0]
        with pytest.raises(openai.APIError, match="session not found"):
            await asyncio.wait_for(asked, 5)
    await wait_until(lambda: stage.engine.aborted)


async def test_g35_who_leaves_a_stream_leaves_nothing_of_its_turn(stage: Stage) -> None:
    for version in ("v1", "v2"):
        await check_leaving(stage, version)


async def check_leaving(stage: Stage, version: str) -> None:
    stage.engine.seen.clear()
    stage.engine.aborted.clear()
    session, key = await stage.open(version=version)
    _, first, _ = await stage.chat(session, user("a"))
    history = [user("a"), first["choices"][0]["message"]]
    stage.engine.answer = failing(500, 30)
    body = {"model": "m", "messages": [*history, user("left")], "stream": True}
    url = f"{stage.url}{session}/v1/chat/completions"
    async with stage.http.post(url, json=body, headers={"x-api-key": key}) as reply:
        for _ in range(2):
            assert COMMENT == await reply.content.readexactly(len(COMMENT))
        left = time.monotonic()
        reply.close()
    stage.engine.answer = None
    assert 200 == (await stage.chat(session, *history, user("b")))[0]
    await wait_until(lambda: stage.engine.aborted)
    assert 1.0 > time.monotonic() - left
    assert [stage.engine.seen[1][0]["rid"]] == stage.engine.aborted
    expected = TITO.render([*history, user("b")], tools=None, thinking=False).ids
    assert expected == stage.engine.seen[2][0]["input_ids"]
    assert 2 == await stage.n_turns(session)


async def test_streams_left_at_any_moment_leave_no_turn_running(stage: Stage) -> None:
    session, key = await stage.open(version="v1")
    _, first, _ = await stage.chat(session, user("a"))
    before = (await stage.ask("GET", session))[1]
    stage.engine.answer = failing(500, 30)
    messages = [user("a"), {"role": "assistant", "content": [{"type": "text", "text": "ok"}]}, user("b")]
    body = {"model": "m", "max_tokens": 9, "messages": messages, "stream": True}

    async def read() -> None:
        url = f"{stage.url}{session}/v1/messages"
        async with stage.http.post(url, json=body, headers={"x-api-key": key}) as reply:
            await reply.content.read()

    for place in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), KEEPALIVE_S / 8 * place)
    reached = {request["rid"] for request, _ in stage.engine.seen[1:]}
    await wait_until(lambda: reached <= set(stage.engine.aborted), 1.0)
    _, listed, _ = await stage.ask("GET", "/sessions")
    assert (0, 1) == (listed["sessions"][0]["running"], listed["sessions"][0]["turns"])
    assert before == (await stage.ask("GET", session))[1]
    stage.engine.answer = None
    history = [user("a"), first["choices"][0]["message"], user("b")]
    assert 200 == (await stage.chat(session, *history))[0]
