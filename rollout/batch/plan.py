"""Planning: from prompt rows and options to a Plan, with every index, key and shard decided once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from itertools import pairwise

import numpy as np

from rollout import __version__
from rollout.batch.content import Content
from rollout.batch.promptrows import OwnIds, PromptRow, PromptRows
from rollout.config import IDENTITY_OPTIONS, MAX_SHARDS, BatchConfig
from rollout.errors import BadPrompts, Failure
from rollout.lake.paths import check_batch_id
from rollout.lake.planfile import Plan, ShardPlan
from rollout.outcome import RolloutInput

__all__ = [
    "Plan",
    "ShardPlan",
    "config_hash",
    "derived_batch_id",
    "make_batch_id",
    "make_plan",
    "shard_inputs",
    "shard_refusals",
]

_NAME_LIMIT = 60
"""Characters of a deployment or of a batch id that a longer batch id keeps."""


def make_plan(
    config: BatchConfig,
    *,
    rows: PromptRows,
    model_digest: str,
    created_at: datetime,
    flow_run_id: str,
    deployment: str | None = None,
    slot: datetime | None = None,
    derived_from: str | None = None,
) -> Plan:
    """Plan a batch.

    Args:
        model_digest: digest of the model's weights, as text.
        created_at: creation time of the flow run, with timezone; a retry of the run keeps it.
        flow_run_id: a UUID, with or without hyphens.
        deployment, slot: of a scheduled run; the slot in the schedule's own timezone.

    Raises:
        BadPrompts: two rows with one rollout_key, a row's own rollout_id with several samples per prompt, or
            a file that changed while it was read.
        BadConfig: no valid batch id.
        ValueError: a naive time.
    """
    if created_at.tzinfo is None or (slot is not None and slot.tzinfo is None):
        raise ValueError("a plan needs times with a timezone")
    check_keys(rows, config)
    batch_id = config.batch_id or make_batch_id(deployment, slot, created_at, flow_run_id)
    per_prompt = config.n_samples_per_prompt
    return Plan(
        batch_id=check_batch_id(batch_id),
        config=config.model_dump(mode="json"),
        config_hash=config_hash(config, rows.content, model_digest),
        prompts_digest=rows.content.digest,
        model_digest=model_digest,
        package_version=__version__,
        created_at=created_at.astimezone(UTC),
        run_date=_run_date(slot, created_at),
        slot=slot.isoformat() if slot is not None else None,
        derived_from=derived_from,
        n_prompts=len(rows),
        n_refused=rows.n_refused,
        n_rollouts=len(rows) * per_prompt,
        agents=rows.agents(config.agent),
        shards=_cut_shards(len(rows), per_prompt, config.shard_size, config.canary),
    )


def config_hash(config: BatchConfig, prompts_bytes: bytes | Content, model_digest: str) -> str:
    """64 hex digits over everything that decides a batch's rows: IDENTITY_OPTIONS, the prompt bytes, the
    model's digest and the package version. It is their `blake2b_256`, with a large file read in pieces.

    Raises:
        BadPrompts: a file changed since it was first read.
    """
    options = {name: getattr(config, name) for name in IDENTITY_OPTIONS}
    text = json.dumps(options, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(digest_size=32)
    for part in (text.encode(), prompts_bytes, model_digest.encode(), __version__.encode()):
        content = Content.of(part) if isinstance(part, bytes) else part
        digest.update(content.size.to_bytes(8, "little"))
        for chunk in content.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def _run_date(slot: datetime | None, created_at: datetime) -> date:
    """The slot's local day, else the day of creation in UTC."""
    return slot.date() if slot is not None else created_at.astimezone(UTC).date()


def make_batch_id(deployment: str | None, slot: datetime | None, created_at: datetime, flow_run_id: str) -> str:
    """A batch's id where none was given.

    A scheduled run: deployment and slot with its offset, so that an hour that comes twice gives two ids:
    `nightly-20261025t0230p0200`. Any other: creation time in UTC and the last 8 hex digits of the flow run's
    id (the first ones of a UUID of version 7 are a clock). A retry keeps both. Both times have a timezone.
    """
    if deployment is not None and slot is not None:
        sign = slot.strftime("%z")
        return f"{_slug(deployment)}-{slot:%Y%m%dt%H%M}{'m' if sign[0] == '-' else 'p'}{sign[1:5]}"
    return f"{created_at.astimezone(UTC):%Y%m%dt%H%M%S}-{flow_run_id.replace('-', '').lower()[-8:]}"


def _slug(name: str) -> str:
    """`name` within the pattern of batch ids; a long one keeps its start and gets a digest."""
    slug = re.sub(r"[^a-z0-9._-]", "-", name.lower()).lstrip("._-") or "batch"
    if len(slug) <= _NAME_LIMIT:
        return slug
    return f"{slug[: _NAME_LIMIT - 9]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def derived_batch_id(batch_id: str, kind: str, digest: str) -> str:
    """Id of a batch made from another: `kind` is repick or rescore, `digest` hex of what was done to it."""
    return check_batch_id(f"{batch_id[:_NAME_LIMIT]}.{kind}-{digest[:8]}")


def _cut_shards(n_groups: int, per_group: int, shard_size: int, canary: int = 0) -> tuple[ShardPlan, ...]:
    """Shards of whole groups, about `shard_size` rollouts each; larger where there would be too many.

    The first `canary` groups share no shard with others.
    """
    apart = 0 < canary < n_groups
    groups = max(1, shard_size // per_group, -(-n_groups // max(1, MAX_SHARDS - apart)))
    firsts = [*range(0, canary, groups), *range(canary, n_groups, groups)] if apart else range(0, n_groups, groups)
    return tuple(
        ShardPlan(
            shard=shard,
            first_group=first,
            n_groups=end - first,
            first_index=first * per_group,
            n_rollouts=(end - first) * per_group,
        )
        for shard, (first, end) in enumerate(pairwise([*firsts, n_groups]))
    )


def check_keys(rows: PromptRows, config: BatchConfig) -> None:
    """The batch's rollout_keys must be unique, whatever becomes of a rollout.

    A rollout without an own id has its index as key: as singleton because its rollout_id is null or
    (rollout_ids="index") the index, with several leaves because they take the index as id.
    """
    own = rows.own_ids
    if not own.ids_N.size:
        return
    if config.n_samples_per_prompt != 1:
        raise BadPrompts(
            f"{rows.name}, {rows.unit} {rows.line(int(own.positions_N[0]))}: its own rollout_id {own.ids_N[0]} needs "
            f"n_samples_per_prompt 1, not {config.n_samples_per_prompt}"
        )
    _check_own_ids(rows, own)
    _check_indexes(rows, own)


def _check_own_ids(rows: PromptRows, own: OwnIds) -> None:
    order = np.argsort(own.ids_N, kind="stable")
    again = order[1:][own.ids_N[order[1:]] == own.ids_N[order[:-1]]]
    if again.size:
        second = again.min()
        first = np.flatnonzero(own.ids_N == own.ids_N[second])[0]
        lines = [rows.line(int(own.positions_N[k])) for k in (first, second)]
        raise BadPrompts(
            f"{rows.name}, {rows.unit}s {lines[0]} and {lines[1]}: both have rollout_id {own.ids_N[second]}"
        )


def _check_indexes(rows: PromptRows, own: OwnIds) -> None:
    has_none = np.ones(len(rows), np.bool_)
    has_none[own.positions_N] = False
    taken = np.flatnonzero((own.ids_N < len(rows)) & has_none[np.minimum(own.ids_N, len(rows) - 1)])
    if taken.size:
        other = taken[own.ids_N[taken].argmin()]
        index, line = int(own.ids_N[other]), rows.line(int(own.positions_N[other]))
        raise BadPrompts(
            f"{rows.name}, {rows.unit}s {line} and {rows.line(index)}: rollout_id {index} of {rows.unit} {line} is "
            f"the index, and so the rollout_key, of {rows.unit} {rows.line(index)}, which has none of its own"
        )


def shard_inputs(plan: Plan, rows: Sequence[PromptRow], shard: int) -> list[RolloutInput]:
    """The rollouts of a shard that can run, in the order of their index. What `shard_refusals` gives is not
    among them and needs rows too."""
    return [given for given, row in _shard_rollouts(plan, rows, shard) if row.refused is None]


def shard_refusals(plan: Plan, rows: Sequence[PromptRow], shard: int) -> list[tuple[RolloutInput, Failure]]:
    """The shard's rollouts of refused prompt rows (skip_bad_prompts), each with the failure of its row."""
    if not plan.n_refused:
        return []
    found = _shard_rollouts(plan, rows, shard)
    return [(given, Failure(type="bad_prompt", message=row.refused)) for given, row in found if row.refused is not None]


def _shard_rollouts(plan: Plan, rows: Sequence[PromptRow], shard: int) -> Iterator[tuple[RolloutInput, PromptRow]]:
    if len(rows) != plan.n_prompts:
        raise ValueError(f"{len(rows)} prompt rows for a plan of {plan.n_prompts}")
    per_prompt = int(plan.config["n_samples_per_prompt"])
    by_index = plan.config["rollout_ids"] == "index"
    for index in plan.shards[shard].indexes:
        row = rows[index // per_prompt]  # made anew: members of a group share nothing that an agent could change
        given = RolloutInput(
            index=index,
            group_index=index // per_prompt,
            rollout_id=index if by_index and row.rollout_id is None else row.rollout_id,
            messages=row.messages,
            tools=row.tools,
            label=row.label,
            metadata=row.metadata,
            agent=row.agent or plan.config["agent"],
        )
        yield given, row
