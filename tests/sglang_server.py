"""A real SGLang on the CPU for the length of a block."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.engine.launch import launch
from rollout.engine.recipes import tiny_cpu
from rollout.engine.tiny import CHECKPOINT


@contextmanager
def sglang_server(python: Path, folder: Path, *extra: str, model: Path = CHECKPOINT) -> Iterator[str]:
    """Its URL; started as `tiny_cpu` says and with `extra` options, its log in `folder`."""
    child = asyncio.run(launch(tiny_cpu(), model=model, python=python, log=folder / "sglang.log", extra=extra))
    try:
        yield child.url
    finally:
        child.stop()
