"""The batch flow against the same rollouts driven without Prefect, lake and parity. README.md says how to read it.

BENCH_ROLLOUTS (64) and BENCH_REPEATS (1) size it; `make bench` runs 1,024 rollouts three times.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bench.figures import medians, publish, table
from bench.usage import DRIVER, Usage, command_environment, run_measured

from rollout.engine.tiny.prompts import mixed_prompts
from rollout.lake import scan_samples
from rollout.lake.paths import LakePaths
from rollout.lake.staging import read_staged, staged_shards
from rollout.parity.projections import same_rows

ROLLOUTS = int(os.environ.get("BENCH_ROLLOUTS", "64"))
REPEATS = int(os.environ.get("BENCH_REPEATS", "1"))
SAMPLES_PER_PROMPT = 4
SHARD_SIZE = 32
SIDES = Path(__file__).with_name("sides.py")
BATCH = "bench"
Marks = dict[str, Any]
Figures = dict[str, float]

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def test_the_flow_against_the_same_rollouts_driven_bare(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = mixed_prompts(ROLLOUTS // SAMPLES_PER_PROMPT, seed=1024)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"prompts": str(prompts), "n_samples_per_prompt": SAMPLES_PER_PROMPT, "shard_size": SHARD_SIZE, "seed": 7}
    pairs = []
    for repeat in range(REPEATS):
        folder = tmp_path / str(repeat)
        folder.mkdir()
        bare, flow = _bare(folder, options), _flow(folder, options)
        assert [] == same_rows(_published(folder / "lake"), _rows(folder / "samples.arrow"))
        pairs.append((flow, bare))
    _report(pairs, _prefect(folder))


def _flow(folder: Path, options: dict[str, Any]) -> tuple[Figures, Figures]:
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    usage, marks = _run("flow", folder, [*flags, "--lake", str(folder / "lake"), "--batch-id", BATCH])
    assert ROLLOUTS == sum(marks["verdicts"].values())
    wall = _phases(
        {
            "command's start, options, prompts": (usage.started, marks["prefect_starts"]),
            "Prefect's start": (marks["prefect_starts"], marks["prefect_started"]),
            "plan": (marks["prefect_started"], marks["children_start"]),
            "engine and session server start": (marks["children_start"], marks["children_started"]),
            "rollouts": (marks["children_started"], marks["last_rollout"]),
            "last shards' staging and checks": (marks["last_rollout"], marks["checked"]),
            "engine and session server end": (marks["checked"], marks["children_ended"]),
            "publish": (marks["children_ended"], marks["published"]),
            "report": (marks["published"], marks["flow_ended"]),
            "Prefect's end": (marks["flow_ended"], marks["prefect_ended"]),
            "exit": (marks["prefect_ended"], usage.ended),
        },
        usage,
    )
    start = usage.by_role(marks["prefect_starts"], marks["prefect_started"])
    cpu = {
        **_cpu(usage),
        "Prefect's start": sum(start.values()),
        "Prefect's start, driver": start[DRIVER],
        "rows": marks["rows_cpu"],
        "stage": marks["stage_cpu"],
        "publish": marks["publish_cpu"],
    }
    return {**wall, "turns": marks["turns"]}, cpu


def _bare(folder: Path, options: dict[str, Any]) -> tuple[Figures, Figures]:
    usage, marks = _run("bare", folder, [json.dumps(options), str(folder)])
    usage.ended -= marks["written"] - marks["ended"]  # the rows are written for the comparison alone
    wall = _phases(
        {
            "command's start, options, prompts": (usage.started, marks["children_start"]),
            "engine and session server start": (marks["children_start"], marks["children_started"]),
            "rollouts": (marks["children_started"], marks["last_rollout"]),
            "engine and session server end": (marks["last_rollout"], marks["ended"]),
            "exit": (marks["ended"], usage.ended),
        },
        usage,
    )
    written = usage.by_role(marks["ended"], marks["written"])[DRIVER]
    cpu = _cpu(usage)
    return {**wall, "turns": marks["turns"]}, {**cpu, DRIVER: cpu[DRIVER] - written, "all": cpu["all"] - written}


def _prefect(folder: Path) -> Figures:
    """Prefect with empty tasks, on the database that the flow left."""
    usage, marks = _run("prefect", folder, [str(-(-ROLLOUTS // SHARD_SIZE))])
    spent = usage.by_role(marks["prefect_started"], marks["prefect_ended"])
    return {
        "wall": marks["flow_ended"] - marks["prefect_started"],
        "end": marks["prefect_ended"] - marks["flow_ended"],
        "server": spent["Prefect server"],
        DRIVER: spent[DRIVER],
    }


def _run(side: str, folder: Path, arguments: list[str]) -> tuple[Usage, Marks]:
    marks = folder / f"{side}.json"
    argv = [sys.executable, str(SIDES), side, str(marks), *arguments]
    usage = run_measured(argv, env=command_environment(folder), log=folder / f"{side}.log")
    return usage, json.loads(marks.read_text())


def _phases(spans: dict[str, tuple[float, float]], usage: Usage) -> Figures:
    """Wall seconds of a side's phases, one after the other; together they are its whole time."""
    seconds = {name: end - start for name, (start, end) in spans.items()}
    assert min(seconds.values()) >= 0.0, seconds
    assert abs(sum(seconds.values()) - usage.wall_s) < 0.01, seconds
    return {**seconds, "all": usage.wall_s}


def _cpu(usage: Usage) -> Figures:
    """CPU seconds by role; what was sampled must be nearly all that the kernel counted."""
    roles = usage.by_role()
    assert 0.85 * usage.cpu_s <= sum(roles.values()) + 1.0, (roles, usage.cpu_s)
    assert sum(roles.values()) <= 1.05 * usage.cpu_s + 0.5, (roles, usage.cpu_s)
    return {**roles, "all": usage.cpu_s, "others": usage.others_s}


def _published(lake: Path) -> pa.Table:
    """The batch's samples in the frozen schema, from the very files that were published."""
    paths = LakePaths(str(lake))
    samples = pa.concat_tables(read_staged(paths, one)[0] for one in staged_shards(paths, BATCH).values())
    visible = scan_samples(str(lake), batch=BATCH).select("sample_id").collect()["sample_id"]
    assert sorted(visible) == sorted(samples.column("sample_id").to_pylist())
    return samples


def _rows(file: Path) -> pa.Table:
    with pa.ipc.open_file(file) as reader:
        return reader.read_all()


def _report(pairs: list[tuple[tuple[Figures, Figures], tuple[Figures, Figures]]], prefect: Figures) -> None:
    flow_wall, flow_cpu = (medians([flow[kind] for flow, _ in pairs]) for kind in (0, 1))
    bare_wall, bare_cpu = (medians([bare[kind] for _, bare in pairs]) for kind in (0, 1))
    ratios = [(flow[0]["all"] - flow[0]["Prefect's start"]) / bare[0]["all"] for flow, bare in pairs]
    ratio = medians([{"ratio": one} for one in ratios])["ratio"]
    cpu_ratio = (flow_cpu["all"] - flow_cpu["Prefect's start"]) / bare_cpu["all"]
    parts = _parts(flow_wall, flow_cpu, bare_cpu, prefect)
    turns = int(flow_wall["turns"])
    text = "\n\n".join(
        [
            f"{ROLLOUTS} rollouts, {turns} turns, {len(pairs)} runs of each side, medians. "
            f"Flow without Prefect's start / bare: {ratio:.2f} (runs: {', '.join(f'{one:.2f}' for one in ratios)}; "
            f"target 1.3); in CPU seconds {cpu_ratio:.2f}. Other work took {_others(flow_wall, flow_cpu)} of the "
            f"machine during the flow, {_others(bare_wall, bare_cpu)} during bare.",
            table(
                ["part", "CPU s", "share of bare's CPU", "wall s where it runs alone"],
                [(name, cpu, f"{100 * cpu / bare_cpu['all']:.1f} %", wall) for name, (cpu, wall) in parts.items()],
            ),
            _sides("wall s", ["phase", "flow", "bare"], flow_wall, bare_wall, ("turns",)),
            _sides("CPU s", ["process", "flow", "bare"], flow_cpu, bare_cpu, _INSIDE),
        ]
    )
    facts = {"ratio": ratio, "ratios": ratios, "cpu_ratio": cpu_ratio, "rollouts": ROLLOUTS, "turns": turns}
    facts |= {"parts": {name: {"cpu_s": cpu, "wall_s": wall} for name, (cpu, wall) in parts.items()}}
    facts |= {"wall_s": {"flow": flow_wall, "bare": bare_wall}, "cpu_s": {"flow": flow_cpu, "bare": bare_cpu}}
    publish("flow", text, {**facts, "prefect_alone": prefect})


def _others(wall: Figures, cpu: Figures) -> str:
    """Share of the machine that was not ours: wall times are worth something only where it is near 0."""
    return f"{100 * cpu['others'] / wall['all'] / (os.cpu_count() or 1):.0f} %"


LAKE = ("rows", "stage", "publish")
_INSIDE = ("others", "Prefect's start", "Prefect's start, driver", *LAKE)
"""CPU figures that lie inside a process's own, or are not ours."""


def _parts(wall: Figures, cpu: Figures, bare_cpu: Figures, prefect: Figures) -> dict[str, tuple[float, float | None]]:
    """CPU seconds of each part, and wall seconds where it runs with nothing beside it.

    What is left of the driver's CPU beyond bare's, its own Prefect start and the lake is the Prefect
    client's, the command's and the summary's.
    """
    server = cpu["Prefect server"] + cpu["Prefect's start, driver"] - cpu["Prefect's start"]
    client = cpu[DRIVER] - bare_cpu[DRIVER] - cpu["Prefect's start, driver"] - sum(cpu[name] for name in LAKE)
    return {
        "Prefect's start (apart)": (cpu["Prefect's start"], wall["Prefect's start"]),
        "Prefect server": (server, None),
        "Prefect client, flow and command": (client, wall["report"] + wall["Prefect's end"]),
        "  Prefect with empty tasks (by itself)": (
            prefect["server"] + prefect[DRIVER],
            prefect["wall"] + prefect["end"],
        ),
        "parity (checkers)": (cpu["checkers"], wall["last shards' staging and checks"]),
        "lake: rows and spool": (cpu["rows"], None),
        "lake: stage": (cpu["stage"], None),
        "lake: publish": (cpu["publish"], wall["publish"]),
    }


def _sides(unit: str, head: list[str], flow: Figures, bare: Figures, without: tuple[str, ...]) -> str:
    names = [name for name in flow if name not in without and name != "all"]
    rows = [(name, flow[name], bare.get(name)) for name in [*names, "all"]]
    return table([f"{head[0]}, {unit}", *head[1:]], rows)
