"""The GPU lane's dry run, and its count: a lane that ran no check has failed."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANE = ROOT / "infra" / "h200" / "lane"


def _lane(*given: str) -> subprocess.CompletedProcess[str]:
    argv = ["env", f"PYTHON={sys.executable}", str(LANE), "bare", "--dry-run", *given]
    return subprocess.run(argv, capture_output=True, text=True, timeout=280)


@pytest.mark.full
def test_the_dry_run_passes_every_check():
    done = _lane()
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "9/9 passed" == done.stdout.splitlines()[-1]
    assert "--device cuda --grow qwen3-8b" in done.stdout


def test_a_lane_that_ran_nothing_has_failed():
    done = _lane("--parts", "none")
    assert (1, "0/0 passed") == (done.returncode, done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("makes", "good", "needs"), [(0, True, ()), (1, True, ()), (2, False, ()), (2, True, ("no_such",))]
)
def test_a_part_that_falls_short_has_failed(makes: int, good: bool, needs: tuple[str, ...], monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from infra.h200.tally import Part, Tally, run_parts

    async def run(state: None, tally: Tally) -> None:
        for _ in range(makes):
            tally.check("one", good)

    part = Part(name="part", checks=2, needs=needs, run=run)
    assert 1 == asyncio.run(run_parts([part], None, Tally()))
