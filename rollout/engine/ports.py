"""Ports that stay ours between two starts of a server.

A bound socket that does not listen keeps every other program off its port, while a server that sets
SO_REUSEADDR, as asyncio, uvicorn and SGLang do, can still bind and listen there.
"""

from __future__ import annotations

import socket


class HeldPort:
    """A free TCP port on loopback, kept for a server until `close`."""

    def __init__(self, port: int = 0) -> None:
        """`port`: 0 takes any free one.

        Raises:
            OSError: another program listens there.
        """
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()
