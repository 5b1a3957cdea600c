"""The worker's own session server: a child process that is started again from its journal when it dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rollout import process
from rollout.agents.openai_client import close_connections
from rollout.background import beside
from rollout.config import BatchConfig
from rollout.process import Child, ChildFailed
from rollout.session.client import SessionClient
from rollout.session.journal import remove_left
from rollout.session.options import IDLE_S

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "ROLLOUT_DRIVER_TOKEN"
"""Environment variable in which the session server finds the driver's token."""
MAX_RESTARTS = 3
"""Restarts in a row: each of a server that lived for less than STEADY_S."""
STEADY_S = 60.0
PATIENCE_S = 30.0
"""Seconds for which the driver's client tries again to reach a server that is being restarted."""
_WATCH_S = 0.1
_JOURNAL = "sessions-"
"""How a journal's folder begins, beside the server's log."""


@asynccontextmanager
async def session_server(
    engine: str | Sequence[str], tokenizer: Path, config: BatchConfig, *, log: Path
) -> AsyncIterator[SessionClient]:
    """The worker's own session server, a child process on loopback, and the driver's client of it.

    Only this client and the sessions' own keys are let in: the driver's token is made up here. A server
    that dies is started again on its port, with the sessions of its journal. The journal is beside `log`,
    and goes with the server; those of workers that were killed are removed. `engine`: its URL, or those of several.

    Raises:
        ChildFailed: it did not start; the message has the last lines of `log`.
    """
    token = secrets.token_hex(16)
    log.parent.mkdir(parents=True, exist_ok=True)
    remove_left(log.parent, _JOURNAL)
    journal = Path(tempfile.mkdtemp(prefix=_JOURNAL, dir=log.parent))
    argv = [sys.executable, "-m", "rollout.session.server", "--tokenizer", str(tokenizer)]
    for url in [engine] if isinstance(engine, str) else engine:
        argv += ["--engine", url]
    argv += ["--renderer", config.renderer, "--driver-token-env", TOKEN_VARIABLE, "--journal", str(journal)]
    # An agent may be silent for as long as its rollout may last.
    argv += ["--idle-s", str(max(IDLE_S, 2 * config.rollout_timeout_s))]
    argv += ["--enable-thinking"] if config.enable_thinking else []
    try:
        keeper = SessionKeeper(argv, log, {TOKEN_VARIABLE: token})
        child = await keeper.start()
        try:
            async with (
                SessionClient(child.url, driver_token=token, patience_s=PATIENCE_S) as client,
                beside(keeper.watch(client)),
            ):
                yield client
        finally:
            await close_connections()
            await keeper.stop()
    finally:
        await asyncio.to_thread(shutil.rmtree, journal, ignore_errors=True)


class SessionKeeper:
    """Keeps one server alive. Everything in one thread: a child is bound to the life of the one that forks it."""

    def __init__(
        self, argv: list[str], log: Path, environment: dict[str, str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`argv` is the server's command without its port; `clock` gives seconds, by which a server's life is told."""
        self._argv, self._log, self._environment, self._clock = argv, log, environment, clock
        self._child: Child | None = None
        self._started_at = 0.0

    async def start(self) -> Child:
        """Start the server, after the first time on the port that it had.

        Raises:
            ChildFailed: it did not start.
            OSError: no process could be had.
        """
        port = [] if self._child is None else ["--port", str(self._child.facts["port"])]
        child = await process.start([*self._argv, *port], log=self._log, env=self._environment)
        self._child, self._started_at = child, self._clock()
        return child

    async def watch(self, client: SessionClient) -> None:
        """Start the server again whenever it has died, until it does so too often in a row; `client` is told then."""
        assert self._child is not None
        deaths = 0
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._child.alive():
                continue
            deaths = 1 if self._clock() - self._started_at >= STEADY_S else deaths + 1
            code = self._child.process.returncode
            if deaths > MAX_RESTARTS:
                client.give_up(f"it died {deaths} times in a row, the last time with {code}; see {self._log}")
                log.error("the session server is not started again: it died %d times in a row (%s)", deaths, code)
                return
            log.warning("the session server died (%s) and is started again from its journal", code)
            await asyncio.to_thread(self._child.stop)
            try:
                await self.start()
            except (ChildFailed, OSError) as error:
                log.error("%s", error)
                self._started_at = self._clock()  # it did not live: the next try is one more in a row

    async def stop(self) -> None:
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)
