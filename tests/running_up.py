"""`rollout up` in a process of its own, and Prefect's API as a person's browser uses it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from command import Rollout, Run

from rollout.process import free_port

RUN_S = 240.0
BUSY_TRIES = 5
"""Prefect answers 503 when SQLite is locked; its own client and a person at the pages try again."""


@dataclass
class Up:
    """A running `rollout up`."""

    run: Run
    ui: str
    api: str
    lake: str

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One call of Prefect's API."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.api}{path}", data=data, method=method, headers={"content-type": "application/json"})
        for left in reversed(range(BUSY_TRIES)):
            try:
                with urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or b"null")
            except HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or not left:
                    raise
                time.sleep(1.0)

    def deployment(self, name: str) -> dict[str, Any]:
        (found,) = self.call("POST", "/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return found

    def press_run(self, name: str, **parameters: Any) -> str:
        """What the pages' button sends; the flow run's id."""
        one = self.deployment(name)
        body = {"parameters": {**one["parameters"], **parameters}}
        return self.call("POST", f"/deployments/{one['id']}/create_flow_run", body)["id"]

    def set_state(self, run_id: str, state: str, name: str | None = None) -> None:
        """What the pages' Cancel and Retry send."""
        body = {"state": {"type": state, "name": name or state.title()}, "force": False}
        said = self.call("POST", f"/flow_runs/{run_id}/set_state", body)
        assert "ACCEPT" == said["status"], said

    def retry(self, run_id: str) -> None:
        """What the pages' Retry sends, as late as a person does: a worker says a second time that a run crashed."""
        time.sleep(5.0)
        self.set_state(run_id, "SCHEDULED", "AwaitingRetry")

    def state(self, run_id: str) -> tuple[str, str]:
        """(type, message) of a flow run's state."""
        state = self.call("GET", f"/flow_runs/{run_id}")["state"]
        return state["type"], state["message"] or ""

    def wait(self, run_id: str, *wanted: str, timeout_s: float = RUN_S) -> tuple[str, str]:
        """The run's state once it is one of `wanted`."""
        wait_until(lambda: self.state(run_id)[0] in wanted, f"{wanted}, not {self.state(run_id)}", timeout_s)
        return self.state(run_id)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of this name, the newest first."""
        return self.call("POST", "/events/filter", {"filter": {"event": {"name": [name]}}})["events"]

    def artifact(self, run_id: str, key: str) -> Any:
        """Data of a flow run's artifact, null while there is none."""
        filters = {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [key]}}
        found = self.call("POST", "/artifacts/filter", {"artifacts": filters})
        return found[0]["data"] if found else None


def wait_until(true: Callable[[], bool], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.5)


@contextmanager
def running_up(rollout: Rollout, *options: object) -> Iterator[Up]:
    """Start it, wait until it serves, and end it by Ctrl-C."""
    run = rollout.start("up", "--json", "--port", free_port(), *options)
    try:
        assert run.process.stdout is not None
        line = run.process.stdout.readline()  # pytest's own time limit ends this
        assert line, run.process.stderr.read() if run.process.stderr else ""
        said = json.loads(line)
        yield Up(run=run, ui=said["ui"], api=said["api"], lake=said["lake"])
    finally:
        if run.process.poll() is None:
            run.end(signal.SIGINT)
