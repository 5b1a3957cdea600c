"""Rollouts that fail one after another end a batch, and say once why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch.streak import FailureStreak
from rollout.errors import FailedInARow, Failure
from rollout.generate import RolloutResult
from rollout.outcome import Outcome, RolloutInput, finish


def finished(kind=None, message="boom"):
    failure = Failure(type=kind, message=message) if kind else None
    outcome = Outcome(
        input=RolloutInput(index=0, group_index=0, messages=[]), attempt=0, session_version="v2", failure=failure
    )
    samples = finish([], outcome)
    if failure is None:
        samples[0].failure = None
    return RolloutResult(samples=samples, tape=None, outcome=outcome, turns=0, sampled_tokens=0, engine_seconds=0.0)


def counted(limit, results):
    """How many results are taken into account up to the one that ends the batch, and what is said then."""
    streak = FailureStreak(limit)
    for position, result in enumerate(results):
        try:
            streak.count(result)
        except FailedInARow as error:
            return position + 1, str(error)
    return None


@given(
    kinds=st.lists(st.sampled_from([None, "bad_prompt", "agent_error", "engine_error"]), max_size=12),
    limit=st.integers(1, 4),
)
def test_it_ends_at_the_first_run_of_failures_that_is_long_enough(kinds, limit):
    letters = [None if kind is None else "x" for kind in kinds if kind != "bad_prompt"]
    ends = [k + 1 for k in range(len(letters)) if letters[max(0, k + 1 - limit) : k + 1] == ["x"] * limit]
    found = counted(limit, [finished(kind) for kind in kinds if kind != "bad_prompt"])
    assert (ends[0] if ends else None) == (found and found[0])
    with_refused = counted(limit, [finished(kind) for kind in kinds])
    assert (found and found[1]) == (with_refused and with_refused[1])


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([("agent_error", "a")] * 3, "3 rollouts failed in a row, all with agent_error: a"),
        (
            [("agent_error", "a"), ("deadline", "b"), ("deadline", "b")],
            "3 rollouts failed in a row, 2 of them with deadline: b",
        ),
    ],
)
def test_the_commonest_failure_is_said_once_with_its_count(kinds, message):
    assert (3, message) == counted(3, [finished(*kind) for kind in kinds])


def test_without_a_limit_nothing_ends_the_batch():
    assert counted(None, [finished("agent_error")] * 100) is None
