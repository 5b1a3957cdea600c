"""What the driver adds to a session's samples: identity, reward, metadata and failure.

`finish` is pure and the only place where rows get these fields, so that a replay of the tape
gives the very rows that the batch wrote.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rollout.errors import Failure
from rollout.identity import SessionVersion, resolve_rollout_id
from rollout.sample import Sample, Status, empty_sample

SERVER_KEYS = ("lifecycle", "leaf")
"""Metadata keys that only the session sets: an agent can neither override nor plant them."""


@dataclass(kw_only=True, slots=True)
class RolloutInput:
    """One planned rollout: a prompt row with its identity. `label` is text; other JSON values as JSON text."""

    index: int
    group_index: int
    rollout_id: int | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    agent: str = "single_turn"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How one attempt at a rollout ended, beside what its session holds. JSON-able: part of the tape."""

    input: RolloutInput
    attempt: int
    session_version: SessionVersion
    agent_result: dict[str, Any] | None = None
    reward: float | None = None
    reward_json: str | None = None
    failure: Failure | None = None
    empty_reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        failure = Failure(**data["failure"]) if data.get("failure") else None
        return cls(**{**data, "input": RolloutInput(**data["input"]), "failure": failure})


def finish(session_samples: list[Sample], outcome: Outcome) -> list[Sample]:
    """The rows of one rollout: the session's samples with the driver's fields, in the session's order.

    No sample: one row without tokens, status failed, `remove_sample` set; its failure is the
    outcome's, else `all_truncated` or `no_turns` after the session's `empty_reason`.
    A failed rollout keeps its samples with reward null and `remove_sample` set.

    Raises:
        ValueError: several v2 samples without rollout_id and index (identity rule).
    """
    given = outcome.input
    failure = outcome.failure
    samples = session_samples
    if not samples:
        samples = [empty_sample(Status.FAILED)]
        samples[0].session_version = outcome.session_version
        if failure is None:
            truncated = outcome.empty_reason == "all_truncated"
            failure = Failure(
                type="all_truncated" if truncated else "no_turns",
                message="no turn fits into max_seq_len" if truncated else "the agent made no model call",
            )
    rollout_id = resolve_rollout_id(
        outcome.session_version,
        len(samples),
        input_rollout_id=given.rollout_id,
        input_index=given.index,
    )
    agent_metadata = (outcome.agent_result or {}).get("metadata") or {}
    tool_time = _tool_time(outcome.agent_result or {}, agent_metadata)
    for position, sample in enumerate(samples):
        sample.group_index, sample.index = given.group_index, given.index
        sample.attempt, sample.rollout_id = outcome.attempt, rollout_id
        sample.sibling, sample.siblings = position, len(samples)
        sample.prompt, sample.label, sample.agent = given.messages, given.label, given.agent
        sample.metadata = _overlay(given.metadata, agent_metadata, sample.metadata)
        if tool_time is not None:
            sample.metadata["non_generation_time"] = tool_time
        sample.failure = failure
        sample.remove_sample = sample.remove_sample or failure is not None
        sample.reward = None if failure is not None else outcome.reward
        sample.reward_json = None if failure is not None else outcome.reward_json
    return samples


def _tool_time(*places: dict[str, Any]) -> Any:
    """What an agent reports as agent_metrics.total_tool_time, in its result or its metadata; null without."""
    reports = [place.get("agent_metrics") for place in places]
    times = [report.get("total_tool_time") for report in reports if isinstance(report, dict)]
    return next((time for time in times if time is not None), None)


def _overlay(given: dict[str, Any], agent: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in {**given, **agent}.items() if key not in SERVER_KEYS}
    return {**merged, **session}
