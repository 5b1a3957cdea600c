"""All recorded conversations of the reference hold against the real server process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vocabulary import fetch

VECTORS = Path(__file__).parent.parent / "vectors"


@pytest.mark.timeout(280)
def test_all_240_recorded_conversations_hold() -> None:
    start = f"{sys.executable} -m rollout.session.server --port {{port}} --engine {{engine}} --tokenizer {fetch()}"
    checker = [sys.executable, str(VECTORS / "check.py"), str(VECTORS / "reference.jsonl.gz")]
    done = subprocess.run([*checker, "--start", start, "--json"], capture_output=True, text=True)
    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (240, []) == (result["passed"], result["failed"][:5])
