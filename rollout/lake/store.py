"""Where a lake's bytes live: a local disk or S3, behind the few operations that the lake needs.

What any store must promise:
- `create` is exclusive and whole: of several writers one wins, and nobody ever sees half a file;
- `upload` shows a file under its final name whole or not at all;
- `link` gives an existing file a second, unique name without passing its bytes through this process.

Keys are POSIX paths relative to the lake's root; they can never leave it. This is the only module that opens s3fs.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO, Any, Protocol, cast

from rollout.errors import BadLake, PublishFailed

_KEY_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*(/[A-Za-z0-9_][A-Za-z0-9._=-]*)*")


def check_key(key: str) -> str:
    """The key itself, if it cannot leave the root.

    Raises:
        ValueError: an absolute path, a `..`, a hidden file or a character outside the pattern.
    """
    if not _KEY_PATTERN.fullmatch(key):
        raise ValueError(f"{key!r} is no path inside a lake")
    return key


class Store(Protocol):
    """Operations on the files under one root. Missing files raise FileNotFoundError."""

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` under a name that nobody holds; False if somebody does."""

    def replace(self, key: str, data: bytes) -> None:
        """Write `data`, whole or not at all, whatever was there."""

    def read(self, key: str) -> bytes: ...

    def open(self, key: str) -> IO[bytes]:
        """The file as a seekable stream."""

    def scratch(self, folder: str) -> Path:
        """A local path, not yet there, for a file that `upload` will bring to a key under `folder`."""

    def upload(self, scratch: Path, key: str) -> None:
        """Move a finished scratch file to a key of its own."""

    def link(self, source: str, target: str) -> None:
        """Give `source` the unique second name `target`, with a fresh modification time."""

    def size(self, key: str) -> int: ...

    def modified(self, key: str) -> float:
        """When the file was written, in Unix seconds of the store's own clock."""

    def exists(self, key: str) -> bool: ...

    def names(self, folder: str) -> list[str]:
        """Names of the files and folders directly in `folder`, sorted; none if there is no such folder."""

    def remove(self, key: str) -> None:
        """Remove one file; no error if it is gone."""

    def probe(self) -> None:
        """Write, link and remove a small file: OSError or BadLake where that cannot work."""


class LocalStore:
    """A folder on a local disk. Needs a file system with hard links."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        return self.root / check_key(key)

    def create(self, key: str, data: bytes) -> bool:
        final = self.path(key)
        temporary = self._write_temporary(final, data)
        try:
            # Not open(..., "xb"): killed in mid-write, that leaves a short file that looks whole.
            os.link(temporary, final)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_entry(final.parent)
        return True

    def replace(self, key: str, data: bytes) -> None:
        final = self.path(key)
        os.replace(self._write_temporary(final, data), final)
        sync_entry(final.parent)

    def _write_temporary(self, final: Path, data: bytes) -> Path:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            with temporary.open("xb") as sink:
                sink.write(data)
                sink.flush()
                os.fsync(sink.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def read(self, key: str) -> bytes:
        return self.path(key).read_bytes()

    def open(self, key: str) -> IO[bytes]:
        return self.path(key).open("rb")

    def scratch(self, folder: str) -> Path:
        where = self.path(folder)
        where.mkdir(parents=True, exist_ok=True)
        return where / f".{uuid.uuid4().hex}.tmp"

    def upload(self, scratch: Path, key: str) -> None:
        final = self.path(key)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        os.rename(scratch, final)
        sync_entry(final.parent)

    def link(self, source: str, target: str) -> None:
        final = self.path(target)
        final.parent.mkdir(parents=True, exist_ok=True)
        os.link(self.path(source), final)
        # A link keeps the staged time, and vacuum would take it for an old orphan.
        os.utime(final)
        sync_entry(final.parent)

    def size(self, key: str) -> int:
        return self.path(key).stat().st_size

    def modified(self, key: str) -> float:
        return self.path(key).stat().st_mtime

    def exists(self, key: str) -> bool:
        return self.path(key).exists()

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path(folder)) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def remove(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def probe(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".probe-", dir=self.root))
        try:
            (folder / "a").write_bytes(b"")
            os.link(folder / "a", folder / "b")
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise BadLake(f"the file system of {self.root} has no hard links; choose another disk or S3") from error
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sync_entry(path: Path) -> None:
    """fsync a file or folder by its path: a folder, so that the names in it outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def s3_filesystem(options: dict[str, str]) -> Any:
    """S3 through s3fs, with storage options in deltalake's names (rollout.lake.paths.s3_options)."""
    import s3fs  # slow to import, and a local lake needs none of it

    client: dict[str, Any] = {"region_name": options["aws_region"]} if "aws_region" in options else {}
    return s3fs.S3FileSystem(
        key=options.get("aws_access_key_id"),
        secret=options.get("aws_secret_access_key"),
        token=options.get("aws_session_token"),
        endpoint_url=options.get("aws_endpoint_url"),
        client_kwargs=client,
        use_listings_cache=False,
    )


class S3Store:
    """A prefix in an S3 bucket, through s3fs. Exclusive creation is `If-None-Match: *`."""

    CONFLICT_TRIES = 8
    """S3 answers 409 while two conditional writes race; the loser repeats and then learns 412."""

    def __init__(self, root: str, options: dict[str, str]) -> None:
        self.root = root
        self.fs = s3_filesystem(options)

    def path(self, key: str) -> str:
        return f"{self.root}/{check_key(key)}"

    def create(self, key: str, data: bytes) -> bool:
        for attempt in range(self.CONFLICT_TRIES):
            try:
                self.fs.pipe_file(self.path(key), data, mode="create")
            except OSError as error:
                status = _http_status(error)
                if isinstance(error, FileExistsError) or status == 412:
                    return False
                if status != 409:
                    raise
                time.sleep(random.uniform(0, 0.05 * 2**attempt))
            else:
                return True
        raise PublishFailed(f"{self.path(key)}: {self.CONFLICT_TRIES} conditional writes met a conflict; run again")

    def replace(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self.path(key), data)

    def read(self, key: str) -> bytes:
        return cast(bytes, self.fs.cat_file(self.path(key)))

    def open(self, key: str) -> IO[bytes]:
        return cast(IO[bytes], self.fs.open(self.path(key), "rb"))

    def scratch(self, folder: str) -> Path:
        check_key(folder)
        return Path(tempfile.gettempdir()) / f"rollout-{uuid.uuid4().hex}.tmp"

    def upload(self, scratch: Path, key: str) -> None:
        self.fs.put_file(str(scratch), self.path(key))
        scratch.unlink()

    def link(self, source: str, target: str) -> None:
        self.fs.copy(self.path(source), self.path(target))

    def size(self, key: str) -> int:
        return int(self.fs.info(self.path(key))["size"])

    def modified(self, key: str) -> float:
        return float(self.fs.info(self.path(key))["LastModified"].timestamp())

    def exists(self, key: str) -> bool:
        return bool(self.fs.exists(self.path(key)))

    def names(self, folder: str) -> list[str]:
        try:
            found = self.fs.ls(self.path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found if name != self.path(folder)})

    def remove(self, key: str) -> None:
        try:
            self.fs.rm_file(self.path(key))
        except FileNotFoundError:
            return

    def probe(self) -> None:
        name = f"staging/probe-{uuid.uuid4().hex}"
        self.create(name, b"")
        self.remove(name)


def _http_status(error: BaseException) -> int | None:
    cause = error.__cause__ or error
    response = getattr(cause, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None
