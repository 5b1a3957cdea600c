"""Shadow mode: another matcher is asked beside the session's own, and what it would have decided is counted.

It decides nothing: prompts, samples and tape are those of a session without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from rollout.errors import SessionRefused
from rollout.session.matching import ask_matcher, find_matcher
from rollout.session.node import Message, Node
from rollout.session.replayed import Replayed
from rollout.session.request import check_message
from rollout.session.settings import SessionSettings

Decision = Literal["same", "other_node", "new_root", "refused"]
"""What the shadow would have done with a request that the session accepted.

same: extend the same generation, or open a root as the session did; other_node: extend another
generation; new_root: extend none (v1: start the line anew); refused: the shadow's matcher failed, or
its place cannot be extended (v1 would go back too far, v2's generation was cut).
"""

Locate = Callable[[Replayed, int], Node | None]


class Shadow:
    """One session's shadow. `decisions` counts committed turns only, so a tape gives the same counts again."""

    def __init__(self, name: str, version: str) -> None:
        """Raises UnknownPart, as find_matcher."""
        self.name = name
        self.decisions: Counter[Decision] = Counter()
        self._version = version
        self._matcher = find_matcher(name)
        self._known: dict[int, tuple[list[Message], bool]] = {}

    def decide(self, request: Replayed, seen: int, locate: Locate) -> Decision:
        """What the shadow would have done with an accepted request; the session does not change.

        Args:
            seen: as in Session.begin.
            locate: the session's own search.
        """
        ours = locate(request, seen)
        try:
            theirs = locate(_Asked(request.messages, self._matcher, self._known), seen)
        except SessionRefused:
            return "refused"
        if theirs is ours:
            return "same"
        if theirs is None:
            return "new_root"
        return "refused" if theirs.truncated and self._version == "v2" else "other_node"

    def count(self, decision: Decision) -> None:
        """Count the decision of a turn that became part of the session."""
        self.decisions[decision] += 1

    def view(self) -> dict[str, Any]:
        """What the session's metadata shows."""
        return {"matcher": self.name, "decisions": dict(sorted(self.decisions.items()))}


def open_shadow(settings: SessionSettings) -> Shadow | None:
    """The shadow that a session's settings ask for; None without one.

    Raises:
        UnknownPart: a matcher that there is not.
    """
    name = settings.shadow_matcher
    return None if name is None else Shadow(name, settings.version)


class _Asked(Replayed):
    """A request as the shadow's matcher sees it. What the session remembers of its own comparisons stays as it is.

    `known` remembers the last spelling of each generation's messages, and what the matcher said of it.
    """

    def __init__(
        self, messages: list[Any], matcher: Callable[..., bool], known: dict[int, tuple[list[Message], bool]]
    ) -> None:
        super().__init__(messages, matcher)
        self._asked = matcher
        self._known = known

    def repeats(self, node: Node) -> bool:
        end = node.n_messages
        if end > len(self.messages):
            return False
        start = end - 1 - len(node.appended)
        given = self.messages[start:end]
        known = self._known.get(node.seq)
        # A spelling is remembered where the session found it to be plain text: equal then means the same JSON.
        if known is not None and known[0] == given:
            return known[1]
        for place, message in enumerate(given, start):
            check_message(message, place)
        stored = [*node.appended, node.reply]
        same = all(ask_matcher(self._asked, ours, theirs) for ours, theirs in zip(stored, given, strict=True))
        if given == node.granted:
            self._known[node.seq] = (given, same)
        return same
