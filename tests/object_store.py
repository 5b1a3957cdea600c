"""A real S3 server (moto) in a process of its own, and a line to it that can stall."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

from rollout.process import free_port

SOMEBODY = "AWS4-HMAC-SHA256 Credential=somebody/20261202/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00"
"""Who owns what is put there: a stranger may not put it again."""


class ObjectStore:
    """The server at `url`. It takes any credentials unless `wrong_keys` says otherwise."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self._log = url, log

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to find it."""
        return aws_environment(self.url)

    def bucket(self) -> str:
        """Make a bucket of a name of its own."""
        name = f"bucket-{uuid.uuid4().hex}"
        self._send("PUT", name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._send("PUT", f"{bucket}/{key}", data)

    def delete(self, bucket: str, key: str) -> None:
        self._send("DELETE", f"{bucket}/{key}")

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Put a folder's files under a prefix; its URI."""
        for path in folder.iterdir():
            self.put(bucket, f"{prefix}/{path.name}", path.read_bytes())
        return f"s3://{bucket}/{prefix}"

    def reads(self, bucket: str, key: str = "") -> int:
        """GETs so far of an object, or without a key of anything in the bucket, listings too."""
        return len(re.findall(rf'"GET /{re.escape(bucket)}{"/" + re.escape(key) if key else ""}[ ?/]', self.log()))

    def log(self) -> str:
        return self._log.read_text()

    @contextmanager
    def wrong_keys(self) -> Iterator[None]:
        """Every key is wrong while the block lasts."""
        self._send("POST", "moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            self._send("POST", "moto-api/reset-auth", b"inf")

    def _send(self, method: str, path: str, data: bytes = b"") -> None:
        headers = {"Content-Type": "application/octet-stream", "Authorization": SOMEBODY}
        with urlopen(Request(f"{self.url}/{path}", data=data, headers=headers, method=method), timeout=60) as answer:
            answer.read()


def aws_environment(url: str) -> dict[str, str]:
    """AWS's variables for the server at `url`, with made-up credentials."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def serve_objects(folder: Path) -> Iterator[ObjectStore]:
    """An empty object store for as long as the block lasts; its log goes to `folder`."""
    for attempt in range(5):  # the port may be taken by another process before the server binds it
        port, log = free_port(), folder / f"moto-{attempt}.log"
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with log.open("wb") as file:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            if _answers(process, port):
                yield ObjectStore(f"http://127.0.0.1:{port}", log)
                return
        finally:
            process.terminate()
            process.wait(30)
    raise AssertionError(log.read_text())


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60):
            return True
        time.sleep(0.05)
    return False


class StallingLine:
    """A TCP relay to a server: answers stall behind `n_bytes` of each connection until `open` is set."""

    def __init__(self, url: str, n_bytes: int) -> None:
        self._target, self._limit = ("127.0.0.1", int(url.rsplit(":", 1)[1])), n_bytes
        self.stalled, self.open = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> StallingLine:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._start(self._relay, near)

    def _relay(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            self._start(self._copy, near, far, None)
            self._copy(far, near, self._limit)

    def _copy(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        done = 0
        with suppress(OSError):
            while data := source.recv(16384):
                done += len(data)
                if limit is not None and done > limit and not self.open.is_set():
                    self.stalled.set()
                    self.open.wait(120)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
