"""Agent harnesses as they are in the field: what they send besides, what they repeat, and mini-swe-agent itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from scripted import TOOLS, user
from sdk_clients import ask_chat, ask_message, chat_client, messages_client
from session_stage import END, TITO, Stage, failing, staged

MINI = Path(__file__).parents[2] / "examples" / "mini_swe_agent"
KEPT = {"type": "ephemeral"}
LOOKUP = TOOLS[0]["function"]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async for made in staged(tmp_path, "driver-secret"):
        yield made


def coding_body(tool_choice: dict[str, Any]) -> dict[str, Any]:
    """A request as coding agents on Anthropic's API write one: cache marks, metadata, thinking, system in blocks."""
    return {
        "model": "m",
        "max_tokens": 2000,
        "system": [{"type": "text", "text": "You code."}, {"type": "text", "text": " Well.", "cache_control": KEPT}],
        "messages": [user([{"type": "text", "text": "go", "cache_control": KEPT}])],
        "tools": [
            {
                "name": LOOKUP["name"],
                "description": LOOKUP["description"],
                "input_schema": LOOKUP["parameters"],
                "cache_control": KEPT,
            }
        ],
        "tool_choice": tool_choice,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "user_1"},
    }


async def test_what_coding_agents_send_besides_changes_no_prompt(stage: Stage) -> None:
    session, key = await stage.open()
    async with chat_client(stage.url + session, key) as client:
        history = [{"role": "system", "content": "You code. Well."}, user("go")]
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        await ask_chat(client, False, messages=history, tools=TOOLS, extra_body=thinking)
    body = coding_body({"type": "auto", "disable_parallel_tool_use": True})
    async with messages_client(stage.url + session, key) as client:
        async with client.beta.messages.stream(**body, betas=["interleaved-thinking-2025-05-14"]) as events:
            streamed = await events.get_final_message()
        extra = {"context_management": {"edits": []}, "service_tier": "auto", "unheard_of": 1}
        plain = await client.beta.messages.create(**body, extra_body=extra)
        counted = await client.beta.messages.count_tokens(
            **{name: value for name, value in body.items() if name not in ("max_tokens", "metadata")}
        )
    assert ("ok", "ok") == (streamed.content[0].text, plain.content[0].text)
    prompts = [request["input_ids"] for request, _ in stage.engine.seen]
    assert 3 == len(prompts) and prompts[0] == prompts[1] == prompts[2]
    assert len(prompts[0]) == counted.input_tokens == plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    _, metrics, _ = await stage.ask("GET", "/metrics")
    (line,) = (
        line for line in metrics.decode().splitlines() if line.startswith("rollout_session_ignored_fields_total")
    )
    assert int(float(line.split()[1])) >= 3


async def test_what_is_not_served_is_400_that_names_it(stage: Stage) -> None:
    session, key = await stage.open()
    thought = {"type": "redacted_thinking", "data": "x"}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"messages": [user("a"), {"role": "assistant", "content": "I"}]}, "the last one is the assistant's"),
        ({"messages": [user("a"), {"role": "assistant", "content": [thought]}, user("b")]}, "'redacted_thinking'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config: only text is served"),
        ({"tool_choice": {"type": "any"}}, "only auto and none are served"),
    ]
    async with messages_client(stage.url + session, key) as client:
        for change, text in refused:
            with pytest.raises(anthropic.BadRequestError, match=text):
                await client.messages.create(
                    **{"model": "m", "max_tokens": 9, "messages": [user("a")]}, extra_body=change
                )
    assert [] == stage.engine.seen
    for path in ("v1/messages", "v1/chat/completions", "v1/models", ""):
        for method in ("HEAD", "OPTIONS", "PUT"):
            status, _, _ = await stage.ask(method, f"{session}/{path}".rstrip("/"), key=key)
            assert status in ({200, 405} if path else {200, 401, 405}), (method, path)


async def test_clients_with_their_usual_repeats_do_not_repeat_what_no_repeat_cures(stage: Stage) -> None:
    """Both SDKs repeat 409 and 5xx twice unless they are told not to: each engine call is counted."""

    async def broken(request: dict[str, Any]) -> web.Response:
        return web.json_response(stage.engine.reply(request, completion_tokens=99))

    session, key = await stage.open(version="v1", max_turns=1)
    openai_client = openai.AsyncOpenAI(base_url=f"{stage.url}{session}/v1", api_key=key)
    anthropic_client = anthropic.AsyncAnthropic(base_url=stage.url + session, api_key=key)
    async with openai_client as chat, anthropic_client as messages:
        assert 2 == chat.max_retries == messages.max_retries
        stage.engine.answer = broken
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="completion_tokens") as failed:
                await chat.chat.completions.create(model="m", messages=[user("a")], stream=stream)
            with pytest.raises(anthropic.InternalServerError, match="completion_tokens"):
                await messages.messages.create(model="m", max_tokens=9, messages=[user("a")], stream=stream)
        assert (502, 4) == (failed.value.status_code, len(stage.engine.seen))
        stage.engine.answer = failing(500)
        with pytest.raises(openai.InternalServerError, match="the engine answered 500"):
            await chat.chat.completions.create(model="m", messages=[user("a")])
        assert 4 + 3 == len(stage.engine.seen), "the engine's own failure may pass"
        stage.engine.answer = None
        await chat.chat.completions.create(model="m", messages=[user("a")])
        with pytest.raises(openai.RateLimitError, match="max_turns") as refused:
            await chat.chat.completions.create(model="m", messages=[user("a")])
        assert "false" == refused.value.response.headers["x-should-retry"] and 4 + 3 + 1 == len(stage.engine.seen)
    _, metrics, _ = await stage.ask("GET", "/metrics")
    assert 'rollout_session_refused_total{status="429"} 1' in metrics.decode().splitlines()


async def test_an_aborted_answer_is_one_that_the_sdks_take(stage: Stage) -> None:
    async def aborted(request: dict[str, Any]) -> web.Response:
        return web.json_response(stage.engine.reply(request, finish_reason={"type": "abort", "message": "paused"}))

    stage.engine.answer = aborted
    for stream in (False, True):
        session, key = await stage.open()
        async with chat_client(stage.url + session, key) as client:
            reply = await ask_chat(client, stream, messages=[user("a")])
        async with messages_client(stage.url + session, key) as client:
            message = await ask_message(client, stream, messages=[user("a")])
        assert ("abort", "max_tokens") == (reply.choices[0].finish_reason, message.stop_reason)
        assert message.content[0].text == reply.choices[0].message.content


async def test_synchronous_clients_and_no_max_tokens(stage: Stage) -> None:
    session, key = await stage.open()

    def talk() -> tuple[str, int, str]:
        with openai.OpenAI(base_url=f"{stage.url}{session}/v1", api_key=key) as client:
            reply = client.chat.completions.create(model="m", messages=[user("a")])
            pieces = client.chat.completions.create(model="m", messages=[user("a")], stream=True)
            streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert reply.usage.prompt_tokens + reply.usage.completion_tokens == reply.usage.total_tokens
            assert reply.choices[0].message.content == streamed
        asked = {"model": "m", "max_tokens": 9, "messages": [user("a")]}
        with (
            anthropic.Anthropic(base_url=stage.url + session, auth_token=key) as client,
            client.messages.stream(**asked) as events,
        ):
            return streamed, reply.usage.prompt_tokens, "".join(events.text_stream)

    text, n_prompt, other = await asyncio.to_thread(talk)
    assert ("ok", "ok", len(stage.engine.seen[0][0]["input_ids"])) == (text, other, n_prompt)
    room = 4096 - n_prompt - 1  # the engine wants one id less than its context
    assert {room} == {request["sampling_params"]["max_new_tokens"] for request, _ in stage.engine.seen[:2]}


# mini-swe-agent, on a session of the stand-alone server


def bash(command: str) -> list[int]:
    written = json.dumps({"name": "bash", "arguments": {"command": command}})
    return [*TITO.tokenizer.encode(f"Next.\n<tool_call>\n{written}\n</tool_call>"), END]


def script(stage: Stage, commands: Iterator[str]) -> Any:
    async def answer(request: dict[str, Any]) -> None:
        stage.engine.ids = bash(next(commands))

    return answer


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_mini_swe_agent_mends_a_repository_through_a_session(stage: Stage, tmp_path: Path, version: str) -> None:
    session, key = await stage.open(version=version, matcher="strict")
    commands = ["cat sums.py", "sed -i 's/a - b/a + b/' sums.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    stage.engine.answer = script(stage, iter(commands))
    row = {**json.loads((MINI / "prompts.jsonl").read_text().splitlines()[0]), "request_kwargs": {"temperature": 1.0}}
    base = {"OPENAI_BASE_URL": f"{stage.url}{session}/v1", "OPENAI_API_KEY": key}
    folder = tmp_path / "work"
    folder.mkdir()
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, str(MINI / "solve.py")),
        cwd=folder,
        env={**os.environ, **base, "ROLLOUT_RESULT": str(folder / "result.json")},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(program.communicate(json.dumps(row).encode()), 200)
    assert 0 == program.returncode, said.decode()
    assert {"reward": 1.0, "metadata": {"ended": "Submitted", "calls": 3}} == json.loads(
        (folder / "result.json").read_text()
    )
    _, reply, _ = await stage.ask("POST", f"{session}/samples", {}, Accept="application/json")
    (sample,) = reply["samples"]
    sampled = [one for command in commands for one in bash(command)]
    owned = zip(sample["tokens"][-len(sample["loss_mask"]) :], sample["loss_mask"], strict=True)
    assert sampled == [token for token, mask in owned if mask], "three turns are one sample, every sampled id in it"
