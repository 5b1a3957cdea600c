"""Rewards: one number per rollout, the same for all its samples.

A reward is `async def score(rollout) -> float | dict[str, float]`, offered under the entry point
group `rollout.rewards`; it runs in a thread of its own, as an agent does. A dict needs `reward_key`, which names
the number that trains; the whole dict is kept in `reward_json`. With a configured reward the agent's
own stays in the metadata; without one the agent's stands; without either the reward is null.
A failed rollout has none, and nothing that is not a finite number ever becomes one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from rollout.columns import dump_json
from rollout.errors import Failure, RolloutFailure, describe
from rollout.outcome import RolloutInput
from rollout.parts import REWARDS, check_signature, is_built_in, load_part
from rollout.sample import Sample
from rollout.user_call import Overdue, call_here, call_user, is_async


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What a reward sees of one rollout; it gets copies of what the rows hold, so scoring changes nothing.

    `messages` holds the whole conversation of each kept leaf, replies included, in the order of
    `samples`; the first is the main one. `session` is the session's metadata.
    """

    row: RolloutInput
    messages: list[list[dict[str, Any]]]
    samples: list[Sample]
    agent_result: dict[str, Any] | None = None
    session: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A loaded reward function; `key` picks the number where it returns several."""

    name: str
    score: Callable[..., Any]
    key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A rollout's reward as its rows carry it; `json` is the whole dict where there was one."""

    reward: float | None = None
    json: str | None = None


def load_reward(name: str, key: str | None = None) -> Reward:
    """The installed reward `name`.

    Raises:
        UnknownPart: it is not installed, cannot be loaded or does not take one rollout.
    """
    function = load_part(REWARDS, name)
    check_signature(function, f"reward {name!r}", "score(rollout)", None)
    return Reward(name=name, score=function, key=key)


async def score_rollout(rollout: Rollout, reward: Reward | None, *, timeout_s: float) -> Score:
    """The reward of a rollout that has not failed: the configured one's, else the agent's own, else none.

    Raises:
        RolloutFailure: `reward_error`: it raised, took longer than `timeout_s` seconds, or gave what is
            not a finite number (or a dict of them with `reward_key`).
    """
    if reward is None:
        own = (rollout.agent_result or {}).get("reward")
        return Score() if own is None else Score(reward=_number(own, "the agent's reward"))
    try:
        call = call_here if is_built_in(reward.score) and is_async(reward.score) else call_user
        value = await call(reward.score, _copied(rollout), timeout_s=timeout_s)
    except Overdue as error:
        raise _failed(f"{reward.name} had not returned after {timeout_s:g} s {error}".rstrip()) from error
    except Exception as error:
        raise _failed(f"{reward.name} raised {describe(error)}") from error
    return _read(value, reward)


def _read(value: Any, reward: Reward) -> Score:
    if not isinstance(value, Mapping):
        return Score(reward=_number(value, reward.name))
    numbers = {str(key): _number(entry, f"{reward.name}[{key!r}]") for key, entry in value.items()}
    if reward.key is None:
        raise _failed(f"{reward.name} returned several rewards ({', '.join(numbers)}): set reward_key to one of them")
    if reward.key not in numbers:
        raise _failed(f"{reward.name} returned no {reward.key!r}, only {', '.join(numbers) or 'an empty dict'}")
    return Score(reward=numbers[reward.key], json=dump_json(numbers))


def _number(value: Any, source: str) -> float:
    """`value` as a float; True, numpy's too, counts as 1.0, since a comparison is a common reward."""
    if not isinstance(value, Real | np.bool_):
        raise _failed(f"{source} gave a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _failed(f"{source} gave {number}, not a finite number")
    return number


def _failed(message: str) -> RolloutFailure:
    return RolloutFailure(Failure(type="reward_error", message=message))


def _copied(rollout: Rollout) -> Rollout:
    """Copies of all that goes into rows afterwards; arrays become read-only views."""
    return replace(
        rollout,
        row=copy.deepcopy(rollout.row),
        samples=[_copied_sample(sample) for sample in rollout.samples],
        agent_result=copy.deepcopy(rollout.agent_result),
    )


def _copied_sample(sample: Sample) -> Sample:
    arrays = {name: getattr(sample, name).view() for name in ("tokens_T", "loss_mask_R", "rollout_log_probs_R")}
    for view in arrays.values():
        view.flags.writeable = False
    return replace(
        sample,
        **arrays,
        prompt=copy.deepcopy(sample.prompt),
        metadata=copy.deepcopy(sample.metadata),
        weight_versions=list(sample.weight_versions),
        weight_spans=list(sample.weight_spans),
    )


def final_text(messages: list[dict[str, Any]]) -> str:
    """Text of the last assistant message of a conversation, text parts joined; empty where there is none."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return ""


async def exact_answer(rollout: Rollout) -> float:
    """1.0 if the main conversation ends with the line `Answer: <label>`, else 0.0.

    Raises:
        ValueError: the row has no label to compare with.
    """
    if rollout.row.label is None:
        raise ValueError("the row has no label; give it one or choose another reward")
    lines = final_text(rollout.messages[0]).strip().splitlines()
    prefix, mark, answer = lines[-1].partition("Answer: ") if lines else ("", "", "")
    return 1.0 if mark and not prefix and answer.strip() == rollout.row.label else 0.0
