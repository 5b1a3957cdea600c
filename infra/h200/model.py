"""The model by itself, with torch and numpy and nothing else: the grown function, batch invariance, tokens/s."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from infra.h200.sizes import Sizes
from infra.h200.tally import Tally

PROMPTS = 32
NEW = 16
NEAR = 1e-3
"""How far a logprob may move when width is padded and the device's kernels sum in another order."""


async def check_model(sizes: Sizes, tally: Tally) -> None:
    """Load the tiny checkpoint as it is and grown; same tokens; same bits alone and beside up to 31 others."""
    import torch

    from rollout.engine.checkpoint import read_checkpoint
    from rollout.engine.grow import find_shape
    from rollout.engine.model import load_model
    from rollout.engine.tiny import CHECKPOINT

    checkpoint = read_checkpoint(CHECKPOINT)
    small = load_model(checkpoint)
    began = time.monotonic()
    grown = load_model(checkpoint, device=sizes.device, shape=find_shape(sizes.shape))
    tally.figure("load and growth", time.monotonic() - began, "s")
    tally.figure("rows of a decode step", grown.block)
    draw = random.Random(8)
    prompts = [draw.choices(range(800), k=draw.randrange(5, 60)) for _ in range(PROMPTS)]
    alone = [_run(grown, [prompt])[0] for prompt in prompts]
    _same_function(_run(small, prompts), alone, tally)
    for width in sizes.widths:
        order = draw.sample(range(PROMPTS), k=width)
        moved = [n for n, job in zip(order, _run(grown, [prompts[n] for n in order]), strict=True) if job != alone[n]]
        tally.check(f"the same bits alone and {width} wide", not moved, f"moved: {moved}" if moved else "")
    for width in (1, 16, 32):
        began = time.monotonic()
        _run(grown, [prompts[0]] * width, new=1)
        filled = time.monotonic()
        _run(grown, [prompts[0]] * width, new=1 + 2 * NEW)
        seconds = (time.monotonic() - filled) - (filled - began)
        tally.figure(f"decode, {width} wide", 2 * NEW * width / seconds, "tokens/s")
    if sizes.device != "cpu":
        tally.figure("greatest GPU memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        del grown
        torch.cuda.empty_cache()  # the engine's own process comes next


Sampled = tuple[list[int], list[float]]


def _same_function(small: Sequence[Sampled], grown: Sequence[Sampled], tally: Tally) -> None:
    other = [n for n, (a, b) in enumerate(zip(small, grown, strict=True)) if a[0] != b[0]]
    tally.check(
        "the grown model samples the tiny one's tokens", not other, f"others in prompts {other}" if other else ""
    )
    pairs = [(a, b) for x, y in zip(small, grown, strict=True) for a, b in zip(x[1], y[1], strict=True)]
    furthest = max(abs(a - b) for a, b in pairs)
    tally.check(f"its logprobs are within {NEAR:g}", furthest < NEAR, f"furthest {furthest:.1e}")


def _run(model: object, prompts: Sequence[list[int]], *, new: int = NEW) -> list[Sampled]:
    """Greedy tokens and logprobs of each prompt, all of them running at once."""
    from rollout.engine.model import Qwen3
    from rollout.engine.params import GenerateRequest, SamplingParams
    from rollout.engine.scheduler import Scheduler

    assert isinstance(model, Qwen3)
    scheduler = Scheduler(model, stop_ids=frozenset(), decode=str)
    params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    jobs = [
        scheduler.add(GenerateRequest(rid=str(n), input_ids=tuple(ids), params=params, return_logprob=True))
        for n, ids in enumerate(prompts)
    ]
    while not all(job.done for job in jobs):
        scheduler.step()
    failed = [job.error for job in jobs if job.error]
    if failed:
        raise RuntimeError(failed[0])
    return [(job.output_ids, job.log_probs) for job in jobs]
