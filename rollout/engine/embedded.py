"""The embedded engine: a child process that serves a small Qwen3 checkpoint as SGLang would.

    python -m rollout.engine.embedded --model DIR [--port 0] [--host 127.0.0.1] [--device cpu] [--grow SHAPE]

It prints rollout.process's ready line when it answers. A directory that cannot be loaded and a port
that is taken end it with exit code 2 and one line on stderr, before anything is served. The parts:
`checkpoint` (what a directory holds), `model` (forward pass), `sampler`, `scheduler`, `serving`.

A request's tokens and logprobs are the same bits whatever runs beside it and at whatever width, in
every process on the same kind of machine: `model` says how.

Start: about 1.5 s, nearly all of it torch's import (transformers is not imported).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from rollout.engine.checkpoint import Checkpoint, read_checkpoint
from rollout.engine.exact import EXACT_ENVIRONMENT
from rollout.errors import BadCheckpoint, BadInput, PortInUse
from rollout.process import Child, ChildFailed, say_ready, start
from rollout.tito.tokenizer import Tokenizer

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **EXACT_ENVIRONMENT}
_BAD_CHECKPOINT = f"{BadCheckpoint.__name__}: "
_KEEPALIVE_S = 3600.0


async def start_embedded(model: Path | None, *, log: Path, port: int = 0) -> Child:
    """Start the engine on `model` (None: the checkpoint that ships in the package), stderr to `log`.

    `port`: one that the caller holds (rollout.engine.ports); 0 takes a free one.

    The child ends with this process. Its `facts`: port, model_path, context_length, vocab_size,
    weight_version.

    Raises:
        BadCheckpoint: the directory cannot be loaded; found before a process is started where possible.
        ChildFailed: the child ended for another reason.
    """
    if model is None:
        from rollout.engine.tiny import CHECKPOINT

        model = CHECKPOINT
    await asyncio.to_thread(read_checkpoint, model)
    written = log.stat().st_size if log.exists() else 0
    argv = [sys.executable, "-m", "rollout.engine.embedded", "--model", str(model)]
    argv += ["--port", str(port)]
    try:
        return await start(argv, log=log)
    except ChildFailed:
        for line in log.read_bytes()[written:].decode(errors="replace").splitlines():
            if line.startswith(_BAD_CHECKPOINT):
                raise BadCheckpoint(line.removeprefix(_BAD_CHECKPOINT)) from None
        raise


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        PortInUse: another process has it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise PortInUse(f"{host}:{port} cannot be bound ({error.strerror}); choose another --port, or 0") from error
    return held


async def _serve(
    checkpoint: Checkpoint, tokenizer: Tokenizer, held: socket.socket, options: argparse.Namespace
) -> None:
    # Imported late: what can be refused is refused before the second that torch takes.
    import torch
    from aiohttp import web

    from rollout.engine.answer import Served
    from rollout.engine.grow import find_shape
    from rollout.engine.model import Qwen3, load_model
    from rollout.engine.scheduler import Scheduler
    from rollout.engine.serving import EngineServer

    torch.set_num_threads(1)
    shape = None if options.grow is None else find_shape(options.grow)
    model = load_model(checkpoint, device=options.device, shape=shape)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    scheduler = Scheduler(
        model,
        stop_ids=checkpoint.stop_ids.union(eos),
        decode=tokenizer.decode,
        max_running=options.max_running_requests,
    )
    context = min(checkpoint.config.context, options.context_length or checkpoint.config.context)
    served = Served(checkpoint=checkpoint, tokenizer=tokenizer, context=context, weight_version=options.weight_version)

    def load(updated: Checkpoint) -> Qwen3:
        return load_model(updated, device=options.device, block=model.block, shape=shape)

    server = EngineServer(served, scheduler, load=load, initializer=lambda: torch.set_num_threads(1))
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=1.0
    )
    await runner.setup()
    await web.SockSite(runner, held).start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    say_ready(
        port=held.getsockname()[1],
        model_path=str(checkpoint.directory),
        context_length=context,
        vocab_size=checkpoint.config.vocabulary,
        weight_version=options.weight_version,
        block=model.block,
    )
    await stopped.wait()
    await runner.cleanup()


def main() -> None:
    """Serve until SIGTERM; exit 2 with one line for a bad checkpoint or a port in use."""
    parser = argparse.ArgumentParser(prog="python -m rollout.engine.embedded", description="Serve a Qwen3 checkpoint.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and reports it")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--grow", default=None, help="compute the same function in a greater shape, as qwen3-8b")
    parser.add_argument("--context-length", type=int, default=None, help="less than the model's own")
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--weight-version", default="default", help="name of the weights in the answers")
    options = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    try:
        with bind(options.host, options.port) as held:
            checkpoint = read_checkpoint(options.model)
            asyncio.run(_serve(checkpoint, Tokenizer(checkpoint.directory), held, options))
    except BadInput as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
