"""The engines of one batch: the embedded one, SGLang under this host's supervisor, or external ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rollout import __version__
from rollout.batch.prepare import Batch
from rollout.config import BatchConfig
from rollout.engine.agreement import common_facts
from rollout.engine.client import EngineClient
from rollout.engine.embedded import start_embedded
from rollout.engine.job import EngineJob
from rollout.engine.keeping import EngineKeeper
from rollout.engine.outages import Outages
from rollout.engine.ports import HeldPort
from rollout.engine.recipes import Recipe, find_recipe
from rollout.engine.server import EngineLease, lease_engines
from rollout.engine.updating import update_engines
from rollout.errors import EngineError
from rollout.home import state_home
from rollout.process import ChildFailed

log = logging.getLogger(__name__)

Say = Callable[[str], None]


class EnginesInUse:
    """What a batch needs of its engines: where they are, what its rows say of them, and when one was lost.

    `urls` stand before the engines answer, so that the session server can start beside them.
    """

    def __init__(self, urls: list[str], outages: Outages, starting: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """`starting` returns the facts once all engines answer."""
        self.urls, self.outages = urls, outages
        self._starting = asyncio.create_task(starting)

    async def ready(self) -> dict[str, Any]:
        """Wait until all engines answer; the `engine` column of the batch's rows.

        Raises:
            BadCheckpoint, ChildFailed, EngineError: one did not start, or an external one does not answer.
            EngineMismatch: they do not serve the same.
        """
        return await asyncio.shield(self._starting)

    @property
    def start_error(self) -> BaseException | None:
        failed = self._starting.done() and not self._starting.cancelled()
        return self._starting.exception() if failed else None

    async def close(self) -> None:
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)

    async def check(self) -> None:
        """Make sure, after failures, that there is an engine left; with several, one that is gone is named in the log.

        Raises:
            EngineError: none is there, or one of our own cannot be kept alive; says why where that is known.
        """
        await self.outages.wait_up(WAIT_UP_S)
        if self.outages.failure is not None:
            raise EngineError(self.outages.failure)
        answers = await asyncio.gather(*(_ask(url) for url in self.urls), return_exceptions=True)
        gone = [answer for answer in answers if isinstance(answer, EngineError)]
        if len(gone) == len(self.urls):
            raise gone[0] if len(gone) == 1 else EngineError("; ".join(map(str, gone)))
        for error in gone:
            log.warning("an engine is gone, the others go on: %s", error)


WAIT_UP_S = 60.0
"""How long a shard with failures waits for an engine that is being started again before it is staged or given up."""


@asynccontextmanager
async def open_engines(batch: Batch, *, logs: Path, say: Say | None = None) -> AsyncIterator[EnginesInUse]:
    """The batch's engines on their way; those of our own are kept alive, and ended when the block is left.

    SGLang's are ended when nobody else uses them either.

    Raises:
        BadConfig, EngineInUse: what the batch asks for cannot be had. Other errors: see EnginesInUse.ready.
    """
    async with AsyncExitStack() as stack:
        engines = await _open(batch, logs, say, stack)
        stack.push_async_callback(engines.close)
        try:
            yield engines
        except ChildFailed:
            if engines.start_error is not None:  # what failed beside it may have failed of it
                raise engines.start_error from None
            raise


async def _open(batch: Batch, logs: Path, say: Say | None, stack: AsyncExitStack) -> EnginesInUse:
    config = batch.config
    if config.engine == "external":
        urls = config.engine_urls
        return EnginesInUse(urls, Outages(notice_s=0.0), _external_facts(urls, config, say))
    if config.engine == "sglang":
        recipe = find_recipe(str(config.engine_recipe))
        job = EngineJob.of(recipe, batch.tokenizer)
        lease = await stack.enter_async_context(lease_engines(job, home=state_home(), say=say))
        return EnginesInUse(lease.urls, lease.outages, _sglang_facts(lease, recipe, batch))
    embedded = _Embedded(batch.tokenizer, logs / "engine.log")
    stack.push_async_callback(embedded.stop)
    return EnginesInUse([embedded.url], embedded.outages, _embedded_facts(embedded, config))


class _Embedded:
    """The embedded engine on a port of its own, kept alive."""

    def __init__(self, model: Path, log: Path) -> None:
        self._port, self._log, self.outages = HeldPort(), log, Outages(notice_s=0.5)
        self.url = f"http://127.0.0.1:{self._port.port}"
        self._keeping: asyncio.Task[None] | None = None
        self._keeper = EngineKeeper(
            "the embedded engine",
            lambda: start_embedded(model, log=log, port=self._port.port),
            changed=self._changed,
        )

    def _changed(self) -> None:
        if self._keeper.failure is not None:
            self.outages.gave_up(f"{self._keeper.failure}; its log is {self._log}")
        elif self._keeper.up:
            self.outages.up = True
        else:
            self.outages.lost()

    async def start(self) -> None:
        await self._keeper.start()
        self._keeping = asyncio.create_task(self._keeper.keep())

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._keeper.stop()
        self._port.close()


async def _embedded_facts(embedded: _Embedded, config: BatchConfig) -> dict[str, Any]:
    await embedded.start()
    return engine_facts("embedded", __version__, config.model or "tiny", config, deterministic=True)


async def _external_facts(urls: Sequence[str], config: BatchConfig, say: Say | None) -> dict[str, Any]:
    if config.update_weights is not None:
        await update_engines(urls, config.update_weights, str(config.weight_version), say=say)
    served = await common_facts(urls)
    return engine_facts("sglang", served.get("version"), str(served.get("model_path")), config, deterministic=None)


async def _sglang_facts(lease: EngineLease, recipe: Recipe, batch: Batch) -> dict[str, Any]:
    await lease.ready()
    served, model = await common_facts(lease.urls), batch.config.model or "tiny"
    facts = engine_facts("sglang", served.get("version"), model, batch.config, deterministic=recipe.deterministic)
    return {**facts, "flags_hash": recipe.flags_hash, "flags": list(recipe.stated)}


async def _ask(url: str) -> dict[str, Any]:
    async with EngineClient(url) as client:
        return await client.model_info()


def engine_facts(
    name: str, version: str | None, model: str, config: BatchConfig, *, deterministic: bool | None
) -> dict[str, Any]:
    """The `engine` column of a batch's rows; null is what the engine does not say.

    The same for every row, whichever of several engines sampled it: they agree, or the batch does not start.
    """
    return {
        "name": name,
        "version": version,
        "model": model,
        "revision": None,
        "policy_version": config.weight_version if config.policy_version is None else config.policy_version,
        "flags_hash": None,
        "deterministic": deterministic,
        "flags": None,
    }
