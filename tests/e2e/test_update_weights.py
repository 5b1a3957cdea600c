"""`rollout run --update-weights`: an engine that runs gets a batch's weights before its first turn."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Rollout, reach
from faulty_facts import FaultyFacts

from rollout.engine.tiny import CHECKPOINT
from rollout.engine.updating import update_engines
from rollout.lake import scan_samples


@dataclass
class Recorded:
    """An engine, and the versions of the weights that it was asked to load."""

    url: str
    updates: list[str]


@pytest.fixture
def recorded(engine_url: str) -> Iterator[Recorded]:
    proxy, updates = FaultyFacts(engine_url), list[str]()
    proxy.ask = lambda body: updates.append(body["weight_version"]) if "weight_version" in body else None
    with proxy.in_thread():
        yield Recorded(proxy.url, updates)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The shipped weights elsewhere, which is enough to be other ones to whoever goes by their name."""
    return shutil.copytree(CHECKPOINT, tmp_path / "policy")


@pytest.fixture
def batch(prompt_file: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "two.jsonl"
    prompts.write_text("".join(f"{line}\n" for line in prompt_file.read_text().splitlines()[:2]))
    return ["run", "--prompts", str(prompts), "--batch-id", "mine", "--seed", "7", "--n-samples-per-prompt", "2"]


def updating(url: str, weights: Path, version: str = "step-9") -> list[str]:
    options = ["--engine", "external", "--engine-url", url]
    return [*options, "--update-weights", str(weights), "--weight-version", version]


def test_a_batch_runs_on_the_weights_it_asked_for(
    quick_rollout: Rollout, batch: list[str], recorded: Recorded, weights: Path, tmp_path: Path
) -> None:
    given = [*batch, *updating(recorded.url, weights)]
    planned = json.loads(quick_rollout.succeeds(*given, "--dry-run", "--json"))
    assert [] == recorded.updates, "a dry run changes nothing"
    quick_rollout.succeeds(*given)
    assert ["step-9"] == recorded.updates
    line = quick_rollout.refused(*batch, *updating(recorded.url, weights, "step-10"))
    assert "'mine' was planned with another configuration" in line and planned["config_hash"] in line
    assert ["step-9"] == recorded.updates
    rows = scan_samples(tmp_path / "lake", "mine").collect()
    assert {"step-9"} == set(rows["weight_versions"].explode()) and 0 == rows["failure"].is_not_null().sum()
    stated = rows["engine"].struct.unnest().select("model", "policy_version").unique()
    assert [(str(weights), "step-9")] == stated.rows()


@pytest.mark.full
def test_a_batch_that_goes_on_loads_its_weights_again_only_where_they_are_gone(
    quick_rollout: Rollout, batch_command: list[str], recorded: Recorded, weights: Path, tmp_path: Path
) -> None:
    for delay_s in (0.3, 0.6):
        run = quick_rollout.start(*batch_command, *updating(recorded.url, weights))
        reach(run, "rolling out", delay_s)
        run.end(signal.SIGKILL)
    assert ["step-9"] == recorded.updates
    asyncio.run(update_engines([recorded.url], str(CHECKPOINT), "default"))  # as if it had been started again
    assert "published" in quick_rollout.succeeds("run", "--batch-id", "mine")
    assert ["step-9", "default", "step-9"] == recorded.updates
    rows = scan_samples(tmp_path / "lake", "mine").collect()
    assert set(range(32)) == set(rows["index"]) and {"step-9"} == set(rows["weight_versions"].explode())


def test_weights_that_cannot_be_loaded_start_nothing(
    quick_rollout: Rollout, batch: list[str], engine_url: str, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    done = quick_rollout(*batch, *updating(engine_url, nowhere))
    last = done.stderr.splitlines()[-1]
    assert (2, "") == (done.returncode, done.stdout)
    assert last.startswith(f"error: update_weights {nowhere} as step-9: {engine_url}: the engine refused with 400")
    assert [] == [path for path in (tmp_path / "lake").rglob("*") if path.is_file()], "not even a plan"
