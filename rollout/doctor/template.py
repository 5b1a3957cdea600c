"""The prompt as the checkpoint's own chat template writes it, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.tito.arguments import read_arguments


def template_text(directory: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
    """The text of a prompt with the turn opened and thinking off; null where the checkpoint has no template.

    Raises:
        ValueError: the template refuses the messages, or is none.
    """
    source = _source(directory)
    if source is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # As Hugging Face renders them: blocks trimmed, JSON with its characters as they are.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    special = _special_tokens(directory)
    try:
        template = environment.from_string(source)
        given = {"tools": tools, "add_generation_prompt": True, "enable_thinking": False}
        return str(template.render(messages=[_read(message) for message in messages], **special, **given))
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot be rendered: {error}") from error


def _source(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _tokenizer_config(directory).get("chat_template")
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    try:
        value = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _special_tokens(directory: Path) -> dict[str, str]:
    config = _tokenizer_config(directory)
    pairs = ((name, config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token"))
    return {name: str(value["content"] if isinstance(value, dict) else value) for name, value in pairs if value}


def _read(message: dict[str, Any]) -> dict[str, Any]:
    """Templates want the arguments of calls as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    read = [
        {**call, "function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": read}


def _tojson(value: Any, indent: int | None = None, **ignored: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)
