"""Requests that fail or are cancelled on their way through a chat leave the session byte for byte as it was."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOOLS, Conversation, play, tiny_tito, user
from session_dump import dump
from strategies import conversations

from rollout.errors import EngineError, EngineFailed, EngineRefused, SessionRefused
from rollout.session.chat import Chat
from rollout.session.coalescing import Sent
from rollout.session.events import EventLog
from rollout.session.journal import Opened
from rollout.session.live import LiveSession, LiveSessions
from rollout.session.metrics import Metrics

TITO = tiny_tito()
FAULTS: list[Any] = [
    EngineFailed(503, b"boom"),
    EngineRefused(400, b"{}"),
    EngineError("gone"),
    {},
    {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[float("nan"), 5, None]]}},
    {"meta_info": {"completion_tokens": 2, "output_token_logprobs": [[-0.5, 5, None]]}},
    {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 10**6, None]]}},
    None,
]
"""What an engine does: raises, answers nonsense, or (None) never answers."""


class FaultyGenerate:
    """Injects one fault into every generation; `aborted` has the rids that it was told to end."""

    def __init__(self, fault: Any) -> None:
        self.fault = fault
        self.aborted: list[str] = []

    async def generate(self, request: dict[str, Any], *, rid: str, session_id: str | None) -> dict[str, Any]:
        await asyncio.sleep(0)
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is None:
            await asyncio.Event().wait()
        return self.fault

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(("v1", "v2")),
    conversations,
    st.sampled_from(FAULTS),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
def test_what_fails_or_is_cancelled_leaves_the_session_byte_identical(
    version: str, steps: list[Any], fault: Any, n_ticks: int, is_repeated: bool, is_deleted: bool
) -> None:
    talk = Conversation(TITO, version, seed="07", max_seq_len=900)
    play(talk, steps)
    before = dump(talk.session)
    asyncio.run(_attempt(talk, fault, n_ticks, is_repeated, is_deleted))
    assert before == dump(talk.session)


async def _attempt(talk: Conversation, fault: Any, n_ticks: int, is_repeated: bool, is_deleted: bool) -> None:
    """One chat, joined by a repeat if so asked; without an answer both clients leave, or the session is deleted."""
    engine, sessions = FaultyGenerate(fault), LiveSessions(None, max_sessions=9, idle_s=60)
    events = EventLog("json", os.open(os.devnull, os.O_WRONLY))
    chat = Chat(engine, Metrics(), TITO.vocabulary, events=events, used=sessions.use)
    live = LiveSession(session=talk.session, opened=Opened(key="sk", opened_at=datetime.now(UTC)))
    sessions.add(live)
    body = {"model": "m", "messages": [user("hello")], "tools": TOOLS}

    async def client() -> None:
        await chat.finish(live, chat.begin(live, body, Sent(path="p", body=b"{}", is_repeat=is_repeated)))

    clients = [asyncio.create_task(client()) for _ in range(2)]
    for _ in range(n_ticks):
        await asyncio.sleep(0)
    if is_deleted:
        sessions.remove(live)
    else:
        for one in clients:
            one.cancel()
    for one in clients:
        with suppress(SessionRefused, asyncio.CancelledError):
            await one
    await chat.close()
    os.close(events._descriptor)
    assert ({}, 0) == (live.generations, talk.session.running)
