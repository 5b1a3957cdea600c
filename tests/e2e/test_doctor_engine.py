"""`rollout doctor`'s look at engines: each fault is made by a proxy before a real engine, and found."""

import itertools
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from faulty_facts import FaultyFacts
from loopback import served

from rollout.config import make_config
from rollout.doctor.engine import check_engine
from rollout.doctor.finding import Finding
from rollout.doctor.orchestrator import check_prefect
from rollout.doctor.sessions import check_sessions
from rollout.doctor.tokens import Prompt, check_tokens
from rollout.engine.tiny import CHECKPOINT
from rollout.process import free_port


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    findings, prompt = check_tokens(CHECKPOINT, "qwen3")
    assert {"ok"} == {finding.state for finding in findings} and prompt is not None
    return prompt


@pytest.fixture
async def proxy(engine_url: str) -> AsyncIterator[FaultyFacts]:
    async with FaultyFacts(engine_url).serving() as proxy:
        assert isinstance(proxy, FaultyFacts)
        yield proxy


async def problems(url: str, prompt: Prompt | None, *, embedded: bool = False) -> list[Finding]:
    return [finding for finding in await check_engine(url, prompt, embedded=embedded) if finding.state != "ok"]


async def test_an_engine_that_is_in_order(proxy: FaultyFacts, prompt: Prompt):
    findings = await check_engine(proxy.url, prompt, embedded=False)
    whats = ["engine", "clock", "vocabulary", "context", "engine's ids", "generate", "repeats"]
    assert [("ok", what) for what in whats] == [(finding.state, finding.what) for finding in findings]
    texts, ids = proxy.seen[:1], proxy.seen[1:]
    assert ["text"] == [key for key in ("text", "input_ids") if key in texts[0]]
    assert [prompt.ids] * 2 == [request["input_ids"] for request in ids]


async def test_nobody_there(prompt: Prompt):
    (found,) = await check_engine(f"http://127.0.0.1:{free_port()}", prompt, embedded=False)
    assert ("fail", "engine") == (found.state, found.what)
    assert "start the engine, or correct --engine-url" in found.detail


async def test_no_url_at_all(prompt: Prompt):
    (found,) = await check_engine("nonsense", prompt, embedded=False)
    assert "fail" == found.state and "--engine-url" in found.detail


async def test_another_kind_of_server(proxy: FaultyFacts, prompt: Prompt):
    (found,) = await check_engine(f"{proxy.url}/v1/models", prompt, embedded=False)
    assert "fail" == found.state and "give the URL of an SGLang server" in found.detail


@pytest.mark.parametrize(
    ("late_s", "state"), [(0.0, None), (3.0, None), (20.0, "warn"), (-20.0, "warn"), (300.0, "fail"), (-3600.0, "fail")]
)
async def test_a_clock_that_is_wrong(proxy: FaultyFacts, prompt: Prompt, late_s: float, state: str | None):
    proxy.late_s = late_s
    found = [(finding.state, finding.what) for finding in await problems(proxy.url, None)]
    assert found[:-1] == ([(state, "clock")] if state else [])
    assert ("warn", "generate") == found[-1]  # without a prompt nothing is generated
    assert [] == proxy.seen


@pytest.mark.parametrize(
    ("facts", "state", "what", "advice"),
    [
        ({"vocab_size": 151936}, "fail", "vocabulary", "give the --model that the engine serves"),
        ({"context_length": 100}, "fail", "context", "raise its context length"),
        ({"context_length": 10**6}, "warn", "context", "was made for 2048"),
    ],
)
async def test_facts_that_do_not_fit(
    proxy: FaultyFacts, prompt: Prompt, facts: dict[str, Any], state: str, what: str, advice: str
):
    proxy.facts = facts
    found = await problems(proxy.url, prompt)
    assert (state, what) == (found[0].state, found[0].what) and advice in found[0].detail
    # An engine that may not know our ids is sent none of them.
    assert (state == "fail") == ([] == proxy.seen)


@pytest.mark.parametrize(("more", "state"), [(1, "warn"), (2, "fail"), (-1, "fail")])
async def test_an_engine_with_another_tokenizer(proxy: FaultyFacts, prompt: Prompt, more: int, state: str):
    def count(request: dict[str, Any], reply: dict[str, Any]) -> None:
        if "text" in request:
            reply["meta_info"]["prompt_tokens"] += more

    proxy.change = count
    found = await problems(proxy.url, prompt)
    assert (state, "engine's ids") == (found[0].state, found[0].what)
    assert (state == "fail") == all("input_ids" not in request for request in proxy.seen)


def not_counted(request: dict[str, Any], reply: dict[str, Any]) -> None:
    if "input_ids" in request:
        reply["meta_info"]["prompt_tokens"] += 1


def outside(request: dict[str, Any], reply: dict[str, Any]) -> None:
    if "input_ids" in request:
        reply["meta_info"]["output_token_logprobs"][0][1] = 896


def not_finite(request: dict[str, Any], reply: dict[str, Any]) -> None:
    if "input_ids" in request:
        reply["meta_info"]["output_token_logprobs"][0][0] = None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (not_counted, "259 ids were sent"),
        (outside, "outside the vocabulary of 896"),
        (not_finite, "is not a number"),
    ],
)
async def test_answers_that_no_session_takes(proxy: FaultyFacts, prompt: Prompt, spoil: Any, words: str):
    proxy.change = spoil
    (found,) = await problems(proxy.url, prompt)
    assert ("fail", "generate") == (found.state, found.what)
    assert words in found.detail and "see the engine's log" in found.detail


async def test_an_engine_that_fails(proxy: FaultyFacts, prompt: Prompt):
    async def fault(request: dict[str, Any]) -> web.Response | None:
        return web.Response(status=503, text="out of memory") if "input_ids" in request else None

    proxy.fault = fault
    (found,) = await problems(proxy.url, prompt)
    assert "fail" == found.state and "out of memory" in found.detail


@pytest.mark.parametrize(("embedded", "state"), [(False, "warn"), (True, "fail")])
async def test_a_seed_that_is_ignored(proxy: FaultyFacts, prompt: Prompt, embedded: bool, state: str):
    seeds = itertools.count(1)

    def other_seed(request: dict[str, Any]) -> None:
        if "input_ids" in request:
            request["sampling_params"]["sampling_seed"] = next(seeds)

    proxy.ask = other_seed
    (found,) = await problems(proxy.url, prompt, embedded=embedded)
    assert (state, "repeats") == (found.state, found.what) and "other tokens" in found.detail


async def test_one_bit_of_one_logprob(proxy: FaultyFacts, prompt: Prompt):
    def move(request: dict[str, Any], reply: dict[str, Any]) -> None:
        if len(proxy.seen) == 3:
            entry = reply["meta_info"]["output_token_logprobs"][-1]
            entry[0] = math.nextafter(entry[0], -1.0)

    proxy.change = move
    (found,) = await problems(proxy.url, prompt)
    assert ("warn", "repeats") == (found.state, found.what) and "other logprob bits" in found.detail
    assert "--enable-deterministic-inference" in found.detail


async def test_sessions_take_a_turn_of_a_good_engine_and_tell_of_a_bad_one(
    proxy: FaultyFacts, prompt: Prompt, tmp_path: Path
):
    config = make_config(engine="external", engine_url=proxy.url, max_new_tokens=16)
    good = await check_sessions(proxy.url, CHECKPOINT, config, tmp_path / "log")
    assert "ok" == good.state and "took a turn" in good.detail
    proxy.change = not_finite
    bad = await check_sessions(proxy.url, CHECKPOINT, config, tmp_path / "log")
    assert ("fail", "sessions") == (bad.state, bad.what) and "not a number" in bad.detail


async def test_a_session_server_that_does_not_start(proxy: FaultyFacts, tmp_path: Path):
    config = make_config(engine="external", engine_url=proxy.url, renderer="no_such_family")
    found = await check_sessions(proxy.url, CHECKPOINT, config, tmp_path / "log")
    assert "fail" == found.state and "no_such_family" in found.detail


async def test_the_users_prefect_server(prefect_url: str):
    found = await check_prefect(prefect_url)
    assert "ok" == found.state and "as the client's" in found.detail


async def test_a_prefect_server_that_is_not_there():
    found = await check_prefect(f"http://127.0.0.1:{free_port()}/api")
    assert "fail" == found.state and "unset PREFECT_API_URL" in found.detail


async def test_no_prefect_server_of_the_users():
    assert "ok" == (await check_prefect(None)).state


@pytest.mark.parametrize(
    ("health", "version", "state", "words"),
    [
        (200, web.json_response("2.0.1"), "warn", "install one version on both"),
        (200, web.Response(status=404), "warn", "does not say its version"),
        (401, web.Response(status=401), "warn", "asks for a login"),
        (500, web.Response(status=500), "fail", "answers 500"),
    ],
)
async def test_a_faulty_prefect_server(health: int, version: web.Response, state: str, words: str):
    async def faulty(http: web.Request) -> web.Response:
        return version if http.path.endswith("/admin/version") else web.Response(status=health)

    app = web.Application()
    app.router.add_get("/{path:.*}", faulty)
    async with served(app) as url:
        found = await check_prefect(f"{url}/api")
    assert state == found.state and words in found.detail
