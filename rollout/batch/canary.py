"""The canary: a batch's first groups, which must go well before the rest of it starts.

A rollout went well if it has no failure and a sample that is completed or truncated; a group, if one of its
rollouts did. Every group of the canary must, and no rollout of its shards may differ in parity. Groups of
refused prompt rows (skip_bad_prompts) are left out: they say nothing of agents and engine. Where all are
refused, nothing was tried and the canary failed.

Decided twice. A shard whose groups did not go well is not staged and its spool is dropped, so that going on
runs it anew. What is staged, by this run or an earlier one, is decided on again from the lake with its parity.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from rollout.errors import CanaryFailed, ParityFailed
from rollout.lake.planfile import Plan, ShardPlan
from rollout.sample import Status

_WELL = [str(Status.COMPLETED), str(Status.TRUNCATED)]
_MAX_NAMED = 5


def canary_shards(plan: Plan, canary: int) -> list[ShardPlan]:
    """The shards with the first `canary` groups; of a plan made for another canary they may hold more groups."""
    return [cut for cut in plan.shards if in_canary(cut, canary)]


def in_canary(cut: ShardPlan, canary: int) -> bool:
    """Whether the shard has one of the first `canary` groups."""
    return cut.first_group < canary


def require_unstaged(samples: pa.Table, canary: int) -> None:
    """Decide about a shard that is not staged yet.

    Args:
        samples: its rows of SAMPLES_SCHEMA.
        canary: number of groups.

    Raises:
        CanaryFailed: a group did not go well; says what failed how often, and the first message.
    """
    failure = pl.col("failure").struct
    frame = pl.DataFrame(samples.select(["group_index", "index", "sibling", "status", "failure"]))
    frame = frame.with_columns(failure=failure.field("type"), message=failure.field("message"))
    if (problem := find_problem(frame, canary)) is not None:
        raise CanaryFailed(problem)


def require_staged(facts: Sequence[pl.DataFrame], parity: Sequence[pa.Table], canary: int) -> None:
    """Decide about all of a canary, staged and checked.

    Args:
        facts: of its shards (rollout.batch.summary.sample_facts).
        parity: of its shards, rows of the parity table.

    Raises:
        CanaryFailed: a group did not go well, none could run, or a rollout differs.
    """
    frame = pl.concat(facts)
    if _that_ran(frame, canary).is_empty():
        raise CanaryFailed("canary: the prompt rows of all its groups are refused, so nothing was tried")
    if (problem := find_problem(frame, canary)) is not None:
        raise CanaryFailed(problem)
    from rollout.parity.validate import require_parity  # brings openai along; a dry run needs none of it

    try:
        require_parity(pa.concat_tables(parity), min_equal=0.0)
    except ParityFailed as error:
        raise CanaryFailed(f"canary: {error}") from error


def find_problem(samples: pl.DataFrame, canary: int) -> str | None:
    """Why the first `canary` groups did not go well, null if they did or none of them is there.

    Args:
        samples: a row per sample with group_index, index, sibling, status, `failure` (its type) and
            perhaps `message`.
    """
    ran = _that_ran(samples, canary)
    well = pl.col("failure").is_null() & pl.col("status").is_in(_WELL)
    groups = ran.group_by("group_index").agg(well=well.any()).filter(~pl.col("well"))["group_index"].sort().to_list()
    if not groups:
        return None
    failed = ran.filter(pl.col("group_index").is_in(groups)).sort("index", "sibling").unique("index", keep="first")
    failed = failed.sort("index").with_columns(kind=pl.coalesce("failure", "status"))
    counts = ", ".join(f"{kind} {n}" for kind, n in failed.group_by("kind").len().sort("kind").iter_rows())
    named = ", ".join(map(str, groups[:_MAX_NAMED])) + (", ..." if len(groups) > _MAX_NAMED else "")
    text = (
        f"canary: none of the {failed.height} rollouts of group{'s' * (len(groups) > 1)} {named} went well ({counts})"
    )
    messages = failed["message"].drop_nulls().to_list() if "message" in failed.columns else []
    return f"{text}, first: {messages[0]}" if messages else text


def _that_ran(samples: pl.DataFrame, canary: int) -> pl.DataFrame:
    refused = pl.col("failure").eq_missing(pl.lit("bad_prompt"))
    return samples.filter((pl.col("group_index") < canary) & ~refused)
