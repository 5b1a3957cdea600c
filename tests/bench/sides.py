"""The two sides of the flow's ratio, and Prefect by itself, each to be run as a process of its own:

    python tests/bench/sides.py flow|bare|prefect MARKS ARGUMENT...

`flow` is the command `rollout run ARGUMENT...` with clocks around its steps. `bare` runs the rollouts
of the same options without Prefect, lake and parity, in memory. `prefect` runs the flow's own shard
tasks with empty bodies. Each writes what its clocks showed (`time.monotonic()`) as JSON to MARKS.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

Marks = dict[str, Any]


def run_flow(marks: Marks, arguments: list[str]) -> None:
    """The command as a user starts it; functions are wrapped in clocks, none is replaced."""
    import flows.server
    import rollout.batch.progress
    import rollout.batch.shard
    import rollout.batch.worker
    from rollout.__main__ import main

    real_api, real_watch = flows.server.prefect_api, rollout.batch.progress.watch

    def watch(progress: Any) -> None:
        marks["progress"] = progress
        real_watch(progress)

    @asynccontextmanager
    async def prefect_api() -> AsyncIterator[None]:
        marks["prefect_starts"] = time.monotonic()
        async with real_api():
            marks["prefect_answers"] = time.monotonic()
            _clock_flow(marks)  # imports Prefect
            marks["prefect_started"] = time.monotonic()
            yield
            marks["flow_ended"] = time.monotonic()
        marks["prefect_ended"] = time.monotonic()

    rollout.batch.progress.watch = watch
    flows.server.prefect_api = prefect_api
    rollout.batch.shard._make_rows = _clocked(marks, "rows", rollout.batch.shard._make_rows)
    rollout.batch.worker.stage_shard = _clocked(marks, "stage", rollout.batch.worker.stage_shard)
    sys.argv = ["rollout", "run", *arguments]
    try:
        main()
    finally:
        if progress := marks.pop("progress", None):
            marks |= {"first_rollout": progress.first_rollout, "last_rollout": progress.last_rollout}
            marks |= {"turns": progress.turns, "tokens": progress.tokens, "verdicts": dict(progress.verdicts)}


def _clock_flow(marks: Marks) -> None:
    import flows.batch  # noqa: F401 - so that its import counts as Prefect's start
    import tasks.engine
    import tasks.publish

    real_worker, real_publish = tasks.engine.open_worker, tasks.publish.publish_batch

    @asynccontextmanager
    async def open_worker(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        marks["children_start"] = time.monotonic()
        async with real_worker(*args, **kwargs) as worker:
            marks["children_started"] = time.monotonic()
            yield worker
            marks["checked"] = time.monotonic()
        marks["children_ended"] = time.monotonic()

    @functools.wraps(real_publish)
    def publish(*args: Any) -> Any:
        # Nothing else runs meanwhile, so the whole process's CPU is the publication's.
        marks["publish_starts"], cpu = time.monotonic(), time.process_time()
        published = real_publish(*args)
        marks["published"], marks["publish_cpu"] = time.monotonic(), time.process_time() - cpu
        return published

    tasks.engine.open_worker, tasks.publish.publish_batch = open_worker, publish


def _clocked(marks: Marks, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, which runs in threads, with the wall and CPU seconds of all its calls added up in `marks`."""
    lock = Lock()
    marks[f"{name}_wall"] = marks[f"{name}_cpu"] = 0.0

    @functools.wraps(real)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.monotonic(), time.thread_time()
        value = real(*args, **kwargs)
        wall, cpu = time.monotonic() - wall, time.thread_time() - cpu
        with lock:
            marks[f"{name}_wall"] += wall
            marks[f"{name}_cpu"] += cpu
        return value

    return clocked


def run_bare(marks: Marks, arguments: list[str]) -> None:
    """The same rollouts: the same children, inputs, seeds and generate(), asyncio alone, results in memory."""
    options, folder = json.loads(arguments[0]), Path(arguments[1])
    results = asyncio.run(_roll_out(marks, options, folder))
    marks["ended"] = time.monotonic()
    marks["turns"] = sum(result.turns for result in results)
    marks["tokens"] = sum(result.sampled_tokens for result in results)
    _write_rows(results, folder / "samples.arrow")
    marks["written"] = time.monotonic()


async def _roll_out(marks: Marks, options: dict[str, Any], folder: Path) -> list[Any]:
    from rollout.agents.contract import load_agents
    from rollout.batch.model import fetched_directory, model_digest
    from rollout.batch.plan import make_plan, shard_inputs
    from rollout.batch.prompts import parse_prompts, prompt_bytes
    from rollout.batch.sessions import session_server
    from rollout.config import make_config
    from rollout.engine.embedded import start_embedded
    from rollout.generate import RunContext, generate
    from rollout.rewards import load_reward

    config = make_config(**options)
    data = prompt_bytes(config.prompts)
    rows = parse_prompts(data, config.prompts, skip_bad=False)
    model = await fetched_directory(config)
    digest = await model_digest(config, model)
    plan = make_plan(
        config,
        rows=rows,
        model_digest=digest,
        created_at=datetime.now(UTC),
        flow_run_id="0" * 32,
        deployment=None,
        slot=None,
    )
    inputs = iter([given for cut in plan.shards for given in shard_inputs(plan, rows, cut.shard)])
    marks["children_start"] = time.monotonic()
    engine = await start_embedded(None, log=folder / "engine.log")
    try:
        async with session_server(engine.url, model, config, log=folder / "session.log") as sessions:
            context = RunContext(
                config=config,
                sessions=sessions,
                agents=load_agents(plan.agents, config.session_version),
                reward=load_reward(str(config.reward)),
                engine={},
                slots=asyncio.Semaphore(config.concurrency),
            )
            marks["children_started"] = marks["first_rollout"] = time.monotonic()
            results: list[Any] = []

            async def work() -> None:
                for given in inputs:
                    results.append(await generate(given, context))

            async with asyncio.TaskGroup() as group:
                for _ in range(config.concurrency):
                    group.create_task(work())
            marks["last_rollout"] = time.monotonic()
    finally:
        engine.stop()
    return results


def _write_rows(results: list[Any], file: Path) -> None:
    """For the comparison, after the clock has stopped."""
    import pyarrow as pa

    from rollout.batch.shard import shard_result
    from rollout.columns import BatchStamp

    stamp = BatchStamp(batch_id="bare", run_date=date(2026, 1, 1), shard=0, engine={}, created_at=datetime.now(UTC))
    samples = shard_result(results, stamp).samples
    with pa.ipc.new_file(file, samples.schema) as writer:
        writer.write_table(samples)


def run_prefect(marks: Marks, arguments: list[str]) -> None:
    """The flow's two tasks per shard, its log lines and its progress artifact, and nothing inside."""
    asyncio.run(_prefect(marks, int(arguments[0])))


async def _prefect(marks: Marks, shards: int) -> None:
    from flows.server import prefect_api

    marks["prefect_starts"] = time.monotonic()
    async with prefect_api():
        from prefect import flow

        from rollout.batch.progress import BatchProgress
        from rollout.lake.schema import rows_to_table
        from tasks.parity import check_shard
        from tasks.progress import progress_artifact
        from tasks.rollout import roll_out_shard

        marks["prefect_started"] = time.monotonic()
        progress = BatchProgress(batch_id="empty", shards=shards, rollouts=shards)
        done = SimpleNamespace(parity=rows_to_table([], "parity"))

        class Empty:
            async def run(self, shard: int, progress: BatchProgress) -> Any:
                return SimpleNamespace(counts={})

            async def check(self, batch: Any, shard: int) -> Any:
                return done

        async def one(shard: int) -> None:
            await roll_out_shard(Empty(), shard, progress)
            await check_shard(Empty(), None, shard)

        @flow(name="empty-batch", persist_result=False)
        async def empty_batch() -> None:
            async with progress_artifact(progress), asyncio.TaskGroup() as group:
                for shard in range(shards):
                    group.create_task(one(shard))

        await empty_batch()
        marks["flow_ended"] = time.monotonic()
    marks["prefect_ended"] = time.monotonic()


SIDES: dict[str, Callable[[Marks, list[str]], None]] = {"flow": run_flow, "bare": run_bare, "prefect": run_prefect}

if __name__ == "__main__":
    side, target, *rest = sys.argv[1:]
    found: Marks = {}
    try:
        SIDES[side](found, rest)
    finally:
        Path(target).write_text(json.dumps(found))
