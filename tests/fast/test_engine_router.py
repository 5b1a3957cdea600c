"""Facts and aborts behind a router, which has neither: in this process, before engines that inject faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from faulty_engine import FaultyEngine
from faulty_router import FaultyRouter
from loopback import served

from rollout.engine import workers
from rollout.engine.client import EngineClient
from rollout.engine.updating import update_engines
from rollout.engine.workers import read_workers
from rollout.errors import BadConfig, EngineRefused
from rollout.process import free_port


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def engines(stack: AsyncExitStack, number: int) -> tuple[list[FaultyEngine], list[str]]:
    made = [FaultyEngine([5, 6]) for _ in range(number)]
    for index, engine in enumerate(made):
        engine.model_info = {"model_path": f"model {index}"}
    return made, [await stack.enter_async_context(served(engine.app())) for engine in made]


async def behind(stack: AsyncExitStack, urls: list[str]) -> tuple[FaultyRouter, EngineClient]:
    router = FaultyRouter(urls)
    client = EngineClient(await stack.enter_async_context(router.serving()))
    return router, await stack.enter_async_context(client)


def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def test_an_abort_goes_to_every_worker_and_one_that_is_gone_is_no_failure(stack: AsyncExitStack):
    made, urls = await engines(stack, 2)
    _, client = await behind(stack, [urls[0], nobody(), urls[1]])
    await client.abort("r1")
    assert [["r1"], ["r1"]] == [engine.aborted for engine in made]


async def test_an_abort_that_nobody_hears_is_an_error(stack: AsyncExitStack):
    _, client = await behind(stack, [nobody()])
    with pytest.raises(EngineRefused, match="404"):
        await client.abort("r1")
    _, client = await behind(stack, [])
    with pytest.raises(EngineRefused, match="404"):
        await client.abort("r1")


async def test_an_engine_is_aborted_itself(stack: AsyncExitStack):
    (engine,), (url,) = await engines(stack, 1)
    client = await stack.enter_async_context(EngineClient(url))
    await client.abort("r1")
    assert (["r1"], [url]) == (engine.aborted, await client.engines())


async def test_facts_are_a_workers_and_where_none_can_be_asked_the_routers(stack: AsyncExitStack):
    _, urls = await engines(stack, 2)
    router, client = await behind(stack, [nobody(), urls[1]])
    assert {"model_path": "model 1"} == await client.model_info()
    router, client = await behind(stack, [nobody()])
    router.facts = {"model_path": "as the router says"}
    for _ in range(3):
        assert router.facts == await client.model_info()
    assert 1 == router.seen.count("/model_info") == router.seen.count("/workers")
    assert router.facts == await client.facts("/server_info")


async def test_the_list_of_workers_is_read_again(stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch):
    made, urls = await engines(stack, 2)
    router, client = await behind(stack, urls[:1])
    await client.abort("r1")
    router.workers = urls[1:]
    await client.abort("r2")
    monkeypatch.setattr(workers, "_FRESH_S", 0.0)
    await client.abort("r3")
    assert [["r1", "r2"], ["r3"]] == [engine.aborted for engine in made]


def test_ranks_of_one_server_are_one_worker_and_grpc_has_none():
    told = [
        *({"url": url} for url in ("http://a:1@0", "http://a:1@1", "https://b:2/", "grpc://c:3", "http://a:1")),
        *({}, "nonsense", {"url": None}),
    ]
    assert ["http://a:1", "https://b:2"] == read_workers(told)


async def test_new_weights_go_to_every_worker_or_to_none(stack: AsyncExitStack):
    made, urls = await engines(stack, 2)
    for engine in made:
        engine.model_info = {"model_path": "p", "weight_version": "v"}
    router, client = await behind(stack, urls)
    await update_engines([client.base_url], "p", "v")
    assert ["/workers"] == router.seen
    made[1].model_info = {"model_path": "p", "weight_version": "older"}
    with pytest.raises(BadConfig, match=f"{urls[1]}: .*404"):
        await update_engines([client.base_url], "p", "v")
