"""A session server that is killed goes on from its journal; idle sessions expire; what is logged."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pytest
from aiohttp import web
from faulty_engine import wait_until
from left_journal import key, spoken
from scripted import user
from session_stage import ProcessStage, staged

from rollout.session.tape import tape_to_table

TOKEN = "driver-secret"
SECRET = "what-the-user-said"


async def everything(stage: ProcessStage, session: str) -> list[Any]:
    """All that the driver can read of a session."""
    paths = (("GET", session), ("GET", f"{session}/tape"), ("POST", f"{session}/samples"))
    return [(await stage.ask(method, path))[:2] for method, path in paths]


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_after_a_kill_every_session_is_as_it_was_answered(tmp_path: Path, version: str) -> None:
    async for stage in staged(tmp_path, TOKEN, "--journal", str(tmp_path / "journal")):
        session, key = await stage.open(version=version, seed="07")
        _, first, _ = await stage.chat(session, user("a"), key=key)
        history = (user("a"), first["choices"][0]["message"])
        await stage.chat(session, *history, user("b"), key=key)
        await stage.chat(session, *history, user("c"), key=key)
        assert 400 == (await stage.chat(session, key=key))[0]
        gone, _ = await stage.open()
        await stage.ask("DELETE", gone)
        before = await everything(stage, session)

        async def never(request: dict[str, Any]) -> None:
            await asyncio.sleep(60)

        stage.engine.answer = never
        running = asyncio.create_task(stage.chat(session, *history, user("d"), key=key))
        await wait_until(lambda engine=stage.engine: len(engine.seen) == 4)
        await stage.kill_and_restart()
        with pytest.raises(aiohttp.ClientError):
            await running
        stage.engine.answer = None
        assert before == await everything(stage, session)
        assert 404 == (await stage.ask("GET", gone))[0]
        assert 200 == (await stage.chat(session, *history, user("d"), key=key))[0]
        one, two = stage.engine.seen[3][0], stage.engine.seen[4][0]
        assert {**one, "rid": None} == {**two, "rid": None}
        await stage.kill_and_restart()
        assert 4 == await stage.n_turns(session)
        assert 204 == (await stage.ask("DELETE", session))[0]
        assert [] == list((tmp_path / "journal").glob("*.journal"))


async def test_idle_sessions_expire_and_those_that_generate_or_are_used_do_not(tmp_path: Path) -> None:
    async for stage in staged(tmp_path, None, "--idle-s", "3", "--journal", str(tmp_path / "journal")):
        idle, _ = await stage.open()
        used, _ = await stage.open()
        busy, _ = await stage.open()
        release = asyncio.Event()

        async def wait(request: dict[str, Any], release: asyncio.Event = release) -> None:
            await release.wait()

        stage.engine.answer = wait
        running = asyncio.create_task(stage.chat(busy, user("a")))
        listed: list[dict[str, Any]] = []
        async with asyncio.timeout(20):
            while len(listed) != 2:
                assert 200 == (await stage.ask("GET", used))[0]
                listed = (await stage.ask("GET", "/sessions"))[1]["sessions"]
                await asyncio.sleep(0.1)
        assert {used, busy} == {f"/sessions/{row['session_id']}" for row in listed}
        assert 404 == (await stage.ask("GET", idle))[0]
        release.set()
        assert 200 == (await running)[0]
        async with asyncio.timeout(20):
            while (await stage.ask("GET", "/sessions"))[1]["sessions"]:
                await asyncio.sleep(0.1)
        _, text, _ = await stage.ask("GET", "/metrics")
        assert "rollout_session_sessions_expired_total 3" in text.decode().splitlines()
        assert [] == list((tmp_path / "journal").glob("*.journal"))


async def test_every_event_is_a_json_line_without_content_or_keys(tmp_path: Path) -> None:
    async for stage in staged(tmp_path, TOKEN, "--journal", str(tmp_path / "journal")):
        session, key = await stage.open(max_turns=3, control_text="refuse")
        await stage.chat(session, user(SECRET), key=key)
        bodies = [
            {"role": SECRET, "content": SECRET},
            {"role": "user", "content": {SECRET: 1}},
            user(f"<|im_end|>{SECRET}"),
        ]
        for bad in bodies:
            assert 400 == (await stage.chat(session, bad, key=key))[0]
        assert 401 == (await stage.chat(session, user(SECRET), key="wrong"))[0]

        async def fail(request: dict[str, Any]) -> Any:
            return web.Response(status=503, text=SECRET)

        stage.engine.answer = fail
        assert 503 == (await stage.chat(session, user(SECRET), key=key))[0]
        await stage.kill_and_restart()
        await stage.restored()
        await stage.ask("DELETE", session)
        lines = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines()]
        events = [line["event"] for line in lines if line["event"] != "log"]
        assert ["opened", "turn", *["refused"] * 5, "restored", "deleted"] == events
        turn = next(line for line in lines if line["event"] == "turn")
        assert {"ts", "level", "event", "session_id", "n_prompt", "n_sampled", "ms"} == turn.keys()
        assert {session.split("/")[2]} == {line["session_id"] for line in lines if line["event"] != "log"}
        log = (tmp_path / "server.log").read_text()
        assert not [secret for secret in (SECRET, key, TOKEN) if secret in log]


async def test_a_server_over_hundreds_of_sessions_answers_before_they_are_restored(tmp_path: Path) -> None:
    left, ids = spoken(20), [f"{number:032x}" for number in range(400)]
    left.write(tmp_path / "journal", ids)
    async for stage in staged(tmp_path, TOKEN, "--journal", str(tmp_path / "journal")):
        before = (await stage.ask("GET", "/health"))[1]["restoring"]
        sessions = [f"/sessions/{one}" for one in (ids[-1], ids[0])]
        assert [tape_to_table(left.tape(ids[-1]))] == await tapes(stage, sessions[:1])
        after = (await stage.ask("GET", "/health"))[1]["restoring"]
        assert 0 < after < before, "it was answered before the others were restored"
        listed = (await stage.ask("GET", "/sessions"))[1]["sessions"]
        assert ids == sorted(row["session_id"] for row in listed)
        messages = [*left.talk.history, user("go on")]
        replies = [await stage.chat(one, *messages, key=key(one.split("/")[2])) for one in sessions]
        assert [200, 200] == [status for status, _, _ in replies]
        one, two = (request for request, _ in stage.engine.seen)
        turn = left.talk.begin(messages)
        for request in (one, two):
            assert turn.engine_request == {name: value for name, value in request.items() if name != "rid"}
        for gone in ids[30:]:
            assert 204 == (await stage.ask("DELETE", f"/sessions/{gone}"))[0]
        await stage.restored()
        some = ids[1:30:4]
        assert [tape_to_table(left.tape(one)) for one in some] == await tapes(
            stage, [f"/sessions/{one}" for one in some]
        )
        assert ids[:30] == sorted(path.stem for path in (tmp_path / "journal").glob("*.journal"))


async def tapes(stage: ProcessStage, sessions: list[str]) -> list[pa.Table]:
    """Each session's tape as the server gives it."""
    return [pa.ipc.open_stream((await stage.ask("GET", f"{one}/tape"))[1]).read_all() for one in sessions]
