"""What a long fetch of a model says."""

import pytest

from rollout.batch import model_progress
from rollout.batch.model_progress import Progress


def test_files_are_counted_together_and_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch):
    clock, said = [0.0], []
    monkeypatch.setattr(model_progress.time, "monotonic", lambda: clock[0])
    progress = Progress("s3://b/m", 4_000_000_000, said.append)
    files = [progress.branched(name, name) for name in ("a", "b")]
    for at, file in ((1.0, 0), (4.0, 1), (5.0, 0), (10.0, 1)):
        clock[0] = at
        files[file].relative_update(1_000_000_000)
    assert said == [
        "fetching s3://b/m: 2.00 of 4.00 GB, 500 MB/s",
        "fetching s3://b/m: 4.00 of 4.00 GB, 400 MB/s",
    ]
