"""The reference parity lane: one checkpoint on a real SGLang, the reference case on v1 and then on v2, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from infra.h200.tally import Part, Tally

REVISION = "b968826d9c46dd6066d109eabc6255188de91218"
"""The commit of Qwen/Qwen3-8B that the lane is about."""
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
    """One part: the revision, a batch for each of two versions, and each input on both."""
    needs = ("aiohttp", "orjson", "tokenizers", "pyarrow", "renderers", "openai", "prefect", "deltalake", "polars")
    return [Part(name="reference", checks=3 + state.inputs, needs=needs, run=check_reference)]


async def check_reference(state: Reference, tally: Tally) -> None:
    """Start SGLang on the checkpoint, run both batches and compare them input by input."""
    from rollout.batch.reference import VERSIONS
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
    from rollout.batch.reference import OPTIONS, write_reference_prompts
    from rollout.process import bound_argv

    shared = {name.replace("_", "-"): "none" if value is None else value for name, value in OPTIONS.items()}
    options = {
        **shared,
        "prompts": write_reference_prompts(folder, state.inputs),
        "lake": folder / "lake",
        "batch-id": version,
        "session-version": version,
        "engine": "external",
        "engine-url": url,
        "model": state.model,
        "concurrency": state.concurrency,
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
    from rollout.batch.reference import VERSIONS, prove_inputs

    for proof in prove_inputs(lake, VERSIONS, state.inputs):
        tally.check(f"input {proof.index} is the same bits on v1 and v2", not proof.differs, proof.differs)
