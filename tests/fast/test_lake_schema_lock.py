"""Lock test: the lake's four tables, literally. A column is added, never renamed, retyped or made nullable.

Readers of years-old batches rely on it; a change needs a reason in the commit message.
"""

import json

import pyarrow as pa
import pytest

from rollout.lake.schema import DELTA_SCHEMAS, SCHEMA_VERSIONS, SCHEMAS, TABLE_NAMES

SAMPLES = [
    "batch_id: string not null",
    "run_date: date32[day]",
    "shard: int32",
    "group_index: int64",
    "index: int64 not null",
    "attempt: int32 not null",
    "rollout_id: int64",
    "rollout_key: int64 not null",
    "sibling: int32 not null",
    "siblings: int32 not null",
    "sample_id: string not null",
    "prompt: string",
    "tokens: list<item: int32> not null",
    "response: string",
    "response_length: int32 not null",
    "loss_mask: list<item: int8> not null",
    "rollout_log_probs: list<item: double> not null",
    "status: string not null",
    "reward: double",
    "reward_json: string",
    "label: string",
    "weight_versions: list<item: string>",
    "weight_spans: list<item: struct<version: string, start: int32, end: int32>>",
    "cached_tokens: int64",
    "prompt_tokens: int64",
    "routed_experts: binary",
    "routed_experts_shape: list<item: int32>",
    "remove_sample: bool",
    "metadata: string",
    "train_metadata: string",
    "session_version: string",
    "agent: string",
    "turns: int32",
    "leaf_path: list<item: int32>",
    "picker: string",
    "finisher: string",
    "derived_from: string",
    "drift: string",
    "control_text: int32",
    "lora: string",
    "temperature: double",
    "top_p: double",
    "failure: struct<type: string, message: string>",
    "payload_digest: binary",
    "engine: struct<name: string, version: string, model: string, revision: string, policy_version: string, "
    "flags_hash: string, deterministic: bool, flags: list<item: string>>",
    "schema_version: int32 not null",
    "created_at: timestamp[us, tz=UTC] not null",
]
TRAJECTORIES = [
    "batch_id: string not null",
    "index: int64 not null",
    "attempt: int32 not null",
    "session_id: string not null",
    "seq: int32 not null",
    "parent: int32",
    "rolled_back: bool",
    "appended_messages: string",
    "respelled: string",
    "tools: string",
    "settings: string",
    "appended_ids: list<item: int32>",
    "output_ids: list<item: int32>",
    "output_log_probs: list<item: double>",
    "finish: string",
    "matched: string",
    "weight_version: string",
    "weight_spans: list<item: struct<version: string, start: int32, end: int32>>",
    "routed_experts: binary",
    "routed_experts_shape: list<item: int32>",
    "cached_tokens: int32",
    "sampling_seed: int64",
    "rid: string",
    "requested_at: timestamp[us, tz=UTC]",
    "committed_at: timestamp[us, tz=UTC]",
    "engine_seconds: double",
    "session: string",
    "schema_version: int32 not null",
]
PARITY = [
    "batch_id: string not null",
    "index: int64 not null",
    "rollout_key: int64 not null",
    "check: string not null",
    "verdict: string not null",
    "reason: string",
    "paths: list<item: string>",
    "versions: string",
    "engine_a: string",
    "engine_b: string",
    "first_token: int32",
    "max_ulp: int64",
    "seconds: double",
    "created_at: timestamp[us, tz=UTC] not null",
    "schema_version: int32 not null",
]
BATCHES = [
    "batch_id: string not null",
    "status: string not null",
    "run_date: date32[day]",
    "slot: string",
    "config: string",
    "config_hash: string not null",
    "n_prompts: int64",
    "n_rollouts: int64",
    "n_shards: int64",
    "counts: string",
    "reward_mean: double",
    "pass_at: string",
    "zero_spread_groups: int32",
    "tokens_prompt: int64",
    "tokens_cached: int64",
    "tokens_sampled: int64",
    "tokens_trained: int64",
    "seconds_wall: double",
    "seconds_engine: double",
    "seconds_parity: double",
    "seconds_held: double",
    "gpu_seconds: double",
    "tokens_per_gpu_second: double",
    "cached_share: double",
    "cost: double",
    "cost_per_trained_token: double",
    "provenance: string",
    "derived_from: string",
    "by: string",
    "why: string",
    "created_at: timestamp[us, tz=UTC] not null",
    "schema_version: int32 not null",
]
PINNED = {"samples": SAMPLES, "trajectories": TRAJECTORIES, "parity": PARITY, "batches": BATCHES}

DELTA_TYPES = {
    "string": "string",
    "date32[day]": "date",
    "int32": "integer",
    "int64": "long",
    "int8": "byte",
    "double": "double",
    "bool": "boolean",
    "binary": "binary",
    "timestamp[us, tz=UTC]": "timestamp",
}


@pytest.mark.parametrize("name", TABLE_NAMES)
def test_columns_types_and_nullability_are_pinned(name):
    assert PINNED[name] == [f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in SCHEMAS[name]]


def test_the_tables_and_their_versions_are_pinned():
    assert {"samples": 1, "trajectories": 1, "parity": 1, "batches": 1} == SCHEMA_VERSIONS
    assert ("samples", "trajectories", "parity", "batches") == TABLE_NAMES


@pytest.mark.parametrize("name", TABLE_NAMES)
def test_the_delta_form_has_the_same_columns(name):
    fields = json.loads(DELTA_SCHEMAS[name].to_json())["fields"]
    assert [(f.name, f.nullable) for f in SCHEMAS[name]] == [(f["name"], f["nullable"]) for f in fields]
    for arrow, delta in zip(SCHEMAS[name], fields, strict=True):
        if not pa.types.is_nested(arrow.type):
            assert DELTA_TYPES[str(arrow.type)] == delta["type"], arrow.name
        elif pa.types.is_list(arrow.type) and not pa.types.is_nested(arrow.type.value_type):
            assert {"type": "array", "elementType": DELTA_TYPES[str(arrow.type.value_type)], "containsNull": True} == (
                delta["type"]
            ), arrow.name


@pytest.mark.parametrize("name", TABLE_NAMES)
def test_there_are_no_unsigned_or_large_types(name):
    """Delta has no unsigned types: a u8 column beside a Delta schema cannot be read back."""
    text = str(SCHEMAS[name])
    assert "uint" not in text and "large" not in text and "float\n" not in text
