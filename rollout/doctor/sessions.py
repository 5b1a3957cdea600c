"""A session server of our own in front of the engine, used as a rollout uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from rollout.agents.tools import TOOLS
from rollout.config import BatchConfig
from rollout.doctor.finding import Finding, fail, ok
from rollout.doctor.tokens import MESSAGES
from rollout.errors import RolloutLakeError, SessionRefused, SessionUnreachable
from rollout.session.client import OpenedSession


async def check_sessions(engines: str | Sequence[str], tokenizer: Path, config: BatchConfig, log: Path) -> Finding:
    """Start one as a worker does, open a session with a batch's settings, play one turn, and end it all."""
    from rollout.batch.sessions import session_server  # these two import much
    from rollout.generate import session_settings

    started = time.monotonic()
    try:
        async with session_server(engines, tokenizer, config, log=log) as sessions:
            opened = await sessions.open(session_settings(config, 0, 0))
            finish = await _play_turn(opened)
            await sessions.delete(opened.session_id)
    except RolloutLakeError as error:
        return fail("sessions", f"{error}: do --model and --renderer belong to this engine?")
    seconds = time.monotonic() - started
    return ok(
        "sessions", f"a session opened, took a turn ({finish}) and closed; {seconds:.1f} s with its server's start"
    )


async def _play_turn(session: OpenedSession) -> str:
    """One chat completion with tools, as an agent asks for it; its finish reason.

    Raises:
        SessionRefused: the answer is no 200.
        SessionUnreachable: there is none.
    """
    body = {"model": "policy", "messages": MESSAGES[:2], "tools": TOOLS}
    headers = {"Authorization": f"Bearer {session.session_key}"}
    url = f"{session.base_url}/v1/chat/completions"
    try:
        async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as reply:
            if reply.status != 200:
                raise SessionRefused(reply.status, f"a turn is refused with {reply.status}: {await reply.text()}")
            return str((await reply.json())["choices"][0]["finish_reason"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise SessionUnreachable(f"the session server gave no answer to a turn: {error}") from error
