"""`rollout trigger`: what the button in Prefect's pages does, and the run's progress on the terminal."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from flows.server import check_answers, use_quietly, user_api_url
from flows.up import running_up
from rollout.errors import BadConfig

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

POLL_S = 2.0


def run_trigger(name: str, given: list[str], *, watch: bool, as_json: bool) -> bool:
    """Start a run; with `watch` follow it. Whether it was followed to an end other than Completed.

    Raises:
        BadConfig: no server, no such deployment, or a parameter that the deployment refuses.
    """
    parameters = parse_parameters(given)
    api = user_api_url() or running_up()
    if api is None:
        raise BadConfig("no Prefect server: set PREFECT_API_URL, or start `rollout up` on this host")
    check_answers(api)
    use_quietly(api)
    run = asyncio.run(_trigger(name, parameters, watch=watch, quiet=as_json))
    url = f"{api.removesuffix('/api')}/runs/flow-run/{run.id}"
    state, message = _state(run), run.state.message if run.state else None
    if as_json:
        facts = {"flow_run_id": str(run.id), "name": run.name, "url": url, "state": state, "message": message}
        print(json.dumps(facts))
    else:
        print(f"{'run':<8} {run.name}\n{'page':<8} {url}")
        print(f"{message or ''}\n{state}".strip() if watch else state)
    return watch and not (run.state is not None and run.state.is_completed())


def _state(run: FlowRun) -> str:
    return (run.state.name or run.state.type.value).lower() if run.state else "none"


def parse_parameters(given: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` as parameters; a value that is no JSON is text.

    Raises:
        BadConfig: no `=`, a name given twice, or NaN or Infinity, which are no JSON.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadConfig(f"--param {text!r}: give NAME=VALUE")
        if name in found:
            raise BadConfig(f"--param {name} is given twice")
        found[name] = _read(name, value)
    return found


def _read(name: str, value: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise BadConfig(f"{name}: {constant} is no number that a run can be given")

    try:
        found = json.loads(value, parse_constant=refuse)
    except BadConfig:
        raise
    except ValueError:
        return value
    return refuse(value) if isinstance(found, float) and not math.isfinite(found) else found


async def _trigger(name: str, parameters: dict[str, Any], *, watch: bool, quiet: bool) -> FlowRun:
    from prefect import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    async with get_client() as client:
        deployment = await _find(client, name)
        _check_names(deployment, parameters)
        try:
            run = await client.create_flow_run_from_deployment(
                deployment.id, parameters={**deployment.parameters, **parameters}
            )
        except PrefectHTTPStatusError as error:
            raise BadConfig(f"{name}: {_reason(error.response.text)}") from error
        return await _follow(client, run, quiet=quiet) if watch else run


async def _find(client: PrefectClient, name: str) -> DeploymentResponse:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    flow, _, short = name.rpartition("/")
    wanted = DeploymentFilter(name=DeploymentFilterName(any_=[short]))
    found = await client.read_deployments(deployment_filter=wanted)
    if flow:
        flows = {one.id: (await client.read_flow(one.flow_id)).name for one in found}
        found = [one for one in found if flows[one.id] == flow]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadConfig(f"several flows have a deployment {short!r}: give FLOW/{short}")
    known = sorted(one.name for one in await client.read_deployments(limit=200))
    raise BadConfig(f"there is no deployment {name!r}; there are: {', '.join(known) or 'none'}")


def _check_names(deployment: DeploymentResponse, parameters: dict[str, Any]) -> None:
    known = list((deployment.parameter_openapi_schema or {}).get("properties", {}))
    for name in parameters:
        if known and name not in known:
            raise BadConfig(f"{deployment.name} has no parameter {name!r}; it has: {', '.join(known)}")


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


async def _follow(client: PrefectClient, run: FlowRun, *, quiet: bool) -> FlowRun:
    """The run as it ended; what changes is said on stderr."""
    last = ""
    while True:
        run = await client.read_flow_run(run.id)
        line = f"{_state(run)} {await _progress(client, run)}".strip()
        if line != last and not quiet:
            print(line, file=sys.stderr, flush=True)
        last = line
        if run.state is not None and run.state.is_final():
            return run
        await asyncio.sleep(POLL_S)


async def _progress(client: PrefectClient, run: FlowRun) -> str:
    """How far a run's progress artifact is, in per cent; nothing where it has none."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType

    own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]), type=ArtifactFilterType(any_=["progress"]))
    found = await client.read_artifacts(artifact_filter=own)
    newest = max(found, key=lambda one: str(one.created), default=None)  # a retried run has several
    return "" if newest is None else f"{float(str(newest.data)):.0f} %"
