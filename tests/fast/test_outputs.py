"""The first difference of two outputs: the token where they part, and the log-prob bit before it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.parity.outputs import compare_outputs

outputs = st.lists(st.tuples(st.integers(0, 3), st.floats(-20, 0)), min_size=1, max_size=12)


def arrays(output):
    return np.array([i for i, _ in output], np.int32), np.array([p for _, p in output], np.float64)


def compare(a, b):
    return compare_outputs(*arrays(a), *arrays(b))


@given(outputs)
def test_an_output_equals_itself(output):
    found = compare(output, output)
    assert found.equal and (0, 0.0, "") == (found.max_ulp, found.largest, found.path)
    assert len(output) == len(found.ulps_S)


@given(outputs, outputs)
def test_the_first_differences_are_those_that_a_loop_finds(a, b):
    found = compare(a, b)
    shared = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x[0] != y[0]), min(len(a), len(b)))
    assert shared == len(found.ulps_S)
    assert found.first_token == (shared if shared < max(len(a), len(b)) else None)
    moved = [k for k in range(shared) if np.float64(a[k][1]).tobytes() != np.float64(b[k][1]).tobytes()]
    assert found.first_log_prob == (moved[0] if moved else None)
    assert found.equal == (found.path == "")


@given(outputs, st.data())
def test_one_flipped_bit_is_found_where_it_is(output, data):
    place = data.draw(st.integers(0, len(output) - 1))
    ids, log_probs = arrays(output)
    flipped = log_probs.copy()
    flipped.view(np.int64)[place] ^= 1
    found = compare_outputs(ids, log_probs, ids, flipped)
    assert (None, place) == (found.first_token, found.first_log_prob)
    assert found.path.startswith(f"output_log_probs[{place}]: 0x")


def test_an_output_that_goes_on_parts_where_the_other_ended():
    found = compare([(1, -0.5), (2, -0.5)], [(1, -0.5), (2, -0.5), (7, -0.1)])
    assert (2, "output_ids[2]: <end> != 7") == (found.first_token, found.path)
