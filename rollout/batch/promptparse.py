"""From the bytes of a line, or the values of a table's row, to a checked prompt row and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import orjson
import pyarrow as pa

from rollout.batch.promptrow import RowRefused, check_row, plain_json

ROW_KEYS = ("messages", "tools", "label", "metadata", "agent", "rollout_id")
NESTED = ("messages", "tools", "metadata")
_WRITER = json.JSONEncoder(default=repr)
Parsed = tuple[dict[str, Any], bytes]
"""A row that can run and its JSON."""


class GivenRow(Protocol):
    """A row as it was found: its line, its exact bytes, and what it says."""

    line: int

    def raw(self) -> bytes: ...

    def parse(self) -> Parsed:
        """Raises RowRefused."""


@dataclass(slots=True)
class JsonLine:
    """A line of a JSONL file, without its end."""

    line: int
    data: bytes

    def raw(self) -> bytes:
        return self.data

    def parse(self) -> Parsed:
        value, text = _quick_json(self.data)
        return check_keys(parse_json(self.data) if text is None else value, text)


@dataclass(slots=True)
class TableRow:
    """A row of a table: its values by column, and the types of the columns that have JSON values within."""

    line: int
    values: dict[str, Any]
    json_types: Mapping[str, pa.DataType]

    def raw(self) -> bytes:
        return _WRITER.encode(self.values).encode()

    def parse(self) -> Parsed:
        parsed = {}
        for key, value in self.values.items():
            if value is None:
                continue
            if key in self.json_types:
                parsed[key] = decode_json(value, self.json_types[key])
            elif key in NESTED and isinstance(value, str):
                parsed[key] = parse_json(value.encode())
            else:
                parsed[key] = drop_nulls(value)
        return check_keys({key: parsed[key] for key in ROW_KEYS if parsed.get(key) is not None}, None)


def check_keys(row: Any, text: bytes | None) -> Parsed:
    """`row` and its JSON, which is `text` where that is known (`check_row`).

    Raises:
        RowRefused: it is no prompt row.
    """
    if not isinstance(row, dict):
        raise RowRefused(f"{'null' if row is None else type(row).__name__} where an object is wanted")
    unknown = [key for key in row if key not in ROW_KEYS]
    if unknown:
        raise RowRefused(f"unknown key {', '.join(map(repr, unknown))}; known are {', '.join(ROW_KEYS)}")
    return row, check_row(row, text)


def _quick_json(raw: bytes) -> tuple[Any, bytes | None]:
    """What `parse_json` gives, and its JSON; null JSON if this fast reader cannot know that.

    orjson refuses all that is no JSON, but keeps the last of two equal keys and reads integers beyond 64
    bits as doubles. Those are left out by `plain_json`; a lost key is a lost colon, unless one was escaped.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None, None
    text = plain_json(value)
    if text is not None and (b"\\u003" in raw or raw.count(b":") != text.count(b":")):
        text = None
    return value, text


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text, read strictly.

    Raises:
        RowRefused: no JSON in UTF-8, an object with a key twice, NaN, or a very large integer.
    """
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


def drop_nulls(value: Any) -> Any:
    """`value` without the null fields that Arrow gives every object of a list."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def has_json(kind: pa.DataType) -> bool:
    """Whether values of Arrow's JSON type (arrow.json) stand somewhere in this type."""
    if isinstance(kind, pa.JsonType):
        return True
    return any(has_json(kind.field(k).type) for k in range(kind.num_fields))


def decode_json(value: Any, kind: pa.DataType) -> Any:
    """A value of a type with JSON values within; these are read and keep their nulls, others are `drop_nulls`.

    Raises:
        RowRefused: one of them is no JSON.
    """
    if isinstance(kind, pa.JsonType):
        return None if value is None else parse_json(value.encode())
    if isinstance(value, list):
        return [decode_json(item, kind.value_type) for item in value]
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {key: decode_json(item, kind.field(key).type) for key, item in value.items() if item is not None}
    return drop_nulls(value)
