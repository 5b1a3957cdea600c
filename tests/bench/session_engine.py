"""The session benchmark's engine, a process of its own: knows every prompt of a script, and what to answer.

    python tests/bench/session_engine.py SCRIPT DELAY_S

A prompt that is not the script's, id for id, is a 400. Replies wait DELAY_S from the second turn on.
It imports nothing of what it measures and parses no JSON, so that it never is the bottleneck.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import zlib
from pathlib import Path

from framing import message_size

_IDS = b'"input_ids":'


class Engine(asyncio.Protocol):
    """One connection; requests come one after the other on it."""

    def __init__(self, replies: dict[int, tuple[bytes, float]]) -> None:
        self._replies = replies
        self._data = bytearray()
        self._wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._wanted:
            self._wanted = message_size(self._data)
        if self._wanted and len(self._data) >= self._wanted:
            request, self._data, self._wanted = bytes(self._data[: self._wanted]), self._data[self._wanted :], 0
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST /generate"):
            self._send(200, b"{}")
            return
        start = request.find(_IDS) + len(_IDS)
        ids = request[start : request.find(b"]", start) + 1]
        reply, delay_s = self._replies.get(zlib.crc32(ids), (b"", 0.0))
        if not reply:
            self._send(400, b'{"error":{"message":"not the ids of the script"}}')
        elif delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._send, 200, reply)
        else:
            self._send(200, reply)

    def _send(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def main(file: str, delay_s: float) -> None:
    script = pickle.loads(Path(file).read_bytes())
    replies = {
        zlib.crc32(input_ids): (reply, delay_s if place else 0.0)
        for place, (_, input_ids, reply, _, _) in enumerate(script)
    }
    server = await asyncio.get_running_loop().create_server(lambda: Engine(replies), "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"ready": True, "port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
