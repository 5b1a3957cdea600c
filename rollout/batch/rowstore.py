"""Byte strings by number, packed: what a million prompt rows are kept in while a batch runs."""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from bisect import bisect_right
from typing import IO

import pyarrow as pa

from rollout.errors import BadPrompts

BLOCK_BYTES = 256 * 1024
"""Bytes of rows that are compressed as one; what a look-up unpacks."""

MEMORY_BYTES = 64 * 1024 * 1024
"""Packed bytes that are kept in memory; further blocks go to a nameless temporary file."""


class RowStore:
    """Append rows one after another, `close` once, then read any of them by position, from any thread.

    A row costs 4 bytes and its packed text; the text of a large store is on disk (TMPDIR) and gone with the
    process or with this object.
    """

    def __init__(self, *, block_bytes: int = BLOCK_BYTES, memory_bytes: int = MEMORY_BYTES) -> None:
        self._block_bytes, self._memory_bytes = block_bytes, memory_bytes
        self._starts = array("I")  # of each row in its unpacked block
        self._first = array("q")  # row of each block
        self._sizes = array("q")  # of each block, unpacked
        self._packed: list[bytes] = []
        self._places: list[tuple[int, int]] = []  # offset and size in the file, of blocks behind those in memory
        self._file: IO[bytes] | None = None
        self._open = bytearray()
        self._open_first = self._used = 0
        self._unpacked: tuple[int, bytes] = (-1, b"")
        self._codec = pa.Codec("zstd", compression_level=1)

    def __len__(self) -> int:
        return len(self._starts)

    def append(self, row: bytes) -> None:
        """Add a row.

        Raises:
            BadPrompts: the temporary file cannot be written.
        """
        self._starts.append(len(self._open))
        self._open += row
        if len(self._open) >= self._block_bytes:
            self.close()

    def close(self) -> None:
        """Pack what is not packed yet; errors as `append`."""
        if self._open_first == len(self._starts):
            return
        self._first.append(self._open_first)
        self._sizes.append(len(self._open))
        self._keep(self._codec.compress(bytes(self._open), asbytes=True))
        self._open_first, self._open = len(self._starts), bytearray()

    def __getitem__(self, position: int) -> bytes:
        if not 0 <= position < self._open_first:
            raise IndexError(position)
        block = bisect_right(self._first, position) - 1
        data = self._block(block)
        behind = position + 1
        end = self._first[block + 1] if block + 1 < len(self._first) else self._open_first
        return data[self._starts[position] : self._starts[behind] if behind < end else len(data)]

    def _keep(self, packed: bytes) -> None:
        if self._file is None and self._used + len(packed) <= self._memory_bytes:
            self._packed.append(packed)
            self._used += len(packed)
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed with this object)
                weakref.finalize(self, self._file.close)
                self._used = 0
            os.pwrite(self._file.fileno(), packed, self._used)
        except OSError as error:
            raise BadPrompts(
                f"prompt rows cannot be kept in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR"
            ) from error
        self._places.append((self._used, len(packed)))
        self._used += len(packed)

    def _block(self, block: int) -> bytes:
        known, data = self._unpacked  # one tuple, so that threads never see half of it
        if known != block:
            data = self._codec.decompress(self._read(block), self._sizes[block], asbytes=True)
            self._unpacked = (block, data)
        return data

    def _read(self, block: int) -> bytes:
        if block < len(self._packed):
            return self._packed[block]
        assert self._file is not None
        offset, size = self._places[block - len(self._packed)]
        return os.pread(self._file.fileno(), size, offset)
