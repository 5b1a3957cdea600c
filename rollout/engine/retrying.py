"""Which failures of a generation leave nothing begun, so that the same request may be sent again.

Everything else may have sampled already: a lost connection, a passed deadline, any other 5xx.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import orjson

from rollout.errors import EngineError, EngineFailed, EngineRefused, EngineUnreachable

T = TypeVar("T")

_PAUSE_S = 0.1
_PAUSE_LIMIT_S = 2.0

Unbegun = Literal["nobody", "full"]
"""Nobody was reached who could begin, or a queue had no room."""

_CODES: dict[str, Unbegun] = {
    "no_available_workers": "nobody",
    "call_upstream_connection_failed": "nobody",  # smg had no connection to the worker
    "admission_queue_full": "full",
    "admission_queue_timeout": "full",
}
"""Error codes of sglang-router and smg."""
_QUEUE_FULL = "The request queue is full."
"""SGLang's own words, with 503; its others are of requests that had begun to wait or to run."""


def unbegun(error: EngineError) -> Unbegun | None:
    """Why nothing was begun, null where something may have been."""
    if isinstance(error, EngineUnreachable):
        return "nobody"
    if not isinstance(error, EngineFailed | EngineRefused) or error.status not in (429, 500, 503):
        return None
    code, message = _said(error.body)
    if error.status == 503 and message == _QUEUE_FULL:
        return "full"
    return _CODES.get(code)


def _said(body: bytes) -> tuple[str, str]:
    """Code and message of an error body in SGLang's, FastAPI's or a router's shape; empty where it has none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", ""
    value = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(value, dict):
        return "", ""
    return str(value.get("code") or ""), str(value.get("message") or value.get("detail") or "")


async def persist(send: Callable[[float], Awaitable[T]], *, timeout_s: float, patience_s: float) -> T:
    """What `send` returns; it gets the seconds that are left, and is called again after failures with nothing begun.

    Args:
        timeout_s: of all calls together, and the pauses between them.
        patience_s: how long nobody may be there; a full queue is waited for until the deadline.

    Raises:
        EngineError: the last call's.
    """
    end = time.monotonic() + timeout_s
    pause_s, missed_since, left_s = _PAUSE_S, None, timeout_s
    while True:
        try:
            return await send(left_s)
        except EngineError as error:
            now, why = time.monotonic(), unbegun(error)
            missed_since = (missed_since or now) if why == "nobody" else None
            until = end if missed_since is None else min(end, missed_since + patience_s)
            if why is None or now + pause_s >= until:
                raise
        await asyncio.sleep(pause_s * (0.5 + random.random() / 2))
        pause_s, left_s = min(_PAUSE_LIMIT_S, 2 * pause_s), end - time.monotonic()
