"""Append-only files of frames: whatever tears the end off one, all that stands before it can still be read.

    file    = frame...
    frame   = length of the payload (8 bytes, little-endian), digest (32 bytes), payload
    digest  = blake2b-256 over the digest of the frame before (nothing for the first), the length's bytes, the payload

Digests are chained, so a frame of another place or file is wrong here too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

_LENGTH_BYTES = 8
_DIGEST_BYTES = 32

Payload = Sequence[bytes | memoryview]
"""A frame's payload in pieces."""


def read_frames(file: BinaryIO) -> Iterator[tuple[bytes, int, bytes]]:
    """Each good frame's payload, the offset behind it and its digest, up to the first that is torn or wrong.

    Args:
        file: positioned at its begin.
    """
    size, end, digest = os.fstat(file.fileno()).st_size, 0, b""
    while True:
        head, wanted = file.read(_LENGTH_BYTES), file.read(_DIGEST_BYTES)
        length = int.from_bytes(head, "little")
        end += _LENGTH_BYTES + _DIGEST_BYTES + length
        if end > size:
            return
        payload = file.read(length)
        digest = _digest(digest, [head, payload])
        if digest != wanted:
            return
        yield payload, end, digest


def write_frame(descriptor: int, payload: Payload, *, end: int, before: bytes) -> tuple[int, bytes]:
    """Write a frame whose payload is all of `payload` at the offset `end`, without making one piece of it.

    Args:
        before: digest of the frame that ends there, empty for the first.

    Returns:
        The offset behind the frame, and its digest.

    Raises:
        OSError: the disk does not take it; what was written of it is a torn end.
    """
    head = sum(map(len, payload)).to_bytes(_LENGTH_BYTES, "little")
    digest = _digest(before, [head, *payload])
    for piece in (head, digest, *payload):
        end = _write_at(descriptor, piece, end)
    return end, digest


def _digest(before: bytes, frame: Payload) -> bytes:
    digest = hashlib.blake2b(before, digest_size=_DIGEST_BYTES)
    for piece in frame:
        digest.update(piece)
    return digest.digest()


def _write_at(descriptor: int, piece: bytes | memoryview, offset: int) -> int:
    left = memoryview(piece)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
    return offset
