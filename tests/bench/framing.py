"""HTTP's framing, as far as the session benchmark's two ends of a kept connection need it."""

from __future__ import annotations

_LENGTH = b"content-length:"


def message_size(data: bytearray) -> int:
    """Bytes of the message that `data` begins with, head and body; 0 while its head is not whole."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return 0
    lower = data[:head].lower()
    place = lower.find(_LENGTH)
    end = lower.find(b"\r", place)
    return head + 4 + (int(lower[place + len(_LENGTH) : end if end > 0 else head]) if place >= 0 else 0)
