"""From a checked request and the generation that it extends to prompt ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import SessionRefused
from rollout.session.node import Message, Node, history_of, path_to
from rollout.session.request import ChatRequest, check_text, order_tool_results
from rollout.session.settings import SessionSettings
from rollout.tito.rendered import CannotRender, Rendered
from rollout.tito.renderer import Tito

_ROLE_SUFFIX = "; the selected TITO fixed template does not support appending this role"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What is rendered behind `parent`; `control_text` counts control strings that became control ids."""

    parent: Node | None
    appended: list[Message]
    rendered: Rendered
    control_text: int
    unknown_results: int

    @property
    def n_tokens(self) -> int:
        """Ids of the whole prompt, the parent's among them."""
        return (self.parent.n_tokens if self.parent else 0) + len(self.rendered.ids)


def make_prompt(request: ChatRequest, parent: Node | None, tito: Tito, settings: SessionSettings) -> Prompt:
    """Render what `request` appends to `parent`; a root is rendered whole.

    Where v2 cannot find the kept turn in a full render, the request opens a new root.

    Raises:
        SessionRefused: 409 behind a truncated generation (v2); 400 for a role that the renderer does
            not know, refused control text, lone surrogates, or whatever the renderer refuses.
    """
    appended = _appended(request, parent, tito, settings)
    control_text = _control_text(appended, tito, settings)
    ordered, unknown = order_tool_results(parent.reply if parent else None, appended)
    try:
        rendered = _render(request, parent, ordered, tito, settings)
    except CannotRender as error:
        raise SessionRefused(400, str(error)) from error
    if rendered is None:
        return _without_parent(request, tito, settings)
    if rendered.ids and max(rendered.ids) >= tito.vocabulary:
        raise SessionRefused(400, f"messages: a token id is outside the model's vocabulary of {tito.vocabulary}")
    return Prompt(
        parent=parent,
        appended=appended,
        rendered=rendered,
        control_text=control_text,
        unknown_results=unknown,
    )


def _appended(request: ChatRequest, parent: Node | None, tito: Tito, settings: SessionSettings) -> list[Message]:
    """The messages behind `parent`; they and the tools are checked for all that needs no rendering."""
    if parent is not None and parent.truncated and settings.version == "v2":
        raise SessionRefused(
            409,
            f"truncated generation cannot be extended: node {parent.seq} was cut at max_new_tokens; "
            "branch before the cut instead",
        )
    start = parent.n_messages if parent else 0
    appended = request.messages[start:]
    _check_roles(appended, start, tito, settings, request.thinking)
    check_text(appended, "messages")
    if request.given_tools is not None and (parent is None or parent.tools != request.given_tools):
        check_text(request.given_tools, "tools")
    return appended


def _control_text(appended: Sequence[Message], tito: Tito, settings: SessionSettings) -> int:
    """How many of the client's control strings become control ids."""
    try:
        found = tito.control.count(appended)
    except ValueError as error:
        raise SessionRefused(400, f"messages: {error}") from error
    if found and settings.control_text == "refuse":
        raise SessionRefused(400, "messages: control strings of the chat template are refused in this session")
    return found if settings.control_text == "reference" else 0


def _without_parent(request: ChatRequest, tito: Tito, settings: SessionSettings) -> Prompt:
    if settings.version == "v1":
        raise SessionRefused(
            400, "messages: the kept turn cannot be found in a full render, so nothing can be appended"
        )
    return make_prompt(request, None, tito, settings)


def _render(
    request: ChatRequest, parent: Node | None, appended: Sequence[Message], tito: Tito, settings: SessionSettings
) -> Rendered | None:
    plain = settings.control_text == "plain"
    try:
        new = tito.control.mark(appended) if plain else appended
        if parent is None:
            return tito.render(
                new, tools=request.tools, thinking=request.thinking, template=request.template, marked=plain
            )
        return tito.extend(
            parent.open_ids,
            parent.generation.output_ids_O.tolist(),
            new,
            tools=request.tools,
            thinking=request.thinking,
            template=request.template,
            history=_LazyHistory(parent, tito if plain else None),
            cut=parent.truncated,
            marked=plain,
        )
    except ValueError as error:
        raise CannotRender(str(error)) from error


class _LazyHistory(Sequence[Message]):
    """The stored messages up to a node, put together only if the bridge refuses."""

    def __init__(self, node: Node, marked_by: Tito | None) -> None:
        self._node = node
        self._marked_by = marked_by
        self._messages: list[Message] | None = None

    def _all(self) -> list[Message]:
        if self._messages is None:
            self._messages = history_of(path_to(self._node))
            if self._marked_by is not None:
                self._messages = self._marked_by.control.mark(self._messages)
        return self._messages

    def __len__(self) -> int:
        return self._node.n_messages

    def __getitem__(self, place: Any) -> Any:
        return self._all()[place]


def _check_roles(
    appended: Sequence[Message], start: int, tito: Tito, settings: SessionSettings, thinking: bool
) -> None:
    for place, message in enumerate(appended, start):
        role = message["role"]
        dropped = tito.drops_role(role, thinking=thinking)
        if not dropped and not (start and not tito.appends_role(role, thinking=thinking)):
            continue
        roles = tito.roles(appended=bool(start), thinking=thinking)
        if settings.version == "v1":
            allowed = "{" + ", ".join(map(repr, roles)) + "}"
            raise SessionRefused(
                400, f"appended message at index {place} has role={role!r}, allowed={allowed}{_ROLE_SUFFIX}"
            )
        raise SessionRefused(400, f"appended message role={role!r} not allowed (allowed={roles}){_ROLE_SUFFIX}")
