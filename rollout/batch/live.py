"""The live runs of a batch: chosen rollouts once more, on their own session path and on the other.

They come when every shard is staged, so that nothing else asks the engine. Where it repeats itself only
alone they go one after another; elsewhere as many side by side as the batch had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout.agents.contract import load_agent
from rollout.batch.check import ShardCheck
from rollout.batch.plan import shard_inputs
from rollout.batch.progress import BatchProgress
from rollout.batch.repeats import Repeats, how_they_repeat
from rollout.batch.worker import Worker
from rollout.columns import SCHEMA_VERSION
from rollout.generate import Attempted, RunContext, repeat_attempt
from rollout.identity import SessionVersion
from rollout.lake.schema import rows_to_table
from rollout.lake.staging import read_staged
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.parity.live import CHECK, UNPROVABLE, LiveVerdict, Run, is_chosen, judge_live
from rollout.parity.rows import row_of, rows_of
from rollout.parity.validate import read_tape
from rollout.parity.verdict import OTHER
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """A rollout to run again: its input, its run as staged, and its rollout_key."""

    given: RolloutInput
    original: Run
    key: int


class LiveRuns:
    """Live parity of one batch, with the worker that ran it."""

    def __init__(self, worker: Worker, repeats: Repeats) -> None:
        self._worker, self._repeats = worker, repeats
        config = worker.batch.config
        self._tito = Tito(load_tokenizer(str(worker.batch.tokenizer)), config.renderer)
        self._own, self._other = worker.context, _on_other_path(worker)
        self._slots = asyncio.Semaphore(config.concurrency if repeats == "always" else 1)

    async def run(self, chosen: Sequence[_Chosen], progress: BatchProgress) -> pa.Table:
        """Rows of the parity table (check `live`), by index.

        Raises:
            EngineError, SessionUnreachable: engine or session server is gone.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(one, progress)) for one in chosen]
        return rows_to_table([task.result() for task in tasks], "parity")

    async def _one(self, one: _Chosen, progress: BatchProgress) -> dict[str, Any]:
        async with self._slots:
            started = time.perf_counter()
            verdict = await self._judge(one)
            seconds = time.perf_counter() - started
        progress.live_done += 1
        progress.verdicts[f"live {verdict.verdict}"] += 1
        return self._row(one, verdict, seconds)

    async def _judge(self, one: _Chosen) -> LiveVerdict:
        failure, needs = one.original.outcome.failure, self._other.agents[one.given.agent].needs
        if failure is not None and failure.type in UNPROVABLE:
            return LiveVerdict(verdict="not_comparable", reason=f"run_failed: the batch's own: {failure.type}")
        if needs not in (None, self._other.config.session_version):
            reason = f"needs_version: agent {one.given.agent!r} needs {needs}"
            return LiveVerdict(verdict="not_comparable", reason=reason)
        again, other = [await self._again(one, context) for context in (self._own, self._other)]
        if again is None or other is None:
            return LiveVerdict(verdict="not_comparable", reason="run_failed: a live run left no tape")
        config = self._own.config
        return await asyncio.to_thread(
            judge_live,
            one.original,
            again,
            other,
            self._tito,
            repeats_live=self._repeats != "never",
            repeats_in_batch=self._repeats == "always" or (self._repeats == "alone" and config.concurrency == 1),
        )

    async def _again(self, one: _Chosen, context: RunContext) -> Run | None:
        """One live run, finished with the reward of the batch's own run: nothing is scored twice."""
        last = await repeat_attempt(one.given, context, one.original.outcome.attempt)
        if last.repeatable:
            await self._worker.check_children()
        if last.tape is None:
            return None
        return _finished(last, one.original.outcome)

    def _row(self, one: _Chosen, verdict: LiveVerdict, seconds: float) -> dict[str, Any]:
        version, engine = self._own.config.session_version, self._own.config.engine
        return {
            "batch_id": self._worker.batch.plan.batch_id,
            "index": one.given.index,
            "rollout_key": one.key,
            "check": CHECK,
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "paths": verdict.paths,
            "versions": f"{version}/{OTHER[version]}",
            "engine_a": engine,
            "engine_b": engine,
            "first_token": verdict.token,
            "max_ulp": verdict.max_ulp,
            "seconds": seconds,
            "created_at": datetime.now(UTC),
            "schema_version": SCHEMA_VERSION,
        }


def _on_other_path(worker: Worker) -> RunContext:
    """The worker's context with the other session version, all agents loaded: those that need one are told apart."""
    config = worker.context.config
    version: SessionVersion = OTHER[config.session_version]
    agents = {name: load_agent(name, config.agent_command) for name in worker.batch.plan.agents}
    return replace(worker.context, config=config.model_copy(update={"session_version": version}), agents=agents)


def _finished(last: Attempted, original: Outcome) -> Run:
    assert last.tape is not None
    outcome = last.outcome
    if last.collected.samples and outcome.failure is None:
        outcome.reward, outcome.reward_json = original.reward, original.reward_json
    return Run(tape=last.tape, outcome=outcome, rows=[row_of(row) for row in finish(last.collected.samples, outcome)])


async def run_live(worker: Worker, checks: Sequence[ShardCheck], progress: BatchProgress) -> pa.Table:
    """Run the batch's chosen rollouts again and judge them; raises as LiveRuns.run."""
    batch = worker.batch
    repeats = await how_they_repeat(worker.engine_urls, embedded=batch.config.engine == "embedded")
    fraction, seed = batch.config.parity_live_fraction, batch.config.seed
    chosen = {k for cut in batch.plan.shards for k in cut.indexes if is_chosen(seed, k, fraction)}
    progress.live, progress.live_done = len(chosen), 0
    live = await asyncio.to_thread(LiveRuns, worker, repeats)
    tables = []
    for check in sorted(checks, key=lambda check: check.manifest.shard):  # one shard's rows in memory at a time
        found = await asyncio.to_thread(_chosen_of, worker, check, chosen)
        tables.append(await live.run(found, progress))
    progress.live_done = progress.live  # refused prompt rows have no run and no row
    return pa.concat_tables(tables)


def _chosen_of(worker: Worker, check: ShardCheck, chosen: set[int]) -> list[_Chosen]:
    batch = worker.batch
    inputs = [one for one in shard_inputs(batch.plan, batch.rows, check.manifest.shard) if one.index in chosen]
    if not inputs:
        return []
    samples, trajectories = read_staged(batch.paths, check.manifest)
    return [_staged(given, samples, trajectories) for given in inputs]


def _staged(given: RolloutInput, samples: pa.Table, trajectories: pa.Table) -> _Chosen:
    """A rollout's run as the batch staged it; it has passed its replay, or the batch is held back anyway."""
    own = samples.filter(pc.equal(samples.column("index"), given.index))
    tape, outcome = read_tape(trajectories.filter(pc.equal(trajectories.column("index"), given.index)))
    rows = rows_of(own)
    return _Chosen(given=given, original=Run(tape=tape, outcome=outcome, rows=rows), key=rows[0]["rollout_key"])
