"""Fixtures of the end-to-end tests."""

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Rollout
from object_store import ObjectStore, serve_objects
from sglang_server import sglang_server

from flows.server import QUIET
from rollout.batch.prompts import prompt_bytes
from rollout.engine import environment
from rollout.engine.embedded import start_embedded
from rollout.errors import NoSGLang
from rollout.process import Child, start

BATCH_OPTIONS = ("--batch-id", "mine", "--shard-size", "4", "--seed", "7")
"""8 prompts, 4 rollouts each, a shard per prompt."""


@pytest.fixture(scope="session")
def rollout_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder for all commands: making Prefect's database takes longest."""
    return tmp_path_factory.mktemp("rollout-home")


@pytest.fixture
def rollout(rollout_home: Path, tmp_path: Path) -> Iterator[Rollout]:
    """The command in an empty working directory; it starts a Prefect server of its own where it needs one."""
    command = Rollout(home=rollout_home, cwd=tmp_path)
    yield command
    command.end_started()


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory: pytest.TempPathFactory):
    """A Prefect server that several commands share."""
    home = tmp_path_factory.mktemp("prefect-home")
    environment = {**QUIET, "PREFECT_HOME": str(home)}
    server = asyncio.run(start([sys.executable, "-m", "flows.server"], log=home / "server.log", env=environment))
    yield f"{server.url}/api"
    server.stop()


@pytest.fixture
def quick_rollout(rollout: Rollout, prefect_url: str) -> Rollout:
    """The command with the shared Prefect server."""
    rollout.environment = {"PREFECT_API_URL": prefect_url}
    return rollout


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight of the shipped prompts: two for each of the other agents, four for tool_loop."""
    lines = prompt_bytes("demo").decode().splitlines()
    by_agent = {name: [line for line in lines if json.loads(line)["agent"] == name] for name in _WANTED}
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for name, n in _WANTED.items() for line in by_agent[name][:n]))
    return path


_WANTED = {"tool_loop": 4, "branching": 2, "single_turn": 2}


@pytest.fixture(scope="session")
def batch_command(prompt_file: Path) -> list[str]:
    """`run` of the small batch; add --lake."""
    return ["run", "--prompts", str(prompt_file), *BATCH_OPTIONS]


@pytest.fixture(scope="session")
def finished(batch_command: list[str], rollout_home: Path, tmp_path_factory: pytest.TempPathFactory):
    """(lake, completed command) of the small batch, run once and undisturbed."""
    folder = tmp_path_factory.mktemp("finished")
    done = Rollout(home=rollout_home, cwd=folder)(*batch_command, "--lake", folder / "store")
    assert 0 == done.returncode, done.stderr
    return folder / "store", done


@pytest.fixture
def staged_lake(finished, tmp_path: Path) -> Path:
    """A lake in which the small batch is staged and nothing is decided."""
    shutil.copytree(finished[0] / "staging", tmp_path / "staged" / "staging")
    return tmp_path / "staged"


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """One S3 server for all tests of a process; each test takes a bucket of its own."""
    with serve_objects(tmp_path_factory.mktemp("objects")) as store:
        yield store


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Python of the environment with SGLang, found as the product finds it."""
    try:
        return environment.sglang_python()
    except NoSGLang as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The embedded engine on the shipped checkpoint, in a process of its own."""
    child = asyncio.run(start_embedded(None, log=tmp_path_factory.mktemp("engine") / "engine.log"))
    yield child
    child.stop()


@pytest.fixture(scope="module")
def engine_url(engine: Child) -> str:
    return engine.url


@pytest.fixture(scope="session")
def sglang_url(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SGLang on the tiny checkpoint, as `tiny_cpu` starts it; for tests that leave it as it is."""
    with sglang_server(sglang_python, tmp_path_factory.mktemp("sglang")) as url:
        yield url
