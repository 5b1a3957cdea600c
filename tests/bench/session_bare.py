"""The bare turn, a process of its own: the same stack without a session.

    python tests/bench/session_bare.py ENGINE_URL TOKENIZER_DIR

Per turn: parse the body, `renderers`' bridge from the ids so far to the next prompt, POST /generate, parse
what was sampled, reply. It keeps each conversation's ids, since a bridge needs them, and nothing else: no history is
compared, no log-prob is kept, no body is checked.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from renderers.base import create_renderer
from renderers.configs import config_from_name

from rollout.process import say_ready
from rollout.tito.tokenizer import Tokenizer


class BareTurn:
    """Handlers of both routes that the load needs."""

    def __init__(self, engine: str, tokenizer: Tokenizer) -> None:
        config = config_from_name("qwen3")
        assert config is not None
        self._renderer: Any = create_renderer(
            tokenizer, type(config)(thinking_retention="all"), chat_template_kwargs={"enable_thinking": False}
        )
        self._url = f"{engine}/generate"
        self._stop = list(self._renderer.get_stop_token_ids())
        self._kept: dict[str, tuple[list[int], list[int], int]] = {}
        self._http: aiohttp.ClientSession | None = None

    async def open(self, request: web.Request) -> web.Response:
        return _answer({"session_id": uuid.uuid4().hex})

    async def complete(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        name, messages, tools = request.match_info["session_id"], body["messages"], body["tools"]
        prompt_ids = self._prompt(name, messages, tools)
        reply = await self._generate(prompt_ids, body)
        entries = reply["meta_info"]["output_token_logprobs"]
        output_ids = [entry[1] for entry in entries]
        parsed = self._renderer.parse_response(output_ids, tools=tools)
        self._kept[name] = (prompt_ids, output_ids, len(messages) + 1)
        return _answer(_completion(parsed, reply["meta_info"], len(prompt_ids), len(output_ids)))

    def _prompt(self, name: str, messages: list[Any], tools: list[Any]) -> list[int]:
        if name not in self._kept:
            rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        else:
            prompt_ids, output_ids, n_seen = self._kept[name]
            rendered = self._renderer.bridge_to_next_turn(prompt_ids, output_ids, messages[n_seen:], tools=tools)
        ids: list[int] = rendered.token_ids
        return ids

    async def _generate(self, prompt_ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        asked = {
            "input_ids": prompt_ids,
            "sampling_params": {"temperature": body["temperature"], "stop_token_ids": self._stop},
            "return_logprob": True,
            "rid": uuid.uuid4().hex,
        }
        headers = {"Content-Type": "application/json"}
        async with self._http.post(self._url, data=orjson.dumps(asked), headers=headers) as response:
            response.raise_for_status()
            reply: dict[str, Any] = orjson.loads(await response.read())
        return reply


def _completion(parsed: Any, meta: dict[str, Any], n_prompt: int, n_output: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
        }
        for place, call in enumerate(parsed.tool_calls)
    ]
    message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
    return {
        "id": meta["id"],
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "meta_info": meta}],
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output},
    }


def _answer(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


async def main(engine: str, tokenizer: str) -> None:
    bare = BareTurn(engine, Tokenizer(Path(tokenizer)))
    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes([web.post("/sessions", bare.open)])
    app.add_routes([web.post("/sessions/{session_id}/v1/chat/completions", bare.complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    say_ready(port=runner.addresses[0][1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
