"""A real Ray cluster on this machine: every node is a `ray start` of its own, with a state folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollout.process import free_port, stat_fields

MARK = "ROLLOUT_TEST_RAY_NODE"
STARTED = "Ray runtime started."


@dataclass
class RayNode:
    """One node. Ray's processes are of the session of its `ray start`; ours carry `mark` in their environment."""

    home: Path
    log: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "ROLLOUT_", "RAY_"))}
        common = ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--object-store-memory=80000000", "--block"]
        common += [f"--resources={json.dumps({'H200': 1})}", "--disable-usage-stats"]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("ray")), "start", *arguments, *common],
                env={**kept, "ROLLOUT_HOME": str(self.home), MARK: self.mark},
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        while STARTED not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        """Command lines of its living processes, by pid."""
        assert self.process is not None
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = stat_fields(int(folder.name)) or ["Z"]
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if fields[0] != "Z" and (marked or int(fields[3]) == self.process.pid):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def lose(self) -> None:
        """kill -9 all of it, as a machine's loss of power does."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        assert self.process is not None
        self.process.wait()

    def ours(self) -> list[str]:
        """Command lines of what this project started there."""
        return [command for command in self.processes().values() if "-m rollout." in command]


@dataclass
class RayCluster:
    """Its head, and the nodes that join; each offers two CPUs and one `H200`."""

    folder: Path
    port: int
    nodes: list[RayNode] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, *arguments: str) -> RayNode:
        name = f"node-{len(self.nodes)}"
        self.nodes.append(RayNode(home=self.folder / name, log=self.folder / f"{name}.log"))
        self.nodes[-1].start(*(arguments or (f"--address={self.address}",)))
        return self.nodes[-1]


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster of a head alone, gone with the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's sockets are in it
    cluster = RayCluster(folder, free_port())
    try:
        cluster.add(
            "--head",
            f"--port={cluster.port}",
            f"--temp-dir={folder / 'ray'}",
            "--include-dashboard=false",
            f"--ray-client-server-port={free_port()}",
        )
        yield cluster
    finally:
        for node in cluster.nodes:
            node.lose()
        shutil.rmtree(folder)
