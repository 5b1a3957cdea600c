"""One request through its three phases: begin, generate outside the session, commit.

The session's own steps never wait, so between them other requests of the session may come and go.
A generation runs in a task of its own, for the client that asked for it and those that repeat the request
(rollout.session.coalescing). When the last of them leaves, or the session is deleted, it ends on the engine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import aiohttp
import orjson

from rollout.engine.generation import Generation, read_generation
from rollout.errors import EngineError, EngineFailed, EngineRefused, SessionRefused, describe
from rollout.session.coalescing import Running, Sent, find_running
from rollout.session.events import EventLog
from rollout.session.live import LiveSession, not_found
from rollout.session.metrics import Metrics
from rollout.session.room import CONTEXT_CODE
from rollout.session.turn import Turn

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What a chat needs of an EngineClient or EnginePool."""

    async def generate(self, request: dict[str, Any], *, rid: str, session_id: str | None) -> dict[str, Any]: ...

    async def abort(self, rid: str) -> None: ...


class Chat:
    """Answers chat bodies for any session of one server."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        vocabulary: int,
        *,
        events: EventLog,
        used: Callable[[LiveSession], None],
    ) -> None:
        """`used` is told of every session whose generation has ended."""
        self._engine = engine
        self._metrics = metrics
        self._vocabulary = vocabulary
        self._events = events
        self._used = used
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, live: LiveSession, body: Any, sent: Sent) -> Running:
        """Accept a chat body and start its generation, or join the one that it repeats. Await `finish` next.

        Raises:
            SessionRefused: as Session.begin, or 409 of rollout.session.coalescing; the session is as it was.
        """
        live.check_open()
        joined = find_running(live.generations.values(), sent)
        if joined is not None:
            joined.waiting += 1
            joined.answers += 1
            self._metrics.add("coalesced_total")
            return joined
        turn = live.session.begin(body, requested_at=datetime.now(UTC))
        self._count_request(live, turn)
        rid = f"chatcmpl-{uuid.uuid4().hex}"
        running = Running(rid=rid, sent=sent, turn=turn, task=self._start(self._run(live, turn, rid)))
        live.generations[rid] = running
        return running

    def count(self, live: LiveSession, body: Any) -> int:
        """Ids of the prompt that a chat body would have here.

        Raises:
            SessionRefused: as Session.count.
        """
        live.check_open()
        return live.session.count(body)

    async def finish(self, live: LiveSession, running: Running) -> dict[str, Any]:
        """The chat.completion of a turn that was begun; the session has one more turn then.

        Raises:
            SessionRefused: refused by the engine, or the engine failed: its own status, or 502 where
                it gave none or its answer is no generation; 500 where the journal does not take the
                turn. The session is as it was.
        """
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if live.closed and current is not None and not current.cancelling():
                self._end(live, running)
                raise not_found(live.session.session_id) from None
            running.waiting -= 1
            if not running.waiting:
                self._end(live, running)
            raise

    def _end(self, live: LiveSession, running: Running) -> None:
        """Nobody waits any more, or the session is gone.

        What is done here need not wait for the task, which may not even have begun.
        """
        live.generations.pop(running.rid, None)
        live.session.release(running.turn)
        running.task.cancel()

    async def _run(self, live: LiveSession, turn: Turn, rid: str) -> dict[str, Any]:
        """Generate and commit."""
        try:
            generation = await self._generate(live, turn, rid)
            live.check_open()
            reply = live.session.commit(turn, generation, committed_at=datetime.now(UTC), rid=rid)
        except BaseException:
            live.session.release(turn)
            raise
        finally:
            live.generations.pop(rid, None)
            self._used(live)
        self._count_turn(live, turn, generation)
        return reply

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that lives until it ends, whoever waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _generate(self, live: LiveSession, turn: Turn, rid: str) -> Generation:
        session_id = live.session.session_id
        try:
            reply = await self._engine.generate(turn.engine_body, rid=rid, session_id=session_id)
            n_prompt, experts = turn.n_prompt, turn.experts
            return read_generation(reply, vocabulary=self._vocabulary, n_prompt=n_prompt, experts=experts)
        except asyncio.CancelledError:
            self._metrics.add("aborted_total")
            self._events.write("aborted", session_id=session_id, rid=rid)
            self._start(self._tell_abort(rid))  # another task: this one is being cancelled
            raise
        except EngineRefused as error:
            self._metrics.add("engine_refusals_total")
            raise _engine_refusal(error) from error
        except EngineFailed as error:
            self._metrics.add("engine_failures_total")
            raise SessionRefused(error.status, str(error), retry=True, engine=True) from error
        except EngineError as error:
            self._metrics.add("engine_failures_total")
            raise SessionRefused(502, _failure_text(error)) from error

    async def _tell_abort(self, rid: str) -> None:
        try:
            await self._engine.abort(rid)
        except EngineError as error:
            log.warning("abort of %s failed: %s", rid, error)

    async def close(self) -> None:
        """Wait for what ends, and for aborts that are on their way, a second at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while self._tasks:
                    await asyncio.wait(set(self._tasks))

    def _count_request(self, live: LiveSession, turn: Turn) -> None:
        self._metrics.add("ignored_fields_total", len(turn.request.ignored))
        self._metrics.add("unknown_tool_results_total", turn.unknown_results)
        self._metrics.add("control_strings_total", turn.control_text)
        if turn.shadow is not None:
            label = f'matcher="{live.session.settings.shadow_matcher}",decision="{turn.shadow}"'
            self._metrics.add("shadow_decisions_total", label=label)
        if turn.refusal is not None:
            self._metrics.add("bridge_refusals_total", label=f'reason="{turn.refusal}"')

    def _count_turn(self, live: LiveSession, turn: Turn, generation: Generation) -> None:
        n_sampled = len(generation.output_ids_O)
        self._metrics.add("unreadable_tool_calls_total", turn.unreadable_calls)
        if turn.recorded:
            self._metrics.add("turns_total")
            self._metrics.add("sampled_tokens_total", n_sampled)
        else:
            self._metrics.add("unrecorded_total")
        self._events.write(
            "turn" if turn.recorded else "overtaken",
            session_id=live.session.session_id,
            n_prompt=turn.n_prompt,
            n_sampled=n_sampled,
            ms=round((datetime.now(UTC) - turn.requested_at).total_seconds() * 1000, 1),
        )


def _failure_text(error: EngineError) -> str:
    cause = error.__cause__
    if isinstance(cause, aiohttp.ClientError | OSError):
        return f"backend transport error: {describe(cause)}"
    return f"the engine failed: {error}"


def _engine_refusal(error: EngineRefused) -> SessionRefused:
    """The engine's own status and words; a prompt that is too long gets the code that SDKs know."""
    message = error.body[:2000].decode(errors="replace")
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(error.body)
        value = value.get("error", value) if isinstance(value, dict) else value
        if isinstance(value, dict) and isinstance(value.get("message"), str):
            message = value["message"]
    code = CONTEXT_CODE if "context length" in message else None
    return SessionRefused(error.status, message, code=code, retry=error.status in (408, 429), engine=True)
