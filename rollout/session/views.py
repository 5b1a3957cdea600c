"""What GET /sessions/{id} shows, rebuilt on demand from the nodes' deltas."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from rollout.session.drift import PathDrift
from rollout.session.node import Message, Node, tokens_of
from rollout.session.reply import completion
from rollout.session.shadow import Shadow
from rollout.session.tree import leaves

MAX_TRIM_TOKENS = 0
"""Tokens that assembly may trim between turns: none here; agents of the reference look for the key."""


def metadata_view(
    path: Sequence[Node],
    forest: Sequence[Node] | None,
    agent: dict[str, Any] | None,
    shadow: Shadow | None,
    drift: PathDrift | None,
) -> dict[str, Any]:
    """Session metadata: the active path's ids and drift, v2's tree, an agent's own and a shadow's counts."""
    view: dict[str, Any] = {
        "accumulated_token_ids": tokens_of(list(path)).tolist(),
        "max_trim_tokens": MAX_TRIM_TOKENS,
    }
    mismatch = drift.of(path) if drift is not None else None
    if mismatch is not None:
        view["tito_session_mismatch"] = mismatch
    if forest is not None:
        view["tree"] = {"nodes": [_node_row(node) for node in forest], "leaves": _leaf_rows(forest)}
    if agent is not None:
        view["agent"] = agent
    if shadow is not None:
        view["shadow"] = shadow.view()
    return view


def _node_row(node: Node) -> dict[str, Any]:
    return {
        "id": node.seq,
        "parent": node.parent.seq if node.parent else None,
        "seq": node.seq,
        "truncated": node.truncated,
        "committed_at": node.committed_at.timestamp(),
        "completion_span": [node.n_tokens - len(node.generation.output_ids_O), node.n_tokens],
        "num_tokens": node.n_tokens,
        "response_id": node.rid,
    }


def _leaf_rows(forest: Sequence[Node]) -> list[dict[str, Any]]:
    paths: dict[int, list[int]] = {}
    for node in forest:
        paths[node.seq] = [*(paths[node.parent.seq] if node.parent else []), node.seq]
    return [{"node_id": leaf.seq, "path_node_ids": paths[leaf.seq]} for leaf in leaves(forest)]


def records_view(path: Sequence[Node]) -> list[dict[str, Any]]:
    """One record per generation of a path: what was asked, with prompt ids, and what was answered."""
    records = []
    history: list[Message] = []
    ids: list[int] = []
    for node in path:
        for place, message in node.respelled.items():
            history[place] = message
        ids = [*ids, *node.appended_ids_P.tolist()]
        records.append(_record(node, [*history, *node.appended], ids))
        history.extend([*node.appended, node.reply])
        ids = [*ids, *node.generation.output_ids_O.tolist()]
    return records


def _record(node: Node, messages: list[Message], input_ids: list[int]) -> dict[str, Any]:
    request = {**node.settings["body"], "messages": messages, "input_ids": input_ids}
    if node.tools:
        request["tools"] = node.tools
    response = completion(
        node.reply,
        node.generation,
        n_prompt=len(input_ids),
        model=node.settings["body"].get("model", ""),
        rid=node.rid,
        committed_at=node.committed_at,
    )
    if node.generation.routed_experts is not None:
        # Kept from the client, for whom it is of no use and long; a record has everything.
        experts = base64.b64encode(node.generation.routed_experts).decode()
        response["choices"][0]["meta_info"]["routed_experts"] = experts
    return {
        "timestamp": node.committed_at.timestamp(),
        "request_timestamp": node.requested_at.timestamp(),
        "method": "POST",
        "path": "/v1/chat/completions",
        "request": request,
        "response": response,
        "status_code": 200,
    }
