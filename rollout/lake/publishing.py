"""Publishing a batch without copying it, exactly once; or putting it into quarantine.

Order: trajectories, parity, batches, samples. The samples commit IS the publication. Each commit has the
application transaction `<batch_id>` of its table; the one in `batches` decides between published and
quarantined, for whoever comes first.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake.transaction import AddAction

from rollout.errors import BatchClosed, PublishFailed, StagedChanged
from rollout.lake.checks import write_rows
from rollout.lake.datafile import FileBreach, footer_statistics
from rollout.lake.manifest import Manifest, StagedFile
from rollout.lake.paths import LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.reading import newest_batch_row
from rollout.lake.rows import check_constant, check_verdicts
from rollout.lake.schema import SCHEMA_VERSIONS, TableName, conform, rows_to_table
from rollout.lake.staging import REPAIR, require_all, staged_shards, verify, verify_file
from rollout.lake.tables import Commit, add_action, commit_once, create_tables, open_table, transaction

CLOSED = ("quarantined", "discarded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """`version` of the samples table in which the batch became visible; `already`: before this call."""

    batch_id: str
    version: int
    already: bool


def batch_status(paths: LakePaths, batch_id: str) -> str | None:
    """published, quarantined, discarded or released; None for a batch that is not known or not decided yet.

    The samples commit decides: a publication that stopped before it is no status (publish again), a release
    that did leaves the batch quarantined.
    """
    row = newest_batch_row(paths, batch_id)
    if row is None:
        return None
    status = str(row["status"])
    if status in ("published", "released") and published_version(paths, batch_id) is None:
        return None if status == "published" else "quarantined"
    return status


def published_version(paths: LakePaths, batch_id: str) -> int | None:
    """Version of the samples table that made the batch visible, by publishing or release; None if it is not."""
    table = open_table(paths, "samples")
    if table is None:
        return None
    versions = (table.transaction_version(app_id) for app_id in (batch_id, f"{batch_id}/release"))
    return next((version for version in versions if version is not None), None)


def publish_batch(
    paths: LakePaths,
    plan: Plan,
    manifests: dict[int, Manifest],
    parity: pa.Table,
    batch_row: dict[str, Any],
    *,
    metadata: dict[str, str] | None = None,
) -> Published:
    """Make a staged batch visible. Safe to repeat, and to call from several processes at once.

    Args:
        manifests: `staged_shards` of the batch.
        parity: rows of PARITY_SCHEMA.
        batch_row: columns of the batches table; batch_id, status, config_hash, run_date, slot, derived_from,
            created_at and schema_version are set here.
        metadata: further custom metadata of the samples commit.

    Raises:
        BatchIncomplete: a planned shard is not staged.
        BatchClosed: the batch is quarantined or discarded.
        StagedChanged: a file no longer has its manifest's digest, is not what its table needs, or holds rows
            of another batch or shard.
        ParityFailed: a verdict is `differs`.
        ValueError: the verdicts are not those of the batch's rollouts.
        BadLake: the tables are of another schema.
        PublishFailed: a commit could not be made; nothing is lost, call again.
    """
    version = published_version(paths, plan.batch_id)
    if version is not None:
        return Published(batch_id=plan.batch_id, version=version, already=True)
    refuse_closed(paths, plan.batch_id)
    shards = require_all(plan, manifests)
    verdicts, row = conform(parity, "parity"), _batch_table(plan, batch_row, "published")
    check_verdicts(verdicts, plan)
    create_tables(paths)
    # All files are checked before the first commit: a batch that is refused leaves no rows in any table.
    with _brought(paths, plan, shards) as files:
        _commit_files(paths, plan, "trajectories", files["trajectories"], {})
        _commit_rows(paths, plan, "parity", verdicts)
        _commit_rows(paths, plan, "batches", row)
        refuse_closed(paths, plan.batch_id)
        commit = _commit_files(paths, plan, "samples", files["samples"], metadata or {})
    return Published(batch_id=plan.batch_id, version=commit.version, already=commit.already)


def refuse_closed(paths: LakePaths, batch_id: str) -> None:
    """Stop where a batch is held back.

    Raises:
        BatchClosed: it is quarantined or discarded; the message names the commands that decide about it.
    """
    status = batch_status(paths, batch_id)
    if status in CLOSED:
        raise BatchClosed(
            f"batch {batch_id} is {status}; `rollout release {batch_id}` or `rollout discard {batch_id}` decides"
        )


def _batch_table(plan: Plan, row: dict[str, Any], status: str) -> pa.Table:
    fixed = {
        "batch_id": plan.batch_id,
        "status": status,
        "config_hash": plan.config_hash,
        "run_date": plan.run_date,
        "slot": plan.slot,
        "derived_from": plan.derived_from,
        "created_at": datetime.now(UTC),
        "schema_version": SCHEMA_VERSIONS["batches"],
    }
    return rows_to_table([{**row, **fixed}], "batches")


@contextmanager
def _brought(paths: LakePaths, plan: Plan, shards: Sequence[Manifest]) -> Iterator[dict[TableName, list[AddAction]]]:
    """The staged files under their final names, checked, by table; nothing is re-encoded.

    If the block's work is refused the names go again, as far as no commit can hold them.
    """
    linked: dict[TableName, list[str]] = {"trajectories": [], "samples": []}
    try:
        files = {name: _bring_all(paths, plan, shards, name, keys) for name, keys in linked.items()}
        yield files
    except (StagedChanged, BatchClosed):
        for name, keys in linked.items():
            if transaction(paths, name, plan.batch_id) is None:
                for key in keys:
                    paths.store.remove(key)
        raise


def _bring_all(
    paths: LakePaths, plan: Plan, shards: Sequence[Manifest], name: TableName, linked: list[str]
) -> list[AddAction]:
    if transaction(paths, name, plan.batch_id) is not None:
        return []
    return [
        _bring(paths, shard.key(file), file, linked, _own_rows(plan, shard.shard, name))
        for shard in shards
        for file in shard.files_of(name)
        if file.rows
    ]


def _own_rows(plan: Plan, shard: int, name: TableName) -> dict[str, tuple[Any, Any]]:
    """What the rows of a shard's file may say of where they belong: column to least and greatest value."""
    indexes = plan.shards[shard].indexes
    own = {"batch_id": (plan.batch_id, plan.batch_id), "index": (indexes.start, indexes.stop - 1)}
    return {**own, "shard": (shard, shard)} if name == "samples" else own


def _bring(
    paths: LakePaths, source: str, file: StagedFile, linked: list[str], within: dict[str, tuple[Any, Any]]
) -> AddAction:
    """Give a staged file its final name, then hold it against its manifest and schema: what is checked is
    what becomes visible, even if somebody swaps the staged file meanwhile."""
    stem = source.rsplit("/", 1)[-1].removesuffix(".parquet")
    file_name = f"{stem}-{uuid.uuid4().hex[:12]}.parquet"
    target = f"{paths.table_key(file.table)}/{file_name}"
    try:
        paths.store.link(source, target)
    except FileNotFoundError as error:
        raise StagedChanged(f"{source} is missing; {REPAIR}") from error
    linked.append(target)
    verify_file(paths, target, file, staged=source)
    with paths.store.open(target) as data:
        try:
            stats = footer_statistics(data, file.table, file.rows, source, within=within)
        except FileBreach as error:
            raise StagedChanged(str(error)) from error
    return add_action(file_name, file.size, stats)


def _commit_files(
    paths: LakePaths, plan: Plan, name: TableName, actions: list[AddAction], metadata: dict[str, str]
) -> Commit:
    for action in actions:
        if not paths.store.exists(f"{paths.table_key(name)}/{action.path}"):
            raise PublishFailed(f"tables/{name}/{action.path} vanished before its commit (a vacuum?); publish again")
    return commit_once(paths, name, plan.batch_id, actions, {"batch_id": plan.batch_id, **metadata})


def _commit_rows(paths: LakePaths, plan: Plan, name: TableName, rows: pa.Table) -> Commit:
    """Commit rows that were made by the caller, from a file written straight into the table's folder."""
    version = transaction(paths, name, plan.batch_id)
    if version is not None:
        return Commit(version=version, already=True)
    actions = [write_rows(paths, plan.batch_id, name, rows)] if rows.num_rows else []
    return commit_once(paths, name, plan.batch_id, actions, {"batch_id": plan.batch_id})


def quarantine_batch(
    paths: LakePaths,
    plan: Plan,
    manifests: dict[int, Manifest],
    parity: pa.Table,
    batch_row: dict[str, Any],
    report: dict[str, Any],
) -> bool:
    """Hold a staged batch back: parity and batches rows, never samples or trajectories.

    Its files go to quarantine/<batch_id>/ beside report.json; plan.json stays where it is and keeps the
    batch id taken. Safe to repeat after a crash.

    Args:
        report: JSON-able; names what differs, by field and token.

    Returns:
        False if the batch had been quarantined before.

    Raises:
        BatchIncomplete, StagedChanged, PublishFailed: as `publish_batch`.
        BatchClosed: the batch is discarded.
        PublishFailed: also where its publication has begun: that decision stands.
    """
    status = batch_status(paths, plan.batch_id)
    if status == "quarantined":
        _move_files(paths, plan)
        return False
    if status is not None:
        raise BatchClosed(f"batch {plan.batch_id} is {status} and cannot be quarantined")
    verdicts = conform(parity, "parity")
    check_constant(verdicts, "batch_id", plan.batch_id)
    for shard in require_all(plan, manifests):
        verify(paths, shard)
    folder = paths.folder(plan.batch_id, "quarantine")
    paths.store.replace(f"{folder}/report.json", json.dumps(report, ensure_ascii=False, indent=1).encode())
    create_tables(paths)
    _commit_rows(paths, plan, "parity", verdicts)
    commit = _commit_rows(paths, plan, "batches", _batch_table(plan, batch_row, "quarantined"))
    row = newest_batch_row(paths, plan.batch_id)
    if row is None or row["status"] != "quarantined":
        raise PublishFailed(f"batch {plan.batch_id}: its publication had begun; publish it again to end it")
    _move_files(paths, plan)
    return not commit.already


def _move_files(paths: LakePaths, plan: Plan) -> None:
    """First everything gets its place in quarantine, then staging loses its manifests and files."""
    target = paths.folder(plan.batch_id, "quarantine")
    staged = staged_shards(paths, plan.batch_id)
    for manifest in staged.values():
        for file in manifest.files:
            _link_if_missing(paths, manifest.key(file), f"{target}/{file.path}")
        paths.store.create(f"{target}/shards/{manifest.shard}.json", manifest.to_bytes())
    for manifest in staged.values():
        paths.store.remove(f"{manifest.folder}/shards/{manifest.shard}.json")
        for file in manifest.files:
            paths.store.remove(manifest.key(file))


def _link_if_missing(paths: LakePaths, source: str, target: str) -> None:
    if paths.store.exists(target):
        return
    try:
        paths.store.link(source, target)
    except (FileExistsError, FileNotFoundError):  # another process moves the same batch
        if not paths.store.exists(target):
            raise
