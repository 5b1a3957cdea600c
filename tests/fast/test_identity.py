"""Lock tests: the identity rule. Change one only with a reason in the commit message."""

import pytest

from rollout.identity import NO_IDENTITY, resolve_rollout_id, resolve_rollout_key, sample_id


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("given", [None, 0, 7, 2**62])
@pytest.mark.parametrize("index", [None, 0, 5])
def test_a_singleton_of_either_version_leaves_rollout_id_as_the_input_had_it(version, given, index):
    assert given == resolve_rollout_id(version, 1, input_rollout_id=given, input_index=index)


@pytest.mark.parametrize("n_samples", [2, 3, 9])
@pytest.mark.parametrize("given", [0, 7])
def test_several_v2_leaves_share_the_inputs_rollout_id(n_samples, given):
    assert given == resolve_rollout_id("v2", n_samples, input_rollout_id=given, input_index=5)


@pytest.mark.parametrize("index", [0, 5])
def test_several_v2_leaves_without_an_id_share_the_inputs_index(index):
    assert index == resolve_rollout_id("v2", 2, input_rollout_id=None, input_index=index)


def test_zero_is_an_id_and_an_index():
    """G12: `or` would turn rollout_id 0 into the index, and index 0 into None."""
    assert resolve_rollout_id("v2", 2, input_rollout_id=0, input_index=5) == 0
    assert resolve_rollout_id("v2", 2, input_rollout_id=None, input_index=0) == 0
    assert resolve_rollout_key(0, 5) == 0
    assert resolve_rollout_key(None, 0) == 0


def test_several_leaves_with_neither_id_nor_index_are_an_error():
    with pytest.raises(ValueError) as caught:
        resolve_rollout_id("v2", 2, input_rollout_id=None, input_index=None)
    assert str(caught.value) == NO_IDENTITY
    assert NO_IDENTITY == "v2 agentic samples require input Sample.rollout_id or Sample.index"


def test_v1_never_gives_several_samples():
    with pytest.raises(ValueError, match="a v1 session gives one sample, not 2"):
        resolve_rollout_id("v1", 2, input_rollout_id=3, input_index=3)


@pytest.mark.parametrize(("rollout_id", "index", "key"), [(None, 7, 7), (3, 7, 3), (0, 7, 0)])
def test_rollout_key_is_the_id_or_else_the_index_and_never_null(rollout_id, index, key):
    assert key == resolve_rollout_key(rollout_id, index)


def test_sample_id_names_batch_key_and_sibling():
    """Pinned: ids that are written to a lake must not change with the package."""
    assert sample_id("nightly", 7, 0) == "ba5b1ed80a68aad11fc8184a59b8e784"
    names = {sample_id(b, k, s) for b in ("a", "a1") for k in (1, 11) for s in (0, 1)}
    assert len(names) == 8
