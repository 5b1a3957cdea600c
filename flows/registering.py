"""What `rollout up` makes of a bare Prefect server: a process work pool, our deployments and our automations."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import yaml

from rollout.errors import BadConfig

if TYPE_CHECKING:
    from prefect.client.schemas.responses import DeploymentResponse

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
AUTOMATIONS = Path(__file__).with_name("automations.yaml")
POOL = "rollout"
"""The work pool that `prefect.yaml` names."""


async def register(environment: dict[str, str], *, own: bool) -> None:
    """Create pool, deployments and automations at PREFECT_API_URL, which this process's environment names, too.

    On a server of our own, deployments that are there are brought up to date, but a schedule that somebody turned
    on stays on. On a user's, what all hosts share is left as it is once it is there: another host's lake is in it.

    Raises:
        BadConfig: the server refuses; its last line says why.
    """
    there = await _ours()
    if own or not there:
        turned_on = {(one.id, schedule.slug) for one in there for schedule in one.schedules if schedule.active}
        await prefect(environment, "work-pool", "create", POOL, "--type", "process", "--overwrite")
        try:
            await prefect(environment, "deploy", "--prefect-file", str(DEPLOYMENTS), "--all")
        finally:
            await _turn_on(turned_on)
    await _create_automations()


async def _ours() -> list[DeploymentResponse]:
    from prefect import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    async with get_client() as client:
        return await client.read_deployments(
            deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=["rollout-lake"]))
        )


async def _turn_on(wanted: set[tuple[UUID, str | None]]) -> None:
    """Turn schedules, by deployment and slug, on again: deploying turns them off."""
    from prefect import get_client

    async with get_client() as client:
        for deployment_id in {deployment_id for deployment_id, _ in wanted}:
            for schedule in await client.read_deployment_schedules(deployment_id):
                if (deployment_id, schedule.slug) in wanted and not schedule.active:
                    await client.update_deployment_schedule(deployment_id, schedule.id, active=True)


async def _create_automations() -> None:
    """Those that the server has none of the name of: Prefect's own command would add another of each every time."""
    from prefect import get_client
    from prefect.events.schemas.automations import AutomationCore

    async with get_client() as client:
        there = {one.name for one in await client.read_automations()}
        for declared in yaml.safe_load(AUTOMATIONS.read_text())["automations"]:
            if declared["name"] not in there:
                await client.create_automation(AutomationCore.model_validate(declared))


async def prefect(environment: dict[str, str], *arguments: str) -> None:
    """Run Prefect's own command.

    Raises:
        BadConfig: it failed.
    """
    argv = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        text = " ".join(said.decode(errors="replace").split())
        raise BadConfig(f"prefect {' '.join(arguments[:2])} at {environment['PREFECT_API_URL']} failed: {text[-500:]}")
