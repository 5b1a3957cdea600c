"""A batch by reference, as another process gets it: what goes along, what is refused, what is done already."""

import asyncio
import platform
from pathlib import Path

import cloudpickle
import pytest
from lake_batch import plan_batch as planned
from lake_batch import stage_all

from flows.batch import rollout_batch
from rollout.batch.apart import BatchReference, HeldWorker, load_batch, reference_to, run_apart
from rollout.batch.prepare import Batch, RunOrigin, prepare
from rollout.batch.progress import BatchProgress
from rollout.errors import BadConfig, BadLake, BadPrompts
from rollout.home import claim_folder
from rollout.lake.paths import LakePaths
from rollout.lake.staging import create_plan
from tasks.plan import check_allowed_cluster
from tasks.rollout import roll_out_apart


async def plan_here(tmp_path: Path, **options: object) -> Batch:
    """A batch of one prompt, planned in the lake, with its prompts named by a relative path."""
    Path("prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    given = {"lake": str(tmp_path / "lake"), "batch_id": "mine", "prompts": "prompts.jsonl", **options}
    batch = await prepare(given, RunOrigin.now())
    create_plan(batch.paths, batch.plan)
    return batch


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_what_goes_along_is_what_the_plan_does_not_say(tmp_path: Path):
    batch = await plan_here(tmp_path)
    batch.config = batch.config.model_copy(update={"concurrency": 3})
    expected = {"concurrency": 3, "prompts": str(tmp_path / "prompts.jsonl")}
    reference = reference_to(batch)
    assert (str(tmp_path / "lake"), "mine", expected) == (reference.lake, reference.batch_id, reference.changed)


async def test_another_process_plans_the_very_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    batch = await plan_here(tmp_path, temperature=0.5)
    reference = reference_to(batch)
    monkeypatch.chdir("/")
    again = await load_batch(reference)
    assert batch.plan == again.plan and again.planned
    assert batch.config.model_copy(update={"prompts": str(tmp_path / "prompts.jsonl")}) == again.config


async def test_a_machine_with_other_prompts_is_refused_by_its_name(tmp_path: Path):
    reference = reference_to(await plan_here(tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "other"}]}\n')
    with pytest.raises(BadConfig, match=f"on {platform.node()}: .*config hash.*prompts_digest"):
        await load_batch(reference)
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(BadPrompts, match=f"on {platform.node()}: .*prompts.jsonl"):
        await load_batch(reference)


async def test_a_lake_that_is_not_shared_is_refused(tmp_path: Path):
    with pytest.raises(BadLake, match="one folder that all machines share; else use s3://"):
        await load_batch(BatchReference(lake=str(tmp_path / "lake"), batch_id="mine"))
    assert not (tmp_path / "lake").exists()


async def test_a_staged_shard_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = LakePaths(tmp_path / "lake")
    manifests = stage_all(paths, planned("mine"))
    monkeypatch.setattr(HeldWorker, "run", None)
    assert manifests[1] == await run_apart(BatchReference(lake=paths.uri, batch_id="mine"), 1)


async def test_errors_reach_the_one_who_asked(tmp_path: Path):
    with pytest.raises(BadLake, match="no plan of batch mine"):
        await asyncio.wait_for(run_apart(BatchReference(lake=str(tmp_path / "lake"), batch_id="mine"), 0), 30)


def test_a_shard_of_elsewhere_counts_whole():
    progress = BatchProgress(rollouts=8, shards=2)
    counts = {"rollouts": {"completed": 3, "failed": 1}, "failures": {"agent_error": 1}}
    progress.shard_staged({**counts, "turns": 9, "tokens_sampled": 70})
    assert (4, 1, 9, 70) == (progress.rollouts_done, progress.failed, progress.turns, progress.tokens)


def test_processes_of_one_machine_take_folders_of_their_own(tmp_path: Path):
    with claim_folder(tmp_path, "worker") as first, claim_folder(tmp_path, "worker") as second:
        assert ["worker", "worker-2"] == [first.name, second.name]
    with claim_folder(tmp_path, "worker") as again:
        assert first == again


@pytest.mark.parametrize("taken_along", [rollout_batch, roll_out_apart], ids=["flow", "task"])
def test_flow_and_task_can_be_taken_to_another_process(taken_along):
    assert taken_along.name == cloudpickle.loads(cloudpickle.dumps(taken_along)).name


def test_a_form_names_no_cluster_but_the_workers_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_allowed_cluster(None)
    with pytest.raises(BadConfig, match=r"10\.0\.0\.9:6379 is not the worker's RAY_ADDRESS"):
        check_allowed_cluster("10.0.0.9:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    check_allowed_cluster("10.0.0.9:6379")
