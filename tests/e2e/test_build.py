"""What is built is whole: every package, its data and its command are in the wheel, tests and infra are not."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", source], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("rollout_lake-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.full
def test_every_tracked_module_is_in_the_wheel(wheel_names: set[str]):
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    modules = {name for name in tracked.split() if name.split("/")[0] in {"flows", "tasks", "rollout"}}
    assert set() == modules - wheel_names


@pytest.mark.full
def test_data_is_in_the_wheel_and_tests_are_not(wheel_names: set[str]):
    tracked = subprocess.run(["git", "ls-files", "rollout"], cwd=ROOT, check=True, capture_output=True, text=True)
    shipped = {n for n in tracked.stdout.split() if n.endswith((".jsonl", ".json", ".safetensors", ".md", "py.typed"))}
    assert set() == shipped - wheel_names
    assert not {name for name in wheel_names if name.startswith(("tests/", "infra/"))}
