"""The engines of one batch: the embedded one, SGLang under this host's supervisor, or external ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from rollout import __version__
from rollout.batch.prepare import Batch
from rollout.config import BatchConfig
from rollout.engine.client import EngineClient
from rollout.engine.embedded import start_embedded
from rollout.engine.job import EngineJob
from rollout.engine.keeping import EngineKeeper
from rollout.engine.outages import Outages
from rollout.engine.ports import HeldPort
from rollout.engine.recipes import Recipe, find_recipe
from rollout.engine.server import use_engines
from rollout.errors import EngineError
from rollout.home import state_home
from rollout.process import Child

Say = Callable[[str], None]


class EnginesInUse:
    """What a batch needs of its engines: where they are, what its rows say of them, and when one was lost."""

    def __init__(self, urls: list[str], facts: dict[str, Any], outages: Outages) -> None:
        self.urls, self.facts, self.outages = urls, facts, outages

    async def check(self) -> None:
        """Make sure that all of them are there, after failures.

        Raises:
            EngineError: one is gone; says why where that is known.
        """
        await self.outages.wait_up(WAIT_UP_S)
        if self.outages.failure is not None:
            raise EngineError(self.outages.failure)
        for url in self.urls:
            await _ask(url)


WAIT_UP_S = 60.0
"""How long a shard with failures waits for an engine that is being started again before it is staged or given up."""


@asynccontextmanager
async def open_engines(batch: Batch, *, logs: Path, say: Say | None = None) -> AsyncIterator[EnginesInUse]:
    """The batch's engines, those of our own kept alive, and ended when the block is left and nobody else uses them.

    Raises:
        BadCheckpoint, BadConfig, EngineInUse: what the batch asks for cannot be had.
        ChildFailed: an engine did not start.
    """
    config = batch.config
    if config.engine == "external":
        url = str(config.engine_url)
        yield EnginesInUse([url], await _external_facts(url, config), Outages(notice_s=0.0))
    elif config.engine == "sglang":
        recipe = find_recipe(str(config.engine_recipe))
        job = EngineJob.of(recipe, batch.tokenizer)
        async with use_engines(job, home=state_home(), say=say) as (urls, outages):
            yield EnginesInUse(urls, await _sglang_facts(urls[0], recipe, batch), outages)
    else:
        async with _embedded(batch.tokenizer, logs / "engine.log") as (child, outages):
            facts = engine_facts("embedded", __version__, config.model or "tiny", config, deterministic=True)
            yield EnginesInUse([child.url], facts, outages)


@asynccontextmanager
async def _embedded(model: Path, log: Path) -> AsyncIterator[tuple[Child, Outages]]:
    port, outages = HeldPort(), Outages(notice_s=0.5)

    def changed() -> None:
        if keeper.failure is not None:
            outages.gave_up(f"{keeper.failure}; its log is {log}")
        elif keeper.up:
            outages.up = True
        else:
            outages.lost()

    keeper = EngineKeeper(
        "the embedded engine", lambda: start_embedded(model, log=log, port=port.port), changed=changed
    )
    try:
        child = await keeper.start()
        keeping = asyncio.create_task(keeper.keep())
        try:
            yield child, outages
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
    finally:
        await keeper.stop()
        port.close()


async def _external_facts(url: str, config: BatchConfig) -> dict[str, Any]:
    info = await _ask(url)
    return engine_facts("sglang", info.get("version"), str(info.get("model_path")), config, deterministic=None)


async def _sglang_facts(url: str, recipe: Recipe, batch: Batch) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/server_info") as reply:
        version = (await reply.json()).get("version")
    model = batch.config.model or "tiny"
    facts = engine_facts("sglang", version, model, batch.config, deterministic=recipe.deterministic)
    return {**facts, "flags_hash": recipe.flags_hash, "flags": list(recipe.stated)}


async def _ask(url: str) -> dict[str, Any]:
    client = EngineClient(url)
    try:
        return await client.model_info()
    finally:
        await client.close()


def engine_facts(
    name: str, version: str | None, model: str, config: BatchConfig, *, deterministic: bool | None
) -> dict[str, Any]:
    """The `engine` column of a batch's rows; null is what the engine does not say."""
    return {
        "name": name,
        "version": version,
        "model": model,
        "revision": None,
        "policy_version": config.policy_version,
        "flags_hash": None,
        "deterministic": deterministic,
        "flags": None,
    }
