"""What a batch asks of an engine beside the model: an adapter, routed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from loopback import served

from rollout.batch.model import model_digest
from rollout.config import make_config
from rollout.errors import BadConfig


async def digest(facts: dict[str, Any], **options: Any) -> str:
    """The model's digest with an engine that tells these facts at these paths, 404 at others."""
    facts = {"/model_info": {"model_path": "m", "weight_version": "w"}, **facts}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(facts[request.path]) if request.path in facts else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with served(app) as url:
        return await model_digest(make_config(engine="external", engine_url=url, **options), Path("unused"))


def models(**adapters: str) -> dict[str, Any]:
    """/v1/models as SGLang answers it: the model itself, and its adapters behind it."""
    data = [{"id": "m", "root": "m", "parent": None}]
    return {"data": [*data, *({"id": name, "root": root, "parent": "m"} for name, root in adapters.items())]}


async def test_an_adapter_and_its_files_are_in_the_models_digest(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    facts = {"/v1/models": models(tuned=str(tmp_path), other="elsewhere", moved="elsewhere else")}
    found = [await digest(facts)]
    found += [await digest(facts, lora=name) for name in ("tuned", "other", "moved")]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    found.append(await digest(facts, lora="tuned"))
    assert len(found) == len(set(found))
    assert await digest({"/v1/models": models(other="elsewhere")}, lora="other") == found[2]


async def test_an_adapter_that_the_engine_has_not_is_refused() -> None:
    with pytest.raises(BadConfig, match="lora 'x': the engine has no such adapter, but a, b"):
        await digest({"/v1/models": models(b="1", a="2")}, lora="x")
    with pytest.raises(BadConfig, match=r"but none \(start it with --enable-lora --lora-paths NAME=PATH\)"):
        await digest({"/v1/models": models()}, lora="m")


async def test_an_engine_without_routed_experts_is_refused() -> None:
    with pytest.raises(BadConfig, match="start the engine with --enable-return-routed-experts"):
        await digest({"/server_info": {"enable_return_routed_experts": False}}, routed_experts=True)
    plain = await digest({})
    assert plain == await digest({"/server_info": {"enable_return_routed_experts": True}}, routed_experts=True)


async def test_an_engine_that_does_not_tell_is_believed() -> None:
    assert await digest({}, routed_experts=True) == await digest({})
    assert await digest({}, lora="a") != await digest({}, lora="b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": "a"}, "lora needs engine=external"),
        ({"lora": "a", "engine": "sglang", "engine_recipe": "tiny_cpu"}, "lora needs engine=external"),
        ({"routed_experts": True}, "routed_experts needs SGLang"),
        ({"lora": "", "engine": "external", "engine_url": "u"}, "lora: String should have at least 1 character"),
    ],
)
def test_an_engine_that_cannot_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        make_config(**options)


async def test_a_recipe_that_keeps_no_experts_is_refused() -> None:
    config = make_config(engine="sglang", engine_recipe="tiny_cpu", routed_experts=True)
    with pytest.raises(BadConfig, match="the recipe tiny_cpu has no --enable-return-routed-experts"):
        await model_digest(config, Path("unused"))
