"""The session server as a process: one conversation per session, sessions in memory.

python -m rollout.session.server --engine URL --tokenizer DIR [--port N] ...
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from rollout.engine.client import EngineClient
from rollout.errors import BadConfig, BadInput, PortInUse
from rollout.process import say_ready
from rollout.session.app import MAX_SESSIONS, SessionServer
from rollout.session.endpoints import KEEPALIVE_S
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer


async def run(server: SessionServer, host: str, port: int, *, announce: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT; `announce` gets the bound port.

    Raises:
        PortInUse: the port is taken.
    """
    # Cancelled handlers are how a chat learns that its client has gone.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"port {port} on {host} is in use; choose another, or 0 for any") from error
            raise
        announce(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


def serve(
    *,
    engine: str,
    tokenizer: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    renderer: str = "qwen3",
    driver_token: str | None = None,
    enable_thinking: bool = False,
    max_sessions: int = MAX_SESSIONS,
    keepalive_s: float = KEEPALIVE_S,
    announce: Callable[[int], None] | None = None,
) -> None:
    """Run a session server in this process until it is told to end.

    Args:
        engine: URL of what answers /generate.
        tokenizer: checkpoint directory with tokenizer.json.
        driver_token: None checks nothing and binds loopback only.
        max_sessions: one more is refused with 429.
        keepalive_s: seconds between the comments that a streaming client gets while it waits.
        announce: gets the bound port; the default writes the ready line of rollout.process.

    Raises:
        BadConfig: another host without a driver's token, an unknown renderer, or no session allowed, or
            no time between two comments.
        BadCheckpoint: no tokenizer there.
        PortInUse: the port is taken.
    """
    if driver_token is None and not _is_loopback(host):
        raise BadConfig(f"host {host}: without a driver's token only loopback is served")
    if max_sessions < 1:
        raise BadConfig(f"max_sessions {max_sessions}: want at least 1")
    if not keepalive_s > 0:
        raise BadConfig(f"keepalive_s {keepalive_s}: want more than 0")
    tito = Tito(Tokenizer(tokenizer), renderer)

    async def main() -> None:
        server = SessionServer(
            EngineClient(engine),
            tito,
            driver_token=driver_token,
            enable_thinking=enable_thinking,
            max_sessions=max_sessions,
            keepalive_s=keepalive_s,
        )
        await run(server, host, port, announce=announce or (lambda bound: say_ready(port=bound)))

    asyncio.run(main())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="rollout.session.server", description=__doc__)
    parser.add_argument("--engine", required=True, help="URL of the engine (SGLang's /generate)")
    parser.add_argument("--tokenizer", required=True, type=Path, help="checkpoint directory with tokenizer.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port, told in the ready line")
    parser.add_argument("--renderer", default="qwen3", help="chat format, by its name in `renderers`")
    parser.add_argument("--enable-thinking", action="store_true", help="sessions think unless they say otherwise")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS, help="sessions at once, at most")
    parser.add_argument("--keepalive-s", type=float, default=KEEPALIVE_S, help="seconds between comments in a stream")
    parser.add_argument("--driver-token-env", help="name of the environment variable with the driver's token")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        token = None
        if given.driver_token_env:
            token = os.environ.get(given.driver_token_env)
            if not token:
                raise BadConfig(f"the environment has no {given.driver_token_env}")
        serve(
            engine=given.engine,
            tokenizer=given.tokenizer,
            host=given.host,
            port=given.port,
            renderer=given.renderer,
            driver_token=token,
            enable_thinking=given.enable_thinking,
            max_sessions=given.max_sessions,
            keepalive_s=given.keepalive_s,
        )
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
