"""What a sample refuses about itself."""

import numpy as np
import pytest

from rollout.errors import Failure
from rollout.sample import InvalidSample, Sample, Status, WeightSpan, empty_sample


def make(**changes) -> Sample:
    values = {
        "tokens_T": np.array([1, 2, 3, 4], np.int32),
        "response_length": 2,
        "loss_mask_R": np.array([0, 1], np.int8),
        "rollout_log_probs_R": np.array([0.0, -0.5]),
        "status": Status.COMPLETED,
        "index": 0,
    }
    return Sample(**{**values, **changes})


def test_a_good_sample_and_an_empty_one_are_accepted():
    make().validate()
    empty_sample().validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_T": np.array([1, 2, 3], np.int64)}, r"tokens: int64"),
        ({"tokens_T": np.array([[1, 2]], np.int32)}, r"tokens: int32 with 2 dimensions"),
        ({"tokens_T": np.array([1, -1, 3], np.int32)}, "tokens: an id is negative"),
        ({"rollout_log_probs_R": np.array([0.0, -0.5], np.float32)}, "rollout_log_probs: float32"),
        ({"response_length": 5}, r"response_length: 5 is not within 0\.\.4"),
        ({"response_length": 3}, "loss_mask: 2 entries, response_length is 3"),
        ({"loss_mask_R": np.array([0, 2], np.int8)}, "loss_mask: only 0 and 1"),
        ({"loss_mask_R": np.array([0, -1], np.int8)}, "loss_mask: only 0 and 1"),
        ({"rollout_log_probs_R": np.array([0.0, np.nan])}, "rollout_log_probs: a value is not finite"),
        ({"rollout_log_probs_R": np.array([0.0])}, "rollout_log_probs: 1 entries, response_length is 2"),
        ({"reward": float("nan")}, "reward: nan is not finite"),
        ({"sibling": 1}, r"sibling: 1 is not within 0\.\.0"),
        ({"weight_spans": [WeightSpan(version="a", start=0, end=3)]}, r"weight_spans: \[0, 3\)"),
        ({"failure": Failure(type="deadline", message="")}, "failure: a failed rollout has no reward"),
        (
            {"failure": Failure(type="deadline", message=""), "remove_sample": True, "reward": 0.0},
            "failure: a failed rollout has no reward",
        ),
    ],
)
def test_a_contradiction_is_refused_by_name(changes, message):
    with pytest.raises(InvalidSample, match=message):
        make(**changes).validate()
