"""What our client and sessions rely on in a real SGLang, and that it does not start where the CPU plugin cannot apply.

The recipe is `tiny_cpu`; all tests of the first part share one server and leave it as it is.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout.engine.client import EngineClient
from rollout.engine.generation import Generation, read_generation
from rollout.engine.launch import launch
from rollout.engine.recipes import tiny_cpu
from rollout.engine.tiny import CHECKPOINT
from rollout.engine.watch import generates
from rollout.errors import EngineRefused
from rollout.process import ChildFailed
from rollout.sample import WeightSpan
from rollout.session.chat import _engine_refusal

pytestmark = pytest.mark.full
PROMPT = [40, 287, 554, 533]
VOCABULARY = 1024
CONTEXT = 2048
NEAR = 1e-4
"""Nats by which a CPU's float arithmetic moves a log-prob when other requests run beside it, at most."""


@pytest.fixture
async def client(sglang_url: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(sglang_url, timeout_s=120.0)
    yield client
    await client.close()


async def sample(client: EngineClient, rid: str = "mine", prompt: list[int] = PROMPT, **params: Any) -> Generation:
    """One generation, read as a session reads it; 32 new tokens at temperature 0 where `params` say no other."""
    params = {"temperature": 0, "max_new_tokens": 32, **params}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    reply = await client.generate(body, rid=rid, session_id=None)
    assert rid == reply["meta_info"]["id"]
    assert reply["output_ids"] == [entry[1] for entry in reply["meta_info"]["output_token_logprobs"]]
    return read_generation(reply, vocabulary=VOCABULARY, n_prompt=len(prompt))


def bits(generation: Generation) -> tuple[bytes, bytes]:
    return generation.output_ids_O.tobytes(), generation.output_log_probs_O.tobytes()


async def test_an_answer_counts_names_its_weights_and_says_why_it_ended(client: EngineClient):
    cut = await sample(client)
    assert (len(PROMPT), 32, "length", None) == (cut.prompt_tokens, len(cut.output_ids_O), cut.finish, cut.matched)
    assert ("default", [WeightSpan(version="default", start=0, end=32)]) == (cut.weight_version, cut.weight_spans)
    assert 0 == cut.cached_tokens == (await sample(client)).cached_tokens, "no prefix is reused between requests"
    assert (cut.output_log_probs_O < 0).all()
    ids = cut.output_ids_O.tolist()
    stopping = ids[5]
    stopped = await sample(client, stop_token_ids=[stopping])
    assert ("stop", stopping) == (stopped.finish, stopped.matched)
    assert ids[: ids.index(stopping) + 1] == stopped.output_ids_O.tolist(), "the id that stopped it is sampled, too"


async def test_a_seed_repeats_its_bits_alone_and_its_tokens_beside_others(client: EngineClient):
    given = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 64, "ignore_eos": True}
    one, again, other = [await sample(client, sampling_seed=seed, **given) for seed in (5, 5, 6)]
    assert bits(one) == bits(again) != bits(other)
    wide = await asyncio.gather(
        *(sample(client, f"wide-{k}", sampling_seed=5 if k == 8 else 100 + k, **given) for k in range(16))
    )
    assert one.output_ids_O.tolist() == wide[8].output_ids_O.tolist()
    assert abs(one.output_log_probs_O - wide[8].output_log_probs_O).max() < NEAR
    assert 16 == len({bits(generation) for generation in wide})


async def test_an_abort_by_rid_gives_what_was_sampled_so_far(client: EngineClient):
    await client.abort("nobody")
    turns = [
        asyncio.create_task(sample(client, rid, max_new_tokens=1900, ignore_eos=True)) for rid in ("mine", "other")
    ]
    await asyncio.sleep(1.0)
    await client.abort("mine")
    ended = await turns[0]
    assert "abort" == ended.finish and 0 < len(ended.output_ids_O) < 1900
    assert not turns[1].done(), "another request was aborted, too"
    await client.abort("other")
    await turns[1]
    whole = await sample(client, max_new_tokens=len(ended.output_ids_O), ignore_eos=True)
    assert whole.output_ids_O.tolist() == ended.output_ids_O.tolist()


@pytest.mark.parametrize(
    ("prompt", "params", "said", "code"),
    [
        ([5] * 2100, {}, "The input (2100 tokens) is longer than the model's context length (2048", "long"),
        ([5] * 2000, {"max_new_tokens": 100}, "exceeds the model's maximum context length of 2048 tokens", "long"),
        (PROMPT, {"temperature": -1}, "temperature must be a non-negative finite number, got -1", None),
        (PROMPT, {"top_p": 2}, "top_p must be in (0, 1], got 2", None),
        (PROMPT, {"nonsense": 1}, "unknown field `nonsense`", None),
        ([], {}, "input_ids cannot be empty", None),
    ],
)
async def test_a_bad_request_is_refused_in_words_that_a_session_passes_on(
    client: EngineClient, prompt: list[int], params: dict[str, Any], said: str, code: str | None
):
    with pytest.raises(EngineRefused) as refused:
        await sample(client, prompt=prompt, **params)
    passed_on = _engine_refusal(refused.value)
    assert 400 == refused.value.status == passed_on.status
    assert said in str(passed_on)
    assert (code == "long") == (passed_on.code == "context_length_exceeded")
    await sample(client, max_new_tokens=1)


async def test_a_second_request_with_a_running_ones_rid_is_refused(client: EngineClient):
    both = [sample(client, "twin", max_new_tokens=200, ignore_eos=True) for _ in range(2)]
    results = await asyncio.gather(*both, return_exceptions=True)
    assert {Generation, EngineRefused} == set(map(type, results))


async def test_an_engine_says_what_it_is_and_that_it_generates(client: EngineClient, sglang_url: str):
    told, model = await client.facts("/server_info"), await client.model_info()
    assert (True, True, "cpu", "0.5.23") == (
        told["enable_deterministic_inference"],
        told["disable_radix_cache"],
        told["device"],
        told["version"],
    )
    assert (str(CHECKPOINT), "default") == (model["model_path"], model["weight_version"])
    assert CONTEXT == (await client.facts("/v1/models"))["data"][0]["max_model_len"]
    (load,) = (await client.facts("/v1/loads"))["loads"]
    assert {"num_running_reqs": 0, "num_waiting_reqs": 0}.items() <= load.items()
    async with aiohttp.ClientSession() as http:
        assert await generates(http, sglang_url, 30.0)


HIDDEN = 'import sys\nsys.modules["sglang.srt.mem_cache.pool_host.common"] = None\n'
"""Fault: an SGLang in which a module that the plugin replaces a part of was moved away."""


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PYTHONPATH", "rollout-sglang-cpu does not fit this SGLang, which has no sglang.srt.mem_cache.pool_host"),
        ("SGLANG_PLUGINS", "you explicitly specified 'torch_native'"),
    ],
    ids=["another SGLang", "not installed"],
)
async def test_sglang_does_not_start_where_the_plugin_cannot_apply(
    sglang_python: Path, tmp_path: Path, variable: str, said: str
):
    """It would sample otherwise than asked, and nothing but rows that do not repeat would tell."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    value = str(tmp_path) if variable == "PYTHONPATH" else "another"
    recipe = replace(tiny_cpu(), environment={**tiny_cpu().environment, variable: value})
    with pytest.raises(ChildFailed) as failed:
        await launch(recipe, model=CHECKPOINT, python=sglang_python, log=tmp_path / "sglang.log")
    assert said in str(failed.value) and "SGLang ended with" in str(failed.value)
