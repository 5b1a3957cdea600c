"""The spool: finished rollouts of one shard on the local disk, so that a restarted shard runs only what is missing.

    file    = frame(header) frame(samples' schema) frame(trajectories' schema) frame(record)...
    frame   = see rollout.frames
    header  = JSON: what the rows are of (`spool_header`)
    schema  = Arrow IPC schema message
    record  = length of the first message (8 bytes, little-endian), then two Arrow IPC messages as
              RecordBatch.serialize() gives them: the rollout's rows of SAMPLES_SCHEMA and of TRAJECTORIES_SCHEMA

At opening, the file is read up to the first frame that is torn or whose digest is wrong, cut there and
appended to. With another header or other schemas all of it is dropped.

What survives: after a kill of the process, every rollout whose `append` returned. After a loss of power,
those that the kernel had written back by itself (Linux: what is older than about half a minute), because
nothing is synced: a lost tail costs repeated rollouts, never a wrong row.

A process locks its file (flock) for as long as it has it open. Where another one runs the same shard,
the later takes a file of its own; whoever opens the shard next gathers all files that nobody holds.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType

import pyarrow as pa

from rollout.columns import SAMPLES_SCHEMA, blake2b_256
from rollout.frames import Payload, read_frames, write_frame
from rollout.lake.planfile import Plan
from rollout.tape_columns import TRAJECTORIES_SCHEMA

log = logging.getLogger(__name__)

SPOOLS = "spool"
"""Folder of all spools, below the command's state folder."""
FORMAT = 1
SCHEMAS = (SAMPLES_SCHEMA, TRAJECTORIES_SCHEMA)
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRows:
    """One finished rollout as it will be staged: its rows of SAMPLES_SCHEMA and of TRAJECTORIES_SCHEMA, never none."""

    samples: pa.RecordBatch
    trajectories: pa.RecordBatch

    @property
    def index(self) -> int:
        return int(self.samples.column("index")[0].as_py())


class Spool:
    """The open spool of one shard. `rollouts` are those that were found in it; thread-safe.

    Use as a context manager; leaving it keeps the file for a restart, `remove` is for a staged shard.
    """

    def __init__(self, path: Path, descriptor: int, header: bytes) -> None:
        self.path, self._descriptor = path, descriptor
        self._lock, self._open, self.full = Lock(), True, False
        self.rollouts, self._end, self._digest = _read(descriptor, header)
        os.ftruncate(descriptor, self._end)
        if not self._end:
            for payload in _head_payloads(header):
                self._write([payload])

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, rows: RolloutRows) -> None:
        """Keep a finished rollout.

        A disk that takes no more is no failure of the batch: it is logged once, and what finishes from
        then on does not survive a kill. After `close` nothing is written.
        """
        payload = _pack(rows)
        with self._lock:
            if self._open and not self.full:
                self._write(payload)

    def close(self) -> None:
        """Give the file up; it stays for whoever runs the shard next."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the file: the shard is staged."""
        self.path.unlink(missing_ok=True)
        self.close()
        _remove_empty(self.path.parent)

    def _write(self, payload: Payload) -> None:
        try:
            self._end, self._digest = write_frame(self._descriptor, payload, end=self._end, before=self._digest)
        except OSError as error:
            self.full = True
            log.warning("%s: %s; rollouts that finish from now on are lost in a kill", self.path, error)


def spool_header(plan: Plan, shard: int) -> bytes:
    """What a spool is of: the batch, its config hash, its whole plan (times and cut included) and the shard."""
    facts = {"spool": FORMAT, "batch_id": plan.batch_id, "config_hash": plan.config_hash}
    return json.dumps({**facts, "plan": _plan_digest(plan), "shard": shard}).encode()


def spool_folder(root: Path, plan: Plan) -> Path:
    """Where the spools of one plan are, below the worker's folder `root`."""
    return root / plan.batch_id / _plan_digest(plan)[:16]


def open_spool(root: Path, plan: Plan, shard: int) -> Spool:
    """The shard's spool with all that earlier processes left of it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder, header = spool_folder(root, plan), spool_header(plan, shard)
    found = [(path, held) for path in _files(folder, shard) if (held := _hold(path, os.O_RDWR)) is not None]
    spools = [Spool(path, held, header) for path, held in found] or [_new_spool(folder, shard, header)]
    first, *others = spools
    known = {rows.index for rows in first.rollouts}
    for other in others:
        for rows in other.rollouts:
            if rows.index not in known:
                known.add(rows.index)
                first.append(rows)
                first.rollouts.append(rows)
        other.close() if first.full else other.remove()
    return first


def peek_spool(root: Path, plan: Plan, shard: int) -> list[RolloutRows]:
    """The finished rollouts in the shard's spools as they are now, by index; for lookers while a batch runs.

    Files are only read: nothing is locked, cut or made. A frame that is being written is not there yet.
    """
    header, found = spool_header(plan, shard), dict[int, RolloutRows]()
    for path in _files(spool_folder(root, plan), shard):
        with suppress(FileNotFoundError), path.open("rb") as file:
            rollouts, _, _ = _read(file.fileno(), header)
            found = {rows.index: rows for rows in rollouts} | found
    return [rows for _, rows in sorted(found.items())]


def remove_spools(root: Path, plan: Plan, shard: int) -> None:
    """Delete what nobody holds of a shard's spools: it is staged."""
    folder = spool_folder(root, plan)
    for path in _files(folder, shard):
        held = _hold(path, os.O_RDWR)
        if held is not None:
            path.unlink(missing_ok=True)
            os.close(held)
    _remove_empty(folder)


def remove_batch_spools(root: Path, plan: Plan) -> None:
    """Delete what nobody holds of all spools of a batch: it is published."""
    for cut in plan.shards:
        remove_spools(root, plan, cut.shard)


def _plan_digest(plan: Plan) -> str:
    return blake2b_256(plan.to_bytes()).hex()


def _files(folder: Path, shard: int) -> list[Path]:
    return sorted(folder.glob(f"{shard:04d}.*.spool"), key=lambda path: (len(path.name), path.name))


def _new_spool(folder: Path, shard: int, header: bytes) -> Spool:
    number = 1
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{shard:04d}.{number}.spool"
        held = _hold(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if held is not None:
            return Spool(path, held, header)
        # Another process has this one, or it removed the folder at this very moment.
        number += path.exists()


def _hold(path: Path, flags: int) -> int | None:
    """A descriptor of the file with its lock, null if another process has it or it is gone (or, with O_EXCL, there)."""
    try:
        descriptor = os.open(path, flags, 0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove_empty(folder: Path) -> None:
    """Remove a plan's folder, and its batch's, unless something is in it."""
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _head_payloads(header: bytes) -> list[bytes]:
    return [header, *(schema.serialize().to_pybytes() for schema in SCHEMAS)]


def _read(descriptor: int, header: bytes) -> tuple[list[RolloutRows], int, bytes]:
    """(rollouts, offset behind the last good frame, that frame's digest); ([], 0, b"") where it is not our file."""
    end, digest = 0, b""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        frames = read_frames(file)
        for wanted in _head_payloads(header):
            payload, end, digest = next(frames, (b"", 0, b""))
            if payload != wanted:
                return [], 0, b""
        records = list(frames)
    if records:
        _, end, digest = records[-1]
    return [_unpack(payload) for payload, _, _ in records], end, digest


def _pack(rows: RolloutRows) -> Payload:
    samples, trajectories = (memoryview(batch.serialize()) for batch in (rows.samples, rows.trajectories))
    return [len(samples).to_bytes(_LENGTH_BYTES, "little"), samples, trajectories]


def _unpack(payload: bytes) -> RolloutRows:
    middle = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    buffer = pa.py_buffer(payload)
    return RolloutRows(
        samples=pa.ipc.read_record_batch(buffer.slice(_LENGTH_BYTES, middle - _LENGTH_BYTES), SAMPLES_SCHEMA),
        trajectories=pa.ipc.read_record_batch(buffer.slice(middle), TRAJECTORIES_SCHEMA),
    )
