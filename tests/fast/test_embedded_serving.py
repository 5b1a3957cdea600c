"""The HTTP surface over a model that breaks: the request gets a 500, the engine goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from embedded_checkpoints import load, make_checkpoint
from torch import Tensor

from rollout.engine.answer import Served
from rollout.engine.checkpoint import read_checkpoint
from rollout.engine.client import EngineClient
from rollout.engine.model import KvCache, Qwen3, load_model
from rollout.engine.scheduler import Scheduler
from rollout.engine.serving import EngineServer
from rollout.errors import EngineError, EngineRefused
from rollout.tito.tokenizer import Tokenizer


class BreaksOnSomePrompts(Qwen3):
    """Injects faults: a prompt of token 13 has no finite logits, one of token 14 raises."""

    def prefill(self, cache: KvCache, ids: Sequence[int]) -> Tensor:
        if ids[0] == 14:
            raise RuntimeError("out of memory")
        logits = super().prefill(cache, ids)
        return logits * float("nan") if ids[0] == 13 else logits


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    checkpoint = read_checkpoint(make_checkpoint(tmp_path / "model"))
    model, tokenizer = load(checkpoint.directory), Tokenizer(checkpoint.directory)
    model.__class__ = BreaksOnSomePrompts
    scheduler = Scheduler(model, stop_ids=frozenset(), decode=tokenizer.decode)
    served = Served(checkpoint=checkpoint, tokenizer=tokenizer, context=100, weight_version="step-7")
    server = EngineServer(served, scheduler, load=load_model, initializer=lambda: None)
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield made
    await made.close()
    await runner.cleanup()


async def _generate(client: EngineClient, token: int, **params: Any) -> dict[str, Any]:
    body = {"input_ids": [token], "sampling_params": {"max_new_tokens": 3, **params}, "return_logprob": True}
    return await client.generate(body, rid=f"r{token}", session_id=None)


@pytest.mark.parametrize(("token", "words"), [(13, "no finite logits"), (14, "the engine failed: RuntimeError: out")])
async def test_a_broken_model_is_a_500_and_the_next_request_is_served(
    client: EngineClient, token: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match=words) as failure:
        await _generate(client, token)
    assert not isinstance(failure.value, EngineRefused)
    assert '"object":"error"' in str(failure.value)
    assert ("out of memory" in capfd.readouterr().err) == (token == 14)
    assert (await _generate(client, 12))["meta_info"]["completion_tokens"] == 3


async def test_the_served_context_and_version_are_the_given_ones(client: EngineClient) -> None:
    with pytest.raises(EngineRefused, match=r"context length of 100 tokens"):
        await _generate(client, 1, max_new_tokens=99)
    meta = (await _generate(client, 1, max_new_tokens=98))["meta_info"]
    assert meta["weight_versions"] == [{"version": "step-7", "start": 0, "end": 98}]
    assert (await client.model_info())["weight_version"] == "step-7"
