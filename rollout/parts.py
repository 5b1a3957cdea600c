"""The user's own parts: functions that installed packages offer under an entry point group.

The built-in ones are found in the very same way. Only the part that is asked for is loaded; one
that cannot be loaded is reported by `list_parts` and stops nobody who does not use it.

A function that no package offers can be named as `package.module:function` where the environment
variable ROLLOUT_ALLOWED_MODULES lists its module or a package above it. Names of parts come from
forms and prompt rows, which are not trusted to import what they like; the variable is set by whoever
starts the worker, and its child processes inherit it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollout.errors import UnknownPart, describe

AGENTS = "rollout.agents"
REWARDS = "rollout.rewards"
PICKERS = "rollout.pickers"
FINISHERS = "rollout.finishers"
MATCHERS = "rollout.matchers"
GROUPS = (AGENTS, REWARDS, PICKERS, FINISHERS, MATCHERS)

ALLOWED_MODULES = "ROLLOUT_ALLOWED_MODULES"
"""Environment variable with the modules that a dotted path may name, separated by commas."""

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
    """The function that is installed as `name` under `group`, or that the allowed path `name` leads to.

    Raises:
        UnknownPart: no such entry point (the installed ones are listed), two packages offer it, a path
            whose module is not allowed, or it cannot be loaded or called.
    """
    kind = kind_of(group)
    entry = _path_entry(group, name) if ":" in name else _installed_entry(group, name)
    try:
        function = entry.load()
    except Exception as error:
        raise UnknownPart(
            f"{kind} {name!r} of {_package(entry)} cannot be loaded from {entry.value}: {describe(error)}"
        ) from error
    if not callable(function):
        raise UnknownPart(f"{kind} {name!r} ({entry.value}) is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def load_hook(group: str, name: str, form: str, arguments: int) -> Function:
    """`load_part` for what sessions call again and again: looked up once, and checked to take its arguments.

    Raises:
        UnknownPart: as load_part, or it is asynchronous, or takes other arguments than `form` shows.
    """
    function = load_part(group, name)
    if inspect.iscoroutinefunction(function):
        raise UnknownPart(f"{kind_of(group)} {name!r} is asynchronous; a session does not wait: it must be {form}")
    check_signature(function, f"{kind_of(group)} {name!r}", form, *[None] * arguments)
    return function


def kind_of(group: str) -> str:
    """What a part of `group` is called: agent, reward, picker, finisher, matcher."""
    return group.rpartition(".")[2].removesuffix("s")


def _installed_entry(group: str, name: str) -> EntryPoint:
    kind = kind_of(group)
    found = {entry.value: entry for entry in entry_points(group=group) if entry.name == name}
    if not found:
        installed = ", ".join(sorted({entry.name for entry in entry_points(group=group)})) or "none"
        raise UnknownPart(f"no {kind} {name!r} is installed (entry points of {group}: {installed})")
    if len(found) > 1:
        owners = ", ".join(sorted(f"{_package(entry)} ({value})" for value, entry in found.items()))
        raise UnknownPart(f"{kind} {name!r} is offered twice: {owners}; uninstall or rename one")
    (entry,) = found.values()
    return entry


def _path_entry(group: str, path: str) -> EntryPoint:
    module = path.partition(":")[0]
    allowed = [name.strip() for name in os.environ.get(ALLOWED_MODULES, "").split(",") if name.strip()]
    if not any(module == name or module.startswith(f"{name}.") for name in allowed):
        raise UnknownPart(
            f"{kind_of(group)} {path!r} is a path into the module {module!r}, which {ALLOWED_MODULES} "
            f"does not allow (allowed: {', '.join(allowed) or 'none'})"
        )
    return EntryPoint(name=path, value=path, group=group)


def declared(function: Function, attribute: str) -> Any:
    """What a part declares about itself: an attribute of the function, else of its module, else None."""
    value = getattr(function, attribute, None)
    return value if value is not None else getattr(sys.modules.get(function.__module__), attribute, None)


def is_built_in(function: Function) -> bool:
    """Whether this package offers `function`: then it is known not to block its loop."""
    return getattr(function, "__module__", "").partition(".")[0] == "rollout"


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
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "no installed package"


def _problem(entry: EntryPoint) -> str | None:
    try:
        return None if callable(entry.load()) else "not a function"
    except Exception as error:
        return describe(error)
