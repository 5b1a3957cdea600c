"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest
from command import Rollout


@pytest.fixture(scope="session")
def rollout_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder for all commands: making Prefect's database takes longest."""
    return tmp_path_factory.mktemp("rollout-home")


@pytest.fixture
def rollout(rollout_home: Path, tmp_path: Path) -> Rollout:
    """The command in an empty working directory."""
    return Rollout(home=rollout_home, cwd=tmp_path)
