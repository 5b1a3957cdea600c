"""The Delta tables: created empty, opened, and appended to exactly once.

delta-rs records an application transaction but does not enforce it, so `commit_once` does: look it up in the
newest snapshot, commit with no automatic retry (which refuses every stale snapshot), and after a conflict or
an unclear answer start over from the look-up.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from rollout.errors import BadLake, PublishFailed
from rollout.lake.paths import LakePaths
from rollout.lake.schema import (
    DELTA_SCHEMAS,
    TABLE_NAMES,
    TableName,
    columns_to_add,
    describe_delta_difference,
    skipping_columns,
)

COMMIT_DEADLINE_S = 300.0
"""How long one commit goes on against others that win each version."""

FAULT_TRIES = 6
"""Answers other than a conflict (network, storage) before a commit is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit under an application transaction; `already`: somebody had made it before this call."""

    version: int
    already: bool


class LocalTable(DeltaTable):
    """A table on a local disk; delta-rs gives URL-encoded file paths, Polars wants them as they are."""

    def file_uris(self, *args: Any, **kwargs: Any) -> list[str]:
        return [unquote(uri) for uri in super().file_uris(*args, **kwargs)]


def open_table(paths: LakePaths, name: TableName) -> DeltaTable | None:
    """The newest snapshot of a table, None if there is no such table yet."""
    kind = LocalTable if paths.is_local else DeltaTable
    try:
        return kind(paths.table_uri(name), storage_options=paths.storage_options or None)
    except TableNotFoundError:
        return None


def create_tables(paths: LakePaths) -> None:
    """Create whatever table is missing, empty; harmless when several processes do it at once.

    A table of an earlier version of this package gets the columns that were added since: null in its rows.

    Raises:
        BadLake: a table that is there lacks a column of the frozen schema, or has it with another type.
        PublishFailed: the storage does not answer.
    """
    for name in TABLE_NAMES:
        table = open_table(paths, name) or _create(paths, name)
        table = _grow(paths, name, table)
        problem = describe_delta_difference(table.schema(), name)
        if problem:
            raise BadLake(f"lake {paths.uri}: tables/{name} is of another schema: {problem}")


def _grow(paths: LakePaths, name: TableName, table: DeltaTable) -> DeltaTable:
    for attempt in range(FAULT_TRIES):
        added = columns_to_add(table.schema(), name)
        if not added:
            break
        try:
            table.alter.add_columns(added)
        except (DeltaError, OSError):  # somebody else committed, perhaps these columns
            _pause(attempt)
        newest = open_table(paths, name)
        if newest is None:
            raise PublishFailed(f"tables/{name} of {paths.uri} is gone")
        table = newest
    return table


def _create(paths: LakePaths, name: TableName) -> DeltaTable:
    problem: Exception | None = None
    for attempt in range(FAULT_TRIES):
        try:
            DeltaTable.create(
                paths.table_uri(name),
                DELTA_SCHEMAS[name],
                mode="ignore",
                storage_options=paths.storage_options or None,
                configuration={"delta.dataSkippingStatsColumns": ",".join(skipping_columns(name))},
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError as error:
            problem = error  # somebody else created it
        except (DeltaError, OSError) as error:
            problem = error
            _pause(attempt)
        table = open_table(paths, name)
        if table is not None:
            return table
    raise PublishFailed(f"tables/{name} of {paths.uri} could not be created: {problem}") from problem


def transaction(paths: LakePaths, name: TableName, app_id: str) -> int | None:
    """Delta version of the commit under `app_id`, None if there is none; survives compaction and checkpoints."""
    table = open_table(paths, name)
    return None if table is None else table.transaction_version(app_id)


def add_action(file_name: str, size: int, stats: str) -> AddAction:
    """The log's entry for a data file directly in its table's folder."""
    return AddAction(
        path=file_name,
        size=size,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=stats,
    )


def commit_once(
    paths: LakePaths,
    name: TableName,
    app_id: str,
    actions: Sequence[AddAction],
    metadata: dict[str, str],
    *,
    deadline_s: float = COMMIT_DEADLINE_S,
) -> Commit:
    """Append files to a table under an application transaction, once for ever.

    The call's own mark in the commit's metadata tells whose commit it was, whatever the answers said.

    Args:
        actions: files that stand in the table's folder and were checked (delta-rs checks nothing).
        metadata: custom metadata of the commit.

    Returns:
        The commit that stands under `app_id`, this call's or an earlier one.

    Raises:
        PublishFailed: no commit could be made; calling again is safe.
    """
    end, tries, faults = time.monotonic() + deadline_s, 0, 0
    problem: Exception | None = None
    mark = uuid.uuid4().hex
    while True:
        table = open_table(paths, name)
        if table is None:
            raise PublishFailed(f"tables/{name} of {paths.uri} is gone")
        version = table.transaction_version(app_id)
        if version is not None:
            return Commit(version=version, already=tries == 0 or not _has_mark(paths, name, version, mark))
        if faults >= FAULT_TRIES or time.monotonic() > end:
            raise PublishFailed(f"tables/{name}: no commit after {tries} tries: {problem}") from problem
        tries += 1
        try:
            write_transaction(table, name, app_id, actions, {**metadata, "writer": mark})
        except CommitFailedError as error:
            problem = error
        except (DeltaError, OSError) as error:
            problem, faults = error, faults + 1
        else:
            continue  # the look-up at the top is the proof
        _pause(tries)


def _has_mark(paths: LakePaths, name: TableName, version: int, mark: str) -> bool:
    try:
        return mark.encode() in paths.store.read(f"{paths.table_key(name)}/_delta_log/{version:020d}.json")
    except FileNotFoundError:  # cleaned up behind a checkpoint, so long ago
        return False


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0.0, min(1.0, 0.02 * 2 ** min(attempt, 6))))


def write_transaction(
    table: DeltaTable, name: TableName, app_id: str, actions: Sequence[AddAction], metadata: dict[str, str]
) -> None:
    """One try at a commit. Without automatic retries it lands at the snapshot's next version or not at all,
    so the transaction can carry that version."""
    table.create_write_transaction(
        list(actions),
        "append",
        DELTA_SCHEMAS[name],
        commit_properties=CommitProperties(
            app_transactions=[Transaction(app_id, table.version() + 1)],
            custom_metadata=metadata,
            max_commit_retries=0,
        ),
    )
