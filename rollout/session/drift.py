"""What the drift comparator says of a session's root paths: once per path, and never an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rollout.session.node import Message, Node, tokens_of
from rollout.session.request import order_tool_results, read_template
from rollout.session.settings import SessionSettings
from rollout.tito.drift import find_drift
from rollout.tito.renderer import Tito

log = logging.getLogger(__name__)


class PathDrift:
    """Compares paths of one session. A path never changes, so each is compared once, by its last node."""

    def __init__(self, tito: Tito, settings: SessionSettings) -> None:
        self._tito = tito
        self._settings = settings
        self._known: dict[int, list[dict[str, Any]] | None] = {}

    def of(self, path: Sequence[Node]) -> list[dict[str, Any]] | None:
        """Differences of a root path as JSON objects; null without tokens, or where they cannot be found."""
        if not path:
            return None
        leaf = path[-1].seq
        if leaf not in self._known:
            try:
                self._known[leaf] = self._compare(path)
            except Exception:
                log.warning("the drift of generation %d cannot be computed", leaf, exc_info=True)
                self._known[leaf] = None
        return self._known[leaf]

    def _compare(self, path: Sequence[Node]) -> list[dict[str, Any]]:
        last, body = path[-1], path[-1].settings["body"]
        given = body.get("chat_template_kwargs")
        thinking, template = read_template(given, self._settings.enable_thinking, self._tito.template_fields)
        messages, generated = _rendered(path)
        marked = self._settings.control_text == "plain"
        entries = find_drift(
            self._tito,
            self._tito.control.mark(messages) if marked else messages,
            tokens_of(list(path)),
            generated=generated,
            tools=None if body.get("tool_choice") == "none" else last.tools,
            thinking=thinking,
            template=template,
            marked=marked,
            cut=last.generation.finish != "stop",
        )
        return [entry.to_json() for entry in entries]


def _rendered(path: Sequence[Node]) -> tuple[list[Message], list[int]]:
    """Stored messages as prompts had them, tool results in their calls' order; and the replies' places."""
    messages: list[Message] = []
    replies = []
    for node in path:
        ordered, _ = order_tool_results(node.parent.reply if node.parent else None, node.appended)
        messages += ordered
        replies.append(len(messages))
        messages.append(node.reply)
    return messages, replies
