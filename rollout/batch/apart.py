"""A shard that is rolled out apart from the flow: in a process of another machine, with the lake between them.

What goes there is a reference. The process reads plan.json from the lake and plans the batch anew by itself: so a
machine with other prompts, another checkpoint or another version of this package is refused by the config hash.
What comes back are counts; the rows are staged, and the first writer of a shard wins, however often it is run.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollout.batch.prepare import Batch, RunOrigin, prepare
from rollout.batch.progress import BatchProgress
from rollout.batch.spool import SPOOLS
from rollout.batch.worker import Worker, open_worker
from rollout.config import DEMO_PROMPTS
from rollout.errors import BadInput, BadLake, UnknownPart
from rollout.home import claim_folder, state_home
from rollout.lake.manifest import Manifest
from rollout.lake.paths import S3_SCHEME, LakePaths
from rollout.lake.staging import read_manifest, read_plan

IDLE_S = 30.0
"""Seconds without a shard after which a process gives its engine and session server up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReference:
    """A planned batch: where its plan is, and the options that are not as plan.json has them."""

    lake: str
    batch_id: str
    changed: dict[str, Any] = field(default_factory=dict)


def reference_to(batch: Batch) -> BatchReference:
    """The batch for other processes; its paths are whole, because those start in other directories."""
    options = batch.config.model_dump(mode="json")
    options |= {name: _whole_path(options[name]) for name in ("prompts", "model")}
    del options["lake"], options["batch_id"]
    changed = {name: value for name, value in options.items() if value != batch.plan.config.get(name)}
    return BatchReference(lake=batch.paths.uri, batch_id=batch.plan.batch_id, changed=changed)


def _whole_path(path: str | None) -> str | None:
    if path is None or path == DEMO_PROMPTS or path.startswith(S3_SCHEME):
        return path
    return str(Path(path).expanduser().absolute())


async def run_apart(reference: BatchReference, shard: int) -> Manifest:
    """Run one shard of the batch and stage it; one that is staged already starts nothing.

    The engine and the session server that it takes are kept in this process for the batch's next shard.

    Returns:
        The manifest that stands, which may be an earlier writer's.

    Raises:
        BadLake: there is no such batch in the lake as this machine sees it.
        BadInput: what the batch asks for cannot be had here. Both name this machine.
        RolloutLakeError: as Worker.run and open_worker.
    """
    staged = read_manifest(LakePaths(reference.lake), reference.batch_id, shard)
    if staged is not None:
        return staged
    running = asyncio.run_coroutine_threadsafe(_held().run(reference, shard), _loop())
    return await asyncio.wrap_future(running)


class HeldWorker:
    """The worker of the batch that this process runs shards of, one at a time.

    Starting an engine may take longer than a shard, so it stays until nothing comes for IDLE_S seconds, a shard
    fails or another batch comes. All of it happens in one loop, whose thread lives as long as the process.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._open = AsyncExitStack()
        self._reference: BatchReference | None = None
        self._worker: Worker | None = None
        self._waiting: asyncio.Task[None] | None = None

    async def run(self, reference: BatchReference, shard: int) -> Manifest:
        """Run the shard; errors as run_apart."""
        async with self._turn:
            if self._waiting is not None:
                self._waiting.cancel()
            try:
                manifest = await (await self._get(reference)).run(shard, BatchProgress())
            except BaseException:
                await self._close()
                raise
            self._waiting = asyncio.create_task(self._close_when_idle())
            return manifest

    async def _get(self, reference: BatchReference) -> Worker:
        if self._worker is None or self._reference != reference:
            await self._close()
            batch = await load_batch(reference)
            home = state_home()
            logs = self._open.enter_context(claim_folder(home / "logs" / reference.batch_id, "worker"))
            self._worker = await self._open.enter_async_context(open_worker(batch, logs=logs, spools=home / SPOOLS))
            self._reference = reference
        return self._worker

    async def _close(self) -> None:
        self._worker = None
        await self._open.aclose()

    async def _close_when_idle(self) -> None:
        await asyncio.sleep(self._idle_s)
        async with self._turn:
            await self._close()


async def load_batch(reference: BatchReference) -> Batch:
    """The batch as this machine plans it, which is as its plan.json says.

    Raises:
        BadInput: it is not, or cannot be planned here; names this machine.
    """
    try:
        if read_plan(LakePaths(reference.lake), reference.batch_id) is None:
            raise BadLake(
                f"{reference.lake} has no plan of batch {reference.batch_id}: a lake on a disk must be one folder "
                "that all machines share; else use s3://"
            )
        given = {**reference.changed, "lake": reference.lake, "batch_id": reference.batch_id}
        return await prepare(given, RunOrigin.now())
    except UnknownPart as error:
        raise UnknownPart(f"on {platform.node()}: {error}; ray_modules brings modules of yours along") from error
    except BadInput as error:
        raise type(error)(f"on {platform.node()}: {error}") from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="shards", daemon=True).start()
    return loop


@cache
def _held() -> HeldWorker:
    return HeldWorker()
