"""What a batch asks of Ray: a shard's resources and the user's own packages; and whether Ray can be used at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.errors import BadConfig

OWN_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Ray's arguments for the resources that it knows by itself; all others are the cluster's own names."""


def parse_resources(text: str) -> dict[str, float]:
    """What a shard takes of a node, by resource, from `GPU=1,H200=1`.

    Raises:
        ValueError: saying what is wanted.
    """
    resources: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        if not name or name in resources:
            raise ValueError(f"{part.strip()!r}: want each name once, as GPU=1,H200=1")
        try:
            resources[name] = float(amount)
        except ValueError as error:
            raise ValueError(f"{part.strip()!r}: want name=amount, as H200=1") from error
        if not 0 <= resources[name] < math.inf:
            raise ValueError(f"{part.strip()!r}: an amount is finite and not negative")
    return resources


def remote_arguments(resources: dict[str, float]) -> dict[str, Any]:
    """`ray.remote`'s arguments for a task that takes `resources`."""
    known = {OWN_ARGUMENTS[name]: amount for name, amount in resources.items() if name in OWN_ARGUMENTS}
    return {**known, "resources": {name: n for name, n in resources.items() if name not in OWN_ARGUMENTS}}


def read_modules(text: str) -> list[str]:
    """Names of top-level modules, with commas between.

    Raises:
        ValueError: one is no such name.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"{name!r}: want modules as they are imported, without dots, as own_agent,own_tools")
    return names


def module_paths(names: Sequence[str]) -> list[Path]:
    """Where the modules are on this machine, and the metadata that has their entry points.

    Raises:
        BadConfig: one is not installed, or not one folder or file.
    """
    return [_module_path(name) for name in names] + sorted(_metadata(set(names)))


def _module_path(name: str) -> Path:
    spec = find_spec(name)
    if spec is None:
        raise BadConfig(f"ray_modules: no module {name!r} is installed here")
    places = spec.submodule_search_locations or [spec.origin or ""]
    if len(places) != 1 or not Path(places[0]).exists():
        raise BadConfig(f"ray_modules: {name} is no folder or file of its own ({', '.join(places)})")
    return Path(places[0])


def _metadata(names: set[str]) -> set[Path]:
    """Metadata folders of the installed packages that have an entry point in one of the modules."""
    return {
        Path(str(file.locate())).parent
        for package in distributions()
        if any(entry.module.partition(".")[0] in names for entry in package.entry_points)
        for file in package.files or ()
        if file.name == "entry_points.txt"
    }


def require_ray(api_url: str | None, modules: Sequence[str]) -> None:
    """Refuse what a batch on Ray cannot do without, before anything is written.

    Raises:
        BadConfig: Ray is not installed, no Prefect server is named, or a module is not installed.
    """
    if find_spec("prefect_ray") is None:
        raise BadConfig("task_runner ray needs Ray, here and on every node: pip install 'rollout-lake[ray]'")
    if api_url is None:
        raise BadConfig(
            "task_runner ray needs a Prefect server that all nodes reach: each would start one of its own; "
            "set PREFECT_API_URL to yours"
        )
    module_paths(modules)
