"""A batch as it can be looked at, wherever its rows are: published, staged or in quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from rollout.errors import BadInput
from rollout.lake.paths import Area, LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.publishing import batch_status
from rollout.lake.reading import newest_batch_row, scan_batches, scan_parity, scan_samples
from rollout.lake.staging import planned_batches, read_plan, read_staged, staged_shards
from rollout.lake.tables import open_table

STAGED = "staged"
LIST_COLUMNS = (
    "batch_id",
    "status",
    "n_prompts",
    "n_rollouts",
    "reward_mean",
    "created_at",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchView:
    """One batch: `status` as in the batches table, or `staged` while nothing is decided; `row` is its newest there."""

    paths: LakePaths
    plan: Plan | None
    batch_id: str
    status: str
    row: dict[str, Any] | None
    shards_staged: int

    @property
    def area(self) -> Area | None:
        """Where the rows are outside the tables; null where they are in the samples table."""
        if self.status in ("published", "released"):
            return None
        return "staging" if self.status == STAGED else "quarantine"

    def samples(self, columns: list[str]) -> pl.DataFrame:
        """The batch's samples, by (group_index, rollout_key, sibling)."""
        order = ["group_index", "rollout_key", "sibling"]
        if self.area is None:
            frame = scan_samples(self.paths, self.batch_id).select({*columns, *order}).collect()
        else:
            parts = [samples.select(sorted({*columns, *order})) for samples in self._staged(self.area)]
            frame = pl.concat([pl.DataFrame(part) for part in parts]) if parts else pl.DataFrame()
        return frame.sort(order).select(columns) if frame.width else frame

    def _staged(self, area: Area) -> Iterator[Any]:
        for manifest in staged_shards(self.paths, self.batch_id, area).values():
            yield read_staged(self.paths, manifest)[0]

    def parity(self) -> pl.DataFrame | None:
        """The batch's rows of the parity table, null where it has none yet."""
        if self.status == STAGED:
            return None
        return scan_parity(self.paths, self.batch_id).sort("index", "check").collect()


def view_batch(lake: str, batch_id: str) -> BatchView:
    """The batch `batch_id` of a lake.

    Raises:
        BadInput: there is no such batch.
    """
    paths = LakePaths(lake)
    paths.check_nothing_in_the_way()
    plan = read_plan(paths, batch_id)
    status = batch_status(paths, batch_id)
    if plan is None and status is None:
        known = ", ".join(sorted(row["batch_id"] for row in list_batches(lake))[-5:]) or "none"
        raise BadInput(f"no batch {batch_id!r} in {paths.uri} (batches there: {known})")
    area: Area = "quarantine" if status in ("quarantined", "discarded") else "staging"
    return BatchView(
        paths=paths,
        plan=plan,
        batch_id=batch_id,
        status=status or STAGED,
        row=newest_batch_row(paths, batch_id) if status is not None else None,
        shards_staged=len(staged_shards(paths, batch_id, area)),
    )


def list_batches(lake: str) -> list[dict[str, Any]]:
    """All batches of a lake, planned ones too, oldest first.

    Raises:
        BadLake: a path that no lake can have.
    """
    paths = LakePaths(lake)
    paths.check_nothing_in_the_way()
    rows: list[dict[str, Any]] = []
    if open_table(paths, "batches") is not None:
        rows = scan_batches(paths).select(LIST_COLUMNS).collect().to_dicts()
    decided = {row["batch_id"] for row in rows}
    for batch_id in planned_batches(paths):
        plan = read_plan(paths, batch_id) if batch_id not in decided else None
        if plan is not None:
            facts = [batch_id, STAGED, plan.n_prompts, plan.n_rollouts, None, plan.created_at]
            rows.append(dict(zip(LIST_COLUMNS, facts, strict=True)))
    return sorted(rows, key=lambda row: (row["created_at"], row["batch_id"]))


def find_sample(view: BatchView, name: str) -> dict[str, Any]:
    """The sample whose `sample_id` is or begins with `name`, all its columns.

    Raises:
        BadInput: none or several do.
    """
    ids = view.samples(["sample_id"])
    found = ids.filter(pl.col("sample_id").str.starts_with(name)) if ids.width else ids
    if found.height != 1:
        several = ", ".join(found["sample_id"].head(3).to_list()) if found.height else ""
        problem = f"{found.height} samples begin with {name!r}: {several}" if several else f"no sample {name!r}"
        raise BadInput(f"{problem} in batch {view.batch_id}; `rollout show {view.batch_id} --group N` lists them")
    sample_id = found["sample_id"][0]
    columns = ["sample_id", *_SAMPLE_COLUMNS]
    return view.samples(columns).filter(pl.col("sample_id") == sample_id).to_dicts()[0]


_SAMPLE_COLUMNS = (
    *("index", "group_index", "rollout_id", "rollout_key", "sibling", "siblings", "attempt"),
    *("tokens", "response", "response_length", "loss_mask", "rollout_log_probs"),
    *("status", "reward", "label", "failure", "agent", "session_version", "turns", "metadata"),
)
