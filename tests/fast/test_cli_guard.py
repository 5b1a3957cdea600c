"""A user's own `tasks` or `flows` folder that hides ours is named at start, instead of a puzzling traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["tasks", "flows"])
@pytest.mark.parametrize("init", ["__init__.py", None], ids=["package", "plain_folder"])
def test_a_foreign_package_is_named_in_one_line(tmp_path: Path, name: str, init: str | None):
    foreign = tmp_path / name
    foreign.mkdir()
    if init:
        (foreign / init).write_text("")
    done = run_rollout(tmp_path, "--version")
    assert 2 == done.returncode
    assert done.stderr.startswith(f"error: the package `{name}` of rollout-lake is ")
    assert str(foreign) in done.stderr and 1 == done.stderr.count("\n")


def test_importing_our_package_names_a_foreign_neighbour(tmp_path: Path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("")
    command = [sys.executable, "-c", "import flows"]
    done = subprocess.run(command, cwd=tmp_path, env=with_path(tmp_path), capture_output=True, text=True)
    assert "ShadowedPackage" in done.stderr and str(tmp_path / "tasks") in done.stderr


def run_rollout(on_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("rollout")
    return subprocess.run([command, *arguments], env=with_path(on_path), capture_output=True, text=True)


def with_path(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}
