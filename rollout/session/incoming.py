"""What a request brings: its tokens and its body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from rollout.errors import SessionRefused
from rollout.session.request import check_text

_LONG_NUMBER = re.compile(rb"\d{19}")
"""orjson makes a double of an integer beyond 64 bits; every such number has this many digits."""


def sent_tokens(request: web.Request) -> list[str]:
    """Every token that the client sent: an SDK may have another's in one of the two headers."""
    tokens = [request.headers["x-api-key"]] if "x-api-key" in request.headers else []
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return [*tokens, token.strip()] if scheme.lower() == "bearer" else tokens


def read_exact(content: bytes) -> Any:
    """JSON whose integers, of any length, keep their digits."""
    value = orjson.loads(content)
    return json.loads(content) if _LONG_NUMBER.search(content) else value


async def read_body(request: web.Request, read: Callable[[bytes], Any] = orjson.loads) -> Any:
    """What `read` makes of the body; an empty one is {}.

    Raises:
        SessionRefused: 400, no JSON, or not what its Content-Encoding says.
    """
    try:
        content = await request.read()
    except web.RequestPayloadError as error:
        raise SessionRefused(400, f"invalid body: {error}") from error
    try:
        return read(content if content.strip() else b"{}")
    except (ValueError, RecursionError) as error:
        raise SessionRefused(400, f"invalid JSON body: {error}") from error


def drop_parsed_arguments(body: Any) -> None:
    """Take off the calls of a chat body what OpenAI's SDK put there, so that a reply that it streamed is known again.

    Its stream helper adds `parsed_arguments` to every call of the message that it puts together, and
    sends it back; no API has that field, and for a matcher an added key is another call.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                function.pop("parsed_arguments", None)


def read_samples_body(body: Any) -> tuple[int | None, dict[str, Any] | None]:
    """max_seq_len and an agent's metadata of POST /sessions/{id}/samples.

    Raises:
        SessionRefused: 400 that names the field.
    """
    if not isinstance(body, dict):
        raise SessionRefused(400, "body: want a JSON object")
    limit, metadata = body.get("max_seq_len"), body.get("metadata")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise SessionRefused(400, "max_seq_len: want a positive integer")
    if metadata is not None and not isinstance(metadata, dict):
        raise SessionRefused(400, "metadata: want an object")
    check_text(metadata, "metadata")
    reward = (metadata or {}).get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise SessionRefused(400, "metadata.reward: want a number")
    return limit, metadata
