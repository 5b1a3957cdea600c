"""One prefix of an object store with a checkpoint in it: list and get its files, with typed errors, and give up."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.batch.model_progress import Progress
from rollout.engine.checkpoint import INDEX_FILE
from rollout.errors import BadCheckpoint, BadConfig, BadInput
from rollout.lake.paths import S3_SCHEME, s3_options
from rollout.lake.store import s3_filesystem

FILES = 8
"""Files that are fetched at a time."""
WAIT_S = 0.2
"""Seconds between two looks whether the caller has gone, or another process has finished its fetch."""

TEXT = re.compile(r"(config|generation_config|tokenizer[\w.-]*|chat_template)\.json|chat_template\.jinja")
WEIGHTS = re.compile(r"[\w.-]+\.safetensors|" + re.escape(INDEX_FILE))
"""Plain names both: what an object is called can never leave the folder."""


class GivenUp(Exception):
    """Whoever asked for the checkpoint has gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    """An object as the store lists it; size in bytes."""

    size: int
    etag: str


class ModelStore:
    """The objects directly under `uri`. Credentials and endpoint are the AWS variables of the environment.

    `say` is told how far a transfer is, from another thread but in the caller's context; once `left` is set,
    every call raises GivenUp.

    Raises:
        BadConfig: no such URI.
    """

    def __init__(
        self, uri: str, *, say: Callable[[str], None] | None = None, left: threading.Event | None = None
    ) -> None:
        self.uri, self._where = uri, _split(uri)
        self._told, self._context, self._left = say, copy_context(), left or threading.Event()
        self._fs = s3_filesystem(s3_options(os.environ))

    def say(self, text: str) -> None:
        """Tell the caller."""
        if self._told is not None:
            self._context.run(self._told, text)

    @property
    def place(self) -> str:
        """What tells this prefix from all others."""
        return f"{self._fs.endpoint_url}\x00{self._where}"

    def list(self) -> dict[str, Object]:
        """The checkpoint's objects by name; sorted.

        Raises:
            BadCheckpoint: there are none.
            BadConfig: no rights, or no answer.
        """
        found = {}
        with self.errors():
            entries = self._call(self._fs._ls(self._where, detail=True, refresh=True))
        for entry in entries:
            name = entry["name"].removeprefix(f"{self._where}/")
            if entry["type"] == "file" and (TEXT.fullmatch(name) or WEIGHTS.fullmatch(name)):
                found[name] = Object(size=int(entry["size"]), etag=str(entry["ETag"]))
        if not found:
            raise BadCheckpoint(f"model {self.uri}: no checkpoint's files directly under it")
        return dict(sorted(found.items()))

    def get(self, wanted: Mapping[str, Object], folder: Path) -> None:
        """Fetch objects into a folder that is there; their lengths are checked."""
        progress = Progress(self.uri, sum(one.size for one in wanted.values()), self.say)
        sources, targets = [f"{self._where}/{name}" for name in wanted], [str(folder / name) for name in wanted]
        # One stream per file: s3fs resumes a torn one, while pieces side by side are held in memory and not resumed.
        with self.errors():
            self._call(self._fs._get(sources, targets, callback=progress, batch_size=FILES, max_concurrency=1))
        for name, one in wanted.items():
            size = (folder / name).stat().st_size
            if size != one.size:
                raise BadCheckpoint(f"model {self.uri}: {name} came with {size} bytes of {one.size}; run again")

    def pause(self) -> None:
        """Wait a moment; raises GivenUp."""
        if self._left.wait(WAIT_S):
            raise GivenUp

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run in fsspec's own loop; a transfer that stalls does not keep a caller who has gone."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._fs.loop)
        try:
            while not future.done():
                if self._left.is_set():
                    raise GivenUp
                futures.wait([future], timeout=WAIT_S)
            return future.result()
        finally:
            future.cancel()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """One typed line for whatever a store, or the disk, answers."""
        try:
            yield
        except (BadInput, GivenUp):
            raise
        except FileNotFoundError as error:
            raise BadCheckpoint(f"model {self.uri}: no such bucket, prefix or object ({_line(error)})") from error
        except PermissionError as error:
            raise BadConfig(
                f"model {self.uri}: no rights to read it ({_line(error)}); see AWS_ACCESS_KEY_ID"
            ) from error
        except Exception as error:  # botocore's errors share no base class with OSError
            hint = "; see AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID" if "botocore" in type(error).__module__ else ""
            raise BadConfig(f"model {self.uri} cannot be fetched: {_line(error)}{hint}") from error


def _split(uri: str) -> str:
    """`bucket/prefix` of a URI."""
    where = uri.removeprefix(S3_SCHEME).rstrip("/")
    if not where or "//" in where or ".." in where.split("/") or where.startswith("/"):
        raise BadConfig(f"model {uri!r}: give a directory or s3://bucket/prefix")
    return where


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
