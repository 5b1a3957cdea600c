"""Engines' URLs as users give them, and facts that engines must share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from loopback import served

from rollout.engine.agreement import common_facts, require_same
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
    with pytest.raises(BadConfig) as refused:
        ServerOptions(engine=text, tokenizer=Path("t"))
    assert words in str(refused.value)


def test_urls_keep_their_order_and_lose_their_slash() -> None:
    text = "http://b:1/, https://a ,http://[::1]:30000"
    assert ["http://b:1", "https://a", "http://[::1]:30000"] == read_urls(text)
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
