"""The chat formats of `renderers`, by name: which there are, and one of them built for a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast, get_args

from renderers.base import Renderer, create_renderer, template_field_names
from renderers.configs import BaseRendererConfig, RendererConfig, config_from_name

from rollout.errors import BadConfig

OPAQUE = frozenset({"auto", "custom", "default"})
"""Names that stand for no format: one is guessed, two are someone else's template."""

ENCODES_ITSELF = frozenset({"gpt-oss"})
"""Formats whose renderer has a tokenizer of its own: marked control strings would reach the model marked."""

_THINKING_FIELDS = ("enable_thinking", "thinking")


@lru_cache(maxsize=1)
def family_names() -> tuple[str, ...]:
    """Names that `--renderer` takes, sorted."""
    configs = get_args(get_args(RendererConfig)[0])
    return tuple(sorted({str(config.model_fields["name"].default) for config in configs} - OPAQUE))


def check_family(name: str) -> None:
    """Refuse a name that stands for no format.

    Raises:
        BadConfig: with the names that there are.
    """
    if name not in family_names():
        raise BadConfig(f"renderer {name!r}: there is none of that name; one of {', '.join(family_names())}")


def template_fields(name: str) -> frozenset[str]:
    """chat_template_kwargs that a family has."""
    return frozenset(template_field_names(_config(name)))


def thinking_field(fields: frozenset[str]) -> str | None:
    """The template field that opens a turn for thinking, null where the family has no such switch."""
    return next((field for field in _THINKING_FIELDS if field in fields), None)


def build_renderer(name: str, tokenizer: Any, fields: Mapping[str, Any]) -> Renderer:
    """A family's renderer that keeps the reasoning of older turns in its bridge.

    Raises:
        ValueError, TypeError: a field's value is none that the template has.
        Exception: whatever the renderer finds wrong with the tokenizer.
    """
    config = type(_config(name))(thinking_retention="all")
    # The wrapper class is untyped upstream.
    return cast(Renderer, create_renderer(tokenizer, config, chat_template_kwargs=fields))


def _config(name: str) -> BaseRendererConfig:
    config = config_from_name(name)
    assert config is not None  # only "auto" has none
    return config
