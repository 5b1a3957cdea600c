"""The user's own parts: functions that installed packages offer under an entry point group.

The built-in agents and rewards are found in the very same way. Only the part that is asked for is
loaded; one that cannot be loaded is reported by `list_parts` and stops nobody who does not use it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollout.errors import UnknownPart, describe

AGENTS = "rollout.agents"
REWARDS = "rollout.rewards"

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """One entry point as a listing shows it; `problem` says why it cannot be loaded, null if it can."""

    name: str
    target: str
    package: str
    problem: str | None = None


def list_parts(group: str) -> list[PartInfo]:
    """All parts of `group`, by name, each loaded once to see whether it can be."""
    return [
        PartInfo(name=entry.name, target=entry.value, package=_package(entry), problem=_problem(entry))
        for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))
    ]


def load_part(group: str, name: str) -> Function:
    """The function that is installed as `name` under `group`.

    Raises:
        UnknownPart: no such entry point (the installed ones are listed), two packages offer it, or it
            cannot be loaded or called.
    """
    kind = group.rpartition(".")[2].removesuffix("s")
    found = {entry.value: entry for entry in entry_points(group=group) if entry.name == name}
    if not found:
        installed = ", ".join(sorted({entry.name for entry in entry_points(group=group)})) or "none"
        raise UnknownPart(f"no {kind} {name!r} is installed (entry points of {group}: {installed})")
    if len(found) > 1:
        owners = ", ".join(sorted(f"{_package(entry)} ({value})" for value, entry in found.items()))
        raise UnknownPart(f"{kind} {name!r} is offered twice: {owners}; uninstall or rename one")
    (entry,) = found.values()
    try:
        function = entry.load()
    except Exception as error:
        raise UnknownPart(
            f"{kind} {name!r} of {_package(entry)} cannot be loaded from {entry.value}: {describe(error)}"
        ) from error
    if not callable(function):
        raise UnknownPart(f"{kind} {name!r} ({entry.value}) is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def declared(function: Function, attribute: str) -> Any:
    """What a part declares about itself: an attribute of the function, else of its module, else None."""
    value = getattr(function, attribute, None)
    return value if value is not None else getattr(sys.modules.get(function.__module__), attribute, None)


def check_signature(function: Function, part: str, form: str, *args: Any, **kwargs: Any) -> None:
    """See at load time whether `function` takes the arguments that it will be called with.

    Raises:
        UnknownPart: it does not; the message shows the `form` that it must have.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin or an extension's function without one
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UnknownPart(f"{part} cannot be called: {error}; it must be {form}") from error


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"


def _problem(entry: EntryPoint) -> str | None:
    try:
        return None if callable(entry.load()) else "not a function"
    except Exception as error:
        return describe(error)
