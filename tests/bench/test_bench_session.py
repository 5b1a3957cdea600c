"""The session server's speed beside a bare turn on the same stack, and its memory. README.md says how to read it.

BENCH_ROLLOUTS (64) says how long the conversations are: full length from 1,024 on, a tenth of it below;
BENCH_REPEATS (1) times each side is run, one after the other.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import pytest
from bench.figures import publish, table
from bench.session_script import ScriptedTurn, make_script, n_tokens, save
from scripted import START
from vocabulary import fetch, qwen3

from rollout.engine.generation import read_generation
from rollout.process import Child, start
from rollout.session.resent import Resent
from rollout.session.session import Session, open_session
from rollout.session.settings import SessionSettings

FULL = int(os.environ.get("BENCH_ROLLOUTS", "64")) >= 1024
REPEATS = int(os.environ.get("BENCH_REPEATS", "1"))
SIZES = [(16, 40), (4, 160)] if FULL else [(16, 4), (4, 16)]
"""Sessions at once, and turns of each; both sides sample about 200 ids a turn behind 200 new ones."""
LIVE = (2000, 200, 2.0) if FULL else (100, 20, 0.2)
"""Sessions, generations at once, and the seconds that each takes and over which their starts are spread."""
TURNS = max(turns for _, turns in SIZES)
HERE = Path(__file__).parent

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def script() -> list[ScriptedTurn]:
    return make_script(qwen3(), turns=TURNS, n_in=200, n_out=200)


def test_turns_a_second_beside_a_bare_turn(tmp_path, script):
    save(script, tmp_path / "script")
    runs = asyncio.run(_rates(tmp_path))
    rows, facts = [], {}
    for sessions, turns in SIZES:
        found = {side: _medians(runs[side, sessions, turns]) for side in ("bare", "session")}
        for side, one in found.items():
            over = [one[name] / found["bare"][name] for name in ("turns_a_s", "turns_a_cpu_s")]
            rows.append((f"{sessions} x {turns}", side, *one.values(), *over))
        facts[f"{sessions}x{turns}"] = found
    head = [
        "sessions x turns",
        "side",
        "turns/s",
        "turns/CPU s",
        "CPU ms a turn",
        "load's CPU ms",
        "ratio",
        "CPU ratio",
    ]
    publish("session", table(head, rows), facts)


async def _rates(tmp_path: Path) -> dict[tuple[str, int, int], list[dict[str, float]]]:
    runs: dict[tuple[str, int, int], list[dict[str, float]]] = {}
    async with _engine(tmp_path, delay_s=0.0) as engine:
        for _ in range(REPEATS):
            for size in SIZES:
                for side in ("bare", "session"):
                    async with _server(side, engine, tmp_path) as server:
                        figures = await _load("rate", tmp_path, server, *size)
                    assert figures["turns"] == size[0] * size[1]
                    runs.setdefault((side, *size), []).append(figures)
    return runs


def test_two_processes_beside_one(tmp_path, script):
    """The whole machine to each: what a second server process gives where there are cores for it."""
    sessions, turns = SIZES[0]
    save(script, tmp_path / "script")
    runs: dict[int, list[float]] = {1: [], 2: []}

    async def run() -> None:
        async with _engine(tmp_path, delay_s=0.0, pinned=False) as engine:
            for _, processes in itertools.product(range(REPEATS), runs):
                async with _fleet(processes, engine, tmp_path) as server:
                    figures = await _load("rate", tmp_path, server, sessions, turns, pinned=False)
                assert figures["turns"] == sessions * turns
                runs[processes].append(figures["turns"] / figures["wall_s"])

    asyncio.run(run())
    rates = {processes: median(found) for processes, found in runs.items()}
    rows = [(f"{sessions} x {turns}", processes, rate, rate / rates[1]) for processes, rate in rates.items()]
    text = f"{os.cpu_count()} cores for server, engine and clients."
    head = ["sessions x turns", "processes", "turns/s", "ratio"]
    publish("session-processes", f"{text}\n\n{table(head, rows)}", {str(key): rate for key, rate in rates.items()})


def _fleet(processes: int, engine: Child, tmp_path: Path) -> AbstractAsyncContextManager[Child]:
    options = [f"--engine={engine.url}", f"--tokenizer={fetch()}", "--port=0", f"--processes={processes}", "--json"]
    return _running(["-m", "rollout", "session", "serve", *options], tmp_path / f"fleet{processes}.log", pinned=False)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {
        "turns_a_s": median(one["turns"] / one["wall_s"] for one in runs),
        "turns_a_cpu_s": median(one["turns"] / one["server_cpu_s"] for one in runs),
        "cpu_ms": median(1000 * one["server_cpu_s"] / one["turns"] for one in runs),
        "load_cpu_ms": median(1000 * one["load_cpu_s"] / one["turns"] for one in runs),
    }


def test_generations_at_once_in_many_live_sessions(tmp_path, script):
    sessions, concurrent, delay_s = LIVE
    save(script, tmp_path / "script")

    async def run() -> dict[str, Any]:
        async with _engine(tmp_path, delay_s=delay_s) as engine, _server("session", engine, tmp_path) as server:
            return await _load("live", tmp_path, server, sessions, concurrent, delay_s)

    seconds = sorted(asyncio.run(run())["seconds"])
    assert len(seconds) == sessions - concurrent
    beyond = [1000 * (one - delay_s) for one in seconds]
    facts = {
        "sessions": sessions,
        "at_once": concurrent,
        "p50_ms": median(beyond),
        "p99_ms": beyond[len(beyond) * 99 // 100],
        "max_ms": beyond[-1],
    }
    text = f"Milliseconds beyond the engine's {delay_s:g} s.\n\n{table(list(facts), [list(facts.values())])}"
    publish("session-live", text, facts)


def _engine(tmp_path: Path, *, delay_s: float, pinned: bool = True) -> AbstractAsyncContextManager[Child]:
    argv = [str(HERE / "session_engine.py"), str(tmp_path / "script"), str(delay_s)]
    return _running(argv, tmp_path / "engine.log", pinned=pinned)


def _server(side: str, engine: Child, tmp_path: Path) -> AbstractAsyncContextManager[Child]:
    given = ["-m", "rollout.session.server", "--engine", engine.url, "--tokenizer", str(fetch())]
    if side == "bare":
        given = [str(HERE / "session_bare.py"), engine.url, str(fetch())]
    return _running(given, tmp_path / f"{side}.log", server=True)


@asynccontextmanager
async def _running(argv: list[str], log: Path, *, server: bool = False, pinned: bool = True) -> AsyncIterator[Child]:
    child = await start([sys.executable, *argv], log=log)
    try:
        if pinned:
            _pin(child.process.pid, server=server)
        yield child
    finally:
        child.stop()


def _pin(pid: int, *, server: bool) -> None:
    """The server has a core of its own: who asks and who answers it cannot take its time."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(pid, cores[:1] if server else cores[1:])


async def _load(kind: str, tmp_path: Path, server: Child, *sizes: float, pinned: bool = True) -> dict[str, Any]:
    given = [str(server.facts["port"]), str(server.process.pid), *map(str, sizes)]
    argv = [sys.executable, str(HERE / "session_load.py"), kind, str(tmp_path / "script"), *given]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    if pinned:
        _pin(process.pid, server=False)
    out, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_parts_of_a_late_turn(script):
    """CPU of each part of a turn at turn 10 (of the short run: at the fourth) and at the last."""
    played = [_play(script, open_session(SessionSettings(), qwen3(), str(number)))[0] for number in range(5)]
    early, late, width = (9, TURNS - 1, 5) if FULL else (3, TURNS - 1, 3)
    rows, facts = [], {}
    for part in played[0]:
        a, b = (
            1000 * median(times for one in played for times in one[part][place - width + 1 : place + 1])
            for place in (early, late)
        )
        rows.append((part, a, b, b / a))
        facts[part] = {"early_ms": a, "late_ms": b}
    publish("session-parts", table(["part", f"turn {early + 1}, ms", f"turn {late + 1}, ms", "ratio"], rows), facts)


def _play(script: list[ScriptedTurn], session: Session) -> tuple[dict[str, list[float]], Resent]:
    """Seconds by part, one for each turn; and what a server keeps beside the session."""
    resent = Resent()
    parts: dict[str, list[float]] = {"own": [], "parse the body": [], "write input_ids": []}
    for turn in script:
        clock = [time.perf_counter()]
        body, resent = resent.read(turn.body)  # here and below as the endpoint does
        clock.append(time.perf_counter())
        begun = session.begin(body, requested_at=START)
        resent = resent.holding(begun.spelled)
        clock.append(time.perf_counter())
        request = orjson.dumps(begun.engine_body)
        clock.append(time.perf_counter())
        generation = read_generation(orjson.loads(turn.engine_reply), vocabulary=qwen3().vocabulary)
        orjson.dumps(session.commit(begun, generation, committed_at=START))
        clock.append(time.perf_counter())
        assert turn.input_ids in request
        parse, begin, write, commit = (b - a for a, b in itertools.pairwise(clock))
        for name, seconds in zip(parts, (begin + commit, parse, write), strict=True):
            parts[name].append(seconds)
    assert len(session.nodes) == len(script)
    return parts, resent


def test_memory_of_a_long_session(script):
    copies = 5
    _play(script, open_session(SessionSettings(), qwen3(), "warm"))  # what is cached once is no session's
    gc.collect()
    tracemalloc.start()
    sessions, kept = [], []
    try:
        for number in range(copies):
            sessions.append(open_session(SessionSettings(), qwen3(), str(number)))
            kept.append(_play(script, sessions[-1])[1])
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] / copies
    finally:
        tracemalloc.stop()
    assert all(one.known for one in kept)
    assert all(session.nodes[-1].n_tokens == n_tokens(script, TURNS) for session in sessions)
    text = len(orjson.dumps(orjson.loads(script[-1].body)["messages"])) + len(orjson.dumps(script[-1].message))
    tokens = n_tokens(script, TURNS)
    facts = {
        "turns": TURNS,
        "tokens": tokens,
        "MB": used / 1e6,
        "text MB": text / 1e6,
        "bytes a token beside the text": (used - text) / tokens,
    }
    publish("session-memory", table(list(facts), [list(facts.values())]), facts)
