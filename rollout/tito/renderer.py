"""Messages to token ids and back, for one model family: the only place that calls `renderers`.

Sampled history is never re-tokenised: a next turn is what the family's bridge puts behind the last
turn's own ids, or, where the bridge refuses, what a full render has behind the kept turn's close token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import orjson
from renderers.base import RenderedTokens, Renderer

from rollout.errors import BadCheckpoint, BadConfig
from rollout.tito.control import ControlText
from rollout.tito.families import ENCODES_ITSELF, build_renderer, check_family, template_fields, thinking_field
from rollout.tito.parsing import ParsedMessage, parse
from rollout.tito.prepared import prepared
from rollout.tito.rendered import CannotRender, Rendered, end_of, open_length_of
from rollout.tito.tokenizer import Tokenizer

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

KNOWN_ROLES = ("assistant", "developer", "system", "tool", "user")
_PROBE = "role probe"
_RENDER_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Tito:
    """Tokenizer and renderer of one model family. Pure: the same arguments always give the same ids."""

    def __init__(self, tokenizer: Tokenizer, renderer: str = "qwen3") -> None:
        """Check the family's name by building its renderer once.

        Raises:
            BadConfig: `renderers` has no such family, or the tokenizer lacks its control tokens.
        """
        check_family(renderer)
        self.tokenizer = tokenizer
        self.name = renderer
        self.vocabulary = tokenizer.model_vocabulary or tokenizer.size
        self.control = ControlText(tokenizer)
        try:
            self.template_fields = template_fields(renderer)
            self.thinking_field = thinking_field(self.template_fields)
            self._renderer_of = lru_cache(maxsize=16)(self._build)
            ends = self._renderer_of(b"{}", False).get_stop_token_ids()
            # An engine is asked to stop at them, and an id that its model does not have may end it.
            self.stop_token_ids: list[int] = sorted(number for number in ends if number < self.vocabulary)
        except Exception as error:
            raise BadConfig(f"renderer {renderer!r} cannot be used with {tokenizer.name_or_path}: {error}") from error
        self._drops = lru_cache(maxsize=64)(self._probe)
        self._hoists = lru_cache(maxsize=64)(self._probe_behind)

    def _build(self, template: bytes, marked: bool) -> Renderer:
        return build_renderer(self.name, self.tokenizer.marked if marked else self.tokenizer, orjson.loads(template))

    def _renderer(self, thinking: bool, template: Mapping[str, Any] | None, marked: bool = False) -> Renderer:
        fields = orjson.dumps(self.fields(thinking, template), option=orjson.OPT_SORT_KEYS)
        try:
            return self._renderer_of(fields, marked)
        except _RENDER_ERRORS as error:
            raise CannotRender(f"chat_template_kwargs: {_first_line(error)}") from error

    def fields(self, thinking: bool, template: Mapping[str, Any] | None) -> dict[str, Any]:
        """chat_template_kwargs of a request, its thinking among them."""
        fields = dict(template or {})
        if self.thinking_field is not None:
            fields.setdefault(self.thinking_field, thinking)
        return fields

    def check_plain(self) -> None:
        """Refuse a tokenizer or family in which control strings cannot be kept as plain text.

        Raises:
            BadConfig: says why.
        """
        if self.name in ENCODES_ITSELF:
            raise BadConfig(f"the {self.name} renderer has a tokenizer of its own: no control string can be plain text")
        try:
            _ = self.tokenizer.plain
        except BadCheckpoint as error:
            raise BadConfig(str(error)) from error

    def drops_role(self, role: str, *, thinking: bool = False) -> bool:
        """Whether the renderer leaves messages of this role out of the prompt without a word."""
        return bool(self._drops(role, thinking)) if role not in ("assistant", "user") else False

    @cached_property
    def assistant_start(self) -> str:
        """How the family opens an assistant's turn: text that any such turn begins with."""
        opened = self.render([{"role": "user", "content": _PROBE}], tools=None, thinking=False)
        start = self.decode(opened.ids[len(opened.ids) - opened.open_length :])
        return re.split("</?think>", start, maxsplit=1)[0]

    def appends_role(self, role: str, *, thinking: bool = False) -> bool:
        """Whether a message of this role that comes behind a kept turn is rendered behind it, too.

        Some templates gather all system messages at the front: there a kept turn stands before them.
        """
        return not self.drops_role(role, thinking=thinking) and not self._hoists(role, thinking)

    def roles(self, *, appended: bool = False, thinking: bool = False) -> list[str]:
        """Roles that the renderer knows, or those that it renders behind a kept turn, sorted."""
        if appended:
            return [role for role in KNOWN_ROLES if self.appends_role(role, thinking=thinking)]
        return [role for role in KNOWN_ROLES if not self.drops_role(role, thinking=thinking)]

    def _probe(self, role: str, thinking: bool) -> bool:
        renderer = self._renderer(thinking, None)
        message: Message = {"role": role, "content": _PROBE}
        try:
            rendered = renderer.render([{"role": "user", "content": "x"}, message], add_generation_prompt=True)
        except _RENDER_ERRORS:
            return False  # it speaks up: the real request gets its words
        return _PROBE not in self.decode(rendered.token_ids)

    def _probe_behind(self, role: str, thinking: bool) -> bool:
        turn: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "kept turn"}]
        message: Message = {"role": role, "content": _PROBE}
        try:
            rendered = self._renderer(thinking, None).render([*turn, message, turn[0]], add_generation_prompt=True)
        except _RENDER_ERRORS:
            return False
        text = self.decode(rendered.token_ids)
        return text.find(_PROBE) < text.find("kept turn")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools,
        thinking: bool,
        template: Mapping[str, Any] | None = None,
        marked: bool = False,
    ) -> Rendered:
        """A whole prompt, generation prompt on.

        Args:
            marked: the messages come from `control.mark`: marked control strings are plain text.

        Raises:
            CannotRender: in the renderer's words.
        """
        rendered = self._render(self._renderer(thinking, template, marked), messages, tools)
        return Rendered(ids=rendered.token_ids, open_length=open_length_of(rendered))

    def _render(self, renderer: Renderer, messages: Sequence[Message], tools: Tools) -> RenderedTokens:
        try:
            return renderer.render(prepared(messages), tools=cast(Any, tools), add_generation_prompt=True)
        except _RENDER_ERRORS as error:
            raise CannotRender(f"messages: the {self.name} renderer refuses them: {_first_line(error)}") from error

    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Tools,
        thinking: bool,
        history: Sequence[Message],
        template: Mapping[str, Any] | None = None,
        cut: bool = False,
        marked: bool = False,
    ) -> Rendered | None:
        """What the next turn appends behind `prompt_ids` and `output_ids`, all of which are kept.

        Args:
            prompt_ids: the last turn's prompt from its turn-open token on; more does no harm.
            output_ids: all ids sampled in that turn.
            history: the messages before `new_messages`, that turn's answer last; read only where
                the bridge refuses.
            cut: that turn ended by length. It is not closed then: nothing stands between its last id
                and the next turn-open token (as in the reference's recorded conversations), unless
                that last id is a turn's end itself.
            marked: as for `render`, of history and new messages alike.

        Returns:
            The appended ids; None where the kept turn cannot be found in a full render.

        Raises:
            CannotRender: in the renderer's words.
        """
        renderer = self._renderer(thinking, template, marked)
        cut = cut and not (output_ids and output_ids[-1] in self.stop_token_ids)
        refusal: str | None = "cut_turn"
        if not cut:
            ids, refusal, bridged = self._bridge(renderer, prompt_ids, output_ids, new_messages, tools)
            if bridged is not None:
                return Rendered(ids=ids, open_length=open_length_of(bridged))
        whole = self._render(renderer, [*history, *new_messages], tools)
        found = end_of(whole, len(history) - 1, self.stop_token_ids)
        if found is None:
            return None
        close, end = found
        between = [] if cut else self._between(renderer, prompt_ids, output_ids, whole.token_ids[close:end])
        return Rendered(ids=[*between, *whole.token_ids[end:]], open_length=open_length_of(whole), refusal=refusal)

    def _bridge(
        self,
        renderer: Renderer,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools,
    ) -> tuple[list[int], str | None, RenderedTokens | None]:
        """Appended ids and the bridge's own result; or the reason why it does not count."""
        if not new_messages:
            return [], "nothing_appended", None
        if any(message.get("role") == "assistant" for message in new_messages):
            return [], "assistant_appended", None
        kept = [*prompt_ids, *output_ids]
        try:
            bridged = renderer.bridge_to_next_turn(
                list(prompt_ids), list(output_ids), prepared(new_messages), tools=cast(Any, tools)
            )
        except _RENDER_ERRORS as error:
            raise CannotRender(f"messages: the {self.name} renderer refuses them: {_first_line(error)}") from error
        if bridged is None:
            return [], "bridge_refused", None
        if bridged.token_ids[: len(kept)] != kept:
            return [], "sampled_ids_dropped", None
        return bridged.token_ids[len(kept) :], None, bridged

    def _between(
        self, renderer: Renderer, prompt_ids: Sequence[int], output_ids: Sequence[int], rendered_end: list[int]
    ) -> list[int]:
        """Ids between a kept turn and the next turn-open token.

        Args:
            rendered_end: how the full render ends the kept message: its close token and what follows.
        """
        close, behind = rendered_end[0], rendered_end[1:]
        if output_ids and output_ids[-1] == close:
            return behind
        if output_ids and output_ids[-1] in self.stop_token_ids:
            return []  # another end than the template's own: nothing is put behind it
        return [*self._closing(renderer, prompt_ids, output_ids, close), *behind]

    def _closing(
        self, renderer: Renderer, prompt_ids: Sequence[int], output_ids: Sequence[int], close: int
    ) -> list[int]:
        """Ids with which the bridge would end a turn that did not sample its end.

        Asked of the bridge with a message of our own, from whose ids those behind a turn that closed
        itself are taken off.
        """
        probe: list[Message] = [{"role": "user", "content": _PROBE}]
        ids, _, _ = self._bridge(renderer, prompt_ids, output_ids, probe, None)
        clean, _, _ = self._bridge(renderer, prompt_ids, [close], probe, None)
        if clean and ids[len(ids) - len(clean) :] == clean:
            return ids[: len(ids) - len(clean)]
        return [close]

    def parse(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        tools: Tools,
        stopped: bool,
        matched: str | int | None = None,
        thinking: bool = False,
        template: Mapping[str, Any] | None = None,
    ) -> ParsedMessage:
        """The assistant message in a turn's sampled ids; rules in rollout.tito.parsing.

        Args:
            prompt_ids: the turn's prompt, or its generation prompt alone.
            stopped: the turn ended by stop, not by length or abort.
            matched: what stopped it: a stop string, a token id, or None.
        """
        return parse(
            self._renderer(thinking, template),
            self.tokenizer,
            list(prompt_ids),
            list(output_ids),
            tools=tools,
            stopped=stopped,
            matched=matched,
            stop_token_ids=self.stop_token_ids,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens shown; U+FFFD for bytes that are no UTF-8."""
        return self.tokenizer.decode(ids)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
