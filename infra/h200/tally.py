"""Counting a lane's checks: a lane that ran none, or fewer than it says, has failed. Needs no test runner."""

from __future__ import annotations

import importlib.util
import json
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[State]):
    """One part of a lane: how many checks it makes, the modules that it imports, and what it does."""

    name: str
    checks: int
    needs: tuple[str, ...]
    run: Callable[[State, Tally], Awaitable[None]]


@dataclass(kw_only=True, slots=True)
class Tally:
    """Checks by part as they come in, and the figures that were measured. Each line is printed at once."""

    passed: int = 0
    failed: int = 0
    figures: dict[str, float | str] = field(default_factory=dict)

    def check(self, what: str, good: bool, detail: str = "") -> None:
        """Count one check."""
        self.passed += good
        self.failed += not good
        print(f"  {'ok  ' if good else 'FAIL'} {what}{f': {detail}' if detail else ''}", flush=True)

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Note one measured figure."""
        self.figures[name] = value
        shown = value if isinstance(value, str) else f"{value:,.4g}"
        print(f"       {name}: {shown} {unit}".rstrip(), flush=True)


async def run_parts(parts: Sequence[Part[State]], state: State, tally: Tally) -> int:
    """Run the parts one after the other and print `n/m passed`; the exit status.

    m is what the parts say that they check. A part whose modules are missing, that raises, or that
    makes another number of checks than it says, has not passed; 0 checks are a failure, too.
    """
    for part in parts:
        print(f"{part.name}:", flush=True)
        before = tally.passed + tally.failed
        missing = [name for name in part.needs if not _importable(name)]
        if missing:
            print(f"  FAIL this Python has no {', '.join(missing)}", flush=True)
            tally.failed += part.checks
            continue
        try:
            await part.run(state, tally)
        except Exception as error:
            traceback.print_exc()
            print(f"  FAIL {part.name} ended with {type(error).__name__}: {error}", flush=True)
        ran = tally.passed + tally.failed - before
        if ran != part.checks:
            print(f"  FAIL {part.name} made {ran} of its {part.checks} checks", flush=True)
            tally.failed += max(1, part.checks - ran)
    expected = sum(part.checks for part in parts)
    print(f"{tally.passed}/{expected} passed", flush=True)
    return 0 if 0 < expected == tally.passed and not tally.failed else 1


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would hold it
        return False


def write_figures(tally: Tally, file: Path, **facts: Any) -> None:
    """The figures and counts as JSON, with what they were measured on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {**facts, "passed": tally.passed, "failed": tally.failed, "figures": tally.figures}
    file.write_text(json.dumps(found, indent=1) + "\n")
