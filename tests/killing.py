"""Ends a batch, or a part of it, at a seeded moment, and says what is left of it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from command import Run, reach

GRACE_S = 10.0
"""Within so many seconds everything of a batch that was ended is gone."""


def find(run: Run, part: str) -> list[int]:
    """Processes of the run whose command line has `part`."""
    return [int(line.split()[0]) for line in run.processes() if part in line]


def kill_part(run: Run, part: str) -> int:
    """kill -9 every process of the run whose command line has `part`; how many."""
    killed = 0
    for pid in find(run, part):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def end_at(run: Run, how: str, phase: str, delay_s: float) -> None:
    """Wait for the moment and end the run: KILL, TERM or INT to the command, or a `part` is killed before it."""
    reach(run, phase, delay_s)
    if how not in ("KILL", "TERM", "INT"):
        kill_part(run, how)
        time.sleep(0.2)
    run.end(getattr(signal, f"SIG{how}" if how in ("KILL", "TERM", "INT") else "SIGKILL"))


def moments(hows: Sequence[str], phases: dict[str, float], seed: int) -> list[tuple[str, str, float]]:
    """(how, phase, seconds into it) for each of `hows`; `phases` has the longest delay of each phase."""
    rng = random.Random(seed)
    names = list(phases)
    return [(how, (phase := rng.choice(names)), rng.uniform(0.0, phases[phase])) for how in hows]


def wait_for(found: Callable[[], object], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
