"""What is installed for the user to choose from: each part with its package, and why it cannot be used if so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

from rollout.agents.contract import load_agent
from rollout.errors import UnknownPart
from rollout.parts import AGENTS, FINISHERS, GROUPS, MATCHERS, PICKERS, REWARDS, kind_of, list_parts
from rollout.rewards import load_reward
from rollout.session.finishing import find_finisher
from rollout.session.matching import find_matcher
from rollout.session.picking import find_picker

_LOADERS: dict[str, Callable[[str], Any]] = {
    AGENTS: lambda name: load_agent(name, "true"),  # a command line of its own is not its listing's matter
    REWARDS: load_reward,
    PICKERS: find_picker,
    FINISHERS: find_finisher,
    MATCHERS: find_matcher,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledPart:
    """One entry point. `needs`: the session version that an agent asks for; `problem`: null where it can be used."""

    kind: str
    name: str
    package: str
    target: str
    needs: str | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def installed_parts() -> list[InstalledPart]:
    """All agents, rewards, pickers, finishers and matchers, each loaded and checked as a batch would.

    What the users' modules print when they are imported goes to stderr: stdout is the listing's.
    """
    with redirect_stdout(sys.stderr):
        return [_installed(group, one.name, one.package, one.target) for group in GROUPS for one in list_parts(group)]


def _installed(group: str, name: str, package: str, target: str) -> InstalledPart:
    needs, problem = None, None
    try:
        needs = getattr(_LOADERS[group](name), "needs", None)
    except UnknownPart as error:
        problem = str(error)
    return InstalledPart(kind=kind_of(group), name=name, package=package, target=target, needs=needs, problem=problem)
