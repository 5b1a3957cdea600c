"""A tape played again with no engine: the client's bodies rebuilt, the recorded generations committed.

Before a generation is committed, the prompt that the session made must be the recorded one, id for
id. A session that refuses a request, or makes another prompt, stops the replay there; that is data
for the verdict, not an error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollout.errors import SessionRefused
from rollout.identity import SessionVersion
from rollout.parity.compare import diff_values
from rollout.session.replaying import recorded_generation
from rollout.session.session import Session, open_session
from rollout.session.tape import ClientSide, Tape
from rollout.tito.renderer import Tito

TRUNCATED_TEXT = "truncated generation cannot be extended"
"""How v2's refusal to extend a cut turn begins; agents of the reference rely on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why a replay could not go on, said in `paths` as a verdict lists it.

    `kind` is `refused` (the session answers with a refusal), `prompt` (it made another prompt than the
    recorded one) or `overtaken` (v1 does not record a turn that ran beside another).
    `truncated_extension` marks the refusal to go on behind a cut turn.
    """

    kind: Literal["refused", "prompt", "overtaken"]
    paths: list[str]
    truncated_extension: bool = False

    @classmethod
    def refused(cls, where: str, version: SessionVersion, refusal: SessionRefused) -> Stop:
        """The session refused the exchange, or the samples, that `where` names."""
        return cls(
            kind="refused",
            paths=[f"{where}: {version} answers {refusal.status}: {refusal.message}"],
            truncated_extension=refusal.status == 409 and refusal.message.startswith(TRUNCATED_TEXT),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Replay:
    """A replayed session as far as it came; `stop` is null when all exchanges were committed.

    `client` knows every reply, so it gives each exchange's body as the client sent it.
    """

    session: Session
    client: ClientSide
    stop: Stop | None = None


def replay(tape: Tape, *, version: SessionVersion, tito: Tito, only: Sequence[int] | None = None) -> Replay:
    """Commit the tape's exchanges, or `only` those (by seq, ascending), to a new session of `version`.

    Each exchange of `only` must come with its parent, if it has one.
    """
    settings = replace(tape.settings, version=version, shadow_matcher=None)  # a shadow is no part of what is proven
    session = open_session(settings, tito, tape.session_id)
    client = ClientSide(tape)
    recorded: list[int] = []
    for seq in range(len(tape.exchanges)) if only is None else only:
        # Of the exchanges replayed here, those that were committed when this request came in.
        seen = bisect_left(recorded, client.seen(seq))
        stop = _play(session, tape, client, seq, seen)
        if stop is not None:
            return Replay(session=session, client=client, stop=stop)
        recorded.append(seq)
    return Replay(session=session, client=client)


def _play(session: Session, tape: Tape, client: ClientSide, seq: int, seen: int) -> Stop | None:
    """Begin and commit one exchange; where that is not possible, why."""
    exchange, version = tape.exchanges[seq], session.settings.version
    try:
        turn = session.begin(client.body(seq), requested_at=exchange.requested_at, seen=seen)
    except SessionRefused as refusal:
        return Stop.refused(f"exchange[{seq}]", version, refusal)
    paths = diff_values(prompt_ids(tape, seq), turn.prompt_ids_T, f"exchange[{seq}].prompt_ids")
    if paths:
        return Stop(kind="prompt", paths=paths)
    generation = recorded_generation(exchange, turn.n_prompt)
    reply = session.commit(turn, generation, committed_at=exchange.committed_at, rid=exchange.rid)
    if not turn.recorded:
        return Stop(kind="overtaken", paths=[f"exchange[{seq}]: {version} does not record it, another ran beside it"])
    client.answered(seq, reply["choices"][0]["message"])
    return None


def prompt_ids(tape: Tape, seq: int) -> NDArray[np.int32]:
    """The recorded prompt of an exchange, put together from the tape's deltas."""
    exchange = tape.exchanges[seq]
    parts = [exchange.appended_ids_P]
    while exchange.parent is not None:
        exchange = tape.exchanges[exchange.parent]
        parts += (exchange.output_ids_O, exchange.appended_ids_P)
    return np.concatenate(parts[::-1])
