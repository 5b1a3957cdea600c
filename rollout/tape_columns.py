"""The trajectories table's Arrow columns: one row per exchange, and one (seq -1) per session."""

from __future__ import annotations

import pyarrow as pa

from rollout.columns import TIMESTAMP, WEIGHT_SPANS, required

TAPE_FIELDS = [
    required("session_id", pa.string()),
    required("seq", pa.int32()),
    pa.field("parent", pa.int32()),
    pa.field("rolled_back", pa.bool_()),
    pa.field("appended_messages", pa.string()),
    pa.field("respelled", pa.string()),
    pa.field("tools", pa.string()),
    pa.field("settings", pa.string()),
    pa.field("appended_ids", pa.list_(pa.int32())),
    pa.field("output_ids", pa.list_(pa.int32())),
    pa.field("output_log_probs", pa.list_(pa.float64())),
    pa.field("finish", pa.string()),
    pa.field("matched", pa.string()),
    pa.field("weight_version", pa.string()),
    pa.field("weight_spans", WEIGHT_SPANS),
    pa.field("routed_experts", pa.binary()),
    pa.field("routed_experts_shape", pa.list_(pa.int32())),
    pa.field("cached_tokens", pa.int32()),
    pa.field("sampling_seed", pa.int64()),
    pa.field("rid", pa.string()),
    pa.field("requested_at", TIMESTAMP),
    pa.field("committed_at", TIMESTAMP),
    pa.field("engine_seconds", pa.float64()),
    pa.field("session", pa.string()),
]
TAPE_SCHEMA = pa.schema(TAPE_FIELDS)
"""One session's tape as the session server answers it (GET /sessions/{id}/tape)."""

TRAJECTORIES_SCHEMA = pa.schema(
    [
        required("batch_id", pa.string()),
        required("index", pa.int64()),
        required("attempt", pa.int32()),
        *TAPE_FIELDS,
        required("schema_version", pa.int32()),
    ]
)
"""The trajectories table, schema version 1."""
