"""The text of a message, however its content is spelt. Light, since commands that answer at once import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def content_text(message: Mapping[str, Any]) -> str:
    """A message's content as one text: a list of text parts equals the joined text, null the empty one."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content) if content else ""
