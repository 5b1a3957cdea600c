"""A batch of `bench.talker` through the flow, against an engine that runs already, as a user would start it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.talker import AGENT
from bench.usage import DRIVER, run_measured

from rollout.engine.tiny import CHECKPOINT
from rollout.parts import ALLOWED_MODULES
from rollout.process import Child
from rollout.tito.tokenizer import load_tokenizer

TESTS = Path(__file__).parents[1]
SIDES = Path(__file__).with_name("sides.py")
BATCH = "bench"
Figures = dict[str, float]


def talker_metadata(turns: int, tokens: int) -> dict[str, Any]:
    """What tells the agent how long to talk; its stop token is the tiny checkpoint's."""
    return {"turns": turns, "tokens": tokens, "stop": load_tokenizer(str(CHECKPOINT)).eos_token_id}


def question(number: int) -> dict[str, Any]:
    """The first message of a rollout."""
    return {"role": "user", "content": f"Tell me about the number {number}."}


def run_flow(folder: Path, engine: Child, *, count: int, turns: int, tokens: int, concurrency: int) -> Figures:
    """Run so many rollouts into `folder / "lake"`; wall seconds of its parts and CPU seconds by process.

    Raises:
        CommandFailed: the command's exit status is not 0.
    """
    metadata = talker_metadata(turns, tokens)
    rows = [{"messages": [question(n)], "label": "0", "metadata": metadata} for n in range(count)]
    prompts, marks_file = folder / "prompts.jsonl", folder / "marks.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "prompts": prompts,
        "lake": folder / "lake",
        "batch-id": BATCH,
        "agent": AGENT,
        "n-samples-per-prompt": 1,
        "max-new-tokens": tokens + 1,
        "concurrency": concurrency,
        "engine": "external",
        "engine-url": engine.url,
        "model": CHECKPOINT,
        "seed": 7,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    spent = group_cpu_s(engine)
    argv = [sys.executable, str(SIDES), "flow", str(marks_file), *flags]
    usage = run_measured(argv, env=_environment(folder), log=folder / "flow.log")
    spent = group_cpu_s(engine) - spent
    marks = json.loads(marks_file.read_text())
    assert {"equal": count} == marks["verdicts"], marks["verdicts"]
    roles = usage.by_role(marks["children_started"], marks["published"])
    return {
        "tokens": marks["tokens"],
        "rollouts_s": marks["last_rollout"] - marks["children_started"],
        "flow_s": marks["published"] - marks["children_started"],
        "flow_engine_cpu": spent,
        "others_cpu": max(0.0, usage.others_s - spent),
        **{f"{role} cpu": roles.get(role, 0.0) for role in (DRIVER, "session server", "checkers", "Prefect server")},
    }


def _environment(folder: Path) -> dict[str, str]:
    """No Prefect of the user's own, whatever the machine has; the agent's module where it can be imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    paths = filter(None, (str(TESTS), env.get("PYTHONPATH", "")))
    env |= {"ROLLOUT_HOME": str(folder / "state"), "PREFECT_HOME": str(folder / "no-profile")}
    return {**env, ALLOWED_MODULES: "bench.talker", "PYTHONPATH": os.pathsep.join(paths)}


def group_cpu_s(engine: Child) -> float:
    """CPU seconds of the engine: every living process of its session, and the children they have reaped."""
    total, ticks = 0, os.sysconf("SC_CLK_TCK")
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == engine.process.pid:
            total += sum(map(int, fields[11:15]))
    return total / ticks
