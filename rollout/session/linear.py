"""Version v1: one line of generations. A request extends it, or first takes its last generation back.

The rollback takes effect at commit, together with the new turn: a request that is refused, fails or
is cancelled leaves the line as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.errors import SessionRefused
from rollout.session.matching import Matcher
from rollout.session.node import Node, history_of

Message = dict[str, Any]

MAX_ROLLBACK = 1
"""Generations that one request may take back."""


def locate(line: Sequence[Node], request: Sequence[Message], matcher: Matcher) -> Node | None:
    """The generation that `request` extends; None for the empty line.

    Only generations are checkpoints: an assistant message of the client's own is prompt history.

    Raises:
        SessionRefused: 400, the request would take back more than one generation.
    """
    stored = history_of(list(line))
    matched = 0
    for ours, theirs in zip(stored, request, strict=False):
        if not matcher(ours, theirs):
            break
        matched += 1
    if matched == len(stored):
        return line[-1] if line else None
    kept = sum(node.n_messages <= matched for node in line)
    if len(line) - kept > MAX_ROLLBACK:
        raise SessionRefused(
            400,
            f"rollback failed: discard_count={len(line) - kept} exceeds max_assistant_rollback_steps={MAX_ROLLBACK} "
            f"(stored has {len(stored)} messages, request has {len(request)} messages)",
        )
    return line[kept - 1] if kept else None
