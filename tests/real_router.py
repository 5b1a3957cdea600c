"""A real router in a process of its own, before engines that are there already."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout.process import free_port

KINDS = ("smg", "sglang-router")
READY_S = 90.0

_COMMANDS = {
    "smg": ("-m", "smg", "launch", "--policy", "consistent_hashing"),
    "sglang-router": ("-m", "sglang_router.launch_router", "--policy", "manual"),
}


def router_python() -> Path:
    """Python of the environment with the routers: ROLLOUT_TEST_ROUTER_PYTHON, else the checkout's .venv-router.

    Raises:
        FileNotFoundError: there is none.
    """
    built = Path(__file__).parent.parent / ".venv-router" / "bin" / "python"
    python = Path(os.environ.get("ROLLOUT_TEST_ROUTER_PYTHON", built))
    if not os.access(python, os.X_OK):
        raise FileNotFoundError(f"no environment with routers at {python}: run `make routers`")
    return python


@contextmanager
def real_router(kind: str, workers: Sequence[str], *, log: Path) -> Iterator[str]:
    """Its URL, once it takes generations; with README's options.

    Raises:
        AssertionError: it did not start; says what its log ends with.
    """
    port, monitor = free_port(), free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(monitor), "--disable-retries"]
    options += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command = [str(router_python()), *_COMMANDS[kind], *options, "--worker-urls", *workers]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + READY_S
        while not _knows_all(url, len(workers)):
            assert process.poll() is None and time.monotonic() < end, f"{kind}: {log.read_text()[-2000:]}"
            time.sleep(0.1)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _knows_all(url: str, number: int) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=5) as reply:
            healthy = reply.read().count(b'"is_healthy":true')
        with urllib.request.urlopen(f"{url}/health_generate", timeout=10) as reply:
            return bool(healthy == number and reply.status == 200)
    except OSError:
        return False
