"""Installed versions against the ranges that this package's own metadata asks for."""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rollout.doctor.finding import Finding, fail, ok, warn

DISTRIBUTION = "rollout-lake"
SHOWN = ("prefect", "polars", "deltalake", "pyarrow", "torch", "renderers", "tokenizers")
REPAIR = "install it anew: `pip install rollout-lake`"


def check_packages() -> list[Finding]:
    """Python and all packages that ours needs; those that are in order are one line."""
    try:
        own, required = metadata.metadata(DISTRIBUTION), metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [warn("packages", f"{DISTRIBUTION} is imported but not installed, so nothing says its ranges; {REPAIR}")]
    checked = [_check(requirement) for requirement in map(Requirement, required) if _applies(requirement)]
    shown = [f"{name} {_version(name)}" for name in SHOWN if _version(name)]
    problems = [finding for finding in checked if finding is not None]
    within = ", ".join([f"{DISTRIBUTION} {own['Version']}", *shown])
    return [_check_python(own["Requires-Python"]), *problems, *([] if problems else [ok("packages", within)])]


def _check_python(wanted: str) -> Finding:
    version = platform.python_version()
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("python", version)
    return fail("python", f"{version} is outside {wanted}: make a virtual environment of a Python that is not")


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _check(requirement: Requirement) -> Finding | None:
    version = _version(requirement.name)
    if version is None:
        return fail("packages", f"{requirement.name} is not installed; {REPAIR}")
    if requirement.specifier.contains(version, prereleases=True):
        return None
    wanted = f"{requirement.name}{requirement.specifier}"
    return warn("packages", f"{requirement.name} {version} is outside {wanted}: `pip install '{wanted}'`")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
