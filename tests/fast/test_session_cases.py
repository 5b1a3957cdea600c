"""Failures that other people met, at a session and at its server: each by its id in the list of cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from aiohttp import web
from app_stage import app_stage
from scripted import TOOLS, Conversation, call, tiny_tito, user
from session_stage import END, Stage, failing

from rollout.columns import session_table, table_to_samples
from rollout.errors import SessionRefused
from rollout.session.node import tokens_of

TITO = tiny_tito()
VERSIONS = ("v1", "v2")
PATHS = ("v1/chat/completions", "v1/messages")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with app_stage(keepalive_s=0.02) as made:
        yield made


def message_of(reply: Any) -> dict[str, Any]:
    return reply["choices"][0]["message"]


@pytest.mark.parametrize("version", VERSIONS)
async def test_g07_a_request_that_fails_upstream_leaves_the_view_as_it_was(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version)
    _, first, _ = await stage.chat(session, user("a"))
    start = [user("a"), message_of(first)]
    await stage.chat(session, *start, user("b"))

    async def shown() -> bytes:
        async with stage.http.get(stage.url + session) as reply:
            return await reply.read()

    before = await shown()
    stage.engine.answer = failing(500)
    assert 500 == (await stage.chat(session, *start, user("other")))[0]
    assert before == await shown()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {str(10**9): 1}}, "logit_bias"),
        ({"input_ids": [1, 2]}, "input_ids"),
    ],
)
async def test_g23_an_id_beyond_the_vocabulary_never_reaches_the_engine(stage: Stage, change: Any, field: str) -> None:
    session, _ = await stage.open()
    status, body, _ = await stage.chat(session, user("hi"), **change)
    assert (400, True, []) == (status, body["error"]["message"].startswith(field), stage.engine.seen)
    assert 200 == (await stage.chat(session, user("hi")))[0]


@pytest.mark.parametrize(
    "bad",
    [b"[[NaN, 5, null], [-0.5, 6, null]]", b"[[-0.5, 5, null]]", b"[[-0.5, 5, null], [null, 6, null]]"],
    ids=["nan", "one fewer", "null"],
)
async def test_g24_a_log_prob_that_is_none_is_502_counted_and_not_recorded(stage: Stage, bad: bytes) -> None:
    async def answer(request: dict[str, Any]) -> web.Response:
        good = json.dumps(stage.engine.reply(request, output_token_logprobs="BAD")).encode()
        return web.Response(body=good.replace(b'"BAD"', bad), content_type="application/json")

    session, _ = await stage.open()
    stage.engine.answer = answer
    status, body, headers = await stage.chat(session, user("hi"))
    assert (502, "server_error", "false") == (status, body["error"]["type"], headers["x-should-retry"])
    assert [] == (await stage.ask("GET", session))[1]["records"]
    _, metrics, _ = await stage.ask("GET", "/metrics")
    assert "rollout_session_engine_failures_total 1" in metrics.decode().splitlines()


async def test_what_the_engine_refuses_is_counted_apart_from_its_failures(stage: Stage) -> None:
    session, _ = await stage.open()
    stage.engine.answer = failing(400)
    assert 400 == (await stage.chat(session, user("hi")))[0]
    stage.engine.answer = failing(500)
    assert 500 == (await stage.chat(session, user("hi")))[0]
    _, metrics, _ = await stage.ask("GET", "/metrics")
    told = dict(
        line.removeprefix("rollout_session_").split() for line in metrics.decode().splitlines() if "#" not in line
    )
    assert ("1", "1", "0") == tuple(
        told[name] for name in ("engine_refusals_total", "engine_failures_total", "generations_held")
    )


async def test_no_rid_begins_with_another_for_sglang_aborts_by_prefix(stage: Stage) -> None:
    session, _ = await stage.open()
    for _ in range(20):
        await stage.chat(session, user("hi"))
    rids = [request["rid"] for request, _ in stage.engine.seen]
    assert (20, 1) == (len(set(rids)), len({len(rid) for rid in rids}))


def test_g26_a_turn_that_ends_inside_a_character_keeps_ids_and_bits(tmp_path: Path) -> None:
    ids = TITO.tokenizer.encode("x\U00013000")[:-1]
    talk = Conversation(TITO, "v2")
    talk.ask(user("a"), text=ids, finish="length")
    assert talk.history[-1]["content"].endswith("\ufffd")
    (sample,) = talk.session.samples().samples
    assert (ids, True) == (sample.tokens_T[-len(ids) :].tolist(), sample.response.endswith("\ufffd"))
    json.dumps(talk.last_reply, ensure_ascii=False).encode()
    pq.write_table(session_table([sample]), tmp_path / "rows.parquet")
    (back,) = table_to_samples(pq.read_table(tmp_path / "rows.parquet"))
    assert (sample.response, sample.tokens_T.tobytes()) == (back.response, back.tokens_T.tobytes())
    assert sample.rollout_log_probs_R.tobytes() == back.rollout_log_probs_R.tobytes()


@pytest.mark.parametrize("version", VERSIONS)
def test_g26_a_lone_surrogate_is_400(version: str) -> None:
    talk = Conversation(TITO, version)
    talk.ask(user("a"))
    with pytest.raises(SessionRefused, match="surrogates") as refused:
        talk.begin([*talk.history, user("b\ud800")])
    assert 400 == refused.value.status


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", ["developer", "wizard"])
def test_g33_a_first_request_with_a_role_that_is_not_known_is_400(version: str, role: str) -> None:
    talk, unknown = Conversation(TITO, version), {"role": role, "content": "x"}
    for messages in ([unknown, user("a")], [user("a"), unknown]):
        with pytest.raises(SessionRefused, match="does not support appending this role") as refused:
            talk.begin(messages)
        assert (400, 0) == (refused.value.status, talk.session.running)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bad", ['{"cmd": "ls" "x": 1}', '{"cmd": "ec'], ids=["no comma", "cut"])
def test_g39_arguments_that_are_no_json_stay_text_and_the_rollout_goes_on(version: str, bad: str) -> None:
    text = f'<tool_call>\n{{"name": "lookup", "arguments": {bad}}}\n</tool_call>'
    talk = Conversation(TITO, version)
    talk.ask(user("go"), text=text, tools=TOOLS)
    choice = talk.last_reply["choices"][0]
    assert (text, False, "stop") == (
        choice["message"]["content"],
        "tool_calls" in choice["message"],
        choice["finish_reason"],
    )
    talk.ask(user("again"), text=call("x"), tools=TOOLS)
    assert ("tool_calls", 2) == (
        talk.last_reply["choices"][0]["finish_reason"],
        talk.session.samples().samples[0].turns,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_g43_a_call_that_is_cut_is_no_call_and_its_ids_stay(version: str) -> None:
    text = '<tool_call>\n{"name": "lookup", "arguments": {"cmd": "ec'
    for cut in (text, call("x")):
        talk = Conversation(TITO, version)
        talk.ask(user("go"), text=cut, finish="length", tools=TOOLS)
        choice = talk.last_reply["choices"][0]
        assert ("length", False) == (choice["finish_reason"], "tool_calls" in choice["message"])
        (sample,) = talk.session.samples().samples
        ids = TITO.tokenizer.encode(cut)
        assert ("truncated", ids) == (sample.status, sample.tokens_T[-len(ids) :].tolist())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_g44_thinking_that_was_not_closed_is_known_again(version: str, tools: Any) -> None:
    """Stopped without a closer: content. Cut without one: reasoning. Both are matched when they come back."""
    body = {"tools": tools} if tools else {}
    talk = Conversation(TITO, version, enable_thinking=True)
    talk.ask(user("a"), text="42", **body)
    assert ("42", None) == (talk.history[-1]["content"], talk.history[-1].get("reasoning_content"))
    turn = talk.begin([*talk.history, user("b")], **body)
    assert talk.session.nodes[0] is turn.parent
    talk.commit(turn, "<think>\nstill at it", "length")
    message = talk.last_reply["choices"][0]["message"]
    assert ("", "still at it") == (message["content"], message["reasoning_content"].strip())
    talk.history = [*talk.history, user("b"), message]
    if version == "v1":
        assert talk.session.nodes[1] is talk.begin([*talk.history, user("c")], **body).parent
    else:
        with pytest.raises(SessionRefused, match="truncated generation cannot be extended: node 1"):
            talk.begin([*talk.history, user("c")], **body)


@pytest.mark.parametrize("path", PATHS)
async def test_g45_an_answer_that_breaks_off_ends_the_stream_as_an_error(stage: Stage, path: str) -> None:
    async def breaks_off(request: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        reply = web.StreamResponse(headers={"Content-Length": "1000"})
        await reply.prepare(stage.engine.request)
        await reply.write(b'{"text": "half')
        stage.engine.request.transport.close()
        return reply

    session, _ = await stage.open()
    stage.engine.answer = breaks_off
    body = {"model": "m", "max_tokens": 9, "messages": [user("hi")], "stream": True}
    async with stage.http.post(f"{stage.url}{session}/{path}", json=body) as reply:
        content = await reply.content.read()
    assert content.startswith(b": generating") and b'"error":{' in content and b"backend transport error" in content
    assert b"[DONE]" not in content and b"message_stop" not in content
    assert [] == (await stage.ask("GET", session))[1]["records"]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (["oops"], "messages[0]"),
        ([None], "messages[0]"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
async def test_g57_what_is_no_message_is_400_by_its_place(
    stage: Stage, version: str, messages: list[Any], place: str
) -> None:
    session, _ = await stage.open(version=version)
    _, first, _ = await stage.chat(session, user("a"))
    before = (await stage.ask("GET", session))[1]
    status, body, _ = await stage.chat(session, *messages)
    assert (400, True) == (status, body["error"]["message"].startswith(place))
    there = place.replace("[0]", "[2]")
    status, body, _ = await stage.chat(session, user("a"), message_of(first), *messages)
    assert (400, True) == (status, body["error"]["message"].startswith(there))
    assert before == (await stage.ask("GET", session))[1]


@pytest.mark.parametrize(
    "change", [{"n": 0}, {"max_tokens": 0}, {"tool_choice": "some"}, {"tool_choice": {"type": "function"}}]
)
async def test_g60_a_stream_that_may_not_be_never_begins(stage: Stage, change: dict[str, Any]) -> None:
    session, _ = await stage.open()
    status, body, headers = await stage.chat(session, user("hi"), stream=True, **change)
    assert (400, "application/json") == (status, headers["Content-Type"].split(";")[0])
    assert body["error"]["message"].startswith(next(iter(change)))
    assert [] == stage.engine.seen


@pytest.mark.parametrize("version", VERSIONS)
def test_g63_the_close_token_that_the_template_adds_is_not_trained_on(version: str) -> None:
    talk = Conversation(TITO, version)
    sampled = TITO.tokenizer.encode("one END")
    turn = talk.begin([user("a")], stop=["END"])
    reply = talk.commit(turn, sampled, matched="END")
    assert "one " == reply["content"]
    talk.history = [user("a"), reply]
    talk.ask(user("b"))
    (sample,) = talk.session.samples().samples
    first, second = talk.session.nodes
    n_prompt, n_sampled = first.n_prompt, len(sampled)
    assert sampled == sample.tokens_T[n_prompt : n_prompt + n_sampled].tolist()
    assert (END, 0, 0.0) == (
        sample.tokens_T[n_prompt + n_sampled],
        sample.loss_mask_R[n_sampled],
        sample.rollout_log_probs_R[n_sampled],
    )
    assert [1] * n_sampled == sample.loss_mask_R[:n_sampled].tolist()
    assert n_sampled + len(second.generation.output_ids_O) == int(sample.loss_mask_R.sum())
    assert tokens_of([first, second]).tobytes() == sample.tokens_T.tobytes()
