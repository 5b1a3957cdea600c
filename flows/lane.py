"""The flow that proves the reference case anew: on v1, on v2, and each input's bits against each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.batch import rollout_batch
from flows.stopping import stoppable
from rollout.batch.reference import OPTIONS, VERSIONS
from tasks.lane import lane_batches, prove_lane, reference_prompts
from tasks.plan import refuse_relative_in_worker


@flow(name="rollout-parity-lane", persist_result=False)
@stoppable
async def parity_lane(
    lake: str = "./lake",
    engine: Literal["embedded", "sglang", "external"] = "embedded",
    engine_recipe: str | None = None,
    engine_url: str | None = None,
    model: str | None = None,
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 1,
) -> dict[str, Any]:
    """Play the reference case on both session paths and prove that every input has the same bits on each.

    Args:
        lake: Lake: a local path or s3://bucket/prefix.
        engine: Where tokens come from: the embedded engine, SGLang on this host, or engine_url.
        engine_recipe: How SGLang is started here: tiny_cpu, qwen3_8b_h200 or qwen3_30b_a3b_h200x8.
        engine_url: URL of an external SGLang server or router.
        model: Checkpoint directory; null: the shipped one.
        concurrency: Rollouts in flight; 1 where the engine repeats itself only alone.
    """
    refuse_relative_in_worker(lake=lake, model=model)
    prompts, batch_ids = await reference_prompts(), await lane_batches()
    given = {"lake": lake, "engine": engine, "engine_recipe": engine_recipe, "engine_url": engine_url, "model": model}
    for version, batch_id in zip(VERSIONS, batch_ids, strict=True):
        await rollout_batch(
            **OPTIONS, **given, prompts=prompts, batch_id=batch_id, session_version=version, concurrency=concurrency
        )
    return {"lake": lake, "batches": batch_ids, "inputs": await prove_lane(lake, batch_ids)}
