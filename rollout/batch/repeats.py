"""Whether an engine gives the same bits again, by what it says of itself.

always   at any width: the embedded engine; SGLang with deterministic inference on a GPU
alone    one request at a time: SGLang with deterministic inference on a CPU, where its kernels depend on the width
never    not known to: without deterministic inference, with a radix cache (a cached prefix moves bits, and the
         count of cached tokens is part of a row), or an engine that does not say
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from rollout.engine.client import EngineClient
from rollout.errors import EngineError

Repeats = Literal["always", "alone", "never"]


async def how_they_repeat(urls: Sequence[str], *, embedded: bool) -> Repeats:
    """How all engines at `urls` repeat themselves, so the weakest; `embedded`: it is the batch's own embedded one."""
    if embedded:
        return "always"
    found = [read_repeats(await server_info(url)) for url in urls]
    return max(found, key=get_args(Repeats).index)


async def server_info(url: str) -> dict[str, Any]:
    """An engine's own statement of how it was started; empty where it makes none."""
    async with EngineClient(url) as client:
        try:
            return await client.facts("/server_info")
        except EngineError:
            return {}


def read_repeats(told: dict[str, Any]) -> Repeats:
    """The same from the body of /server_info."""
    if told.get("enable_deterministic_inference") is not True:
        return "never"
    if told.get("disable_radix_cache") is not True:
        return "never"
    return "alone" if str(told.get("device") or "").startswith("cpu") else "always"
