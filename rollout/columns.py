"""The samples table's Arrow columns, and the one builder of its rows.

Every path writes rows through `samples_to_table` and reads them back through `table_to_samples`;
nothing rounds, re-encodes or infers on the way. The contract is frozen: a column is added, never
renamed or retyped (tests/fast/test_schema_lock.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rollout.errors import Failure
from rollout.identity import resolve_rollout_key, sample_id
from rollout.sample import Sample, Status, WeightSpan

SCHEMA_VERSION = 1
MAX_VALUES = 2**31 - 1
"""List values of one column of one table: what Arrow's 32-bit offsets can count."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
WEIGHT_SPANS = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
FAILURE = pa.struct([("type", pa.string()), ("message", pa.string())])
ENGINE = pa.struct(
    [
        ("name", pa.string()),
        ("version", pa.string()),
        ("model", pa.string()),
        ("revision", pa.string()),
        ("policy_version", pa.string()),
        ("flags_hash", pa.string()),
        ("deterministic", pa.bool_()),
        ("flags", pa.list_(pa.string())),
    ]
)


def required(name: str, kind: pa.DataType) -> pa.Field:
    """A column that is never null."""
    return pa.field(name, kind, nullable=False)


IDENTITY_FIELDS = [
    required("batch_id", pa.string()),
    pa.field("run_date", pa.date32()),
    pa.field("shard", pa.int32()),
    pa.field("group_index", pa.int64()),
    required("index", pa.int64()),
    required("attempt", pa.int32()),
    pa.field("rollout_id", pa.int64()),
    required("rollout_key", pa.int64()),
    required("sibling", pa.int32()),
    required("siblings", pa.int32()),
    required("sample_id", pa.string()),
]
PAYLOAD_FIELDS = [
    pa.field("prompt", pa.string()),
    required("tokens", pa.list_(pa.int32())),
    pa.field("response", pa.string()),
    required("response_length", pa.int32()),
    required("loss_mask", pa.list_(pa.int8())),
    required("rollout_log_probs", pa.list_(pa.float64())),
    required("status", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("reward_json", pa.string()),
    pa.field("label", pa.string()),
    pa.field("weight_versions", pa.list_(pa.string())),
    pa.field("weight_spans", WEIGHT_SPANS),
    pa.field("cached_tokens", pa.int64()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("routed_experts", pa.binary()),
    pa.field("routed_experts_shape", pa.list_(pa.int32())),
    pa.field("remove_sample", pa.bool_()),
    pa.field("metadata", pa.string()),
    pa.field("train_metadata", pa.string()),
]
TRAIL_FIELDS = [
    pa.field("session_version", pa.string()),
    pa.field("agent", pa.string()),
    pa.field("turns", pa.int32()),
    pa.field("leaf_path", pa.list_(pa.int32())),
    pa.field("picker", pa.string()),
    pa.field("finisher", pa.string()),
    pa.field("derived_from", pa.string()),
    pa.field("drift", pa.string()),
    pa.field("control_text", pa.int32()),
    pa.field("lora", pa.string()),
    pa.field("temperature", pa.float64()),
    pa.field("top_p", pa.float64()),
    pa.field("failure", FAILURE),
    pa.field("payload_digest", pa.binary()),
    pa.field("engine", ENGINE),
    required("schema_version", pa.int32()),
    required("created_at", TIMESTAMP),
]
SAMPLES_SCHEMA = pa.schema(IDENTITY_FIELDS + PAYLOAD_FIELDS + TRAIL_FIELDS)
"""The samples table, schema version 1."""

SESSION_TRAIL = (
    "session_version",
    "turns",
    "leaf_path",
    "picker",
    "finisher",
    "drift",
    "control_text",
    "lora",
    "temperature",
    "top_p",
)
SESSION_SCHEMA = pa.schema(PAYLOAD_FIELDS + [SAMPLES_SCHEMA.field(name) for name in SESSION_TRAIL])
"""What a session server knows of its samples: the reply of POST /sessions/{id}/samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStamp:
    """The columns that only the batch knows, equal for all rows of one shard."""

    batch_id: str
    run_date: date
    shard: int
    engine: dict[str, Any]
    created_at: datetime
    derived_from: str | None = None


def dump_json(value: Any) -> str:
    """Compact JSON, non-ASCII kept, key order kept; NaN and Infinity are refused by callers' checks."""
    return orjson.dumps(value).decode()


def session_table(samples: Sequence[Sample]) -> pa.Table:
    """Samples as a session server answers them: shape (len(samples), SESSION_SCHEMA)."""
    return _table(samples, SESSION_SCHEMA, {})


def samples_to_table(samples: Sequence[Sample], stamp: BatchStamp, digests: Sequence[bytes]) -> pa.Table:
    """Rows of the samples table, one per sample, in the given order.

    Args:
        samples: validated here; each needs an index.
        digests: `payload_digest` per sample (rollout.parity.projections.payload_digest).

    Raises:
        InvalidSample: a sample contradicts itself.
        ValueError: a sample without index, a naive timestamp, or more token values than MAX_VALUES.
    """
    if stamp.created_at.tzinfo is None:
        raise ValueError("created_at: a naive timestamp is refused, give one with a timezone")
    keys = []
    for sample in samples:
        sample.validate()
        if sample.index is None:
            raise ValueError("index: a row of the lake needs one")
        keys.append(resolve_rollout_key(sample.rollout_id, sample.index))
    n_rows = len(samples)
    ids = [sample_id(stamp.batch_id, key, s.sibling) for key, s in zip(keys, samples, strict=True)]
    given: dict[str, list[Any]] = {
        "batch_id": [stamp.batch_id] * n_rows,
        "run_date": [stamp.run_date] * n_rows,
        "shard": [stamp.shard] * n_rows,
        "rollout_key": keys,
        "sample_id": ids,
        "derived_from": [stamp.derived_from] * n_rows,
        "payload_digest": list(digests),
        "engine": [stamp.engine] * n_rows,
        "schema_version": [SCHEMA_VERSION] * n_rows,
        "created_at": [stamp.created_at] * n_rows,
    }
    return _table(samples, SAMPLES_SCHEMA, given)


def _table(samples: Sequence[Sample], schema: pa.Schema, given: dict[str, list[Any]]) -> pa.Table:
    arrays = []
    for column in schema:
        if column.name in _NUMPY_COLUMNS:
            arrays.append(_list_array([_NUMPY_COLUMNS[column.name](s) for s in samples], column.type))
        elif column.name in given:
            arrays.append(pa.array(given[column.name], column.type))
        else:
            convert = _CONVERTERS.get(column.name)
            values = [getattr(s, column.name) for s in samples]
            arrays.append(pa.array([convert(v) for v in values] if convert else values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _list_array(rows: Sequence[np.ndarray[Any, Any]], kind: pa.DataType) -> pa.Array:
    n_values = sum(len(row) for row in rows)
    if n_values > MAX_VALUES:
        raise ValueError(
            f"{n_values} values in one column, {MAX_VALUES} is the limit; make shards smaller (shard_size)"
        )
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.concatenate(rows) if rows else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind.value_type), type=kind)


_NUMPY_COLUMNS: dict[str, Callable[[Sample], np.ndarray[Any, Any]]] = {
    "tokens": lambda s: s.tokens_T,
    "loss_mask": lambda s: s.loss_mask_R,
    "rollout_log_probs": lambda s: s.rollout_log_probs_R,
}


def _spans(spans: Iterable[WeightSpan]) -> list[dict[str, Any]]:
    return [{"version": s.version, "start": s.start, "end": s.end} for s in spans]


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "prompt": dump_json,
    "metadata": dump_json,
    "train_metadata": lambda value: None if value is None else dump_json(value),
    "status": str,
    "weight_spans": _spans,
    "failure": lambda value: None if value is None else {"type": value.type, "message": value.message},
}


def table_to_samples(table: pa.Table) -> list[Sample]:
    """Samples from rows of SAMPLES_SCHEMA or SESSION_SCHEMA; per-token columns keep their bits."""
    names = [n for n in table.column_names if n in _SAMPLE_FIELDS]
    columns = {name: table.column(name).to_pylist() for name in names}
    lists = {name: _numpy_rows(table.column(name)) for name in _NUMPY_COLUMNS}
    samples = []
    for row in range(table.num_rows):
        values = {name: column[row] for name, column in columns.items()}
        samples.append(
            Sample(
                **_parse(values),
                tokens_T=lists["tokens"][row],
                loss_mask_R=lists["loss_mask"][row],
                rollout_log_probs_R=lists["rollout_log_probs"][row],
            )
        )
    return samples


_SAMPLE_FIELDS = frozenset(f.name for f in Sample.__dataclass_fields__.values()) - set(_NUMPY_COLUMNS)


def _parse(values: dict[str, Any]) -> dict[str, Any]:
    parsed = dict(values)
    parsed["prompt"] = orjson.loads(values["prompt"])
    parsed["metadata"] = orjson.loads(values["metadata"])
    if values["train_metadata"] is not None:
        parsed["train_metadata"] = orjson.loads(values["train_metadata"])
    parsed["status"] = Status(values["status"])
    parsed["weight_spans"] = [WeightSpan(**span) for span in values["weight_spans"] or []]
    if values.get("failure") is not None:
        parsed["failure"] = Failure(**values["failure"])
    return parsed


def _numpy_rows(column: pa.ChunkedArray) -> list[np.ndarray[Any, Any]]:
    rows: list[np.ndarray[Any, Any]] = []
    for chunk in column.chunks:
        flat = chunk.values.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        rows.extend(flat[a:b] for a, b in pairwise(offsets))
    return rows


def blake2b_256(*parts: bytes) -> bytes:
    """256 bits of blake2b over `parts`, each preceded by its length as 8 little-endian bytes."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
