"""`rollout session serve --processes N`: any port answers for any session; what dies is replaced, or ends with all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from command import Rollout, Run
from faulty_engine import FaultyEngine, wait_until
from loopback import served
from scripted import user
from sdk_clients import ask_chat, ask_message, chat_client, messages_client
from session_stage import END, TITO, Stage, failing

from rollout.engine.tiny import CHECKPOINT
from rollout.session.client import SessionClient
from rollout.session.fleet import RESTARTS, bind_range

TOKEN = "driver-secret"


@dataclass
class Fleet:
    """A running range of three processes; `stages` asks each of them."""

    run: Run
    stages: list[Stage]

    def port(self, slot: int) -> int:
        return int(self.stages[slot].url.rsplit(":", 1)[1])

    def find(self, slot: int) -> int | None:
        """The process that serves a slot now, or is about to."""
        mark = f'"slot": {slot},'
        found = [line for line in self.run.processes() if "rollout.session.member" in line and mark in line]
        return int(found[0].split()[0]) if found else None

    def pid(self, slot: int) -> int:
        found = self.find(slot)
        assert found is not None
        return found

    async def answers(self, slot: int) -> bool:
        try:
            return (await asyncio.wait_for(self.stages[slot].ask("GET", "/health"), 5))[0] == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


@pytest.fixture
async def fleet(rollout: Rollout) -> AsyncIterator[Fleet]:
    async for made in running(rollout):
        yield made


@pytest.fixture
async def journaled(rollout: Rollout) -> AsyncIterator[Fleet]:
    async for made in running(rollout, "--journal", "journal"):
        yield made


async def running(rollout: Rollout, *more: object) -> AsyncIterator[Fleet]:
    engine = FaultyEngine([*TITO.tokenizer.encode("ok"), END])
    rollout.environment = {"SESSION_TOKEN": TOKEN}
    async with served(engine.app()) as url, aiohttp.ClientSession() as http:
        options = ("--engine", url, "--tokenizer", CHECKPOINT, "--keepalive-s", 0.1, "--max-sessions", 12, *more)
        run = rollout.start(
            "session", "serve", *options, "--processes", 3, "--driver-token-env", "SESSION_TOKEN", "--json"
        )
        assert run.process.stdout is not None
        try:
            ready = json.loads(await asyncio.to_thread(run.process.stdout.readline))
            assert (3, ready["urls"][0]) == (len(ready["urls"]), ready["url"])
            yield Fleet(run, [Stage(one, engine, http, TOKEN) for one in ready["urls"]])
        finally:
            if run.process.poll() is None:
                await asyncio.to_thread(run.end, signal.SIGTERM)
            assert [] == await asyncio.to_thread(run.left_over)


async def open_many(stage: Stage, n: int) -> list[dict[str, Any]]:
    opened = []
    for _ in range(n):
        status, one, _ = await stage.ask("POST", "/sessions", {"seed": "07"})
        assert 200 == status, one
        opened.append(one)
    return opened


async def talk(base_url: str, key: str, stream: bool) -> None:
    """Two turns with OpenAI's client, a third with Anthropic's, on one history."""
    messages: list[Any] = [user("a")]
    async with chat_client(base_url, key) as client:
        for text in ("b", "c"):
            reply = await ask_chat(client, stream, messages=messages)
            messages += [reply.choices[0].message.to_dict(), user(text)]
    async with messages_client(base_url, key) as client:
        plain = [{"role": one["role"], "content": one["content"]} for one in messages]
        assert "ok" == (await ask_message(client, stream, messages=plain)).content[0].text


async def test_thirty_sessions_opened_at_one_port_talk_through_any(fleet: Fleet) -> None:
    opened = await open_many(fleet.stages[0], 30)
    slots = [int(one["session_id"][:2], 16) for one in opened]
    assert {0: 10, 1: 10, 2: 10} == Counter(slots)
    for one, slot in zip(opened, slots, strict=True):
        assert 32 == len(one["session_id"]) and one["session_id"] == f"{int(one['session_id'], 16):032x}"
        assert f"http://127.0.0.1:{fleet.port(slot)}/sessions/{one['session_id']}" == one["base_url"]
    talks = []
    for number, (one, slot) in enumerate(zip(opened, slots, strict=True)):
        asked = fleet.stages[(slot + number // 3) % 3]  # ten sessions of each process, through all three ports
        talks.append(talk(f"{asked.url}/sessions/{one['session_id']}", one["session_key"], stream=number % 2 == 0))
    await asyncio.gather(*talks)
    assert {3} == {
        await fleet.stages[number % 3].n_turns(f"/sessions/{one['session_id']}") for number, one in enumerate(opened)
    }
    for stage in fleet.stages:
        _, listed, _ = await stage.ask("GET", "/sessions")
        assert [] == listed["missing"]
        assert {one["session_id"]: slot for one, slot in zip(opened, slots, strict=True)} == {
            row["session_id"]: row["process"] for row in listed["sessions"]
        }
        _, metrics, _ = await stage.ask("GET", "/metrics")
        assert "rollout_session_sessions_live 10" in metrics.decode().splitlines(), "each port has its own"


async def test_the_drivers_client_works_through_one_port(fleet: Fleet) -> None:
    async with SessionClient(fleet.stages[1].url, driver_token=TOKEN) as client:
        for _ in range(3):
            opened = await client.open({"version": "v1"})
            await talk(opened.base_url, opened.session_key, stream=False)
            assert 1 == len((await client.samples(opened.session_id)).samples)
            assert 3 == len((await client.tape(opened.session_id)).exchanges)
            await client.delete(opened.session_id)
    assert [] == (await fleet.stages[0].ask("GET", "/sessions"))[1]["sessions"]


async def test_refusals_are_the_same_through_any_port(fleet: Fleet) -> None:
    (one, *_) = await open_many(fleet.stages[0], 1)
    for stage in fleet.stages:
        assert 401 == (await stage.ask("POST", "/sessions", {}, key="wrong"))[0]
        assert 401 == (await stage.ask("GET", "/sessions", key="wrong"))[0]
        assert 400 == (await stage.ask("POST", "/sessions", {"nonsense": 1}))[0]
        url = f"{stage.url}/sessions/{one['session_id']}"
        async with chat_client(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="this session's key is wanted"):
                await ask_chat(client, False, messages=[user("a")])
        async with chat_client(url, one["session_key"]) as client:
            with pytest.raises(openai.BadRequestError, match="n: ") as caught:
                await client.chat.completions.create(model="m", messages=[user("a")], n=2)
        assert "false" == caught.value.response.headers["x-should-retry"]
        assert 404 == (await stage.ask("GET", f"/sessions/{'2' * 32}"))[0]
        assert 404 == (await stage.ask("GET", f"/sessions/{one['session_id'][:2]}{'0' * 30}"))[0]


async def test_a_full_process_is_passed_over_until_all_are(fleet: Fleet) -> None:
    await open_many(fleet.stages[2], 36)
    for stage in fleet.stages:
        status, refused, headers = await stage.ask("POST", "/sessions", {})
        assert (429, "max_sessions", "1") == (status, refused["error"]["code"], headers["Retry-After"])
    _, listed, _ = await fleet.stages[0].ask("GET", "/sessions")
    gone = next(row["session_id"] for row in listed["sessions"] if row["process"] == 1)
    assert 204 == (await fleet.stages[0].ask("DELETE", f"/sessions/{gone}"))[0]
    (one,) = await open_many(fleet.stages[0], 1)
    assert "01" == one["session_id"][:2]


async def test_who_leaves_at_another_port_ends_the_generation(fleet: Fleet) -> None:
    (one,) = await open_many(fleet.stages[0], 1)
    stage = fleet.stages[1]
    stage.engine.answer = failing(500, 60)
    body = {"model": "m", "messages": [user("left")], "stream": True}
    url = f"{stage.url}/sessions/{one['session_id']}/v1/chat/completions"
    async with stage.http.post(url, json=body, headers={"x-api-key": one["session_key"]}) as reply:
        assert b": generating\n" == await reply.content.readline(), "it streams through"
        reply.close()
    await wait_until(lambda: stage.engine.aborted)
    assert [stage.engine.seen[0][0]["rid"]] == stage.engine.aborted


async def test_a_killed_process_comes_back_and_the_others_do_not_notice(fleet: Fleet) -> None:
    opened = await open_many(fleet.stages[0], 3)
    stage = fleet.stages[0]
    stage.engine.answer = failing(500, 60)
    body = {"model": "m", "messages": [user("cut")], "stream": True}
    url = f"{stage.url}/sessions/{opened[1]['session_id']}/v1/chat/completions"
    async with stage.http.post(url, json=body, headers={"x-api-key": opened[1]["session_key"]}) as reply:
        assert b": generating\n" == await reply.content.readline()
        os.kill(fleet.pid(1), signal.SIGKILL)
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.content.read()
    stage.engine.answer = None
    for one in (opened[0], opened[2]):
        await talk(f"{stage.url}/sessions/{one['session_id']}", one["session_key"], stream=True)
    end = time.monotonic() + 60
    while not await fleet.answers(1) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    assert 404 == (await stage.ask("GET", f"/sessions/{opened[1]['session_id']}"))[0], "its sessions went with it"
    assert {0: 1, 1: 1, 2: 1} == Counter(int(one["session_id"][:2]) for one in await open_many(stage, 3))


async def test_with_a_journal_a_killed_process_goes_on_with_its_sessions(journaled: Fleet) -> None:
    stage = journaled.stages[0]
    one = (await open_many(stage, 2))[1]
    session = f"/sessions/{one['session_id']}"
    _, first, _ = await stage.chat(session, user("a"), key=one["session_key"])
    os.kill(journaled.pid(1), signal.SIGKILL)
    end = time.monotonic() + 60
    while not await journaled.answers(1) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    history = [user("a"), first["choices"][0]["message"], user("b")]
    assert 200 == (await stage.chat(session, *history, key=one["session_key"]))[0]
    assert 2 == await stage.n_turns(session)


@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
async def test_an_sdk_repeats_what_a_dying_process_broke_off(journaled: Fleet, vendor: str) -> None:
    """Asked through another port, it reads 503 and asks again; the process that came back has the session."""
    stage = journaled.stages[0]
    one = (await open_many(stage, 2))[1]
    base_url, key = f"{stage.url}/sessions/{one['session_id']}", one["session_key"]
    stage.engine.answer = failing(500, 60)
    client: Any = messages_client(base_url, key) if vendor == "anthropic" else chat_client(base_url, key)
    ask = ask_message if vendor == "anthropic" else ask_chat
    async with client.with_options(max_retries=6) as patient:
        asked = asyncio.create_task(ask(patient, False, messages=[user("a")]))
        await wait_until(lambda: stage.engine.seen, 60)
        stage.engine.answer = None
        os.kill(journaled.pid(1), signal.SIGKILL)
        reply = await asyncio.wait_for(asked, 90)
    said = reply.content[0].text if vendor == "anthropic" else reply.choices[0].message.content
    assert ("ok", 1) == (said, await stage.n_turns(f"/sessions/{one['session_id']}"))
    _, metrics, _ = await stage.ask("GET", "/metrics")
    assert 'rollout_session_refused_total{status="503"} 1' in metrics.decode().splitlines()


@pytest.mark.full
async def test_a_process_that_dies_too_often_stays_down_and_at_last_all_end(fleet: Fleet) -> None:
    opened = await open_many(fleet.stages[0], 3)
    stage = fleet.stages[0]
    await kill_for_good(fleet, 1)
    status, said, _ = await stage.ask("GET", f"/sessions/{opened[1]['session_id']}")
    assert (503, "process 1") == (status, said["error"]["message"][:9]), "who asks for its sessions is told why"
    for one in (opened[0], opened[2]):
        await talk(f"{stage.url}/sessions/{one['session_id']}", one["session_key"], stream=False)
    assert {0, 2} == {int(one["session_id"][:2]) for one in await open_many(stage, 4)}
    await kill_for_good(fleet, 2)
    await kill_for_good(fleet, 0)
    done = await asyncio.to_thread(fleet.run.wait)
    assert 1 == done.returncode
    assert "every process of the session server died more than 5 times" in done.stderr
    assert TOKEN not in done.stderr


async def kill_for_good(fleet: Fleet, slot: int) -> None:
    """Kill a slot's process until it is not started again."""
    killed: set[int] = set()
    async with asyncio.timeout(120):
        while len(killed) <= RESTARTS:
            found = fleet.find(slot)
            if found is not None and found not in killed:
                os.kill(found, signal.SIGKILL)
                killed.add(found)
            await asyncio.sleep(0.02)
        while await fleet.answers(slot):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nothing_outlives_the_parent(fleet: Fleet, number: signal.Signals) -> None:
    assert 4 == len(fleet.run.processes())
    code = await asyncio.to_thread(fleet.run.end, number)
    assert (-9 if number == signal.SIGKILL else 0) == code
    assert [] == await asyncio.to_thread(fleet.run.left_over)


def test_a_taken_port_of_the_range_is_named(rollout: Rollout) -> None:
    bound = bind_range("127.0.0.1", 0, 3)
    ports = [one.getsockname()[1] for one in bound]
    assert [ports[0] + step for step in range(3)] == ports
    for one in (bound[0], bound[1]):
        one.close()
    bound[2].listen()
    options = ("session", "serve", "--engine", "http://127.0.0.1:9", "--tokenizer", CHECKPOINT, "--processes", 3)
    wanted = f"port {ports[2]} on 127.0.0.1 is in use; 3 processes need ports {ports[0]} to {ports[2]}"
    assert wanted == rollout.refused(*options, "--port", ports[0])
    bound[2].close()


def test_a_range_that_cannot_be_is_refused(rollout: Rollout) -> None:
    options = ("session", "serve", "--engine", "http://127.0.0.1:9", "--tokenizer", CHECKPOINT, "--processes", 3)
    assert "need ports up to 65536" in rollout.refused(*options, "--port", 65534)
    assert "--driver-token-env: the environment has no NO_SUCH" in rollout.refused(
        *options, "--driver-token-env", "NO_SUCH"
    )
    assert "without a driver's token only loopback is served" in rollout.refused(*options, "--host", "0.0.0.0")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in rollout.refused(*options[:-2], "--port", port)


def test_a_process_that_cannot_start_ends_the_command(rollout: Rollout, tmp_path) -> None:
    run = rollout.start(
        *("session", "serve", "--engine", "http://127.0.0.1:9", "--tokenizer", tmp_path, "--processes", 2)
    )
    done = run.wait()
    assert 1 == done.returncode
    assert "of the session server did not start" in done.stderr and str(tmp_path) in done.stderr
    assert [] == run.left_over()
