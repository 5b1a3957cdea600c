"""Packages as pip would leave them on the path, made by a test: one module and its entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(site: Path, package: str, code: str, entries: Mapping[str, Mapping[str, str]]) -> Path:
    """Put `package` 1.0 into the folder `site`, which the test puts on the path.

    Args:
        entries: by entry point group, names and the functions of the module that they stand for.
    """
    site.mkdir(parents=True, exist_ok=True)
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(code)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {module}:{target}" for name, target in names.items())])
        for group, names in entries.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return site
