"""The agent `reference_case`: nine requests that use what a session must be able to do.

initial, tool result, second question, tool result, system reminder, the same again, the same once
more, final request, assistant messages that the agent itself writes and a user message. "The same
again" means: the history goes back to before the reminder's answer, and the same request is sent.
On v1 seven turns stay; on v2 the tree has nine nodes and the leaves [0-4], [0-3, 5], [0-3, 6, 7, 8].
"""

from __future__ import annotations

import json
import random
from typing import Any

from rollout.agents.openai_client import openai_client
from rollout.agents.tools import run_tool
from rollout.engine.tiny import phrases as say
from rollout.engine.tiny.prompts import held_out
from rollout.engine.tiny.tasks import reference

FIRST, SECOND = "Beijing", "Shanghai"
INPUTS = 16
_SEED = 16

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
    """Play the case on one session; gives the keys that were really looked up.

    Raises:
        ValueError: the model called no tool where the case needs a result.
    """
    client = openai_client(base_url, api_key)
    case = _Case(client, {**request_kwargs, "tools": tools} if tools else request_kwargs, metadata.get("table") or {})
    case.messages = list(prompt)
    await case.ask()
    case.use_tools()
    await case.ask()
    case.say("user", say.SECOND_CITY.format(city=SECOND))
    await case.ask()
    case.use_tools()
    await case.ask()
    case.say("system", say.REMINDER)
    await case.ask()
    for _ in range(2):
        case.messages.pop()
        await case.ask()
    case.say("user", say.FORCE_FINAL)
    await case.ask()
    for text in say.INJECTED:
        case.say("assistant", text)
    case.say("user", say.REPEAT_ANSWER)
    await case.ask()
    return {"metadata": {"looked_up": case.looked_up}}


class _Case:
    """The conversation so far and what the tools were asked for."""

    def __init__(self, client: Any, body: dict[str, Any], table: dict[str, Any]) -> None:
        self.client, self.body, self.table = client, body, table
        self.messages: list[Message] = []
        self.looked_up: list[str] = []

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    async def ask(self) -> None:
        reply = await self.client.chat.completions.create(model="policy", messages=self.messages, extra_body=self.body)
        self.messages.append(reply.choices[0].message.model_dump(exclude_unset=True))

    def use_tools(self) -> None:
        """Answer the last turn's calls."""
        calls = self.messages[-1].get("tool_calls")
        if not calls:
            raise ValueError(f"the model called no tool: {self.messages[-1].get('content')!r}")
        for call in calls:
            function = call["function"]
            result = run_tool(function["name"], function["arguments"], self.table)
            if function["name"] == "lookup" and not result.startswith("error: "):
                self.looked_up.append(json.loads(function["arguments"])["key"])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def reference_inputs() -> list[dict[str, Any]]:
    """The case's 16 prompt rows `{messages, tools, label, metadata}`: Beijing first, then Shanghai."""
    rng = random.Random(_SEED)
    rows: list[dict[str, Any]] = []
    while len(rows) < INPUTS:
        task = reference(rng)
        row = task.row()
        asked = [step.argument for (step,) in task.plan]
        if asked == [FIRST, SECOND] and held_out(row["messages"]) and row not in rows:
            rows.append(row)
    return rows
