"""What the driver adds to a session's samples: lock tests for identity, reward and failure of rows."""

import json

import pytest

from rollout.errors import Failure
from rollout.identity import NO_IDENTITY
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.sample import Status, empty_sample


def outcome(version="v2", **changes) -> Outcome:
    given = {"index": 7, "group_index": 1, "messages": [{"role": "user", "content": "q"}], "label": "42"}
    given |= changes.pop("given", {})
    return Outcome(**{"input": RolloutInput(**given), "attempt": 0, "session_version": version, **changes})


def samples(n):
    made = [empty_sample(Status.COMPLETED) for _ in range(n)]
    for sample in made:
        sample.metadata = {"lifecycle": {"turn": 1}}
    return made


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("rollout_id", [None, 0, 3])
def test_c12_a_singleton_keeps_the_inputs_rollout_id(version, rollout_id):
    (row,) = finish(samples(1), outcome(version, given={"rollout_id": rollout_id}))
    assert (rollout_id, 7, 1, 0, 1) == (row.rollout_id, row.index, row.group_index, row.sibling, row.siblings)


@pytest.mark.parametrize(("rollout_id", "shared"), [(None, 7), (0, 0), (3, 3)])
def test_c12_siblings_share_one_id_and_one_reward(rollout_id, shared):
    rows = finish(samples(3), outcome(given={"rollout_id": rollout_id}, reward=0.5))
    assert [(shared, 0.5, k, 3) for k in range(3)] == [(r.rollout_id, r.reward, r.sibling, r.siblings) for r in rows]


def test_c12_several_leaves_of_an_input_without_identity_are_an_error():
    with pytest.raises(ValueError, match=NO_IDENTITY.replace(".", r"\.")):
        finish(samples(2), outcome(given={"index": None}))


@pytest.mark.parametrize("place", [lambda report: report, lambda report: {"metadata": report}])
@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_c12_the_time_that_tools_took_is_every_samples(place, seconds):
    rows = finish(samples(2), outcome(agent_result=place({"agent_metrics": {"total_tool_time": seconds}})))
    assert [seconds] * 2 == [row.metadata["non_generation_time"] for row in rows]
    for report in ({}, {"agent_metrics": None}, {"agent_metrics": 3}, {"agent_metrics": {"total_tool_time": None}}):
        (row,) = finish(samples(1), outcome(agent_result=place(report)))
        assert "non_generation_time" not in row.metadata


@pytest.mark.parametrize(("reason", "failure"), [("no_records", "no_turns"), ("all_truncated", "all_truncated")])
def test_a_rollout_without_samples_is_one_row_with_a_typed_failure(reason, failure):
    """G56: silence is not an answer, and a reward is never invented."""
    (row,) = finish([], outcome(empty_reason=reason, reward=1.0))
    assert (failure, Status.FAILED, None, True, 0) == (
        row.failure.type,
        row.status,
        row.reward,
        row.remove_sample,
        row.response_length,
    )


def test_a_failure_keeps_the_samples_without_reward():
    failure = Failure(type="agent_error", message="boom")
    rows = finish(samples(2), outcome(failure=failure, reward=1.0, reward_json='{"a":1}'))
    assert [(failure, None, None, True)] * 2 == [(r.failure, r.reward, r.reward_json, r.remove_sample) for r in rows]


def test_the_agents_metadata_overlays_the_inputs_but_never_the_sessions():
    (row,) = finish(
        samples(1),
        outcome(given={"metadata": {"a": 1, "b": 1}}, agent_result={"metadata": {"b": 2, "lifecycle": 9, "leaf": 9}}),
    )
    assert row.metadata == {"a": 1, "b": 2, "lifecycle": {"turn": 1}}


def test_an_outcome_survives_its_json():
    failure = Failure(type="deadline", message="300 s")
    before = outcome(failure=failure, agent_result={"x": [1.5]}, reward=-0.0)
    after = Outcome.from_json(json.loads(json.dumps(before.to_json())))
    assert before == after
    assert str(before.reward) == str(after.reward)
