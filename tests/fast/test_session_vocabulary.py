"""A token id that the model does not have ends a real SGLang server: none gets there, whatever text it comes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from app_stage import app_stage
from scripted import user
from session_stage import Stage

from rollout.engine.tiny import CHECKPOINT
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer

VERSIONS = ("v1", "v2")
UNKNOWN = "<|unknown|>"


def tool(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description, "parameters": {}}}


def changed_tito(directory: Path, change: Callable[[list[dict[str, Any]]], None]) -> Tito:
    """The shipped tokenizer with other added tokens, in front of a model that has 896 ids."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, directory / name)
    data = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    change(data["added_tokens"])
    (directory / "tokenizer.json").write_text(json.dumps(data))
    return Tito(Tokenizer(directory), "qwen3")


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    tito = changed_tito(tmp_path, lambda added: added.append({**added[-1], "id": 896, "content": UNKNOWN}))
    assert [tito.vocabulary] == tito.tokenizer.encode(UNKNOWN), "the first id that the model does not have"
    async with app_stage(tito=tito) as made:
        yield made


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_prompt_id_outside_the_vocabulary_is_400(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version)
    _, first, _ = await stage.chat(session, user("a"))
    before = (await stage.ask("GET", session))[1]
    for start in ([], [user("a"), first["choices"][0]["message"]]):
        for bad in ({"role": "user"}, {"role": "system"}, {"role": "tool", "tool_call_id": "c"}):
            status, body, headers = await stage.chat(session, *start, {**bad, "content": f"x {UNKNOWN} y"})
            assert (400, "false") == (status, headers["x-should-retry"])
            assert body["error"]["message"].startswith("messages: a token id is outside the model's vocabulary of 896")
    status, body, _ = await stage.chat(session, user("a"), tools=[tool(UNKNOWN)])
    assert (400, "invalid_request_error") == (status, body["error"]["type"])
    assert before == (await stage.ask("GET", session))[1]
    assert 1 == len(stage.engine.seen), "a refused one reached the engine"
    assert 200 == (await stage.chat(session, user("a"), first["choices"][0]["message"], user("b")))[0]


async def test_neither_anthropics_endpoints_nor_a_stream_let_one_through(stage: Stage) -> None:
    session, _ = await stage.open()
    body = {"model": "m", "max_tokens": 9, "messages": [user(UNKNOWN)]}
    for path in ("v1/messages", "v1/messages/count_tokens"):
        status, said, _ = await stage.ask("POST", f"{session}/{path}", body)
        assert (400, "error", True) == (status, said["type"], "outside the model's" in said["error"]["message"])
    status, _, headers = await stage.chat(session, user(UNKNOWN), stream=True)
    assert (400, "application/json") == (status, headers["Content-Type"].split(";")[0])
    assert [] == stage.engine.seen


async def test_as_plain_text_it_has_only_ids_of_the_model(stage: Stage) -> None:
    session, _ = await stage.open(control_text="plain")
    assert 200 == (await stage.chat(session, user(UNKNOWN)))[0]
    ((request, _),) = stage.engine.seen
    assert max(request["input_ids"]) < 896


async def test_a_sessions_own_parameters_name_none(stage: Stage) -> None:
    for sampling in ({"stop_token_ids": [896]}, {"logit_bias": {"896": 1.0}}):
        status, body, _ = await stage.ask("POST", "/sessions", {"sampling": sampling})
        assert (400, f"sampling.{next(iter(sampling))}:") == (status, body["error"]["message"].split(" ")[0])


def test_a_turn_end_that_the_model_does_not_have_is_not_asked_for(tmp_path: Path) -> None:
    def move(added: list[dict[str, Any]]) -> None:
        (end,) = (token for token in added if token["content"] == "<|endoftext|>")
        added.append({**end, "id": 896})
        end["content"] = "<|filler|>"

    tito = changed_tito(tmp_path, move)
    assert ([896], 896) == (tito.tokenizer.encode("<|endoftext|>"), tito.vocabulary)
    assert [tito.tokenizer.control_ids["<|im_end|>"]] == tito.stop_token_ids
