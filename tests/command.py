"""The real `rollout` command in processes of its own, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = Path(sys.executable).with_name("rollout")
MARK = "ROLLOUT_TEST_MARK"


@dataclass
class Run:
    """A started command; `mark` stands in the environment of it and of whatever it started."""

    process: subprocess.Popen[str]
    mark: str
    reader: threading.Thread | None = None

    def wait(self, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, stdout, stderr)

    def end(self, number: int) -> int:
        """Send a signal to the command's own process only, and wait; its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(30)
        if self.reader is not None:
            self.reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code

    def processes(self) -> list[str]:
        """Command lines of all living processes that carry the mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if command:  # a zombie has neither
                        found.append(f"{folder.name} {command}")
            except OSError:
                continue
        return found

    def left_over(self, grace_s: float = 5.0) -> list[str]:
        """What still lives `grace_s` seconds after the command's end."""
        end = time.monotonic() + grace_s
        while (found := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return found


@dataclass
class Rollout:
    """Runs the command with a state folder and a working directory of the test's own."""

    home: Path
    cwd: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    started: list[Run] = field(default_factory=list)

    def start(self, *arguments: object, program: str | Path = COMMAND) -> Run:
        mark = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "ROLLOUT_"))}
        environment = {**kept, "ROLLOUT_HOME": str(self.home), MARK: mark, **self.environment}
        process = subprocess.Popen(
            [str(program), *map(str, arguments)],
            cwd=self.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(Run(process=process, mark=mark))
        return self.started[-1]

    def end_started(self) -> None:
        """End what still runs: a test that failed half-way must not fail the next one, too."""
        for run in self.started:
            if run.process.poll() is None:
                run.end(signal.SIGKILL)

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.start(*arguments).wait()

    def refused(self, *arguments: object) -> str:
        """The one line of a command that refused what it was given."""
        done = self(*arguments)
        assert (2, "") == (done.returncode, done.stdout), done.stderr
        assert done.stderr.startswith("error: ") and 1 == done.stderr.count("\n"), done.stderr
        return done.stderr.removeprefix("error: ").strip()

    def succeeds(self, *arguments: object) -> str:
        """Standard output of a command that ended well."""
        done = self(*arguments)
        assert 0 == done.returncode, done.stderr
        return done.stdout


PHASES = ("starting Prefect", "planning", "starting the engine", "rolling out", "publishing")
"""A batch's phases as its progress lines name them, in order."""


def reach(run: Run, phase: str, delay_s: float) -> list[str]:
    """Wait until `run` is `delay_s` seconds into `phase`, or has ended; its progress lines, which go on growing."""
    reached = threading.Event()
    lines: list[str] = []

    def read() -> None:
        assert run.process.stderr is not None
        with run.process.stderr as stream:
            for line in stream:
                lines.append(line)
                if any(later in line for later in PHASES[PHASES.index(phase) :]):
                    reached.set()
        reached.set()

    run.reader = threading.Thread(target=read, daemon=True)
    run.reader.start()
    assert reached.wait(300), lines
    end = time.monotonic() + delay_s
    while time.monotonic() < end and run.process.poll() is None:
        time.sleep(0.01)
    return lines
