"""A host's GPUs as batches share them: a concurrency limit of a real Prefect server."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Rollout, Run
from prefect import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollout.errors import BadConfig
from tasks.gpus import GPU_LIMIT, gpus_held


@pytest.fixture
def server(prefect_url: str) -> Iterator[str]:
    """The shared server as this process's own."""
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


async def make_limit(name: str, limit: int) -> None:
    async with get_client() as client:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))


async def held(name: str) -> int:
    async with get_client() as client:
        return (await client.read_global_concurrency_limit_by_name(name)).active_slots


async def test_whoever_comes_later_waits_and_says_so(server, monkeypatch):
    monkeypatch.setenv(GPU_LIMIT, "gpu:two")
    await make_limit("gpu:two", 2)
    inside, most, said = 0, 0, []

    async def batch(n: int) -> None:
        nonlocal inside, most
        async with gpus_held(n, said.append):
            inside += n
            most = max(most, inside)
            await asyncio.sleep(0.2)
            inside -= n

    first = asyncio.create_task(batch(2))
    while inside < 2:
        await asyncio.sleep(0.01)
    await asyncio.gather(first, batch(1), batch(1))
    assert 2 == most and ["waiting for 2 of gpu:two", *["waiting for 1 of gpu:two"] * 2] == said
    assert 0 == await held("gpu:two")


async def test_a_batch_that_fails_gives_its_gpus_back(server, monkeypatch):
    monkeypatch.setenv(GPU_LIMIT, "gpu:failing")
    await make_limit("gpu:failing", 1)
    with pytest.raises(ZeroDivisionError):
        async with gpus_held(1, print):
            assert 1 == await held("gpu:failing")
            raise ZeroDivisionError
    assert 0 == await held("gpu:failing")


async def test_a_limit_that_is_missing_or_too_small_is_refused_with_the_command_that_mends_it(server, monkeypatch):
    monkeypatch.setenv(GPU_LIMIT, "gpu:absent")
    with pytest.raises(BadConfig, match="prefect gcl create gpu:absent --limit N"):
        await gpus_held(1, print).__aenter__()
    monkeypatch.setenv(GPU_LIMIT, "gpu:small")
    await make_limit("gpu:small", 4)
    with pytest.raises(BadConfig, match="its limit is 4, the batch's engines take 8"):
        await gpus_held(8, print).__aenter__()


async def test_nothing_is_asked_where_nothing_is_counted_or_held(monkeypatch):
    async with gpus_held(8, print):
        pass
    monkeypatch.setenv(GPU_LIMIT, "gpu:absent")
    async with gpus_held(0, print):
        pass


def test_a_batch_whose_limit_is_missing_starts_no_engine(quick_rollout: Rollout, batch_command: list[str], tmp_path):
    quick_rollout.environment = {**quick_rollout.environment, GPU_LIMIT: "gpu:nowhere"}
    done = quick_rollout(*batch_command, "--batch-id", "unlimited", "--lake", tmp_path / "lake", "--engine-gpus", 1)
    assert 2 == done.returncode
    assert "prefect gcl create gpu:nowhere --limit N" in done.stderr.splitlines()[-1]
    assert not (quick_rollout.home / "logs" / "unlimited").exists()


@pytest.mark.full
async def test_two_batches_with_one_gpu_never_have_engines_at_once(
    server, quick_rollout: Rollout, batch_command: list[str], tmp_path: Path
):
    await make_limit("gpu:one", 1)
    quick_rollout.environment = {**quick_rollout.environment, GPU_LIMIT: "gpu:one"}
    options = ("--lake", tmp_path / "lake", "--engine-gpus", 1)
    runs = [quick_rollout.start(*batch_command, "--batch-id", name, *options) for name in ("one", "two")]
    together, seen = set(), set()
    while any(run.process.poll() is None for run in runs):
        having = {k for k, run in enumerate(runs) if has_engine(run)}
        seen |= having
        together.add(len(having))
        time.sleep(0.1)
    ended = [run.wait() for run in runs]
    assert [0, 0] == [done.returncode for done in ended], [done.stderr for done in ended]
    assert ({0, 1}, {0, 1}) == (together, seen)
    assert any("waiting for 1 of gpu:one" in done.stderr for done in ended)
    assert 0 == await held("gpu:one")


def has_engine(run: Run) -> bool:
    return any("rollout.engine.embedded" in line for line in run.processes())
