"""The session server as a process: one conversation per session, sessions in memory.

python -m rollout.session.server --engine URL [--engine URL ...] --tokenizer DIR [--port N] ...
"""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
from collections.abc import Callable

from aiohttp import web

from rollout.engine.pool import connect
from rollout.errors import BadInput, PortInUse
from rollout.process import say_ready
from rollout.session.app import SessionServer
from rollout.session.events import EventLog
from rollout.session.options import ServerOptions, read_options
from rollout.session.routing import Place, Router
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer


async def run(
    app: web.Application, host: str, port: int, *, announce: Callable[[int], None], bound: socket.socket | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; `announce` gets the bound port. A `bound` socket goes before host and port.

    Raises:
        PortInUse: the port is taken.
    """
    # Cancelled handlers are how a chat learns that its client has gone.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        site: web.BaseSite = web.TCPSite(runner, host, port, backlog=1024)
        if bound is not None:
            site = web.SockSite(runner, bound, backlog=1024)
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
    options: ServerOptions,
    *,
    announce: Callable[[int], None] | None = None,
    place: Place | None = None,
    bound: socket.socket | None = None,
) -> None:
    """Run a session server in this process until it is told to end.

    Args:
        place: as one of a range of servers; `bound` is its socket then.
        announce: gets the bound port; the default writes the ready line of rollout.process.

    Raises:
        BadConfig: an unknown renderer, or a journal's folder that cannot be had.
        BadCheckpoint: no tokenizer there.
        PortInUse: the port is taken.
    """
    events = EventLog(options.log_format)
    events.take_logging()
    tito = Tito(Tokenizer(options.tokenizer), options.renderer)
    _collect_seldom()

    async def main() -> None:
        server = SessionServer(connect(options.engines), tito, options, events=events)
        app = server.app()
        if place is not None:
            server.new_session_id = place.new_session_id
            Router(place).install(app)
        told = announce or (lambda port: say_ready(port=port))
        await run(app, options.host, options.port, announce=told, bound=bound)

    asyncio.run(main())


def _collect_seldom() -> None:
    """Have the collector of cycles look less often at what lives long: a turn's JSON alone made it run twice.

    What a turn leaves behind goes by counting references; cycles are few (frames of exceptions, closed connections).
    """
    gc.collect()
    gc.freeze()  # modules and vocabulary
    gc.set_threshold(50_000, 20, 100)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve; 2 for bad input."""
    try:
        serve(read_options(argv, about=__doc__))
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
