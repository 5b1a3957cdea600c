"""Routed experts, a LoRA adapter and a weight update in mid-turn, on real SGLang servers."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import polars as pl
import pytest
from lora_adapter import make_adapter
from moe_checkpoint import EXPERTS, LAYERS, TOP_K, make_moe
from sglang_server import sglang_server

from rollout.agents.tools import TOOLS
from rollout.batch.prompts import prompt_bytes
from rollout.lake import scan_parity, scan_samples, scan_trajectories
from rollout.process import start
from rollout.sample import WeightSpan
from rollout.session.client import SessionClient

pytestmark = pytest.mark.full
NEW_TOKENS = 500
"""Sampled ids of the turn in which the weights change: seconds of work, within the context."""
CHANGE_AT = 300
"""Ids, those of the prompt included, that the engine holds when the weights change; the prompt has fewer."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def moe_url(sglang_python: Path, moe: Path) -> Iterator[str]:
    with sglang_server(sglang_python, moe.parent, "--enable-return-routed-experts", model=moe) as url:
        yield url


@pytest.fixture(scope="module")
def lora_url(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lora")
    named = f"tuned={make_adapter(folder / 'adapter')}"
    options = ["--enable-lora", "--lora-paths", named, "--lora-backend", "torch_native", "--max-loras-per-batch", "2"]
    with sglang_server(sglang_python, folder, *options) as url:
        yield url


@pytest.fixture
def four_prompts(tmp_path: Path) -> Path:
    """Two prompts of tool_loop, one of each other agent."""
    lines = [json.loads(line) for line in prompt_bytes("demo").decode().splitlines()]
    wanted = [("tool_loop", 2), ("single_turn", 1), ("branching", 1)]
    chosen = [line for agent, n in wanted for line in [one for one in lines if one["agent"] == agent][:n]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in chosen))
    return path


def given(url: str, prompts: Path, lake: Path, batch: str, *options: object) -> tuple[object, ...]:
    """The arguments of a batch on this engine."""
    options_of = [
        "--engine",
        "external",
        "--engine-url",
        url,
        "--prompts",
        prompts,
        "--lake",
        lake,
        "--batch-id",
        batch,
    ]
    return (*options_of, "--n-samples-per-prompt", 2, "--concurrency", 4, "--max-new-tokens", 64, *options)


def whole_rows(url: str, tokens: list[int]) -> np.ndarray:
    """The engine's own rows of all tokens but the last, from one prefill."""

    async def ask() -> Any:
        body = {"input_ids": tokens[:-1], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/generate", json={**body, "return_routed_experts": True}) as reply,
        ):
            return await reply.json()

    data = base64.b64decode(asyncio.run(ask())["meta_info"]["routed_experts"])
    return np.frombuffer(data, "<i4").reshape(-1, LAYERS, TOP_K)


def test_a_batch_on_a_mixture_of_experts_keeps_each_tokens_experts(
    quick_rollout: Any, moe: Path, moe_url: str, four_prompts: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    options = given(moe_url, four_prompts, lake, "moe", "--model", moe, "--routed-experts")
    quick_rollout.succeeds("run", *options)
    rows = scan_samples(lake, batch="moe").collect().to_dicts()
    assert set(range(8)) == {row["index"] for row in rows} and max(row["turns"] for row in rows) > 1
    for row in rows:
        assert row["failure"] is None
        assert [len(row["tokens"]) - 1, LAYERS, TOP_K] == row["routed_experts_shape"]
        experts = np.frombuffer(row["routed_experts"], "<i4").reshape(row["routed_experts_shape"])
        assert experts.min() >= 0 and experts.max() < EXPERTS and (experts[..., 0] != experts[..., 1]).all()
        # A prefill adds in another order than decoding did: experts whose scores are nearly equal may change places.
        assert np.mean(experts == whole_rows(moe_url, row["tokens"])) > 0.98
    assert {"equal", "equal_by_path"} >= set(scan_parity(lake, batch="moe").collect()["verdict"])
    exchanges = scan_trajectories(lake, batch="moe").filter(pl.col("seq") >= 0).collect()
    for row in rows:
        shapes = exchanges.filter(pl.col("index") == row["index"])["routed_experts_shape"].to_list()
        if len(shapes) == row["turns"]:  # no branch: the tape has every row once
            assert len(row["tokens"]) - 1 == sum(shape[0] for shape in shapes)


def test_a_model_without_experts_and_an_engine_that_keeps_them_are_refused(
    quick_rollout: Any, moe_url: str, lora_url: str, four_prompts: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    line = quick_rollout.refused("run", *given(lora_url, four_prompts, lake, "a", "--routed-experts", "--dry-run"))
    assert "routed_experts: start the engine with --enable-return-routed-experts" in line
    line = quick_rollout.refused("run", *given(moe_url, four_prompts, lake, "b", "--lora", "tuned"))
    assert "lora 'tuned': the engine has no such adapter, but none" in line


def test_a_batch_on_an_adapter_samples_with_it(
    quick_rollout: Any, lora_url: str, four_prompts: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    for batch, options in (("base", ()), ("tuned", ("--lora", "tuned"))):
        options = ("--n-samples-per-prompt", 1, *options)
        quick_rollout.succeeds("run", *given(lora_url, four_prompts, lake, batch, *options))
    base, tuned = (
        scan_samples(lake, batch=batch).collect().sort("index", "sibling").to_dicts() for batch in ("base", "tuned")
    )
    assert [{None}, {"tuned"}] == [{row["lora"] for row in rows} for rows in (base, tuned)]
    by_index = {row["index"]: row for row in base}
    assert all(row["rollout_log_probs"] != by_index[row["index"]]["rollout_log_probs"] for row in tuned)
    assert any(row["tokens"] != by_index[row["index"]]["tokens"] for row in tuned)
    for batch in ("base", "tuned"):
        assert {"equal", "equal_by_path"} >= set(scan_parity(lake, batch=batch).collect()["verdict"])
    line = quick_rollout.refused("run", *given(lora_url, four_prompts, lake, "none", "--lora", "nobody"))
    assert "lora 'nobody': the engine has no such adapter, but tuned" in line


def test_a_batch_loads_its_weights_before_its_first_turn(
    quick_rollout: Any, moe: Path, moe_url: str, four_prompts: Path, tmp_path: Path
) -> None:
    lake, other = tmp_path / "lake", make_moe(tmp_path / "other", seed=1)
    batch = ("--model", moe, "--n-samples-per-prompt", 1, "--temperature", 0, "--concurrency", 1)
    nowhere = ("--update-weights", tmp_path / "nowhere", "--weight-version", "step-9")
    done = quick_rollout("run", *given(moe_url, four_prompts, lake, "nowhere", *batch, *nowhere))
    assert 2 == done.returncode and f"{moe_url}: the engine refused with 400" in done.stderr.splitlines()[-1]
    sampled = {}
    for version, weights in (("step-1", other), ("default", moe)):  # other tests find it as it was started
        options = ("--update-weights", weights, "--weight-version", version)
        quick_rollout.succeeds("run", *given(moe_url, four_prompts, lake, version, *batch, *options))
        rows = scan_samples(lake, batch=version).collect().sort("index", "sibling")
        assert {version} == set(rows["weight_versions"].explode())
        assert {str(weights)} == set(rows["engine"].struct.field("model"))
        sampled[version] = rows["rollout_log_probs"].to_list()
    assert sampled["default"] != sampled["step-1"]


async def change_weights(http: aiohttp.ClientSession, url: str, model: Path, version: str) -> None:
    """New weights while a turn is running: it goes on with them."""
    for path, body in (
        ("pause_generation", {"mode": "retract"}),
        ("update_weights_from_disk", {"model_path": str(model), "weight_version": version}),
        ("continue_generation", {}),
    ):
        async with http.post(f"{url}/{path}", json=body) as reply:
            assert 200 == reply.status, (path, await reply.text())


async def running_tokens(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/v1/loads") as reply:
        return sum(load["num_used_tokens"] for load in (await reply.json())["loads"])


async def test_g27_a_weight_update_in_mid_turn_gives_both_versions_spans(
    moe: Path, moe_url: str, tmp_path: Path
) -> None:
    other = make_moe(tmp_path / "other", seed=1)
    argv = [sys.executable, "-m", "rollout.session.server", "--engine", moe_url, "--tokenizer", str(moe)]
    server = await start(argv, log=tmp_path / "session.log")
    history: list[dict[str, Any]] = []
    try:
        async with SessionClient(server.url) as client, aiohttp.ClientSession() as http:
            opened = await client.open({"version": "v2", "routed_experts": True})

            async def ask(message: dict[str, Any], **body: Any) -> dict[str, Any]:
                history.append(message)
                given = {"model": "m", "messages": history, "tools": TOOLS, "temperature": 0, **body}
                async with http.post(f"{opened.base_url}/v1/chat/completions", json=given) as reply:
                    answer = await reply.json()
                    assert 200 == reply.status, answer
                history.append(answer["choices"][0]["message"])
                return history[-1]

            called = (await ask({"role": "user", "content": "What is 3 + 4?"}))["tool_calls"][0]
            result = {"role": "tool", "tool_call_id": called["id"], "content": "7"}
            turn = asyncio.create_task(ask(result, ignore_eos=True, max_tokens=NEW_TOKENS))
            async with asyncio.timeout(60):
                while not turn.done() and await running_tokens(http, moe_url) < CHANGE_AT:
                    await asyncio.sleep(0.02)
            await change_weights(http, moe_url, other, "step-1")
            await turn
            collected = await client.samples(opened.session_id)
            tape = await client.tape(opened.session_id)
    finally:
        server.stop()
    first, second = tape.exchanges
    edge = second.weight_spans[0].end
    assert [("default", 0, edge), ("step-1", edge, NEW_TOKENS)] == spans(second.weight_spans) and 0 < edge < NEW_TOKENS
    (sample,) = collected.samples
    assert ["default", "step-1"] == sample.weight_versions
    start_of_second = sample.response_length - NEW_TOKENS
    assert [
        ("default", 0, len(first.output_ids_O)),
        ("default", start_of_second, start_of_second + edge),
        ("step-1", start_of_second + edge, sample.response_length),
    ] == spans(sample.weight_spans)
    assert [len(sample.tokens_T) - 1, LAYERS, TOP_K] == sample.routed_experts_shape
    sample.validate()


def spans(given: list[WeightSpan]) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in given]
