"""The real `rollout doctor` with the embedded engine: all in order, nothing left behind, no Prefect imported."""

import json
from pathlib import Path

import pytest
from command import Rollout
from embedded_checkpoints import make_checkpoint


def test_all_is_in_order(quick_rollout: Rollout, tmp_path: Path):
    run = quick_rollout.start("doctor", "--json")
    done = run.wait()
    assert (0, "") == (done.returncode, done.stderr), done.stdout
    found = json.loads(done.stdout)
    assert {"ok": len(found["checks"]), "warn": 0, "fail": 0} == found["counts"]
    whats = {check["what"] for check in found["checks"]}
    assert {"packages", "special tokens", "prompt ids", "engine", "generate", "repeats", "sessions"} <= whats
    assert {"lake", "tables", "clock", "disk", "prefect", "parts"} <= whats
    assert [] == run.left_over() and [] == list(tmp_path.iterdir())


def test_a_person_reads_a_line_per_check(finished, quick_rollout: Rollout):
    lines = quick_rollout.succeeds("doctor", "--lake", finished[0]).splitlines()
    assert "0 failed, 0 to look at" in lines[-1]
    assert {"ok"} == {line.split()[0] for line in lines[:-2]}
    assert any("samples 1" in line for line in lines)


@pytest.mark.parametrize("spoil", ["tokenizer", "weights"])
def test_a_checkpoint_that_cannot_be_used(quick_rollout: Rollout, tmp_path: Path, spoil: str):
    model = make_checkpoint(tmp_path / "model")
    if spoil == "weights":
        (model / "model.safetensors").write_bytes(b"no weights")
    run = quick_rollout.start("doctor", "--model", model, "--json")
    done = run.wait()
    failed = {check["what"]: check["detail"] for check in json.loads(done.stdout)["checks"] if check["state"] == "fail"}
    assert 1 == done.returncode and "<tool_call>" in failed["special tokens"]
    assert ("engine" in failed) == (spoil == "weights")
    assert [] == run.left_over()
