"""Prompt files: JSONL or parquet, read row by row and refused with file and line before anything runs.

A row is `{messages, tools?, label?, metadata?, agent?, rollout_id?}`. In parquet, nested columns may be
nested types (null fields are taken as absent) or JSON text.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.batch.promptrow import RowRefused, check_row
from rollout.columns import dump_json
from rollout.config import DEMO_PROMPTS
from rollout.errors import BadPrompts

ROW_KEYS = ("messages", "tools", "label", "metadata", "agent", "rollout_id")
_PARQUET_MAGIC = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_NESTED = ("messages", "tools", "metadata")
_Source = tuple[int, bytes, Callable[[bytes], Any]]
"""Line, the row's exact bytes, and what makes its value of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One prompt. `line` counts from 1 (parquet: rows); `digest` is blake2b-128 (hex) over the row's exact bytes.

    `refused` is None, or with skip_bad why the row cannot run; its other fields are then empty.
    """

    line: int
    digest: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    agent: str | None = None
    rollout_id: int | None = None
    refused: str | None = None


def read_prompts(path: str | Path, *, skip_bad: bool = False) -> list[PromptRow]:
    """The rows of a prompt file; `demo` is the one that ships with the package.

    Raises:
        BadPrompts: one line with file and line number; with `skip_bad` only for the file as a whole.
    """
    return parse_prompts(prompt_bytes(path), path, skip_bad=skip_bad)


def prompt_bytes(path: str | Path) -> bytes:
    """A prompt file's bytes: read once, so that the config hash is over what was parsed.

    Raises:
        BadPrompts: it cannot be read.
    """
    where = Path(__file__).with_name("demo.jsonl") if str(path) == DEMO_PROMPTS else Path(path).expanduser()
    try:
        return where.read_bytes()
    except OSError as error:
        raise BadPrompts(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadPrompts(f"{str(path)!r}: cannot be read: {error}") from error


def parse_prompts(data: bytes, name: str | Path, *, skip_bad: bool = False) -> list[PromptRow]:
    """The rows of a prompt file's bytes; errors as `read_prompts`, with `name` for the file."""
    rows, unit = [], "row" if data.startswith(_PARQUET_MAGIC) else "line"
    source = _parquet_rows(data, name) if unit == "row" else _jsonl_rows(data)
    for line, raw, parse in source:
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        try:
            rows.append(_prompt_row(line, digest, parse(raw)))
        except RowRefused as error:
            if not skip_bad:
                raise BadPrompts(f"{name}, {unit} {line}: {error}") from error
            rows.append(PromptRow(line=line, digest=digest, refused=f"{unit} {line}: {error}"))
    if not rows:
        raise BadPrompts(f"{name}: no prompts in it")
    if all(row.refused for row in rows):
        raise BadPrompts(f"{name}: every row is refused, the first because of {rows[0].refused}")
    return rows


def _prompt_row(line: int, digest: str, row: Any) -> PromptRow:
    if not isinstance(row, dict):
        raise RowRefused(f"{_kind(row)} where an object is wanted")
    unknown = [key for key in row if key not in ROW_KEYS]
    if unknown:
        raise RowRefused(f"unknown key {', '.join(map(repr, unknown))}; known are {', '.join(ROW_KEYS)}")
    check_row(row)
    label = row.get("label")
    return PromptRow(
        line=line,
        digest=digest,
        messages=row["messages"],
        tools=row.get("tools"),
        label=label if label is None or isinstance(label, str) else dump_json(label),
        metadata=row.get("metadata") or {},
        agent=row.get("agent"),
        rollout_id=row.get("rollout_id"),
    )


def _parse_json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RowRefused(f"not UTF-8: byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RowRefused(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise RowRefused("nested too deeply") from error
    except RowRefused:
        raise
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise RowRefused("an integer is beyond 64 bits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise RowRefused(f"key {next(k for k in keys if keys.count(k) > 1)!r} stands twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise RowRefused(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _jsonl_rows(data: bytes) -> Iterator[_Source]:
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            yield number, line.rstrip(b"\r"), _parse_json


def _parquet_rows(data: bytes, name: str | Path) -> Iterator[_Source]:
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        columns = file.schema_arrow.names
        unknown = [column for column in columns if column not in ROW_KEYS]
        if unknown:
            raise BadPrompts(f"{name}: unknown column {', '.join(unknown)}; known are {', '.join(ROW_KEYS)}")
        if len(set(columns)) != len(columns):
            raise BadPrompts(f"{name}: a column stands twice: {', '.join(columns)}")
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield number, json.dumps(row, default=repr).encode(), partial(_parse_columns, row)
    except BadPrompts:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        # Among them: text that is not UTF-8, a map with a key twice, a date beyond Python's.
        raise BadPrompts(f"{name}: cannot be read as parquet: {' '.join(str(error).split())}") from error


def _parse_columns(row: dict[str, Any], _raw: bytes) -> dict[str, Any]:
    parsed = {}
    for key, value in row.items():
        if key in _NESTED and isinstance(value, str):
            parsed[key] = _parse_json(value.encode())
        elif value is not None:
            parsed[key] = _drop_nulls(value)
    return parsed


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value
