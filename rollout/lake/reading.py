"""Reading a lake with Polars, always through the Delta log, never by glob."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import BadLake
from rollout.lake.paths import LakePaths, check_batch_id
from rollout.lake.schema import TableName
from rollout.lake.tables import open_table

if TYPE_CHECKING:
    import polars as pl


def scan_samples(lake: str | Path | LakePaths, batch: str | None = None) -> pl.LazyFrame:
    """The samples of all published batches, or of one: exactly that one, for ever.

    Group by (batch_id, rollout_key). A batch that is not published gives no rows.

    Raises:
        BadLake: there is no lake.
        BadConfig: `batch` is no batch id.
    """
    return _scan(lake, "samples", batch)


def scan_trajectories(lake: str | Path | LakePaths, batch: str | None = None) -> pl.LazyFrame:
    """The tapes, one row per exchange and one (seq -1) per session; errors as `scan_samples`."""
    return _scan(lake, "trajectories", batch)


def scan_parity(lake: str | Path | LakePaths, batch: str | None = None) -> pl.LazyFrame:
    """The verdicts, one row per rollout and check, quarantined batches included; errors as `scan_samples`."""
    return _scan(lake, "parity", batch)


def scan_batches(lake: str | Path | LakePaths, batch: str | None = None) -> pl.LazyFrame:
    """The newest row of every batch, oldest batch first; errors as `scan_samples`."""
    rows = _scan(lake, "batches", batch)
    return rows.sort("created_at").unique("batch_id", keep="last", maintain_order=True)


def newest_batch_row(paths: LakePaths, batch_id: str) -> dict[str, Any] | None:
    """The batch's newest row of the batches table, None if it has none."""
    check_batch_id(batch_id)
    if open_table(paths, "batches") is None:
        return None
    rows = scan_batches(paths, batch_id).collect().to_dicts()
    return rows[0] if rows else None


def _scan(lake: str | Path | LakePaths, name: TableName, batch: str | None) -> pl.LazyFrame:
    import polars as pl  # a third of this package's import time, and staging needs none of it

    paths = lake if isinstance(lake, LakePaths) else LakePaths(lake)
    table = open_table(paths, name)
    if table is None:
        raise BadLake(f"no lake at {paths.uri} yet: `rollout run --lake {paths.uri}` publishes a first batch")
    rows = pl.scan_delta(table, storage_options=paths.storage_options or None)
    return rows if batch is None else rows.filter(pl.col("batch_id") == check_batch_id(batch))
