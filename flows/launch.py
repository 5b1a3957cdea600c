"""`rollout run`: refuse bad input first, then start what a flow needs, run it, and show how it went."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from flows.server import user_api_url
from rollout.batch.canary import canary_shards
from rollout.batch.prepare import Batch, RunOrigin, prepare
from rollout.batch.prompts import paced
from rollout.batch.spool import SPOOLS, remove_batch_spools
from rollout.home import state_home
from rollout.ray_options import require_ray


def run_batch(given: dict[str, Any], *, dry_run: bool, as_json: bool) -> None:
    """Run, or with `dry_run` only show, the batch of the options that were given.

    Raises:
        BadInput: before any server is started.
        RolloutLakeError: the batch failed, is quarantined, or stopped.
    """
    checked = None if as_json else paced(lambda rows: _say(f"checking prompts: {rows} rows"))
    say = None if as_json else _say
    batch = asyncio.run(prepare(given, RunOrigin.now(), write=not dry_run, checked=checked, say=say))
    if dry_run:
        _show_plan(batch, named="batch_id" in given, as_json=as_json)
    elif batch.visible is not None:
        remove_batch_spools(state_home() / SPOOLS, batch.plan)  # a kill may have come between publishing and this
        _say_published(batch, as_json=as_json)
    else:
        if batch.config.task_runner == "ray":
            require_ray(user_api_url(), batch.config.modules)
        asyncio.run(_run(batch, given, as_json=as_json))


async def _run(batch: Batch, given: dict[str, Any], *, as_json: bool) -> None:
    from flows.live import showing
    from flows.server import prefect_api
    from flows.stopping import stop_by_sigterm
    from rollout.batch.progress import BatchProgress, watch

    stop_by_sigterm()  # else it would end this process before its children are ended and it has said how to go on
    progress = BatchProgress(phase="starting Prefect")
    watch(progress)
    try:
        async with showing(progress, quiet=as_json), prefect_api():
            from flows.batch import rollout_batch
            from tasks.plan import checked_rows, given_names

            progress.phase = "planning"
            given_names.set(frozenset(given))
            checked_rows.set(batch.rows)
            result = await rollout_batch(**batch.config.model_dump())
    except (asyncio.CancelledError, KeyboardInterrupt):
        if progress.batch_id:
            _say(f"stopped; `rollout run --batch-id {progress.batch_id}` goes on")
        raise
    finally:
        if progress.summary is not None and not as_json:
            _show_summary(progress)
    if as_json:
        summary = progress.summary.to_json() if progress.summary is not None else None
        print(json.dumps({**result, "summary": summary}))
    else:
        _show_ending(result)


def _show_summary(progress: Any) -> None:
    from rollout.batch.report import summary_rows

    print()
    for name, value in summary_rows(progress.summary):
        print(f"{name:<16} {value}")


def _show_ending(result: dict[str, Any]) -> None:
    batch_id = result["batch_id"]
    lake = "" if result["lake"] == _default_lake() else f" --lake {result['lake']}"
    print(f"{'published':<16} {batch_id}, version {result['version']} of {result['lake']}/tables/samples")
    rollout, python = (_as_typed(Path(sys.executable).with_name(name)) for name in ("rollout", "python"))
    print("\nNext:")
    print(f"  {rollout} show {batch_id}{lake}")
    print(f"  {rollout} parity {batch_id}{lake}")
    code = (
        f'from rollout.lake import scan_samples; print(scan_samples("{result["lake"]}", batch="{batch_id}").collect())'
    )
    print(f"  {python} -c '{code}'")


def _as_typed(program: Path) -> str:
    """How to type a program of this environment: its name where PATH finds it, else its path from here."""
    if shutil.which(program.name) == str(program):
        return program.name
    here = Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)


def _default_lake() -> str:
    from rollout.lake.paths import LakePaths

    return LakePaths("./lake").uri


def _show_plan(batch: Batch, *, named: bool, as_json: bool) -> None:
    plan = batch.plan
    facts = {
        "batch_id": plan.batch_id if named else None,
        "planned": batch.planned,
        "published": batch.visible is not None,
        "lake": batch.paths.uri,
        "prompts": plan.n_prompts,
        "refused_prompts": plan.n_refused,
        "rollouts": plan.n_rollouts,
        "shards": len(plan.shards),
        "canary_rollouts": sum(cut.n_rollouts for cut in canary_shards(plan, batch.config.canary)),
        "agents": list(plan.agents),
        "config_hash": plan.config_hash,
        "model_digest": plan.model_digest,
    }
    if as_json:
        print(json.dumps({**facts, "config": plan.config}))
        return
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:<16} {'chosen when it runs' if text is None else text}")


def _say_published(batch: Batch, *, as_json: bool) -> None:
    batch_id, version = batch.plan.batch_id, batch.visible
    if as_json:
        facts = {"batch_id": batch_id, "lake": batch.paths.uri, "status": "published", "version": version}
        print(json.dumps({**facts, "already": True, "rollouts": batch.plan.n_rollouts, "summary": None}))
    else:
        known = "released" if version == -1 else f"version {version} of the samples table"
        print(f"batch {batch_id} is published already ({known}); nothing to do")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
