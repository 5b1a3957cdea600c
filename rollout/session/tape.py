"""The tape: the recorded exchanges of one session, in commit order, enough to replay it with no engine.

Deltas, never snapshots: an exchange's prompt is its parent's prompt and output ids followed by
`appended_ids`; its history is the parent's messages, the parent's reply, then `appended_messages`.
Columns and meanings: lake contract, trajectories.

**How a client's body is rebuilt** (`ClientSide` below does it). With history(None) = [] and
history(e) = the messages of e + [reply of e], the messages of exchange e are

    history(e.parent), each place i in e.respelled replaced by e.respelled[i], then e.appended_messages

and later exchanges of that path go on from there: history(e) keeps what e.respelled replaced, so a
client that always spells a message its own way has it here once.

The reply of an exchange is `commit(...)["choices"][0]["message"]` of the replay itself: it follows
from the prompt ids, the output ids, `finish`, `matched` and the tools, in either version alike.
`tools` is null where they are those of exchange seq - 1 (of no tools for seq 0); an empty list says
that this exchange had none where the one before had some. `settings` has three keys:

- `body`: every other field of the client's body that the session reads (model, temperature, stop,
  max_tokens, chat_template_kwargs, tool_choice, ...), as sent. So body = {**settings["body"],
  "messages": ..., "tools": ... if there are any}.
- `sampling`: the effective parameters in SGLang's names after the session's pins, without the cap
  by context and max_seq_len and without the seed (that is `sampling_seed`). For readers only.
- `seen`, only where it is not `seq`: how many exchanges were committed when this request came in.
  Later ones ran beside it, so it cannot extend them: `begin(body, seen=...)`.

`parent` is the exchange whose tokens the prompt begins with; null for a root. In v1 every exchange
that a later one rolled back has `rolled_back`; the others, in order, are the chain. Replaying all
exchanges in order on the tape's own version gives the same prompts, replies and samples bit for bit.
A v1 answer that lost a race was never committed and is not on the tape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout.columns import dump_json
from rollout.sample import WeightSpan
from rollout.session.settings import SessionSettings
from rollout.tape_columns import TAPE_SCHEMA

ENGINE_PREFIX = "engine_"


@dataclass(kw_only=True, slots=True, eq=False)
class Exchange:
    """One committed generation: what the client appended, what the engine was given and sampled.

    `_P` counts appended prompt ids, `_O` sampled ids. Times are UTC.
    """

    seq: int
    parent: int | None
    rolled_back: bool = False
    appended_messages: list[dict[str, Any]]
    respelled: dict[int, dict[str, Any]] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    appended_ids_P: NDArray[np.int32]
    output_ids_O: NDArray[np.int32]
    output_log_probs_O: NDArray[np.float64]
    finish: str
    matched: str | int | None = None
    weight_version: str | None = None
    weight_spans: list[WeightSpan] = field(default_factory=list)
    routed_experts: bytes | None = None
    routed_experts_shape: list[int] | None = None
    cached_tokens: int = 0
    sampling_seed: int | None = None
    rid: str = ""
    requested_at: datetime
    committed_at: datetime
    engine_seconds: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class Tape:
    """A session as it can be replayed: settings, exchanges by `seq`, and what was refused, by HTTP status.

    An engine's own 4xx or 5xx that was passed on counts under ENGINE_PREFIX and the status.
    """

    session_id: str
    settings: SessionSettings
    exchanges: list[Exchange] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)


def tape_to_table(tape: Tape, outcome: dict[str, Any] | None = None) -> pa.Table:
    """The tape as rows of TAPE_SCHEMA: first the session's own (seq -1), then one per exchange.

    Args:
        outcome: what the driver adds to the session's row (rollout.outcome.Outcome.to_json).
    """
    rows = [session_row(tape, outcome), *(exchange_row(tape.session_id, exchange) for exchange in tape.exchanges)]
    return pa.Table.from_pylist(rows, schema=TAPE_SCHEMA)


def session_row(tape: Tape, outcome: dict[str, Any] | None = None) -> dict[str, Any]:
    """The session's own row (seq -1); columns that are not there are null."""
    session = {"settings": tape.settings.to_json(), "refused": tape.refused, "outcome": outcome}
    return {"session_id": tape.session_id, "seq": -1, "session": dump_json(session)}


def exchange_row(session_id: str, exchange: Exchange) -> dict[str, Any]:
    """The row of one exchange."""
    row = {name: getattr(exchange, name) for name in _PLAIN}
    row |= {name: None if getattr(exchange, name) is None else dump_json(getattr(exchange, name)) for name in _JSON}
    row["respelled"] = dump_json({str(k): v for k, v in exchange.respelled.items()}) if exchange.respelled else None
    row["session_id"] = session_id
    row["appended_ids"] = exchange.appended_ids_P
    row["output_ids"] = exchange.output_ids_O
    row["output_log_probs"] = exchange.output_log_probs_O
    row["weight_spans"] = [{"version": s.version, "start": s.start, "end": s.end} for s in exchange.weight_spans]
    return row


def table_to_tape(table: pa.Table) -> tuple[Tape, dict[str, Any] | None]:
    """The tape of one session and the driver's outcome from its rows, in any order; bits are kept."""
    return rows_to_tape(table.to_pylist())


def rows_to_tape(rows: list[dict[str, Any]]) -> tuple[Tape, dict[str, Any] | None]:
    """As table_to_tape, of rows in Python."""
    rows = sorted(rows, key=lambda row: row["seq"])
    if not rows or rows[0]["seq"] != -1:
        raise ValueError("a tape needs its session's own row (seq -1)")
    session = json.loads(rows[0]["session"])
    tape = Tape(
        session_id=rows[0]["session_id"],
        settings=SessionSettings(**session["settings"]),
        exchanges=[_exchange(row) for row in rows[1:]],
        refused=session["refused"],
    )
    return tape, session["outcome"]


def _exchange(row: dict[str, Any]) -> Exchange:
    values = {name: row[name] for name in _PLAIN}
    values |= {name: None if row[name] is None else json.loads(row[name]) for name in _JSON}
    respelled = json.loads(row["respelled"]) if row["respelled"] else {}
    return Exchange(
        **values,
        respelled={int(k): v for k, v in respelled.items()},
        appended_ids_P=np.array(row["appended_ids"], np.int32),
        output_ids_O=np.array(row["output_ids"], np.int32),
        output_log_probs_O=np.array(row["output_log_probs"], np.float64),
        weight_spans=[WeightSpan(**span) for span in row["weight_spans"] or []],
    )


class ClientSide:
    """Rebuilds what the client sent, exchange by exchange; the rule is the module's docstring.

    Feed it the replies of the replay in order: `body(e)`, replay it, `answered(e, message)`. Only
    exchanges on the path behind `e` need to have been answered, so a single chain works as well.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._replies: dict[int, dict[str, Any]] = {}
        self._tools: list[list[dict[str, Any]]] = []
        for exchange in tape.exchanges:
            before = self._tools[-1] if self._tools else []
            self._tools.append(before if exchange.tools is None else exchange.tools)

    def answered(self, seq: int, message: dict[str, Any]) -> None:
        """Keep the assistant message that the replay gave for exchange `seq`."""
        self._replies[seq] = message

    def body(self, seq: int) -> dict[str, Any]:
        """The chat body of exchange `seq`.

        Raises:
            KeyError: an exchange behind it has not been answered yet.
        """
        exchange = self._tape.exchanges[seq]
        messages = self._messages(seq)
        body = {**exchange.settings.get("body", {}), "messages": messages}
        return {**body, "tools": self._tools[seq]} if self._tools[seq] else body

    def seen(self, seq: int) -> int:
        """How many exchanges were committed when exchange `seq` was requested."""
        return int(self._tape.exchanges[seq].settings.get("seen", seq))

    def _messages(self, seq: int) -> list[dict[str, Any]]:
        path: list[int] = []
        place: int | None = seq
        while place is not None:
            path.append(place)
            place = self._tape.exchanges[place].parent
        messages: list[dict[str, Any]] = []
        for step in reversed(path):
            exchange = self._tape.exchanges[step]
            for older, message in exchange.respelled.items():
                messages[older] = message
            messages.extend(exchange.appended_messages)
            if step != seq:
                messages.append(self._replies[step])
        return messages


_PLAIN = (
    "seq",
    "parent",
    "rolled_back",
    "finish",
    "weight_version",
    "routed_experts",
    "routed_experts_shape",
    "cached_tokens",
    "sampling_seed",
    "rid",
    "requested_at",
    "committed_at",
    "engine_seconds",
)
_JSON = ("appended_messages", "tools", "settings", "matched")
