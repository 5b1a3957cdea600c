"""Whether engines that share sessions serve the same: by what each says of itself, where it says it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from rollout.engine.client import EngineClient
from rollout.errors import EngineError, EngineMismatch

SERVED = ("model_path", "model_type", "architectures", "vocab_size", "context_length", "weight_version")
"""What is served, in /model_info."""
STARTED_WITH = (
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "attention_backend",
    "tp_size",
    "enable_deterministic_inference",
    "disable_radix_cache",
    "enable_return_routed_experts",
)
"""What changes bits in how it was started, in SGLang's /server_info."""
LOADED = ("model_path", "weight_version")
"""What an update of the weights changes."""


async def read_facts(client: EngineClient) -> dict[str, Any]:
    """What the engine states of SERVED and STARTED_WITH; what it does not state, or states as null, is not there.

    Raises:
        EngineError: it does not answer /model_info. An engine may lack /server_info.
    """
    told = await client.model_info()
    facts = {name: told[name] for name in SERVED if told.get(name) is not None}
    with suppress(EngineError):
        told = await client.facts("/server_info")
        facts |= {name: told[name] for name in STARTED_WITH if told.get(name) is not None}
    return facts


def require_same(facts: Mapping[str, Mapping[str, Any]], *, but: Collection[str] = ()) -> dict[str, Any]:
    """Hold the facts of engines against each other, by URL; what one does not state is no difference.

    Args:
        but: facts in which they may differ.

    Returns:
        What they state together; of a fact in which they differ, the last one's.

    Raises:
        EngineMismatch: names the first fact that differs and two URLs.
    """
    names = dict.fromkeys(name for told in facts.values() for name in told if name not in but)
    for name in names:
        stated = [(url, told[name]) for url, told in facts.items() if name in told]
        first, expected = stated[0]
        for url, value in stated[1:]:
            if value != expected:
                raise EngineMismatch(
                    f"engines that share sessions must serve the same, but {name} is {expected!r} at {first} "
                    f"and {value!r} at {url}"
                )
    return {name: value for told in facts.values() for name, value in told.items()}


async def common_facts(urls: Sequence[str]) -> dict[str, Any]:
    """What the engines state, once all have answered and agree.

    Raises:
        EngineError: one does not answer.
        EngineMismatch: two differ.
    """
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EngineClient(url)) for url in urls]
        told = await asyncio.gather(*(read_facts(client) for client in clients))
    return require_same(dict(zip(urls, told, strict=True)))
