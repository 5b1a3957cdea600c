"""Tasks that plan a batch: check everything, then write plan.json."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any
from zoneinfo import ZoneInfo

from prefect import get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from rollout.batch.prepare import Batch, RunOrigin, prepare
from rollout.config import BatchConfig
from rollout.lake.staging import create_plan

given_names: ContextVar[frozenset[str] | None] = ContextVar("given_names", default=None)
"""Names of the options that the user gave, where whoever starts the flow knows them (the command does)."""


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
async def plan_batch(options: dict[str, Any]) -> Batch:
    """Check options, prompts, parts, checkpoint and lake; nothing is written.

    A flow run always has a value for every option, so where nobody knows better one that equals its
    default counts as not given.
    """
    names = given_names.get()
    defaults = {name: field.default for name, field in BatchConfig.model_fields.items()}
    given = {k: v for k, v in options.items() if (v != defaults[k] if names is None else k in names)}
    return await prepare(given, await flow_run_origin())


@task(name="write plan", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=1)
async def write_plan(batch: Batch) -> None:
    """Create plan.json; where another run was quicker, its plan is taken."""
    batch.plan = await asyncio.to_thread(create_plan, batch.paths, batch.plan)


async def flow_run_origin() -> RunOrigin:
    """Who started this flow run: its deployment and slot if a schedule did, else its creation time and id."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return RunOrigin.now()
    run = context.flow_run
    created = run.created or RunOrigin.now().created_at
    if run.deployment_id is None or not run.auto_scheduled or run.expected_start_time is None:
        return RunOrigin(created_at=created, flow_run_id=run.id.hex)
    async with get_client() as client:
        deployment = await client.read_deployment(run.deployment_id)
    zones = [zone for entry in deployment.schedules if (zone := getattr(entry.schedule, "timezone", None))]
    slot = run.expected_start_time.astimezone(ZoneInfo(zones[0] if zones else "UTC"))
    return RunOrigin(created_at=created, flow_run_id=run.id.hex, deployment=deployment.name, slot=slot)
