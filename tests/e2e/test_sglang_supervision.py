"""SGLang under this host's supervisor: nothing of it is left, and a killed engine costs no row."""

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from command import Rollout, Run, reach
from killing import GRACE_S, end_at, moments

from rollout.engine.job import EngineJob
from rollout.engine.recipes import tiny_cpu
from rollout.engine.server import NOTICE_S, use_engines
from rollout.engine.supervision import Status, SupervisionFolder
from rollout.engine.tiny import CHECKPOINT
from rollout.lake import scan_samples
from rollout.parity.projections import same_rows
from rollout.process import children

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SUPERVISOR = "rollout.engine.supervisor"
ENGINE = "sglang.launch_server"
ENGINES = (SUPERVISOR, ENGINE, "sglang::")


@pytest.fixture
def sglang(quick_rollout: Rollout, sglang_python: Path) -> Rollout:
    quick_rollout.environment = {**quick_rollout.environment, "ROLLOUT_SGLANG_PYTHON": str(sglang_python)}
    return quick_rollout


def batch(prompts: Path, lake: Path, *, concurrency: int = 1, samples: int = 2) -> list[str]:
    command = f"run --batch-id mine --shard-size 4 --n-samples-per-prompt {samples} --temperature 0 --prompts {prompts}"
    command += f" --lake {lake} --engine sglang --engine-recipe tiny_cpu --concurrency {concurrency}"
    return command.split()


def status(sglang: Rollout) -> Status:
    found = SupervisionFolder(sglang.home).read()
    assert found is not None
    return found


def left_of_engines(run: Run) -> list[str]:
    return [line for line in run.left_over(GRACE_S) if any(part in line for part in ENGINES)] or run.processes()


def test_nothing_is_left_of_sglang_whoever_is_killed(sglang: Rollout, prompt_file: Path, tmp_path: Path):
    """The command by three signals, the supervisor and SGLang's main process by kill -9 before it."""
    hows = ("KILL", "TERM", "INT", SUPERVISOR, ENGINE)
    spread = {"starting the engine": 15.0, "rolling out": 3.0}
    left: list[object] = []
    for number, (how, phase, delay_s) in enumerate(moments(hows, spread, seed=5)):
        run = sglang.start(*batch(prompt_file, tmp_path / f"lake-{number}"))
        end_at(run, how, phase, delay_s)
        if found := left_of_engines(run):
            left.append((how, phase, delay_s, found))
    assert [] == left


@pytest.mark.parametrize(("concurrency", "samples"), [(1, 2), (16, 16)])
async def test_a_batch_whose_sglang_is_killed_five_times_has_the_rows_of_an_undisturbed_one(
    sglang: Rollout,
    sglang_python: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
    samples: int,
):
    """At concurrency 1 bit for bit; 16 wide a CPU's kernels move the last bits of the logprobs, and nothing else.

    Both batches share this test's engine. Its main process dies three times, its scheduler twice; users are told
    within NOTICE_S.
    """
    assert NOTICE_S <= 5.0
    monkeypatch.setenv("ROLLOUT_SGLANG_PYTHON", str(sglang_python))
    commands = {
        name: batch(prompt_file, tmp_path / name, concurrency=concurrency, samples=samples)
        for name in ("calm", "disturbed")
    }
    job, rng, killed = EngineJob.of(tiny_cpu(), CHECKPOINT), random.Random(5), 0
    async with use_engines(job, home=sglang.home) as (_, outages):
        await asyncio.to_thread(sglang.succeeds, *commands["calm"])
        run = sglang.start(*commands["disturbed"])
        await asyncio.to_thread(reach, run, "rolling out", 0.5)
        while killed < 5 and run.process.poll() is None:
            pid = status(sglang).engines[0].pid
            victim = next(pid for pid, name in children(pid).items() if "scheduler" in name) if killed % 2 else pid
            losses = outages.count
            os.kill(victim, signal.SIGKILL)
            killed += 1
            assert await outages.since(losses), "nobody was told of the loss in time"
            await outages.wait_up(300.0)
            assert outages.up, "the engine did not come back"
            await asyncio.sleep(0.5 + 0.5 * rng.random())
        assert 0 == await asyncio.to_thread(run.process.wait, 240)
        run.end(signal.SIGKILL)
    assert 5 == killed, "the batch was over before its engine was killed as often as it should be"
    calm, disturbed = (
        scan_samples(tmp_path / name, batch="mine").sort("index", "sibling").collect().to_arrow() for name in commands
    )
    assert 0 < max(disturbed.column("attempt").to_pylist()), "no rollout was under way when the engine died"
    for row in disturbed.column("engine").to_pylist():
        assert (tiny_cpu().flags_hash, list(tiny_cpu().stated)) == (row["flags_hash"], row["flags"])
    if concurrency > 1:
        disturbed = with_close_log_probs(disturbed, calm, atol=1e-5)
    assert [] == same_rows(calm, disturbed)


def with_close_log_probs(table: pa.Table, other: pa.Table, *, atol: float) -> pa.Table:
    """`table` with the log-probs of `other`, which must be as many in each row and within `atol`."""
    name = "rollout_log_probs"
    for row, (one, two) in enumerate(zip(table.column(name).to_pylist(), other.column(name).to_pylist(), strict=True)):
        np.testing.assert_allclose(one, two, rtol=0.0, atol=atol, strict=True, err_msg=f"row {row}")
    return table.set_column(table.column_names.index(name), table.schema.field(name), other.column(name))
