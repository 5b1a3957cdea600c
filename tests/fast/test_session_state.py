"""Requests that are refused, fail or are cancelled leave a session byte for byte as it was; tapes keep bits."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOOLS, Conversation, play, tiny_tito, user
from strategies import conversations

from rollout.errors import SessionRefused
from rollout.session.session import Session
from rollout.session.tape import ClientSide, table_to_tape, tape_to_table
from rollout.session.views import records_view

TITO = tiny_tito()
VERSIONS = ("v1", "v2")


def dump(session: Session) -> bytes:
    """All that a session holds, as bytes: nodes with every field, order, running turns, and what clients see.

    Without what a node remembers of comparisons to save time: that changes no answer.
    """
    state = dict(vars(session))
    state["_tito"] = state["_matcher"] = state["_drift"] = None  # the comparator: what it found before
    state["_running"] = sorted(id(turn) for turn in state["_running"])
    state["_prompts"] = sorted(item for item in state["_prompts"].items() if item[1])
    nodes = [
        {
            name: _plain(getattr(node, name))
            for name in node.__dataclass_fields__
            if name not in ("parent", "children", "digest", "generation", "granted", "lax")
        }
        | {"parent": node.parent.seq if node.parent else None, "children": [c.seq for c in node.children]}
        | {"digest": node.digest.hexdigest()}
        | {name: _plain(getattr(node.generation, name)) for name in node.generation.__dataclass_fields__}
        for node in session.nodes
    ]
    state |= {name: [node.seq for node in state[name]] for name in ("nodes", "line", "roots")}
    view = (records_view(session.active_path()), session.metadata())
    return pickle.dumps((nodes, state, view, _tape_bytes(session)))


def _plain(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value


def _tape_bytes(session: Session) -> bytes:
    table = tape_to_table(session.tape())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


_bad = st.sampled_from(
    [
        {"messages": [user("x"), {"role": "developer", "content": "y"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": "x"},
        {"n": 2},
        {"stop_token_ids": [10**9]},
        {"chat_template_kwargs": 1},
        [],
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VERSIONS), conversations, st.lists(st.tuples(_bad, conversations), max_size=3))
def test_requests_that_come_to_nothing_leave_a_session_byte_identical(
    version: str, steps: list[Any], attempts: list[tuple[Any, list[Any]]]
) -> None:
    talk = Conversation(TITO, version, seed="07", max_seq_len=600)
    play(talk, steps)
    before = dump(talk.session)
    history = records_view(talk.session.active_path())
    for bad, more in attempts:
        with pytest.raises(SessionRefused):
            talk.session.begin(
                {"messages": [user("x")], **bad} if isinstance(bad, dict) else bad, requested_at=talk.tick()
            )
        assert before == dump(talk.session)
        for step in more:
            request = step[0] if isinstance(step, list) else step
            base = history[-1]["request"]["messages"] if history and request["base"] is not None else [user("hello")]
            try:
                turn = talk.begin([*base, *request["new"]], **({"tools": TOOLS} if request["tools"] else {}))
            except SessionRefused:
                assert before == dump(talk.session)
                continue
            assert before != dump(talk.session)
            talk.session.release(turn)
            assert before == dump(talk.session)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VERSIONS), conversations)
def test_a_tape_keeps_every_bit_and_gives_back_every_body(version: str, steps: list[Any]) -> None:
    talk = Conversation(TITO, version)
    play(talk, steps)
    tape = talk.session.tape(refused={"400": 2})
    table = tape_to_table(tape, {"reward": 1.0})
    back, outcome = table_to_tape(table)
    assert ({"reward": 1.0}, {"400": 2}) == (outcome, back.refused)
    assert table.equals(tape_to_table(back, outcome))
    client = ClientSide(back)
    again = Conversation(TITO, version)
    for exchange, node in zip(back.exchanges, talk.session.nodes, strict=True):
        turn = again.session.begin(
            client.body(exchange.seq), requested_at=exchange.requested_at, seen=client.seen(exchange.seq)
        )
        assert exchange.appended_ids_P.tobytes() == turn.appended_ids_P.tobytes()
        reply = again.session.commit(turn, node.generation, committed_at=exchange.committed_at, rid=exchange.rid)
        client.answered(exchange.seq, reply["choices"][0]["message"])
    assert _tape_bytes(talk.session) == _tape_bytes(again.session)
    assert talk.session.metadata() == again.session.metadata()


def test_v1_marks_what_was_rolled_back() -> None:
    talk = Conversation(TITO, "v1")
    talk.ask(user("a"))
    start = talk.history
    talk.ask(user("b"))
    talk.history = start
    talk.ask(user("c"))
    exchanges = talk.session.tape().exchanges
    assert [(None, False), (0, True), (0, False)] == [(e.parent, e.rolled_back) for e in exchanges]


def test_a_tape_says_what_ran_beside_what() -> None:
    talk = Conversation(TITO, "v2")
    talk.ask(user("a"), text="x")
    first, second = talk.begin([user("b")]), talk.begin([user("c")])
    talk.commit(second, "y")
    talk.commit(first, "z")
    exchanges = talk.session.tape().exchanges
    assert [None, None, 1] == [exchange.settings.get("seen") for exchange in exchanges]
    assert {"body": {"model": "m"}, "sampling": {"temperature": 1.0}} == exchanges[0].settings


def test_a_turn_cannot_extend_what_was_committed_beside_it() -> None:
    talk = Conversation(TITO, "v2")
    late = talk.begin([user("a"), {"role": "assistant", "content": "ok"}, user("b")])
    talk.ask(user("a"), text="ok")
    talk.commit(late, "z")
    client = ClientSide(talk.session.tape())
    again = Conversation(TITO, "v2")
    again.ask(user("a"), text="ok")
    client.answered(0, again.history[-1])
    body = client.body(1)
    assert again.session.begin(body, requested_at=again.now).parent is again.session.nodes[0]
    assert again.session.begin(body, requested_at=again.now, seen=client.seen(1)).parent is None
