"""Tasks that plan a batch: check everything, then write plan.json."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from zoneinfo import ZoneInfo

from prefect import get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.runtime import deployment
from prefect.settings import PREFECT_API_URL

from rollout.batch.prepare import Batch, RunOrigin, prepare
from rollout.batch.prompts import PromptRow, paced
from rollout.config import BatchConfig, refuse_relative
from rollout.errors import BadConfig
from rollout.lake.staging import create_plan
from rollout.ray_options import require_ray

ALLOWED_COMMANDS = "ROLLOUT_ALLOWED_COMMANDS"
"""Environment variable of a worker: programs that a form's `agent_command` may start, with any arguments; by commas."""

PATHS = ("lake", "prompts", "model")
"""Options that may be local paths of the worker."""

given_names: ContextVar[frozenset[str] | None] = ContextVar("given_names", default=None)
"""Names of the options that the user gave, where whoever starts the flow knows them (the command does)."""

checked_rows: ContextVar[Sequence[PromptRow]] = ContextVar("checked_rows", default=())
"""The prompt rows, where whoever starts the flow has checked them already: they are read anew only if they changed."""


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
async def plan_batch(options: dict[str, Any]) -> Batch:
    """Check options, prompts, parts, checkpoint and lake; nothing is written.

    A flow run always has a value for every option, so where nobody knows better one that equals its
    default counts as not given.
    """
    refuse_relative_in_worker(**{name: options.get(name) for name in PATHS})
    names, known = _from_starter()
    defaults = {name: field.default for name, field in BatchConfig.model_fields.items()}
    given = {k: v for k, v in options.items() if (v != defaults[k] if names is None else k in names)}
    checked = paced(lambda rows: get_run_logger().info("checking prompts: %d rows", rows))
    batch = await prepare(
        given,
        await flow_run_origin(),
        checked=checked,
        known=known,
        say=lambda text: get_run_logger().info(text),
    )
    if names is None:
        check_allowed_command(batch.config.agent_command)
        check_allowed_cluster(batch.config.ray_address)
    if batch.config.task_runner == "ray":
        require_ray(PREFECT_API_URL.value(), batch.config.modules)
    return batch


def _from_starter() -> tuple[frozenset[str] | None, Sequence[PromptRow]]:
    """Apart from the task: Ray takes the flow along with its tasks' bodies, and no ContextVar can go with those."""
    return given_names.get(), checked_rows.get()


def refuse_relative_in_worker(**paths: str | None) -> None:
    """Refuse relative paths in the run of a deployment; whoever runs a flow themselves knows where they are.

    Raises:
        BadConfig: one is relative.
    """
    if deployment.id is not None:
        refuse_relative(**paths)


def check_allowed_command(command: str | None) -> None:
    """Refuse a form's command line whose program the worker's environment does not allow.

    Whoever may fill in a deployment's form need not be allowed to run programs on its worker; who starts
    the command runs them as themselves.

    Raises:
        BadConfig: the program is not among those of ROLLOUT_ALLOWED_COMMANDS (as it is written there).
    """
    if command is None:
        return
    program = (shlex.split(command) or [""])[0]
    allowed = [name.strip() for name in os.environ.get(ALLOWED_COMMANDS, "").split(",") if name.strip()]
    if program not in allowed:
        raise BadConfig(
            f"agent_command: the worker's {ALLOWED_COMMANDS} does not allow {program!r} "
            f"(allowed: {', '.join(allowed) or 'none'})"
        )


def check_allowed_cluster(address: str | None) -> None:
    """Refuse a form's Ray cluster that is not the worker's own: what a cluster sends is run here.

    Raises:
        BadConfig: the address is not the one in RAY_ADDRESS.
    """
    if address not in (None, os.environ.get("RAY_ADDRESS")):
        raise BadConfig(f"ray_address: {address} is not the worker's RAY_ADDRESS; set it there and leave this empty")


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
        scheduled = await client.read_deployment(run.deployment_id)
    zones = [zone for entry in scheduled.schedules if (zone := getattr(entry.schedule, "timezone", None))]
    slot = run.expected_start_time.astimezone(ZoneInfo(zones[0] if zones else "UTC"))
    return RunOrigin(created_at=created, flow_run_id=run.id.hex, deployment=scheduled.name, slot=slot)
