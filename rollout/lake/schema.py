"""The four tables' frozen Arrow schemas, and the one cast that every writer goes through.

Contract: lake spec. A column is added, never renamed or retyped (tests/fast/test_lake_schema_lock.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import pyarrow as pa
from deltalake import Field as DeltaField
from deltalake import Schema as DeltaSchema
from deltalake.schema import StructType

from rollout.columns import SAMPLES_SCHEMA, SCHEMA_VERSION, TIMESTAMP, required
from rollout.tape_columns import TRAJECTORIES_SCHEMA

TableName = Literal["samples", "trajectories", "parity", "batches"]
TABLE_NAMES: tuple[TableName, ...] = get_args(TableName)

TAKEN_AT_ONCE = 2**30
"""Bytes of a table, all columns together, from which rows are taken one by one."""

BatchStatus = Literal["published", "quarantined", "discarded", "released"]
"""Values of `batches.status`."""

PARITY_SCHEMA = pa.schema(
    [
        required("batch_id", pa.string()),
        required("index", pa.int64()),
        required("rollout_key", pa.int64()),
        required("check", pa.string()),
        required("verdict", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("paths", pa.list_(pa.string())),
        pa.field("versions", pa.string()),
        pa.field("engine_a", pa.string()),
        pa.field("engine_b", pa.string()),
        pa.field("first_token", pa.int32()),
        pa.field("max_ulp", pa.int64()),
        pa.field("seconds", pa.float64()),
        required("created_at", TIMESTAMP),
        required("schema_version", pa.int32()),
    ]
)
"""The parity table, schema version 1: one row per rollout and check."""

BATCHES_SCHEMA = pa.schema(
    [
        required("batch_id", pa.string()),
        required("status", pa.string()),
        pa.field("run_date", pa.date32()),
        pa.field("slot", pa.string()),
        pa.field("config", pa.string()),
        required("config_hash", pa.string()),
        pa.field("n_prompts", pa.int64()),
        pa.field("n_rollouts", pa.int64()),
        pa.field("n_shards", pa.int64()),
        pa.field("counts", pa.string()),
        pa.field("reward_mean", pa.float64()),
        pa.field("pass_at", pa.string()),
        pa.field("zero_spread_groups", pa.int32()),
        pa.field("tokens_prompt", pa.int64()),
        pa.field("tokens_cached", pa.int64()),
        pa.field("tokens_sampled", pa.int64()),
        pa.field("tokens_trained", pa.int64()),
        pa.field("seconds_wall", pa.float64()),
        pa.field("seconds_engine", pa.float64()),
        pa.field("seconds_parity", pa.float64()),
        pa.field("seconds_held", pa.float64()),
        pa.field("gpu_seconds", pa.float64()),
        pa.field("tokens_per_gpu_second", pa.float64()),
        pa.field("cached_share", pa.float64()),
        pa.field("cost", pa.float64()),
        pa.field("cost_per_trained_token", pa.float64()),
        pa.field("provenance", pa.string()),
        pa.field("derived_from", pa.string()),
        pa.field("by", pa.string()),
        pa.field("why", pa.string()),
        required("created_at", TIMESTAMP),
        required("schema_version", pa.int32()),
    ]
)
"""The batches table, schema version 1: one row per change of a batch's status, the newest wins."""

SCHEMAS: dict[TableName, pa.Schema] = {
    "samples": SAMPLES_SCHEMA,
    "trajectories": TRAJECTORIES_SCHEMA,
    "parity": PARITY_SCHEMA,
    "batches": BATCHES_SCHEMA,
}
SCHEMA_VERSIONS: dict[TableName, int] = dict.fromkeys(TABLE_NAMES, SCHEMA_VERSION)

DELTA_SCHEMAS: dict[TableName, DeltaSchema] = {name: DeltaSchema.from_arrow(s) for name, s in SCHEMAS.items()}


class SchemaBreach(ValueError):
    """A table that does not fit its frozen schema; names the column."""


STATISTICS_COLUMNS = ("batch_id", "run_date", "rollout_key", "index")
"""Columns whose bounds go into the Delta log, where the table has them: what readers prune files by."""


def conform(table: pa.Table, name: TableName) -> pa.Table:
    """`table` with exactly the columns of the frozen schema `name`, in their order and types.

    Nullable columns that are missing become null. Widths may differ where no value changes
    (large_string to string, int32 to int64); nothing is ever inferred or rounded.

    Raises:
        SchemaBreach: a column that is unknown, missing or of a type that would change values, a null in
            a column that is never null, a timestamp without timezone, another schema_version.
    """
    schema = SCHEMAS[name]
    unknown = [column for column in table.column_names if schema.get_field_index(column) < 0]
    if unknown or len(set(table.column_names)) != len(table.column_names):
        raise SchemaBreach(f"{name}: unknown or repeated columns {', '.join(unknown or table.column_names)}")
    columns = [_conform_column(table, field, name) for field in schema]
    conformed = pa.Table.from_arrays(columns, schema=schema)
    versions = set(conformed.column("schema_version").unique().to_pylist())
    if versions - {SCHEMA_VERSIONS[name]}:
        raise SchemaBreach(f"{name}.schema_version: {sorted(versions)}, this writer's is {SCHEMA_VERSIONS[name]}")
    return conformed


def _conform_column(table: pa.Table, field: pa.Field, name: TableName) -> pa.ChunkedArray:
    if table.schema.get_field_index(field.name) < 0:
        column = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    else:
        column = table.column(field.name)
    if pa.types.is_timestamp(field.type) and pa.types.is_timestamp(column.type) and column.type.tz is None:
        raise SchemaBreach(f"{name}.{field.name}: a naive timestamp is refused, give one with a timezone")
    if pa.types.is_floating(field.type) != pa.types.is_floating(column.type) and column.null_count < len(column):
        raise SchemaBreach(f"{name}.{field.name}: {column.type} where the schema has {field.type}")
    if not field.nullable and column.null_count:
        raise SchemaBreach(f"{name}.{field.name}: null in {column.null_count} of {len(column)} rows")
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise SchemaBreach(f"{name}.{field.name}: {column.type} where the schema has {field.type}: {error}") from error


def rows_to_table(rows: Sequence[dict[str, Any]], name: TableName) -> pa.Table:
    """Rows as dicts, cast to the frozen schema `name`; a key that is no column is refused.

    Raises:
        SchemaBreach: as `conform`.
    """
    schema = SCHEMAS[name]
    unknown = {key for row in rows for key in row} - set(schema.names)
    if unknown:
        raise SchemaBreach(f"{name}: unknown columns {', '.join(sorted(unknown))}")
    naive = [k for row in rows for k, v in row.items() if getattr(v, "tzinfo", True) is None and hasattr(v, "hour")]
    if naive:
        raise SchemaBreach(f"{name}.{naive[0]}: a naive timestamp is refused, give one with a timezone")
    columns = {}
    for field in schema:
        try:
            columns[field.name] = pa.array([row.get(field.name) for row in rows], field.type)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise SchemaBreach(f"{name}.{field.name}: {error}") from error
    return conform(pa.table(columns), name)


def describe_delta_difference(found: DeltaSchema, name: TableName) -> str | None:
    """What a table's schema lacks of the frozen one, None if it holds all of it.

    Further nullable columns, of a later version, are no difference.
    """
    there = {field.name: field for field in found.fields}
    for field in DELTA_SCHEMAS[name].fields:
        have = there.pop(field.name, None)
        if have is None:
            return f"column {field.name} is missing"
        if (have.type, have.nullable) != (field.type, field.nullable):
            return f"column {field.name} is {have.type}, nullable {have.nullable}; want {field.type}, {field.nullable}"
    strict = [field.name for field in there.values() if not field.nullable]
    return f"column {strict[0]} is unknown and never null" if strict else None


def columns_to_add(found: DeltaSchema, name: TableName) -> list[DeltaField]:
    """Nullable columns of the frozen schema that an older table lacks, and structs that have grown since."""
    there = {field.name: field for field in found.fields}
    wanted = []
    for field in DELTA_SCHEMAS[name].fields:
        have = there.get(field.name)
        if (have is None and field.nullable) or (have is not None and _has_grown(have.type, field.type)):
            wanted.append(field)
    return wanted


def _has_grown(old: Any, new: Any) -> bool:
    if not isinstance(old, StructType) or not isinstance(new, StructType) or old == new:
        return False
    kept = {field.name: field for field in new.fields}
    return all(kept.get(field.name) == field for field in old.fields)


def skipping_columns(name: TableName) -> list[str]:
    """Columns whose bounds stand in the Delta log.

    The table says so itself: without it, delta-rs takes a bound that is not given for a null one, and its
    Arrow dataset (so DuckDB too) drops every file as soon as a filter names such a column.
    """
    return [column for column in STATISTICS_COLUMNS if column in SCHEMAS[name].names]


def take_rows(table: pa.Table, places: Sequence[int]) -> pa.Table:
    """The rows at these places, in this order.

    `Table.take` joins a column's chunks first, and Arrow's offsets end at 2 GiB: a shard's routed experts may be more.
    """
    if table.nbytes < TAKEN_AT_ONCE or not len(places):
        return table.take(pa.array(places, pa.int64()))
    return pa.concat_tables([table.slice(place, 1) for place in places]).combine_chunks()
