"""Tasks of the parity lane: its prompts, its batches' names, and the proof over both."""

from __future__ import annotations

import asyncio

from prefect import get_run_logger, task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from rollout.batch.plan import make_batch_id
from rollout.batch.reference import VERSIONS, prove_inputs, write_reference_prompts
from rollout.errors import ParityFailed
from rollout.home import state_home
from tasks.plan import flow_run_origin


@task(name="reference prompts", cache_policy=NO_CACHE, persist_result=False)
async def reference_prompts() -> str:
    """The case's prompt rows as a file of this host's state folder."""
    return str(await asyncio.to_thread(write_reference_prompts, state_home()))


async def lane_batches() -> list[str]:
    """A batch id for each session version; a retried run keeps them, so it goes on where it stopped."""
    origin = await flow_run_origin()
    base = make_batch_id(origin.deployment, origin.slot, origin.created_at, origin.flow_run_id)
    return [f"{base}-{version}" for version in VERSIONS]


@task(name="prove the reference case", cache_policy=NO_CACHE, persist_result=False)
async def prove_lane(lake: str, batch_ids: list[str]) -> int:
    """How many inputs were compared, all of them equal; a row for each in an artifact.

    Raises:
        ParityFailed: names the inputs that differ, and in what.
    """
    proofs = await asyncio.to_thread(prove_inputs, lake, batch_ids)
    rows = [{"input": proof.index, "verdict": proof.differs or "equal"} for proof in proofs]
    await acreate_table_artifact(rows, key="rollout-parity-lane", description=" and ".join(batch_ids))
    get_run_logger().info("%d inputs compared", len(proofs))
    if bad := [f"input {proof.index}: {proof.differs}" for proof in proofs if proof.differs]:
        raise ParityFailed(f"{len(bad)} of {len(proofs)} inputs differ between {' and '.join(batch_ids)}: {bad[0]}")
    return len(proofs)
