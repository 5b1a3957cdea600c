"""A batch through the flow against its own requests sent straight at the engine. README.md says how to read it.

The embedded engine always; SGLang on the CPU where ROLLOUT_SGLANG_PYTHON names an environment with it.
BENCH_ROLLOUTS (64) and BENCH_REPEATS (1) size it; at the smoke size a rollout in eight is run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.figures import machine, medians, publish, table
from bench.talker import AGENT
from bench.tape_load import read_tapes, replay_tapes
from bench.usage import DRIVER, run_measured

from rollout.engine.embedded import start_embedded
from rollout.engine.launch import launch
from rollout.engine.recipes import tiny_cpu
from rollout.engine.tiny import CHECKPOINT
from rollout.parts import ALLOWED_MODULES
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
TESTS = Path(__file__).parents[1]
SIDES = Path(__file__).with_name("sides.py")
BATCH = "bench"
Figures = dict[str, float]

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
        flow = _flow(folder, child, tokens, rollouts(name, tokens))
        tapes = read_tapes(str(folder / "lake"), BATCH)
        spent, own = _group_cpu_s(child), time.process_time()
        given = replay_tapes(tapes, child.url, concurrency=CONCURRENCY, stop_ids=tito.stop_token_ids)
        again = asyncio.run(given)
        spent, own = _group_cpu_s(child) - spent, time.process_time() - own
        expected = rollouts(name, tokens) * TURNS
        assert expected == sum(len(tape.exchanges) for tape in tapes) == again.turns
        assert expected * tokens == flow["tokens"] == again.tokens
        if name == "embedded":
            assert expected == again.same  # the very same tokens, whatever ran beside them
        runs.append(
            {**flow, "replay_s": again.seconds, "replay_engine_cpu": spent, "client_cpu": own, "same": again.same}
        )
    _report(name, tokens, runs)


def _flow(folder: Path, child: Child, tokens: int, count: int) -> Figures:
    """The command as a user starts it; wall seconds of its parts and CPU seconds by process."""
    metadata = {"turns": TURNS, "tokens": tokens, "stop": load_tokenizer(str(CHECKPOINT)).eos_token_id}
    rows = [
        {
            "messages": [{"role": "user", "content": f"Tell me about the number {n}."}],
            "label": "0",
            "metadata": metadata,
        }
        for n in range(count)
    ]
    prompts, marks_file = folder / "prompts.jsonl", folder / "marks.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "prompts": prompts,
        "lake": folder / "lake",
        "batch-id": BATCH,
        "agent": AGENT,
        "n-samples-per-prompt": 1,
        "max-new-tokens": tokens + 1,
        "concurrency": CONCURRENCY,
        "engine": "external",
        "engine-url": child.url,
        "model": CHECKPOINT,
        "seed": 7,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"ROLLOUT_HOME": str(folder / "state"), "PREFECT_HOME": str(folder / "no-profile")}
    paths = (str(TESTS), env.get("PYTHONPATH", ""))
    env |= {ALLOWED_MODULES: "bench.talker", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    spent = _group_cpu_s(child)
    usage = run_measured([sys.executable, str(SIDES), "flow", str(marks_file), *flags], env=env, log=folder / "log")
    spent = _group_cpu_s(child) - spent
    marks = json.loads(marks_file.read_text())
    assert {"equal": count} == marks["verdicts"]
    roles = usage.by_role(marks["children_started"], marks["published"])
    return {
        "tokens": marks["tokens"],
        "rollouts_s": marks["last_rollout"] - marks["children_started"],
        "flow_s": marks["published"] - marks["children_started"],
        "flow_engine_cpu": spent,
        "others_cpu": usage.others_s - spent,
        **{f"{role} cpu": roles.get(role, 0.0) for role in (DRIVER, "session server", "checkers", "Prefect server")},
    }


def _group_cpu_s(child: Child) -> float:
    """CPU seconds of the engine: every living process of its session, and the children they have reaped."""
    total, ticks = 0, os.sysconf("SC_CLK_TCK")
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == child.process.pid:
            total += sum(map(int, fields[11:15]))
    return total / ticks


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
                    ("not ours", one["others_cpu"], None),
                ],
            ),
        ]
    )
    facts = {"engine": name, "tokens_a_turn": tokens, "rates": rates, "ratio": rates["flow"] / straight, "runs": runs}
    publish(f"engine-{name}-{tokens}", text, {**facts, "machine": machine()})
