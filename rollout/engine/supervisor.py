"""The supervisor: the one process of a host that starts SGLang servers and keeps them alive.

    python -m rollout.engine.supervisor HOME JOB

JOB is a rollout.engine.job.EngineJob as JSON. It is started by the first user and outlives it while
there are others; it ends its engines and itself when nobody holds the users' lock any more, on
SIGTERM, and when an engine is lost too often. Its engines end with it, kill -9 included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rollout.engine.job import EngineJob
from rollout.engine.keeping import EngineKeeper
from rollout.engine.launch import launch
from rollout.engine.ports import HeldPort
from rollout.engine.supervision import TAKEN, EngineStatus, Status, SupervisionFolder
from rollout.errors import RolloutLakeError
from rollout.process import Child, started_at

log = logging.getLogger(__name__)

USED_S = 0.25
"""Seconds between two looks for users."""
_PORT_PATIENCE_S = 10.0


class Supervisor:
    """All engines of one job."""

    def __init__(self, folder: SupervisionFolder, job: EngineJob, ports: list[HeldPort]) -> None:
        self._folder, self._job, self._ports = folder, job, ports
        self.status = Status(
            pid=os.getpid(),
            started=started_at(os.getpid()),
            key=job.key,
            model=job.model,
            recipe=job.recipe,
            flags=list(job.flags),
            flags_hash=job.flags_hash,
            engines=[EngineStatus(port=p.port, gpus=list(g)) for p, g in zip(ports, job.gpus, strict=True)],
        )
        self._keepers = [self._keeper(number) for number in range(len(ports))]

    def _keeper(self, number: int) -> EngineKeeper:
        async def start() -> Child:
            return await launch(
                self._job.to_recipe(),
                model=self._job.model,
                python=Path(self._job.python),
                log=self._folder.engine_log(number),
                gpus=self._job.gpus[number],
                deadline_s=self._job.deadline_s,
                port=self._ports[number].port,
            )

        return EngineKeeper(f"engine {number}", start, limits=self._job.limits, changed=self._changed)

    def _changed(self) -> None:
        for engine, keeper in zip(self.status.engines, self._keepers, strict=True):
            engine.up, engine.losses = keeper.up, keeper.losses
            engine.pid = keeper.child.process.pid if keeper.up and keeper.child is not None else None
        self._folder.write(self.status)

    async def run(self) -> None:
        """Serve until there is no user, a signal comes, or an engine is given up."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        self._folder.write(self.status)
        serving, unused = asyncio.create_task(self._serve()), asyncio.create_task(self._until_unused())
        stopped = asyncio.create_task(stop.wait())
        tasks: list[asyncio.Task[Any]] = [serving, unused, stopped]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            why = "there is no user" if unused.done() else "a signal asks for it" if stopped.done() else "it failed"
            self._conclude(serving.exception() if serving.done() else None, why)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(keeper.stop() for keeper in self._keepers))
            if self.status.state != "failed":
                self._folder.remove()
            if unused.done() and not unused.cancelled():
                unused.result().close()

    def _conclude(self, error: BaseException | None, why: str) -> None:
        """Say why it ends, before the engines do."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        failures = [keeper.failure for keeper in self._keepers if keeper.failure is not None]
        self.status.state = "ending"
        if error is not None or failures:
            self.status.state, self.status.message = "failed", str(error or failures[0])
        if error is not None and not isinstance(error, RolloutLakeError):
            log.error("the supervisor failed", exc_info=error)
        log.info("%s: %s", self.status.state, self.status.message or why)
        self._folder.write(self.status)

    async def _serve(self) -> None:
        """Start all engines and keep them; returns when one is given up. One that does not start is an error."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as starting:
            for keeper in self._keepers:
                starting.create_task(keeper.start())
        self.status.state = "ready"
        self._changed()
        log.info("%d engines ready after %.1f s", len(self._keepers), time.monotonic() - began)
        keeping = [asyncio.create_task(keeper.keep()) for keeper in self._keepers]
        try:
            await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _until_unused(self) -> TextIO:
        while (held := self._folder.lock_unused()) is None:
            await asyncio.sleep(USED_S)
        return held


def hold_ports(folder: SupervisionFolder, job: EngineJob) -> list[HeldPort]:
    """Ports for the job's engines: those of a supervisor before us that its users still know, else free ones.

    Raises:
        OSError: somebody else took one of them meanwhile.
    """
    before = folder.read()
    if before is None or before.key != job.key or before.state == "failed" or len(before.engines) != len(job.gpus):
        return [HeldPort() for _ in job.gpus]
    end, held = time.monotonic() + _PORT_PATIENCE_S, []
    for engine in before.engines:
        while True:
            try:
                held.append(HeldPort(engine.port))
                break
            except OSError:  # its engine is being ended
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
    return held


def main() -> None:
    """Become the supervisor, or exit with TAKEN."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    folder, job = SupervisionFolder(Path(sys.argv[1])), EngineJob.from_json(sys.argv[2])
    lock = folder.lock_supervisor()
    if lock is None:
        sys.exit(TAKEN)
    with contextlib.closing(lock):
        ports = hold_ports(folder, job)
        try:
            asyncio.run(Supervisor(folder, job, ports).run())
        finally:
            for port in ports:
                port.close()


if __name__ == "__main__":
    main()
