"""A batch through the flow against its own requests sent straight at the engine. README.md says how to read it.

The embedded engine always; SGLang on the CPU where ROLLOUT_SGLANG_PYTHON names an environment with it.
BENCH_ROLLOUTS (64) and BENCH_REPEATS (1) size it; at the smoke size a rollout in eight is run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.figures import machine, medians, publish, table
from bench.flow_load import BATCH, Figures, group_cpu_s, run_flow
from bench.tape_load import read_tapes, replay_tapes
from bench.usage import DRIVER, busy_s

from rollout.engine.embedded import start_embedded
from rollout.engine.launch import launch
from rollout.engine.recipes import tiny_cpu
from rollout.engine.tiny import CHECKPOINT
from rollout.process import Child
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import load_tokenizer

ROLLOUTS = int(os.environ.get("BENCH_ROLLOUTS", "64"))
REPEATS = int(os.environ.get("BENCH_REPEATS", "1"))
FULL = ROLLOUTS >= 1024
CONCURRENCY = 16
TURNS = 4
LENGTHS = (200, 20)
"""Sampled tokens of a turn."""
SGLANG = os.environ.get("ROLLOUT_SGLANG_PYTHON")
ENGINES = ("embedded", "sglang") if SGLANG else ("embedded",)

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Child]]:
    log = tmp_path_factory.mktemp(request.param) / "engine.log"
    if request.param == "sglang":
        child: Child = asyncio.run(launch(tiny_cpu(), model=CHECKPOINT, python=Path(str(SGLANG)), log=log))
    else:
        child = asyncio.run(start_embedded(None, log=log))
    yield request.param, child
    child.stop()


def rollouts(name: str, tokens: int) -> int:
    """Full size: about a minute a side on two cores. Short turns are cheaper, so there are more of them."""
    if not FULL:
        return max(4, ROLLOUTS // 8)
    return (256 if name == "embedded" else 96) * (1 if tokens == LENGTHS[0] else 4)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_batch_through_the_flow_against_its_own_requests(engine: tuple[str, Child], tokens: int, tmp_path: Path):
    name, child = engine
    tito = Tito(load_tokenizer(str(CHECKPOINT)), "qwen3")
    runs = []
    for repeat in range(REPEATS):
        folder = tmp_path / str(repeat)
        folder.mkdir()
        flow = run_flow(
            folder, child, count=rollouts(name, tokens), turns=TURNS, tokens=tokens, concurrency=CONCURRENCY
        )
        tapes = read_tapes(str(folder / "lake"), BATCH)
        busy, spent, own = busy_s(), group_cpu_s(child), time.process_time()
        given = replay_tapes(tapes, child.url, concurrency=CONCURRENCY, stop_ids=tito.stop_token_ids)
        again = asyncio.run(given)
        spent, own = group_cpu_s(child) - spent, time.process_time() - own
        others = max(0.0, busy_s() - busy - spent - own)
        expected = rollouts(name, tokens) * TURNS
        assert expected == sum(len(tape.exchanges) for tape in tapes) == again.turns
        assert expected * tokens == flow["tokens"] == again.tokens
        if name == "embedded":
            assert expected == again.same  # the very same tokens, whatever ran beside them
        runs.append(
            {
                **flow,
                "replay_s": again.seconds,
                "replay_engine_cpu": spent,
                "client_cpu": own,
                "replay_others_cpu": others,
                "same": again.same,
            }
        )
    _report(name, tokens, runs)


def _report(name: str, tokens: int, runs: list[Figures]) -> None:
    one = medians(runs)
    rates = {
        "flow": one["tokens"] / one["flow_s"],
        "its rollouts alone": one["tokens"] / one["rollouts_s"],
        "straight at the engine": one["tokens"] / one["replay_s"],
    }
    straight = rates["straight at the engine"]
    text = "\n\n".join(
        [
            f"{name}, {tokens} sampled tokens a turn, {rollouts(name, tokens)} rollouts of {TURNS} turns, "
            f"{CONCURRENCY} at once, {len(runs)} runs of each side, medians. The replay sampled the recorded ids in "
            f"{100 * one['same'] / (rollouts(name, tokens) * TURNS):.1f} % of its turns.",
            table(["side", "tokens/s", "ratio"], [(side, rate, rate / straight) for side, rate in rates.items()]),
            table(
                ["CPU s", "flow", "straight"],
                [
                    ("engine", one["flow_engine_cpu"], one["replay_engine_cpu"]),
                    ("client", None, one["client_cpu"]),
                    *((role, one[f"{role} cpu"], None) for role in (DRIVER, "session server", "checkers")),
                    ("Prefect server", one["Prefect server cpu"], None),
                    ("not ours", one["others_cpu"], one["replay_others_cpu"]),
                ],
            ),
        ]
    )
    facts = {"engine": name, "tokens_a_turn": tokens, "rates": rates, "ratio": rates["flow"] / straight, "runs": runs}
    publish(f"engine-{name}-{tokens}", text, {**facts, "machine": machine()})
