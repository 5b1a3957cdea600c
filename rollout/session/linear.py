"""Version v1: one line of generations. A request extends it, or first takes its last generation back.

The rollback takes effect at commit, together with the new turn: a request that is refused, fails or
is cancelled leaves the line as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.errors import SessionRefused
from rollout.session.node import Node
from rollout.session.replayed import Replayed

MAX_ROLLBACK = 1
"""Generations that one request may take back."""


def locate(line: Sequence[Node], request: Replayed) -> Node | None:
    """The generation that `request` extends; None for the empty line.

    Only generations are checkpoints: an assistant message of the client's own is prompt history.

    Raises:
        SessionRefused: 400, the request would take back more than one generation, or has what is no message.
    """
    kept = 0 if request.known is None else line.index(request.known) + 1
    while kept < len(line) and request.repeats(line[kept]):
        kept += 1
    if len(line) - kept > MAX_ROLLBACK:
        request.check(0)
        raise SessionRefused(
            400,
            f"rollback failed: discard_count={len(line) - kept} exceeds max_assistant_rollback_steps={MAX_ROLLBACK} "
            f"(stored has {line[-1].n_messages} messages, request has {len(request)} messages)",
        )
    return line[kept - 1] if kept else None


def attach(line: list[Node], node: Node) -> None:
    """Make `node` the line's last, behind its parent; what stood there is rolled back."""
    keep = line.index(node.parent) + 1 if node.parent else 0
    for dropped in line[keep:]:
        dropped.rolled_back = True
    line[keep:] = [node]
