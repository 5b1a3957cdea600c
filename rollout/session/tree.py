"""Version v2: a forest of generations that only grows. A request extends the deepest one that it replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.session.matching import Matcher
from rollout.session.node import Node

Message = dict[str, Any]

MAX_NODES = 1024
"""Generations of one session, at most."""


def locate(roots: Sequence[Node], request: Sequence[Message], matcher: Matcher, *, seen: int) -> Node | None:
    """The deepest generation whose whole root path is a prefix of `request`; None opens a new root.

    A generation is entered only after its parent's messages are used up, and a partly matched one
    rules out all behind it. Of several at one depth the latest wins. Iterative: depth has no limit.

    Args:
        seen: generations from this seq on ran beside the request and cannot be meant by it.
    """
    best: Node | None = None
    open_nodes = [(node, 0) for node in roots]
    while open_nodes:
        node, start = open_nodes.pop()
        if node.seq >= seen or not _replays(node, request, start, matcher):
            continue
        if best is None or (node.n_messages, node.seq) > (best.n_messages, best.seq):
            best = node
        open_nodes.extend((child, node.n_messages) for child in node.children)
    return best


def _replays(node: Node, request: Sequence[Message], start: int, matcher: Matcher) -> bool:
    if node.n_messages > len(request):
        return False
    if not all(map(matcher, node.appended, request[start : start + len(node.appended)])):
        return False
    return matcher(node.reply, request[node.n_messages - 1])


def leaves(nodes: Sequence[Node]) -> list[Node]:
    """Generations that none extends, in creation order."""
    return [node for node in nodes if not node.children]
