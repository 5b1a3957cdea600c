"""Child processes that end with their parent, and say when they are ready.

`python -m rollout.process COMMAND...` runs any program so that the kernel kills it when its parent
dies (PR_SET_PDEATHSIG survives exec). Linux only; elsewhere a child must watch its parent itself.
The signal follows the *thread* that forked: spawn from the main thread, never from a pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import RolloutLakeError

_PR_SET_PDEATHSIG = 1

_BIND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"cannot start {sys.argv[2]}: {error}\\n")
    os._exit(127)
"""
"""die_with_parent and exec without this package's imports: 15 ms, where `-m rollout.process` takes 100."""


class ChildFailed(RolloutLakeError):
    """A child process ended before it was ready; the message has the last lines of its log."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if it already has."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def bound_argv(argv: Sequence[str]) -> list[str]:
    """An argument list that runs `argv` so that the kernel kills it when this process dies.

    Start it from the thread that lives as long as this process, as ever with PR_SET_PDEATHSIG.
    """
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), *argv]


def end_group(group: int, number: signal.Signals) -> None:
    """Signal a process group; one that has ended is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_marked(name: str, value: str) -> int:
    """Kill every process that was started with `name=value` in its environment, and its children; how many.

    Finds those that left their process group, which is what makes a daemon. Linux only.
    """
    mark, ended = f"{name}={value}".encode(), 0
    for _ in range(10):  # what was forked while we looked
        found = [pid for pid in _pids() if mark in _environ(pid).split(b"\0")]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                ended += 1
        time.sleep(0.005)
    return ended


def _pids() -> list[int]:
    own = os.getpid()
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]
    except OSError:
        return []


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended, or another user's
        return b""


def say_ready(**facts: Any) -> None:
    """Tell the parent, on stdout and in one JSON line, that this server answers now."""
    sys.stdout.write(json.dumps({"ready": True, **facts}) + "\n")
    sys.stdout.flush()


def children(pid: int) -> dict[int, str]:
    """The living processes that `pid` started, with their command lines. Linux only."""
    found = {}
    for one in _pids():
        fields = stat_fields(one)
        if fields is None or fields[0] == "Z" or int(fields[1]) != pid:
            continue
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{one}/cmdline").read_bytes()
            found[one] = line.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def started_at(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot; null if there is none. With its pid it names it."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat behind the command's name, the state first (proc(5)); null if there is none.

    The name is in parentheses and may hold anything, so the fields count from the last one.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split() or None
    except OSError:  # it has just ended
        return None


def free_port() -> int:
    """A port that was free a moment ago. Prefer binding port 0 and reporting it with `say_ready`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(kw_only=True, slots=True)
class Child:
    """A running child: its process, the facts of its ready line, and where its stderr goes."""

    process: subprocess.Popen[bytes]
    facts: dict[str, Any]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.facts['port']}"

    def alive(self) -> bool:
        return self.process.poll() is None

    def lost(self) -> str | None:
        """Why the child can serve no longer; null while nothing is known against it."""
        return None if self.alive() else f"it ended with {self.process.returncode}"

    def stop(self, grace_s: float = 5.0) -> None:
        """End the child's whole process group: SIGTERM, then SIGKILL after `grace_s` seconds."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                continue
        if self.process.stdout is not None:
            self.process.stdout.close()


def spawn(
    argv: Sequence[str], *, log: Path, env: dict[str, str] | None = None, says_ready: bool = True
) -> subprocess.Popen[bytes]:
    """Start `argv` in its own process group, bound to this process's life, stderr appended to `log`.

    Without `says_ready` stdout goes there, too: a pipe that nobody reads would stop it some day.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    wrapped = [sys.executable, "-m", "rollout.process", str(os.getpid()), *argv]
    with log.open("ab") as sink:
        return subprocess.Popen(
            wrapped,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if says_ready else sink,
            stderr=sink,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )


async def start(
    argv: Sequence[str], *, log: Path, env: dict[str, str] | None = None, deadline_s: float = 120.0
) -> Child:
    """Spawn a server of ours and wait for its ready line.

    Raises:
        ChildFailed: it ended or stayed silent for `deadline_s` seconds; the log's tail is quoted.
    """
    process = spawn(argv, log=log, env=env)
    assert process.stdout is not None
    # A plain thread: asyncio's child watchers would tie the child to a loop that may end first.
    reading = asyncio.create_task(asyncio.to_thread(_read_ready, process, deadline_s))
    try:
        line = await asyncio.shield(reading)
    except asyncio.CancelledError:
        end_group(process.pid, signal.SIGKILL)  # nobody will be told of it
        process.wait()
        await reading  # it sees the end within a moment, and reads from what is closed next
        process.stdout.close()
        raise
    if line is None:
        child = Child(process=process, facts={"port": 0}, log=log)
        child.stop(grace_s=1.0)
        raise ChildFailed(f"{' '.join(argv[:4])} did not start: {log_tail(log)}")
    return Child(process=process, facts=json.loads(line), log=log)


def _read_ready(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    end, buffer = time.monotonic() + deadline_s, b""
    while time.monotonic() < end:
        piece = process.stdout.read()
        if piece:
            buffer += piece
            for line in buffer.split(b"\n")[:-1]:
                if line.startswith(b'{"ready": true'):
                    return line
        elif process.poll() is not None:
            return None
        else:
            time.sleep(0.02)
    return None


def log_tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log on one line, for an error message."""
    try:
        text = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "(no log)"
    return " | ".join(text[-lines:]) or "(its log is empty)"


def main() -> None:
    """`python -m rollout.process PARENT_PID COMMAND...`: bind to the parent, then become COMMAND."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
