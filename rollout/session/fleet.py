"""Several session servers on neighbouring ports under one parent, which starts them again and ends them with it.

The parent binds the range and keeps it bound: a port that a process leaves by dying is not lost to
another program, and who connects meanwhile waits for the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from rollout.errors import BadConfig, PortInUse
from rollout.process import ChildFailed, bound_argv, end_group
from rollout.session.member import TOKEN_VARIABLE, member_argv
from rollout.session.options import ServerOptions
from rollout.session.routing import MAX_PROCESSES, Place

log = logging.getLogger(__name__)

RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""A process that dies more than RESTARTS times within so many seconds stays down."""

READY_S = 120.0
GRACE_S = 5.0


def serve_fleet(options: ServerOptions, processes: int, *, announce: Callable[[int, list[str]], None]) -> None:
    """Serve on `processes` ports from options.port on (0: a free range) until SIGTERM or SIGINT.

    Args:
        options: of each process; a limit such as max_sessions holds for each.
        announce: gets the first port and the URLs of all once all processes answer.

    Raises:
        BadConfig: no such number of processes, or the range does not fit below port 65536.
        PortInUse: names the port that is taken.
        ChildFailed: a process did not start, or all of them died too often.
    """
    if not 1 <= processes <= MAX_PROCESSES:
        raise BadConfig(f"--processes {processes}: want 1 to {MAX_PROCESSES}")
    if options.port + processes - 1 > 65535:
        raise BadConfig(f"--port {options.port}: {processes} processes need ports up to {options.port + processes - 1}")
    bound = bind_range(options.host, options.port, processes)
    try:
        asyncio.run(Fleet(options, bound).run(announce))
    finally:
        for one in bound:
            one.close()


def bind_range(host: str, port: int, size: int) -> list[socket.socket]:
    """Sockets bound to `size` neighbouring ports.

    Raises:
        PortInUse: one of the ports is taken, or no free range was found for port 0.
    """
    for _ in range(50 if port == 0 else 1):
        bound: list[socket.socket] = []
        try:
            for place in range(size):
                first = bound[0].getsockname()[1] if bound else port
                wanted = first + place
                bound.append(_bind(host, wanted))
            return bound
        except (OSError, OverflowError) as error:
            for one in bound:
                one.close()
            if not isinstance(error, OverflowError) and error.errno != errno.EADDRINUSE:
                raise BadConfig(f"host {host}, port {wanted}: {error}") from error
            if port:
                raise PortInUse(
                    f"port {wanted} on {host} is in use; {size} processes need ports {port} to {port + size - 1}"
                ) from error
    raise PortInUse(f"no {size} neighbouring free ports on {host} were found")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


class Fleet:
    """The processes of one range, each on its bound socket."""

    def __init__(
        self, options: ServerOptions, bound: list[socket.socket], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives seconds, by which it is told how often a process dies."""
        self._clock = clock
        self._first_port = bound[0].getsockname()[1]
        self._options = replace(options, port=self._first_port)
        self._bound = bound
        self._stop = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def run(self, announce: Callable[[int, list[str]], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        slots = range(len(self._bound))
        stopped = asyncio.create_task(self._stop.wait())
        kept = asyncio.create_task(self._serve(slots, announce))
        try:
            await asyncio.wait([stopped, kept], return_when=asyncio.FIRST_COMPLETED)
            if kept.done():
                kept.result()
        finally:
            for task in (stopped, kept):
                task.cancel()
            await asyncio.gather(stopped, kept, return_exceptions=True)
            await self._end()

    async def _serve(self, slots: range, announce: Callable[[int, list[str]], None]) -> None:
        """Start all, then keep each alive.

        Raises:
            ChildFailed: one did not start, or none is left.
        """
        await asyncio.gather(*(self._start(slot) for slot in slots))
        announce(self._first_port, [self._place(slot).url(slot) for slot in slots])
        await asyncio.gather(*(self._keep(slot) for slot in slots))
        raise ChildFailed(f"every process of the session server died more than {RESTARTS} times; its log says more")

    def _place(self, slot: int) -> Place:
        return Place(slot=slot, size=len(self._bound), host=self._options.host, first_port=self._first_port)

    async def _start(self, slot: int) -> None:
        """Start one process and wait until it answers.

        Raises:
            ChildFailed: it ended first, or was silent for READY_S.
        """
        fd = self._bound[slot].fileno()
        token = self._options.driver_token
        process = await asyncio.create_subprocess_exec(
            *bound_argv(member_argv(self._options, self._place(slot), fd)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(fd,),
            start_new_session=True,  # a terminal's ^C is this process's to pass on
            env={name: text for name, text in os.environ.items() if name != TOKEN_VARIABLE}
            | ({TOKEN_VARIABLE: token} if token else {}),
        )
        self._running[slot] = process
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        except TimeoutError:
            line = b""
        if not line:
            end_group(process.pid, signal.SIGKILL)
            code = await process.wait()
            raise ChildFailed(f"process {slot} of the session server did not start (exit code {code})")

    async def _keep(self, slot: int) -> None:
        """Start a process again each time that it ends; returns once that was too often."""
        deaths: deque[float] = deque()
        while True:
            code = await self._running[slot].wait()
            deaths.append(self._clock())
            while deaths and deaths[0] < deaths[-1] - RESTART_WINDOW_S:
                deaths.popleft()
            port = self._first_port + slot
            if len(deaths) > RESTARTS:
                log.error("process %d on port %d ended %d times; it stays down", slot, port, len(deaths))
                self._bound[slot].close()  # so that who asks there is refused and does not wait
                return
            log.warning("process %d on port %d ended with %d; its sessions are lost unless journaled", slot, port, code)
            await asyncio.sleep(0.2 * (len(deaths) - 1))
            with contextlib.suppress(ChildFailed):  # it has ended: the next round counts it
                await self._start(slot)
                log.warning("process %d on port %d answers again", slot, port)

    async def _end(self) -> None:
        """SIGTERM to all, SIGKILL to those that outlast the grace."""
        living = [process for process in self._running.values() if process.returncode is None]
        for process in living:
            end_group(process.pid, signal.SIGTERM)
        waits = [asyncio.create_task(process.wait()) for process in living]
        if waits:
            await asyncio.wait(waits, timeout=GRACE_S)
        for process in living:
            if process.returncode is None:
                end_group(process.pid, signal.SIGKILL)
        if waits:
            await asyncio.wait(waits, timeout=GRACE_S)
