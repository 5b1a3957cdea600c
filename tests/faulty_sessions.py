"""A fake session server that only injects faults: its turns say `ok` until a script says otherwise.

Real sessions are in tests/e2e. Here a turn can be refused, hang, or be committed late, and every
route can be made to answer with a status of the test's choice.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import orjson
import pyarrow as pa
from aiohttp import web
from loopback import served

from rollout.columns import session_table
from rollout.sample import Sample, Status
from rollout.session.settings import SessionSettings
from rollout.session.tape import Exchange, Tape, tape_to_table

REPLY = {"role": "assistant", "content": "Answer: 4"}


@dataclass
class FaultySession:
    settings: dict
    turns: int = 0
    asked: int = 0
    refused: dict = field(default_factory=dict)
    leaves: int = 1
    deleted: bool = False


@dataclass
class FaultySessions:
    """`script(session number, request number)` gives a turn's fault: an HTTP status, seconds to hang, or None.

    `faults` maps a route (open, samples, tape, delete) to the statuses of its next answers; 0 drops the connection.
    `late` is the number of turns that are committed between the first reading of samples and of the tape.
    """

    script: object = lambda session, request: None
    faults: dict = field(default_factory=dict)
    leaves: int = 1
    late: int = 0
    sessions: list = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def open(self, request):
        await self._fault("open", request)
        self.sessions.append(FaultySession(settings=await request.json(), leaves=self.leaves))
        number = len(self.sessions) - 1
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        return web.json_response({"session_id": str(number), "session_key": f"key-{number}"})

    async def chat(self, request):
        session = self._session(request)
        number = int(request.match_info["id"])
        assert request.headers["Authorization"] == f"Bearer key-{number}"
        fault = self.script(number, session.asked)
        session.asked += 1
        if isinstance(fault, (int, str)):
            session.refused[str(fault)] = session.refused.get(str(fault), 0) + 1
            error = {"message": f"fault {fault}", "type": "fault", "code": None}
            return web.json_response({"error": error}, status=int(str(fault).removeprefix("engine_")))
        if fault is not None:
            await asyncio.sleep(fault)
        session.turns += 1
        choice = {"index": 0, "message": REPLY, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    async def samples(self, request):
        session = self._session(request)
        await self._fault("samples", request)
        n_samples = session.leaves if session.turns else 0
        table = session_table([_sample(k, session.turns) for k in range(n_samples)])
        facts = {
            "session_metadata": orjson.dumps({"max_trim_tokens": 0}),
            "messages": orjson.dumps([[{"role": "user", "content": "q"}, REPLY]] * n_samples),
            "exchanges": str(session.turns),
        }
        if not n_samples:
            facts["empty_reason"] = "no_records"
        if self.late:
            self.late -= 1
            session.turns += 1
        return _stream(table.replace_schema_metadata(facts))

    async def tape(self, request):
        session = self._session(request)
        await self._fault("tape", request)
        exchanges = [_exchange(seq) for seq in range(session.turns)]
        tape = Tape(
            session_id=request.match_info["id"],
            settings=SessionSettings(version=session.settings["version"]),
            exchanges=exchanges,
            refused=session.refused,
        )
        return _stream(tape_to_table(tape))

    async def delete(self, request):
        session = self._session(request)
        session.deleted = True
        self.running -= 1
        await self._fault("delete", request)
        return web.Response(status=204)

    def _session(self, request):
        session = self.sessions[int(request.match_info["id"])]
        if session.deleted:
            raise web.HTTPNotFound(text="session not found")
        return session

    async def _fault(self, route, request):
        statuses = self.faults.get(route, [])
        if not statuses:
            return
        status = statuses.pop(0)
        if status == 0:
            request.transport.close()
            await asyncio.sleep(0.05)
        error = {"error": {"message": f"fault in {route}", "type": "fault", "code": "fault"}}
        if status:
            raise _refusal(status)(text=orjson.dumps(error).decode(), content_type="application/json")


def _refusal(status):
    return {422: web.HTTPUnprocessableEntity, 500: web.HTTPInternalServerError, 429: web.HTTPTooManyRequests}[status]


def _sample(leaf, turns):
    return Sample(
        tokens_T=np.array([1, 2, 3 + leaf], np.int32),
        response_length=2,
        loss_mask_R=np.array([1, 1], np.int8),
        rollout_log_probs_R=np.array([-0.5, -0.25]),
        response="Answer: 4",
        status=Status.COMPLETED,
        metadata={"lifecycle": {"turn": 1}},
        turns=turns,
        leaf_path=[leaf],
    )


def _exchange(seq):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Exchange(
        seq=seq,
        parent=None,
        appended_messages=[{"role": "user", "content": "q"}],
        appended_ids_P=np.array([1], np.int32),
        output_ids_O=np.array([2, 3], np.int32),
        output_log_probs_O=np.array([-0.5, -0.25]),
        finish="stop",
        requested_at=now,
        committed_at=now,
        engine_seconds=0.25,
    )


def _stream(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return web.Response(body=sink.getvalue().to_pybytes())


@asynccontextmanager
async def serving(fake):
    """Serve `fake` on loopback; its `url` is set."""
    app = web.Application()
    app.router.add_post("/sessions", fake.open)
    app.router.add_post("/sessions/{id}/v1/chat/completions", fake.chat)
    app.router.add_post("/sessions/{id}/samples", fake.samples)
    app.router.add_get("/sessions/{id}/tape", fake.tape)
    app.router.add_delete("/sessions/{id}", fake.delete)
    async with served(app) as fake.url:
        yield fake
