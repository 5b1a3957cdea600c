"""What one process needs to run shards: an engine, a session server of its own, and the loaded parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from rollout.agents.contract import load_agents
from rollout.batch.canary import in_canary, require_unstaged
from rollout.batch.engines import EnginesInUse, Say, open_engines
from rollout.batch.output import contained_output
from rollout.batch.plan import shard_inputs, shard_refusals
from rollout.batch.prepare import Batch
from rollout.batch.progress import BatchProgress
from rollout.batch.sessions import session_server
from rollout.batch.shard import TRIED_AGAIN, ShardResult, run_shard
from rollout.batch.spool import Spool, open_spool
from rollout.batch.streak import FailureStreak
from rollout.columns import BatchStamp
from rollout.config import BatchConfig
from rollout.errors import BadConfig, CanaryFailed, SessionRefused
from rollout.generate import RolloutResult, RunContext, session_settings
from rollout.lake.manifest import Manifest
from rollout.lake.staging import stage_shard
from rollout.reaper import watch_this_process
from rollout.rewards import load_reward
from rollout.session.client import SessionClient


class Worker:
    """Runs shards of one batch. No dataclass: it is handed to Prefect tasks, which walk through those."""

    def __init__(self, batch: Batch, context: RunContext, engines: EnginesInUse, spools: Path) -> None:
        self.batch, self.context, self._engines, self._spools = batch, context, engines, spools
        self._streak = FailureStreak(batch.config.max_failed_in_a_row)

    async def run(self, shard: int, progress: BatchProgress) -> Manifest:
        """Run one shard's rollouts and stage them; the manifest that stands may be an earlier writer's.

        What an earlier run of the shard finished on this machine is in its spool and not run again.

        Raises:
            CanaryFailed: a group of the canary did not go well; the shard is not staged and its spool dropped.
            FailedInARow: too many rollouts of this worker failed one after another; the shard is not staged.
            EngineError, SessionUnreachable: engine or session server is gone. Its rollouts are no failures
                to keep: the shard is not staged, and the batch goes on from here when it is run again.
            SchemaBreach, InvalidSample: a bug of this package; nothing is staged.
        """
        plan = self.batch.plan
        spool = await asyncio.to_thread(self._open_spool, shard)
        with spool:
            result = await self._roll_out(shard, spool, progress)
            if self._in_canary(shard):
                await self._require_canary(result, spool)
            manifest = await asyncio.to_thread(
                stage_shard, self.batch.paths, plan, shard, result.samples, result.trajectories, result.counts
            )
            await asyncio.to_thread(spool.remove)
        return manifest

    def _in_canary(self, shard: int) -> bool:
        return in_canary(self.batch.plan.shards[shard], self.batch.config.canary)

    async def _require_canary(self, result: ShardResult, spool: Spool) -> None:
        try:
            require_unstaged(result.samples, self.batch.config.canary)
        except CanaryFailed:
            await asyncio.to_thread(spool.remove)
            raise

    def _open_spool(self, shard: int) -> Spool:
        """The shard's spool. A canary that was stopped after a failure is run anew: that failure may be mended."""
        plan = self.batch.plan
        spool = open_spool(self._spools, plan, shard)
        if self._in_canary(shard) and any(rows.samples.column("failure")[0].is_valid for rows in spool.rollouts):
            spool.remove()
            return open_spool(self._spools, plan, shard)
        return spool

    async def _roll_out(self, shard: int, spool: Spool, progress: BatchProgress) -> ShardResult:
        def finished(rollout: RolloutResult) -> None:
            progress.rollout_done(rollout)
            self._streak.count(rollout)

        plan = self.batch.plan
        stamp = BatchStamp(
            batch_id=plan.batch_id,
            run_date=plan.run_date,
            shard=shard,
            engine=self.context.engine,
            created_at=datetime.now(UTC),
            derived_from=plan.derived_from,
        )
        progress.rollouts_kept(spool.rollouts)
        result = await run_shard(
            shard_inputs(plan, self.batch.rows, shard),
            refused=shard_refusals(plan, self.batch.rows, shard),
            context=self.context,
            stamp=stamp,
            spool=spool,
            progress=finished,
        )
        if set(result.counts["failures"]) & set(TRIED_AGAIN):
            await self.check_children()
        return result

    @property
    def engine_urls(self) -> list[str]:
        """The batch's engines, to be asked what they are."""
        return self._engines.urls

    async def check_children(self) -> None:
        """Make sure after failures that engine and session server are there.

        Raises:
            EngineError, SessionUnreachable: one is gone.
        """
        await self._engines.check()
        await check_settings(self.context.sessions, self.batch.config)


@asynccontextmanager
async def open_worker(batch: Batch, *, logs: Path, spools: Path, say: Say | None = None) -> AsyncIterator[Worker]:
    """Engine and session server for `batch`, both ended when the block is left.

    Args:
        logs: folder for the children's stderr and for what agents print.
        spools: folder on a local disk for the finished rollouts of shards that are not staged yet.
        say: told how far an engine is that takes long to start.

    Raises:
        BadCheckpoint, UnknownPart, BadConfig: what the batch asks for cannot be had.
        ChildFailed: a child did not start.
    """
    config = batch.config
    watch_this_process()
    async with (
        open_engines(batch, logs=logs, say=say) as engines,
        session_server(engines.urls, batch.tokenizer, config, log=logs / "session.log") as sessions,
    ):
        agents = load_agents(batch.plan.agents, config.session_version, config.agent_command)
        reward = None if config.reward is None else load_reward(config.reward, config.reward_key)
        facts = await engines.ready()
        await check_settings(sessions, config)
        context = RunContext(
            config=config,
            sessions=sessions,
            agents=agents,
            reward=reward,
            engine=facts,
            slots=asyncio.Semaphore(config.concurrency),
            outages=engines.outages,
        )
        with contained_output(logs / "agents.log"):
            yield Worker(batch, context, engines, spools)


async def check_settings(sessions: SessionClient, config: BatchConfig) -> None:
    """Open one session as every rollout will, so that a setting that is refused costs no rollout."""
    try:
        probe = await sessions.open(session_settings(config, 0, 0))
    except SessionRefused as error:
        raise BadConfig(f"the session server refuses the batch's settings: {error.message}") from error
    await sessions.delete(probe.session_id)
