"""`infra/h200/lane bare|reference [--dry-run]`: what a bare CUDA machine can show, and Qwen3-8B on SGLang."""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import tempfile
from pathlib import Path

from infra.h200.model import check_model
from infra.h200.sizes import CONCURRENCY, DRY, H200, Sizes
from infra.h200.tally import Part, State, Tally, run_parts, write_figures


async def check_flow(sizes: Sizes, tally: Tally) -> None:
    """A batch through session and flow on the grown engine, then its own requests straight at it."""
    from bench.flow_load import BATCH, run_flow
    from bench.tape_load import read_tapes, replay_tapes

    from rollout.engine.tiny import CHECKPOINT
    from rollout.process import start
    from rollout.tito.renderer import Tito
    from rollout.tito.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="h200-lane-") as made:
        folder = Path(made)
        engine = await start(engine_argv(sizes, CHECKPOINT), log=folder / "engine.log", deadline_s=300.0)
        try:
            flow = await asyncio.to_thread(
                run_flow,
                folder,
                engine,
                count=sizes.rollouts,
                turns=sizes.turns,
                tokens=sizes.tokens,
                concurrency=CONCURRENCY,
            )
            stops = Tito(load_tokenizer(str(CHECKPOINT)), "qwen3").stop_token_ids
            tapes = read_tapes(str(folder / "lake"), BATCH)
            again = await replay_tapes(tapes, engine.url, concurrency=CONCURRENCY, stop_ids=stops)
        finally:
            await asyncio.to_thread(engine.stop)
    turns = sizes.rollouts * sizes.turns
    tally.check("every rollout published and equal", flow["tokens"] == turns * sizes.tokens)
    tally.check("the replay sampled the recorded ids", again.same == turns, f"{again.same} of {turns} turns")
    straight = again.tokens / again.seconds
    tally.figure("through the flow", flow["tokens"] / flow["flow_s"], "tokens/s")
    tally.figure("straight at the engine", straight, "tokens/s")
    tally.figure("ratio (target on a GPU 0.95)", flow["tokens"] / flow["flow_s"] / straight)


def engine_argv(sizes: Sizes, model: Path) -> list[str]:
    """The embedded engine in the lane's shape on its device."""
    argv = [sys.executable, "-m", "rollout.engine.embedded", "--model", str(model)]
    return [*argv, "--device", sizes.device, "--grow", sizes.shape]


def bare_parts(sizes: Sizes) -> list[Part[Sizes]]:
    """The parts of the bare lane and the modules that each imports."""
    flow = ("aiohttp", "orjson", "tokenizers", "pyarrow", "renderers", "openai", "prefect", "deltalake", "polars")
    return [
        Part(name="model", checks=2 + len(sizes.widths), needs=("torch", "numpy"), run=check_model),
        Part(name="flow", checks=2, needs=("torch", "numpy", *flow), run=check_flow),
    ]


def main() -> int:
    """Run a lane; 0 only if every check of every part was made and passed."""
    parser = argparse.ArgumentParser(prog="infra/h200/lane", description=__doc__)
    parser.add_argument("kind", choices=["bare", "reference"])
    parser.add_argument("--dry-run", action="store_true", help="every step on the CPU, in small")
    parser.add_argument("--model", type=Path, default=None, help="reference: directory of the Qwen3-8B checkpoint")
    parser.add_argument("--parts", default=None, help="which parts to run; what is left out is not counted")
    parser.add_argument("--figures", type=Path, default=None, help="write figures and counts to this JSON file")
    given = parser.parse_args()
    if given.kind == "reference" and given.dry_run == (given.model is not None):
        parser.error("reference needs --model DIR or --dry-run, which takes the shipped checkpoint")
    return run_bare(given) if given.kind == "bare" else run_reference(given)


def run_bare(given: argparse.Namespace) -> int:
    """The bare lane; its exit status."""
    sizes = DRY if given.dry_run else H200
    if given.dry_run:
        print(f"On a GPU this runs: {' '.join(engine_argv(H200, Path('rollout/engine/tiny/checkpoint')))}")
        print(f"and: {H200}")
    return _run(given, bare_parts(sizes), sizes, device=sizes.device, shape=sizes.shape)


def run_reference(given: argparse.Namespace) -> int:
    """The reference parity lane; its exit status."""
    from infra.h200.reference import reference_dry, reference_on_h200, reference_parts

    with tempfile.TemporaryDirectory(prefix="reference-model-") as made:
        state = reference_dry(Path(made)) if given.dry_run else reference_on_h200(given.model.absolute())
        if given.dry_run:
            print(f"On a GPU this runs: {reference_on_h200(Path('Qwen3-8B'))}")
        return _run(given, reference_parts(state), state, recipe=state.recipe, revision=state.revision)


def _run(given: argparse.Namespace, parts: list[Part[State]], state: State, **facts: str) -> int:
    tally = Tally()
    wanted = [part for part in parts if given.parts is None or part.name in given.parts.split(",")]
    status = asyncio.run(run_parts(wanted, state, tally))
    if given.figures is not None:
        write_figures(tally, given.figures, python=platform.python_version(), **facts)
    return status


if __name__ == "__main__":
    sys.exit(main())
