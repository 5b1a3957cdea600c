"""The reward `graded`: right or wrong, and how much was written. `--reward-key` says which number trains."""

from __future__ import annotations

from rollout.rewards import Rollout, final_text


def score(rollout: Rollout) -> dict[str, float]:
    """`right`: 1.0 for the label in the last line, 0.5 for it anywhere in the text; `brief`: 1.0 down to 0.0."""
    text = final_text(rollout.messages[0])
    lines = text.strip().splitlines()
    if lines and lines[-1] == f"Answer: {rollout.row.label}":
        right = 1.0
    else:
        right = 0.5 if rollout.row.label in text.split() else 0.0
    return {"right": right, "brief": max(0.0, 1.0 - len(text) / 500)}
