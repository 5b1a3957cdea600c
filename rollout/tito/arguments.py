"""Arguments of a tool call: JSON text from OpenAI's clients, an object from some others."""

from __future__ import annotations

import json
from typing import Any


def read_arguments(arguments: Any) -> Any:
    """The object that JSON text spells; anything else, unreadable text included, as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
