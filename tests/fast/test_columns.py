"""The one row builder: what it refuses, and that it gives back what it was given."""

from datetime import UTC, date, datetime

import numpy as np
import pytest

from rollout import columns
from rollout.columns import BatchStamp, samples_to_table, session_table, table_to_samples
from rollout.sample import Sample, Status


def stamp(created_at=datetime(2026, 12, 2, tzinfo=UTC)) -> BatchStamp:
    return BatchStamp(batch_id="b", run_date=date(2026, 12, 2), shard=0, engine={}, created_at=created_at)


def make(log_probs, **changes) -> Sample:
    return Sample(
        tokens_T=np.arange(len(log_probs) + 1, dtype=np.int32),
        response_length=len(log_probs),
        loss_mask_R=np.ones(len(log_probs), np.int8),
        rollout_log_probs_R=np.array(log_probs),
        status=Status.COMPLETED,
        **{"index": 0, **changes},
    )


def test_values_beyond_what_offsets_can_count_are_refused_and_never_wrap(monkeypatch):
    """The real limit is 2^31 - 1; the test lowers it, because the fault would need 8 GiB to show."""
    monkeypatch.setattr(columns, "MAX_VALUES", 5)
    samples_to_table([make([-1.0, -1.0])], stamp(), [b""])
    with pytest.raises(ValueError, match="6 values in one column, 5 is the limit; make shards smaller"):
        samples_to_table([make([-1.0, -1.0]), make([-1.0, -1.0], index=1)], stamp(), [b"", b""])


def test_a_row_without_index_and_a_naive_time_are_refused():
    with pytest.raises(ValueError, match="index: a row of the lake needs one"):
        samples_to_table([make([-1.0], index=None)], stamp(), [b""])
    with pytest.raises(ValueError, match="created_at: a naive timestamp"):
        samples_to_table([make([-1.0])], stamp(datetime(2026, 12, 2)), [b""])


def test_per_token_columns_come_back_with_their_bits():
    before = make([-0.0, -1e-300, np.nextafter(-1.0, 0.0)])
    (after,) = table_to_samples(session_table([before]))
    assert before.rollout_log_probs_R.tobytes() == after.rollout_log_probs_R.tobytes()
    assert before.tokens_T.tobytes() == after.tokens_T.tobytes()
    assert (np.int32, np.int8) == (after.tokens_T.dtype, after.loss_mask_R.dtype)
