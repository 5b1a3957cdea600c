"""Several engines as one: who has a session, who stands in for an engine that is gone, and what is no pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from faulty_engine import FaultyHost, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.client import EngineClient
from rollout.engine.pool import EnginePool, connect, weight
from rollout.errors import EngineError, EngineRefused, EngineUnreachable

REQUEST = {"input_ids": [1, 2]}
SESSIONS = [f"{number:032x}" for number in range(24)]
LONG_S = 60.0
"""A wait that no test here needs to the end."""


def order(session_id: str, urls: Sequence[str]) -> list[str]:
    return sorted(urls, key=lambda url: weight(session_id, url), reverse=True)


ports = st.lists(st.integers(1, 65535), min_size=2, max_size=8, unique=True)
url_lists = ports.map(lambda found: [f"http://10.0.0.1:{port}" for port in found])


def test_a_sessions_engines_are_the_same_in_every_process_and_release() -> None:
    urls = [f"http://127.0.0.1:3000{number}" for number in range(4)]
    found = {name: "".join(url[-1] for url in order(name, urls)) for name in ("a", "b", SESSIONS[0], SESSIONS[1])}
    assert {"a": "2103", "b": "0321", SESSIONS[0]: "3012", SESSIONS[1]: "3201"} == found


@given(url_lists, st.uuids(), st.data())
def test_an_engine_that_goes_moves_its_own_sessions_only_wherever_it_stood_in_the_list(
    urls: list[str], name: Any, data: st.DataObject
) -> None:
    first, *others = order(name.hex, urls)
    assert [first, *others] == order(name.hex, data.draw(st.permutations(urls)))
    gone = data.draw(st.sampled_from(urls))
    left = order(name.hex, [url for url in urls if url != gone])
    assert [url for url in (first, *others) if url != gone] == left


@settings(max_examples=20)
@given(url_lists, st.integers(0, 2**64))
def test_sessions_are_spread_evenly(urls: list[str], start: int) -> None:
    n_each = 400
    counts = Counter(order(f"{start + number:032x}", urls)[0] for number in range(n_each * len(urls)))
    # Six standard deviations of a fair spread.
    assert all(abs(counts[url] - n_each) < 6 * n_each**0.5 for url in urls), counts


@asynccontextmanager
async def hosts(count: int = 2, *, up: bool = True) -> AsyncIterator[list[FaultyHost]]:
    made = [FaultyHost([7, 8]) for _ in range(count)]
    try:
        for host in made:
            if up:
                await host.start()
        yield made
    finally:
        for host in made:
            await host.close()


@asynccontextmanager
async def pool_of(made: Sequence[FaultyHost], **options: Any) -> AsyncIterator[EnginePool]:
    async with EnginePool([host.url for host in made], **{"retry_s": 0.05, **options}) as pool:
        yield pool


async def ask(pool: EnginePool, *sessions: str) -> None:
    await asyncio.gather(*(pool.generate(REQUEST, rid=f"rid-{name}", session_id=name) for name in sessions))


def asked(host: FaultyHost) -> set[str]:
    """The sessions that a host has had since it was last looked at."""
    found = {request["rid"].removeprefix("rid-") for request, _ in host.engine.seen}
    host.engine.seen.clear()
    return found


def of(host: FaultyHost, made: Sequence[FaultyHost]) -> set[str]:
    urls = [one.url for one in made]
    return {name for name in SESSIONS if order(name, urls)[0] == host.url}


async def test_each_session_has_its_engine_and_keeps_it() -> None:
    async with hosts(3) as made, pool_of(made) as pool:
        for _ in range(2):
            await ask(pool, *SESSIONS)
            assert [of(host, made) for host in made] == [asked(host) for host in made]
        answer = await pool.generate(REQUEST, rid="alone", session_id=None)
    assert 2 == answer["meta_info"]["prompt_tokens"]
    assert order("alone", [host.url for host in made])[0] == next(host.url for host in made if host.engine.seen)


async def test_an_engine_that_is_gone_loses_its_sessions_until_it_is_back() -> None:
    async with hosts(3) as made, pool_of(made) as pool:
        await ask(pool, *SESSIONS)
        await made[0].stop()
        for host in made:
            asked(host)
        await ask(pool, *SESSIONS)
        urls = [host.url for host in made[1:]]
        for host in made[1:]:
            assert {name for name in SESSIONS if order(name, urls)[0] == host.url} == asked(host)
        await made[0].start()
        await until_asked(pool, made[0], sorted(of(made[0], made))[0])
        for host in made:
            asked(host)
        await ask(pool, *SESSIONS)
        assert [of(host, made) for host in made] == [asked(host) for host in made]


async def test_a_refusal_and_a_lost_turn_are_no_reason_to_ask_another_engine() -> None:
    async with hosts() as made, pool_of(made) as pool:
        await ask(pool, "first")

        async def dies(request: dict[str, Any]) -> None:
            for host in made:
                if host.engine.request is not None and host.engine.request.transport is not None:
                    host.engine.request.transport.abort()
            await asyncio.sleep(LONG_S)

        for host in made:
            host.engine.answer = dies
        with pytest.raises(EngineError) as lost:
            await ask(pool, "second")
        assert not isinstance(lost.value, EngineUnreachable)
        assert 1 == len([rid for host in made for rid in asked(host) if rid == "second"])


async def test_a_router_that_has_no_worker_left_is_down_too() -> None:
    async with hosts() as made, pool_of(made) as pool:
        await ask(pool, *SESSIONS)

        async def no_worker(request: dict[str, Any]) -> web.Response:
            return web.json_response({"error": {"code": "no_available_workers"}}, status=503)

        made[0].engine.answer = no_worker
        for host in made:
            asked(host)
        await ask(pool, *SESSIONS)
        assert set(SESSIONS) == asked(made[1])


async def test_the_session_server_may_start_before_its_engines() -> None:
    async with hosts(up=False) as made, pool_of(made, patience_s=LONG_S) as pool:
        with pytest.raises(EngineUnreachable):
            await pool.model_info()  # which nobody waits for
        waiting = asyncio.create_task(ask(pool, *SESSIONS))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await made[1].start()
        await waiting
        assert set(SESSIONS) == asked(made[1])
        assert "faulty" == (await pool.model_info())["model_path"]


async def test_a_request_that_waited_for_an_engine_has_only_the_rest_of_its_deadline_there() -> None:
    async with hosts(up=False) as made, pool_of(made, timeout_s=2.0, patience_s=LONG_S) as pool:
        made[0].engine.answer = made[1].engine.answer = lambda request: asyncio.sleep(LONG_S)
        waiting = asyncio.create_task(ask(pool, "one"))
        await asyncio.sleep(0.5)
        await made[0].start()
        with pytest.raises(EngineError, match="gave no answer within") as late:
            await waiting
        assert 1.5 >= float(str(late.value).split(" within ")[1].split()[0])


async def test_when_all_are_gone_for_long_the_error_names_them() -> None:
    async with hosts(up=False) as made, pool_of(made, patience_s=0.3) as pool:
        with pytest.raises(EngineUnreachable, match="none of 2 engines can be used") as gone:
            await ask(pool, "one")
        assert all(f"{host.url}: {host.url}/model_info failed" in str(gone.value) for host in made)
    async with hosts(up=False) as made, pool_of(made, timeout_s=0.2, patience_s=LONG_S) as pool:
        async with asyncio.timeout(LONG_S):
            with pytest.raises(EngineUnreachable):  # a request's own deadline comes first
                await ask(pool, "one")


@pytest.mark.parametrize(
    ("fact", "values"),
    [("model_path", ("a", "b")), ("context_length", (4096, 8192)), ("weight_version", ("v1", "v2"))],
)
async def test_engines_that_serve_different_things_serve_nobody_until_they_agree(fact: str, values: Any) -> None:
    async with hosts(3) as made, pool_of(made) as pool:
        for host, value in zip(made[1:], values, strict=True):
            host.engine.model_info = {"model_path": "a", "context_length": 4096, "weight_version": "v1", fact: value}
        made[0].engine.model_info = {}
        for _ in range(2):
            with pytest.raises(EngineError) as differ:
                await ask(pool, SESSIONS[0])
            said = f"{fact} is {values[0]!r} at {made[1].url} and {values[1]!r} at {made[2].url}"
            assert said in str(differ.value)
        assert [set()] * 3 == [asked(host) for host in made]
        made[2].engine.model_info = made[1].engine.model_info
        await until_asked(pool, made[2], sorted(of(made[2], made))[0])
        for host in made:
            asked(host)
        await ask(pool, *SESSIONS)
        assert all(of(host, made) == asked(host) for host in made)


async def test_an_engine_that_comes_back_with_other_weights_stays_out_until_it_has_the_others() -> None:
    async with hosts() as (back, stays), pool_of((back, stays), patience_s=0.3) as pool:
        for host in (back, stays):
            host.engine.model_info = {"model_path": "m", "weight_version": "v1"}
        await ask(pool, *SESSIONS)
        mine = sorted(of(back, (back, stays)))[0]
        await back.stop()
        await ask(pool, mine)
        stays.engine.model_info = {"model_path": "m", "weight_version": "v2"}  # which nobody minds in between
        back.engine.looks = 0
        await back.start()
        await wait_until(lambda: back.engine.looks >= 3, LONG_S)
        asked(back)
        await ask(pool, *SESSIONS)
        assert set() == asked(back) and set(SESSIONS) <= asked(stays)
        await stays.stop()
        with pytest.raises(EngineUnreachable, match=f"weight_version is 'v2' at {stays.url} and 'v1' at {back.url}"):
            await ask(pool, mine)
        await stays.start()
        back.engine.model_info = stays.engine.model_info
        await until_asked(pool, back, mine)


async def test_engines_that_all_come_back_with_something_new_are_taken_at_their_word() -> None:
    async with hosts() as made, pool_of(made, patience_s=0.3) as pool:
        for host in made:
            host.engine.model_info = {"model_path": "old"}
        await ask(pool, *SESSIONS)
        for host in made:
            await host.stop()
            host.engine.model_info = {"model_path": "new"}
        with pytest.raises(EngineUnreachable):
            await ask(pool, *SESSIONS)
        await made[0].start()
        with pytest.raises(EngineUnreachable, match=f"model_path is 'old' at {made[1].url} and 'new' at {made[0].url}"):
            await ask(pool, *SESSIONS)
        await made[1].start()
        for host in made:
            asked(host)
            await until_asked(pool, host, sorted(of(host, made))[0])


async def until_asked(pool: EnginePool, host: FaultyHost, session: str) -> None:
    async with asyncio.timeout(LONG_S):
        while not asked(host):
            with suppress(EngineError):
                await ask(pool, session)
            await asyncio.sleep(0.01)


async def test_an_abort_goes_to_the_engine_that_has_the_request() -> None:
    async with hosts() as made, pool_of(made) as pool:
        never = asyncio.Event()

        async def hang(request: dict[str, Any]) -> None:
            await never.wait()

        await ask(pool, "warm")
        for host in made:
            host.engine.answer = hang
        running = {name: asyncio.create_task(ask(pool, name)) for name in SESSIONS}
        await wait_until(lambda: len(SESSIONS) < sum(len(host.engine.seen) for host in made), LONG_S)
        stays, *leave = SESSIONS
        for name in leave:
            running[name].cancel()
        await asyncio.gather(*(running[name] for name in leave), return_exceptions=True)
        for name in SESSIONS:  # as a session server does: when its client has left, or another one asks for it
            await pool.abort(f"rid-{name}")
        await pool.abort("rid-warm")
        await pool.abort("unknown")
        for host in made:
            assert {f"rid-{name}" for name in of(host, made)} == set(host.engine.aborted)
            host.engine.answer = None
        never.set()
        await running[stays]


async def test_what_an_engine_refuses_is_passed_on() -> None:
    async with hosts() as made, pool_of(made) as pool:
        with pytest.raises(EngineRefused):
            await pool.facts("/nothing")


async def test_one_engine_needs_no_pool() -> None:
    assert isinstance(connect(["http://127.0.0.1:1"]), EngineClient)
    async with connect(["http://127.0.0.1:1", "http://127.0.0.1:2"]) as pool:
        assert isinstance(pool, EnginePool)
