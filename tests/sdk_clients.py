"""The real SDKs as clients of a session server, asking plainly or by stream."""

from __future__ import annotations

from typing import Any

import anthropic
import openai


def chat_client(base_url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0)


def messages_client(base_url: str, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0)


async def ask_chat(client: openai.AsyncOpenAI, stream: bool, **body: Any) -> Any:
    if not stream:
        return await client.chat.completions.create(model="m", **body)
    async with client.chat.completions.stream(model="m", stream_options={"include_usage": True}, **body) as events:
        return await events.get_final_completion()


async def ask_message(client: anthropic.AsyncAnthropic, stream: bool, **body: Any) -> Any:
    body = {"model": "m", "max_tokens": 200, **body}
    if not stream:
        return await client.messages.create(**body)
    async with client.messages.stream(**body) as events:
        return await events.get_final_message()
