"""One SGLang server as a child process: own process session, own port, ready when it generates.

SGLang starts processes of its own (scheduler, detokenizer, compilers). All of them carry our mark in
their environment, so none is left whatever group or session it went to: `stop` ends what carries the
mark, and so does a watcher (rollout.reaper) when this process dies, kill -9 included. Linux only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rollout.engine.ports import HeldPort
from rollout.engine.recipes import Recipe
from rollout.process import Child, ChildFailed, bound_argv, children, end_group, end_marked, log_tail

MARK = "ROLLOUT_ENGINE"
"""Environment variable that all processes of one engine share, and no other has."""
READY_S = 600.0
TAIL_LINES = 12
"""Lines of its log in the message of an engine that did not start."""
_POLL_S = 0.25
_PROBE_S = 30.0
_WARM_UP_S = 300.0
_PART = "sglang::"
"""How SGLang's own processes call themselves: scheduler and detokenizer."""

Say = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class EngineChild(Child):
    """A running SGLang server.

    `mark` is the value of MARK in its processes; `watcher` ends them after us; `parts` are the processes
    without which it cannot serve, by pid.
    """

    mark: str
    watcher: subprocess.Popen[bytes]
    port: HeldPort | None = None
    parts: dict[int, str] = field(default_factory=dict)

    def lost(self) -> str | None:
        """The main process lives on for seconds after its scheduler has died."""
        if (ended := super(EngineChild, self).lost()) is not None or not self.parts:
            return ended
        living = children(self.process.pid)
        gone = [name for pid, name in self.parts.items() if pid not in living]
        return f"its {', '.join(gone)} ended" if gone else None

    def stop(self, grace_s: float = 1.0) -> None:
        """End every process of this engine: SIGTERM to its group, SIGKILL after `grace_s` seconds.

        SGLang has nothing to save, and waits for 5 s when its scheduler ends with it.
        """
        end_group(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        end_group(self.process.pid, signal.SIGKILL)
        end_marked(MARK, self.mark)
        self.process.wait()
        end_group(self.watcher.pid, signal.SIGKILL)
        self.watcher.wait()
        if self.port is not None:
            self.port.close()


async def launch(
    recipe: Recipe,
    *,
    model: Path | str,
    python: Path,
    log: Path,
    gpus: Sequence[int | str] = (),
    deadline_s: float = READY_S,
    extra: Sequence[str] = (),
    port: int | None = None,
    say: Say | None = None,
) -> EngineChild:
    """Start SGLang and wait until it generates; it ends with this process.

    Args:
        model: a checkpoint directory, or a name that SGLang resolves.
        python: the interpreter of an environment with SGLang.
        log: everything that it writes is appended here.
        gpus: the GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; empty leaves the recipe's environment as it is.
        extra: further flags, behind the recipe's.
        port: one that the caller holds (HeldPort); null takes a free one.
        say: told now and then how long it has been starting.

    Raises:
        ChildFailed: it ended, or did not generate within `deadline_s` seconds; with the last lines of `log`.
    """
    held = HeldPort() if port is None else None
    number = held.port if held is not None else int(port or 0)
    argv = [str(python), "-m", "sglang.launch_server", "--model-path", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(number), *recipe.flags, *extra]
    environment = dict(recipe.environment)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    facts = {"port": number, "recipe": recipe.name, "flags": [*recipe.flags, *extra]}
    child = start_marked(argv, log=log, environment=environment, facts=facts)
    child.port = held
    try:
        await ready(child, deadline_s=deadline_s, say=say)
    except BaseException:
        child.stop(grace_s=0.0)  # nobody will be told of it
        raise
    child.parts = {pid: name for pid, name in children(child.process.pid).items() if name.startswith(_PART)}
    return child


def start_marked(
    argv: Sequence[str], *, log: Path, environment: Mapping[str, str], facts: dict[str, Any]
) -> EngineChild:
    """Start a server under a mark of its own, and what ends all that carry it when this process dies."""
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    watching = [sys.executable, "-m", "rollout.reaper", str(os.getpid()), MARK, mark]
    watcher = subprocess.Popen(
        watching,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with log.open("ab") as sink:
        process = subprocess.Popen(
            bound_argv(argv),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **environment, MARK: mark},
            start_new_session=True,
        )
    return EngineChild(process=process, facts=facts, log=log, mark=mark, watcher=watcher)


async def ready(child: EngineChild, *, deadline_s: float, say: Say | None = None) -> None:
    """Wait until the server generates: /health_generate, then one turn of each kind of sampling.

    The first turn of a kind may compile for half a minute, which no rollout shall wait for.

    Raises:
        ChildFailed: see `launch`.
    """
    began, told = time.monotonic(), 0.0
    async with aiohttp.ClientSession() as http:
        while not await _generates(http, child.url):
            waited = time.monotonic() - began
            if not child.alive():
                raise ChildFailed(f"SGLang ended with {child.process.returncode}, its log {_tail(child.log)}")
            if waited > deadline_s:
                raise ChildFailed(f"SGLang was not ready after {deadline_s:g} s, its log {_tail(child.log)}")
            if say is not None and waited - told >= 10.0:
                told = waited
                say(f"SGLang is starting ({waited:.0f} s of {deadline_s:.0f} s at most; log {child.log})")
            await asyncio.sleep(_POLL_S)
        await _warm_up(http, child, max(1.0, min(_WARM_UP_S, deadline_s - (time.monotonic() - began))))


async def _generates(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health_generate", timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def _warm_up(http: aiohttp.ClientSession, child: EngineChild, deadline_s: float) -> None:
    kinds = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "sampling_seed": 1})
    for kind in kinds:
        params = {"max_new_tokens": 4, "ignore_eos": True, **kind}
        body = {"input_ids": [0], "sampling_params": params, "return_logprob": True}
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with http.post(f"{child.url}/generate", json=body, timeout=timeout) as reply:
                if reply.status != 200:
                    raise ChildFailed(f"SGLang answered its first turn with {reply.status}: {await reply.text()}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ChildFailed(
                f"SGLang did not answer its first turn ({type(error).__name__}), its log {_tail(child.log)}"
            ) from error


def _tail(log: Path) -> str:
    return f"{log}: {log_tail(log, TAIL_LINES)}"
