"""Several engines behind one batch, and behind one session server: each has its sessions, and one may go for good."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from command import Rollout
from faulty_engine import FaultyHost
from faulty_facts import FaultyFacts
from scripted import user
from session_stage import END, TITO, Stage

from rollout.engine.embedded import start_embedded
from rollout.engine.pool import weight
from rollout.engine.tiny import CHECKPOINT
from rollout.lake import scan_samples
from rollout.parity.projections import same_rows
from rollout.process import Child, start

BEFORE_KILL = 10
"""Generations of the engine that is killed; those after them are in its hands when it dies."""


class Counted:
    """A real engine behind a proxy that counts what it sampled, until both are killed."""

    def __init__(self, child: Child, stack: ExitStack) -> None:
        self.child, self.tokens = child, 0
        self.proxy = FaultyFacts(child.url)
        self.proxy.change = self._count
        self._serving = stack.enter_context(ExitStack())
        self._serving.enter_context(self.proxy.in_thread())

    def _count(self, request: dict[str, Any], reply: dict[str, Any]) -> None:
        self.tokens += len(reply["output_ids"])

    def kill(self) -> None:
        """For good: what it has in hand is lost, and its port refuses."""
        self._serving.close()
        self.child.process.send_signal(signal.SIGKILL)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Counted]]:
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            child = asyncio.run(start_embedded(None, log=tmp_path / f"engine-{name}.log"))
            stack.callback(child.stop)
            made.append(Counted(child, stack))
        yield made


def external(*engines: Counted) -> list[str]:
    options = ["--engine", "external", "--temperature", "0", "--concurrency", "16"]
    return [*options, *(word for engine in engines for word in ("--engine-url", engine.proxy.url))]


@pytest.mark.full
def test_a_batch_goes_on_with_the_engines_that_are_left(
    quick_rollout: Rollout, batch_command: list[str], engines: list[Counted], tmp_path: Path
) -> None:
    dies, stays = engines
    quick_rollout.succeeds(*batch_command, "--lake", tmp_path / "calm", *external(stays))
    stays.tokens, in_hand = 0, threading.Event()

    async def hang(request: dict[str, Any]) -> None:
        if len(dies.proxy.seen) > BEFORE_KILL and stays.tokens > 0:  # both are in use by then
            in_hand.set()
            await asyncio.sleep(600)

    dies.proxy.fault = hang
    run = quick_rollout.start(*batch_command, "--lake", tmp_path / "disturbed", *external(dies, stays))
    assert in_hand.wait(240)
    before = stays.tokens
    dies.kill()
    done = run.wait()
    assert 0 == done.returncode, done.stderr
    assert [] == run.left_over()
    assert dies.tokens > 0 and before > 0 and stays.tokens > before, "a batch uses all of its engines"
    calm, disturbed = (scan_samples(tmp_path / name, batch="mine").collect() for name in ("calm", "disturbed"))
    assert [] == same_rows(calm.to_arrow(), disturbed.to_arrow())
    assert 0 == disturbed["failure"].is_not_null().sum() and 0 < max(disturbed["attempt"])
    assert calm["engine"].unique().to_list() == disturbed["engine"].unique().to_list()


def test_engines_that_differ_start_no_batch(
    quick_rollout: Rollout, batch_command: list[str], engines: list[Counted], tmp_path: Path
) -> None:
    first, other = engines
    other.proxy.facts = {"weight_version": "step-9"}
    line = quick_rollout.refused(*batch_command, "--lake", tmp_path / "lake", *external(first, other))
    assert f"weight_version is 'default' at {first.proxy.url} and 'step-9' at {other.proxy.url}" in line
    assert not (tmp_path / "lake").exists() or not list((tmp_path / "lake").rglob("*.json"))
    assert 0 == first.tokens == other.tokens


@pytest.mark.full
def test_the_doctor_looks_at_each_engine_and_whether_they_agree(quick_rollout: Rollout, engines: list[Counted]) -> None:
    urls = [engine.proxy.url for engine in engines]
    options = ["doctor", "--json", *(word for url in urls for word in ("--engine-url", url))]
    done = quick_rollout(*options)
    checks = json.loads(done.stdout)["checks"]
    found = {state: [one for one in checks if one["state"] == state] for state in ("ok", "fail")}
    assert (0, []) == (done.returncode, found["fail"]), done.stdout
    for url in urls:
        assert {"engine", "vocabulary", "generate", "repeats"} <= {
            one["what"] for one in checks if url in one["detail"]
        }
    counts = Counter(one["what"] for one in found["ok"])
    assert (2, 1, 1) == (counts["generate"], counts["engines"], counts["sessions"])
    engines[1].proxy.server_facts = {"version": "0.0.1"}
    done = quick_rollout(*options)
    (failed,) = [one for one in json.loads(done.stdout)["checks"] if one["state"] == "fail"]
    assert (1, "engines") == (done.returncode, failed["what"])
    assert f"and '0.0.1' at {urls[1]}" in failed["detail"] and "start them alike" in failed["detail"]


async def test_a_session_server_alone_spreads_sessions_and_moves_those_of_an_engine_that_goes(tmp_path: Path) -> None:
    hosts = [FaultyHost([*TITO.tokenizer.encode("ok"), END]) for _ in range(2)]
    argv = [sys.executable, "-m", "rollout.session.server", "--tokenizer", str(CHECKPOINT)]
    child = await start(
        [*argv, *(word for host in hosts for word in ("--engine", host.url))], log=tmp_path / "server.log"
    )
    try:
        async with aiohttp.ClientSession() as http:
            stage = Stage(child.url, hosts[0].engine, http, None)
            for host in hosts:  # which need not be there when the server is
                await host.start()
            await _spread_and_move(stage, hosts)
    finally:
        child.stop()
        for host in hosts:
            await host.close()


async def _spread_and_move(stage: Stage, hosts: list[FaultyHost]) -> None:
    owners: dict[str, FaultyHost] = {}
    while {id(host) for host in owners.values()} != {id(host) for host in hosts}:
        session, _ = await stage.open()
        name = session.removeprefix("/sessions/")
        owners[session] = max(hosts, key=lambda host: weight(name, host.url))
        assert len(owners) < 100
    history: dict[str, list[dict[str, Any]]] = {session: [] for session in owners}

    async def talk() -> list[int]:
        """A turn more of every session; how many each engine has had by now."""
        for session, told in history.items():
            status, reply, _ = await stage.chat(session, *told, user("and"))
            assert 200 == status, reply
            told += [user("and"), reply["choices"][0]["message"]]
        return [len(host.engine.seen) for host in hosts]

    n_own = [sum(owner is host for owner in owners.values()) for host in hosts]
    assert n_own == await talk()
    assert [2 * n for n in n_own] == await talk()
    await hosts[0].stop()
    assert [2 * n_own[0], 2 * n_own[1] + len(owners)] == await talk()


async def test_a_session_server_refuses_turns_of_engines_that_differ(tmp_path: Path) -> None:
    hosts = [FaultyHost([*TITO.tokenizer.encode("ok"), END]) for _ in range(2)]
    hosts[1].engine.model_info = {"model_path": "another"}
    for host in hosts:
        await host.start()
    argv = [sys.executable, "-m", "rollout.session.server", "--tokenizer", str(CHECKPOINT)]
    argv += ["--engine", ",".join(host.url for host in hosts)]
    child = await start(argv, log=tmp_path / "server.log")
    try:
        async with aiohttp.ClientSession() as http:
            stage = Stage(child.url, hosts[0].engine, http, None)
            session, _ = await stage.open()
            status, body, _ = await stage.chat(session, user("hi"))
            assert 502 == status
            said = f"model_path is 'faulty' at {hosts[0].url} and 'another' at {hosts[1].url}"
            assert said in body["error"]["message"]
            assert said in (tmp_path / "server.log").read_text()
    finally:
        child.stop()
        for host in hosts:
            await host.close()
