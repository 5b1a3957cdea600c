"""A session server process in front of an engine that injects faults, and requests to it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
from aiohttp import web
from faulty_engine import FaultyEngine
from scripted import tiny_tito

from rollout.engine.tiny import CHECKPOINT
from rollout.process import Child, start
from rollout.session.tape import table_to_tape

TITO = tiny_tito()
END = TITO.tokenizer.control_ids["<|im_end|>"]


@dataclass
class Stage:
    """A running server with its engine, and a client of it."""

    url: str
    engine: FaultyEngine
    http: aiohttp.ClientSession
    token: str | None

    async def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Any:
        """Status, parsed JSON (or bytes) and headers of one request with the driver's token or `key`."""
        right = key or self.token
        if right:
            headers["Authorization"] = f"Bearer {right}"
        async with self.http.request(method, self.url + path, json=body, headers=headers) as reply:
            content = await reply.read()
            kind = reply.content_type
            return reply.status, (await reply.json() if kind == "application/json" else content), reply.headers

    async def send(self, head: bytes) -> bytes:
        """The answer to a request line and headers, byte for byte."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b"Host: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def open(self, **settings: Any) -> tuple[str, str]:
        status, opened, _ = await self.ask("POST", "/sessions", settings)
        assert 200 == status, opened
        return f"/sessions/{opened['session_id']}", opened["session_key"]

    async def n_turns(self, session: str) -> int:
        """Generations in a session's tape."""
        _, stream, _ = await self.ask("GET", f"{session}/tape")
        return len(table_to_tape(pa.ipc.open_stream(stream).read_all())[0].exchanges)

    async def chat(self, session: str, *messages: dict[str, Any], key: str | None = None, **body: Any) -> Any:
        return await self.ask(
            "POST", f"{session}/v1/chat/completions", {"model": "m", "messages": list(messages), **body}, key=key
        )


@dataclass
class ProcessStage(Stage):
    """A server that is a process, which can be killed."""

    argv: list[str]
    child: Child

    async def kill_and_restart(self) -> None:
        """kill -9, and the same command on the same port again."""
        os.kill(self.child.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.child.stop)
        environment = {"SESSION_TOKEN": self.token} if self.token else None
        argv = [*self.argv, "--port", str(self.child.facts["port"])]
        self.child = await start(argv, log=self.child.log, env=environment)

    async def restored(self) -> None:
        """Until all sessions of the journal are restored."""
        async with asyncio.timeout(240):
            while (await self.ask("GET", "/health"))[1]["restoring"]:
                await asyncio.sleep(0.02)


async def staged(tmp_path: Path, token: str | None, *more: str) -> AsyncIterator[ProcessStage]:
    """A server process with a faulty engine behind it; `more` are its own options. Its log is server.log."""
    engine = FaultyEngine([*TITO.tokenizer.encode("ok"), END])
    runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    argv = [sys.executable, "-m", "rollout.session.server", "--tokenizer", str(CHECKPOINT)]
    argv += ["--engine", f"http://127.0.0.1:{runner.addresses[0][1]}"]
    argv += [*more, *(["--driver-token-env", "SESSION_TOKEN"] if token else [])]
    child = await start(argv, log=tmp_path / "server.log", env={"SESSION_TOKEN": token} if token else None)
    stage = ProcessStage(child.url, engine, aiohttp.ClientSession(), token, argv, child)
    try:
        async with stage.http:
            yield stage
    finally:
        stage.child.stop()
        await runner.cleanup()


def failing(status: int, after_s: float = 0.0) -> Any:
    async def answer(request: dict[str, Any]) -> web.Response:
        await asyncio.sleep(after_s)
        return web.Response(status=status, body=b"boom")

    return answer
