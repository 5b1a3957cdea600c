"""Lock tests of the two projections and the digest: what "the same rows" means must not drift.

A change here changes what parity proves, or every payload_digest that was ever written. It needs
a decision and a new schema version, not a mended test.
"""

from __future__ import annotations

import copy
from datetime import UTC, date, datetime

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from strategies import samples

from rollout.columns import PAYLOAD_FIELDS, SAMPLES_SCHEMA, BatchStamp, samples_to_table, table_to_samples
from rollout.errors import Failure
from rollout.parity.compare import diff_rows
from rollout.parity.projections import (
    PARITY,
    PAYLOAD,
    REPEATABLE,
    canonical_bytes,
    check_times,
    diff_projected,
    payload_digest,
    project,
    row_digest,
    same_rows,
)
from rollout.parity.rows import SAMPLE_COLUMNS, row_of, rows_of
from rollout.sample import Sample, Status, WeightSpan

STAMP = BatchStamp(
    batch_id="b",
    run_date=date(2026, 12, 2),
    shard=0,
    engine={"name": "embedded", "version": "1", "deterministic": True},
    created_at=datetime(2026, 12, 2, tzinfo=UTC),
)


def make(**changes) -> Sample:
    values = {
        "index": 5,
        "group_index": 1,
        "prompt": [{"role": "user", "content": "1+1"}],
        "tokens_T": np.array([1, 2, 3, 4], np.int32),
        "response": "2",
        "response_length": 2,
        "loss_mask_R": np.array([0, 1], np.int8),
        "rollout_log_probs_R": np.array([0.0, -0.5]),
        "status": Status.COMPLETED,
        "reward": 1.0,
        "weight_versions": ["w0"],
        "weight_spans": [WeightSpan(version="w0", start=1, end=2)],
        "cached_tokens": 3,
        "prompt_tokens": 2,
        "metadata": {"foo": 1, "lifecycle": {"t0": 1.5, "t1": 2.5, "turn": 1}, "leaf": {"node_id": 8}},
        "turns": 1,
    }
    return Sample(**{**values, **changes})


def to_table(*given_samples: Sample) -> pa.Table:
    return samples_to_table(given_samples, STAMP, [payload_digest(s) for s in given_samples])


def test_lock_parity_columns():
    assert PARITY == (
        "index",
        "group_index",
        "rollout_id",
        "rollout_key",
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
        "turns",
        "failure.type",
    )


def test_lock_repeatable_columns():
    assert REPEATABLE == (
        "index",
        "group_index",
        "rollout_id",
        "rollout_key",
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
        "prompt_tokens",
        "routed_experts",
        "routed_experts_shape",
        "remove_sample",
        "metadata",
        "train_metadata",
        "turns",
        "failure.type",
        "sibling",
        "siblings",
        "session_version",
        "picker",
        "finisher",
        "control_text",
        "temperature",
        "top_p",
    )


def test_payload_is_the_lakes_payload():
    assert tuple(field.name for field in PAYLOAD_FIELDS) == PAYLOAD


def test_every_column_of_the_lake_is_compared_or_named_as_the_batchs():
    stamped = {"batch_id", "run_date", "shard", "sample_id", "derived_from", "engine", "schema_version", "created_at"}
    apart = {"rollout_key", "payload_digest"}
    assert set(SAMPLES_SCHEMA.names) == set(SAMPLE_COLUMNS) | stamped | apart
    sample_fields = {
        name.rstrip("_TR") if name.endswith(("_T", "_R")) else name for name in Sample.__dataclass_fields__
    }
    assert sample_fields == set(SAMPLE_COLUMNS)


def test_lock_canonical_encoding():
    count = lambda n: n.to_bytes(8, "little")  # noqa: E731
    value = {"b": [None, True, False, -12, -0.5], "a": "ü", "é": b"x", "c": np.array([[1], [2]], np.int8)}
    assert canonical_bytes(value) == (
        b"M" + count(4)
        + b"S" + count(1) + b"a" + b"S" + count(2) + b"\xc3\xbc"
        + b"S" + count(1) + b"b" + b"L" + count(5) + b"N" + b"T" + b"F"
        + b"I" + count(3) + b"-12" + b"D" + b"\x00\x00\x00\x00\x00\x00\xe0\xbf"
        + b"S" + count(1) + b"c" + b"A" + count(3) + b"|i1" + count(2) + count(2) + count(1) + b"\x01\x02"
        + b"S" + count(2) + b"\xc3\xa9" + b"B" + count(1) + b"x"
    )  # fmt: skip
    with pytest.raises(TypeError):
        canonical_bytes((1,))


def test_lock_digest():
    assert "0f47bf2140a87b410ece69ab1bd774736be26282a170e32e03a8e09368e22d10" == payload_digest(make()).hex()


CHANGES = {
    "group_index": 2,
    "index": 6,
    "attempt": 1,
    "rollout_id": 0,
    "sibling": 1,
    "siblings": 2,
    "prompt": [{"role": "user", "content": "1+2"}],
    "tokens_T": np.array([1, 2, 3, 5], np.int32),
    "response": "3",
    "loss_mask_R": np.array([1, 1], np.int8),
    "rollout_log_probs_R": np.array([-0.0, -0.5]),
    "status": Status.TRUNCATED,
    "reward": 0.0,
    "reward_json": "{}",
    "label": "2",
    "weight_versions": ["w1"],
    "weight_spans": [WeightSpan(version="w0", start=0, end=2)],
    "cached_tokens": 4,
    "prompt_tokens": 3,
    "routed_experts": b"x",
    "routed_experts_shape": [1],
    "remove_sample": True,
    "metadata": {"foo": 2, "lifecycle": {"t0": 1.5, "t1": 2.5, "turn": 1}},
    "train_metadata": {},
    "session_version": "v1",
    "agent": "other",
    "turns": 2,
    "leaf_path": [0],
    "picker": "p",
    "finisher": "f",
    "drift": "[]",
    "control_text": 1,
    "lora": "l",
    "temperature": 0.0,
    "top_p": 0.5,
    "failure": Failure(type="deadline", message="late"),
}
COLUMN = {"tokens_T": "tokens", "loss_mask_R": "loss_mask", "rollout_log_probs_R": "rollout_log_probs"}


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_moves_the_projections_that_name_it_and_the_digest(field):
    a, b = make(siblings=2), make(**{"siblings": 2, field: CHANGES[field]})
    if field == "siblings":
        a = make()
    column = COLUMN.get(field, field)
    for columns in (PARITY, REPEATABLE):
        counts = column in columns or (column == "failure" and "failure.type" in columns)
        paths = diff_projected(row_of(a), row_of(b), columns)
        assert counts == bool(paths)
    assert (payload_digest(a) != payload_digest(b)) == bool(paths)


def test_a_failures_message_is_in_neither():
    a = make(failure=Failure(type="deadline", message="a"))
    b = make(failure=Failure(type="deadline", message="b"))
    assert [] == diff_projected(row_of(a), row_of(b), PARITY)
    assert payload_digest(a) == payload_digest(b)


@pytest.mark.parametrize(
    ("lifecycle", "path"),
    [
        ({"t0": 9.0, "t1": 8, "turn": 1}, None),
        ({"t0": None, "t1": 8.0, "turn": 1}, "sample.metadata.lifecycle.t0: '<time>' != None"),
        ({"t0": 9.0, "turn": 1}, "sample.metadata.lifecycle.t1: '<time>' != <absent>"),
        ({"t0": 9.0, "t1": 1.0, "turn": 2}, "sample.metadata.lifecycle.turn: 1 != 2"),
        ({"t0": 9.0, "t1": 1.0, "turn": 1, "req_ts": 3.0}, "sample.metadata.lifecycle.req_ts: <absent> != '<time>'"),
        ({"t0": "x", "t1": 1.0, "turn": 1}, "sample.metadata.lifecycle.t0: '<time>' != 'x'"),
        ({"t0": True, "t1": 1.0, "turn": 1}, "sample.metadata.lifecycle.t0: '<time>' != True"),
    ],
)
def test_lifecycle_times_are_masked_and_their_presence_is_not(lifecycle, path):
    a, b = make(), make(metadata={"foo": 1, "lifecycle": lifecycle})
    for columns in (PARITY, REPEATABLE):
        assert ([] if path is None else [path]) == diff_projected(row_of(a), row_of(b), columns)


def test_a_time_that_is_none_is_found_even_if_both_have_it():
    bad = make(metadata={"lifecycle": [{"t0": 1.0}, {"t0": "never", "t1": None}]})
    assert ["sample.metadata.lifecycle[1].t0: 'never' is not a finite time"] == check_times(row_of(bad))
    infinite = row_of(bad)
    infinite["metadata"] = {"lifecycle": {"t1": float("inf")}}
    assert ["sample.metadata.lifecycle.t1: inf is not a finite time"] == diff_projected(infinite, infinite, PARITY)


def test_ids_of_the_run_are_left_out_of_metadata():
    a = make(metadata={"foo": 1, "session_id": "a", "response_id": "b", "leaf": {"node_id": 1}})
    assert {"foo": 1} == project(row_of(a), PARITY)["metadata"]


@given(samples())
def test_a_sample_read_back_from_arrow_is_the_same_row_with_the_same_digest(sample: Sample):
    (back,) = table_to_samples(to_table(sample))
    assert [] == diff_rows(row_of(sample), row_of(back), (*SAMPLE_COLUMNS, "rollout_key"))
    (row,) = rows_of(to_table(sample))
    assert row["payload_digest"] == payload_digest(sample) == row_digest(row)
    assert 32 == len(row["payload_digest"])


@given(samples(), samples())
def test_two_digests_agree_exactly_where_the_projection_does(a: Sample, b: Sample):
    differs = bool(diff_projected(row_of(a), row_of(b), REPEATABLE))
    assert differs == (payload_digest(a) != payload_digest(b))


def test_digest_does_not_depend_on_key_order():
    a = make(metadata=orjson.loads(b'{"a": 1, "b": [{"x": 1, "y": 2}]}'))
    b = make(metadata=orjson.loads(b'{"b": [{"y": 2, "x": 1}], "a": 1}'))
    assert payload_digest(a) == payload_digest(b)


def test_same_rows_pairs_by_index_and_sibling_and_ignores_what_cannot_repeat():
    first, second = make(index=1, siblings=2), make(index=1, sibling=1, siblings=2)
    again = [copy.deepcopy(second), copy.deepcopy(first)]
    for sample in again:
        sample.attempt, sample.cached_tokens = 1, 99
        sample.metadata["lifecycle"]["t1"] = 77.0
    assert [] == same_rows(to_table(first, second), to_table(*again))


def test_same_rows_names_missing_doubled_and_changed_rows():
    a = to_table(make(index=0), make(index=1), make(index=2), make(index=3))
    b = to_table(make(index=0, reward=0.5), make(index=2), make(index=2), make(index=4))
    assert [
        "row[0,0].reward: 0x3ff0000000000000 (1.0) != 0x3fe0000000000000 (0.5)",
        "row[1,0]: 1 rows != 0 rows, want one each",
        "row[2,0]: 1 rows != 2 rows, want one each",
        "row[3,0]: 1 rows != 0 rows, want one each",
        "row[4,0]: 0 rows != 1 rows, want one each",
    ] == same_rows(a, b)
