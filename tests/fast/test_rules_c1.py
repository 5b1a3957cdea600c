"""Rules C1 to C3 of the reference's session server: routes, codes and texts, what is read of a request."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from app_stage import app_stage
from scripted import Conversation, tiny_tito, user
from session_stage import Stage, failing

from rollout.errors import SessionRefused
from rollout.session import picking
from rollout.session import session as session_module
from rollout.session.client import SessionClient

TITO = tiny_tito()
VERSIONS = ("v1", "v2")
HEX = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with app_stage() as made:
        yield made


def message_of(reply: Any) -> dict[str, Any]:
    return reply["choices"][0]["message"]


async def test_c1_routes_and_their_bodies(stage: Stage) -> None:
    health = (await stage.ask("GET", "/health"))[1]
    assert {"status", "session_server_instance_id"} == health.keys()
    assert HEX.fullmatch(health["session_server_instance_id"])
    assert health == (await stage.ask("GET", "/health"))[1]
    session, _ = await stage.open()
    assert HEX.fullmatch(session.split("/")[2])
    assert 200 == (await stage.chat(session, user("hi")))[0]
    status, shown, _ = await stage.ask("GET", session)
    assert (200, {"session_id", "records", "metadata"}) == (status, shown.keys())
    for body in (None, {}, {"max_seq_len": 4096, "metadata": {"a": 1}}):
        assert 200 == (await stage.ask("POST", f"{session}/samples", body))[0]
    assert (204, b"") == (await stage.ask("DELETE", session))[:2]


async def test_c1_json_is_compact_raw_utf8_and_has_no_nan(stage: Stage) -> None:
    session, _ = await stage.open()
    await stage.chat(session, user("ü 東 \U0001f600"))
    async with stage.http.get(stage.url + session) as reply:
        content = await reply.read()
        assert "application/json" == reply.content_type
    assert "ü 東 \U0001f600".encode() in content
    assert content.startswith(b'{"session_id":"') and b'": ' not in content and b'", "' not in content
    for body in (b'{"metadata": {"a": NaN}}', b'{"metadata": {"a": Infinity}}'):
        async with stage.http.post(f"{stage.url}{session}/samples", data=body) as reply:
            assert 400 == reply.status


async def test_c2_400_invalid_json_says_so(stage: Stage) -> None:
    session, _ = await stage.open()
    async with stage.http.post(f"{stage.url}{session}/v1/chat/completions", data=b"{") as reply:
        body = await reply.json()
        assert (400, True) == (reply.status, body["error"]["message"].startswith("invalid JSON body: "))


async def test_c2_400_template_kwargs_that_are_no_object(stage: Stage) -> None:
    session, _ = await stage.open()
    for bad in ([], "x", 1, True):
        status, body, _ = await stage.chat(session, user("hi"), chat_template_kwargs=bad)
        assert (400, "chat_template_kwargs must be an object") == (status, body["error"]["message"])


async def test_c2_404_names_the_session(stage: Stage) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/samples"), ("POST", "/v1/chat/completions")):
        status, body, _ = await stage.ask(method, f"/sessions/nope{path}")
        assert (404, "session not found: session_id=nope") == (status, body["error"]["message"])


async def test_c2_409_behind_a_cut_turn_and_v1_goes_on(stage: Stage) -> None:
    async def cut(request: dict[str, Any]) -> web.Response:
        length = len(stage.engine.ids)
        return web.json_response(stage.engine.reply(request, finish_reason={"type": "length", "length": length}))

    for version, expected in (("v2", 409), ("v1", 200)):
        session, _ = await stage.open(version=version)
        stage.engine.answer = cut
        _, first, _ = await stage.chat(session, user("a"))
        stage.engine.answer = None
        status, body, _ = await stage.chat(session, user("a"), message_of(first), user("b"))
        assert expected == status
        if status == 409:
            text = body["error"]["message"]
            assert text.startswith("truncated generation cannot be extended")
            assert text.endswith("branch before the cut instead")


async def test_c2_422_a_hook_that_fails_names_both_hooks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(leaves: Any) -> Any:
        raise KeyError("boom")

    session, _ = await stage.open()
    await stage.chat(session, user("hi"))
    monkeypatch.setattr(picking, "find_picker", lambda name: raising)
    status, body, _ = await stage.ask("POST", f"{session}/samples")
    text = "session sample hook failed (picker=drop_retries, postprocessor=train_once): 'boom'"
    assert (422, text) == (status, body["error"]["message"])


async def test_c2_500_a_matcher_that_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "find_matcher", lambda name: lambda stored, replayed: 1)
    session, _ = await stage.open()
    _, first, _ = await stage.chat(session, user("hi"))
    status, body, _ = await stage.chat(session, user("hi"), message_of(first), user("b"))
    assert (500, "session message matcher must return bool, got int") == (status, body["error"]["message"])


async def test_c2_an_engines_own_status_is_passed_on_and_nothing_recorded(stage: Stage) -> None:
    session, _ = await stage.open()
    for status in (400, 429, 500, 503):
        stage.engine.answer = failing(status)
        assert status == (await stage.chat(session, user("hi")))[0]
    assert [] == (await stage.ask("GET", session))[1]["records"]


async def test_c2_502_an_engine_that_is_gone_or_makes_no_sense(stage: Stage) -> None:
    session, _ = await stage.open()

    async def breaks_off(request: dict[str, Any]) -> web.Response:
        return web.Response(body=b"{", headers={"Content-Type": "application/json"})

    stage.engine.answer = breaks_off
    status, body, headers = await stage.chat(session, user("hi"))
    assert (502, "server_error", "false") == (status, body["error"]["type"], headers["x-should-retry"])

    async def gone(request: dict[str, Any]) -> web.Response:
        transport = stage.engine.request.transport
        transport.close()
        return web.Response()

    stage.engine.answer = gone
    status, body, _ = await stage.chat(session, user("hi"))
    assert (502, True) == (status, body["error"]["message"].startswith("backend transport error: ServerDisconnected"))
    assert [] == (await stage.ask("GET", session))[1]["records"]


def test_c2_v1_rollback_text_is_exact_and_nothing_changes() -> None:
    talk = Conversation(TITO, "v1")
    for number in range(3):
        talk.ask(user(f"q{number}"))
    before = talk.session.metadata()
    with pytest.raises(SessionRefused) as refused:
        talk.begin([*talk.history[:2], user("other")])
    assert (
        400,
        "rollback failed: discard_count=2 exceeds max_assistant_rollback_steps=1 "
        "(stored has 6 messages, request has 3 messages)",
    ) == (refused.value.status, refused.value.message)
    assert before == talk.session.metadata()


@pytest.mark.parametrize(
    ("version", "start"),
    [
        ("v1", "appended message at index 2 has role='developer', allowed={'assistant', 'system', 'tool', 'user'}"),
        ("v2", "appended message role='developer' not allowed (allowed=['assistant', 'system', 'tool', 'user'])"),
    ],
)
def test_c2_a_role_that_cannot_be_appended_has_its_versions_text(version: str, start: str) -> None:
    talk = Conversation(TITO, version)
    talk.ask(user("a"))
    with pytest.raises(SessionRefused) as refused:
        talk.begin([*talk.history, {"role": "developer", "content": "x"}])
    ending = "; the selected TITO fixed template does not support appending this role"
    assert (400, start + ending) == (refused.value.status, refused.value.message)


async def test_c3_an_empty_body_is_an_empty_object(stage: Stage) -> None:
    session, _ = await stage.open()
    for body in (None, b"", b" \n"):
        async with stage.http.post(f"{stage.url}{session}/samples", data=body) as reply:
            assert 200 == reply.status
        async with stage.http.post(f"{stage.url}/sessions", data=body) as reply:
            assert 200 == reply.status
        async with stage.http.post(f"{stage.url}{session}/v1/chat/completions", data=body) as reply:
            assert (400, True) == (reply.status, (await reply.json())["error"]["message"].startswith("messages: "))


@pytest.mark.parametrize("version", VERSIONS)
async def test_c3_template_kwargs_win_over_the_servers_and_reach_the_engine(stage: Stage, version: str) -> None:
    session, _ = await stage.open(version=version, enable_thinking=True)
    await stage.chat(session, user("hi"), chat_template_kwargs={"enable_thinking": False})
    sent = [request["input_ids"] for request, _ in stage.engine.seen]
    assert [TITO.render([user("hi")], tools=None, thinking=False).ids] == sent
    _, shown, _ = await stage.ask("GET", session)
    request = shown["records"][0]["request"]
    assert ({"enable_thinking": False}, sent[0]) == (request["chat_template_kwargs"], request["input_ids"])


async def test_c3_reasoning_effort_is_not_mapped(stage: Stage) -> None:
    session, _ = await stage.open()
    await stage.chat(session, user("hi"), reasoning_effort="high", reasoning={"effort": "high"})
    assert TITO.render([user("hi")], tools=None, thinking=False).ids == stage.engine.seen[0][0]["input_ids"]


async def test_c12_a_driver_learns_the_servers_instance(stage: Stage) -> None:
    health = (await stage.ask("GET", "/health"))[1]
    async with SessionClient(stage.url) as sessions:
        opened = await sessions.open({})
    assert (health["session_server_instance_id"], f"{stage.url}/sessions/{opened.session_id}") == (
        opened.instance_id,
        opened.base_url,
    )
