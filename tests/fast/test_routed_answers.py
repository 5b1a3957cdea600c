"""Routed experts on their way in: an engine's answer is read strictly, and passes the server whole."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from app_stage import app_stage
from routed import routed_tito, rows_of
from scripted import user
from session_stage import Stage

from rollout.engine.generation import AskedExperts, read_generation
from rollout.errors import EngineError

# The engine's answer


def answered(rows: np.ndarray | None, finish: str = "stop") -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish},
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 1, None], [-0.5, 2, None]],
    }
    return {"meta_info": meta if rows is None else {**meta, "routed_experts": base64.b64encode(rows).decode()}}


ASKED = AskedExperts(layers=3, per_token=2, start=4)
ALL = rows_of([1, 2, 3, 4, 5, 1, 2])


@pytest.mark.parametrize("rows", [ALL[4:], ALL])
def test_an_engine_gives_the_rows_asked_for_or_all(rows: np.ndarray) -> None:
    generation = read_generation(answered(rows), vocabulary=9, experts=ASKED)
    assert (rows.tobytes(), list(rows.shape)) == (generation.routed_experts, generation.routed_experts_shape)


def test_other_rows_are_a_fault_and_so_are_none() -> None:
    for rows in (ALL[3:], ALL[5:], ALL[4:].reshape(-1)[:-1].copy()):
        with pytest.raises(EngineError, match=r"want shape \[2, 3, 2\]"):
            read_generation(answered(rows), vocabulary=9, experts=ASKED)
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        read_generation(answered(None), vocabulary=9, experts=ASKED)


def test_an_aborted_generation_may_have_no_rows() -> None:
    assert read_generation(answered(None, "abort"), vocabulary=9, experts=ASKED).routed_experts is None


# Over HTTP


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with app_stage(tito=routed_tito()) as stage:
        yield stage


async def test_a_turn_whose_engine_gives_no_rows_is_502_and_not_recorded(stage: Stage) -> None:
    session, _ = await stage.open(routed_experts=True)
    status, answer, _ = await stage.chat(session, user("hi"))
    assert 502 == status and "--enable-return-routed-experts" in answer["error"]["message"]
    assert 0 == await stage.n_turns(session)


async def test_rows_pass_the_server_and_stand_in_the_samples(stage: Stage) -> None:
    async def answer(request: dict[str, Any]) -> web.Response:
        rows = rows_of([*request["input_ids"], *stage.engine.ids])[request["routed_experts_start_len"] :]
        given = base64.b64encode(rows.tobytes()).decode()
        return web.json_response(stage.engine.reply(request, routed_experts=given))

    stage.engine.answer = answer
    session, _ = await stage.open(routed_experts=True, lora="tuned")
    _, first, _ = await stage.chat(session, user("a"))
    await stage.chat(session, user("a"), first["choices"][0]["message"], user("b"))
    assert [(True, 0, "tuned"), (True, first["usage"]["total_tokens"] - 1, "tuned")] == [
        (request["return_routed_experts"], request["routed_experts_start_len"], request["lora_path"])
        for request, _ in stage.engine.seen
    ]
    _, reply, _ = await stage.ask("POST", f"{session}/samples", {}, Accept="application/json")
    (sample,) = reply["samples"]
    rows = rows_of(sample["tokens"])
    assert (list(rows.shape), "tuned") == (sample["routed_experts_shape"], sample["lora"])
    assert rows.tobytes() == base64.b64decode(sample["routed_experts"])


async def test_a_dense_models_session_cannot_ask_for_rows() -> None:
    async with app_stage() as stage:
        status, answer, _ = await stage.ask("POST", "/sessions", {"routed_experts": True})
        assert (400, True) == (status, "mixture of experts" in answer["error"]["message"])
        assert 400 == (await stage.ask("POST", "/sessions", {"routed_experts": "yes"}))[0]
