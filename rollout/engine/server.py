"""A user's side of this host's SGLang servers: finds or starts their supervisor, and shares it with others.

A user holds a shared lock (rollout.engine.supervision) for as long as it uses the engines. A second
user with the same model and flags shares them, another is refused. A supervisor that dies is started
again by its users, its engines on their ports.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TextIO

from rollout import reaper
from rollout.background import beside
from rollout.engine.job import EngineJob
from rollout.engine.outages import Outages
from rollout.engine.supervision import TAKEN, Status, SupervisionFolder
from rollout.errors import EngineInUse
from rollout.flock import any_locked
from rollout.process import ChildFailed, log_tail

log = logging.getLogger(__name__)

NOTICE_S = 5.0
"""Seconds in which a loss has come to the users, by way of the supervisor and its status file, on a busy host, too.

Not a wait for what was lost, which is told in about 0.3 s: for a fault of a living engine."""
SUPERVISORS = 3
"""Supervisors that may die one after another, each within STEADY_S of its start, before a user gives up."""
STEADY_S = 60.0
LEAVE_S = 15.0
"""How long the last user waits for the engines' end."""
_POLL_S = 0.1
_TELL_S = 5.0
_TAKE_S = 60.0
_SHARED_S = 1.5

Say = Callable[[str], None]
_left: list[subprocess.Popen[bytes]] = []
"""Supervisors of ours that other users still need."""


@asynccontextmanager
async def lease_engines(job: EngineJob, *, home: Path, say: Say | None = None) -> AsyncIterator[EngineLease]:
    """The job's engines for as long as the block lasts: where they are at once, `ready` when they answer.

    Args:
        home: the state folder (rollout.home) under which this host's supervisor is found.
        say: told while the engines start.

    Raises:
        EngineInUse: this host's engines are used with another model or other flags; both are named.
        ChildFailed: the supervisor did not start.
    """
    lease = EngineLease(SupervisionFolder(home), job, say)
    await lease.take()
    try:
        await lease.known()
        async with beside(lease.watch_once_ready()):
            yield lease
    finally:
        await lease.leave()


def _describe(served: Status | EngineJob) -> str:
    return f"model {served.model} with recipe {served.recipe}, flags {served.flags_hash}"


@asynccontextmanager
async def use_engines(
    job: EngineJob, *, home: Path, say: Say | None = None
) -> AsyncIterator[tuple[list[str], Outages]]:
    """The same, once all engines answer: their URLs, and what is known of their losses.

    Raises:
        EngineInUse, ChildFailed: as above, and an engine did not start; with the last lines of its log.
    """
    async with lease_engines(job, home=home, say=say) as lease:
        await lease.ready()
        yield lease.urls, lease.outages


class EngineLease:
    """One use of this host's engines; made by `lease_engines`. `urls` are known before the engines answer."""

    def __init__(self, folder: SupervisionFolder, job: EngineJob, say: Say | None) -> None:
        self._folder, self._job, self._say = folder, job, say
        self._held: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = asyncio.Event()
        self.urls: list[str] = []
        self.outages = Outages(notice_s=NOTICE_S)

    async def take(self) -> None:
        """Become a user. Waits for the end of engines that nobody uses."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            held = self._folder.lock_user()
            status = self._folder.read()
            other = status if status is not None and status.alive else None
            if held is not None and (other is None or (other.key == self._job.key and not other.ends)):
                self._held = held
                return
            if held is not None:
                held.close()
            if held is not None and other is not None and not other.ends and self._is_used(waited):
                raise self._refusal(other)
            if waited > _TAKE_S:
                raise EngineInUse(f"the engines of this host have been ending for {waited:.0f} s: {self._folder.log}")
            await asyncio.sleep(_POLL_S)

    def _is_used(self, waited_s: float) -> bool:
        used = any_locked([self._folder.users])
        return waited_s > _SHARED_S if used is None else used

    def _refusal(self, status: Status) -> EngineInUse:
        return EngineInUse(
            f"the engines of this host serve {_describe(status)} to another batch (supervisor {status.pid}); "
            f"this one asks for {_describe(self._job)}: wait for the other, or ask for the same"
        )

    async def known(self) -> None:
        """Find the supervisor, or start one, and learn where its engines are or will be."""
        status = await self._until(lambda status: bool(status.engines))
        self.urls = [engine.url for engine in status.engines]

    async def ready(self) -> None:
        """Wait until all engines answer; from then on `outages` is told what happens to them.

        Raises:
            ChildFailed: one did not start.
        """
        await self._until(lambda status: status.state == "ready")
        self._answered.set()

    async def _until(self, met: Callable[[Status], bool]) -> Status:
        told = began = time.monotonic()
        while True:
            status = self._folder.read()
            if status is not None and status.alive:
                if status.key != self._job.key:
                    raise self._refusal(status)
                if status.state == "failed":
                    raise ChildFailed(status.message)
                if met(status):
                    return status
            else:
                self._ensure_supervisor(status)
            if self._say is not None and time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                self._say(self._progress(status, told - began))
            await asyncio.sleep(_POLL_S / 2)

    def _progress(self, status: Status | None, waited_s: float) -> str:
        engines = status.engines if status is not None else []
        n_up, n_all = sum(engine.up for engine in engines), len(self._job.gpus)
        return f"{n_up} of {n_all} SGLang ready after {waited_s:.0f} s (log {self._folder.engine_log(n_up % n_all)})"

    def _ensure_supervisor(self, status: Status | None) -> None:
        """Start a supervisor unless one of ours is on its way.

        Raises:
            ChildFailed: the one that we started has failed.
        """
        code = None if self._process is None else self._process.poll()
        if self._process is not None and code is None:
            return
        if self._process is not None and code != TAKEN:
            failed = status is not None and status.state == "failed" and status.pid == self._process.pid
            message = status.message if failed and status is not None else ""
            raise ChildFailed(message or f"the engines' supervisor ended with {code}: {log_tail(self._folder.log)}")
        self._spawn()

    def _spawn(self) -> None:
        """A process session of its own, without the worker's mark: others may need it after our end."""
        home = self._folder.path.parent.parent
        with self._folder.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout.engine.supervisor", str(home), self._job.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={name: value for name, value in os.environ.items() if name != reaper.MARK},
                start_new_session=True,
            )

    async def watch_once_ready(self) -> None:
        await self._answered.wait()
        await self.watch()

    async def watch(self) -> None:
        """Tell `outages` what happens to the engines, and start their supervisor again when it dies."""
        last = self._folder.read()
        seen = None if last is None else (last.pid, last.losses)
        deaths, spawned_at = 0, time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            status = self._folder.read()
            if status is not None and status.state == "failed":
                self.outages.gave_up(f"{status.message}; logs in {self._folder.path}")
                return
            if status is None or not status.alive:
                if self.outages.up:
                    self.outages.lost()
                if self._process is not None and self._process.poll() is None:
                    continue
                deaths = 1 if time.monotonic() - spawned_at > STEADY_S else deaths + 1
                if deaths > SUPERVISORS:
                    self.outages.gave_up(f"the engines' supervisor ended {deaths} times: {log_tail(self._folder.log)}")
                    return
                log.warning("the engines' supervisor is gone and started again, number %d", deaths)
                self._spawn()
                spawned_at = time.monotonic()
                continue
            if (status.pid, status.losses) != seen:
                seen = (status.pid, status.losses)
                self.outages.lost()
            self.outages.up = status.up

    async def leave(self) -> None:
        """Stop being a user; the last one waits for the engines' end."""
        if self._held is not None:
            self._held.close()
        began = time.monotonic()
        while time.monotonic() - began < LEAVE_S:
            status = self._folder.read()
            running = self._process is not None and self._process.poll() is None
            if not running and (status is None or not status.alive or status.key != self._job.key):
                break
            shared = status is not None and not status.ends
            if shared and time.monotonic() - began > _SHARED_S:
                break
            await asyncio.sleep(_POLL_S / 2)
        if self._process is not None and self._process.poll() is None:
            _left.append(self._process)
