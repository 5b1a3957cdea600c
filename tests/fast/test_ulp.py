"""Distances in units in the last place: the order of floats, signed zeros, NaNs, and which unit is meant."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.parity.ulp import FAR, same_bits, ulp_distances, unit_of

UNITS = {"float32": np.float32, "float64": np.float64}
units = st.sampled_from(sorted(UNITS))
singles = st.floats(width=32, allow_nan=False)
doubles = st.floats(allow_nan=False)


def distance(a: float, b: float, unit: str) -> int:
    (found,) = ulp_distances(np.array([a]), np.array([b]), unit).tolist()
    return found


@given(singles, singles, units)
def test_it_is_symmetric_and_zero_for_equal_values_alone(a: float, b: float, unit: str):
    assert distance(a, b, unit) == distance(b, a, unit)
    assert (a == b) == (distance(a, b, unit) == 0)


@given(singles, st.integers(0, 50), units)
def test_it_counts_the_floats_in_between(a: float, steps: int, unit: str):
    kind, b = UNITS[unit], UNITS[unit](a)
    with np.errstate(over="ignore"):  # the greatest float's next one is infinite
        for _ in range(steps):
            b = np.nextafter(b, kind(math.inf))
    if math.isfinite(a) and math.isfinite(b):
        assert steps == distance(a, float(b), unit)


@given(st.lists(singles, min_size=3, max_size=3), units)
def test_it_grows_with_what_lies_between(values: list[float], unit: str):
    low, middle, high = sorted(values)
    parts = distance(low, middle, unit), distance(middle, high, unit)
    assert distance(low, high, unit) == min(sum(parts), FAR)
    assert distance(low, high, unit) >= max(parts)


@given(doubles, doubles)
def test_a_distance_in_float64_is_the_difference_of_ranks(a: float, b: float):
    assert distance(a, b, "float64") == min(abs(rank(a) - rank(b)), FAR)


def rank(value: float) -> int:
    bits = int(np.float64(value).view(np.int64))
    return bits if bits >= 0 else -(bits + 2**63)


@pytest.mark.parametrize("unit", UNITS)
def test_both_zeros_are_one_place_with_different_bits(unit: str):
    assert 0 == distance(-0.0, 0.0, unit)
    assert [False] == same_bits(np.array([-0.0]), np.array([0.0])).tolist()
    assert 2 == distance(
        -float(np.finfo(UNITS[unit]).smallest_subnormal), float(np.finfo(UNITS[unit]).smallest_subnormal), unit
    )


@pytest.mark.parametrize("unit", UNITS)
def test_a_nan_is_far_from_all_but_its_own_bits(unit: str):
    other = float(np.uint64(0x7FF8000000000001).view(np.float64))
    assert [0, FAR, FAR, FAR] == [distance(math.nan, b, unit) for b in (math.nan, other, 0.0, math.inf)]


@given(st.lists(singles, min_size=1), st.lists(doubles, min_size=1))
def test_the_unit_is_the_coarser_of_both_sides(left: list[float], right: list[float]):
    a, b = np.array(left), np.array(right)
    assert unit_of(a, b) == unit_of(b, a)
    if any(value != 0.0 for value in left):
        assert "float32" == unit_of(a, b)


def test_doubles_on_both_sides_are_measured_as_doubles():
    fine = np.array([-0.1, 0.0])
    assert "float64" == unit_of(fine, fine) == unit_of(fine, np.zeros(2))
    assert "float32" == unit_of(fine, np.float32([-0.1, 0.0]).astype(np.float64))
    assert 0 == distance(-0.1, float(np.float32(-0.1)), "float32"), "the double is rounded to what the other can show"
