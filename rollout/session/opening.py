"""From the body of POST /sessions to a session's settings, and whether these can be had."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rollout.errors import BadConfig, SessionRefused
from rollout.session.finishing import find_finisher
from rollout.session.picking import find_picker
from rollout.session.request import check_text
from rollout.session.settings import SessionSettings
from rollout.tito.control import CONTROL_TEXT_SETTINGS
from rollout.tito.renderer import Tito

NOT_ROUTED = "routed_experts: the tokenizer's config.json is not that of a mixture of experts"


def read_settings(body: Any, defaults: SessionSettings) -> SessionSettings:
    """Settings as given, the server's where they are not; null is not given.

    Raises:
        SessionRefused: 400 that names the setting: unknown, of the wrong kind or out of bounds.
    """
    if not isinstance(body, dict):
        raise SessionRefused(400, "body: want a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    known = {field.name for field in fields(SessionSettings)}
    for name, value in given.items():
        if name not in known:
            raise SessionRefused(400, f"{name}: no setting of a session; one of {', '.join(sorted(known))}")
        _check(name, value)
        check_text(value, name)
    if given.get("renderer", defaults.renderer) != defaults.renderer:
        raise SessionRefused(400, f"renderer: this server renders {defaults.renderer}")
    return replace(defaults, **given)


def check_settings(settings: SessionSettings, tito: Tito) -> None:
    """Check what a body's kinds do not say: that the parts are installed, and what `tito` can do.

    Raises:
        UnknownPart: a picker or finisher that there is not.
        SessionRefused: 400 that names the setting.
    """
    find_picker(settings.picker)
    find_finisher(settings.finisher)
    if settings.version not in ("v1", "v2"):
        raise SessionRefused(400, f"version: {settings.version!r} is not v1 or v2")
    if settings.control_text not in CONTROL_TEXT_SETTINGS:
        raise SessionRefused(400, f"control_text: want one of {', '.join(CONTROL_TEXT_SETTINGS)}")
    if settings.control_text == "plain":
        try:
            tito.check_plain()
        except BadConfig as error:
            raise SessionRefused(400, f"control_text: {error}") from error


def _check(name: str, value: Any) -> None:
    if name in ("sampling", "metadata"):
        good, want = isinstance(value, dict), "an object"
    elif name in ("max_seq_len", "max_turns"):
        good, want = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "a positive integer"
    elif name in ("enable_thinking", "routed_experts"):
        good, want = isinstance(value, bool), "true or false"
    else:
        good, want = isinstance(value, str), "a text"
    if not good:
        raise SessionRefused(400, f"{name}: want {want}")
