"""Prompts in one file: JSONL, or parquet, told apart by content. Rows come one by one, whatever the file's size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.batch.content import Content, reading
from rollout.batch.promptparse import ROW_KEYS, GivenRow, JsonLine, TableRow, has_json
from rollout.errors import BadPrompts

BATCH_ROWS = 256
"""Rows of a table that are Python objects at a time."""
_BUFFER_BYTES = 1024 * 1024
_PARQUET_MAGIC = b"PAR1"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where prompt rows come from.

    `content` is what the config hash is over; null: the rows themselves, so that it says nothing about how they
    are stored, and each row's digest is over its JSON. `fingerprint` is equal only where the rows are.
    """

    name: str
    unit: Literal["line", "row"]
    fingerprint: str
    content: Content | None
    rows: Iterable[GivenRow]


def file_source(content: Content, name: str) -> Source:
    """The rows of a file; reading them raises BadPrompts where it is no such file."""
    with content.open() as file:
        parquet = file.read(4) == _PARQUET_MAGIC
    return Source(
        name=name,
        unit="row" if parquet else "line",
        fingerprint=content.digest,
        content=content,
        rows=_parquet_rows(content, name) if parquet else _lines(content),
    )


def _lines(content: Content) -> Iterator[JsonLine]:
    with reading(content.name), content.open() as file:
        for number, line in enumerate(file, start=1):
            data = line.removesuffix(b"\n")
            if number == 1:
                data = data.removeprefix(_BOM)
            if data and not data.isspace():
                yield JsonLine(number, data.rstrip(b"\r"))


def _parquet_rows(content: Content, name: str) -> Iterator[TableRow]:
    with table_errors(name, "parquet"), content.open() as file:
        table = open_parquet(file)
        yield from table_rows(table.iter_batches(batch_size=BATCH_ROWS), table.schema_arrow, name)


def open_parquet(file: Any) -> pq.ParquetFile:
    """A parquet file whose pages are read as they are needed: a row group may be the whole file."""
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def table_rows(batches: Iterable[pa.RecordBatch], schema: pa.Schema, name: str) -> Iterator[TableRow]:
    """The rows of a table's record batches, counted from 1.

    Raises:
        BadPrompts: a column of another name, or one that stands twice.
    """
    columns = schema.names
    unknown = [column for column in columns if column not in ROW_KEYS]
    if unknown:
        raise BadPrompts(f"{name}: unknown column {', '.join(unknown)}; known are {', '.join(ROW_KEYS)}")
    if len(set(columns)) != len(columns):
        raise BadPrompts(f"{name}: a column stands twice: {', '.join(columns)}")
    json_types = {column.name: column.type for column in schema if has_json(column.type)}
    number = 0
    for batch in batches:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
        for row in rows:
            number += 1
            yield TableRow(number, row, json_types)


@contextmanager
def table_errors(name: str, kind: str) -> Iterator[None]:
    """Turn what reading a table raises into one line.

    Arrow's own errors, and Python's for what Python cannot hold: text that is not UTF-8, a map with a key
    twice, a date beyond Python's.
    """
    try:
        yield
    except BadPrompts:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        raise BadPrompts(f"{name}: cannot be read as {kind}: {' '.join(str(error).split())}") from error
