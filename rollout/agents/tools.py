"""The two tools of the built-in agents: integer arithmetic and a look-up in the prompt's table.

Pure functions of their arguments, so a replayed rollout gets the same results. A failed call is
text that begins with `error: `, as tool servers give it; nothing here raises for bad arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_EXPRESSION = re.compile(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*")
_MAX_DIGITS = 3


def _spec(name: str, description: str, argument: str) -> dict[str, Any]:
    """OpenAI's form of a tool with one string argument; short, because every prompt carries it."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    _spec("calculator", "Integer arithmetic: a + b.", "expression"),
    _spec("lookup", "Read the table.", "key"),
]
"""Tool specifications as a prompt row carries them."""


def run_tool(name: str, arguments: str, table: Mapping[str, Any] | None = None) -> str:
    """The result of one tool call as text.

    Args:
        name: `calculator` or `lookup`.
        arguments: the call's arguments, a JSON object as the model wrote it.
        table: what `lookup` reads: the `table` of the prompt row's metadata.

    Returns:
        The result, or `error: <what was wrong>`.
    """
    argument = {"calculator": "expression", "lookup": "key"}.get(name)
    if argument is None:
        return f"error: no tool {name}"
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return "error: arguments are not JSON"
    value = values.get(argument) if isinstance(values, dict) else None
    if not isinstance(value, str):
        return f"error: {argument} must be a string"
    return _calculate(value) if name == "calculator" else _look_up(value, table or {})


def _calculate(expression: str) -> str:
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "error: write it as a + b"
    left, operator, right = match.groups()
    if max(len(left), len(right)) > _MAX_DIGITS:
        return "error: three digits at most"
    a, b = int(left), int(right)
    return str(a + b if operator == "+" else a - b if operator == "-" else a * b)


def _look_up(key: str, table: Mapping[str, Any]) -> str:
    if key in table:
        return str(table[key])
    near = [known for known in table if known.lower() in (key.lower(), key.lower().removesuffix("s"))]
    return f"error: no entry, try {near[0]}" if near else "error: no entry"
