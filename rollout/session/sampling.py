"""Sampling parameters: OpenAI's names and SGLang's own, checked, and mapped to SGLang's.

The same table reads a client's body and a session's pins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rollout.errors import SessionRefused

Reader = Callable[[Any, int], Any]
"""(value, vocabulary) -> the value for the engine; ValueError says what is wanted."""


def _number(low: float, high: float, *, above: bool = False) -> Reader:
    def read(value: Any, vocabulary: int) -> Any:
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not good or (above and value == low):
            raise ValueError(f"want a number {'above' if above else 'from'} {low:g} to {high:g}")
        return value

    return read


def _integer(low: int, high: int) -> Reader:
    def read(value: Any, vocabulary: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"want an integer from {low} to {high}")
        return value

    return read


def _top_k(value: Any, vocabulary: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        raise ValueError("want a positive 32-bit integer, or -1 for no limit")
    return value or -1


def _flag(value: Any, vocabulary: int) -> bool:
    if not isinstance(value, bool):
        raise ValueError("want true or false")
    return value


def _stop(value: Any, vocabulary: int) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("want a text or a list of texts, none of them empty")
    return texts


def _token_ids(value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list) or not all(_is_id(number, vocabulary) for number in value):
        raise ValueError(f"want a list of token ids below {vocabulary}")
    return value


def _logit_bias(value: Any, vocabulary: int) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("want an object of token id to bias")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and _is_id(int(key), vocabulary)):
            raise ValueError(f"{key!r} is no token id below {vocabulary}")
        _number(-100, 100)(bias, vocabulary)
    return value


def _is_id(value: Any, vocabulary: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary


_LENGTH = _integer(1, 2**31 - 1)
_PENALTY = _number(-2, 2)

PARAMETERS: dict[str, tuple[str, Reader]] = {
    "max_tokens": ("max_new_tokens", _LENGTH),
    "max_completion_tokens": ("max_new_tokens", _LENGTH),
    "max_new_tokens": ("max_new_tokens", _LENGTH),
    "min_tokens": ("min_new_tokens", _integer(0, 2**31 - 1)),
    "min_new_tokens": ("min_new_tokens", _integer(0, 2**31 - 1)),
    "temperature": ("temperature", _number(0, 100)),
    "top_p": ("top_p", _number(0, 1, above=True)),
    "top_k": ("top_k", _top_k),
    "min_p": ("min_p", _number(0, 1)),
    "stop": ("stop", _stop),
    "stop_token_ids": ("stop_token_ids", _token_ids),
    "frequency_penalty": ("frequency_penalty", _PENALTY),
    "presence_penalty": ("presence_penalty", _PENALTY),
    "repetition_penalty": ("repetition_penalty", _number(0, 2, above=True)),
    "ignore_eos": ("ignore_eos", _flag),
    "logit_bias": ("logit_bias", _logit_bias),
}
"""Parameter by the name that is given: its name at the engine, and how it is read. Later names win."""

read_seed: Reader = _integer(-(2**63), 2**63 - 1)
"""A client's own seed; used only where the session has none."""


def read_sampling(fields: Mapping[str, Any], *, vocabulary: int, where: str = "") -> dict[str, Any]:
    """The parameters among `fields` in SGLang's names; null is absent.

    Raises:
        SessionRefused: 400 that names the field.
    """
    effective: dict[str, Any] = {}
    for name, (target, read) in PARAMETERS.items():
        value = fields.get(name)
        if value is not None:
            effective[target] = read_field(f"{where}{name}", value, read, vocabulary)
    return effective


def read_pins(pins: Mapping[str, Any], *, vocabulary: int) -> dict[str, Any]:
    """A session's pinned parameters in SGLang's names.

    Raises:
        SessionRefused: 400 that names one that there is not, or that is out of bounds.
    """
    for name in pins:
        if name not in PARAMETERS:
            raise SessionRefused(400, f"sampling.{name}: no parameter; one of {', '.join(sorted(PARAMETERS))}")
    return read_sampling(pins, vocabulary=vocabulary, where="sampling.")


def read_session_seed(seed: str | None) -> bytes | None:
    """A session's own seed.

    Raises:
        SessionRefused: 400, no hex digits.
    """
    try:
        return None if seed is None else bytes.fromhex(seed)
    except (ValueError, TypeError):
        raise SessionRefused(400, "seed: want hex digits") from None


def turn_seed(session_seed: bytes, prompt_digest: bytes, before: int) -> int:
    """First 31 bits of blake2(session seed, prompt digest, generations of that prompt so far)."""
    digest = blake2b(session_seed, digest_size=16)
    digest.update(prompt_digest)
    digest.update(before.to_bytes(4, "little"))
    return int.from_bytes(digest.digest()[:4], "big") >> 1


def with_turn_ends(own: Sequence[int], turn_ends: Sequence[int]) -> list[int]:
    """A client's own stop tokens and the family's turn ends: an engine need not know these from its checkpoint."""
    return [*own, *(number for number in turn_ends if number not in own)]


def read_field(name: str, value: Any, read: Reader, vocabulary: int) -> Any:
    """One value by its reader.

    Raises:
        SessionRefused: 400 that names the field.
    """
    try:
        return read(value, vocabulary)
    except ValueError as error:
        raise SessionRefused(400, f"{name}: {error}") from error
