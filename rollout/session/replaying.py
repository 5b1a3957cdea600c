"""Exchanges of a tape played again with no engine: what a session needs of each, and a whole session of them."""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC
from typing import cast

from rollout.engine.generation import Finish, Generation
from rollout.errors import CannotRestore, SessionRefused
from rollout.session.session import Session, open_session
from rollout.session.tape import ClientSide, Exchange, Tape
from rollout.tito.renderer import Tito


def recorded_generation(exchange: Exchange, n_prompt: int) -> Generation:
    """What the engine answered in this exchange, whose prompt had so many ids."""
    return Generation(
        output_ids_O=exchange.output_ids_O,
        output_log_probs_O=exchange.output_log_probs_O,
        finish=cast(Finish, exchange.finish),
        matched=exchange.matched,
        cached_tokens=exchange.cached_tokens,
        prompt_tokens=n_prompt,
        weight_version=exchange.weight_version,
        weight_spans=exchange.weight_spans,
        routed_experts=exchange.routed_experts,
        routed_experts_shape=exchange.routed_experts_shape,
        engine_seconds=exchange.engine_seconds,
    )


def restore_session(tape: Tape, tito: Tito, *, context_length: int | None) -> Generator[None, None, Session]:
    """In steps, an exchange each: the session that recorded `tape`, in the very state that it had then.

    Args:
        context_length: as the session was opened with.

    Raises:
        CannotRestore: an exchange is refused, or its prompt is another one than the recorded.
        UnknownPart: a matcher, picker or finisher that is no longer installed.
    """
    if tape.settings.renderer != tito.name:
        raise CannotRestore(f"it was rendered by {tape.settings.renderer}, this server renders {tito.name}")
    session, client = (
        open_session(tape.settings, tito, tape.session_id, context_length=context_length),
        ClientSide(tape),
    )
    for exchange in tape.exchanges:
        try:
            _commit(session, client, exchange)
        except SessionRefused as refusal:
            raise CannotRestore(f"exchange {exchange.seq} is refused with {refusal.status}") from refusal
        yield
    return session


def _commit(session: Session, client: ClientSide, exchange: Exchange) -> None:
    seq = exchange.seq
    turn = session.begin(client.body(seq), requested_at=exchange.requested_at.astimezone(UTC), seen=client.seen(seq))
    # With the same parent and the same appended ids at every exchange, all prompts are the recorded ones.
    same = exchange.appended_ids_P.tobytes() == turn.appended_ids_P.tobytes()
    if not same or exchange.parent != (turn.parent.seq if turn.parent else None):
        session.release(turn)
        raise CannotRestore(f"exchange {seq} has another prompt")
    # It counted the turns that ran beside it, which may have failed or been committed later.
    turn.sampling_seed = exchange.sampling_seed
    reply = session.commit(
        turn,
        recorded_generation(exchange, turn.n_prompt),
        committed_at=exchange.committed_at.astimezone(UTC),
        rid=exchange.rid,
    )
    if not turn.recorded:
        raise CannotRestore(f"exchange {seq} is not recorded again")
    client.answered(seq, reply["choices"][0]["message"])
