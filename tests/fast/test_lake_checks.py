"""Rows of later checks in the parity table, and what live rows do to a batch's publication."""

import pyarrow as pa
import pytest
from lake_batch import NOW, ROW, parity_rows, plan_batch, publish, stage_all

from rollout.errors import ParityFailed
from rollout.lake import LakePaths, scan_parity
from rollout.lake.checks import record_check
from rollout.lake.publishing import publish_batch
from rollout.lake.schema import rows_to_table
from rollout.parity.validate import require_parity, summarize


@pytest.fixture
def paths(tmp_path) -> LakePaths:
    return LakePaths(tmp_path / "lake")


def check_rows(check: str, *verdicts: str, batch_id: str = "b1") -> pa.Table:
    rows = [
        {"batch_id": batch_id, "index": k, "rollout_key": k, "check": check, "verdict": verdict, "seconds": 1.0}
        for k, verdict in enumerate(verdicts)
    ]
    more = {"reason": "engine: v2 against v1", "paths": ["exchange[0].x"], "created_at": NOW, "schema_version": 1}
    return rows_to_table([{**row, **more} for row in rows], "parity")


def test_a_later_check_is_recorded_once_for_each_run(paths):
    plan = plan_batch()
    publish(paths, plan, stage_all(paths, plan))
    rows = check_rows("cross_engine", "differs", "equal")
    assert [False, True] == [record_check(paths, "b1", "cross_engine", "run1", rows).already for _ in range(2)]
    assert not record_check(paths, "b1", "cross_engine", "run2", rows).already
    found = scan_parity(paths, "b1").collect()
    assert {"replay": 12, "cross_engine": 4} == dict(found.group_by("check").len().rows())


@pytest.mark.parametrize(("batch_id", "check"), [("b2", "cross_engine"), ("b1", "live")])
def test_rows_of_another_batch_or_check_are_refused(paths, batch_id, check):
    with pytest.raises(ValueError, match="in the rows of"):
        record_check(paths, batch_id, check, "run1", check_rows("cross_engine", "equal"))


def test_live_rows_are_counted_apart_and_a_differing_one_holds_the_batch_back(paths):
    plan = plan_batch()
    replayed, live = parity_rows(plan), check_rows("live", "equal", "not_comparable", "differs")
    parity = pa.concat_tables([replayed, live])
    summary = summarize(parity)
    assert ({"equal": 12}, 12, 1.0) == (summary.verdicts, summary.n_rollouts, summary.share)
    assert {"differs": 1, "equal": 1, "not_comparable": 1} == summary.live
    assert {"engine": 1} == summary.live_reasons["differs"]
    message = r"live parity: 1 of 3 rollouts differ: rollout 2: engine: v2 against v1: exchange\[0\]\.x"
    with pytest.raises(ParityFailed, match=message):
        require_parity(parity, min_equal=1.0)
    with pytest.raises(ParityFailed, match="first index 2"):
        publish_batch(paths, plan, stage_all(paths, plan), parity, ROW)
    good = pa.concat_tables([replayed, check_rows("live", "equal", "not_comparable")])
    assert 1.0 == require_parity(good, min_equal=1.0).share
    assert not publish_batch(paths, plan, stage_all(paths, plan), good, ROW).already
