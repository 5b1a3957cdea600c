"""How a conversation's accumulated ids differ from what its family's template writes: the drift comparator.

Expected is a full render of the stored messages without a generation prompt, in which each turn that
was generated here stands as the template writes it when it is the last one: what templates drop from
older turns (reasoning, an empty think block) is kept in every session, so it is no drift. Actual are
the accumulated ids. Both are split at special tokens, each a segment of its own; think tags are content.

Content is compared as text, so the expected side is never tokenised: `Spelling` stands in for the
tokenizer and keeps each text as one made-up id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from renderers.base import RenderedTokens

from rollout.tito.families import build_renderer
from rollout.tito.prepared import prepared
from rollout.tito.tokenizer import PLAIN_MARK, Tokenizer

if TYPE_CHECKING:
    from rollout.tito.renderer import Tito

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
DriftType = Literal["special_token_count", "special_token_type", "assistant_text", "non_assistant_text"]
DRIFT_TYPES: tuple[DriftType, ...] = (
    "special_token_count",
    "special_token_type",
    "assistant_text",
    "non_assistant_text",
)
_THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftEntry:
    """One difference. `segment_index` is -1 where the segments cannot be paired."""

    type: DriftType
    segment_index: int
    expected_text: str
    actual_text: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Segment(NamedTuple):
    """One special token, or the text between two of them (`special` is None then)."""

    special: int | None
    text: str


class Spelling:
    """Encodes for a renderer without tokenising: special tokens to their ids, a text to one negative id."""

    def __init__(self, tokenizer: Tokenizer, *, marked: bool) -> None:
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id
        self.special = {text: tokenizer.control_ids[text] for text in tokenizer.special if text not in _THINK_TAGS}
        self.special_ids = np.array(sorted(self.special.values()), np.int64)
        self._spellings = {number: text for text, number in self.special.items()}
        by_length = sorted(self.special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")").split if by_length else _whole
        self._tokenizer = tokenizer
        self._marked = marked
        self._pieces: list[str] = []

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids = []
        for place, piece in enumerate(self._split(text)):
            if place % 2:
                ids.append(self.special[piece])
            elif piece:
                self._pieces.append(
                    self._tokenizer.as_decoded(piece.replace(PLAIN_MARK, "") if self._marked else piece)
                )
                ids.append(-len(self._pieces))
        return ids

    def decode(self, token_ids: int | Sequence[int], *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(self._pieces[-number - 1] if number < 0 else self._tokenizer.decode([number]) for number in ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        return self._tokenizer.convert_tokens_to_ids(tokens)

    def segments(self, ids: NDArray[np.int64]) -> list[Segment]:
        """Split real ids, made-up ones, or both, at special tokens."""
        places = np.flatnonzero(np.isin(ids, self.special_ids)).tolist()
        found: list[Segment] = []
        for before, place in pairwise([-1, *places, len(ids)]):
            text = self._text(ids[before + 1 : place])
            if text:
                found.append(Segment(None, text))
            if place < len(ids):
                number = int(ids[place])
                found.append(Segment(number, self._spellings[number]))
        return found

    def _text(self, ids: NDArray[np.int64]) -> str:
        if len(ids) and (ids < 0).any():
            return self.decode(ids.tolist())
        return self._tokenizer.decode(ids.tolist()) if len(ids) else ""


def _whole(text: str) -> list[str]:
    return [text]


def find_drift(
    tito: Tito,
    messages: Sequence[Message],
    actual_ids: NDArray[np.int32],
    *,
    generated: Iterable[int],
    tools: Tools,
    thinking: bool,
    template: Mapping[str, Any] | None,
    marked: bool,
    cut: bool,
) -> list[DriftEntry]:
    """Compare a conversation's accumulated ids with what its template writes; empty where they agree.

    Args:
        messages: as stored, the last answer included; from `control.mark` if `marked`.
        generated: places of the messages that were sampled here.
        tools, thinking, template: those of the last request.
        cut: the last turn did not end by itself, so neither side's turn end counts.

    Raises:
        Exception: the renderer refuses the messages, or does not say whose each id is.
    """
    spelling = Spelling(tito.tokenizer, marked=marked)
    renderer = build_renderer(tito.name, spelling, tito.fields(thinking, template))
    render = partial(renderer.render, tools=cast(Any, tools))
    stops = frozenset(tito.stop_token_ids)
    expected, behind = expected_ids(render, renderer.render, prepared(messages), generated, stops)
    trailing = spelling.decode(behind.tolist())
    sides = (spelling.segments(ids.astype(np.int64)) for ids in (expected, actual_ids))
    want, got = (strip_tail(side, trailing, stops if cut else frozenset()) for side in sides)
    return compare(want, got, tito.assistant_start)


def expected_ids(
    render: Callable[[list[Any]], RenderedTokens],
    render_alone: Callable[[list[Any]], RenderedTokens],
    messages: list[Any],
    generated: Iterable[int],
    stops: frozenset[int],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids that the template has for a conversation, and those of them that stand behind its last turn's end.

    Args:
        render: a full render without generation prompt.
        render_alone: the same, without tools.
        generated: places of the messages that were sampled here.
    """
    whole = render(messages)
    ends = _turns(whole, stops)
    ids = np.array(whole.token_ids, np.int64)
    parts, done = [], 0
    for place in generated:
        if place not in ends or place == len(messages) - 1:
            continue
        start, close = ends[place]
        context = _context(messages, place)
        alone = render_alone([*context, messages[place]])
        found = _turns(alone, stops).get(len(context))
        if found is None:
            continue
        parts += [ids[done:start], np.array(alone.token_ids[found[0] : found[1] + 1], np.int64)]
        done = close + 1
    last = ends.get(len(messages) - 1)
    end = last[1] + 1 if last else len(ids)
    return np.concatenate([*parts, ids[done:end]]), ids[end:]


def _context(messages: list[Any], place: int) -> list[Any]:
    """Messages that a template must see before a turn: a question, or a call and its results."""
    start = place - 1
    while start >= 0 and messages[start]["role"] == "tool":
        start -= 1
    question = {"role": "user", "content": "x"}
    return [question] if start == place - 1 or start < 0 else [question, *messages[start:place]]


def _turns(rendered: RenderedTokens, stops: frozenset[int]) -> dict[int, tuple[int, int]]:
    """By message: its first place, and that of its last id that a model would sample (as in `end_of`)."""
    if len(rendered.message_indices) != len(rendered.token_ids):
        return {}
    indices = np.array(rendered.message_indices, np.int64)
    sampled = np.array(rendered.sampled_mask, bool)
    if len(sampled) != len(indices):
        sampled = np.isin(rendered.token_ids, list(stops))
    messages, firsts = np.unique(indices, return_index=True)
    starts = dict(zip(messages.tolist(), firsts.tolist(), strict=True))
    closes = dict(zip(indices[sampled].tolist(), np.flatnonzero(sampled).tolist(), strict=True))  # the last one stays
    return {message: (starts[message], close) for message, close in closes.items()}


def strip_tail(segments: list[Segment], trailing: str, closes: frozenset[int]) -> list[Segment]:
    """Segments without trailing copies of a text, nor special tokens of `closes`."""
    kept = list(segments)
    while kept:
        special, text = kept[-1]
        if special is not None and special in closes:
            kept.pop()
        elif special is None and trailing and text.endswith(trailing):
            kept.pop()
            if text != trailing:
                kept.append(Segment(None, text[: -len(trailing)]))
        else:
            break
    return kept


def compare(expected: Sequence[Segment], actual: Sequence[Segment], assistant_start: str) -> list[DriftEntry]:
    """Every difference between two lists of segments.

    Args:
        assistant_start: how the family opens an assistant's turn, its special token first.
    """
    if [s.special is None for s in expected] != [s.special is None for s in actual]:
        return [_unpaired(expected, actual)]
    entries = []
    for place, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if want == got:
            continue
        if want.special is not None:
            kind: DriftType = "special_token_type"
            detail = f"special token {want.special} expected, {got.special} found"
        else:
            spoken = _is_assistant(expected, place, assistant_start) and _is_assistant(actual, place, assistant_start)
            kind = "assistant_text" if spoken else "non_assistant_text"
            detail = f"texts differ from character {_first_difference(want.text, got.text)} on"
        entries.append(
            DriftEntry(type=kind, segment_index=place, expected_text=want.text, actual_text=got.text, detail=detail)
        )
    return entries


def _unpaired(expected: Sequence[Segment], actual: Sequence[Segment]) -> DriftEntry:
    kinds = [[segment.special is None for segment in side] for side in (expected, actual)]
    place = _first_difference(*kinds)
    texts = [side[place].text if place < len(side) else "" for side in (expected, actual)]
    return DriftEntry(
        type="special_token_count",
        segment_index=-1,
        expected_text=texts[0],
        actual_text=texts[1],
        detail=f"{len(expected)} segments expected, {len(actual)} found; they part at segment {place}",
    )


def _is_assistant(segments: Sequence[Segment], place: int, start: str) -> bool:
    before = segments[place - 1].text if place and segments[place - 1].special is not None else ""
    return (before + segments[place].text).startswith(start)


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))
