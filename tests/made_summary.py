"""A batch's summary for tests of what is made of it: four rollouts of one group, one of which failed."""

from __future__ import annotations

from typing import Any

from rollout.batch.summary import Summary


def make_summary(**changes: Any) -> Summary:
    facts: dict[str, Any] = {
        "rollouts": 4,
        "samples": 5,
        "groups": 1,
        "turns": 9,
        "rollouts_by_status": {"completed": 3, "failed": 1},
        "samples_by_status": {"completed": 4, "failed": 1},
        "failures": {"agent_error": 1},
        "verdicts": {"equal": 2, "equal_by_path": 1, "not_comparable": 1},
        "reasons": {"equal_by_path": {"several samples": 1}, "not_comparable": {"no_sample": 1}},
        "equal_share": 1.0,
        "reward_mean": 0.5,
        "group_rewards": [0.5],
        "pass_at": {"1": {"pass": 0.5, "mean": 0.5}},
        "zero_spread_groups": 0,
        "tokens_prompt": 1000,
        "tokens_cached": 250,
        "tokens_sampled": 7200,
        "tokens_trained": 400,
        "seconds_engine": 12.5,
        "seconds_parity": 0.5,
        "live": {},
        "live_reasons": {},
    }
    return Summary(**{**facts, **changes})
