"""OpenAI clients for agents: one per rollout, all over one connection pool.

Measured on 2 CPU cores: a client with a pool of its own costs 75 ms, mostly for certificates that a
local server never shows; over a shared pool 0.06 ms. A call costs 2.5 ms over httpx and 1.2 ms over
aiohttp, which newer releases of `openai` bring along. `openai` is imported at the first use (0.5 s):
a dry run loads the agents and runs none.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

    Pool = DefaultAioHttpClient | DefaultAsyncHttpxClient

MAX_RETRIES = 6
"""Pauses between them, by the client: 0.5 s, doubled up to 8 s, less a quarter by chance."""

_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Pool] = WeakKeyDictionary()


def openai_client(base_url: str, api_key: str) -> AsyncOpenAI:
    """A client of the session at `base_url` (an agent's own argument), to be used in the running loop.

    It waits as long as the rollout may last, and repeats only what got no answer at all, for about 20 s:
    the session server may have died, and is started again with its sessions. What was answered is not
    repeated: that would be a turn of its own.
    """
    return _client_class()(
        base_url=f"{base_url}/v1", api_key=api_key, http_client=_pool(), max_retries=MAX_RETRIES, timeout=None
    )


@lru_cache(maxsize=1)
def _client_class() -> type[AsyncOpenAI]:
    from openai import AsyncOpenAI

    class UnansweredOnly(AsyncOpenAI):
        def _should_retry(self, response: Any) -> bool:
            return False

    return UnansweredOnly


def _pool() -> Pool:
    from openai import DefaultAioHttpClient, DefaultAsyncHttpxClient

    loop = asyncio.get_running_loop()
    if loop not in _pools:
        try:
            _pools[loop] = DefaultAioHttpClient(timeout=None, verify=_certificates())
        except RuntimeError:  # this release of openai needs an extra for it
            _pools[loop] = DefaultAsyncHttpxClient(timeout=None, verify=_certificates())
    return _pools[loop]


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """The trusted certificates, read once: a user's agent has a loop, and so a pool, of its own for each rollout."""
    return ssl.create_default_context()


async def close_connections() -> None:
    """Close the running loop's pool; clients made from it are of no use afterwards."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # a coroutine that is thrown away outlives its loop, and its pool went with that
        return
    pool = _pools.pop(loop, None)
    if pool is not None:
        await pool.aclose()


def is_full(error: Exception) -> bool:
    """Whether `error` is the session's refusal because the conversation leaves no room for another turn."""
    return getattr(error, "code", None) == "context_length_exceeded"
