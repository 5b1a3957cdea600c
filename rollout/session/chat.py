"""One request through its three phases: begin, generate outside the session, commit.

The session's own steps never wait, so between them other requests of the session may come and go.
A client that leaves, or a session that is deleted, ends the generation on the engine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import aiohttp
import orjson

from rollout.engine.generation import Generation, read_generation
from rollout.errors import EngineError, EngineFailed, EngineRefused, SessionRefused, describe
from rollout.session.live import LiveSession, not_found
from rollout.session.metrics import Metrics
from rollout.session.session import CONTEXT_CODE
from rollout.session.turn import Turn

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What a chat needs of rollout.engine.client.EngineClient."""

    async def generate(self, request: dict[str, Any], *, rid: str, session_id: str | None) -> dict[str, Any]: ...

    async def abort(self, rid: str) -> None: ...


class Chat:
    """Answers chat bodies for any session of one server."""

    def __init__(self, engine: Engine, metrics: Metrics, vocabulary: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._vocabulary = vocabulary
        self._aborts: set[asyncio.Task[None]] = set()

    def begin(self, live: LiveSession, body: Any) -> Turn:
        """Accept a chat body; nothing has been generated yet. Who begins a turn awaits `finish` next.

        Raises:
            SessionRefused: as Session.begin; the session is as it was.
        """
        live.check_open()
        turn = live.session.begin(body, requested_at=datetime.now(UTC))
        self._count_request(live, turn)
        return turn

    def count(self, live: LiveSession, body: Any) -> int:
        """Ids of the prompt that a chat body would have here.

        Raises:
            SessionRefused: as Session.count.
        """
        live.check_open()
        return live.session.count(body)

    async def finish(self, live: LiveSession, turn: Turn) -> dict[str, Any]:
        """The chat.completion of a turn that was begun; the session has one more turn then.

        Raises:
            SessionRefused: refused by the engine, or the engine failed: its own status, or 502 where
                it gave none or its answer is no generation. The session is as it was.
        """
        rid = f"chatcmpl-{uuid.uuid4().hex}"
        try:
            generation = await self._generate(live, turn, rid)
            live.check_open()
            reply = live.session.commit(turn, generation, committed_at=datetime.now(UTC), rid=rid)
        except BaseException:
            live.session.release(turn)
            raise
        self._count_turn(turn, generation)
        return reply

    async def _generate(self, live: LiveSession, turn: Turn, rid: str) -> Generation:
        asked = self._engine.generate(turn.engine_body, rid=rid, session_id=live.session.session_id)
        task = asyncio.create_task(asked)
        live.generations[rid] = task
        try:
            reply = await task
            return read_generation(reply, vocabulary=self._vocabulary, n_prompt=turn.n_prompt)
        except asyncio.CancelledError:
            self._abort(rid)
            current = asyncio.current_task()
            if live.closed and current is not None and not current.cancelling():
                raise not_found(live.session.session_id) from None
            raise
        except EngineRefused as error:
            self._metrics.add("engine_failures_total")
            raise _engine_refusal(error) from error
        except EngineFailed as error:
            self._metrics.add("engine_failures_total")
            raise SessionRefused(error.status, str(error), retry=True, engine=True) from error
        except EngineError as error:
            self._metrics.add("engine_failures_total")
            raise SessionRefused(502, _failure_text(error)) from error
        finally:
            del live.generations[rid]

    def _abort(self, rid: str) -> None:
        """Tell the engine, and do not let the client's leaving cancel that too."""
        self._metrics.add("aborted_total")
        task = asyncio.create_task(self._tell_abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _tell_abort(self, rid: str) -> None:
        try:
            await self._engine.abort(rid)
        except EngineError as error:
            log.warning("abort of %s failed: %s", rid, error)

    async def close(self) -> None:
        """Wait for aborts that are on their way, a second at most."""
        if self._aborts:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._aborts, return_exceptions=True), 1.0)

    def _count_request(self, live: LiveSession, turn: Turn) -> None:
        self._metrics.add("ignored_fields_total", len(turn.request.ignored))
        self._metrics.add("unknown_tool_results_total", turn.unknown_results)
        self._metrics.add("control_strings_total", turn.control_text)
        if turn.shadow is not None:
            label = f'matcher="{live.session.settings.shadow_matcher}",decision="{turn.shadow}"'
            self._metrics.add("shadow_decisions_total", label=label)
        if turn.refusal is not None:
            self._metrics.add("bridge_refusals_total", label=f'reason="{turn.refusal}"')

    def _count_turn(self, turn: Turn, generation: Generation) -> None:
        self._metrics.add("unreadable_tool_calls_total", turn.unreadable_calls)
        if turn.recorded:
            self._metrics.add("turns_total")
            self._metrics.add("sampled_tokens_total", len(generation.output_ids_O))
        else:
            self._metrics.add("unrecorded_total")


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
    return SessionRefused(error.status, message, code=code, retry=error.status in (408, 429))
