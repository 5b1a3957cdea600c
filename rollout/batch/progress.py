"""How far a running batch is: counters in the process that runs it, for the command's display and the artifacts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rollout.batch.spool import RolloutRows
from rollout.batch.summary import Summary
from rollout.generate import RolloutResult


@dataclass(kw_only=True, slots=True)
class BatchProgress:
    """Counts since the run began; shards and rollouts that an earlier run finished are counted as done at once.

    `tokens`, `turns` and `seconds_held` are of this run alone; times are `time.monotonic()` seconds. `summary` is set
    when every shard is checked. `live` counts the rollouts that run again for live parity.
    """

    phase: str = "planning"
    batch_id: str = ""
    shards: int = 0
    shards_staged: int = 0
    shards_checked: int = 0
    rollouts: int = 0
    rollouts_done: int = 0
    failed: int = 0
    turns: int = 0
    tokens: int = 0
    live: int = 0
    live_done: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    first_rollout: float | None = None
    last_rollout: float | None = None
    seconds_held: float = 0.0
    summary: Summary | None = None

    def rollout_done(self, result: RolloutResult) -> None:
        """Count one finished rollout (rollout.batch.shard's progress callback)."""
        self.rollouts_done += 1
        self.failed += result.samples[0].failure is not None
        self.turns += result.turns
        self.tokens += result.sampled_tokens
        self.last_rollout = time.monotonic()

    def rollouts_kept(self, rollouts: Sequence[RolloutRows]) -> None:
        """Count what an earlier run of a shard finished (rollout.batch.spool)."""
        self.rollouts_done += len(rollouts)
        self.failed += sum(rows.samples.column("failure")[0].is_valid for rows in rollouts)

    def shard_staged(self, counts: Mapping[str, Any]) -> None:
        """Count a shard that another process rolled out, by its manifest's counts (ShardResult)."""
        self.rollouts_done += sum(counts["rollouts"].values())
        self.failed += sum(counts["failures"].values())
        self.turns += counts["turns"]
        self.tokens += counts["tokens_sampled"]
        self.last_rollout = time.monotonic()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Count the block's wall time as time in which the batch held its engines."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds_held += time.monotonic() - started

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of wall time between the first start and the last end of a rollout."""
        if self.first_rollout is None or self.last_rollout is None:
            return 0.0
        return self.tokens / max(1e-9, self.last_rollout - self.first_rollout)

    @property
    def counts(self) -> str:
        """How far the batch is, in words."""
        parts = [
            f"shards {self.shards_staged}/{self.shards}",
            f"rollouts {self.rollouts_done}/{self.rollouts}",
            f"{self.turns} turns",
            f"{self.tokens_per_second:.0f} tokens/s",
        ]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.live:
            parts.append(f"live {self.live_done}/{self.live}")
        if self.verdicts:
            parts.append("parity " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(self.verdicts.items())))
        return ", ".join(parts)

    @property
    def share(self) -> float:
        """0 to 1: rollouts done, the checks of their shards counting for a tenth."""
        if not self.rollouts or not self.shards:
            return 0.0
        return 0.9 * self.rollouts_done / self.rollouts + 0.1 * self.shards_checked / self.shards


_watched: ContextVar[BatchProgress | None] = ContextVar("watched_batch", default=None)


def watch(progress: BatchProgress) -> None:
    """Let batches that run in this context count into `progress`."""
    _watched.set(progress)


def watched() -> BatchProgress:
    """The counters of this context, new ones where nobody watches."""
    return _watched.get() or BatchProgress()
