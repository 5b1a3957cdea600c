"""Rows to compare: samples and table rows as plain dicts by the lake's column names.

A row holds what the parquet file holds, so a sample in memory and the same sample read back are
one row: JSON columns are taken through JSON once, enums are text, structs are dicts.
"""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa

from rollout.columns import table_to_samples
from rollout.identity import resolve_rollout_key
from rollout.sample import Sample

Row = dict[str, Any]

SAMPLE_COLUMNS = (
    "group_index",
    "index",
    "attempt",
    "rollout_id",
    "sibling",
    "siblings",
    "prompt",
    "tokens",
    "response",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "status",
    "reward",
    "reward_json",
    "label",
    "weight_versions",
    "weight_spans",
    "cached_tokens",
    "prompt_tokens",
    "routed_experts",
    "routed_experts_shape",
    "remove_sample",
    "metadata",
    "train_metadata",
    "session_version",
    "agent",
    "turns",
    "leaf_path",
    "picker",
    "finisher",
    "drift",
    "control_text",
    "lora",
    "temperature",
    "top_p",
    "failure",
)
"""Every column of a row that its rollout decides. `rollout_key` follows from two of them; the others
are the batch's stamp and the digest."""


def row_of(sample: Sample) -> Row:
    """A sample as a row: SAMPLE_COLUMNS, and the `rollout_key` that follows from its identity.

    Raises:
        TypeError: metadata or prompt holds what JSON has not (as writing the row would).
    """
    index = sample.index
    return {
        "group_index": sample.group_index,
        "index": index,
        "attempt": sample.attempt,
        "rollout_id": sample.rollout_id,
        "rollout_key": sample.rollout_id if index is None else resolve_rollout_key(sample.rollout_id, index),
        "sibling": sample.sibling,
        "siblings": sample.siblings,
        "prompt": _as_stored(sample.prompt),
        "tokens": sample.tokens_T,
        "response": sample.response,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask_R,
        "rollout_log_probs": sample.rollout_log_probs_R,
        "status": str(sample.status),
        "reward": sample.reward,
        "reward_json": sample.reward_json,
        "label": sample.label,
        "weight_versions": sample.weight_versions,
        "weight_spans": [{"version": s.version, "start": s.start, "end": s.end} for s in sample.weight_spans],
        "cached_tokens": sample.cached_tokens,
        "prompt_tokens": sample.prompt_tokens,
        "routed_experts": sample.routed_experts,
        "routed_experts_shape": sample.routed_experts_shape,
        "remove_sample": sample.remove_sample,
        "metadata": _as_stored(sample.metadata),
        "train_metadata": None if sample.train_metadata is None else _as_stored(sample.train_metadata),
        "session_version": sample.session_version,
        "agent": sample.agent,
        "turns": sample.turns,
        "leaf_path": sample.leaf_path,
        "picker": sample.picker,
        "finisher": sample.finisher,
        "drift": sample.drift,
        "control_text": sample.control_text,
        "lora": sample.lora,
        "temperature": sample.temperature,
        "top_p": sample.top_p,
        "failure": None if sample.failure is None else {"type": sample.failure.type, "message": sample.failure.message},
    }


def rows_of(table: pa.Table) -> list[Row]:
    """The rows of a samples table, in its order, with `rollout_key` and `payload_digest` as stored."""
    rows = [row_of(sample) for sample in table_to_samples(table)]
    keys = table.column("rollout_key").to_pylist()
    digests = table.column("payload_digest").to_pylist()
    for row, key, digest in zip(rows, keys, digests, strict=True):
        row["rollout_key"] = key
        row["payload_digest"] = digest
    return rows


def _as_stored(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))
