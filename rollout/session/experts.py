"""Routed experts of a conversation: which rows a turn asks for, and how a sample's rows are joined from its turns'.

A turn asks only for the rows that its conversation lacks, from that of its parent's last id on: whole replies would
grow with the square of the conversation, on the wire and on the tape. So an id's row tells the experts of the forward
pass that the ids after it were sampled with. Where a later turn gave an id's row again, its own holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engine.generation import AskedExperts
from rollout.session.node import Node


def ask_experts(parent: Node | None, routed: tuple[int, int] | None) -> AskedExperts | None:
    """The rows that a turn behind `parent` lacks: all, or those from its last sampled id on.

    Args:
        routed: layers and experts per token of the model; null where nothing is asked for.
    """
    if routed is None:
        return None
    known = parent is not None and parent.generation.routed_experts is not None
    return AskedExperts(layers=routed[0], per_token=routed[1], start=parent.n_tokens - 1 if parent and known else 0)


def experts_of(path: Sequence[Node], n_tokens: int) -> tuple[bytes | None, list[int] | None]:
    """Rows of the first `n_tokens` ids of a root path but the last, and their shape.

    Null where the last generation has none, or a row of any id is missing.

    Args:
        n_tokens: reaches into what the path's last generation sampled.
    """
    shape = path[-1].generation.routed_experts_shape
    if path[-1].generation.routed_experts is None or not shape:
        return None, None
    parts: list[bytes] = []
    end = n_tokens - 1
    for node in reversed(path):
        data, own = node.generation.routed_experts, node.generation.routed_experts_shape
        if data is None or not own or own[1:] != shape[1:] or not end < node.n_tokens or own[0] >= node.n_tokens:
            return None, None
        width, start = len(data) // own[0], node.n_tokens - 1 - own[0]
        if start < end:
            parts.append(data[: (end - start) * width])
            end = start
        if end <= 0:
            return b"".join(reversed(parts)), [n_tokens - 1, *shape[1:]]
    return None, None
