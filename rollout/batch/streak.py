"""Ends a batch in which one rollout after another fails."""

from __future__ import annotations

from collections import Counter

from rollout.errors import FailedInARow
from rollout.generate import RolloutResult


class FailureStreak:
    """Counts rollouts, in the order in which they finish, that failed since the last one that did not.

    A refused prompt row counts for neither: it says nothing of agents and engine.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._seen: Counter[tuple[str, str]] = Counter()

    def count(self, result: RolloutResult) -> None:
        """Take a finished rollout into account.

        Raises:
            FailedInARow: `limit` rollouts have failed in a row; says the commonest failure once, with its count.
        """
        failure = result.samples[0].failure
        if failure is None:
            self._seen.clear()
        elif failure.type != "bad_prompt" and self._limit is not None:
            self._seen[failure.type, failure.message] += 1
            if self._seen.total() >= self._limit:
                raise FailedInARow(self._say())

    def _say(self) -> str:
        n_failed = self._seen.total()
        (((kind, message), n_same),) = self._seen.most_common(1)
        share = "all" if n_same == n_failed else f"{n_same} of them"
        return f"{n_failed} rollouts failed in a row, {share} with {kind}: {message}"
