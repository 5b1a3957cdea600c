"""Real routers (smg, sglang-router) before two embedded engines: what a batch and its client rely on."""

import asyncio
import json
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command import Rollout, reach
from faulty_engine import wait_until
from faulty_proxy import FaultyProxy
from killing import wait_for
from real_router import KINDS, real_router

from rollout.doctor.engine import check_engine
from rollout.doctor.tokens import check_tokens
from rollout.engine.client import EngineClient
from rollout.engine.embedded import start_embedded
from rollout.engine.tiny import CHECKPOINT
from rollout.lake import scan_samples
from rollout.parity.projections import same_rows
from rollout.process import Child

pytestmark = pytest.mark.full
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Child]]:
    folder = tmp_path_factory.mktemp("engines")
    made = [asyncio.run(start_embedded(None, log=folder / f"engine-{k}.log")) for k in range(2)]
    yield made
    for child in made:
        child.stop()


@pytest.fixture(scope="module")
def proxies(engines: list[Child]) -> Iterator[list[FaultyProxy]]:
    """Before each engine one that counts what the router sends there; it passes everything on."""
    with ExitStack() as stack:
        yield [stack.enter_context(FaultyProxy(child.url).in_thread()) for child in engines]


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, proxies: list[FaultyProxy], tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    with real_router(request.param, [proxy.url for proxy in proxies], log=log) as url:
        yield url


@pytest.fixture
async def client(router: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(router, timeout_s=120.0) as client:
        yield client


async def test_the_turns_of_a_session_reach_one_worker_and_sessions_reach_both(
    client: EngineClient, proxies: list[FaultyProxy]
):
    async def session(name: str) -> None:
        for turn in range(4):
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
            await client.generate(body, rid=f"{name}-{turn}", session_id=name)

    names = [uuid.uuid4().hex for _ in range(16)]
    await asyncio.gather(*map(session, names))
    seen = [{str(request.get("rid")).rpartition("-")[0] for request in proxy.seen} for proxy in proxies]
    reached = [{name for name in names if name in there} for there in seen]
    assert set(names) == reached[0] | reached[1] and set() == reached[0] & reached[1]
    assert reached[0] and reached[1]


async def test_an_abort_reaches_the_worker_that_generates(client: EngineClient, proxies: list[FaultyProxy]):
    params = {"max_new_tokens": 1900, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    rids = [f"abort-{uuid.uuid4().hex}" for _ in range(6)]
    asked = [asyncio.create_task(client.generate(body, rid=rid, session_id=f"s-{rid}")) for rid in rids]
    await wait_until(lambda: {*rids} <= {one.get("rid") for proxy in proxies for one in proxy.seen}, 60.0)
    for rid in rids:
        await client.abort(rid)
    async with asyncio.timeout(60):
        replies = await asyncio.gather(*asked)
    ended = [reply["meta_info"]["finish_reason"]["type"] for reply in replies]
    assert ["abort"] * 6 == ended, [reply["meta_info"]["completion_tokens"] for reply in replies]
    await client.abort("abort-of-nothing")


async def test_facts_and_doctor_behind_a_router(client: EngineClient, router: str, proxies: list[FaultyProxy]):
    assert {proxy.url for proxy in proxies} == set(await client.engines())
    assert (await client.model_info())["model_path"] == str(CHECKPOINT)
    assert (await client.facts("/server_info"))["enable_deterministic_inference"] is True
    _, prompt = check_tokens(CHECKPOINT, "qwen3")
    findings = await check_engine(router, prompt, embedded=True)
    assert {"ok"} == {finding.state for finding in findings}, findings
    assert "router" in [finding.what for finding in findings]


def test_a_batch_through_a_router_has_the_rows_of_one_straight_at_an_engine(
    quick_rollout: Rollout, batch_command: list[str], finished, router: str, tmp_path: Path
):
    routed = tmp_path / "routed"
    quick_rollout.succeeds(*batch_command, "--lake", routed, "--engine", "external", "--engine-url", router)
    straight, through = (scan_samples(lake, batch="mine").collect().to_arrow() for lake in (finished[0], routed))
    assert [] == same_rows(straight, through)
    assert [] == _failures(through)


@pytest.mark.parametrize("kind", KINDS)
async def test_sglang_behind_a_router_tells_its_facts_and_hears_aborts(kind: str, sglang_url: str, tmp_path: Path):
    params = {"max_new_tokens": 1900, "ignore_eos": True}
    with real_router(kind, [sglang_url], log=tmp_path / "router.log") as url:
        async with EngineClient(url, timeout_s=120.0) as client:
            assert (await client.facts("/server_info"))["enable_deterministic_inference"] is True
            assert (await client.model_info())["model_path"] == str(CHECKPOINT)
            rid = f"abort-{uuid.uuid4().hex}"
            body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
            asked = asyncio.create_task(client.generate(body, rid=rid, session_id="s"))
            while not await asyncio.to_thread(_generates, sglang_url):
                await asyncio.sleep(0.05)
            await client.abort(rid)
            reply = await asked
    assert "abort" == reply["meta_info"]["finish_reason"]["type"]
    assert 0 < len(reply["output_ids"]) < 1900


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_costs_no_rollout(quick_rollout: Rollout, batch_command: list[str], tmp_path: Path, kind: str):
    made = [asyncio.run(start_embedded(None, log=tmp_path / f"engine-{k}.log")) for k in range(2)]
    try:
        with real_router(kind, [child.url for child in made], log=tmp_path / "router.log") as url:
            command = [*batch_command, "--engine", "external", "--engine-url", url, "--lake", tmp_path / "lake"]
            run = quick_rollout.start(*command, "--concurrency", 8, "--max-attempts", 4)  # README: until it notices
            reach(run, "rolling out", 0.0)
            wait_for(lambda: _generates(made[1].url) or run.process.poll() is not None, 60.0)
            made[1].process.kill()
            assert run.process.poll() is None, "the batch was over before the worker was killed"
            assert 0 == run.process.wait(240)
            run.end(0)
    finally:
        for child in made:
            child.stop()
    table = scan_samples(tmp_path / "lake", batch="mine").collect().to_arrow()
    assert [] == _failures(table)
    assert set(range(32)) == set(table.column("index").to_pylist())


def _failures(samples: pa.Table) -> list[dict[str, Any]]:
    return [failure for failure in samples.column("failure").to_pylist() if failure is not None]


def _generates(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=10) as reply:
        return bool(json.load(reply)["loads"][0]["num_running_reqs"])
