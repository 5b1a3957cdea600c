"""The GPU lanes' dry runs, and their count: a lane that ran no check has failed."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANE = ROOT / "infra" / "h200" / "lane"


def _lane(*given: str, kind: str = "bare", sglang: Path | None = None) -> subprocess.CompletedProcess[str]:
    named = [] if sglang is None else [f"ROLLOUT_SGLANG_PYTHON={sglang}"]
    argv = ["env", f"PYTHON={sys.executable}", *named, str(LANE), kind, "--dry-run", *given]
    return subprocess.run(argv, capture_output=True, text=True, timeout=280)


@pytest.mark.full
def test_the_dry_run_passes_every_check():
    done = _lane()
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "9/9 passed" == done.stdout.splitlines()[-1]
    assert "--device cuda --grow qwen3-8b" in done.stdout


@pytest.mark.full
def test_the_reference_lanes_dry_run_passes_every_check(sglang_python: Path):
    done = _lane(kind="reference", sglang=sglang_python)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "7/7 passed" == done.stdout.splitlines()[-1]
    assert "recipe='qwen3_8b_h200'" in done.stdout and "inputs=16" in done.stdout
    assert 4 == done.stdout.count("is the same bits on v1 and v2")


def test_the_reference_lane_without_sglang_has_failed(tmp_path: Path):
    done = _lane(kind="reference", sglang=tmp_path / "nowhere")
    assert (1, "1/7 passed") == (done.returncode, done.stdout.splitlines()[-1])
    assert "reference ended with NoSGLang" in done.stdout


def test_the_reference_lane_wants_a_checkpoint_of_its_revision(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from infra.h200.reference import REVISION, find_revision

    cached, loose = tmp_path / "snapshots" / REVISION, tmp_path / "loose"
    notes = loose / ".cache" / "huggingface" / "download"
    cached.mkdir(parents=True)
    (notes / "deep").mkdir(parents=True)
    assert [REVISION, None] == [find_revision(cached), find_revision(loose)]
    for name in ("config.json.metadata", "deep/model.safetensors.metadata"):
        (notes / name).write_text(f"{REVISION}\netag\n1700000000.0\n")
    assert REVISION == find_revision(loose)
    (notes / "other.metadata").write_text(f"{'0' * 40}\netag\n")
    assert find_revision(loose) is None, "files of two commits are none"
    done = subprocess.run(["env", f"PYTHON={sys.executable}", str(LANE), "reference"], capture_output=True, text=True)
    assert 2 == done.returncode and "reference needs --model DIR or --dry-run" in done.stderr


@pytest.mark.parametrize("kind", ["bare", "reference"])
def test_a_lane_that_ran_nothing_has_failed(kind: str):
    done = _lane("--parts", "none", kind=kind)
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
