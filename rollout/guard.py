"""Are the imported `flows` and `tasks` ours? Both names are common, and a user's own folder comes first on the path."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from rollout.errors import BadInput

PACKAGES = ("flows", "tasks")


class ShadowedPackage(BadInput, ImportError):
    """Another package named `flows` or `tasks` comes before ours on the import path; rename it or start elsewhere."""


def check_packages(names: tuple[str, ...] = PACKAGES) -> None:
    """Make sure that `flows` and `tasks` are the ones installed beside `rollout`.

    Raises:
        ShadowedPackage: one is missing or stands in another place; both places are named.
    """
    home = Path(__file__).resolve().parent.parent
    for name in names:
        found = _place(find_spec(name))
        if found != home / name:
            where = f"{found} comes first on the import path" if found else "none is on the import path"
            raise ShadowedPackage(
                f"the package `{name}` of rollout-lake is {home / name}, but {where}: rename that folder, "
                "take it off PYTHONPATH, or start from another directory"
            )


def _place(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.origin is not None:
        origin = Path(spec.origin).resolve()
        return origin.parent if origin.name == "__init__.py" else origin
    places = list(spec.submodule_search_locations or [])
    return Path(places[0]).resolve() if places else None
