"""The agent `command`: any program, one process group per rollout.

The program is the batch's `agent_command`, split as a shell would split it and run by none. It gets

stdin               the prompt row as one JSON object: messages, tools, label, metadata, request_kwargs
OPENAI_BASE_URL     the session, with /v1; OPENAI_API_BASE is the same under its older name
ANTHROPIC_BASE_URL  the session, without /v1
OPENAI_API_KEY, ANTHROPIC_API_KEY   the session's own key
ROLLOUT_RESULT      where it may leave its result: a JSON object as any agent returns it, 1 MiB at most
ROLLOUT_SESSION_ID  the session's id; processes that carry it are ended with the rollout

and the worker's other variables, in an empty folder of its own that is removed afterwards; so paths
among its arguments are best absolute. What it prints is read and dropped, at 6 MB/s at most, but for
the last lines, which a failure quotes. In a flow run that the command did not start, the worker's variable
ROLLOUT_ALLOWED_COMMANDS must list the program. An exit code other than 0 is the failure `agent_exit`; 124,
with which coreutils' `timeout` ends, is `agent_timeout`; at the rollout's deadline the whole group gets
SIGTERM, half a second later SIGKILL. Nothing that the program started outlives its rollout or the
worker, daemons included (Linux; elsewhere those of its group).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollout.errors import MESSAGE_LIMIT, BadConfig, Failure, FailureType, RolloutFailure, RolloutLakeError
from rollout.process import bound_argv, end_group, end_marked

takes_command = True

TERM_S = 0.5
"""Seconds between SIGTERM and SIGKILL at a deadline; within the grace of rollout.user_call."""
TAIL_BYTES = 4096
RESULT_LIMIT = 2**20
TIMEOUT_CODE = 124
SESSION_VARIABLE = "ROLLOUT_SESSION_ID"


class Ended(RolloutLakeError):
    """The program was ended from outside; the message has its last lines."""


def parse_command(text: str | None) -> list[str]:
    """`agent_command` as an argument list; its program is looked up now, relative to the worker's folder.

    Raises:
        BadConfig: there is none, it does not parse, or its program is not there.
    """
    if text is None:
        raise BadConfig("agent 'command' needs agent_command, the command line to run")
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise BadConfig(f"agent_command {text!r}: {error}") from error
    if not argv:
        raise BadConfig("agent_command is empty")
    program = shutil.which(argv[0])
    if program is None:
        raise BadConfig(f"agent_command: no program {argv[0]!r} is on this machine's PATH")
    return [str(Path(program).absolute()), *argv[1:]]


async def run(
    base_url: str,
    prompt: list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    api_key: str,
    command: list[str],
    tools: list[dict[str, Any]] | None = None,
    label: str | None = None,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """Run the program to its end and give what it left in its result file.

    Raises:
        RolloutFailure: agent_exit or agent_timeout, with the last lines that it printed.
        ValueError: the result file is no JSON object.
    """
    row = {"messages": prompt, "tools": tools, "label": label, "metadata": metadata, "request_kwargs": request_kwargs}
    async with _folder() as folder:
        (folder / "row.json").write_text(json.dumps(row))
        code, tail = await _play(command, folder, _environment(base_url, api_key, folder))
        if code != 0:
            raise RolloutFailure(_failure(code, tail))
        return _read_result(folder / "result.json")


@contextlib.asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rollout-"))
    (folder / "work").mkdir()
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _environment(base_url: str, api_key: str, folder: Path) -> dict[str, str]:
    address = urlsplit(base_url)
    unproxied = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), address.hostname]))
    return {
        **os.environ,
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "ROLLOUT_RESULT": str(folder / "result.json"),
        SESSION_VARIABLE: address.path.rpartition("/")[2],
        "NO_PROXY": unproxied,
        "no_proxy": unproxied,
    }


async def _play(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and last lines of the program; when this returns, nothing that it started is left."""
    outputs = [await _Tail.open(), await _Tail.open()]
    try:
        with (folder / "row.json").open("rb") as row:
            process = await asyncio.create_subprocess_exec(
                *bound_argv(command),
                stdin=row,
                stdout=outputs[0].sink,
                stderr=outputs[1].sink,
                cwd=folder / "work",
                env=environment,
                start_new_session=True,
            )
    finally:
        for output in outputs:
            os.close(output.sink)
    cancelled = False
    try:
        await process.wait()
    except asyncio.CancelledError:
        cancelled = True
        end_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERM_S)
    finally:
        end_group(process.pid, signal.SIGKILL)
        await asyncio.to_thread(end_marked, SESSION_VARIABLE, environment[SESSION_VARIABLE])
    code = await process.wait()
    await asyncio.gather(*(output.end() for output in outputs))
    tail = outputs[1].text() or outputs[0].text()
    if cancelled:
        raise Ended(f"{_name(command)} was ended; its last lines: {tail}")
    return code, tail


class _Tail:
    """Reads a program's output to its end and keeps the last of it.

    Between full reads it pauses, so that a flood waits in the pipe instead of taking this process's time.
    The pipe is our own: with asyncio's, a program has not ended before all have that hold its output.
    """

    def __init__(self, stream: asyncio.StreamReader, transport: asyncio.ReadTransport, sink: int) -> None:
        self.sink, self._transport, self._kept = sink, transport, b""
        self._reading = asyncio.create_task(self._read(stream))

    @classmethod
    async def open(cls) -> _Tail:
        source, sink = os.pipe()
        stream = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stream)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(source, "rb", 0))
        return cls(stream, transport, sink)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(65536):
            self._kept = (self._kept + piece)[-TAIL_BYTES:]
            if len(piece) > TAIL_BYTES:
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Wait for what is still in the pipe, but not for a process elsewhere that holds it open."""
        await asyncio.wait({self._reading}, timeout=0.2)
        self._reading.cancel()
        self._transport.close()

    def text(self) -> str:
        """The last lines on one line."""
        return " | ".join(self._kept.decode(errors="replace").split("\n")[-12:]).strip(" |")


def _failure(code: int, tail: str) -> Failure:
    how = f"ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    kind: FailureType = "agent_timeout" if code == TIMEOUT_CODE else "agent_exit"
    return Failure(type=kind, message=f"{how}: {tail or '(silent)'}"[:MESSAGE_LIMIT])


def _name(command: list[str]) -> str:
    return Path(command[0]).name


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size > RESULT_LIMIT:
        raise ValueError(f"the result is no file of {RESULT_LIMIT} bytes at most")
    result = json.loads(path.read_bytes())
    if not isinstance(result, dict):
        raise ValueError(f"the result file holds no JSON object but a {type(result).__name__}")
    return result
