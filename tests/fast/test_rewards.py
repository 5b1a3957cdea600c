"""Rewards: one finite number per rollout or a typed failure, never an invented zero."""

import time
from fractions import Fraction

import numpy as np
import pytest

from rollout.errors import RolloutFailure, UnknownPart
from rollout.outcome import RolloutInput
from rollout.rewards import Reward, Rollout, Score, exact_answer, final_text, load_reward, score_rollout
from rollout.sample import Status, empty_sample


def rollout(*texts, label="4", agent_result=None, **changes):
    messages = [{"role": "user", "content": "q"}, *({"role": "assistant", "content": text} for text in texts)]
    return Rollout(
        row=RolloutInput(index=0, group_index=0, messages=messages[:1], label=label, metadata={"a": 1}),
        messages=[messages],
        samples=[empty_sample(Status.COMPLETED)],
        agent_result=agent_result,
        **changes,
    )


async def score(function, given=None, key=None, timeout_s=5.0):
    reward = None if function is None else Reward(name="test", score=function, key=key)
    return await score_rollout(given or rollout(), reward, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["It is 4.\nAnswer: 4"], 1.0),
        (["Answer:  4 \n\n"], 1.0),
        (["Answer: 4", "Answer: 5"], 0.0),
        (["Answer: 4\nI think."], 0.0),
        (["The Answer: 4"], 0.0),
        (["Answer: 44"], 0.0),
        (["answer: 4"], 0.0),
        (["Answer:4"], 0.0),
        ([None], 0.0),
        ([""], 0.0),
        ([], 0.0),
        ([[{"type": "text", "text": "x\nAnswer: "}, {"type": "text", "text": "4"}]], 1.0),
    ],
)
async def test_exact_answer_reads_the_last_line_of_the_last_answer(texts, reward):
    assert reward == await exact_answer(rollout(*texts))


async def test_exact_answer_looks_at_the_main_conversation():
    given = rollout("Answer: 4")
    given.messages.append([{"role": "assistant", "content": "Answer: 5"}])
    assert 1.0 == await exact_answer(given)


async def test_a_row_without_label_is_a_failure_not_a_zero():
    with pytest.raises(RolloutFailure, match="reward_error: exact_answer raised ValueError: the row has no label"):
        await score_rollout(rollout("Answer: 4", label=None), load_reward("exact_answer"), timeout_s=5)


def test_final_text_skips_what_follows_the_last_answer():
    assert "a" == final_text([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}])


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0, 0.0),
        (True, 1.0),
        (np.True_, 1.0),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (-0.0, -0.0),
        (np.int64(3), 3.0),
    ],
)
async def test_a_number_is_a_reward(value, reward):
    found = await score(lambda rollout: value)
    assert (str(reward), None) == (str(found.reward), found.json)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "gave nan, not a finite number"),
        (-float("inf"), "gave -inf, not a finite number"),
        (10**400, "gave inf, not a finite number"),
        (None, "gave a NoneType, not a number"),
        ("1.0", "gave a str, not a number"),
        ([1.0], "gave a list, not a number"),
        (1j, "gave a complex, not a number"),
    ],
)
async def test_anything_else_is_a_reward_error(value, problem):
    """G61: no NaN in the reward column."""
    with pytest.raises(RolloutFailure, match=f"reward_error: test {problem}"):
        await score(lambda rollout: value)
    with pytest.raises(RolloutFailure, match="reward_error: test"):
        await score(lambda rollout: {"a": 1.0, "b": value}, key="a")


async def test_reward_key_picks_one_and_the_whole_dict_is_kept():
    async def several(rollout):
        return {"a": 1, "b": 0.25}

    assert Score(reward=0.25, json='{"a":1.0,"b":0.25}') == await score(several, key="b")
    with pytest.raises(RolloutFailure, match=r"several rewards \(a, b\): set reward_key"):
        await score(several)
    with pytest.raises(RolloutFailure, match="no 'c', only a, b"):
        await score(several, key="c")


async def test_a_configured_reward_wins_and_without_one_the_agents_stands():
    own = rollout("x", agent_result={"reward": 0.0})
    assert Score(reward=0.5) == await score(lambda rollout: 0.5, own)
    assert Score(reward=0.0) == await score(None, own)
    assert Score() == await score(None, rollout("x", agent_result={"reward": None}))
    assert Score() == await score(None, rollout("x"))
    with pytest.raises(RolloutFailure, match="reward_error: the agent's reward gave a str"):
        await score(None, rollout("x", agent_result={"reward": "high"}))


async def test_a_slow_or_raising_judge_is_a_reward_error():
    """G48: the judge's trouble is a failure of its own."""

    def raises(rollout):
        raise KeyError("judge")

    with pytest.raises(RolloutFailure, match="reward_error: test raised KeyError: 'judge'"):
        await score(raises)
    with pytest.raises(RolloutFailure, match=r"reward_error: test had not returned after 0\.05 s"):
        await score(lambda rollout: time.sleep(0.5), timeout_s=0.05)


async def test_scoring_cannot_change_the_rows():
    given = rollout("x", agent_result={"n": [1]})
    sample = given.samples[0]

    def meddles(seen):
        seen.row.metadata["a"] = 2
        seen.row.messages.clear()
        seen.samples[0].metadata["x"] = 1
        seen.samples[0].status = Status.FAILED
        seen.samples.clear()
        seen.agent_result["n"].append(2)
        return 1.0

    def writes(seen):
        seen.samples[0].rollout_log_probs_R.fill(0)
        return 1.0

    await score(meddles, given)
    assert ({"a": 1}, 1, {}, Status.COMPLETED, [sample], {"n": [1]}) == (
        given.row.metadata,
        len(given.row.messages),
        sample.metadata,
        sample.status,
        given.samples,
        given.agent_result,
    )
    with pytest.raises(RolloutFailure, match="read-only"):
        await score(writes, given)


def test_an_unknown_reward_is_refused():
    with pytest.raises(UnknownPart, match=r"no reward 'nothing' is installed .*exact_answer"):
        load_reward("nothing")
