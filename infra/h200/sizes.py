"""How much a lane does: on an H200, and in a dry run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Device and shape of the embedded engine, widths of the invariance checks, and the load in numbers.

    `tokens` are sampled in each of a rollout's `turns` turns.
    """

    device: str
    shape: str
    widths: tuple[int, ...]
    tokens: int
    turns: int
    rollouts: int


H200 = Sizes(device="cuda", shape="qwen3-8b", widths=(2, 4, 8, 16, 32), tokens=200, turns=4, rollouts=32)
DRY = Sizes(device="cpu", shape="dry", widths=(2, 4, 8, 16, 32), tokens=16, turns=2, rollouts=4)
CONCURRENCY = 16
