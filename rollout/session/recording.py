"""A session's nodes as tape exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.session.node import Node
from rollout.session.settings import SessionSettings
from rollout.session.tape import Exchange, Tape


def record_tape(session_id: str, settings: SessionSettings, nodes: Sequence[Node], refused: dict[str, int]) -> Tape:
    """The tape of nodes in commit order; semantics in rollout.session.tape."""
    exchanges = [record_exchange(node, nodes[place - 1] if place else None) for place, node in enumerate(nodes)]
    return Tape(session_id=session_id, settings=settings, exchanges=exchanges, refused=dict(refused))


def record_exchange(node: Node, before: Node | None) -> Exchange:
    """A node as an exchange; `before` is the node that was committed before it."""
    generation = node.generation
    unchanged = (before.tools if before else None) == node.tools
    return Exchange(
        seq=node.seq,
        parent=node.parent.seq if node.parent else None,
        rolled_back=node.rolled_back,
        appended_messages=node.appended,
        respelled=node.respelled,
        tools=None if unchanged else (node.tools or []),
        settings=node.settings,
        appended_ids_P=node.appended_ids_P,
        output_ids_O=generation.output_ids_O,
        output_log_probs_O=generation.output_log_probs_O,
        finish=generation.finish,
        matched=generation.matched,
        weight_version=generation.weight_version,
        weight_spans=generation.weight_spans,
        routed_experts=generation.routed_experts,
        routed_experts_shape=generation.routed_experts_shape,
        cached_tokens=generation.cached_tokens,
        sampling_seed=node.sampling_seed,
        rid=node.rid,
        requested_at=node.requested_at,
        committed_at=node.committed_at,
        engine_seconds=generation.engine_seconds,
    )
