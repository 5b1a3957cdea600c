"""A batch that is asked to stop leaves no process, says how to go on, and goes on."""

import signal
from pathlib import Path

import pytest
from command import reach

from rollout.lake import scan_samples


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="INT"),
        pytest.param(signal.SIGTERM, 143, id="TERM", marks=pytest.mark.full),
    ],
)
def test_a_stopped_batch_goes_on(quick_rollout, batch_command, tmp_path: Path, number: int, code: int):
    lake = tmp_path / "lake"
    run = quick_rollout.start(*batch_command, "--lake", lake, "--concurrency", 2)
    lines = reach(run, "rolling out", 1.0)
    assert code == run.end(number)
    assert [] == run.left_over()
    assert "stopped; `rollout run --batch-id mine" in lines[-1] and "Traceback" not in "".join(lines)
    assert not (lake / "tables").exists()
    quick_rollout.succeeds("run", "--batch-id", "mine", "--lake", lake)
    assert set(range(32)) == set(scan_samples(lake, batch="mine").collect()["index"])
