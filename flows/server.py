"""A Prefect server for one run of the command, when the user has none: a child that ends with us.

Prefect's own ephemeral server outlives a flow that is killed with -9. This is the same server,
bound to its parent's life by the kernel (rollout.process), on a port of its own, in a home of its
own: the user's Prefect profile and database are neither read nor written.

`python -m flows.server` is the child's side.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from rollout.errors import BadConfig
from rollout.home import claim_folder, state_home
from rollout.process import die_with_parent, say_ready, start

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_EVENTS_WORKER_MAX_QUEUE_SIZE": "10000",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
}
"""No outside calls, nothing on the user's terminal; a flow run's own log still reaches its server."""

DRAIN_S = 30.0
"""Seconds that a busy server has for the last events and log lines; task runs whose end is lost stay Running."""


def user_api_url() -> str | None:
    """The Prefect API that the user has chosen: PREFECT_API_URL, else their active profile's; null if neither."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None


def use_quietly(api: str | None = None) -> None:
    """Set this process's environment up for Prefect before its first import: nothing said, nothing called outside."""
    assert "prefect" not in sys.modules, "Prefect was imported before its environment was set"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if api is not None:
        os.environ["PREFECT_API_URL"] = api


@asynccontextmanager
async def prefect_api() -> AsyncIterator[None]:
    """Set this process up for flows: the user's Prefect server, else one of ours for as long as the block lasts.

    To be entered before the first import of Prefect, which reads the environment then.

    Raises:
        BadConfig: the user's server does not answer.
        ChildFailed: ours did not start; its log's tail is quoted.
    """
    use_quietly()
    url = user_api_url()
    if url is not None:
        await asyncio.to_thread(check_answers, url)
    async with _own_server() if url is None else nullcontext():
        try:
            yield
        finally:
            await _drain()


@asynccontextmanager
async def _own_server() -> AsyncIterator[None]:
    with claim_folder(state_home(), "prefect") as home:  # two servers on one SQLite file lock each other out
        os.environ["PREFECT_HOME"] = str(home)
        server = await start([sys.executable, "-m", "flows.server"], log=home / "server.log")
        os.environ["PREFECT_API_URL"] = f"{server.url}/api"
        try:
            yield
        finally:
            await asyncio.to_thread(server.stop)


async def _drain() -> None:
    """Let Prefect's background workers send what they hold: a server of ours ends next, or this process does."""
    if "prefect" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        pending = worker.drain_all(timeout=DRAIN_S)
        if inspect.isawaitable(pending):
            await pending


def check_answers(url: str) -> None:
    """Whether a Prefect server of the user's is there.

    Raises:
        BadConfig: it does not answer.
    """
    try:
        urlopen(f"{url.rstrip('/')}/health", timeout=10).close()
    except HTTPError:
        return  # it answers; whether it lets us in is Prefect's own question
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise BadConfig(
            f"PREFECT_API_URL {url} does not answer ({reason}): start that server, or unset it (and your Prefect "
            "profile's) to use one of our own"
        ) from error


def _for_one_run() -> dict[str, str]:
    return {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


def _with_pages(port: int) -> dict[str, str]:
    """The pages call the API under this address; without it they would call port 4200."""
    return {"PREFECT_UI_ENABLED": "1", "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}


def main() -> None:
    """Serve Prefect on loopback until the parent ends.

    Without an argument only its API, on a free port, for one run; with a port as argument its pages,
    schedules and automations, too.
    """
    die_with_parent()
    port = int(sys.argv[1]) if sys.argv[1:] else 0
    os.environ.pop("PREFECT_API_URL", None)
    os.environ |= _with_pages(port) if port else _for_one_run()
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started and sockets:
                say_ready(port=sockets[0].getsockname()[1])

    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=port,
        log_level="error",
        lifespan="on",
    )
    Server(config).run(sockets=[config.bind_socket()])


if __name__ == "__main__":
    main()
