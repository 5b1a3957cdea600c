"""The real OpenAI and Anthropic SDKs against a real server: the same conversation in either form, streamed or not."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from scripted import TOOLS, call, user
from sdk_clients import ask_chat, ask_message, chat_client, messages_client
from session_stage import END, TITO, Stage, failing, staged

import rollout.batch
from rollout.agents.tools import run_tool
from rollout.engine.tiny import CHECKPOINT
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.parity.verdict import judge
from rollout.process import Child, start
from rollout.session.client import SessionClient

DEMO = [json.loads(line) for line in Path(rollout.batch.__file__).with_name("demo.jsonl").read_text().splitlines()]
ROW = next(row for row in DEMO if row["metadata"]["kind"] == "chain")
MESSAGES_TOOLS = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
    for one in (tool["function"] for tool in TOOLS)
]


# The embedded engine: a model that really calls tools


@pytest.fixture
async def sessions(engine: Child, tmp_path: Path) -> AsyncIterator[SessionClient]:
    argv = [sys.executable, "-m", "rollout.session.server", "--tokenizer", str(CHECKPOINT), "--engine", engine.url]
    argv += ["--driver-token-env", "SESSION_TOKEN"]
    child = await start(argv, log=tmp_path / "server.log", env={"SESSION_TOKEN": "secret"})
    try:
        async with SessionClient(child.url, driver_token="secret") as client:
            yield client
    finally:
        child.stop()


async def talk_chat(base_url: str, key: str, stream: bool) -> list[Any]:
    """The row's tool loop as OpenAI's clients write it: the answers."""
    answers, messages = [], list(ROW["messages"])
    async with chat_client(base_url, key) as client:
        for _ in range(8):
            reply = await ask_chat(client, stream, messages=messages, tools=ROW["tools"], max_tokens=200)
            answers.append(reply)
            message = reply.choices[0].message
            messages.append(message)
            for one in message.tool_calls or []:
                result = run_tool(one.function.name, one.function.arguments)
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
            if not message.tool_calls:
                return answers
    raise AssertionError("no end")


async def talk_messages(base_url: str, key: str, stream: bool) -> list[Any]:
    """The same loop as Anthropic's clients write it; every prompt is counted before it is sent."""
    functions = [tool["function"] for tool in ROW["tools"]]
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in functions
    ]
    answers, messages = [], list(ROW["messages"])
    async with messages_client(base_url, key) as client:
        for _ in range(8):
            counted = await client.messages.count_tokens(model="m", messages=messages, tools=tools)
            message = await ask_message(client, stream, messages=messages, tools=tools)
            answers.append(message)
            assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": run_tool(one.name, json.dumps(one.input))}
                for one in message.content
                if one.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
            if not results:
                return answers
    raise AssertionError("no end")


async def test_in_whichever_form_a_client_asks_it_has_the_same_conversation(sessions: SessionClient) -> None:
    for version in ("v1", "v2"):
        await check_four_talks(sessions, version)


async def check_four_talks(sessions: SessionClient, version: str) -> None:
    taken = []
    for talk in (talk_chat, talk_messages):
        for stream in (False, True):
            settings = {"version": version, "seed": "07", "sampling": {"temperature": 0.7}, "matcher": "strict"}
            opened = await sessions.open(settings)
            answers = await talk(opened.base_url, opened.session_key, stream)
            reply, tape = await sessions.samples(opened.session_id), await sessions.tape(opened.session_id)
            assert len(answers) == len(tape.exchanges) >= 4
            assert [None, *range(len(answers) - 1)] == [exchange.parent for exchange in tape.exchanges]
            given = RolloutInput(index=0, group_index=0, messages=ROW["messages"], label=ROW["label"], metadata={})
            outcome = Outcome(input=given, attempt=0, session_version=version, agent_result=None, reward=None)
            rows = finish(reply.samples, outcome)
            assert "equal" == judge(tape, outcome, rows, TITO).verdict
            taken.append((answers, tape, rows[0]))
    (_, first_tape, first) = taken[0]
    for _, tape, row in taken[1:]:
        assert first.tokens_T.tobytes() == row.tokens_T.tobytes()
        assert first.rollout_log_probs_R.tobytes() == row.rollout_log_probs_R.tobytes()
        assert first.loss_mask_R.tobytes() == row.loss_mask_R.tobytes()
        assert [one.sampling_seed for one in first_tape.exchanges] == [one.sampling_seed for one in tape.exchanges]
        assert [one.appended_messages for one in first_tape.exchanges] == [
            one.appended_messages for one in tape.exchanges
        ]
    chats, messages = taken[0][0], taken[2][0]
    for plain, streamed in zip(chats, taken[1][0], strict=True):
        assert (plain.choices[0].finish_reason, plain.usage) == (streamed.choices[0].finish_reason, streamed.usage)
    for plain, streamed in zip(messages, taken[3][0], strict=True):
        same = ("content", "stop_reason", "stop_sequence", "usage")
        assert [plain.to_dict()[name] for name in same] == [streamed.to_dict()[name] for name in same]
    assert [("tool_use", "tool_calls")] * (len(chats) - 1) + [("end_turn", "stop")] == [
        (message.stop_reason, chat.choices[0].finish_reason) for message, chat in zip(messages, chats, strict=True)
    ]


# An engine that says what a test wants


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async for made in staged(tmp_path, "driver-secret"):
        yield made


def say(stage: Stage, text: str) -> None:
    stage.engine.ids = [*TITO.tokenizer.encode(text), END]


async def test_reasoning_text_and_calls_come_back_and_are_known_again(stage: Stage) -> None:
    for version in ("v1", "v2"):
        for stream in (False, True):
            await check_reasoning(stage, version, stream)


async def check_reasoning(stage: Stage, version: str, stream: bool) -> None:
    stage.engine.seen.clear()
    say(stage, f"<think>\nhm, ü\n</think>\n\nsee\n{call('a')}\n\n{call('b')}")
    session, key = await stage.open(version=version, matcher="strict", enable_thinking=True)
    async with chat_client(stage.url + session, key) as client:
        reply = await ask_chat(client, stream, messages=[user("go")], tools=TOOLS)
        chat = reply.choices[0].message.to_dict()
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "7"} for one in chat["tool_calls"]]
        await ask_chat(client, stream, messages=[user("go"), reply.choices[0].message, *results], tools=TOOLS)
    assert ("hm, ü", "see") == (chat["reasoning_content"].strip(), chat["content"].strip())
    session, key = await stage.open(version=version, matcher="strict")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with messages_client(stage.url + session, key) as client:
        body = {"tools": MESSAGES_TOOLS, "thinking": thinking, "max_tokens": 2000}
        message = await ask_message(client, stream, messages=[user("go")], **body)
        blocks = [{"type": "tool_result", "tool_use_id": one["id"], "content": "7"} for one in chat["tool_calls"]]
        answered = [user("go"), {"role": "assistant", "content": message.content}, user(blocks)]
        await ask_message(client, stream, messages=answered, **body)
    assert [chat["reasoning_content"], chat["content"], {"key": "a"}, {"key": "b"}] == [
        *(message.content[0].thinking, message.content[1].text, message.content[2].input, message.content[3].input),
    ]
    prompts = [request["input_ids"] for request, _ in stage.engine.seen]
    assert (prompts[0], prompts[1]) == (prompts[2], prompts[3])
    kept = [*prompts[0], *stage.engine.ids]
    assert kept == prompts[1][: len(kept)]


async def test_a_stop_sequence_is_told(stage: Stage) -> None:
    session, key = await stage.open()
    stage.engine.ids = TITO.tokenizer.encode("one STOP")

    async def stop(request: dict[str, Any]) -> web.Response:
        return web.json_response(stage.engine.reply(request, finish_reason={"type": "stop", "matched": "STOP"}))

    stage.engine.answer = stop
    async with messages_client(stage.url + session, key) as client:
        for stream in (False, True):
            message = await ask_message(client, stream, messages=[user("hi")], stop_sequences=["STOP"])
            assert ("stop_sequence", "STOP", "one ") == (
                message.stop_reason,
                message.stop_sequence,
                message.content[0].text,
            )
    assert ["STOP"] == stage.engine.seen[0][0]["sampling_params"]["stop"]


async def test_models_are_listed_for_both(stage: Stage) -> None:
    session, key = await stage.open()
    async with chat_client(stage.url + session, key) as client:
        assert ["faulty"] == [model.id async for model in client.models.list()]
    async with messages_client(stage.url + session, key) as client:
        listed = [(model.id, model.display_name, model.type) async for model in client.models.list()]
    assert [("faulty", "faulty", "model")] == listed


async def test_what_is_refused_has_its_status_and_each_vendors_shape(stage: Stage) -> None:
    """G60 among them: nothing of a stream begins."""
    for stream in (False, True):
        await check_refusals(stage, stream)


async def check_refusals(stage: Stage, stream: bool) -> None:
    session, key = await stage.open(max_turns=1)
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    async with chat_client(stage.url + session, key) as chat, messages_client(stage.url + session, key) as messages:
        for body in ({"n": 0}, {"max_tokens": 0}, {"tool_choice": "some"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(body))):
                await chat.chat.completions.create(model="m", messages=[user("hi")], stream=stream, **body)
        with pytest.raises(anthropic.BadRequestError, match="only text and tool_result blocks") as caught:
            await messages.messages.create(model="m", max_tokens=9, messages=[user([image])], stream=stream)
        assert {"type": "error", "error": caught.value.body["error"]} == caught.value.body
        assert ("invalid_request_error", "false") == (
            caught.value.body["error"]["type"],
            caught.value.response.headers["x-should-retry"],
        )
        with pytest.raises(anthropic.BadRequestError, match="only text and tool_result blocks"):
            await messages.messages.count_tokens(model="m", messages=[user([image])])
        stage.engine.answer = failing(503)
        with pytest.raises(anthropic.InternalServerError) as failed:
            await messages.messages.create(model="m", max_tokens=9, messages=[user("hi")], stream=stream)
        assert (503, "api_error") == (failed.value.status_code, failed.value.body["error"]["type"])
        with pytest.raises(openai.InternalServerError):
            await chat.chat.completions.create(model="m", messages=[user("hi")], stream=stream)
        stage.engine.answer = None
        await messages.messages.create(model="m", max_tokens=9, messages=[user("hi")])
        with pytest.raises(anthropic.RateLimitError, match="max_turns"):
            await messages.messages.create(model="m", max_tokens=9, messages=[user("hi")], stream=stream)
    async with messages_client(stage.url + session, "another") as messages:
        with pytest.raises(anthropic.AuthenticationError):
            await messages.messages.create(model="m", max_tokens=9, messages=[user("hi")], stream=stream)
    async with messages_client(f"{stage.url}/sessions/nope", key) as messages:
        with pytest.raises(anthropic.NotFoundError, match="session not found: session_id=nope"):
            await messages.messages.create(model="m", max_tokens=9, messages=[user("hi")], stream=stream)
    assert 1 == await stage.n_turns(session)


async def test_an_integer_of_any_length_is_known_again(stage: Stage) -> None:
    session, key = await stage.open(version="v1", matcher="strict")
    say(stage, '<tool_call>\n{"name": "lookup", "arguments": {"key": 123456789012345678901234567890}}\n</tool_call>')
    async with messages_client(stage.url + session, key) as client:
        message = await ask_message(client, True, messages=[user("go")], tools=MESSAGES_TOOLS)
        assert {"key": 123456789012345678901234567890} == message.content[0].input
        result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "7"}
        answered = [user("go"), {"role": "assistant", "content": message.content}, user([result])]
        await ask_message(client, False, messages=answered, tools=MESSAGES_TOOLS)
    assert 2 == await stage.n_turns(session)
    kept = [*stage.engine.seen[0][0]["input_ids"], *stage.engine.ids]
    assert kept == stage.engine.seen[1][0]["input_ids"][: len(kept)]
