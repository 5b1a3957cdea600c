"""Other weights for engines that run already, before a batch asks them anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

from rollout.engine.client import EngineClient
from rollout.errors import BadConfig, EngineError, EngineRefused

UPDATE_S = 600.0
"""Seconds until an engine must have loaded its weights; it ends what it is running first."""


async def update_engines(
    urls: Sequence[str], path: str, version: str, *, say: Callable[[str], None] | None = None
) -> None:
    """Have every engine load the weights at `path` and call them `version`; where they are served, nothing happens.

    Behind a router every worker is an engine.

    All are asked what they serve before the first one is changed, so that one that is gone changes none.

    Args:
        path: as the engines see it.
        say: told when weights are being loaded.

    Raises:
        BadConfig: engines refused the weights and keep those they had; the message names those that took them.
        EngineError: one is gone, gave no answer in UPDATE_S seconds, or does not state `version` afterwards.
    """
    async with AsyncExitStack() as stack:
        given = [await stack.enter_async_context(EngineClient(url)) for url in urls]
        engines = await asyncio.gather(*(client.engines() for client in given))
        clients = [await stack.enter_async_context(EngineClient(url)) for url in dict.fromkeys(chain(*engines))]
        served = await asyncio.gather(*(client.model_info() for client in clients))
        stale = [client for client, info in zip(clients, served, strict=True) if not _has(info, path, version)]
        if stale and say is not None:
            say(f"loading {path} as {version} at {', '.join(client.base_url for client in stale)}")
        ended = await asyncio.gather(*(_update(client, path, version) for client in stale), return_exceptions=True)
    _require(dict(zip([client.base_url for client in stale], ended, strict=True)), path, version)


def _has(info: dict[str, Any], path: str, version: str) -> bool:
    return (info.get("model_path"), info.get("weight_version")) == (path, version)


async def _update(client: EngineClient, path: str, version: str) -> None:
    await client.update_weights(path, version, timeout_s=UPDATE_S)
    states = (await client.model_info()).get("weight_version")
    if states != version:
        raise EngineError(f"it took them and states weight_version {states}")


def _require(ended: dict[str, BaseException | None], path: str, version: str) -> None:
    failed = {url: error for url, error in ended.items() if error is not None}
    if not failed:
        return
    said = "; ".join(f"{url}: {error}" for url, error in failed.items())
    took = ", ".join(url for url in ended if url not in failed)
    text = f"update_weights {path} as {version}: {said}{f'; loaded at {took}' if took else ''}"
    kinds = {type(error) for error in failed.values()}
    raise (BadConfig if kinds == {EngineRefused} else EngineError)(text) from next(iter(failed.values()))
