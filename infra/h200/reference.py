"""The reference parity lane: one checkpoint on a real SGLang, the reference case on v1 and then on v2, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from infra.h200.tally import Part, Tally

REVISION = "b968826d9c46dd6066d109eabc6255188de91218"
"""The commit of Qwen/Qwen3-8B that the lane is about."""
VERSIONS = ("v1", "v2")
"""In this order, on the same server."""
OPTIONS = {"temperature": 0, "seed": 20260803, "max-new-tokens": 128, "n-samples-per-prompt": 1}
"""What both batches share; thinking is off by default."""
TURNS = 9
"""Requests of one input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """`recipe` names a function of rollout.engine.recipes, `model` is a checkpoint directory.

    inputs       how many of the case's 16 are played
    concurrency  rollouts at once: as many as the recipe's determinism allows
    """

    recipe: str
    model: Path
    inputs: int
    concurrency: int
    revision: str = REVISION
    options: dict[str, object] = field(default_factory=lambda: dict(OPTIONS))


def reference_on_h200(model: Path) -> Reference:
    """Qwen3-8B with the recipe's flags, all 16 inputs; its kernels are batch-invariant."""
    return Reference(recipe="qwen3_8b_h200", model=model, inputs=16, concurrency=16)


def reference_dry(folder: Path) -> Reference:
    """Every step on a CPU: the shipped checkpoint in `folder`, laid out as a hub's cache does it."""
    from rollout.engine.tiny import CHECKPOINT

    model = folder / "snapshots" / REVISION
    model.parent.mkdir(parents=True)
    model.symlink_to(CHECKPOINT, target_is_directory=True)
    return Reference(recipe="tiny_cpu", model=model, inputs=4, concurrency=1)


def reference_parts(state: Reference) -> list[Part[Reference]]:
    """One part: the revision, a batch for each version, and each input on both."""
    needs = ("aiohttp", "orjson", "tokenizers", "pyarrow", "renderers", "openai", "prefect", "deltalake", "polars")
    return [Part(name="reference", checks=1 + len(VERSIONS) + state.inputs, needs=needs, run=check_reference)]


async def check_reference(state: Reference, tally: Tally) -> None:
    """Start SGLang on the checkpoint, run both batches and compare them input by input."""
    from rollout.batch.repeats import server_info
    from rollout.engine.checkpoint import read_checkpoint
    from rollout.engine.environment import host_gpus, sglang_python, share_gpus
    from rollout.engine.launch import launch
    from rollout.engine.recipes import find_recipe

    found = find_revision(state.model)
    is_it = found == state.revision
    tally.check(f"the checkpoint is revision {state.revision[:12]}", is_it, "" if is_it else f"told: {found}")
    read_checkpoint(state.model)
    recipe = find_recipe(state.recipe)
    gpus, python = share_gpus(recipe, host_gpus())[0], sglang_python()
    with tempfile.TemporaryDirectory(prefix="reference-lane-") as made:
        folder, began = Path(made), time.monotonic()
        engine = await launch(recipe, model=state.model, python=python, log=folder / "sglang.log", gpus=gpus)
        try:
            tally.figure("SGLang ready after", time.monotonic() - began, "s")
            tally.figure("flags", " ".join(recipe.stated))
            tally.figure("SGLang", str((await server_info(engine.url)).get("version")))
            for version in VERSIONS:
                await _batch(state, version, engine.url, folder, tally)
        finally:
            await asyncio.to_thread(engine.stop)
        _compare(state, folder / "lake", tally)


def find_revision(model: Path) -> str | None:
    """The commit that a hub's client says a checkpoint directory is; null where nothing says so.

    A hub's cache names the directory by it; a download into a directory notes it for each file.
    """
    if model.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", model.name):
        return model.name
    notes = [path for path in (model / ".cache" / "huggingface" / "download").rglob("*.metadata") if path.is_file()]
    told = {(path.read_text().splitlines() or [""])[0] for path in notes}
    return told.pop() if len(told) == 1 else None


async def _batch(state: Reference, version: str, url: str, folder: Path, tally: Tally) -> None:
    from rollout.agents.reference_case import reference_inputs
    from rollout.process import bound_argv

    prompts = folder / "reference.jsonl"
    rows = [{**row, "agent": "reference_case"} for row in reference_inputs()[: state.inputs]]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {
        "prompts": prompts,
        "lake": folder / "lake",
        "batch-id": version,
        "session-version": version,
        "reward": "none",
        "engine": "external",
        "engine-url": url,
        "model": state.model,
        "concurrency": state.concurrency,
        "parity-min-equal": 1,
        **state.options,
    }
    argv = [sys.executable, "-m", "rollout", "run", *(f"--{name}={value}" for name, value in options.items())]
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *bound_argv([*argv, "--json"]),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ROLLOUT_HOME": str(folder / "state")},
    )
    said, _ = await process.communicate()
    summary = (json.loads(said) if process.returncode == 0 else {}).get("summary") or {}
    whole = ({"equal": state.inputs}, TURNS * state.inputs) == (summary.get("verdicts"), summary.get("turns"))
    tally.check(f"the batch on {version} is published, whole and equal to its replays", whole)
    tally.figure(f"the batch on {version} took", time.monotonic() - began, "s")


def _compare(state: Reference, lake: Path, tally: Tally) -> None:
    from rollout.agents.reference_case import FIRST, SECOND
    from rollout.lake import scan_samples
    from rollout.parity.projections import PARITY, diff_projected
    from rollout.parity.rows import rows_of

    both = [
        {row["index"]: row for row in rows_of(scan_samples(lake, version).collect().to_arrow())} for version in VERSIONS
    ]
    for index in range(state.inputs):
        one, other = (rows.get(index) for rows in both)
        if one is None or other is None:
            tally.check(f"input {index} is there on both", False)
            continue
        paths = diff_projected(one, other, PARITY)
        played = [FIRST, SECOND] == other["metadata"].get("looked_up")  # else no tool was called, and all is vacuous
        detail = "; ".join(paths[:3]) or ("" if played else "the model called other tools than the case is about")
        tally.check(f"input {index} is the same bits on v1 and v2", played and not paths, detail)
