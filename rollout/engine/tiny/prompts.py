"""Prompt rows for batches and tests: none of them began a training dialogue.

`python -m rollout.engine.tiny.prompts` writes the shipped prompt file anew.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from rollout.engine.tiny.tasks import TOOL_KINDS, make_task

PromptRow = dict[str, Any]

DEMO_SEED = 64
DEMO_COUNT = 64
DEMO_FILE: Path = Path(__file__).parents[2] / "batch" / "demo.jsonl"
"""The prompt file that ships with the package."""

MIX: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("tool_loop", TOOL_KINDS, 26),
    ("tool_loop", ("aloud",), 5),
    ("tool_loop", ("mental",), 2),
    ("branching", TOOL_KINDS, 16),
    ("single_turn", ("aloud",), 5),
    ("single_turn", ("mental",), 4),
    ("single_turn", ("guess",), 6),
)
"""Agent, kinds, and how many of 64 prompts."""

_TRIES = 100
"""Draws of a prompt that is not there yet, before a repeated one is taken."""


def held_out(messages: list[dict[str, Any]]) -> bool:
    """Whether a prompt belongs to the tenth that training never sees: by a digest of its messages."""
    text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] < 26


def make_prompts(count: int, *, seed: int, kinds: tuple[str, ...] = TOOL_KINDS) -> list[PromptRow]:
    """`count` held-out rows `{messages, tools?, label, metadata}` of `kinds`, by their shares in training."""
    rng, seen = random.Random(seed), set[str]()
    return [_draw(rng, kinds, None, seen) for _ in range(count)]


def mixed_prompts(count: int, *, seed: int) -> list[PromptRow]:
    """`count` held-out rows for all three built-in agents, `{messages, tools?, label, metadata, agent}`, in MIX."""
    rng, seen = random.Random(seed), set[str]()
    slots = [(agent, kinds) for agent, kinds, share in MIX for _ in range(share)]
    rng.shuffle(slots)
    rows = []
    for place in range(count):
        agent, kinds = slots[place % len(slots)]
        rows.append({**_draw(rng, kinds, agent != "single_turn", seen), "agent": agent})
    return rows


def _draw(rng: random.Random, kinds: tuple[str, ...], tools: bool | None, seen: set[str]) -> PromptRow:
    """A held-out row, with or without tools where `tools` says so, and not in `seen` if there is one."""
    tries = 0
    while True:
        row = make_task(rng, kinds).row()
        if not held_out(row["messages"]) or tools not in (None, "tools" in row):
            continue
        key, tries = json.dumps(row["messages"]), tries + 1
        if key not in seen or tries > _TRIES:
            seen.add(key)
            return row


def demo_lines() -> str:
    """The shipped prompt file's text."""
    rows = mixed_prompts(DEMO_COUNT, seed=DEMO_SEED)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    DEMO_FILE.write_text(demo_lines())
