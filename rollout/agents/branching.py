"""The agent `branching`: from one answer two sub-conversations, one after the other.

The first goes on for at least two turns, so the picker keeps its leaf beside the second's: the
rollout gives several samples that share their prefix.
"""

from __future__ import annotations

from typing import Any

from rollout.agents.openai_client import openai_client
from rollout.agents.tool_loop import Ending, Message, ToolLoop
from rollout.engine.tiny.phrases import BRANCH_FIRST, BRANCH_SECOND

needs = "v2"


async def run(
    base_url: str,
    prompt: list[Message],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    api_key: str,
    tools: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Answer with the row's tools, have the answer checked and confirmed, then go back and ask for it in short."""
    client = openai_client(base_url, api_key)
    body = {**request_kwargs, "tools": tools} if tools else request_kwargs
    loop = ToolLoop(client=client, body=body, table=metadata.get("table") or {})
    prefix = list(prompt)
    endings = [await loop.answer(prefix)]
    if endings[0] == "answer":
        for questions in (BRANCH_FIRST, BRANCH_SECOND):
            endings.append(await _branch(loop, list(prefix), questions))
    return {"metadata": {"endings": endings, "tool_calls": loop.tool_calls, "tool_errors": loop.tool_errors}}


async def _branch(loop: ToolLoop, messages: list[Message], questions: tuple[str, ...]) -> Ending:
    """Put one question after the other to the conversation `messages`; the first that gets no answer ends it."""
    ending: Ending = "answer"
    for question in questions:
        messages.append({"role": "user", "content": question})
        ending = await loop.answer(messages)
        if ending != "answer":
            break
    return ending
