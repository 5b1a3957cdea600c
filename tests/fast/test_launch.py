"""What `rollout run` says while it checks prompts, and what it hands on to its flow."""

import json

import pytest
from lake_batch import plan_batch, publish, stage_all

from flows import launch
from rollout.batch.prompts import paced
from rollout.batch.spool import SPOOLS, open_spool
from rollout.lake.paths import LakePaths


@pytest.mark.parametrize("as_json", [False, True])
def test_a_long_check_is_shown_on_stderr_and_never_with_json(as_json, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "paced", lambda show: paced(show, first_s=0.0, every_s=0.0))
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n"
    (tmp_path / "p.jsonl").write_text(row * 2500)
    options = {"prompts": str(tmp_path / "p.jsonl"), "lake": str(tmp_path / "lake")}
    launch.run_batch(options, dry_run=True, as_json=as_json)
    said = capsys.readouterr()
    wanted = [] if as_json else ["checking prompts: 1024 rows", "checking prompts: 2048 rows"]
    assert wanted == said.err.splitlines()
    assert "2500" in said.out


def test_a_short_check_says_nothing(tmp_path, capsys):
    launch.run_batch({"lake": str(tmp_path / "lake")}, dry_run=True, as_json=False)
    assert "" == capsys.readouterr().err


def test_spools_of_a_batch_that_is_found_published_are_removed(tmp_path, monkeypatch, capsys):
    """A kill between publishing and clean-up leaves them, and nobody runs the batch again."""
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    paths, plan, spools = LakePaths(tmp_path / "lake"), plan_batch(), tmp_path / "home" / SPOOLS
    publish(paths, plan, stage_all(paths, plan))
    left = []
    for shard in (0, 2):
        with open_spool(spools, plan, shard) as spool:
            left.append(spool.path)
    options = {"lake": str(tmp_path / "lake"), "batch_id": plan.batch_id}
    launch.run_batch(options, dry_run=True, as_json=False)
    assert left == sorted(path for path in spools.rglob("*") if path.is_file()), "--dry-run removes nothing"
    launch.run_batch(options, dry_run=False, as_json=False)
    assert "is published already" in capsys.readouterr().out
    assert [] == list(spools.iterdir())
