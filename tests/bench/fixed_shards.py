"""The real batch flow with shards that roll nothing out, to be run as a process of its own:

    python tests/bench/fixed_shards.py MARKS tasks|plain OPTIONS

A shard's body writes fixed rows, which are no rollouts: what is left is the flow, its lake and Prefect.
`tasks` runs it as a user would, on the server of PREFECT_API_URL; `plain` calls the functions behind the
flow and its tasks. OPTIONS are the batch's, as JSON. CPU and wall seconds, API calls and the greatest
memory go to MARKS, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from lake_batch import NOW, stamp_rows

from rollout.identity import sample_id
from rollout.lake.planfile import ShardPlan
from rollout.lake.schema import rows_to_table
from rollout.sample import Sample, Status

Marks = dict[str, Any]
TASKS = ("plan_batch", "write_plan", "start_worker", "roll_out_shard", "check_shard", "publish")


class FixedShards:
    """Stands in for the worker and for the checkers: the same rows for every rollout, but for what numbers it."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        sample = Sample(
            index=0,
            prompt=[{"role": "user", "content": "1+1"}],
            tokens_T=np.arange(64, dtype=np.int32),
            response="fixed",
            response_length=16,
            loss_mask_R=np.ones(16, np.int8),
            rollout_log_probs_R=np.full(16, -0.5),
            status=Status.COMPLETED,
            reward=1.0,
        )
        self._sample = stamp_rows(batch.plan, 0, [sample])

    async def run(self, shard: int, progress: Any) -> Any:
        cut = self._batch.plan.shards[shard]
        manifest = await asyncio.to_thread(self._stage, cut)
        progress.rollouts_done += cut.n_rollouts
        return manifest

    async def check(self, batch: Any, shard: int) -> Any:
        return await asyncio.to_thread(self._check, batch.plan.shards[shard])

    def _stage(self, cut: ShardPlan) -> Any:
        from rollout.lake.staging import stage_shard

        batch = self._batch
        return stage_shard(batch.paths, batch.plan, cut.shard, self._samples(cut), self._tapes(cut), {})

    def _check(self, cut: ShardPlan) -> Any:
        from rollout.batch.check import ShardCheck
        from rollout.batch.summary import exchange_facts, sample_facts
        from rollout.lake.staging import read_manifest

        plan = self._batch.plan
        common = {"batch_id": plan.batch_id, "check": "replay", "verdict": "equal", "paths": [], "created_at": NOW}
        rows = [{**common, "index": index, "rollout_key": index, "schema_version": 1} for index in cut.indexes]
        manifest = read_manifest(self._batch.paths, plan.batch_id, cut.shard)
        assert manifest is not None
        return ShardCheck(
            manifest=manifest,
            parity=rows_to_table(rows, "parity"),
            facts=sample_facts(self._samples(cut)),
            exchanges=exchange_facts(self._tapes(cut)),
        )

    def _samples(self, cut: ShardPlan) -> pa.Table:
        plan, n = self._batch.plan, cut.n_rollouts
        per_group = plan.config["n_samples_per_prompt"]
        columns = {
            "index": list(cut.indexes),
            "rollout_key": list(cut.indexes),
            "group_index": [index // per_group for index in cut.indexes],
            "sample_id": [sample_id(plan.batch_id, index, 0) for index in cut.indexes],
            "shard": [cut.shard] * n,
        }
        table = self._sample.take([0] * n)
        for name, values in columns.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
        return table

    def _tapes(self, cut: ShardPlan) -> pa.Table:
        common = {"batch_id": self._batch.plan.batch_id, "attempt": 0, "seq": -1, "session": "{}", "schema_version": 1}
        rows = [{**common, "index": index, "session_id": f"s{index}"} for index in cut.indexes]
        return rows_to_table(rows, "trajectories")


async def run(marks: Marks, side: str, options: dict[str, Any]) -> None:
    from flows.server import prefect_api

    async with prefect_api():
        import flows.batch

        flow = _with_fixed_shards() if side == "tasks" else _without_prefect()
        with _counting(marks):
            started, cpu = time.monotonic(), time.process_time()
            await flow(**options)
            if side == "tasks":
                await flows.server._drain()
            marks |= {"wall_s": time.monotonic() - started, "cpu_s": time.process_time() - cpu}
    marks["peak_mb"] = _peak_mb()


def _peak_mb() -> float:
    """The greatest resident memory of this process itself: ru_maxrss begins with what its parent had at the fork."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def _with_fixed_shards() -> Any:
    import flows.batch
    import tasks.engine

    standing: list[FixedShards] = []

    @asynccontextmanager
    async def open_worker(batch: Any, **_: Any) -> AsyncIterator[FixedShards]:
        standing.append(FixedShards(batch))
        yield standing[-1]

    class Checkers:
        async def check(self, batch: Any, shard: int) -> Any:
            return await standing[-1].check(batch, shard)

    tasks.engine.open_worker = open_worker  # type: ignore[assignment]
    flows.batch.checkers = lambda: contextlib.nullcontext(Checkers())  # type: ignore[assignment]
    return flows.batch.rollout_batch


def _without_prefect() -> Any:
    from prefect.logging import disable_run_logger

    import flows.batch

    flow = _with_fixed_shards().fn
    for name in TASKS:
        setattr(flows.batch, name, getattr(flows.batch, name).fn)
    flows.batch.progress_artifact = lambda progress: contextlib.nullcontext()  # type: ignore[assignment]

    async def report(*_: Any) -> None:
        """The artifacts are Prefect's."""

    flows.batch.report = report  # type: ignore[assignment]
    flows.batch.tell = lambda *_, **__: None  # type: ignore[assignment]

    async def plain(**options: Any) -> Any:
        with disable_run_logger():
            return await flow(**options)

    return plain


@contextmanager
def _counting(marks: Marks) -> Iterator[None]:
    """Count every HTTP request of this process; events have a websocket of their own."""
    marks["calls"] = 0
    real = httpx.AsyncHTTPTransport.handle_async_request, httpx.HTTPTransport.handle_request

    async def handle_async(self: Any, request: httpx.Request) -> httpx.Response:
        marks["calls"] += 1
        return await real[0](self, request)

    def handle(self: Any, request: httpx.Request) -> httpx.Response:
        marks["calls"] += 1
        return real[1](self, request)

    httpx.AsyncHTTPTransport.handle_async_request = handle_async  # type: ignore[method-assign]
    httpx.HTTPTransport.handle_request = handle  # type: ignore[method-assign]
    yield


if __name__ == "__main__":
    target, side, given = sys.argv[1:]
    found: Marks = {}
    asyncio.run(run(found, side, json.loads(given)))
    Path(target).write_text(json.dumps(found))
