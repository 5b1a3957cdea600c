"""What a session's own client may ask for: OpenAI chat, Anthropic messages, their streams, models.

Errors of a request that is not accepted, or fails before the first byte, are plain ones with their
status. A stream that has begun ends with an error event instead, never like a whole answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from rollout.errors import SessionRefused
from rollout.session.answering import answer, error_body
from rollout.session.anthropic import chat_body, to_message
from rollout.session.chat import Chat
from rollout.session.coalescing import Running, Sent
from rollout.session.incoming import read_body, read_exact, sent_tokens
from rollout.session.live import LiveSession
from rollout.session.sse import EventStream
from rollout.session.streaming import chat_events, event, message_events
from rollout.tito.renderer import Tito

log = logging.getLogger(__name__)

INTERNAL_ERROR = "internal error; the server's log says more"

LIVE = web.RequestKey("live", LiveSession)
"""Where a request keeps the session that it is for."""

_EPOCH = "1970-01-01T00:00:00Z"


class Endpoints:
    """The handlers under /sessions/{session_id}/v1."""

    def __init__(
        self,
        session_of: Callable[[str, Sequence[str]], Awaitable[LiveSession]],
        chat: Chat,
        tito: Tito,
        *,
        model_name: Callable[[], Awaitable[str]],
        count_refusal: Callable[[web.Request, SessionRefused], None],
        keepalive_s: float,
    ) -> None:
        """`session_of` gives the session of an id to who sent one of its tokens, as LiveSessions.for_client does."""
        self._session_of = session_of
        self._chat = chat
        self._can_think = tito.thinking_field is not None
        self._model_name = model_name
        self._count_refusal = count_refusal
        self._keepalive_s = keepalive_s

    def routes(self, prefix: str) -> list[web.RouteDef]:
        return [
            web.post(f"{prefix}/chat/completions", self._complete),
            web.post(f"{prefix}/messages", self._message),
            web.post(f"{prefix}/messages/count_tokens", self._count),
            web.get(f"{prefix}/models", self._models),
            web.route("*", f"{prefix}/responses", self._responses),
        ]

    async def _client(self, request: web.Request) -> LiveSession:
        live = await self._session_of(request.match_info["session_id"], sent_tokens(request))
        request[LIVE] = live
        return live

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        live = await self._client(request)
        body, resent = await read_body(request, live.resent.read)
        running = self._chat.begin(live, body, await _sent(request))
        live.resent = resent.holding(running.turn.spelled)
        if running.turn.request.stream:
            events = partial(chat_events, include_usage=running.turn.request.include_usage)
            return await self._stream(request, live, running, events)
        return answer(await self._chat.finish(live, running))

    async def _message(self, request: web.Request) -> web.StreamResponse:
        live = await self._client(request)
        body = chat_body(await read_body(request, read_exact), can_think=self._can_think)
        running = self._chat.begin(live, body, await _sent(request))
        if running.turn.request.stream:
            return await self._stream(request, live, running, lambda reply: message_events(to_message(reply)))
        return answer(to_message(await self._chat.finish(live, running)))

    async def _count(self, request: web.Request) -> web.Response:
        live = await self._client(request)
        body = chat_body(await read_body(request, read_exact), can_think=self._can_think)
        return answer({"input_tokens": self._chat.count(live, body)})

    async def _stream(
        self,
        request: web.Request,
        live: LiveSession,
        running: Running,
        events: Callable[[dict[str, Any]], Iterable[bytes]],
    ) -> web.StreamResponse:
        stream = EventStream(request, self._keepalive_s)
        try:
            async with stream.kept_alive():
                reply = await self._chat.finish(live, running)
            return await stream.finish(events(reply))
        except SessionRefused as refusal:
            if not stream.started:
                raise
            self._count_refusal(request, refusal)
            status, message, code = refusal.status, refusal.message, refusal.code
        except Exception:
            if not stream.started:
                raise
            log.exception("%s %s failed", request.method, request.path)
            status, message, code = 500, INTERNAL_ERROR, None
        anthropic = speaks_anthropic(request)
        body = error_body(status, message, code, anthropic=anthropic)
        return await stream.finish([event(body, "error" if anthropic else None)])

    async def _models(self, request: web.Request) -> web.Response:
        await self._client(request)
        name = await self._model_name()
        if speaks_anthropic(request):
            model = {"type": "model", "id": name, "display_name": name, "created_at": _EPOCH}
            return answer({"data": [model], "has_more": False, "first_id": name, "last_id": name})
        return answer({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "engine"}]})

    async def _responses(self, request: web.Request) -> web.Response:
        raise SessionRefused(404, "v1/responses is not served; use v1/chat/completions")


async def _sent(request: web.Request) -> Sent:
    """What the request is known by when it comes again; its body has been read before."""
    return Sent.of(request.path, await request.read(), request.headers)


def speaks_anthropic(request: web.Request) -> bool:
    """Whether a client is Anthropic's: it says so in a header, or asks for what only they have."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.path
