"""Tool calls from sampled ids to what an SDK makes of a stream: through the whole server, each by its case."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from app_stage import app_stage
from scripted import TOOLS, user
from sdk_clients import ask_chat, ask_message, chat_client, messages_client
from session_stage import END, TITO, Stage

GIVEN: list[tuple[str, dict[str, Any]]] = [("ping", {}), ("pong", {"n": 7}), ("lookup", {"key": "a\n\nß"})]
ANTHROPIC_TOOLS = [{"name": "lookup", "input_schema": TOOLS[0]["function"]["parameters"]}]  # type: ignore[index]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with app_stage() as made:
        yield made


def sampled(between: str, before: str = "") -> list[int]:
    calls = [f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in GIVEN]
    return [*TITO.tokenizer.encode(before + between.join(calls)), END]


@pytest.mark.parametrize("between", ["\n", "\n\n", "", " \n\n\n"])
async def test_g41_g42_calls_that_were_sampled_are_the_same_in_every_form(stage: Stage, between: str) -> None:
    stage.engine.ids = sampled(between)
    for stream in (False, True):
        session, key = await stage.open()
        async with chat_client(stage.url + session, key) as client:
            reply = await ask_chat(client, stream, messages=[user("go")], tools=TOOLS)
        choice = reply.choices[0]
        assert ("tool_calls", "") == (choice.finish_reason, choice.message.content or "")
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert GIVEN == [(name, json.loads(arguments)) for name, arguments in calls]
        assert "{}" == calls[0][1]
        session, key = await stage.open()
        async with messages_client(stage.url + session, key) as client:
            message = await ask_message(client, stream, messages=[user("go")], tools=ANTHROPIC_TOOLS)
        assert ("tool_use", ["tool_use"] * 3) == (message.stop_reason, [block.type for block in message.content])
        assert GIVEN == [(block.name, block.input) for block in message.content]


async def test_g42_text_before_the_calls_stays_out_of_their_blocks(stage: Stage) -> None:
    stage.engine.ids = sampled("\n\n", before="Now.\n")
    session, key = await stage.open()
    blocks: dict[int, list[str]] = {}
    kinds: dict[int, str] = {}
    async with (
        messages_client(stage.url + session, key) as client,
        client.messages.stream(model="m", max_tokens=200, messages=[user("go")], tools=ANTHROPIC_TOOLS) as events,  # type: ignore[arg-type,list-item]
    ):
        async for event in events:
            if event.type == "content_block_start":
                assert event.index == len(kinds)
                kinds[event.index] = event.content_block.type
            if event.type == "content_block_delta":
                delta = event.delta
                text = delta.partial_json if delta.type == "input_json_delta" else getattr(delta, "text", "?")
                blocks.setdefault(event.index, []).append(text)
    assert ["text", *["tool_use"] * 3] == list(kinds.values())
    assert "Now." == "".join(blocks[0]).strip()
    assert [given for _, given in GIVEN] == [json.loads("".join(blocks[place])) for place in (1, 2, 3)]
