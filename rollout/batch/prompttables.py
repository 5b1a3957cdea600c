"""Prompts in a folder: a Delta table, local or on S3, or a dataset that Hugging Face `datasets` saved to disk.

The layout of a saved dataset is public (`Dataset.save_to_disk`): `state.json` lists Arrow stream files under
`_data_files`, in order; so reading one needs no `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from rollout.batch.content import reading
from rollout.batch.promptfiles import BATCH_ROWS, Source, open_parquet, table_errors, table_rows
from rollout.errors import BadPrompts
from rollout.lake.datafile import file_digest
from rollout.lake.paths import S3_SCHEME, s3_options

_VERSION = re.compile(r"(?P<table>.+)@v(?P<version>0|[1-9][0-9]{0,17})", re.DOTALL)


def folder_source(path: str) -> Source | None:
    """The rows of the table or dataset at `path`, null where that is a file or nothing at all.

    `path` may end in `@v12` for version 12 of a Delta table; without it the newest version is read, and the
    source's name says which that was.

    Raises:
        BadPrompts: a folder of another kind, or one that cannot be read.
    """
    if path.startswith(S3_SCHEME):
        return _delta_source(*_split(path))
    with reading(path):
        folder = Path(path).expanduser()
        table, version = _split(path)
        if version is not None and not folder.exists() and Path(table, "_delta_log").expanduser().is_dir():
            return _delta_source(table, version)
        if not folder.is_dir():
            return None
        if (folder / "_delta_log").is_dir():
            return _delta_source(path, None)
        if (folder / "state.json").is_file():
            return _dataset_source(folder, path)
        raise BadPrompts(f"{path}: {_wrong_folder(folder, path)}")


def keep_version(given: str, planned: str) -> str:
    """`planned` if it is the table `given` at a version, else `given`: a batch goes on with the rows it began with."""
    return planned if _split(planned)[1] is not None and _split(planned)[0] == given else given


def _split(path: str) -> tuple[str, int | None]:
    found = _VERSION.fullmatch(path)
    return (found["table"], int(found["version"])) if found else (path, None)


def _wrong_folder(folder: Path, path: str) -> str:
    if (folder / "dataset_dict.json").is_file():
        splits = [str(name) for name in _read_json(folder / "dataset_dict.json", path).get("splits", [])]
        return (
            f"a dataset with the splits {', '.join(splits)}; give one of them, as in {path}/{(splits or ['train'])[0]}"
        )
    tables = sorted(found.parent.name for found in folder.glob("tables/*/_delta_log"))
    if tables:
        return f"a lake, not a table; give a table of prompts, as {path}/tables/<name> (there: {', '.join(tables)})"
    return (
        "cannot be read: Is a directory, and neither a Delta table (_delta_log) nor a dataset of Hugging Face's "
        "save_to_disk (state.json)"
    )


# Delta


def _delta_source(table: str, version: int | None) -> Source:
    name = table if version is None else f"{table}@v{version}"
    s3 = table.startswith(S3_SCHEME)
    uri = table if s3 else os.path.abspath(os.path.expanduser(table))
    try:
        delta = DeltaTable(uri, version=version, storage_options=s3_options(os.environ) if s3 else None)
    except TableNotFoundError as error:
        raise BadPrompts(f"{name}: no Delta table is there{'; s3:// is for tables only' if s3 else ''}") from error
    except (DeltaError, OSError, ValueError) as error:
        raise BadPrompts(f"{name}: cannot be read as a Delta table: {' '.join(str(error).split())}") from error
    name = f"{table}@v{delta.version()}"
    return Source(
        name=name,
        unit="row",
        fingerprint=f"{uri} {delta.metadata().id}@v{delta.version()}",
        content=None,
        rows=_delta_rows(delta, name),
    )


def _delta_rows(delta: DeltaTable, name: str) -> Iterator[Any]:
    """The rows in the order in which their files were written (those of one millisecond by file name).

    The log itself has no order of files that a checkpoint would keep.
    """
    try:
        with table_errors(name, "a Delta table"):
            dataset = delta.to_pyarrow_dataset()
            files = pa.table(delta.get_add_actions()).select(["path", "modification_time"]).to_pylist()
            written = {_plain(file["path"]): file["modification_time"] for file in files}
            fragments = sorted(dataset.get_fragments(), key=lambda file: (written[_plain(file.path)], file.path))
            batches = (batch for fragment in fragments for batch in _file_batches(fragment, dataset.schema))
            yield from table_rows(batches, dataset.schema, name)
    except DeltaError as error:
        raise BadPrompts(f"{name}: cannot be read as a Delta table: {' '.join(str(error).split())}") from error


def _file_batches(fragment: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A data file's rows with the table's columns; partition values and columns that came later are not in the file.

    Not by the scanner of the `fragment` (ParquetFileFragment): it holds a whole row group, maybe a million rows.
    """
    import pyarrow.dataset  # imports pandas where that is installed: half a second, and only tables need it

    with fragment.filesystem.open_input_file(fragment.path) as file:
        table = open_parquet(file)
        stored = set(table.schema_arrow.names)
        fixed = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
        columns = [column for column in schema.names if column in stored]
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            for column in schema:
                if column.name not in stored:
                    values = pa.array([fixed.get(column.name)] * batch.num_rows, column.type)
                    batch = batch.append_column(column.name, values)
            yield batch.select(schema.names)


def _plain(path: str) -> str:
    """A data file's path without URL encoding, of which the log and Arrow show partition values different layers."""
    while (inner := unquote(path)) != path:
        path = inner
    return path


# Datasets on disk


def _dataset_source(folder: Path, name: str) -> Source:
    state = _read_json(folder / "state.json", name)
    try:
        files = [folder / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise BadPrompts(f"{name}: state.json lists no _data_files, as save_to_disk writes them") from error
    digest = hashlib.blake2b(digest_size=32)
    with reading(name):
        for path in files:
            with path.open("rb") as file:
                digest.update(bytes.fromhex(file_digest(file)))
    rows = _dataset_rows(files, name)
    return Source(name=name, unit="row", fingerprint=digest.hexdigest(), content=None, rows=rows)


def _dataset_rows(files: list[Path], name: str) -> Iterator[Any]:
    with table_errors(name, "a saved dataset"):
        if not files:
            return
        with pa.OSFile(str(files[0])) as file:
            schema = pa.ipc.open_stream(file).schema
        yield from table_rows(_dataset_batches(files, schema), schema, name)


def _dataset_batches(files: list[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in files:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            if not stream.schema.equals(schema):
                raise ValueError(f"{path.name} has other columns than the first file")
            for batch in stream:
                for first in range(0, batch.num_rows, BATCH_ROWS):
                    yield batch.slice(first, BATCH_ROWS)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadPrompts(f"{name}: {path.name} is damaged: {error}") from error
    return found if isinstance(found, dict) else {}
