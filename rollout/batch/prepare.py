"""From options to a batch that could start: everything that can be refused is refused here, and nothing is written.

Used by the flow and, before any server is started, by the command; so bad input costs a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollout.agents.contract import load_agents
from rollout.batch.model import fetched_directory, model_digest
from rollout.batch.plan import check_keys, make_plan
from rollout.batch.prompts import Checked, PromptRow, PromptRows, read_prompts
from rollout.batch.prompttables import keep_version
from rollout.config import BatchConfig, make_config
from rollout.engine.environment import host_gpus, sglang_python, share_gpus
from rollout.engine.recipes import find_recipe
from rollout.errors import BadConfig
from rollout.lake.paths import LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.publishing import batch_status, published_version, refuse_closed
from rollout.lake.staging import create_plan, read_plan
from rollout.rewards import load_reward
from rollout.session.finishing import find_finisher
from rollout.session.matching import find_matcher
from rollout.session.picking import find_picker

VISIBLE = ("published", "released")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOrigin:
    """What starts a batch: decides its id and date where the user gave none. A retry keeps all of it.

    `deployment` and `slot` are those of a scheduled run, the slot in its schedule's timezone.
    """

    created_at: datetime
    flow_run_id: str
    deployment: str | None = None
    slot: datetime | None = None

    @classmethod
    def now(cls) -> RunOrigin:
        return cls(created_at=datetime.now(UTC), flow_run_id=uuid4().hex)


class Batch:
    """A planned batch and what its run needs. No dataclass: Prefect would walk through all rows at each task.

    `planned` says whether plan.json exists already; `visible` is the version of the samples table in
    which the batch was published (-1: released) and null while it is not.
    """

    def __init__(
        self, paths: LakePaths, config: BatchConfig, plan: Plan, rows: Sequence[PromptRow], model: Path | None = None
    ) -> None:
        """`model` is the checkpoint's directory on this machine; a batch that is published needs none."""
        self.paths, self.config, self.plan, self.rows, self._model = paths, config, plan, rows, model
        self.planned = False
        self.visible: int | None = None

    @property
    def tokenizer(self) -> Path:
        """The checkpoint directory whose tokenizer the sessions use; an embedded engine loads the rest of it."""
        assert self._model is not None, "a published batch runs nothing"
        return self._model


async def prepare(
    given: dict[str, Any],
    origin: RunOrigin,
    *,
    write: bool = True,
    checked: Checked | None = None,
    known: Sequence[PromptRow] = (),
    say: Callable[[str], None] | None = None,
) -> Batch:
    """Check options, prompts, parts, checkpoint and lake, and make the plan; the plan is not written yet.

    Prompts are checked, and a model on s3:// is fetched, in a thread, so that minutes of it do not stop the
    event loop. The model comes last: nothing else that is wrong costs its gigabytes.

    Args:
        given: the options that the user gave; the others come from the batch's plan.json if it has
            one, else from BatchConfig's defaults.
        write: whether the batch is going to run; then the lake's folder is made to see that it can be.
        checked: told in that thread how many prompts are checked.
        known: the rows of another Batch, taken where they are still the prompts.
        say: told how far a fetch of the model is; from another thread.

    Raises:
        BadInput: one line that says what to change.
    """
    config, stored = _resolve(given)
    paths = LakePaths(config.lake)
    config = config.model_copy(update={"lake": paths.uri})  # whatever becomes of the working directory
    paths.check_nothing_in_the_way()
    if stored is not None:
        refuse_closed(paths, stored.batch_id)
        if batch_status(paths, stored.batch_id) in VISIBLE and not _changes(given):
            return _visible(Batch(paths, config, stored, []))
    rows = await _read_prompts(config, checked, known if isinstance(known, PromptRows) else None)
    # A lake table's version stands in the plan, so that the batch goes on with the rows it began with.
    config = config.model_copy(update={"prompts": rows.name})
    check_keys(rows, config)
    _check_parts(config, rows.agents(config.agent))
    if write:
        paths.check_writable()
    model = await fetched_directory(config, say)
    plan = await _plan(config, rows, model, origin)
    stored = stored or read_plan(paths, plan.batch_id)
    if stored is None:
        return Batch(paths, config, plan, rows, model)
    _check_policy(config, stored)
    # plan.json exists, so this only compares; its cut into shards then holds.
    batch = Batch(paths, config, create_plan(paths, plan), rows, model)
    batch.planned = True
    refuse_closed(paths, plan.batch_id)
    return _visible(batch)


def _resolve(given: dict[str, Any]) -> tuple[BatchConfig, Plan | None]:
    config = make_config(**given)
    if config.batch_id is None:
        return config, None
    paths = LakePaths(config.lake)
    paths.check_nothing_in_the_way()
    stored = read_plan(paths, config.batch_id)
    if stored is None:
        return config, None
    kept = {name: value for name, value in stored.config.items() if name not in ("lake", "batch_id")}
    config = make_config(**{**kept, **given})
    return config.model_copy(update={"prompts": keep_version(config.prompts, kept["prompts"])}), stored


async def _read_prompts(config: BatchConfig, checked: Checked | None, known: PromptRows | None) -> PromptRows:
    left = threading.Event()

    def count(rows: int) -> None:
        if left.is_set():
            raise asyncio.CancelledError
        if checked is not None:
            checked(rows)

    skip_bad, bounds = config.skip_bad_prompts, config.bounds
    read = partial(read_prompts, config.prompts, skip_bad=skip_bad, bounds=bounds, checked=count, known=known)
    try:
        return await asyncio.to_thread(read)
    finally:
        left.set()  # a thread that nobody waits for would keep the process from ending


async def _plan(config: BatchConfig, rows: PromptRows, model: Path, origin: RunOrigin) -> Plan:
    return await asyncio.to_thread(
        make_plan,
        config,
        rows=rows,
        model_digest=await model_digest(config, model),
        created_at=origin.created_at,
        flow_run_id=origin.flow_run_id,
        deployment=origin.deployment,
        slot=origin.slot,
    )


def _check_parts(config: BatchConfig, agents: Sequence[str]) -> None:
    """Load all that the batch names, so that a misspelt name costs no rollout.

    Raises:
        UnknownPart: one is not installed or cannot be loaded.
        BadInput: an agent needs another session version; BadConfig: an unknown chat format or engine recipe.
        NoSGLang: no environment to start it from.
    """
    load_agents(agents, config.session_version, config.agent_command)
    if config.reward is not None:
        load_reward(config.reward, config.reward_key)
    find_matcher(config.matcher)
    find_picker(config.picker)
    find_finisher(config.finisher)
    here = config.task_runner == "local" or config.parity_live_fraction > 0  # else on machines that look for themselves
    if config.engine == "sglang" and here:
        share_gpus(find_recipe(str(config.engine_recipe)), host_gpus())
        sglang_python()
    if config.renderer != BatchConfig.model_fields["renderer"].default:  # renderers takes a while to import
        from renderers.configs import config_from_name

        try:
            config_from_name(config.renderer)
        except ValueError as error:
            raise BadConfig(f"renderer {config.renderer!r}: {error}") from error


def _check_policy(config: BatchConfig, stored: Plan) -> None:
    """The plan's policy version stands for the whole batch: each row says it, whenever it was made."""
    planned = stored.config.get("policy_version")
    if config.policy_version != planned:
        raise BadConfig(
            f"batch id {stored.batch_id!r} was planned with policy_version {planned}, not {config.policy_version}; "
            "choose another batch id"
        )


def _changes(given: dict[str, Any]) -> bool:
    return bool(set(given) - {"lake", "batch_id"})


def _visible(batch: Batch) -> Batch:
    batch.planned = True
    if batch_status(batch.paths, batch.plan.batch_id) in VISIBLE:
        version = published_version(batch.paths, batch.plan.batch_id)
        batch.visible = -1 if version is None else version
    return batch
