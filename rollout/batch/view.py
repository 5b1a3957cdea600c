"""A batch as it can be looked at, wherever its rows are: published, staged, in quarantine, or only in spools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from rollout.batch.spool import peek_spool, spool_folder
from rollout.columns import SAMPLES_SCHEMA
from rollout.errors import BadInput
from rollout.flock import any_locked
from rollout.lake.manifest import Manifest
from rollout.lake.paths import Area, LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.publishing import batch_status
from rollout.lake.reading import newest_batch_row, scan_batches, scan_parity, scan_samples
from rollout.lake.schema import conform
from rollout.lake.staging import planned_batches, read_plan, read_staged, staged_shards
from rollout.lake.tables import open_table

PLANNED = "planned"
STAGED = "staged"
RUNNING = "running"
UNDECIDED = (PLANNED, STAGED, RUNNING)
"""A batch's status while the batches table has no row of it: nothing staged yet, something is, it runs here."""

LIST_COLUMNS = (
    "batch_id",
    "status",
    "n_prompts",
    "n_rollouts",
    "reward_mean",
    "created_at",
)
_ORDER = ["group_index", "rollout_key", "sibling"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchView:
    """One batch at one moment: `status` as in the batches table, or one of UNDECIDED; `row` is its newest there.

    `staged` has the manifests of what is outside the tables, `spooled` the samples (SAMPLES_SCHEMA) of
    finished rollouts of other shards, as far as this machine's spools have them. `running`: a process of
    this machine holds a spool of the batch; null where the system does not say.
    """

    paths: LakePaths
    plan: Plan | None
    batch_id: str
    status: str
    row: dict[str, Any] | None
    staged: dict[int, Manifest]
    spooled: dict[int, pa.Table]
    running: bool | None

    @property
    def undecided(self) -> bool:
        return self.status in UNDECIDED

    @property
    def rollouts_finished(self) -> int:
        """Rollouts whose rows can be seen."""
        if self.plan is None:
            return int(self.row["n_rollouts"]) if self.row else 0
        if not self.undecided:
            return self.plan.n_rollouts
        return self.rollouts_spooled + sum(self.plan.shards[shard].n_rollouts for shard in self.staged)

    @property
    def rollouts_spooled(self) -> int:
        """Rollouts that only this machine's spools have."""
        return sum(len(table.column("index").unique()) for table in self.spooled.values())

    def samples(self, columns: list[str]) -> pl.DataFrame:
        """The batch's samples, by (group_index, rollout_key, sibling)."""
        wanted = sorted({*columns, *_ORDER})
        if self.status in ("published", "released"):
            frame = scan_samples(self.paths, self.batch_id).select(wanted).collect()
        else:
            parts = [pl.DataFrame(table.select(wanted)) for table in self._tables()]
            frame = pl.concat(parts) if parts else pl.DataFrame()
        return frame.sort(_ORDER).select(columns) if frame.width else frame

    def _tables(self) -> Iterator[pa.Table]:
        for manifest in self.staged.values():
            yield read_staged(self.paths, manifest)[0]
        yield from self.spooled.values()

    def parity(self) -> pl.DataFrame | None:
        """The batch's rows of the parity table, null where it has none yet."""
        if self.undecided:
            return None
        return scan_parity(self.paths, self.batch_id).sort("index", "check").collect()


def view_batch(lake: str, batch_id: str, spools: Path) -> BatchView:
    """The batch `batch_id` of a lake.

    Args:
        spools: this machine's folder of spools; they are only read.

    Raises:
        BadInput: there is no such batch.
    """
    paths = LakePaths(lake)
    paths.check_nothing_in_the_way()
    plan = read_plan(paths, batch_id)
    decided = batch_status(paths, batch_id)
    if plan is None and decided is None:
        known = ", ".join(sorted(row["batch_id"] for row in list_batches(lake, spools))[-5:]) or "none"
        raise BadInput(f"no batch {batch_id!r} in {paths.uri} (batches there: {known})")
    area: Area = "quarantine" if decided in ("quarantined", "discarded") else "staging"
    open_plan = plan if decided is None else None
    # Spools first: a shard that is staged between the two looks then counts once, as staged.
    spooled = _spooled(spools, open_plan) if open_plan else {}
    staged = staged_shards(paths, batch_id, area)
    running = is_running(spools, open_plan) if open_plan else False
    return BatchView(
        paths=paths,
        plan=plan,
        batch_id=batch_id,
        status=decided or _undecided_status(running, len(staged)),
        row=newest_batch_row(paths, batch_id) if decided is not None else None,
        staged=staged,
        spooled={shard: table for shard, table in spooled.items() if shard not in staged},
        running=running,
    )


def _spooled(spools: Path, plan: Plan) -> dict[int, pa.Table]:
    found = {}
    for cut in plan.shards:
        if rollouts := peek_spool(spools, plan, cut.shard):
            # Made into one piece, so that no tape is kept in memory behind its samples.
            table = pa.Table.from_batches([rows.samples for rows in rollouts], SAMPLES_SCHEMA).combine_chunks()
            found[cut.shard] = conform(table, "samples")
    return found


def is_running(spools: Path, plan: Plan) -> bool | None:
    """Whether a process of this machine runs shards of this plan: it has their spools locked. Null: not known."""
    return any_locked(spool_folder(spools, plan).glob("*.spool"))


def _undecided_status(running: bool | None, n_staged: int) -> str:
    return RUNNING if running else STAGED if n_staged else PLANNED


def list_batches(lake: str, spools: Path) -> list[dict[str, Any]]:
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
            n_staged = len(paths.store.names(f"{paths.folder(batch_id)}/shards"))
            status = _undecided_status(is_running(spools, plan), n_staged)
            facts = [batch_id, status, plan.n_prompts, plan.n_rollouts, None, plan.created_at]
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
