"""The agent `tool_loop`: lets the model call the row's tools until it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollout.agents.openai_client import is_full, openai_client
from rollout.agents.tools import run_tool
from rollout.engine.tiny.phrases import REASK

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_TURNS = 8
"""Model calls of one loop; a model that never answers ends there."""

Message = dict[str, Any]


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
    """Run the row's tools (`calculator`, and `lookup` in the metadata's `table`) until an answer."""
    client = openai_client(base_url, api_key)
    body = {**request_kwargs, "tools": tools} if tools else request_kwargs
    loop = ToolLoop(client=client, body=body, table=metadata.get("table") or {})
    ending = await loop.answer(list(prompt))
    return {"metadata": {"ending": ending, "tool_calls": loop.tool_calls, "tool_errors": loop.tool_errors}}


Ending = Literal["answer", "cut", "full", "turns"]
"""How a loop ended: with an answer, a turn cut by length, no room for another turn, or MAX_TURNS."""


@dataclass(kw_only=True, slots=True)
class ToolLoop:
    """One conversation's way of asking: client, request body without messages, and counts."""

    client: AsyncOpenAI
    body: dict[str, Any]
    table: dict[str, Any]
    tool_calls: int = 0
    tool_errors: int = 0

    async def answer(self, messages: list[Message]) -> Ending:
        """Ask, run tools and ask again until the model answers; everything said is appended to `messages`."""
        for _ in range(MAX_TURNS):
            try:
                reply = await self.client.chat.completions.create(
                    model="policy",
                    messages=messages,  # type: ignore[arg-type]
                    extra_body=self.body,
                )
            except Exception as error:
                if is_full(error):
                    return "full"
                raise
            choice = reply.choices[0]
            messages.append(choice.message.model_dump(exclude_unset=True))
            if choice.finish_reason == "length":
                return "cut"
            if choice.message.tool_calls:
                messages.extend(self._run(call) for call in choice.message.tool_calls)
            elif "<tool_call>" in (choice.message.content or ""):
                messages.append({"role": "user", "content": REASK})
            else:
                return "answer"
        return "turns"

    def _run(self, call: Any) -> Message:
        """The tool's message: its result, or what was wrong, which the model may mend in its next turn."""
        result = run_tool(call.function.name, call.function.arguments, self.table)
        self.tool_calls += 1
        self.tool_errors += result.startswith("error: ")
        return {"role": "tool", "tool_call_id": call.id, "content": result}
