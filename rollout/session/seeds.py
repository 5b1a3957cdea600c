"""A turn's sampling seed: the session's seed, the prompt, and how often that prompt was sampled before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollout.session.sampling import read_session_seed, turn_seed
from rollout.session.turn import Turn


class Seeds:
    """Seeds of one session's turns: committed and running generations of a prompt count."""

    def __init__(self, seed: str | None) -> None:
        """
        Raises:
            SessionRefused: 400, no hex digits.
        """
        self._seed = read_session_seed(seed)
        self._committed: Counter[bytes] = Counter()

    def of(self, prompt_digest: bytes, running: Iterable[Turn], client_seed: int | None) -> int | None:
        """The next turn's; a client's own counts only where the session has none."""
        if self._seed is None:
            return client_seed
        beside = sum(turn.digest.digest() == prompt_digest for turn in running)
        return turn_seed(self._seed, prompt_digest, self._committed[prompt_digest] + beside)

    def count(self, prompt_digest: bytes) -> None:
        """A generation of this prompt was committed."""
        self._committed[prompt_digest] += 1
