"""What one `/generate` request asks for, read and checked before it costs anything.

Names, defaults and bounds are SGLang's (sampling_params of 0.5.23). Unknown fields of the request
are ignored as there; an unknown sampling parameter is refused by name, as there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from rollout.errors import RolloutLakeError

GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy."""


class BadRequest(RolloutLakeError, ValueError):
    """The request cannot be served as asked; becomes a 400 with this text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample one request. Lengths in tokens; `top_k` -1 is off; `sampling_seed` None is a fresh one."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One checked request: its name, its prompt, how to sample, and whether it wants logprobs."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    return_logprob: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the loaded model allows, and how to turn a text prompt into ids."""

    vocabulary: int
    context: int
    encode: Callable[[str], list[int]]


_UNSERVED_FIELDS = ("lora_path", "image_data", "audio_data", "video_data", "input_embeds", "return_hidden_states")
_UNSERVED_PARAMS = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params")
_IGNORED_PARAMS = ("spaces_between_special_tokens", "stream_interval")


def read_request(body: Any, limits: Limits) -> GenerateRequest:
    """A checked request from a `/generate` body.

    Raises:
        BadRequest: what is wrong, in SGLang's words where it has some.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in _UNSERVED_FIELDS:
        if body.get(name):
            raise BadRequest(f"{name} is not served by the embedded engine")
    if body.get("stream"):
        raise BadRequest("stream is not served by the embedded engine")
    if body.get("return_logprob") and body.get("logprob_start_len") not in (None, -1):
        raise BadRequest("prompt logprobs (logprob_start_len) are not served by the embedded engine")
    if body.get("top_logprobs_num") or body.get("token_ids_logprob"):
        raise BadRequest("top_logprobs_num and token_ids_logprob are not served by the embedded engine")
    rid = body.get("rid") or secrets.token_hex(16)
    if not isinstance(rid, str):
        raise BadRequest("rid must be a string")
    input_ids = _read_prompt(body, limits)
    room = limits.context - 1 - len(input_ids)
    if room < 0:
        raise BadRequest(
            f"The input ({len(input_ids)} tokens) is longer than the model's context length ({limits.context} tokens)."
        )
    raw_params = body.get("sampling_params")
    params = read_sampling_params(raw_params, vocabulary=limits.vocabulary, default_new_tokens=min(128, room))
    _check_room(len(input_ids), params.max_new_tokens, limits.context)
    return GenerateRequest(
        rid=rid, input_ids=input_ids, params=params, return_logprob=bool(body.get("return_logprob", False))
    )


def read_sampling_params(raw: Any, *, vocabulary: int, default_new_tokens: int = 128) -> SamplingParams:
    """Checked sampling parameters; null means the default.

    Raises:
        BadRequest: a parameter is unknown, of the wrong type or out of bounds.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise BadRequest("sampling_params must be an object")
    given = {name: value for name, value in raw.items() if value is not None and name not in _IGNORED_PARAMS}
    for name in _UNSERVED_PARAMS:
        if given.pop(name, None):
            raise BadRequest(f"{name} is not served by the embedded engine")
    if given.pop("n", 1) != 1:
        raise BadRequest("n other than 1 is not served by the embedded engine")
    readers = _readers(vocabulary)
    unknown = sorted(set(given) - set(readers))
    if unknown:
        raise BadRequest(f"unknown sampling parameter {unknown[0]!r}")
    given.setdefault("max_new_tokens", default_new_tokens)
    params = SamplingParams(**{name: readers[name](name, value) for name, value in given.items()})
    if params.min_new_tokens > params.max_new_tokens:
        raise BadRequest(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}."
        )
    return params


def _readers(vocabulary: int) -> dict[str, Callable[[str, Any], Any]]:
    return {
        "max_new_tokens": _integer(0),
        "min_new_tokens": _integer(0),
        "temperature": _number(0.0, float("inf")),
        "top_p": _number(0.0, 1.0, above=True),
        "top_k": _top_k,
        "min_p": _number(0.0, 1.0),
        "frequency_penalty": _number(-2.0, 2.0),
        "presence_penalty": _number(-2.0, 2.0),
        "repetition_penalty": _number(0.0, 2.0, above=True),
        "logit_bias": lambda name, value: _logit_bias(name, value, vocabulary),
        "stop": _strings,
        "stop_token_ids": lambda name, value: frozenset(_ids(name, value, vocabulary)),
        "ignore_eos": _flag,
        "skip_special_tokens": _flag,
        "no_stop_trim": _flag,
        "sampling_seed": _integer(None),
    }


def _integer(least: int | None) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadRequest(f"{name} must be an integer, got {value!r}.")
        if least is not None and value < least:
            raise BadRequest(f"{name} must be at least {least}, got {value}.")
        return value

    return read


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise BadRequest(f"{name} must be a number, got {value!r}.")
        if not isfinite(value) or not low <= value <= high or (above and value == low):
            raise BadRequest(f"{name} must be in {'(' if above else '['}{low:g}, {high:g}], got {value}.")
        return float(value)

    return read


def _top_k(name: str, value: Any) -> int:
    size = _integer(None)(name, value)
    if size != -1 and size < 1:
        raise BadRequest(f"top_k must be -1 (disable) or at least 1, got {size}.")
    return size


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {value!r}.")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadRequest(f"{name} must be a string or a list of strings.")
    return tuple(part for part in parts if part)


def _ids(name: str, value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRequest(f"{name} must be a list of integers.")
    if value and not (min(value) >= 0 and max(value) < vocabulary):
        wrong = next(token for token in value if not 0 <= token < vocabulary)
        raise BadRequest(f"{name} has the id {wrong}, which is outside the vocabulary [0, {vocabulary - 1}].")
    return value


def _logit_bias(name: str, value: Any, vocabulary: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object of token id to number.")
    number = _number(float("-inf"), float("inf"))
    try:
        tokens = {int(token): number(name, bias) for token, bias in value.items()}
    except ValueError as error:
        raise error if isinstance(error, BadRequest) else BadRequest(f"{name} must have token ids as keys.") from error
    _ids(name, list(tokens), vocabulary)
    return tokens


def _read_prompt(body: dict[str, Any], limits: Limits) -> tuple[int, ...]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("give either input_ids or text")
    if text is not None:
        if not isinstance(text, str):
            raise BadRequest("text must be one string; a batch is not served by the embedded engine")
        ids = limits.encode(text)
    ids = _ids("input_ids", ids, limits.vocabulary)
    if not ids:
        raise BadRequest("the prompt must have at least one token")
    return tuple(ids)


def _check_room(prompt: int, new: int, context: int) -> None:
    # One token of the context stays unused, as in SGLang.
    if prompt + new >= context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
            f"a total of {prompt + new} tokens: {prompt} tokens from the input and {new} tokens for the completion."
        )
