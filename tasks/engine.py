"""The task that starts what rollouts need: an engine and the worker's session server."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollout.batch.engines import Say
from rollout.batch.prepare import Batch
from rollout.batch.spool import SPOOLS
from rollout.batch.worker import Worker, open_worker


@task(name="start engine and sessions", cache_policy=NO_CACHE, persist_result=False)
async def start_worker(stack: AsyncExitStack, batch: Batch, home: Path, say: Say) -> Worker:
    """Start both children; `stack` ends them with the flow, however that ends. `home` is for logs and spools."""
    logs = home / "logs" / batch.plan.batch_id
    return await stack.enter_async_context(open_worker(batch, logs=logs, spools=home / SPOOLS, say=say))
