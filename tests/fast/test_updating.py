"""New weights for engines that run: the shipped engine's own server, one or several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from embedded_checkpoints import load, make_checkpoint
from faulty_facts import FaultyFacts
from loopback import served as serving

from rollout.batch.engines import engine_facts
from rollout.batch.model import model_digest
from rollout.config import make_config
from rollout.engine.answer import Served
from rollout.engine.checkpoint import read_checkpoint
from rollout.engine.client import EngineClient
from rollout.engine.model import load_model
from rollout.engine.scheduler import Scheduler
from rollout.engine.serving import EngineServer
from rollout.engine.updating import update_engines
from rollout.errors import BadConfig, EngineError
from rollout.tito.tokenizer import Tokenizer

IDS = list(b"hello")
LONG = 400


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("first") / "model")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("second") / "model", seed=1)


@asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[str]:
    checkpoint, tokenizer = read_checkpoint(directory), Tokenizer(directory)
    scheduler = Scheduler(load(directory), stop_ids=frozenset(), decode=tokenizer.decode)
    served = Served(checkpoint=checkpoint, tokenizer=tokenizer, context=1000, weight_version="default")
    server = EngineServer(served, scheduler, load=load_model, initializer=lambda: None)
    async with serving(server.app(), handler_cancellation=True) as url:
        yield url


async def sampled(url: str, count: int = 8) -> tuple[list[int], list[list[Any]], list[dict[str, Any]]]:
    """Greedy ids, their log-probs, and the spans of the weights that sampled them."""
    client = EngineClient(url)
    try:
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}}
        reply = await client.generate({**body, "return_logprob": True}, rid=f"{url}{count}", session_id=None)
    finally:
        await client.close()
    return reply["output_ids"], reply["meta_info"]["output_token_logprobs"], reply["meta_info"]["weight_versions"]


async def stated(url: str) -> tuple[str, str]:
    client = EngineClient(url)
    try:
        info = await client.model_info()
    finally:
        await client.close()
    return info["model_path"], info["weight_version"]


async def test_every_engine_samples_with_the_new_weights_as_if_started_with_them(first: Path, second: Path) -> None:
    said: list[str] = []
    async with engine(first) as a, engine(first) as b, engine(second) as straight:
        old = await sampled(a)
        await update_engines([a, b], str(second), "step-9", say=said.append)
        new = [await sampled(url) for url in (a, b, straight)]
        assert [(str(second), "step-9")] * 2 == [await stated(a), await stated(b)]
    assert old[:2] != new[0][:2] and new[0][:2] == new[1][:2] == new[2][:2]
    assert [{"version": "step-9", "start": 0, "end": 8}] == new[0][2]
    assert [f"loading {second} as step-9 at {a}, {b}"] == said


async def test_a_running_turn_ends_with_the_weights_that_it_began_with(first: Path, second: Path) -> None:
    async with engine(first) as url:
        whole = await sampled(url, LONG)
        running = asyncio.create_task(sampled(url, LONG))
        await asyncio.sleep(0.05)
        assert not running.done()
        update = asyncio.create_task(update_engines([url], str(second), "step-9"))
        await asyncio.sleep(0.02)
        later = asyncio.create_task(sampled(url))
        assert whole == await running
        await update
        assert [{"version": "step-9", "start": 0, "end": 8}] == (await later)[2]


async def test_what_is_served_already_is_not_loaded_again(first: Path, second: Path) -> None:
    async with engine(first) as url:
        proxy = FaultyFacts(url)
        asked: list[dict[str, Any]] = []
        proxy.ask = lambda body: asked.append(body) if body else None
        with proxy.in_thread():
            for version in ("step-9", "step-9", "step-10"):
                await update_engines([proxy.url], str(second), version)
    assert [{"model_path": str(second), "weight_version": name} for name in ("step-9", "step-10")] == asked


async def test_an_engine_that_is_gone_changes_none(first: Path, second: Path) -> None:
    async with engine(first) as url:
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
            await update_engines([url, "http://127.0.0.1:9"], str(second), "step-9")
        assert (str(first), "default") == await stated(url)


async def test_a_refusal_names_who_refused_and_who_took_them(first: Path, second: Path, tmp_path: Path) -> None:
    wide = make_checkpoint(tmp_path / "wide", hidden_size=32)
    async with engine(first) as url, engine(wide) as other:
        old = await sampled(url)
        with pytest.raises(BadConfig, match=f"update_weights {wide} as w: {url}: .*its shape is not that of .*{first}"):
            await update_engines([url], str(wide), "w")
        with pytest.raises(BadConfig, match="no such directory"):
            await update_engines([url], str(tmp_path / "nowhere"), "w")
        assert old == await sampled(url)
        with pytest.raises(BadConfig, match=f"{other}: the engine refused with 400.*; loaded at {url}$"):
            await update_engines([url, other], str(second), "w")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"success": False, "message": "no room"}, "did not load .*: no room"),
        ({}, "did not load .*: None"),
        ({"success": True}, "states weight_version old"),
    ],
)
async def test_an_answer_is_believed_only_with_its_version(answer: dict[str, Any], words: str) -> None:
    async def update(request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": "old"})

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", update)
    app.router.add_get("/model_info", info)
    async with serving(app) as url:
        with pytest.raises(EngineError, match=words):
            await update_engines([url], "/new", "new")


async def test_a_body_that_says_nothing_is_refused(first: Path) -> None:
    async with engine(first) as url:
        client = EngineClient(url)
        try:
            for body in (b"[1]", b"{", b"{}", b'{"model_path": 3}', b'{"model_path": "x", "weight_version": 3}'):
                with pytest.raises(EngineError, match="400"):
                    await client._wire.ask("POST", f"{url}/update_weights_from_disk", 5.0, data=body)
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"update_weights": "/m"}, "go together"),
        ({"weight_version": "v"}, "go together"),
        ({"update_weights": "/m", "weight_version": "v", "engine": "embedded", "engine_url": None}, "engine=external"),
        ({"update_weights": "./m", "weight_version": "v"}, "the whole path"),
        ({"update_weights": "/m", "weight_version": ""}, "weight_version"),
    ],
)
def test_half_of_it_and_other_engines_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        make_config(**{"engine": "external", "engine_url": "http://127.0.0.1:9", **given})


async def test_the_models_digest_is_that_of_the_weights_to_come(first: Path, second: Path) -> None:
    async with engine(first) as url:
        plain = make_config(engine="external", engine_url=url)
        updating = make_config(**{**plain.model_dump(), "update_weights": str(second), "weight_version": "v"})
        other = make_config(**{**updating.model_dump(), "weight_version": "w"})
        before = [await model_digest(config, first) for config in (plain, updating, other)]
        await update_engines([url], str(second), "v")
        after = [await model_digest(config, first) for config in (plain, updating, other)]
    assert 3 == len(set(before))
    assert [before[1], before[1], before[2]] == after


def test_the_rows_name_the_policy_by_its_version_unless_it_has_a_name() -> None:
    given = {"engine": "external", "engine_url": "http://127.0.0.1:9", "update_weights": "/m", "weight_version": "v"}
    for policy, expected in ((None, "v"), ("mine", "mine")):
        facts = engine_facts("sglang", None, "/m", make_config(**given, policy_version=policy), deterministic=None)
        assert expected == facts["policy_version"]
