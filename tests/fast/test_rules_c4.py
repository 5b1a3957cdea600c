"""Rules C4 to C6 of the reference's session server: a request's phases, its answer, and the end of a session."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from app_stage import app_stage
from faulty_engine import wait_until
from scripted import TOOLS, Conversation, call, tiny_tito, user
from session_stage import Stage, failing

from rollout.session.node import tokens_of
from rollout.session.views import records_view

TITO = tiny_tito()
VERSIONS = ("v1", "v2")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with app_stage() as made:
        yield made


def message_of(reply: Any) -> dict[str, Any]:
    return reply["choices"][0]["message"]


async def held(stage: Stage, session: str, *messages: Any, **body: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """A request that is with the engine until the event is set."""
    go, n_seen = asyncio.Event(), len(stage.engine.seen)

    async def wait(request: dict[str, Any]) -> None:
        await go.wait()

    stage.engine.answer = wait
    asked = asyncio.create_task(stage.chat(session, *messages, **body))
    await wait_until(lambda: len(stage.engine.seen) > n_seen)
    stage.engine.answer = None
    return asked, go


@pytest.mark.parametrize("version", VERSIONS)
async def test_c4_1_a_session_is_free_while_its_engine_generates(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version)
    asked, go = await held(stage, session, user("slow"))
    assert 200 == (await stage.chat(session, user("quick")))[0]
    assert 1 == len((await stage.ask("GET", session))[1]["records"])
    go.set()
    assert 200 == (await asked)[0]


@pytest.mark.parametrize("version", VERSIONS)
async def test_c4_2_an_engines_refusal_changes_nothing(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version)
    _, first, _ = await stage.chat(session, user("a"))
    await stage.chat(session, user("a"), message_of(first), user("b"))
    before = (await stage.ask("GET", session))[1]
    stage.engine.answer = failing(500)
    assert 500 == (await stage.chat(session, user("a"), message_of(first), user("other")))[0]
    assert before == (await stage.ask("GET", session))[1]


@pytest.mark.parametrize(
    "change",
    [
        {"output_token_logprobs": None},
        {"completion_tokens": 1},
        {"output_token_logprobs": [[-0.5, 1, None]]},
        {"output_token_logprobs": [[None, 5, None], [-0.5, 6, None]]},
        {"output_token_logprobs": [[-0.5, -1, None], [-0.5, 6, None]]},
        {"output_token_logprobs": [[-0.5, TITO.vocabulary, None], [-0.5, 6, None]]},
    ],
)
async def test_c4_3_what_is_no_generation_is_502_and_not_recorded(stage: Stage, change: dict[str, Any]) -> None:
    async def answer(request: dict[str, Any]) -> web.Response:
        return web.json_response(stage.engine.reply(request, **change))

    session, _ = await stage.open()
    stage.engine.answer = answer
    status, body, headers = await stage.chat(session, user("hi"))
    assert (502, "server_error", "false") == (status, body["error"]["type"], headers["x-should-retry"])
    assert [] == (await stage.ask("GET", session))[1]["records"]


def test_c4_3_an_empty_text_is_a_fine_answer() -> None:
    talk = Conversation(TITO, "v1")
    talk.ask(user("a"), text="")
    assert ("", 1) == (talk.history[-1]["content"], len(talk.session.nodes))


@pytest.mark.parametrize("version", VERSIONS)
def test_c4_4_a_prompt_begins_with_every_id_before_it(version: str) -> None:
    """By construction: the check that the reference makes at commit has nothing to find."""
    talk = Conversation(TITO, version)
    for number in range(4):
        talk.ask(user(str(number)), text=[5, 6, 7 + number])
    before: list[int] = []
    for node, record in zip(talk.session.nodes, records_view(talk.session.active_path()), strict=True):
        prompt = record["request"]["input_ids"]
        assert before == prompt[: len(before)]
        before = [*prompt, *node.generation.output_ids_O.tolist()]


def test_c4_5_a_v1_turn_that_was_overtaken_is_answered_and_not_recorded() -> None:
    talk = Conversation(TITO, "v1")
    talk.ask(user("a"))
    first, second = talk.begin([*talk.history, user("x")]), talk.begin([*talk.history, user("y")])
    assert "won" == talk.commit(second, "won")["content"]
    before = talk.session.metadata()
    assert "lost" == talk.commit(first, "lost")["content"]
    assert (True, False, 2) == (second.recorded, first.recorded, len(talk.session.nodes))
    assert before == talk.session.metadata()


@pytest.mark.parametrize("version", VERSIONS)
def test_c4_6_stored_spellings_are_kept_for_what_comes_after(version: str) -> None:
    """The client's own words of an older message are told, and never rendered."""
    talk = Conversation(TITO, version)
    talk.ask(user("go"), text=call("x"), tools=TOOLS)
    stored = talk.history[1]
    replayed = json.loads(json.dumps(stored))
    replayed["tool_calls"][0]["function"]["arguments"] = '{"key":"x"}'
    talk.history[1] = replayed
    talk.ask(user("b"), tools=TOOLS)
    first, second = talk.session.nodes
    assert (stored, first, 4) == (first.reply, second.parent, second.n_messages)
    assert tokens_of([first]).tolist() == tokens_of([first, second])[: first.n_tokens].tolist()
    straight = Conversation(TITO, version)
    straight.ask(user("go"), text=call("x"), tools=TOOLS)
    straight.ask(user("b"), tools=TOOLS)
    assert tokens_of([first, second]).tobytes() == tokens_of(straight.session.nodes).tobytes()


def test_c4_7_two_v2_generations_from_one_parent_are_two_children() -> None:
    talk = Conversation(TITO, "v2")
    talk.ask(user("a"))
    first, second = talk.begin([*talk.history, user("x")]), talk.begin([*talk.history, user("y")])
    talk.commit(second, "y")
    assert [0, 1] == [node.seq for node in talk.session.active_path()]
    talk.commit(first, "x")
    assert [(0, None), (1, 0), (2, 0)] == [(n["id"], n["parent"]) for n in talk.session.metadata()["tree"]["nodes"]]
    assert [0, 2] == [node.seq for node in talk.session.active_path()]


@pytest.mark.parametrize("version", VERSIONS)
async def test_c4_9_a_record_has_the_whole_exchange(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version)
    asked, go = await held(stage, session, user("hi"), temperature=0.5, tools=TOOLS, wibble=1)
    go.set()
    _, answered, _ = await asked
    (record,) = (await stage.ask("GET", session))[1]["records"]
    keys = {"timestamp", "request_timestamp", "method", "path", "request", "response", "status_code"}
    assert keys == record.keys()
    assert record["request_timestamp"] < record["timestamp"]
    assert ("POST", "/v1/chat/completions", 200) == (record["method"], record["path"], record["status_code"])
    request = record["request"]
    assert ([user("hi")], TOOLS, 0.5) == (request["messages"], request["tools"], request["temperature"])
    assert stage.engine.seen[0][0]["input_ids"] == request["input_ids"]
    assert answered == record["response"]


async def test_c4_9_an_anthropic_turn_is_recorded_as_the_chat_request_that_it_means(stage: Stage) -> None:
    session, _ = await stage.open()
    body = {"model": "m", "max_tokens": 9, "system": "terse", "messages": [user("hi")]}
    assert 200 == (await stage.ask("POST", f"{session}/v1/messages", body))[0]
    (record,) = (await stage.ask("GET", session))[1]["records"]
    assert "/v1/chat/completions" == record["path"]
    assert [{"role": "system", "content": "terse"}, user("hi")] == record["request"]["messages"]
    assert stage.engine.seen[0][0]["input_ids"] == record["request"]["input_ids"]
    assert "chat.completion" == record["response"]["object"]


async def test_c5_an_answer_has_one_server_and_one_date_and_none_of_the_engines_headers(stage: Stage) -> None:
    async def answer(request: dict[str, Any]) -> web.Response:
        return web.json_response(stage.engine.reply(request), headers={"X-Engine": "1", "Server": "engine"})

    session, _ = await stage.open()
    stage.engine.answer = answer
    for stream in (False, True):
        body = {"model": "m", "messages": [user("hi")], "stream": stream}
        async with stage.http.post(f"{stage.url}{session}/v1/chat/completions", json=body) as reply:
            await reply.read()
            names = [name.lower() for name, _ in reply.raw_headers]
            assert (1, 1) == (names.count(b"server"), names.count(b"date"))
            assert b"x-engine" not in names and "engine" != reply.headers["Server"]


async def test_c5_the_client_gets_meta_info_without_replay_tensors_and_the_record_keeps_them(stage: Stage) -> None:
    session, _ = await stage.open()
    _, probe, _ = await stage.chat(session, user("hi"))
    n_rows = probe["usage"]["total_tokens"] - 1
    experts = np.zeros((n_rows, 1, 1), "<i4").tobytes()

    async def answer(request: dict[str, Any]) -> web.Response:
        return web.json_response(stage.engine.reply(request, routed_experts=base64.b64encode(experts).decode()))

    stage.engine.answer = answer
    status, reply, _ = await stage.chat(session, user("hi"))
    assert 200 == status, reply
    meta = reply["choices"][0]["meta_info"]
    assert "routed_experts" not in meta and 2 == len(meta["output_token_logprobs"])
    record = (await stage.ask("GET", session))[1]["records"][-1]
    assert record["response"]["choices"][0]["meta_info"]["routed_experts"]


async def test_c5_a_stream_is_one_chunk_and_done_without_meta_info(stage: Stage) -> None:
    session, _ = await stage.open()
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    async with stage.http.post(f"{stage.url}{session}/v1/chat/completions", json=body) as reply:
        content = (await reply.read()).decode()
        assert ("text/event-stream", "no-cache", "no") == tuple(
            reply.headers[name] for name in ("Content-Type", "Cache-Control", "X-Accel-Buffering")
        )
    chunk, done, end = content.split("\n\n")
    assert ("data: [DONE]", "") == (done, end)
    told = json.loads(chunk.removeprefix("data: "))
    assert ("chat.completion.chunk", 1) == (told["object"], len(told["choices"]))
    choice = told["choices"][0]
    assert ({"role": "assistant", "content": "ok"}, "stop", 0) == (
        choice["delta"],
        choice["finish_reason"],
        choice["index"],
    )
    assert "meta_info" not in content and told["usage"]["completion_tokens"] == 2


async def test_c5_an_error_of_a_stream_that_has_not_begun_keeps_status_and_json(stage: Stage) -> None:
    session, _ = await stage.open()
    for change, status in (({"messages": "x"}, 400), ({}, 500)):
        stage.engine.answer = failing(500)
        body = {"model": "m", "messages": [user("hi")], "stream": True, **change}
        async with stage.http.post(f"{stage.url}{session}/v1/chat/completions", json=body) as reply:
            assert (status, "application/json") == (reply.status, reply.content_type)
            assert (await reply.json())["error"]["message"]


async def test_c5_stream_false_is_as_absent(stage: Stage) -> None:
    session, _ = await stage.open()
    for more in ({}, {"stream": False}, {"stream": None}):
        status, reply, _ = await stage.chat(session, user("hi"), **more)
        assert (200, "chat.completion", "ok") == (status, reply["object"], message_of(reply)["content"])


async def test_c6_a_delete_waits_for_no_generation_and_ends_it(stage: Stage) -> None:
    session, _ = await stage.open()
    asked, go = await held(stage, session, user("hi"))
    replies = await asyncio.gather(*(stage.ask("DELETE", session) for _ in range(2)))
    assert [204, 404] == sorted(status for status, _, _ in replies)
    assert 404 == (await asked)[0]
    await wait_until(lambda: stage.engine.aborted)
    go.set()


async def test_c6_after_removal_everything_is_404(stage: Stage) -> None:
    session, _ = await stage.open()
    await stage.chat(session, user("hi"))
    await stage.ask("DELETE", session)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/samples"), ("POST", "/v1/chat/completions")):
        assert 404 == (await stage.ask(method, f"{session}{path}", {} if method == "POST" else None))[0]
