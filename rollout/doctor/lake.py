"""A lake as a batch needs it: rights, exclusive creation, its store's clock, tables of the frozen schema."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from deltalake.exceptions import DeltaError

from rollout.doctor.clock import judge_clock
from rollout.doctor.finding import Finding, fail, ok
from rollout.doctor.space import check_space
from rollout.errors import BadLake, describe
from rollout.lake.paths import LakePaths
from rollout.lake.schema import TABLE_NAMES, TableName, describe_delta_difference
from rollout.lake.tables import open_table


def check_lake(uri: str) -> list[Finding]:
    """Everything about the lake at `uri`; no file or folder is left that was not there."""
    try:
        paths = LakePaths(uri)
    except BadLake as error:
        return [fail("lake", str(error))]
    findings = check_rights(paths)
    if findings[0].state != "ok":
        return findings
    findings += check_tables(paths)
    return [*findings, check_space("lake", Path(paths.root))] if paths.is_local else findings


def check_rights(paths: LakePaths) -> list[Finding]:
    """Write, create exclusively, read back and delete a file through the store that batches use; the store's clock."""
    made = _missing_folders(paths)
    try:
        paths.check_writable()
        theirs, ours = _probe(paths)
    except BadLake as error:
        return [fail("lake", str(error))]
    except Exception as error:  # botocore's errors share no base class with OSError
        return [fail("lake", f"{paths.uri} refuses: {describe(error)}; get the rights there, or choose another --lake")]
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
    rights = ok("lake", f"{paths.uri} can be written, created in exclusively, read and deleted in")
    return [rights, judge_clock("the lake's store", theirs, ours)]


def _probe(paths: LakePaths) -> tuple[float, float]:
    """The file's time as the store says it, and ours in the middle of writing it."""
    store, key, data = paths.store, f"staging/probe-{uuid.uuid4().hex}", os.urandom(64)
    try:
        before = time.time()
        if not store.create(key, data):
            raise BadLake(f"lake {paths.uri}: a new file is said to be there already; choose another store")
        after = time.time()
        if store.create(key, b"a second writer"):
            raise BadLake(
                f"lake {paths.uri}: a file was created twice, so two writers of one shard would both win; "
                "choose a store with exclusive creation (S3: If-None-Match)"
            )
        if store.read(key) != data:
            raise BadLake(f"lake {paths.uri}: what was written is not what is read back; choose another store")
        written = store.modified(key)
    finally:
        store.remove(key)
    if store.exists(key):
        raise BadLake(f"lake {paths.uri}: a file cannot be deleted; get the right to, or choose another --lake")
    return written, (before + after) / 2


def _missing_folders(paths: LakePaths) -> list[Path]:
    """Folders that the probe is going to make, the innermost first."""
    if not paths.is_local:
        return []
    folder = Path(paths.root, "staging")
    return [part for part in (folder, *folder.parents) if not part.exists()]


def check_tables(paths: LakePaths) -> list[Finding]:
    """Open each table that is there and hold its schema against the frozen one."""
    versions, problems = [], []
    for name in TABLE_NAMES:
        found = _open(paths, name)
        if isinstance(found, Finding):
            problems.append(found)
        elif found is not None:
            versions.append(f"{name} {found}")
    there = f"versions {', '.join(versions)}" if versions else "none yet: the first batch makes them"
    return [*problems, *([] if problems else [ok("tables", there)])]


def _open(paths: LakePaths, name: TableName) -> int | Finding | None:
    """The table's version, null if there is no such table yet, or what is wrong with it."""
    try:
        table = open_table(paths, name)
        problem = None if table is None else describe_delta_difference(table.schema(), name)
    except (DeltaError, OSError, ValueError) as error:
        return fail(
            "tables",
            f"{paths.uri}/tables/{name} cannot be opened: {describe(error)}; restore it, or choose another --lake",
        )
    if problem:
        return fail("tables", f"{paths.uri}/tables/{name} is of another schema: {problem}; choose another --lake")
    return None if table is None else int(table.version())
