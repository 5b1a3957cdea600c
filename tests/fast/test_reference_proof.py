"""The proof of the parity lane can fail: a moved bit, a missing input, a case in which no tool was called."""

import json
from pathlib import Path

import pytest
from lake_batch import ROW, parity_rows, plan_batch, rollout_samples, stamp_rows, tape_rows

from rollout.agents.reference_case import FIRST, SECOND
from rollout.batch.reference import InputProof, prove_inputs, write_reference_prompts
from rollout.lake import LakePaths
from rollout.lake.publishing import publish_batch
from rollout.lake.staging import create_plan, stage_shard, staged_shards


def publish_case(paths: LakePaths, batch_id: str, change=lambda samples: None) -> None:
    """Six inputs, one sample each, every one of which says that the case's tools were called."""
    plan = plan_batch(batch_id, n_samples_per_prompt=1, shard_size=6)
    create_plan(paths, plan)
    samples = [rollout_samples(index, 1)[0] for index in range(6)]
    for sample in samples:
        sample.siblings, sample.rollout_id = 1, None
        sample.metadata = {"looked_up": [FIRST, SECOND]}
    change(samples)
    stage_shard(paths, plan, 0, stamp_rows(plan, 0, samples), tape_rows(plan, 0), {})
    publish_batch(paths, plan, staged_shards(paths, batch_id), parity_rows(plan), ROW)


def moved(samples) -> None:
    samples[2].tokens_T[0] += 1


def unplayed(samples) -> None:
    samples[4].metadata = {"looked_up": [FIRST]}


def stamped(samples) -> None:
    samples[0].rollout_id = 0


@pytest.mark.parametrize(
    ("change", "index", "says"),
    [
        (moved, 2, "tokens[0]"),
        (unplayed, 4, "looked_up"),
        (stamped, 0, "sample.rollout_id: None != 0"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change, index: int, says: str):
    paths = LakePaths(tmp_path / "lake")
    publish_case(paths, "v1")
    publish_case(paths, "v2", change)
    proofs = prove_inputs(tmp_path / "lake", ("v1", "v2"), inputs=6)
    assert [index] == [proof.index for proof in proofs if proof.differs]
    assert says in proofs[index].differs


def test_a_case_without_its_tools_proves_nothing_though_its_bits_are_the_same(tmp_path: Path):
    paths = LakePaths(tmp_path / "lake")
    for batch_id in ("v1", "v2"):
        publish_case(paths, batch_id, unplayed)
    proofs = prove_inputs(tmp_path / "lake", ("v1", "v2"), inputs=7)
    assert InputProof(index=0, differs="") == proofs[0]
    assert [(4, "the model called other tools than the case is about"), (6, "it is not there on both")] == [
        (proof.index, proof.differs) for proof in proofs if proof.differs
    ]


def test_the_prompts_are_the_same_bytes_each_time(tmp_path: Path):
    first = write_reference_prompts(tmp_path / "a").read_bytes()
    assert first == write_reference_prompts(tmp_path / "b").read_bytes()
    rows = [json.loads(line) for line in first.splitlines()]
    assert (16, {"reference_case"}) == (len(rows), {row["agent"] for row in rows})
