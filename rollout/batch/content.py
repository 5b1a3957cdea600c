"""The exact bytes that a config hash is over, without holding a large file's in memory."""

from __future__ import annotations

import hashlib
import io
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rollout.errors import BadPrompts
from rollout.lake.datafile import file_digest

MEMORY_BYTES = 16 * 1024 * 1024
"""Files up to this size are read once and kept; larger ones are read again, and refused where they changed."""

_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """`size` bytes with blake2b-256 `digest` (hex), which `open` gives; `name` is for errors."""

    name: str
    size: int
    digest: str
    open: Callable[[], BinaryIO]

    @classmethod
    def of(cls, data: bytes, name: str = "") -> Content:
        digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        return cls(name=name, size=len(data), digest=digest, open=lambda: io.BytesIO(data))

    @classmethod
    def of_file(cls, path: Path, name: str) -> Content:
        """A file's bytes as they are now.

        Raises:
            BadPrompts: it cannot be read.
        """
        with reading(name):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size <= MEMORY_BYTES:
                return cls.of(path.read_bytes(), name)
            with path.open("rb") as file:
                digest = file_digest(file)
                return cls(name=name, size=file.tell(), digest=digest, open=lambda: path.open("rb"))

    def chunks(self) -> Iterator[bytes]:
        """The bytes in order.

        Raises:
            BadPrompts: they are no longer those of `digest`, so what was read of them in between may not be either.
        """
        digest = hashlib.blake2b(digest_size=32)
        with reading(self.name), self.open() as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != self.digest:
            raise BadPrompts(f"{self.name}: changed while it was read; run again")


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn what a file system says into one line about `name`."""
    try:
        yield
    except OSError as error:
        raise BadPrompts(f"{name}: cannot be read: {error.strerror or error}") from error
    except BadPrompts:
        raise
    except ValueError as error:  # a NUL in the name
        raise BadPrompts(f"{name!r}: cannot be read: {error}") from error
