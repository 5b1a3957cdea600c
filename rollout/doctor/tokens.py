"""A checkpoint's tokenizer against the renderer of its family: the ids that every prompt is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollout.agents.tools import TOOLS
from rollout.doctor.finding import Finding, fail, ok, warn
from rollout.doctor.template import template_text
from rollout.errors import BadCheckpoint, BadConfig
from rollout.tito.rendered import CannotRender
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import Tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "What is 2 + 3? Grüße, 数 🙂"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    {"role": "user", "content": "And 5 + 4?"},
]
"""A conversation with all that a prompt has: tools, a call, its result, letters of several bytes."""


class AskedTokenizer(Tokenizer):
    """A tokenizer that keeps which control strings a renderer asked it for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked: dict[str, int | None] = {}

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        for token in [tokens] if isinstance(tokens, str) else tokens:
            self.asked[token] = super().convert_tokens_to_ids(token)
        return super().convert_tokens_to_ids(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """MESSAGES as they would be sent: ids, and the text that those ids stand for."""

    tokenizer: Tokenizer
    vocabulary: int | None
    ids: list[int]
    text: str


def check_tokens(directory: Path, renderer: str) -> tuple[list[Finding], Prompt | None]:
    """The checkpoint's control strings, and one prompt's ids; null where no prompt can be made."""
    try:
        tokenizer = AskedTokenizer(directory)
    except BadCheckpoint as error:
        return [fail("tokenizer", str(error))], None
    try:
        tito = Tito(tokenizer, renderer)
    except BadConfig as error:
        return [_lacking(tokenizer, renderer, error)], None
    asked = {text: number for text, number in tokenizer.asked.items() if number is not None}
    split = [text for text, number in asked.items() if tokenizer.encode(text) != [number]]
    if split:
        which = ", ".join(f"{text} ({asked[text]}, read as {tokenizer.encode(text)})" for text in split)
        return [fail("special tokens", f"{which}: not one id each; declare them in added_tokens of {directory}")], None
    try:
        ids = tito.render(MESSAGES, tools=TOOLS, thinking=False).ids
    except CannotRender as error:
        return [fail("prompt ids", f"{error}; choose another --renderer")], None
    prompt = Prompt(tokenizer=tokenizer, vocabulary=tokenizer.model_vocabulary, ids=ids, text=tito.decode(ids))
    special = ok("special tokens", f"{len(asked)} that renderer {renderer} asks for have one id each")
    return [special, _check_ids(prompt, directory), _check_vocabulary(prompt, directory)], prompt


def _lacking(tokenizer: AskedTokenizer, renderer: str, error: BadConfig) -> Finding:
    missing = [text for text, number in tokenizer.asked.items() if number is None]
    if not missing:
        return fail("renderer", f"{error}; choose another --renderer")
    return fail(
        "special tokens",
        f"renderer {renderer} needs {', '.join(missing)}, and {tokenizer.name_or_path}/tokenizer.json has no such "
        "token: choose the --renderer of this checkpoint's family, or another --model",
    )


def _check_ids(prompt: Prompt, directory: Path) -> Finding:
    """The renderer's ids against what the tokenizer makes of the same text, and of the chat template's."""
    own = prompt.tokenizer.encode(prompt.text)
    if own != prompt.ids:
        where = _difference(prompt, own)
        return fail(
            "prompt ids", f"the tokenizer reads the rendered prompt otherwise: {where}; choose another --renderer"
        )
    try:
        text = template_text(directory, MESSAGES, TOOLS)
    except ValueError as error:
        return warn("prompt ids", f"{len(own)} ids as the tokenizer reads them; {error}")
    if text is None:
        return ok("prompt ids", f"{len(own)} ids as the tokenizer reads them; the checkpoint has no chat template")
    own = prompt.tokenizer.encode(text)
    if own != prompt.ids:
        where = _difference(prompt, own)
        return warn(
            "prompt ids", f"the checkpoint's chat template writes another prompt: {where}; is it the --renderer?"
        )
    return ok("prompt ids", f"{len(own)} ids as the tokenizer reads them and as the chat template writes them")


def _difference(prompt: Prompt, own: list[int]) -> str:
    pairs = enumerate(zip_longest(prompt.ids, own))
    place, (first, second) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    names = [repr(prompt.tokenizer.decode([one])) if one is not None else "the end" for one in (first, second)]
    return f"id {place} of {len(prompt.ids)} is {first} ({names[0]}) here and {second} ({names[1]}) there"


def _check_vocabulary(prompt: Prompt, directory: Path) -> Finding:
    size, model = prompt.tokenizer.size, prompt.vocabulary
    if model is None:
        return warn("vocabulary", f"{directory}/config.json has no vocab_size to hold {size} ids against")
    if size > model:
        return fail(
            "vocabulary",
            f"the tokenizer has ids up to {size - 1}, the model of {directory} knows {model}: an id beyond ends some "
            "engines; give the --model that this tokenizer.json belongs to",
        )
    return ok("vocabulary", f"{size} ids of the tokenizer within the model's {model}")
