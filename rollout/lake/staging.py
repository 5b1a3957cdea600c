"""Staging: what is written but not visible. Exclusive creation decides everything; nothing is overwritten.

A shard is staged when, and only when, `shards/<shard>.json` exists: the first writer wins. A zombie's data
files carry its own uuid and are named by no manifest, so nobody reads them.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.config import BATCH_ID_PATTERN, IDENTITY_OPTIONS
from rollout.errors import BadConfig, BadLake, BatchIncomplete, StagedChanged
from rollout.lake.datafile import FILE_BYTES, ROW_GROUP_BYTES, cut_by_bytes, file_digest, row_bytes, write_data_file
from rollout.lake.manifest import Manifest, StagedFile
from rollout.lake.paths import Area, LakePaths
from rollout.lake.planfile import Plan
from rollout.lake.rows import check_samples, check_trajectories, sorted_rows
from rollout.lake.schema import SCHEMAS, TableName, conform

REPAIR = "restore it, or remove its manifest in shards/ and run the batch again"
"""What to do about a staged file that is not what its manifest says."""

_ROLLOUT: dict[TableName, str] = {"samples": "rollout_key", "trajectories": "index"}


def create_plan(paths: LakePaths, plan: Plan) -> Plan:
    """Make `plan` the batch's plan, or get the one that it already has.

    Returns:
        The plan as it stands in the lake: this one, or an earlier one with the same config hash (whose
        cut into shards then holds).

    Raises:
        BadConfig: the batch id was planned with another configuration; both hashes and what differs.
        BadLake: the plan.json that is there cannot be read.
    """
    if paths.store.create(paths.plan_key(plan.batch_id), plan.to_bytes()):
        return plan
    stored = read_plan(paths, plan.batch_id)
    if stored is None:
        raise BadLake(f"{paths.uri}: plan.json of batch {plan.batch_id} came and went; run again")
    if stored.config_hash != plan.config_hash:
        raise BadConfig(
            f"batch id {plan.batch_id!r} was planned with another configuration: config hash {stored.config_hash} "
            f"there, {plan.config_hash} now ({_plan_differences(stored, plan)}); choose another batch id"
        )
    return stored


def _plan_differences(stored: Plan, plan: Plan) -> str:
    names = ("prompts_digest", "model_digest", "package_version")
    pairs = [(name, getattr(stored, name), getattr(plan, name)) for name in names]
    pairs += [(name, stored.config.get(name), plan.config.get(name)) for name in IDENTITY_OPTIONS]
    return ", ".join(f"{name}: {there} != {now}" for name, there, now in pairs if there != now)


def read_plan(paths: LakePaths, batch_id: str) -> Plan | None:
    """The batch's plan, None if it was never planned.

    Raises:
        BadConfig: no batch id.
        BadLake: plan.json is damaged.
    """
    key = paths.plan_key(batch_id)
    try:
        data = paths.store.read(key)
    except FileNotFoundError:
        return None
    try:
        plan = Plan.from_bytes(data)
    except (ValueError, TypeError, KeyError) as error:
        raise BadLake(f"{paths.uri}/{key} is damaged ({error}); restore it or choose another batch id") from error
    if plan.batch_id != batch_id:
        raise BadLake(f"{paths.uri}/{key} is the plan of {plan.batch_id!r}; restore it or choose another batch id")
    return plan


def planned_batches(paths: LakePaths) -> list[str]:
    """Ids of all batches that have a plan, sorted."""
    names = [name for name in paths.store.names("staging") if BATCH_ID_PATTERN.fullmatch(name)]
    return [name for name in names if paths.store.exists(paths.plan_key(name))]


def stage_shard(
    paths: LakePaths,
    plan: Plan,
    shard: int,
    samples: pa.Table,
    trajectories: pa.Table,
    counts: dict[str, Any],
    *,
    row_group_bytes: int = ROW_GROUP_BYTES,
    file_bytes: int = FILE_BYTES,
) -> Manifest:
    """Write a shard's rows and make it staged.

    Args:
        samples: rows of SAMPLES_SCHEMA, every planned rollout of the shard among them.
        trajectories: rows of TRAJECTORIES_SCHEMA of the same rollouts.
        counts: JSON-able; kept in the manifest.

    Returns:
        The manifest that stands: this call's, or the one of an earlier writer, who then won.

    Raises:
        SchemaBreach, InvalidSample: rows that are refused, with the rollout's key; nothing is staged.
    """
    found = read_manifest(paths, plan.batch_id, shard)
    if found is not None:
        return found
    cut = plan.shards[shard]
    tables: dict[TableName, pa.Table] = {
        "samples": conform(samples, "samples"),
        "trajectories": conform(trajectories, "trajectories"),
    }
    check_samples(tables["samples"], plan.batch_id, cut)
    check_trajectories(tables["trajectories"], plan.batch_id, cut)
    writer = uuid.uuid4().hex
    files: list[StagedFile] = []
    for name, table in tables.items():
        files += _write_files(paths, plan.batch_id, shard, writer, name, table, row_group_bytes, file_bytes)
    manifest = Manifest(
        batch_id=plan.batch_id,
        shard=shard,
        config_hash=plan.config_hash,
        writer=writer,
        created_at=datetime.now(UTC),
        files=tuple(files),
        counts=counts,
        folder=paths.folder(plan.batch_id),
    )
    return _claim(paths, manifest)


def _claim(paths: LakePaths, manifest: Manifest) -> Manifest:
    if paths.store.create(_manifest_key(manifest.folder, manifest.shard), manifest.to_bytes()):
        return manifest
    winner = read_manifest(paths, manifest.batch_id, manifest.shard)
    if winner is None:
        raise BadLake(f"{paths.uri}: the manifest of {manifest.batch_id}/{manifest.shard} came and went; run again")
    # An S3 write that was repeated inside the client can lose against itself.
    if winner.writer != manifest.writer:
        for file in manifest.files:
            paths.store.remove(manifest.key(file))
    return winner


def _write_files(
    paths: LakePaths,
    batch_id: str,
    shard: int,
    writer: str,
    name: TableName,
    table: pa.Table,
    row_group_bytes: int,
    file_bytes: int,
) -> list[StagedFile]:
    order = sorted_rows(table, name)
    rollouts = table.column(_ROLLOUT[name]).to_numpy()[order]
    folder, files = paths.folder(batch_id), []
    runs = list(cut_by_bytes(row_bytes(table)[order], file_bytes, rollouts)) or [slice(0, 0)]
    for run in runs:
        scratch = paths.store.scratch(f"{folder}/data")
        try:
            size, digest = write_data_file(table, order[run], scratch, name, row_group_bytes=row_group_bytes)
            path = f"data/{name}-{shard:04d}-{writer}-{digest[:16]}.parquet"
            paths.store.upload(scratch, f"{folder}/{path}")
        finally:
            scratch.unlink(missing_ok=True)
        files.append(StagedFile(table=name, path=path, rows=len(order[run]), size=size, digest=digest))
    return files


def _manifest_key(folder: str, shard: int) -> str:
    return f"{folder}/shards/{shard}.json"


def read_manifest(paths: LakePaths, batch_id: str, shard: int, area: Area = "staging") -> Manifest | None:
    """The shard's manifest, None while it is not staged.

    Raises:
        StagedChanged: the manifest cannot be read, or is another shard's.
    """
    folder = paths.folder(batch_id, area)
    key = _manifest_key(folder, shard)
    try:
        data = paths.store.read(key)
    except FileNotFoundError:
        return None
    try:
        manifest = Manifest.from_bytes(data, folder)
    except (ValueError, TypeError, KeyError) as error:
        raise StagedChanged(f"{key} is damaged ({error}); restore it, or remove it to run the shard again") from error
    if (manifest.batch_id, manifest.shard) != (batch_id, shard):
        raise StagedChanged(f"{key} is the manifest of {manifest.batch_id}/{manifest.shard}")
    return manifest


def staged_shards(paths: LakePaths, batch_id: str, area: Area = "staging") -> dict[int, Manifest]:
    """Manifests of the staged shards by number; resume runs what is missing here."""
    manifests = {}
    for name in paths.store.names(f"{paths.folder(batch_id, area)}/shards"):
        number = name.removesuffix(".json")
        if number.isdigit():
            manifest = read_manifest(paths, batch_id, int(number), area)
            if manifest is not None:
                manifests[int(number)] = manifest
    return dict(sorted(manifests.items()))


def require_all(plan: Plan, manifests: dict[int, Manifest]) -> list[Manifest]:
    """The manifests of every planned shard, in order.

    Raises:
        BatchIncomplete: with the number of missing shards and the first of them.
        StagedChanged: a manifest of another configuration.
    """
    missing = [cut.shard for cut in plan.shards if cut.shard not in manifests]
    if missing:
        raise BatchIncomplete(
            f"batch {plan.batch_id}: {len(missing)} of {len(plan.shards)} shards are not staged "
            f"(first {missing[0]}); `rollout run --batch-id {plan.batch_id}` goes on"
        )
    ordered = [manifests[cut.shard] for cut in plan.shards]
    for cut, manifest in zip(plan.shards, ordered, strict=True):
        if manifest.shard != cut.shard:
            raise StagedChanged(f"the manifest of shard {manifest.shard} stands for shard {cut.shard}")
        if (manifest.batch_id, manifest.config_hash) != (plan.batch_id, plan.config_hash):
            raise StagedChanged(
                f"shard {manifest.shard} was staged for {manifest.batch_id} with config hash {manifest.config_hash}, "
                f"the plan is {plan.batch_id} with {plan.config_hash}"
            )
    return ordered


def verify(paths: LakePaths, manifest: Manifest) -> None:
    """Hold every data file of a shard against its manifest.

    Raises:
        StagedChanged: a file is missing, or its size or digest differs.
    """
    for file in manifest.files:
        verify_file(paths, manifest.key(file), file)


def verify_file(paths: LakePaths, key: str, file: StagedFile, *, staged: str | None = None) -> None:
    """Hold one file, wherever it now stands, against its manifest's entry; errors as `verify`.

    Args:
        staged: the key under which it was staged, where that is another.
    """
    name = staged or key
    try:
        size = paths.store.size(key)
        if size != file.size:
            raise StagedChanged(f"{name}: {size} bytes, its manifest says {file.size}; {REPAIR}")
        with paths.store.open(key) as source:
            digest = file_digest(source)
    except FileNotFoundError as error:
        raise StagedChanged(f"{name} is missing; {REPAIR}") from error
    if digest != file.digest:
        raise StagedChanged(f"{name}: digest {digest}, its manifest says {file.digest}; {REPAIR}")


def read_staged(paths: LakePaths, manifest: Manifest) -> tuple[pa.Table, pa.Table]:
    """(samples, trajectories) of a staged shard with the frozen schemas, as the files hold them.

    Does not look at digests: call `verify` first where it matters.

    Raises:
        StagedChanged: a file is missing, or is not what its table needs.
    """
    return _read_table(paths, manifest, "samples"), _read_table(paths, manifest, "trajectories")


def _read_table(paths: LakePaths, manifest: Manifest, name: TableName) -> pa.Table:
    parts = []
    for file in manifest.files_of(name):
        key = manifest.key(file)
        try:
            with paths.store.open(key) as source:
                parts.append(conform(pq.ParquetFile(source).read(), name))
        except FileNotFoundError as error:
            raise StagedChanged(f"{key} is missing; {REPAIR}") from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StagedChanged(f"{key}: {error}") from error
    return pa.concat_tables(parts) if parts else SCHEMAS[name].empty_table()
