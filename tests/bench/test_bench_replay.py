"""CPU of an in-process replay a turn and session version, and of a whole verdict. README.md says how to read it.

BENCH_ROLLOUTS (64) says how many demo rollouts are played first, up to the demo's 64 prompts x 4;
BENCH_REPEATS (1) times three replays are made of each tape, and their median counts. With `pytest -v`
the profile of each set of tapes is printed too.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import os
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa
import pytest
from bench.figures import publish, table
from bench.talks import agent_talk
from scripted import STAMP, tables, tiny_tito
from vocabulary import qwen3

from rollout.agents.contract import load_agents
from rollout.batch.model import model_digest
from rollout.batch.plan import make_plan, shard_inputs
from rollout.batch.prompts import parse_prompts, prompt_bytes
from rollout.batch.sessions import session_server
from rollout.batch.shard import run_shard
from rollout.config import make_config
from rollout.engine.embedded import start_embedded
from rollout.engine.tiny import CHECKPOINT
from rollout.generate import RunContext
from rollout.outcome import Outcome
from rollout.parity.replay import replay
from rollout.parity.rows import Row, rows_of
from rollout.parity.validate import read_tape
from rollout.parity.verdict import judge_rows
from rollout.rewards import load_reward
from rollout.session.tape import Tape
from rollout.tito.renderer import Tito

ROLLOUTS = int(os.environ.get("BENCH_ROLLOUTS", "64"))
REPEATS = 3 * int(os.environ.get("BENCH_REPEATS", "1"))
SHORT, LONG = 60, 200
"""Words that a turn of the long conversations samples: about 240 and 710 ids sampled and appended."""
TOP = 12
"""Functions that a profile shows."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One rollout as parity finds it: tape, outcome and rows, read back from the tables."""

    tape: Tape
    outcome: Outcome
    rows: list[Row]

    @property
    def turns(self) -> int:
        return len(self.tape.exchanges)


def test_replay_a_turn_and_version(tmp_path, pytestconfig):
    sets: list[tuple[str, Tito, list[Recorded]]] = [
        ("demo", tiny_tito(), _recorded(*asyncio.run(_demo(tmp_path)))),
        ("10 short turns", qwen3(), _talks(10, SHORT, copies=8)),
        ("50 short turns", qwen3(), _talks(50, SHORT, copies=4)),
        ("200 short turns", qwen3(), _talks(200, SHORT, copies=2)),
        ("50 long turns", qwen3(), _talks(50, LONG, copies=2)),
    ]
    rows, facts, profiles = [], {}, []
    for name, tito, recorded in sets:
        turns = sum(one.turns for one in recorded)
        ids = sum(_n_ids(one.tape) for one in recorded) // turns
        facts[name] = {"rollouts": len(recorded), "turns": turns, "ids_a_turn": ids}
        for what, run in _runs(tito).items():
            costs = _costs(recorded, run)
            rows.append((name, len(recorded), turns, ids, what, median(costs), min(costs), max(costs)))
            facts[name][what] = {"median_ms": median(costs), "min_ms": min(costs), "max_ms": max(costs)}
            if pytestconfig.get_verbosity() > 0:
                profiles.append(f"{name}, {what}:\n{_profile(recorded, run)}")
    head = ["tapes of", "rollouts", "turns", "ids a turn", "what", "median ms", "min ms", "max ms"]
    text = f"CPU milliseconds a turn; a replay's target is 1.5 on each version.\n\n{table(head, rows)}"
    publish("replay", "\n\n".join([text, *profiles]), facts)


Run = Callable[[Recorded], int]
"""What is measured, on one tape; gives the turns it played."""


def _runs(tito: Tito) -> dict[str, Run]:
    replays = {f"replay {version}": _replaying(tito, version) for version in ("v1", "v2")}
    return {**replays, "verdict": _judging(tito)}


def _replaying(tito: Tito, version: Any) -> Run:
    def run(one: Recorded) -> int:
        replayed = replay(one.tape, version=version, tito=tito)
        n_committed = len(replayed.session.nodes)
        if version == one.tape.settings.version:
            assert n_committed == one.turns
        return n_committed + (replayed.stop is not None)

    return run


def _judging(tito: Tito) -> Run:
    def run(one: Recorded) -> int:
        found = judge_rows(one.tape, one.outcome, one.rows, tito)
        assert found.verdict in ("equal", "equal_by_path", "not_comparable"), found
        return one.turns

    return run


def _costs(recorded: list[Recorded], run: Run) -> list[float]:
    """CPU milliseconds a turn, one figure per tape: the median of its repeats."""
    return [1000 * median(_cpu_a_turn(run, one) for _ in range(REPEATS)) for one in recorded if one.turns]


def _cpu_a_turn(run: Run, one: Recorded) -> float:
    started = time.process_time()
    turns = run(one)
    return (time.process_time() - started) / turns


def _profile(recorded: list[Recorded], run: Run) -> str:
    """The functions in which most CPU is spent, their own alone; clocks at each call make all of it slower."""
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    for one in recorded:
        run(one)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(TOP)
    return text.getvalue().strip()


def _recorded(samples: pa.Table, trajectories: pa.Table) -> list[Recorded]:
    rows: dict[int, list[Row]] = {}
    for row in rows_of(samples):
        rows.setdefault(row["index"], []).append(row)
    found = []
    for index in sorted(rows):
        mine = trajectories.filter(pa.compute.equal(trajectories.column("index"), index))
        tape, outcome = read_tape(mine)
        found.append(Recorded(tape=tape, outcome=outcome, rows=rows[index]))
    return found


def _n_ids(tape: Tape) -> int:
    return sum(one.appended_ids_P.size + one.output_ids_O.size for one in tape.exchanges)


def _talks(turns: int, words: int, *, copies: int) -> list[Recorded]:
    results = []
    for index in range(copies):
        talk = agent_talk(qwen3(), "v2", turns=turns, words=words, seed=index)
        outcome = talk.outcome()
        outcome.input.index = index
        results.append(talk.result(outcome))
    return _recorded(*tables(*results))


async def _demo(tmp_path: Any) -> tuple[pa.Table, pa.Table]:
    """Samples and trajectories of the shipped prompts' first rollouts, on the shipped checkpoint."""
    config = make_config(n_samples_per_prompt=4)
    data = prompt_bytes(config.prompts)
    rows = parse_prompts(data, config.prompts, skip_bad=False)
    digest = await model_digest(config, CHECKPOINT)
    plan = make_plan(
        config,
        rows=rows,
        model_digest=digest,
        created_at=STAMP.created_at,
        flow_run_id="0" * 32,
    )
    inputs = [given for cut in plan.shards for given in shard_inputs(plan, rows, cut.shard)][:ROLLOUTS]
    engine = await start_embedded(None, log=tmp_path / "engine.log")
    try:
        async with session_server(engine.url, CHECKPOINT, config, log=tmp_path / "session.log") as sessions:
            context = RunContext(
                config=config,
                sessions=sessions,
                agents=load_agents(plan.agents, config.session_version),
                reward=load_reward(str(config.reward)),
                engine={},
                slots=asyncio.Semaphore(config.concurrency),
            )
            result = await run_shard(inputs, context=context, stamp=STAMP)
    finally:
        engine.stop()
    return result.samples, result.trajectories
