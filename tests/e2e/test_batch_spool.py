"""A batch killed at seeded moments runs no finished rollout twice, counted by what its engine was asked for."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import Rollout, Run
from faulty_proxy import FaultyProxy

from rollout.batch.spool import open_spool, peek_spool, spool_folder
from rollout.lake import LakePaths, scan_samples, scan_trajectories
from rollout.lake.staging import read_plan, staged_shards
from rollout.parity.projections import same_rows

CONCURRENCY = 2
BY_HAND = [int(os.environ["ROLLOUT_TEST_KILLS"])] if "ROLLOUT_TEST_KILLS" in os.environ else []
"""How many kills a run by hand wants, beside those of every run."""


@pytest.fixture
def proxy(engine):
    with FaultyProxy(engine.url).in_thread() as proxy:
        yield proxy


async def slow(request: dict[str, Any]) -> None:
    """No fault, but the pace of a real engine: the tiny one answers ten calls while pyarrow is still being loaded."""
    await asyncio.sleep(0.1)


def finished_indexes(lake: Path, home: Path) -> tuple[set[int], set[int]]:
    """The rollouts of staged shards, and those that only the spools have, as a restart will find them."""
    paths = LakePaths(lake)
    plan = read_plan(paths, "mine")
    if plan is None:
        return set(), set()
    staged = staged_shards(paths, "mine")
    spooled = set()
    for cut in plan.shards:
        if cut.shard not in staged and list(spool_folder(home / "spool", plan).glob(f"{cut.shard:04d}.*")):
            with open_spool(home / "spool", plan, cut.shard) as spool:
                spooled |= {rows.index for rows in spool.rollouts}
    return {index for shard in staged for index in plan.shards[shard].indexes}, spooled


def spooled_records(lake: Path, home: Path) -> int:
    """Rollouts in the spools of a running batch, which are only read: opening one would cut it."""
    plan = read_plan(LakePaths(lake), "mine")
    return 0 if plan is None else sum(len(peek_spool(home / "spool", plan, cut.shard)) for cut in plan.shards)


def wait_for_a_moment(run: Run, proxy: FaultyProxy, lake: Path, home: Path, n_calls: int) -> None:
    """Until so many more calls were made and a rollout has come into the spool of a shard that is not done."""
    before, end, n_calls = spooled_records(lake, home), time.monotonic() + 120, len(proxy.seen) + n_calls
    while run.process.poll() is None:
        if len(proxy.seen) >= n_calls and spooled_records(lake, home) not in (0, before):
            return
        assert time.monotonic() < end, "the batch does not go on"
        time.sleep(0.005)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(10, marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
        *(pytest.param(kills, marks=pytest.mark.timeout(60 * kills)) for kills in BY_HAND),
    ],
)
def test_no_finished_rollout_is_run_twice(
    quick_rollout: Rollout, finished, batch_command: list[str], proxy: FaultyProxy, tmp_path: Path, kills: int
):
    rng, lake = random.Random(20261202 + kills), tmp_path / "lake"
    command = [*batch_command, "--shard-size", 16, "--concurrency", CONCURRENCY]
    command += ["--engine", "external", "--engine-url", proxy.url]
    undisturbed = finished[0]
    if kills > 10:  # more rollouts than so many runs can finish
        command, undisturbed = [*command, "--n-samples-per-prompt", 2 * kills // 5], tmp_path / "undisturbed"
        quick_rollout.succeeds(*command, "--lake", undisturbed)
        proxy.seen.clear()
    command += ["--lake", lake]
    # About 100 turns, and what a kill throws away comes on top. A rollout takes up to four turns in the first
    # shard, two run at once: after ten calls some are finished, and ten runs do not end the batch.
    moments, n_spooled = [], 0
    proxy.fault = slow
    for _ in range(kills):
        run = quick_rollout.start(*command)
        wait_for_a_moment(run, proxy, lake, quick_rollout.home, rng.randint(10, 12))
        assert run.process.poll() is None, run.wait().stderr
        run.end(signal.SIGKILL)
        assert [] == run.left_over()
        staged, spooled = finished_indexes(lake, quick_rollout.home)
        moments.append((len(proxy.seen), staged | spooled))
        n_spooled = max(n_spooled, len(spooled))
    quick_rollout.succeeds(*command)

    assert [] == same_rows(*(scan_samples(path, batch="mine").collect().to_arrow() for path in (undisturbed, lake)))
    tapes = scan_trajectories(lake, batch="mine").filter(pl.col("seq") >= 0).collect()
    seeds = dict(tapes.group_by("index").agg("sampling_seed").iter_rows())
    for n_calls, finished_then in moments:
        later = {request["sampling_params"]["sampling_seed"] for request in proxy.seen[n_calls:]}
        again = sorted(index for index in finished_then if later & set(seeds.get(index, [])))
        assert [] == again, f"finished at call {n_calls} of {len(proxy.seen)} and run again"
    assert n_spooled > 0, "no kill came while a shard was half finished"
    assert proxy.most_running <= CONCURRENCY
    assert not list((quick_rollout.home / "spool").rglob("mine/**/*.spool"))


def test_the_next_shard_begins_before_the_last_one_drains(finished):
    """Within the engine's limit: 16 generations at once over all shards."""
    samples = scan_samples(finished[0], batch="mine").select("index", "shard").unique()
    tapes = scan_trajectories(finished[0], batch="mine").filter(pl.col("seq") >= 0)
    turns = tapes.join(samples, on="index").select("shard", "requested_at", "committed_at").collect()
    spans = turns.group_by("shard").agg(pl.min("requested_at"), pl.max("committed_at")).sort("shard")
    assert (spans["requested_at"][1:] < spans["committed_at"][:-1]).all()
    events = [(t, 1) for t in turns["requested_at"]] + [(t, -1) for t in turns["committed_at"]]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    assert 4 < most <= 16
