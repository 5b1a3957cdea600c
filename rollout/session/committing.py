"""From a turn and its generation to the answer that the client gets, and to the node that the session keeps."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rollout.engine.generation import Generation
from rollout.session.node import Message, Node, ids_bytes, open_ids_of
from rollout.session.reply import assistant_message, completion
from rollout.session.turn import Turn
from rollout.tito.renderer import Tito


def answer_turn(
    turn: Turn, generation: Generation, tito: Tito, *, rid: str, committed_at: datetime
) -> tuple[Message, dict[str, Any]]:
    """The assistant message in a generation, and the chat.completion around it; counts `turn.unreadable_calls`."""
    parsed = tito.parse(
        open_ids_of(turn.appended_ids_P, turn.open_length),
        generation.output_ids_O.tolist(),
        tools=turn.request.tools,
        stopped=generation.finish == "stop",
        matched=generation.matched,
        thinking=turn.request.thinking,
        template=turn.request.template,
    )
    turn.unreadable_calls = parsed.unreadable_calls
    message = assistant_message(parsed, generation, turn.digest.digest())
    model = turn.request.model
    reply = completion(message, generation, n_prompt=turn.n_prompt, model=model, rid=rid, committed_at=committed_at)
    return message, reply


def make_node(
    turn: Turn, generation: Generation, message: Message, before: Node | None, *, rid: str, committed_at: datetime
) -> Node:
    """The node behind `before`, the session's last: its tools and settings are that one's where they are equal."""
    parent, seq = turn.parent, before.seq + 1 if before else 0
    digest = turn.digest.copy()
    digest.update(ids_bytes(generation.output_ids_O))
    settings = _settings(turn, seq)
    tools = turn.request.given_tools
    return Node(
        seq=seq,
        parent=parent,
        appended=turn.appended,
        respelled=turn.respelled,
        reply=message,
        tools=before.tools if before and before.tools == tools else tools,
        settings=before.settings if before and before.settings == settings else settings,
        appended_ids_P=turn.appended_ids_P,
        open_length=turn.open_length,
        generation=generation,
        control_text=turn.control_text,
        sampling_seed=turn.sampling_seed,
        rid=rid,
        requested_at=turn.requested_at,
        committed_at=committed_at,
        n_messages=(parent.n_messages if parent else 0) + len(turn.appended) + 1,
        n_tokens=turn.n_prompt + len(generation.output_ids_O),
        digest=digest,
        written_ids=turn.written_with(generation.output_ids_O),
    )


def _settings(turn: Turn, seq: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"body": turn.request.body, "sampling": turn.sampling}
    if turn.seen != seq:
        settings["seen"] = turn.seen
    return settings
