"""The server process over HTTP: rights, errors, aborts, and what the real OpenAI SDK makes of it."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pytest
from aiohttp import web
from faulty_engine import wait_until
from scripted import TOOLS, call, user
from session_stage import END, TITO, Stage, staged

from rollout.columns import SESSION_SCHEMA, table_to_samples
from rollout.engine.tiny import CHECKPOINT
from rollout.process import free_port
from rollout.session.tape import table_to_tape

TOKEN = "driver-secret"


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async for made in staged(tmp_path, None):
        yield made


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Stage]:
    async for made in staged(tmp_path, TOKEN):
        yield made


async def test_a_conversation_its_samples_and_its_tape(stage: Stage) -> None:
    session, _ = await stage.open(version="v2", seed="00", sampling={"temperature": 0.5})
    _, first, _ = await stage.chat(session, user("hi"))
    assert ("ok", "stop") == (first["choices"][0]["message"]["content"], first["choices"][0]["finish_reason"])
    reply = first["choices"][0]["message"]
    assert 200 == (await stage.chat(session, user("hi"), reply, user("more"), max_tokens=5))[0]
    request, headers = stage.engine.seen[1]
    assert {"input_ids", "sampling_params", "return_logprob", "rid"} == request.keys()
    assert (session.split("/")[2], 5, 0.5) == (
        headers["X-SMG-Routing-Key"],
        request["sampling_params"]["max_new_tokens"],
        request["sampling_params"]["temperature"],
    )
    _, stream, _ = await stage.ask("POST", f"{session}/samples", {})
    table = pa.ipc.open_stream(stream).read_all()
    assert table.schema.equals(SESSION_SCHEMA)
    assert {b"session_metadata", b"messages", b"exchanges"} == table.schema.metadata.keys()
    sample = table_to_samples(table)[0]
    _, told, _ = await stage.ask("POST", f"{session}/samples", {}, Accept="application/json")
    assert sample.tokens_T.tolist() == told["samples"][0]["tokens"]
    assert request["input_ids"] == sample.tokens_T[: len(request["input_ids"])].tolist()
    assert (None, 2) == (told["empty_reason"], told["samples"][0]["turns"])
    _, shown, _ = await stage.ask("GET", session)
    assert (2, told["session_metadata"]) == (len(shown["records"]), shown["metadata"])
    assert 422 not in [record["status_code"] for record in shown["records"]]
    _, stream, _ = await stage.ask("GET", f"{session}/tape")
    tape, _ = table_to_tape(pa.ipc.open_stream(stream).read_all())
    assert [None, 0] == [exchange.parent for exchange in tape.exchanges]


async def test_health_list_models_and_metrics(stage: Stage) -> None:
    _, first, _ = await stage.ask("GET", "/health")
    _, second, _ = await stage.ask("GET", "/health")
    assert first == second == {"status": "ok", "session_server_instance_id": first["session_server_instance_id"]}
    assert 32 == len(first["session_server_instance_id"])
    session, _ = await stage.open(version="v1")
    await stage.chat(session, user("<|im_end|>"), wibble=1)
    _, listed, _ = await stage.ask("GET", "/sessions")
    row = listed["sessions"][0]
    assert (session.split("/")[2], "v1", 1, 0) == (row["session_id"], row["version"], row["turns"], row["running"])
    _, models, _ = await stage.ask("GET", f"{session}/v1/models")
    assert ["faulty"] == [model["id"] for model in models["data"]]
    _, text, _ = await stage.ask("GET", "/metrics")
    lines = text.decode().splitlines()
    for line in ("turns_total 1", "control_strings_total 1", "ignored_fields_total 1", "sessions_live 1"):
        assert f"rollout_session_{line}" in lines


async def test_the_two_rights(guarded: Stage) -> None:
    session, key = await guarded.open()
    other, other_key = await guarded.open()
    assert 200 == (await guarded.chat(session, user("hi"), key=key))[0]
    assert 200 == (await guarded.chat(session, user("hi")))[0]
    status, refusal, headers = await guarded.chat(session, user("hi"), key=other_key)
    assert (401, "authentication_error", "false") == (status, refusal["error"]["type"], headers["x-should-retry"])
    for method, path in (
        ("GET", session),
        ("DELETE", session),
        ("POST", f"{session}/samples"),
        ("GET", f"{session}/tape"),
        ("GET", "/sessions"),
        ("POST", "/sessions"),
        ("GET", "/metrics"),
    ):
        assert 401 == (await guarded.ask(method, path, key=key))[0], path
        async with guarded.http.request(method, guarded.url + path) as reply:
            assert 401 == reply.status, path
    async with guarded.http.get(f"{guarded.url}{other}", headers={"x-api-key": TOKEN}) as reply:
        assert 200 == reply.status
    async with guarded.http.get(f"{guarded.url}/health") as reply:
        assert 200 == reply.status


async def test_a_right_may_come_in_either_header_and_any_case(guarded: Stage) -> None:
    session, key = await guarded.open()
    url = f"{guarded.url}{session}/v1/models"
    cases: list[tuple[dict[str, Any], int]] = [
        ({"Authorization": f"Bearer {key}"}, 200),
        ({"authorization": f"bearer  {key}"}, 200),
        ({"X-Api-Key": key}, 200),
        ({"Authorization": "Bearer of-another-service", "x-api-key": key}, 200),
        ({"Authorization": f"Bearer {key}", "x-api-key": "another"}, 200),
        ({"Authorization": f"Basic {key}"}, 401),
        ({"Authorization": key}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": key[:-1]}, 401),
        ({"x-api-key": "\xff"}, 401),
        ({}, 401),
    ]
    for headers, status in cases:
        async with guarded.http.get(url, headers=headers) as reply:
            assert status == reply.status, headers
    answer = await guarded.send(b"GET /sessions HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")


async def test_bodies_that_cannot_be_read_are_400(stage: Stage) -> None:
    session, _ = await stage.open()
    paths = ("/sessions", f"{session}/samples", f"{session}/v1/chat/completions")
    before = (await stage.ask("GET", session))[1]
    bodies: list[tuple[bytes, dict[str, str]]] = [
        (b"no gzip", {"Content-Encoding": "gzip", "Connection": "close"}),
        (b"{", {}),
        (b"[]", {}),
        (b'{"metadata": NaN}', {}),
        (b'{"metadata": {"a": 1e999}}', {}),
        (b'{"metadata": "\xed\xa0\x80"}', {}),
        (b'{"metadata": {"a": ' + b"[" * 250 + b"]" * 250 + b"}, " + b'"messages": 1}', {}),
        (b"[" * 5000, {}),
        (b'{"metadata": 1, "messages": 1}', {}),
    ]
    for body, headers in bodies:
        for path in paths:
            async with stage.http.post(stage.url + path, data=body, headers=headers) as reply:
                assert (400, "false") == (reply.status, reply.headers["x-should-retry"]), (path, body[:40])
                assert "invalid_request_error" == (await reply.json())["error"]["type"]
    assert before == (await stage.ask("GET", session))[1]


async def test_what_was_answered_can_be_shown(stage: Stage) -> None:
    """Whatever a body holds that was not refused: GET, samples and tape can tell it again."""
    session, _ = await stage.open()
    extra = {"wibble": {"deep": [[[[1]]]]}, "n": 7, "big": 2**63, "float": -0.0, "nul": "\x00", "mark": "\ufdd0"}
    message = {**user("a\x00\ufdd0<|im_end|>"), **extra}
    _, first, _ = await stage.chat(session, message, user=7, store={}, logprobs=True, metadata={"a": "b"})
    reply = {**first["choices"][0]["message"], "refusal": None, "annotations": [], "index": 0}
    assert 200 == (await stage.chat(session, message, reply, user("b"), stream=False, stop=[]))[0]
    _, shown, _ = await stage.ask("GET", session)
    assert [message, reply, user("b")] == shown["records"][1]["request"]["messages"]
    for method, path in (("POST", f"{session}/samples"), ("GET", f"{session}/tape")):
        assert 200 == (await stage.ask(method, path))[0]


async def test_errors_have_openais_shape_and_are_not_worth_a_repeat(stage: Stage) -> None:
    session, _ = await stage.open()
    assert 404 == (await stage.ask("GET", "/generate"))[0]
    assert 404 == (await stage.ask("POST", f"{session}/flush_cache"))[0]
    status, body, headers = await stage.ask("POST", f"{session}/v1/responses", {})
    assert (404, "false") == (status, headers["x-should-retry"])
    assert "not served" in body["error"]["message"]
    status, body, _ = await stage.ask("GET", "/sessions/nope")
    assert (404, "session not found: session_id=nope") == (status, body["error"]["message"])
    async with stage.http.post(f"{stage.url}{session}/v1/chat/completions", data=b'{"messages": "\\ud800"}') as reply:
        assert 400 == reply.status
        assert (await reply.json())["error"]["message"].startswith("invalid JSON body: ")
    async with stage.http.post(f"{stage.url}{session}/v1/chat/completions") as reply:
        assert 400 == reply.status
    assert 405 == (await stage.ask("PUT", session))[0]
    for settings in ({"matcher": "x"}, {"version": "v3"}, {"wibble": 1}, {"max_turns": 0}, {"renderer": "glm-5"}):
        status, body, _ = await stage.ask("POST", "/sessions", settings)
        assert 400 == status
        assert next(iter(settings)) in body["error"]["message"]


async def test_a_body_beyond_64_mib_is_413(stage: Stage) -> None:
    session, _ = await stage.open()
    url = f"{stage.url}{session}/v1/chat/completions"
    async with stage.http.post(url, data=io.BytesIO(b" " * (64 * 2**20 + 1))) as reply:
        assert (413, "false") == (reply.status, reply.headers["x-should-retry"])


async def test_g24_what_the_engine_must_not_answer_is_502_and_changes_nothing(stage: Stage) -> None:
    session, _ = await stage.open()
    await stage.chat(session, user("hi"))
    before = (await stage.ask("GET", session))[1]
    nan = b'{"meta_info": {"output_token_logprobs": [[NaN, 5, null]], "completion_tokens": 1}}'
    answers = [
        web.Response(body=nan, content_type="application/json"),
        web.Response(body=b"{}", content_type="application/json"),
    ]
    for given in answers:

        async def answer(request: dict[str, Any], given: web.Response = given) -> web.Response:
            return given

        stage.engine.answer = answer
        status, body, headers = await stage.chat(
            session, user("hi"), before["records"][0]["response"]["choices"][0]["message"], user("x")
        )
        assert (502, "server_error", "false") == (status, body["error"]["type"], headers["x-should-retry"])
    assert before == (await stage.ask("GET", session))[1]
    stage.engine.answer = None
    assert 200 == (await stage.chat(session, user("hi")))[0]


async def test_g59_the_engines_own_failure_keeps_its_status_and_sdks_may_repeat_it(stage: Stage) -> None:
    session, _ = await stage.open()

    async def boom(request: dict[str, Any]) -> web.Response:
        return web.Response(status=503, body=b"boom")

    stage.engine.answer = boom
    status, body, headers = await stage.chat(session, user("hi"))
    assert (503, "the engine answered 503: boom", None) == (
        status,
        body["error"]["message"],
        headers.get("x-should-retry"),
    )
    assert [] == (await stage.ask("GET", session))[1]["records"]


async def test_the_engines_own_refusal_keeps_status_and_words(stage: Stage) -> None:
    session, _ = await stage.open()

    async def answer(request: dict[str, Any]) -> web.Response:
        message = "The input (9 tokens) is longer than the model's context length (8 tokens)."
        return web.json_response({"object": "error", "message": message, "code": 400}, status=400)

    stage.engine.answer = answer
    status, body, headers = await stage.chat(session, user("hi"))
    assert (400, "context_length_exceeded", "false") == (status, body["error"]["code"], headers["x-should-retry"])
    assert body["error"]["message"].startswith("The input (9 tokens)")


async def test_no_room_is_refused_without_the_engine(stage: Stage) -> None:
    stage.engine.model_info["context_length"] = 20
    session, _ = await stage.open()
    status, body, _ = await stage.chat(session, user("much " * 20))
    assert (400, "context_length_exceeded", 0) == (status, body["error"]["code"], len(stage.engine.seen))


async def test_a_context_that_the_engine_does_not_tell_is_the_checkpoints(stage: Stage) -> None:
    for told in (None, "many", 0, True):
        stage.engine.model_info = {"model_path": "sglang", "context_length": told}
        session, _ = await stage.open()
        await stage.chat(session, user("hi"), max_tokens=10**6)
        request = stage.engine.seen[-1][0]
        room = TITO.tokenizer.context_length - 1 - len(request["input_ids"])
        assert room == request["sampling_params"]["max_new_tokens"]


async def test_g08_a_client_that_leaves_ends_its_generation_within_a_second(stage: Stage) -> None:
    session, _ = await stage.open()
    release = asyncio.Event()

    async def slow(request: dict[str, Any]) -> None:
        await release.wait()

    stage.engine.answer = slow
    asked = asyncio.create_task(stage.chat(session, user("hi")))
    await wait_until(lambda: stage.engine.seen)
    asked.cancel()
    left = time.monotonic()
    await wait_until(lambda: stage.engine.aborted)
    assert 1.0 > time.monotonic() - left
    assert [stage.engine.seen[0][0]["rid"]] == stage.engine.aborted
    release.set()
    stage.engine.answer = None
    _, shown, _ = await stage.ask("GET", session)
    assert [] == shown["records"]
    assert 200 == (await stage.chat(session, user("hi")))[0]
    _, listed, _ = await stage.ask("GET", "/sessions")
    assert (1, 0) == (listed["sessions"][0]["turns"], listed["sessions"][0]["running"])


async def test_g36_deleting_a_session_aborts_and_a_late_answer_changes_nothing(stage: Stage) -> None:
    session, _ = await stage.open()
    release = asyncio.Event()

    async def slow(request: dict[str, Any]) -> None:
        await release.wait()

    stage.engine.answer = slow
    asked = asyncio.create_task(stage.chat(session, user("hi")))
    await wait_until(lambda: stage.engine.seen)
    statuses = [reply[0] for reply in await asyncio.gather(*(stage.ask("DELETE", session) for _ in range(2)))]
    assert [204, 404] == sorted(statuses)
    status, body, _ = await asked
    assert (404, f"session not found: session_id={session.split('/')[2]}") == (status, body["error"]["message"])
    await wait_until(lambda: stage.engine.aborted)
    release.set()
    for method, path in (("GET", session), ("POST", f"{session}/samples"), ("DELETE", session)):
        assert 404 == (await stage.ask(method, path))[0]
    assert 404 == (await stage.chat(session, user("hi")))[0]


async def test_deleted_twice_at_once_is_one_204_and_one_404(stage: Stage) -> None:
    session, _ = await stage.open()
    replies = await asyncio.gather(*(stage.ask("DELETE", session) for _ in range(5)))
    assert [204, 404, 404, 404, 404] == sorted(status for status, _, _ in replies)


async def test_samples_and_views_are_given_while_a_turn_generates(stage: Stage) -> None:
    session, _ = await stage.open()
    _, first, _ = await stage.chat(session, user("a"))
    go = asyncio.Event()

    async def wait(request: dict[str, Any]) -> None:
        await go.wait()

    stage.engine.answer = wait
    running = asyncio.create_task(stage.chat(session, user("a"), first["choices"][0]["message"], user("b")))
    await wait_until(lambda: len(stage.engine.seen) == 2)
    _, told, _ = await stage.ask("POST", f"{session}/samples", Accept="application/json")
    _, listed, _ = await stage.ask("GET", "/sessions")
    assert ([1], 1) == ([row["turns"] for row in told["samples"]], listed["sessions"][0]["running"])
    assert 1 == len((await stage.ask("GET", session))[1]["records"])
    go.set()
    assert 200 == (await running)[0]
    _, told, _ = await stage.ask("POST", f"{session}/samples", Accept="application/json")
    assert [2] == [row["turns"] for row in told["samples"]]


async def test_clients_that_come_and_go_leave_no_turn_running(stage: Stage) -> None:
    """Leaving at any moment of a request: nothing is recorded, every generation is aborted, the session goes on."""
    session, _ = await stage.open(version="v1")
    _, first, _ = await stage.chat(session, user("a"))
    before = (await stage.ask("GET", session))[1]

    async def slow(request: dict[str, Any]) -> None:
        await asyncio.sleep(30)

    stage.engine.answer = slow
    history = (user("a"), first["choices"][0]["message"], user("b"))
    for place in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stage.chat(session, *history), 0.002 * place)
    reached = [request["rid"] for request, _ in stage.engine.seen[1:]]
    await wait_until(lambda: set(reached) <= set(stage.engine.aborted), 1.0)
    _, listed, _ = await stage.ask("GET", "/sessions")
    assert (0, 1) == (listed["sessions"][0]["running"], listed["sessions"][0]["turns"])
    assert before == (await stage.ask("GET", session))[1]
    stage.engine.answer = None
    assert 200 == (await stage.chat(session, *history))[0]


async def test_no_more_sessions_than_max_sessions(tmp_path: Path) -> None:
    async for stage in staged(tmp_path, None, "--max-sessions", "2"):
        session, _ = await stage.open()
        await stage.open()
        status, body, headers = await stage.ask("POST", "/sessions")
        assert (429, "max_sessions", "1") == (status, body["error"]["code"], headers["Retry-After"])
        assert "x-should-retry" not in headers
        await stage.ask("DELETE", session)
        await stage.open()


async def test_g37_turns_of_one_session_generate_beside_each_other(stage: Stage) -> None:
    session, _ = await stage.open()
    both = asyncio.Event()

    async def until_both(request: dict[str, Any]) -> None:
        if len(stage.engine.seen) == 2:
            both.set()
        await both.wait()

    stage.engine.answer = until_both
    replies = await asyncio.wait_for(asyncio.gather(*(stage.chat(session, user(text)) for text in "ab")), 5)
    assert [200, 200] == [status for status, _, _ in replies]
    _, shown, _ = await stage.ask("GET", session)
    assert [None, None] == [node["parent"] for node in shown["metadata"]["tree"]["nodes"]]


async def test_the_openai_sdk_talks_and_does_not_repeat_what_cannot_help(guarded: Stage) -> None:
    session, key = await guarded.open(max_turns=2)
    async with openai.AsyncOpenAI(base_url=f"{guarded.url}{session}/v1", api_key=key, max_retries=2) as client:
        text = f"see\n{call('k')}"
        guarded.engine.ids = [*TITO.tokenizer.encode(text), END]
        done = await client.chat.completions.create(model="m", messages=[user("hi")], tools=TOOLS)
        choice = done.choices[0]
        assert ("tool_calls", "see") == (choice.finish_reason, choice.message.content)
        assert ("lookup", '{"key": "k"}') == (
            choice.message.tool_calls[0].function.name,
            choice.message.tool_calls[0].function.arguments,
        )
        assert len(guarded.engine.ids) == done.usage.completion_tokens
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "4"}
        await client.chat.completions.create(model="m", messages=[user("hi"), choice.message, result], tools=TOOLS)
        assert (
            guarded.engine.seen[1][0]["input_ids"][: len(guarded.engine.seen[0][0]["input_ids"])]
            == (guarded.engine.seen[0][0]["input_ids"])
        )
        with pytest.raises(openai.RateLimitError, match="max_turns"):
            await client.chat.completions.create(model="m", messages=[user("x")])
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model="m", messages=[])
    _, metrics, _ = await guarded.ask("GET", "/metrics")
    lines = metrics.decode().splitlines()
    assert 'rollout_session_refused_total{status="429"} 1' in lines
    assert 'rollout_session_refused_total{status="400"} 1' in lines
    _, stream, _ = await guarded.ask("GET", f"{session}/tape")
    assert {"429": 1, "400": 1} == table_to_tape(pa.ipc.open_stream(stream).read_all())[0].refused


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout.session.server", "--engine", "http://127.0.0.1:9", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


async def test_bad_starts_are_one_line_and_exit_2(stage: Stage, tmp_path: Path) -> None:
    port = stage.url.rsplit(":", 1)[1]
    starts = {
        f"port {port} on 127.0.0.1 is in use": ["--tokenizer", str(CHECKPOINT), "--port", port],
        "without a driver's token only loopback": ["--tokenizer", str(CHECKPOINT), "--host", "0.0.0.0"],
        "not a readable tokenizer.json": ["--tokenizer", str(tmp_path), "--port", str(free_port())],
        "renderer 'qwen9': there is none of that name; one of deepseek-r1, ": [
            "--tokenizer",
            str(CHECKPOINT),
            "--renderer",
            "qwen9",
        ],
        "keepalive_s 0.0: want more than 0": ["--tokenizer", str(CHECKPOINT), "--keepalive-s", "0"],
        "max_sessions 0: want at least 1": ["--tokenizer", str(CHECKPOINT), "--max-sessions", "0"],
        "the environment has no NO_SUCH_TOKEN": ["--tokenizer", str(CHECKPOINT), "--driver-token-env", "NO_SUCH_TOKEN"],
    }
    for message, argv in starts.items():
        done = await asyncio.to_thread(run, *argv)
        assert (2, 1) == (done.returncode, len(done.stderr.splitlines())), done.stderr
        assert message in done.stderr
