"""The session benchmark's clients, a process of its own: plays a script in many conversations at once.

    python tests/bench/session_load.py rate SCRIPT PORT SERVER_PID SESSIONS TURNS
    python tests/bench/session_load.py live SCRIPT PORT SERVER_PID SESSIONS CONCURRENT SPREAD_S

A session that says which of several server processes has it (base_url) is asked there. Prints one line of
JSON. Bodies are made before, and answers read after, the clock has run.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from framing import message_size

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Line(asyncio.Protocol):
    """One connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._wanted = 0
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._wanted:
            self._wanted = message_size(self._data)
        if self._wanted and len(self._data) >= self._wanted:
            answer, self._data, self._wanted = bytes(self._data), bytearray(), 0
            assert self._answer is not None
            self._answer.set_result(answer)

    async def post(self, path: str, body: bytes) -> bytes:
        """The whole answer, head and all, unread."""
        self._answer = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        return await self._answer


Script = list[tuple[bytes, bytes, bytes, int, dict[str, Any]]]


class Load:
    def __init__(self, script: Script, port: int, server: int) -> None:
        self._script = script
        self._port = port
        self._server = server

    async def line(self, port: int | None = None) -> Line:
        _, line = await asyncio.get_running_loop().create_connection(Line, "127.0.0.1", port or self._port)
        return line

    async def open(self, line: Line) -> tuple[int, str]:
        """The port of the process that has it, and its path."""
        answer = _read(await line.post("/sessions", b"{}"))
        port = urlsplit(answer.get("base_url") or "").port or self._port
        return port, f"/sessions/{answer['session_id']}/v1/chat/completions"

    async def rate(self, sessions: int, turns: int) -> dict[str, Any]:
        """As many turns a second as the server gives, every session's next request right behind its last answer."""
        first = await self.line()
        opened = [await self.open(first) for _ in range(sessions)]
        lines, paths = [await self.line(port) for port, _ in opened], [path for _, path in opened]
        answers: list[list[bytes]] = [[] for _ in range(sessions)]

        async def talk(place: int) -> None:
            for turn in self._script[:turns]:
                answers[place].append(await lines[place].post(paths[place], turn[0]))

        cpu, own, wall = self._cpu(), time.process_time(), time.perf_counter()
        await asyncio.gather(*map(talk, range(sessions)))
        wall, own, cpu = time.perf_counter() - wall, time.process_time() - own, self._cpu() - cpu
        for session in answers:
            for place, answer in enumerate(session):
                self._check(answer, place)
        return {"turns": sessions * turns, "wall_s": wall, "server_cpu_s": cpu, "load_cpu_s": own}

    async def live(self, sessions: int, concurrent: int, spread_s: float) -> dict[str, Any]:
        """A first turn in every session, then a second, so many at once; the second's seconds, the ramp's apart."""
        lines = [await self.line() for _ in range(concurrent)]
        paths = [(await self.open(lines[0]))[1] for _ in range(sessions)]
        for place, path in enumerate(paths):
            self._check(await lines[place % concurrent].post(path, self._script[0][0]), 0)
        seconds: list[float] = []

        async def work(worker: int) -> None:
            await asyncio.sleep(spread_s * worker / concurrent)
            for number, path in enumerate(paths[worker::concurrent]):
                started = time.perf_counter()
                answer = await lines[worker].post(path, self._script[1][0])
                if number:
                    seconds.append(time.perf_counter() - started)
                self._check(answer, 1)

        await asyncio.gather(*map(work, range(concurrent)))
        return {"seconds": seconds}

    def _check(self, answer: bytes, place: int) -> None:
        """The right prompt, and the text that was sampled. Ids of calls are a session's own."""
        reply, wanted = _read(answer), self._script[place]
        message = reply["choices"][0]["message"]
        assert reply["usage"]["prompt_tokens"] == wanted[3], reply["usage"]
        assert message["content"].rstrip() == wanted[4]["content"].rstrip()
        given, known = (json.loads(one["tool_calls"][0]["function"]["arguments"]) for one in (message, wanted[4]))
        assert given == known

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self._server}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _read(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] == b"200", answer[:2000]
    return json.loads(body)


async def main(kind: str, file: str, port: str, server: str, *sizes: str) -> dict[str, Any]:
    load = Load(pickle.loads(Path(file).read_bytes()), int(port), int(server))
    if kind == "rate":
        return await load.rate(int(sizes[0]), int(sizes[1]))
    return await load.live(int(sizes[0]), int(sizes[1]), float(sizes[2]))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
