"""`rollout up`: Prefect's server with its pages, a worker, and our deployments, for as long as the command lives."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from flows.registering import POOL, register
from flows.server import QUIET, check_answers, use_quietly, user_api_url
from flows.stopping import stop_by_sigterm
from rollout.errors import BadConfig, PortInUse
from rollout.flock import any_locked
from rollout.home import state_home
from rollout.lake.paths import LakePaths
from rollout.process import Child, ChildFailed, log_tail, spawn, start

CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"
STOP_S = 15.0
"""Seconds that the worker's flow runs have to end in order."""


def run_up(*, lake: str, port: int, as_json: bool) -> None:
    """Serve until Ctrl-C or SIGTERM, then end whatever was started.

    Raises:
        BadConfig: the user's Prefect server does not answer or refuses, or another `rollout up` runs here.
        PortInUse: somebody else serves at the port.
        BadLake: the lake cannot be written.
        ChildFailed: the server or the worker ended by itself.
    """
    paths = LakePaths(lake)
    paths.check_writable()
    with suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_up(paths.uri, port, as_json=as_json))


async def _up(lake: str, port: int, *, as_json: bool) -> None:
    stop_by_sigterm()
    async with AsyncExitStack() as stack:
        api = user_api_url()
        if api is None:
            api, server = await _serve(stack, port, quiet=as_json)
        else:
            await asyncio.to_thread(check_answers, api)
            server = None
        environment = _environment(api, lake, own=server is not None)
        use_quietly(api)
        _say("registering deployments", quiet=as_json)
        await register(environment, own=server is not None)
        worker = _start_worker(stack, environment)
        _show(api, lake, as_json=as_json)
        await _watch([child for child in (server, worker) if child is not None])


async def _serve(stack: AsyncExitStack, port: int, *, quiet: bool) -> tuple[str, Child]:
    """Our own server, whose runs, artifacts and schedules are kept from one `rollout up` to the next."""
    home = up_home()
    stack.callback(os.close, _claim(home))
    _check_port(port)
    _say("starting Prefect's server", quiet=quiet)
    environment = {**QUIET, "PREFECT_HOME": str(home)}
    argv = [sys.executable, "-m", "flows.server", str(port)]
    server = await start(argv, log=home / "server.log", env=environment)
    stack.callback(server.stop)
    api = f"{server.url}/api"
    _tell(home, api)
    stack.callback((home / "url").unlink, missing_ok=True)
    return api, server


def up_home() -> Path:
    """The Prefect home of this host's `rollout up`."""
    return state_home() / "prefect-up"


def running_up() -> str | None:
    """API of the `rollout up` that runs on this host, null if none does or it is still starting."""
    if any_locked([up_home() / "lock"]) is False:
        return None  # one that was killed leaves its address
    try:
        return (up_home() / "url").read_text()
    except FileNotFoundError:
        return None


def _tell(home: Path, api: str) -> None:
    written = home / "url.new"
    written.write_text(api)
    written.replace(home / "url")


def _claim(home: Path) -> int:
    """The lock of the Prefect home: two servers on one SQLite file lock each other out."""
    home.mkdir(parents=True, exist_ok=True)
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BadConfig(
            f"`rollout up` runs here already ({running_up()}); end it, or set another ROLLOUT_HOME"
        ) from error
    (home / "url").unlink(missing_ok=True)  # of one that was killed
    return lock


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortInUse(f"port {port}: {error.strerror}; choose another --port") from error


def _environment(api: str, lake: str, *, own: bool) -> dict[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    named = {"PREFECT_API_URL": api, "ROLLOUT_LAKE": lake, "PATH": programs, CONSOLE_LEVEL: "INFO"}
    if own:  # else the user's profile may hold what their server asks for
        named["PREFECT_HOME"] = str(up_home())
    return {**os.environ, **QUIET, **named}


def _start_worker(stack: AsyncExitStack, environment: dict[str, str]) -> Child:
    """A worker of this host; it ends its flow runs in order, and these end with it in any case."""
    log = up_home() / "worker.log"
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", socket.gethostname()]
    process = spawn(argv, log=log, env=environment, says_ready=False)
    worker = Child(process=process, facts={}, log=log)
    stack.callback(worker.stop, STOP_S)
    return worker


async def _watch(children: list[Child]) -> None:
    while True:
        await asyncio.sleep(0.5)
        for child in children:
            if not child.alive():
                raise ChildFailed(f"{child.log.stem} ended with {child.process.returncode}: {log_tail(child.log)}")


def _show(api: str, lake: str, *, as_json: bool) -> None:
    pages = api.removesuffix("/api")
    if as_json:
        print(json.dumps({"ready": True, "ui": pages, "api": api, "lake": lake, "pool": POOL}), flush=True)
        return
    print(f"{'pages':<8} {pages}/deployments")
    print(f"{'lake':<8} {lake}")
    print(f"{'trigger':<8} rollout trigger --deployment rollout-batch --param n_samples_per_prompt=8 --watch")
    print(
        "\nSchedules are off until you turn them on there. Ctrl-C ends the server, the worker and their runs.",
        flush=True,
    )


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
