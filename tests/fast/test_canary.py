"""What a canary must show before the rest of a batch may start."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake_batch import parity_rows, plan_batch, rollout_samples, stamp_rows

from rollout.batch.canary import canary_shards, find_problem, require_staged, require_unstaged
from rollout.errors import CanaryFailed, Failure
from rollout.lake.schema import rows_to_table
from rollout.sample import Status

SCHEMA = {"group_index": pl.Int64, "index": pl.Int64, "sibling": pl.Int64, "status": pl.String, "failure": pl.String}
WELL = [("completed", None), ("truncated", None)]
BADLY = [("failed", "agent_error"), ("completed", "reward_error"), ("aborted", None)]
REFUSED = ("failed", "bad_prompt")


def checked(**changes):
    """Parity rows of twelve rollouts; `changes` go into the second."""
    rows = [{**row, "seconds": 0.0} for row in parity_rows(plan_batch()).to_pylist()]
    rows[1] |= changes
    return rows_to_table(rows, "parity")


def frame(groups):
    """A frame of one sample per rollout: per group the (status, failure) of its rollouts."""
    rows = [(g, 10 * g + k, 0, *ended) for g, group in enumerate(groups) for k, ended in enumerate(group)]
    return pl.DataFrame(rows, SCHEMA, orient="row")


@given(
    groups=st.lists(st.lists(st.sampled_from([*WELL, *BADLY]), min_size=1, max_size=4), min_size=1, max_size=4),
    canary=st.integers(0, 5),
)
def test_every_group_of_the_canary_needs_a_rollout_that_went_well(groups, canary):
    bad = [g for g, group in enumerate(groups[:canary]) if not set(group) & set(WELL)]
    problem = find_problem(frame(groups), canary)
    assert bool(bad) == (problem is not None)
    if problem is not None:
        named = ", ".join(map(str, bad))
        n_rollouts = sum(len(groups[g]) for g in bad)
        assert f"none of the {n_rollouts} rollouts of group{'s' if len(bad) > 1 else ''} {named} went well" in problem


def test_the_problem_counts_every_kind_of_failure_and_rollouts_not_samples():
    siblings = pl.DataFrame([(0, 0, 1, "completed", "reward_error")], SCHEMA, orient="row")
    problem = find_problem(pl.concat([frame([BADLY]), siblings]), 1)
    assert "canary: none of the 3 rollouts of group 0 went well (aborted 1, agent_error 1, reward_error 1)" == problem


def test_many_groups_are_not_all_named():
    assert "of groups 0, 1, 2, 3, 4, ... went well (agent_error 7)" in find_problem(frame([BADLY[:1]] * 7), 7)


def test_refused_rows_are_left_out_unless_there_is_nothing_else():
    assert find_problem(frame([[REFUSED] * 2, [WELL[0]]]), 2) is None
    require_staged([frame([[REFUSED] * 2, [WELL[0]]])], [checked()], 2)
    with pytest.raises(CanaryFailed, match="nothing was tried"):
        require_staged([frame([[REFUSED] * 2, [WELL[0]]])], [checked()], 1)


def test_a_rollout_that_differs_fails_the_canary_and_is_named():
    facts = [frame([WELL, WELL])]
    require_staged(facts, [checked()], 2)
    with pytest.raises(CanaryFailed, match=r"canary: parity: 1 of 12 rollouts differ: .*sample.tokens\[3\]: 1 != 2"):
        require_staged(facts, [checked(verdict="differs", paths=["sample.tokens[3]: 1 != 2"])], 2)


def test_a_shard_is_decided_on_before_it_is_staged():
    plan = plan_batch()
    samples = [sample for index in plan.shards[0].indexes for sample in rollout_samples(index, 2)]
    require_unstaged(stamp_rows(plan, 0, samples), 2)
    for sample in samples:
        if sample.group_index == 1:
            sample.status, sample.failure = Status.FAILED, Failure(type="agent_error", message=f"boom {sample.index}")
            sample.reward, sample.remove_sample = None, True
    require_unstaged(stamp_rows(plan, 0, samples), 1)
    with pytest.raises(CanaryFailed, match=r"2 rollouts of group 1 went well \(agent_error 2\), first: boom 2"):
        require_unstaged(stamp_rows(plan, 0, samples), 2)


@pytest.mark.parametrize(
    ("options", "canary", "expected"),
    [
        ({"canary": 1}, 1, [(0, 1)]),
        ({"canary": 3}, 3, [(0, 2), (2, 1)]),  # two groups a shard: the canary's own are cut like the others
        ({"canary": 6}, 6, [(0, 2), (2, 2), (4, 2)]),
        ({"canary": 1}, 0, []),
        ({}, 1, [(0, 2)]),  # planned without a canary: the stored cut holds
        ({}, 3, [(0, 2), (2, 2)]),
    ],
)
def test_the_canarys_shards(options, canary, expected):
    cuts = canary_shards(plan_batch(**options), canary)
    assert expected == [(cut.first_group, cut.n_groups) for cut in cuts]


def test_the_canary_is_not_part_of_what_a_batch_is():
    assert plan_batch().config_hash == plan_batch(canary=2).config_hash
