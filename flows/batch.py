"""The batch flow: plan, roll out and check shard by shard, publish or quarantine, report."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from flows.options import flow_docstring, flow_signature
from flows.stopping import stoppable
from rollout import __version__
from rollout.batch.canary import canary_shards, require_staged
from rollout.batch.check import ShardCheck, checkers, join_checks, join_facts
from rollout.batch.costs import Costs, batch_costs, held_gpus
from rollout.batch.ending import Ending
from rollout.batch.prepare import Batch
from rollout.batch.progress import BatchProgress, watched
from rollout.batch.spool import SPOOLS, remove_batch_spools, remove_spools
from rollout.batch.summary import Summary, batch_row
from rollout.batch.worker import Worker
from rollout.errors import BatchIncomplete, CanaryFailed, EngineError, FailedInARow, SessionUnreachable, ShardLost
from rollout.home import state_home
from rollout.lake.schema import BatchStatus
from rollout.lake.staging import staged_shards
from tasks.engine import start_worker
from tasks.events import tell
from tasks.gpus import gpus_held
from tasks.parity import check_shard, live_parity, parity_failure
from tasks.plan import plan_batch, write_plan
from tasks.progress import progress_artifact
from tasks.publish import publish, quarantine
from tasks.report import report
from tasks.rollout import roll_out_shard


async def rollout_batch(**options: Any) -> dict[str, Any]:
    started, progress = time.monotonic(), watched()
    batch = await plan_batch(options)
    _show_plan(batch, progress)
    if batch.visible is not None:
        remove_batch_spools(state_home() / SPOOLS, batch.plan)
        return _result(batch, "published", batch.visible, already=True)
    async with progress_artifact(progress):
        checks, live = await _shards(batch, progress)
    parity, summary = join_checks(checks, live)
    costs = batch_costs(summary, batch, progress.seconds_held)
    ending = Ending(batch, summary, costs, parity, join_facts(checks))
    manifests = {check.manifest.shard: check.manifest for check in checks}
    progress.summary = summary
    failure = parity_failure(batch, parity)
    if failure is not None:
        row = _row(batch, summary, costs, "quarantined", time.monotonic() - started)
        await quarantine(batch, manifests, parity, row, str(failure))
        tell(batch, "quarantined", reason=str(failure))
        await report(ending, f"Quarantined: {failure}")
        raise failure
    progress.phase = "publishing"
    row = _row(batch, summary, costs, "published", time.monotonic() - started)
    published = await publish(batch, manifests, parity, row)
    tell(batch, "published", version=published.version)
    how = f"Published as version {published.version} of the samples table."
    await report(ending, how, published.version)
    return _result(batch, "published", published.version, already=published.already)


rollout_batch.__signature__ = flow_signature()  # type: ignore[attr-defined]
rollout_batch.__doc__ = flow_docstring("Run one batch of rollouts and publish it.")
rollout_batch = flow(name="rollout-batch", persist_result=False)(stoppable(rollout_batch))


def _show_plan(batch: Batch, progress: BatchProgress) -> None:
    plan = batch.plan
    progress.batch_id, progress.shards, progress.rollouts = plan.batch_id, len(plan.shards), plan.n_rollouts
    get_run_logger().info(
        "batch %s: %d rollouts in %d shards, config hash %s",
        plan.batch_id,
        plan.n_rollouts,
        len(plan.shards),
        plan.config_hash,
    )


async def _shards(batch: Batch, progress: BatchProgress) -> tuple[list[ShardCheck], pa.Table | None]:
    """Roll out what is not staged, check every shard and run what live parity chooses again (its rows, or null).

    Engine and session server end with this call.
    """
    staged = staged_shards(batch.paths, batch.plan.batch_id) if batch.planned else {}
    for shard in staged:
        progress.shards_staged += 1
        progress.rollouts_done += batch.plan.shards[shard].n_rollouts
        remove_spools(state_home() / SPOOLS, batch.plan, shard)  # a kill may have come between staging and this
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(checkers())
        worker = None
        left = len(staged) < len(batch.plan.shards)
        if batch.config.task_runner == "local" and (left or batch.config.parity_live_fraction > 0):
            worker = await _start_worker(stack, batch, progress)
        await write_plan(batch)
        roll_out = await _shard_runner(stack, batch, worker, progress) if left else None
        progress.first_rollout = time.monotonic()

        async def one(shard: int) -> ShardCheck:
            if shard not in staged:
                assert roll_out is not None
                await roll_out(shard)
                progress.shards_staged += 1
            check = await check_shard(pool, batch, shard)
            progress.shards_checked += 1
            progress.verdicts.update(check.parity.column("verdict").to_pylist())
            return check

        checks = await _in_order(batch, progress, set(staged), one)
        return checks, await _live(stack, batch, worker, checks, progress)


async def _start_worker(stack: AsyncExitStack, batch: Batch, progress: BatchProgress) -> Worker:
    n_gpus = held_gpus(batch.config) or 0
    await stack.enter_async_context(gpus_held(n_gpus, partial(_show_start, progress)))
    progress.phase = "starting the engine"
    stack.enter_context(progress.holding())
    return await start_worker(stack, batch, state_home(), partial(_show_start, progress))


async def _shard_runner(
    stack: AsyncExitStack, batch: Batch, worker: Worker | None, progress: BatchProgress
) -> Callable[[int], Awaitable[None]]:
    """What rolls out a shard: a Ray cluster, or the worker here with as many at once as keep its engine full."""
    if batch.config.task_runner == "ray":
        from tasks.ray import ray_shards  # Ray is an extra

        progress.phase = "connecting to Ray"
        return (await stack.enter_async_context(ray_shards(batch, progress))).roll_out
    slots = asyncio.Semaphore(_shards_at_once(batch))

    async def here(shard: int) -> None:
        assert worker is not None
        async with slots:
            await roll_out_shard(worker, shard, progress)

    return here


async def _live(
    stack: AsyncExitStack, batch: Batch, worker: Worker | None, checks: list[ShardCheck], progress: BatchProgress
) -> pa.Table | None:
    """Live parity's rows; null where nothing is chosen, and of a batch that its replays hold back already."""
    if batch.config.parity_live_fraction == 0 or parity_failure(batch, join_checks(checks)[0]) is not None:
        return None
    if worker is None:  # the shards ran apart
        worker = await _start_worker(stack, batch, progress)
    progress.phase = "live parity"
    try:
        return await live_parity(worker, checks, progress)
    except BaseExceptionGroup as errors:
        first = _first(errors)
        stopped = _stopped(batch, first)
        raise stopped from (None if stopped is first else first)


def _show_start(progress: BatchProgress, text: str) -> None:
    progress.phase = f"starting the engine: {text}"
    get_run_logger().info(text)


async def _in_order(
    batch: Batch, progress: BatchProgress, staged: set[int], one: Callable[[int], Coroutine[Any, Any, ShardCheck]]
) -> list[ShardCheck]:
    """The checks of all shards, the canary's before any other shard is started."""
    numbers = [cut.shard for cut in batch.plan.shards]
    n_first = len(canary_shards(batch.plan, batch.config.canary))
    first, rest = numbers[:n_first], numbers[n_first:]
    checks: list[ShardCheck] = []
    if not staged.issuperset(rest):
        if first:
            progress.phase = "canary"
            checks = await _all_or_none(batch, [one(shard) for shard in first])
            _require_canary(batch, checks)
        first = []
    progress.phase = "rolling out"
    return checks + await _all_or_none(batch, [one(shard) for shard in first + rest])


def _require_canary(batch: Batch, checks: list[ShardCheck]) -> None:
    try:
        require_staged([check.facts for check in checks], [check.parity for check in checks], batch.config.canary)
    except CanaryFailed as error:
        batch_id = batch.plan.batch_id
        raise CanaryFailed(
            f"batch {batch_id} stopped: {error}; its rows are staged and stay: `rollout run --batch-id {batch_id} "
            "--canary 0` goes on with them, or choose another batch id"
        ) from error


def _shards_at_once(batch: Batch) -> int:
    """Enough shards to keep the engine's slots full while the last rollouts of one still run."""
    n_first = len(canary_shards(batch.plan, batch.config.canary))
    smallest = min(cut.n_rollouts for cut in batch.plan.shards[n_first:] or batch.plan.shards)
    return 1 + -(-batch.config.concurrency // smallest)


async def _all_or_none(batch: Batch, shards: list[Any]) -> list[ShardCheck]:
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(shard) for shard in shards]
    except BaseExceptionGroup as errors:
        first = _first(errors)
        stopped = _stopped(batch, first)
        raise stopped from (None if stopped is first else first)
    return [task.result() for task in running]


def _stopped(batch: Batch, error: BaseException) -> BaseException:
    """What ends the batch, with how to go on where that is possible."""
    if isinstance(error, FailedInARow):
        tell(batch, "failing", reason=str(error))
    if isinstance(error, (EngineError, SessionUnreachable, FailedInARow, ShardLost)):
        return _incomplete(batch, error)
    if isinstance(error, CanaryFailed):
        batch_id = batch.plan.batch_id
        return CanaryFailed(
            f"batch {batch_id} stopped: {error}; nothing of that is staged: `rollout run --batch-id {batch_id}` "
            "runs it again, with `--canary 0` the batch goes on without a canary"
        )
    return error


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _incomplete(batch: Batch, error: BaseException) -> BatchIncomplete:
    batch_id, staged = batch.plan.batch_id, staged_shards(batch.paths, batch.plan.batch_id)
    return BatchIncomplete(
        f"batch {batch_id} stopped: {error}; {len(staged)} of {len(batch.plan.shards)} shards are staged, "
        f"`rollout run --batch-id {batch_id}` goes on"
    )


def _row(batch: Batch, summary: Summary, costs: Costs, status: BatchStatus, seconds_wall: float) -> dict[str, Any]:
    provenance = {
        "package": __version__,
        "python": platform.python_version(),
        "engine": batch.config.engine,
        "host": f"{platform.system().lower()}-{platform.machine()}, {os.cpu_count()} cpus",
        "flow_run_id": flow_run.id,
    }
    return batch_row(
        summary,
        status=status,
        plan=batch.plan,
        seconds_wall=seconds_wall,
        costs=costs.to_json(),
        provenance=provenance,
        created_at=datetime.now(UTC),
    )


def _result(batch: Batch, status: str, version: int, *, already: bool) -> dict[str, Any]:
    """References and counts only: a flow run's result is small whatever the batch's size."""
    return {
        "batch_id": batch.plan.batch_id,
        "lake": batch.paths.uri,
        "status": status,
        "version": version,
        "already": already,
        "rollouts": batch.plan.n_rollouts,
        "shards": len(batch.plan.shards),
    }
