"""The session server's application: OpenAI chat and Anthropic messages in front, `/generate` behind."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from rollout.engine.client import EngineClient
from rollout.engine.pool import EnginePool
from rollout.errors import EngineError, SessionRefused, UnknownPart
from rollout.session.answering import (
    answer,
    answer_arrow,
    answer_error,
    answer_refusal,
    answer_samples_arrow,
    answer_samples_json,
)
from rollout.session.chat import Chat
from rollout.session.endpoints import INTERNAL_ERROR, LIVE, Endpoints, speaks_anthropic
from rollout.session.events import EventLog, text_of
from rollout.session.incoming import read_body, read_samples_body, sent_tokens
from rollout.session.journal import Journal, Opened
from rollout.session.keeping import Keeping
from rollout.session.live import LiveSession, LiveSessions, new_key, new_session_id
from rollout.session.metrics import Metrics
from rollout.session.opening import NOT_ROUTED, read_settings
from rollout.session.options import ServerOptions
from rollout.session.restoring import Restoring
from rollout.session.session import open_session
from rollout.session.settings import SessionSettings
from rollout.session.tape import ENGINE_PREFIX, tape_to_table
from rollout.session.views import records_view
from rollout.tito.renderer import Tito

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Bytes of a request's body, at most."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionServer:
    """The application: sessions in memory, one engine or several that serve the same."""

    def __init__(
        self,
        engine: EngineClient | EnginePool,
        tito: Tito,
        options: ServerOptions,
        *,
        events: EventLog | None = None,
    ) -> None:
        """
        Raises:
            BadConfig: the journal's folder cannot be had.
        """
        self._engine = engine
        self._tito = tito
        self._defaults = SessionSettings(
            renderer=tito.name, enable_thinking=options.enable_thinking, shadow_matcher=options.shadow_matcher
        )
        self._sessions = LiveSessions(options.driver_token, max_sessions=options.max_sessions, idle_s=options.idle_s)
        self._metrics = Metrics()
        self._events = events or EventLog(options.log_format)
        journal = None if options.journal is None else Journal(options.journal)
        self._journaled = journal is not None
        self._keeping = Keeping(journal, self._sessions, self._metrics)
        self._restoring = Restoring(self._keeping, self._sessions, tito, metrics=self._metrics, events=self._events)
        self._chat = Chat(engine, self._metrics, tito.vocabulary, events=self._events, used=self._sessions.use)
        self._instance = uuid.uuid4().hex
        self.new_session_id = new_session_id
        self._model: dict[str, Any] | None = None
        self._endpoints = Endpoints(
            self._restoring.for_client,
            self._chat,
            tito,
            model_name=self._model_name,
            count_refusal=self._count_refusal,
            keepalive_s=options.keepalive_s,
        )

    def app(self) -> web.Application:
        """The routes; unserved paths are 404, nothing is passed on to the engine's own."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY)
        one = "/sessions/{session_id}"
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.get("/sessions", self._list),
                web.post("/sessions", self._open),
                web.get(one, self._show),
                web.delete(one, self._delete),
                web.get(f"{one}/tape", self._tape),
                web.post(f"{one}/samples", self._samples),
                *self._endpoints.routes(f"{one}/v1"),
            ]
        )
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        self._restoring.find()  # before the port is bound, so that no client finds a session missing
        tasks = [asyncio.create_task(self._restoring.restore()), asyncio.create_task(self._expire())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._restoring.stop()
        await self._chat.close()
        await self._engine.close()
        self._keeping.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._sessions.next_due_s()))
            for gone in self._sessions.expire():
                self._metrics.add("sessions_expired_total")
                self._events.write("expired", session_id=gone.session_id, turns=gone.turns)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except SessionRefused as refusal:
            self._count_refusal(request, refusal)
            return answer_refusal(refusal, anthropic=speaks_anthropic(request))
        except web.HTTPException as error:
            message = f"{error.reason}: {request.method} {request.path}"
            self._count_refusal(request, SessionRefused(error.status, message))
            return answer_error(error.status, message, anthropic=speaks_anthropic(request))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return answer_error(500, INTERNAL_ERROR, anthropic=speaks_anthropic(request))

    def _count_refusal(self, request: web.Request, refusal: SessionRefused) -> None:
        status = refusal.status
        self._metrics.add("refused_total", label=f'status="{status}"')
        session_id = request.match_info.get("session_id")
        self._events.write("refused", level="warning", session_id=session_id, status=status, text=text_of(refusal))
        live: LiveSession | None = request.get(LIVE)
        if live is not None:
            self._keeping.count_refusal(live, f"{ENGINE_PREFIX}{status}" if refusal.engine else str(status))

    async def _driver(self, request: web.Request) -> LiveSession:
        return await self._restoring.for_driver(request.match_info["session_id"], sent_tokens(request))

    async def _health(self, request: web.Request) -> web.Response:
        health = {"status": "ok", "session_server_instance_id": self._instance}
        return answer({**health, "restoring": len(self._sessions.left)} if self._journaled else health)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        self._sessions.check_driver(sent_tokens(request))
        running = sum(live.session.running for live in self._sessions.all())
        gauges = {
            "sessions_live": len(self._sessions),
            "sessions_restoring": len(self._sessions.left),
            "generations_running": running,
            "generations_held": self._engine.held,
        }
        return web.Response(text=self._metrics.text(gauges), content_type="text/plain")

    async def _list(self, request: web.Request) -> web.Response:
        self._sessions.check_driver(sent_tokens(request))
        return answer({"sessions": self._sessions.rows()})

    async def _open(self, request: web.Request) -> web.Response:
        self._sessions.check_driver(sent_tokens(request))
        settings = read_settings(await read_body(request), self._defaults)
        if settings.routed_experts and self._tito.tokenizer.routed is None:
            raise SessionRefused(400, NOT_ROUTED)
        context = await self._context_length()
        self._sessions.check_room()
        try:
            session = open_session(settings, self._tito, self.new_session_id(), context_length=context)
        except UnknownPart as error:
            raise SessionRefused(400, str(error)) from error
        opened = Opened(key=new_key(), opened_at=datetime.now(UTC), context_length=context)
        self._keeping.add(session, opened)
        self._metrics.add("sessions_opened_total")
        self._events.write("opened", session_id=session.session_id, version=settings.version)
        return answer({"session_id": session.session_id, "session_key": opened.key})

    async def _show(self, request: web.Request) -> web.Response:
        session = (await self._driver(request)).session
        return answer(
            {
                "session_id": session.session_id,
                "records": records_view(session.active_path()),
                "metadata": session.metadata(),
            }
        )

    async def _delete(self, request: web.Request) -> web.Response:
        held = self._sessions.to_delete(request.match_info["session_id"], sent_tokens(request))
        self._sessions.remove(held)
        self._events.write("deleted", session_id=held.session_id, turns=held.turns)
        self._metrics.add("sessions_deleted_total")
        return web.Response(status=204)

    async def _tape(self, request: web.Request) -> web.Response:
        live = await self._driver(request)
        return answer_arrow(tape_to_table(live.session.tape(refused=dict(live.refused))))

    async def _samples(self, request: web.Request) -> web.Response:
        live = await self._driver(request)
        max_seq_len, metadata = read_samples_body(await read_body(request))
        live.check_open()
        reply = live.session.samples(max_seq_len=max_seq_len, metadata=metadata)
        mismatch = reply.session_metadata.get("tito_session_mismatch")
        if mismatch is not None:
            self._metrics.compared(live.session.settings.version, (entry["type"] for entry in mismatch))
        if "application/json" in request.headers.get("Accept", ""):
            return answer_samples_json(reply)
        return answer_samples_arrow(reply)

    async def _context_length(self) -> int | None:
        """The engine's own where it says one, else the checkpoint's (SGLang's /model_info has none)."""
        told = (await self._model_info()).get("context_length")
        good = isinstance(told, int) and not isinstance(told, bool) and told > 0
        return told if good else self._tito.tokenizer.context_length

    async def _model_name(self) -> str:
        return str((await self._model_info()).get("model_path") or self._tito.name)

    async def _model_info(self) -> dict[str, Any]:
        """The engine's own facts, asked for until it answers once."""
        if self._model is None:
            try:
                self._model = await self._engine.model_info()
            except EngineError as error:
                log.warning("the engine does not say what it serves: %s", error)
                return {}
        return self._model
