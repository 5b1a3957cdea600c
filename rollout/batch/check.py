"""The check of one staged shard, in a process of its own: digests, parity of every rollout, and counts.

The shard is read back from the lake as a reader would, so what is judged is what would be published.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import polars as pl
import pyarrow as pa

from rollout.batch.prepare import Batch
from rollout.batch.summary import Summary, exchange_facts, sample_facts, summarise
from rollout.config import BatchConfig
from rollout.errors import StagedChanged
from rollout.lake.manifest import Manifest
from rollout.lake.paths import LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.staging import read_manifest, read_staged, verify
from rollout.parity.validate import summarize, validate_tables
from rollout.process import die_with_parent
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import load_tokenizer

PROCESSES = max(1, min(2, (os.cpu_count() or 1) - 1))
"""Processes that replay tapes; replay is pure Python, so threads would take turns. Each takes 2 s of CPU
to start, and one keeps up with an embedded engine on the other core many times over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCheck:
    """A shard's rows of the parity table, and what the summary needs of its samples and exchanges.

    `manifest` names the files that were judged: they and no others may be published.
    """

    manifest: Manifest
    parity: pa.Table
    facts: pl.DataFrame
    exchanges: pl.DataFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckJob:
    """A staged shard by reference; `first` and `end` bound the indexes that must be there."""

    lake: str
    batch_id: str
    shard: int
    first: int
    end: int
    tokenizer: str
    renderer: str
    engine: str


def job_of(config: BatchConfig, plan: Plan, shard: int, tokenizer: Path) -> CheckJob:
    """The check of one shard of a planned batch with the tokenizer of a directory; `config.lake` says where it is."""
    cut = plan.shards[shard]
    return CheckJob(
        lake=config.lake,
        batch_id=plan.batch_id,
        shard=shard,
        first=cut.indexes.start,
        end=cut.indexes.stop,
        tokenizer=str(tokenizer),
        renderer=config.renderer,
        engine=config.engine,
    )


class Checkers:
    """A pool of spawned processes that check shards; they end with this one, whatever ends it."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    async def check(self, batch: Batch, shard: int) -> ShardCheck:
        """Verdicts and counts of a staged shard.

        Raises:
            StagedChanged: a file no longer has its manifest's digest, or the manifest is gone.
        """
        job = job_of(batch.config, batch.plan, shard, batch.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._pool, check_shard, job)


@contextmanager
def checkers(processes: int = PROCESSES) -> Iterator[Checkers]:
    """Checkers for as long as the block lasts. Processes start with the first shard, from the calling thread."""
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_become_checker, initargs=(os.getpid(),)
    )
    try:
        yield Checkers(pool)
    except BaseException:
        _kill(pool)  # a check only reads, and a cancelled batch has no time to wait for it
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _kill(pool: ProcessPoolExecutor) -> None:
    """What `kill_workers` does from Python 3.14 on."""
    for process in list((pool._processes or {}).values()):
        process.kill()


def _become_checker(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent ends us


def check_shard(job: CheckJob) -> ShardCheck:
    """Check one shard in this process; raises StagedChanged."""
    paths = LakePaths(job.lake)
    manifest = read_manifest(paths, job.batch_id, job.shard)
    if manifest is None:
        raise StagedChanged(f"the manifest of shard {job.shard} of batch {job.batch_id} is gone")
    verify(paths, manifest)
    samples, trajectories = read_staged(paths, manifest)
    parity = validate_tables(
        samples,
        trajectories,
        _tito(job.tokenizer, job.renderer),
        batch_id=job.batch_id,
        engine=job.engine,
        created_at=datetime.now(UTC),
        indexes=range(job.first, job.end),
    )
    return ShardCheck(
        manifest=manifest, parity=parity, facts=sample_facts(samples), exchanges=exchange_facts(trajectories)
    )


@lru_cache(maxsize=2)
def _tito(tokenizer: str, renderer: str) -> Tito:
    return Tito(load_tokenizer(tokenizer), renderer)


def join_facts(checks: list[ShardCheck]) -> pl.DataFrame:
    """One small row per sample of the batch (rollout.batch.summary.sample_facts)."""
    return pl.concat([check.facts for check in checks])


def join_checks(checks: list[ShardCheck], live: pa.Table | None = None) -> tuple[pa.Table, Summary]:
    """The batch's parity rows, those of live runs last, and its summary, from the checks of all its shards."""
    parity = pa.concat_tables([*(check.parity for check in checks), *([] if live is None else [live])])
    exchanges = pl.concat([check.exchanges for check in checks])
    return parity, summarise(join_facts(checks), exchanges, summarize(parity))
