"""kill -9 at seeded moments: nothing of the batch lives on, and it ends with the rows of an undisturbed one."""

import random
import signal
from pathlib import Path

import pytest
from command import PHASES, Rollout, reach

from rollout.lake import LakePaths, scan_samples
from rollout.lake.staging import staged_shards
from rollout.parity.projections import same_rows


def moments(kills: int, seed: int) -> list[tuple[str, float]]:
    """(phase, seconds into it) of every kill, in the order in which a batch can still reach them."""
    rng = random.Random(seed)
    spread = dict(zip(PHASES, (3.0, 1.0, 2.0, 2.0, 0.4), strict=True))
    early = sorted(rng.choices(PHASES[:3], weights=(1, 1, 2), k=kills // 3), key=PHASES.index)
    phases = [*early, *["rolling out"] * (kills - len(early) - 1), "publishing"]
    return [(phase, rng.uniform(0.0, spread[phase])) for phase in phases]


def writers(lake: Path) -> dict[int, str]:
    return {shard: manifest.writer for shard, manifest in staged_shards(LakePaths(lake), "mine").items()}


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(2, marks=pytest.mark.timeout(400)),
        pytest.param(10, marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
    ],
)
def test_a_batch_killed_again_and_again_ends_with_the_same_rows(
    rollout: Rollout, finished, batch_command: list[str], tmp_path: Path, kills: int
):
    lake = tmp_path / "lake"
    command = [*batch_command, "--lake", lake, "--concurrency", 4]
    killed, staged = 0, {}
    for phase, delay_s in moments(kills, seed=20261202):
        run = rollout.start(*command)
        reach(run, phase, delay_s)
        killed += run.process.poll() is None
        run.end(signal.SIGKILL)
        assert [] == run.left_over(), f"after a kill in {phase}"
        now = writers(lake)
        assert staged.items() <= now.items(), "a staged shard was run again"
        staged = now
    assert killed >= kills - 1, "only the last kill may come after the batch's own end"
    last = rollout(*command)
    assert 0 == last.returncode, last.stderr
    assert staged.items() <= writers(lake).items()
    undisturbed, disturbed = (scan_samples(path, batch="mine").collect().to_arrow() for path in (finished[0], lake))
    assert [] == same_rows(undisturbed, disturbed)
