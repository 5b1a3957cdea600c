"""Version v2: a forest of generations that only grows. A request extends the deepest one that it replays."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.session.node import Node
from rollout.session.replayed import Replayed

MAX_NODES = 1024
"""Generations of one session, at most."""


def locate(roots: Sequence[Node], request: Replayed, *, seen: int) -> Node | None:
    """The deepest generation whose whole root path is a prefix of `request`; None opens a new root.

    A generation is entered only after its parent's messages are used up, and a partly matched one
    rules out all behind it. Of several at one depth the latest wins. Iterative: depth has no limit.

    Args:
        seen: generations from this seq on ran beside the request and cannot be meant by it.

    Raises:
        SessionRefused: 400, one of the messages is none.
    """
    best = request.known
    open_nodes = list(roots if best is None else best.children)
    while open_nodes:
        node = open_nodes.pop()
        if node.seq >= seen or not request.repeats(node):
            continue
        if best is None or (node.n_messages, node.seq) > (best.n_messages, best.seq):
            best = node
        open_nodes.extend(node.children)
    return best


def leaves(nodes: Sequence[Node]) -> list[Node]:
    """Generations that none extends, in creation order."""
    return [node for node in nodes if not node.children]
