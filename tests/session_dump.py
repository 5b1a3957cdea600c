"""A session as bytes, to hold two states of it against each other."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from rollout.session.session import Session
from rollout.session.tape import tape_to_table
from rollout.session.views import records_view


def dump(session: Session) -> bytes:
    """All that a session holds, as bytes: nodes with every field, order, running turns, and what clients see.

    Without what a node remembers of comparisons to save time: that changes no answer.
    """
    state = dict(vars(session))
    state["_tito"] = state["_matcher"] = state["keep"] = state["_shadow"] = None  # metadata() has the shadow's counts
    state["_drift"] = state["_trunk"] = None  # what was found before, to save time
    state["_running"] = sorted(id(turn) for turn in state["_running"])
    state["_room"] = vars(state["_room"])
    seeds = vars(state["_seeds"])
    state["_seeds"] = {**seeds, "_committed": sorted(item for item in seeds["_committed"].items() if item[1])}
    nodes = [
        {
            name: _plain(getattr(node, name))
            for name in node.__dataclass_fields__
            if name not in ("parent", "children", "digest", "generation", "granted")
        }
        | {"parent": node.parent.seq if node.parent else None, "children": [c.seq for c in node.children]}
        | {"digest": node.digest.hexdigest()}
        | {name: _plain(getattr(node.generation, name)) for name in node.generation.__dataclass_fields__}
        for node in session.nodes
    ]
    state |= {name: [node.seq for node in state[name]] for name in ("nodes", "line", "roots")}
    view = (records_view(session.active_path()), session.metadata())
    return repr((nodes, state, view, tape_bytes(session))).encode()  # not pickled: that tells equal texts apart


def _plain(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value


def tape_bytes(session: Session) -> bytes:
    """A session's tape as an Arrow stream."""
    table = tape_to_table(session.tape())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
