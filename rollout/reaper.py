"""Ends what a dead worker's agents left running: a process that watches the worker and outlives it.

The kernel kills our own children with the worker (rollout.process), but not what those or an agent
started. So the worker marks its environment, every process below it inherits the mark, and when the
worker is gone, kill -9 included, whatever carries the mark is killed. Linux only.

`python -m rollout.reaper PARENT_PID NAME VALUE` is the watcher's side.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping

from rollout.process import end_marked

MARK = "ROLLOUT_WORKER"
POLL_S = 0.2

_watcher: subprocess.Popen[bytes] | None = None


def watch_this_process() -> None:
    """Mark this process's environment for all that it starts from now on, and start the watcher; once per process."""
    global _watcher
    if _watcher is not None or not os.path.isdir("/proc/self"):
        return
    mark = uuid.uuid4().hex
    _watcher = start_watcher(MARK, mark, env={name: value for name, value in os.environ.items() if name != MARK})
    os.environ[MARK] = mark


def start_watcher(name: str, value: str, *, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start what ends every process with `name=value` in its environment once this process has ended.

    `env` is the watcher's own environment, null: this process's. It must not have the mark.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "rollout.reaper", str(os.getpid()), name, value],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )


def main() -> None:
    """Wait until the parent has ended, then kill every process with the mark."""
    parent, name, value = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    while os.getppid() == parent:
        time.sleep(POLL_S)
    end_marked(name, value)


if __name__ == "__main__":
    main()
