"""Engines' URLs as users give them, and facts that engines must share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from loopback import served

from rollout.batch.engines import EnginesInUse
from rollout.batch.model import model_digest
from rollout.batch.repeats import how_they_repeat
from rollout.config import make_config
from rollout.engine.agreement import common_facts, require_same
from rollout.engine.outages import Outages
from rollout.engine.supervision import EngineStatus, Status
from rollout.engine.urls import read_urls
from rollout.errors import BadConfig, EngineError, EngineMismatch
from rollout.session.options import ServerOptions, read_options

BAD = [
    ("", "an engine's URL is empty"),
    ("http://a:1,", "an engine's URL is empty"),
    ("http://a:1,,http://b:1", "an engine's URL is empty"),
    ("a:1", "'a:1' is no URL of an engine"),
    ("http://a:1 http://b:1", "is no URL of an engine"),
    ("ftp://a:1", "is no URL of an engine"),
    ("http://", "is no URL of an engine"),
    ("http://a:x", "is no URL of an engine"),
    ("http://[::1", "is no URL of an engine"),
    ("http://a:1,http://A:1/", "http://A:1 is given twice"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_what_is_no_list_of_engines_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadConfig) as refused:
        read_urls(text)
    assert words in str(refused.value)
    with pytest.raises(BadConfig, match=r"^engine_url: ") as refused:
        make_config(engine="external", engine_url=text)
    assert words in str(refused.value)
    with pytest.raises(BadConfig) as refused:
        ServerOptions(engine=text, tokenizer=Path("t"))
    assert words in str(refused.value)


def test_urls_keep_their_order_and_lose_their_slash() -> None:
    text = "http://b:1/, https://a ,http://[::1]:30000"
    assert ["http://b:1", "https://a", "http://[::1]:30000"] == read_urls(text)
    config = make_config(engine="external", engine_url=text)
    assert ("http://b:1,https://a,http://[::1]:30000", read_urls(text)) == (config.engine_url, config.engine_urls)
    assert [] == make_config().engine_urls
    assert ["http://127.0.0.1:30000/prefix"] == read_urls("http://127.0.0.1:30000/prefix/")


def test_a_session_server_takes_engines_once_for_each_or_with_commas() -> None:
    argv = ["--tokenizer", "t", "--engine", "http://a:1", "--engine", "http://b:1,http://c:1"]
    assert ["http://a:1", "http://b:1", "http://c:1"] == read_options(argv, about=None).engines


def test_only_what_two_engines_state_can_differ() -> None:
    facts: dict[str, dict[str, Any]] = {
        "http://a": {"model_path": "m", "weight_version": "v"},
        "http://b": {"context_length": 4096},
        "http://c": {"model_path": "m", "context_length": 4096, "device": "cpu"},
    }
    require_same(facts)
    require_same({})
    facts["http://d"] = {"device": "cuda", "context_length": 8192, "weight_version": "w"}
    with pytest.raises(EngineMismatch, match="weight_version is 'v' at http://a and 'w' at http://d"):
        require_same(facts)
    with pytest.raises(EngineMismatch, match="context_length is 4096 at http://b and 8192 at http://d"):
        require_same(facts, but=("weight_version",))
    require_same(facts, but=("weight_version", "device", "context_length"))


def app(info: dict[str, Any], server: dict[str, Any] | None) -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        found = {"/model_info": info, "/server_info": server}.get(request.path)
        return web.Response(status=404) if found is None else web.json_response(found)

    made = web.Application()
    made.router.add_get("/{path}", answer)
    return made


async def test_how_engines_were_started_counts_where_they_say_it() -> None:
    info, started = {"model_path": "m", "has_image_understanding": False}, {"dtype": "float32", "quantization": None}
    async with (
        served(app(info, {**started, "port": 1, "enable_deterministic_inference": True})) as first,
        served(app({**info, "weight_version": "v"}, None)) as silent,
        served(app(info, {**started, "port": 2, "quantization": "fp8"})) as second,
        served(app(info, {**started, "enable_deterministic_inference": False})) as other,
    ):
        expected = {"model_path": "m", "weight_version": "v", "dtype": "float32", "quantization": "fp8"}
        assert {**expected, "enable_deterministic_inference": True} == await common_facts([first, silent, second])
        with pytest.raises(EngineMismatch, match=f"enable_deterministic_inference is True at {first} and False at"):
            await common_facts([first, silent, second, other])
    with pytest.raises(EngineError, match=f"{first}/model_info failed"):
        await common_facts([first])


async def digest(*urls: str, **options: Any) -> str:
    return await model_digest(make_config(engine="external", engine_url=",".join(urls), **options), Path("unused"))


async def test_a_batchs_model_has_one_digest_over_one_engine_and_several() -> None:
    info = {"model_path": "m", "weight_version": "v"}
    updating = {"update_weights": "/m", "weight_version": "w"}
    async with (
        served(app(info, None)) as first,
        served(app({**info, "vocab_size": 9}, {"dtype": "float32"})) as second,
        served(app({**info, "weight_version": "w"}, None)) as other,
    ):
        assert await digest(first) == await digest(second, first) == await digest(first, second)
        with pytest.raises(EngineMismatch, match=f"weight_version is 'v' at {first} and 'w' at {other}"):
            await digest(first, second, other)
        assert await digest(first, **updating) == await digest(first, other, **updating), "they will be the same"
    with pytest.raises(BadConfig, match=f"engine_url {first}: "):
        await digest(first)


async def test_an_adapter_must_be_the_same_one_everywhere() -> None:
    def told(root: str) -> web.Application:
        made = app({"model_path": "m"}, None)
        adapter = {"id": "tuned", "root": root, "parent": "m"}

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [adapter]})

        made.router.add_get("/v1/models", models)
        return made

    async with served(told("x")) as first, served(told("x")) as second, served(told("y")) as other:
        assert await digest(first, lora="tuned") == await digest(first, second, lora="tuned")
        with pytest.raises(EngineMismatch, match=f"lora is .* at {first} and .* at {other}"):
            await digest(first, second, other, lora="tuned")


async def test_a_batch_repeats_no_better_than_its_weakest_engine() -> None:
    exact = {"enable_deterministic_inference": True, "disable_radix_cache": True}
    async with (
        served(app({}, {**exact, "device": "cuda"})) as gpu,
        served(app({}, {**exact, "device": "cpu"})) as cpu,
        served(app({}, {})) as silent,
    ):
        assert "always" == await how_they_repeat([gpu], embedded=False)
        assert "alone" == await how_they_repeat([gpu, cpu, gpu], embedded=False)
        assert "never" == await how_they_repeat([silent, cpu], embedded=False)
        assert "always" == await how_they_repeat([silent], embedded=True)


async def test_a_batch_goes_on_after_failures_while_one_engine_is_left() -> None:
    async def facts() -> dict[str, Any]:
        return {}

    async with served(app({}, None)) as first:
        async with served(app({}, None)) as second:
            engines = EnginesInUse([first, second], Outages(notice_s=0.0), facts())
            await engines.check()
        await engines.check()
    with pytest.raises(EngineError) as gone:
        await engines.check()
    assert first in str(gone.value) and second in str(gone.value)
    engines.outages.gave_up("lost too often")
    with pytest.raises(EngineError, match="lost too often"):
        await engines.check()
    await engines.close()


def test_engines_of_our_own_are_up_while_one_of_them_is() -> None:
    engines = [EngineStatus(port=1), EngineStatus(port=2)]
    status = Status(
        pid=1, started=1, key="k", model="m", recipe="r", flags=[], flags_hash="h", state="ready", engines=engines
    )
    assert not status.up
    engines[1].up = True
    assert status.up
    status.state = "ending"
    assert not status.up
