"""Verdicts of checks that are made after a batch was published, and rows written straight into a table's folder."""

from __future__ import annotations

import uuid

import numpy as np
import pyarrow as pa
from deltalake.transaction import AddAction

from rollout.lake.datafile import footer_statistics, write_data_file
from rollout.lake.paths import LakePaths
from rollout.lake.rows import check_constant
from rollout.lake.schema import TableName, conform
from rollout.lake.tables import Commit, add_action, commit_once, create_tables, transaction


def record_check(paths: LakePaths, batch_id: str, check: str, run_id: str, rows: pa.Table) -> Commit:
    """Add the rows of a later check of a published batch to the parity table, once for each run of it.

    Args:
        rows: of PARITY_SCHEMA, all with this batch_id and check.
        run_id: names the run (a flow run's id); a second call with it adds nothing.

    Raises:
        ValueError: rows of another batch or check.
        PublishFailed: the commit could not be made; call again.
    """
    verdicts, app_id = conform(rows, "parity"), f"{batch_id}/{check}/{run_id}"
    check_constant(verdicts, "batch_id", batch_id)
    check_constant(verdicts, "check", check)
    version = transaction(paths, "parity", app_id)
    if version is not None:
        return Commit(version=version, already=True)
    create_tables(paths)
    return commit_once(
        paths, "parity", app_id, [write_rows(paths, batch_id, "parity", verdicts)], {"batch_id": batch_id}
    )


def write_rows(paths: LakePaths, batch_id: str, name: TableName, rows: pa.Table) -> AddAction:
    """Rows as a new data file in the table's folder, to be committed with the action that is given back."""
    folder = paths.table_key(name)
    file_name = f"{name}-{uuid.uuid4().hex}.parquet"
    scratch = paths.store.scratch(folder)
    try:
        size, _ = write_data_file(rows, np.arange(rows.num_rows), scratch, name)
        with scratch.open("rb") as data:
            stats = footer_statistics(data, name, rows.num_rows, file_name)
        paths.store.upload(scratch, f"{folder}/{file_name}")
    finally:
        scratch.unlink(missing_ok=True)
    return add_action(file_name, size, stats)
