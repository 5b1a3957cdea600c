"""A request that comes again while its first still runs: one generation for both, if it says that it is the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from faulty_engine import wait_until
from scripted import user
from session_stage import Stage, staged

RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async for made in staged(tmp_path, None):
        yield made


@pytest.fixture
def hold(stage: Stage) -> asyncio.Event:
    """Every generation waits for this event."""
    release = asyncio.Event()

    async def wait(request: dict[str, Any]) -> None:
        await release.wait()

    stage.engine.answer = wait
    return release


def ask(stage: Stage, session: str, text: str = "hi", path: str = "chat/completions", **headers: str) -> asyncio.Task:
    body: dict[str, Any] = {"model": "m", "messages": [user(text)]}
    if path == "messages":
        body["max_tokens"] = 9
    if path == "stream":
        path, body = "chat/completions", {**body, "stream": True}
    return asyncio.create_task(stage.ask("POST", f"{session}/v1/{path}", body, **headers))


async def metric(stage: Stage, name: str) -> str:
    _, text, _ = await stage.ask("GET", "/metrics")
    return next(line.split()[1] for line in text.decode().splitlines() if line.startswith(f"rollout_session_{name} "))


async def joined(stage: Stage, n: int) -> None:
    async with asyncio.timeout(10):
        while await metric(stage, "coalesced_total") != str(n):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["chat/completions", "stream", "messages"])
@pytest.mark.parametrize(("first", "again"), [({}, RETRY), ({"Idempotency-Key": "k"}, {"Idempotency-Key": "k"})])
async def test_g09_a_marked_repeat_gets_the_answer_of_its_first(
    stage: Stage, hold: asyncio.Event, path: str, first: dict[str, str], again: dict[str, str]
) -> None:
    session, _ = await stage.open()
    asked = [ask(stage, session, path=path, **first)]
    await wait_until(lambda: stage.engine.seen)
    asked.append(ask(stage, session, path=path, **again))
    await joined(stage, 1)
    hold.set()
    (one, answer, _), (two, same, _) = await asyncio.gather(*asked)
    assert (200, 200, answer) == (one, two, same)
    assert 1 == len(stage.engine.seen) == await stage.n_turns(session)


async def test_g09_equal_bodies_without_a_mark_are_siblings(stage: Stage, hold: asyncio.Event) -> None:
    session, _ = await stage.open()
    asked = [ask(stage, session, **headers) for headers in ({}, {}, {"x-stainless-retry-count": "0"})]
    asked += [ask(stage, session, **{"x-stainless-retry-count": count}) for count in ("many", "0" * 5000)]
    await wait_until(lambda: len(stage.engine.seen) == 5)
    hold.set()
    assert [200] * 5 == [status for status, _, _ in await asyncio.gather(*asked)]
    assert 5 == await stage.n_turns(session)


async def test_every_repeat_of_siblings_joins_one_of_its_own(stage: Stage, hold: asyncio.Event) -> None:
    session, _ = await stage.open()
    asked = [ask(stage, session) for _ in range(2)]
    await wait_until(lambda: len(stage.engine.seen) == 2)
    asked += [ask(stage, session, **RETRY) for _ in range(2)]
    await joined(stage, 2)
    hold.set()
    ids = [answer["id"] for _, answer, _ in await asyncio.gather(*asked)]
    assert (2, 2) == (len(set(ids[:2])), len(set(ids[2:])))


async def test_another_body_is_no_repeat(stage: Stage, hold: asyncio.Event) -> None:
    session, _ = await stage.open()
    asked = [ask(stage, session), ask(stage, session, "ho", **RETRY)]
    await wait_until(lambda: len(stage.engine.seen) == 2)
    hold.set()
    assert [200, 200] == [status for status, _, _ in await asyncio.gather(*asked)]


async def test_a_key_with_another_body_is_409_while_its_first_runs(stage: Stage, hold: asyncio.Event) -> None:
    session, _ = await stage.open()
    first = ask(stage, session, **{"Idempotency-Key": "k"})
    await wait_until(lambda: stage.engine.seen)
    for text, path in (("ho", "chat/completions"), ("hi", "messages")):
        status, body, headers = await ask(stage, session, text, path, **{"Idempotency-Key": "k"})
        assert (409, "false") == (status, headers["x-should-retry"])
        assert "Idempotency-Key" in body["error"]["message"]
    for empty in (b"", b" "):
        path = f"{stage.url}{session}/v1/chat/completions"
        async with stage.http.post(path, data=empty, headers={"Idempotency-Key": "k"}) as reply:
            assert 409 == reply.status
    other = ask(stage, session, "ho", **{"Idempotency-Key": "l"})
    await wait_until(lambda: len(stage.engine.seen) == 2)
    hold.set()
    assert [200, 200] == [status for status, _, _ in await asyncio.gather(first, other)]
    assert 200 == (await ask(stage, session, "now", **{"Idempotency-Key": "k"}))[0]


async def test_once_the_first_has_ended_a_repeat_is_a_turn_of_its_own(stage: Stage) -> None:
    session, _ = await stage.open()
    for headers in ({"Idempotency-Key": "k"}, {"Idempotency-Key": "k", **RETRY}):
        assert 200 == (await ask(stage, session, **headers))[0]
    assert 2 == len(stage.engine.seen) == await stage.n_turns(session)


async def test_g08_the_generation_goes_on_for_the_repeat_and_ends_with_the_last_that_waits(
    stage: Stage, hold: asyncio.Event
) -> None:
    session, _ = await stage.open()
    first = ask(stage, session)
    await wait_until(lambda: stage.engine.seen)
    again = ask(stage, session, **RETRY)
    await joined(stage, 1)
    first.cancel()
    await asyncio.sleep(0.3)
    assert [] == stage.engine.aborted
    third = ask(stage, session, **RETRY)
    await joined(stage, 2)
    again.cancel()
    third.cancel()
    await wait_until(lambda: stage.engine.aborted, 1.0)
    assert [stage.engine.seen[0][0]["rid"]] == stage.engine.aborted
    assert 0 == await stage.n_turns(session)
    hold.set()
    again = ask(stage, session, **RETRY)
    assert (200, 2) == ((await again)[0], len(stage.engine.seen))


async def test_g08_the_repeat_gets_the_answer_when_the_first_has_left(stage: Stage, hold: asyncio.Event) -> None:
    session, _ = await stage.open()
    first = ask(stage, session)
    await wait_until(lambda: stage.engine.seen)
    again = ask(stage, session, **RETRY)
    await joined(stage, 1)
    first.cancel()
    await asyncio.sleep(0.1)
    hold.set()
    assert 200 == (await again)[0]
    assert (1, 1, []) == (len(stage.engine.seen), await stage.n_turns(session), stage.engine.aborted)


async def test_a_deleted_session_ends_the_generation_for_all_that_wait(stage: Stage, hold: asyncio.Event) -> None:
    session, _ = await stage.open()
    asked = [ask(stage, session)]
    await wait_until(lambda: stage.engine.seen)
    asked.append(ask(stage, session, **RETRY))
    await joined(stage, 1)
    assert 204 == (await stage.ask("DELETE", session))[0]
    assert [404, 404] == [status for status, _, _ in await asyncio.gather(*asked)]
    await wait_until(lambda: stage.engine.aborted, 1.0)
    hold.set()
