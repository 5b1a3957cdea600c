"""Bit comparison: what counts as equal, and the exact paths of what does not."""

from __future__ import annotations

import copy
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import all_doubles, json_values, samples

from rollout.parity.compare import MAX_POSITIONS, diff_samples, diff_values
from rollout.sample import Sample


def with_bit(value: float, bit: int) -> float:
    (number,) = struct.unpack("<Q", struct.pack("<d", value))
    return float(struct.unpack("<d", struct.pack("<Q", number ^ (1 << bit)))[0])


@pytest.mark.parametrize(
    ("left", "right", "paths"),
    [
        (None, 0, ["x: None != 0"]),
        (1, True, ["x: 1 != True"]),
        (1, 1.0, ["x: 1 != 0x3ff0000000000000 (1.0)"]),
        (0.0, -0.0, ["x: 0x0000000000000000 (0.0) != 0x8000000000000000 (-0.0)"]),
        ("a", b"a", ["x: 'a' != b'a'"]),
        ("a", "b", ["x: 'a' != 'b'"]),
        (2**80, 2**80 + 1, [f"x: {2**80} != {2**80 + 1}"]),
        ([1, 2], [1, 3, 4], ["x: length 2 != 3", "x[1]: 2 != 3"]),
        ([1, 2], [2, 1], ["x[0]: 1 != 2", "x[1]: 2 != 1"]),
        ({"a": 1}, {"b": 1}, ["x.a: 1 != <absent>", "x.b: <absent> != 1"]),
        ({"a": {"b": [0, 1]}}, {"a": {"b": [0, 2]}}, ["x.a.b[1]: 1 != 2"]),
        ([], {}, ["x: [] != {}"]),
        (np.zeros(2, np.int8), np.zeros(2, np.int32), ["x: dtype int8 != int32"]),
        (np.zeros((2, 1)), np.zeros((1, 2)), ["x: shape (2, 1) != (1, 2)"]),
        (np.array([1, 2, 3]), np.array([1, 5]), ["x: length 3 != 2", "x[1]: 2 != 5"]),
        (np.array([0.0, 1.0]), np.array([-0.0, 1.0]), ["x[0]: 0x0000000000000000 (0.0) != 0x8000000000000000 (-0.0)"]),
        (np.array([[1, 2]]), np.array([[1, 3]]), ["x[0,1]: 2 != 3"]),
        (np.array(1), np.array(2), ["x[]: 1 != 2"]),
        (np.array([1.0], np.float32), np.array([2.0], np.float32), ["x[0]: 0x3f800000 (1.0) != 0x40000000 (2.0)"]),
        (
            np.array([1.0], ">f8"),
            np.array([2.0], ">f8"),
            ["x[0]: 0x3ff0000000000000 (1.0) != 0x4000000000000000 (2.0)"],
        ),
        (np.array([1.0], ">f8"), np.array([1.0], "<f8"), ["x: dtype >f8 != float64"]),
        (np.array([True]), np.array([False]), ["x[0]: True != False"]),
        (
            np.array([1j]),
            np.array([2j]),
            [f"x[0]: 0x{np.array([1j]).tobytes().hex()} != 0x{np.array([2j]).tobytes().hex()}"],
        ),
    ],
)
def test_paths(left, right, paths):
    assert paths == diff_values(left, right, "x")


def test_dict_order_does_not_count():
    assert [] == diff_values({"a": 1, "b": [2]}, {"b": [2], "a": 1}, "x")


def test_nan_payloads_count():
    quiet = float("nan")
    other = with_bit(quiet, 3)
    assert [] == diff_values(quiet, quiet, "x")
    assert 1 == len(diff_values(quiet, other, "x"))
    assert [] == diff_values(np.array([quiet]), np.array([quiet]), "x")
    assert 1 == len(diff_values(np.array([quiet]), np.array([other]), "x"))


@pytest.mark.parametrize("value", [(1,), {1}, np.float64(1.0), np.array([None]), object()])
def test_foreign_types_are_refused(value):
    with pytest.raises(TypeError):
        diff_values(value, copy.copy(value), "x")


def test_long_runs_are_cut_with_their_count():
    zeros, ones = np.zeros(100, np.int32), np.ones(100, np.int32)
    paths = diff_values(zeros, ones, "x")
    assert MAX_POSITIONS + 1 == len(paths)
    assert "x: 84 more positions differ" == paths[-1]
    assert paths == diff_values(zeros.tolist(), ones.tolist(), "x")
    assert "x: 1 more position differs" == diff_values([0] * 17, [1] * 17, "x")[-1]


def test_long_texts_show_where_they_part():
    a, b = "x" * 100 + "left" + "y" * 100, "x" * 100 + "right" + "y" * 100
    (path,) = diff_values(a, b, "sample.response")
    assert path.startswith("sample.response: ")
    assert "left" in path and "right" in path and "(from character 88; 204 and 205 characters)" in path


def test_strided_arrays_compare_by_their_items():
    base = np.arange(10)
    assert [] == diff_values(base[::2], np.array([0, 2, 4, 6, 8]), "x")
    assert ["x[1]: 2 != 3"] == diff_values(base[::2], np.array([0, 3, 4, 6, 8]), "x")


@given(json_values)
def test_a_value_equals_its_copy(value):
    assert [] == diff_values(value, copy.deepcopy(value), "x")


@given(json_values, json_values)
def test_comparison_is_symmetric(a, b):
    assert bool(diff_values(a, b, "x")) == bool(diff_values(b, a, "x"))


@given(all_doubles, st.integers(0, 63))
def test_any_flipped_bit_of_a_double_is_seen(value, bit):
    other = with_bit(value, bit)
    if struct.pack("<d", other) == struct.pack("<d", value):
        return  # the platform quieted a signalling NaN: the same bits
    assert 1 == len(diff_values(value, other, "x"))
    assert 1 == len(diff_values([value], [other], "x"))


@given(st.integers(1, 300), st.data())
def test_any_flipped_bit_of_an_array_is_found_at_its_place(size, data):
    dtype = data.draw(st.sampled_from(["<i4", "<i1", "<f8", "<f4", "<i8", "<u2"]))
    values = np.frombuffer(data.draw(st.binary(min_size=size * 8, max_size=size * 8)), dtype)[:size]
    raw = bytearray(values.tobytes())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    flipped = np.frombuffer(bytes(raw), dtype)
    (path,) = diff_values(values, flipped, "x")
    assert path.startswith(f"x[{bit // 8 // values.dtype.itemsize}]: ")
    assert [] == diff_values(values, values.copy(), "x")


@given(samples())
def test_a_sample_equals_its_copy(sample: Sample):
    assert [] == diff_samples(sample, copy.deepcopy(sample))


@given(samples(), samples())
def test_two_samples_differ_somewhere_or_share_all_bits(a: Sample, b: Sample):
    paths = diff_samples(a, b)
    assert all(path.startswith("sample.") for path in paths)
    same_tokens = a.tokens_T.tobytes() == b.tokens_T.tobytes()
    assert same_tokens == (not any(p.startswith("sample.tokens") for p in paths))


def test_diff_samples_names_lake_columns():
    a = Sample(
        index=3,
        tokens_T=np.array([1, 2, 3], np.int32),
        response_length=2,
        loss_mask_R=np.array([1, 0], np.int8),
        rollout_log_probs_R=np.array([-0.5, 0.0]),
        status="completed",
        metadata={"foo": 1},
    )
    b = copy.deepcopy(a)
    b.rollout_id = 0
    b.rollout_log_probs_R[1] = -0.0
    b.metadata["foo"] = 2
    assert [
        "sample.rollout_id: None != 0",
        "sample.rollout_log_probs[1]: 0x0000000000000000 (0.0) != 0x8000000000000000 (-0.0)",
        "sample.metadata.foo: 1 != 2",
    ] == diff_samples(a, b)
