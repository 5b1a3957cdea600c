"""CPU seconds of a command and of everything that it starts, by role, from Linux's /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout.process import stat_fields

SAMPLE_S = 0.2
"""Seconds between two looks at the process tree; of a process that ends, so much goes uncounted at most."""

ROLES = {
    "rollout.engine.embedded": "engine",
    "rollout.session.server": "session server",
    "flows.server": "Prefect server",
    "multiprocessing": "checkers",
}
"""What a child's command line holds, and its role. Anything else is the driver: the command itself."""
DRIVER = "driver"

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CommandFailed(Exception):
    """The measured command ended with an error; the message has the end of its output."""


@dataclass(kw_only=True, slots=True)
class Usage:
    """What a command used. Times are `time.monotonic()`, which all processes of a machine share.

    `cpu_s` is the kernel's own count over the whole tree, `others_s` what all else on the machine used
    meanwhile; `samples` are cumulative CPU seconds by role.
    """

    started: float
    ended: float = 0.0
    cpu_s: float = 0.0
    others_s: float = 0.0
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return self.ended - self.started

    def by_role(self, start: float | None = None, end: float | None = None) -> dict[str, float]:
        """CPU seconds by role between two times, by default from start to end."""
        first = {} if start is None else self._at(start)
        last = self.samples[-1][1] if end is None else self._at(end)
        return {role: spent - first.get(role, 0.0) for role, spent in last.items()}

    def _at(self, moment: float) -> dict[str, float]:
        return next((spent for at, spent in self.samples if at >= moment), self.samples[-1][1])


def command_environment(folder: Path) -> dict[str, str]:
    """A measured command's environment: its state in `folder`, and no Prefect of the user's own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**env, "ROLLOUT_HOME": str(folder / "state"), "PREFECT_HOME": str(folder / "no-profile")}


def run_measured(argv: Sequence[str], *, env: dict[str, str], log: Path) -> Usage:
    """Run a command to its end, output to `log`.

    Raises:
        CommandFailed: its exit status is not 0.
    """
    before = busy_s()
    with log.open("wb") as sink:
        usage = Usage(started=time.monotonic())
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        status = _watch(process.pid, usage)
    except BaseException:
        process.send_signal(signal.SIGKILL)  # what it started is bound to its life
        process.wait()
        raise
    usage.others_s = max(0.0, busy_s() - before - usage.cpu_s)
    process.returncode = os.waitstatus_to_exitcode(status)  # reaped below, behind Popen's back
    if process.returncode:
        raise CommandFailed(f"exit {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
    return usage


def busy_s() -> float:
    """CPU seconds that the whole machine has used since it started."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS_PER_S


def _watch(root: int, usage: Usage) -> int:
    spent: dict[int, tuple[str, float]] = {}
    while True:
        for at, (role, seconds) in _tree(root).items():
            # A process that has ended and is not reaped yet shows no command line: its role stands.
            known = spent.get(at, (DRIVER, 0.0))[0]
            spent[at] = (role if known == DRIVER else known, seconds)
        roles: dict[str, float] = {}
        for role, seconds in spent.values():
            roles[role] = roles.get(role, 0.0) + seconds
        usage.samples.append((time.monotonic(), roles))
        pid, status, used = os.wait4(root, os.WNOHANG)
        if pid:
            usage.ended, usage.cpu_s = time.monotonic(), used.ru_utime + used.ru_stime
            return status
        time.sleep(SAMPLE_S)


def _tree(root: int) -> dict[int, tuple[str, float]]:
    """Role and CPU seconds of the living processes below `root`, and of itself."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        if (fields := stat_fields(pid)) is None:
            continue
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return {pid: (_role(pid, root), seconds[pid]) for pid in parents if _below(pid, root, parents)}


def _below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def _role(pid: int, root: int) -> str:
    if pid == root:
        return DRIVER
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return DRIVER
    return next((role for part, role in ROLES.items() if part in command), DRIVER)
