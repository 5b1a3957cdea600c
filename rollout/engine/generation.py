"""What one `/generate` call gave, read strictly: a breach of the contract is an error, never padded.

Shapes: `_O` counts sampled ids. Reply format: SGLang's native `/generate`, `return_logprob` on.

Routed experts are int32, little-endian, of shape (rows, layers, experts per token): the row of an id says which
experts its forward pass chose in each layer. The last sampled id was not passed through the model yet, so the rows
of a generation end with that of the last id but one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError
from rollout.sample import WeightSpan

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """One turn's sampled ids with their log-probs. `weight_spans` counts from the turn's first sampled id.

    `routed_experts` may lack leading rows: of `routed_experts_shape[0]` rows the last is always that of the
    last id but one.
    """

    output_ids_O: NDArray[np.int32]
    output_log_probs_O: NDArray[np.float64]
    finish: Finish
    matched: str | int | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    weight_version: str | None = None
    weight_spans: list[WeightSpan] = field(default_factory=list)
    routed_experts: bytes | None = None
    routed_experts_shape: list[int] | None = None
    engine_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedExperts:
    """Routed experts that a request asked for: the rows of its ids from place `start` on."""

    layers: int
    per_token: int
    start: int


def read_generation(
    reply: Mapping[str, Any], *, vocabulary: int, n_prompt: int | None = None, experts: AskedExperts | None = None
) -> Generation:
    """The generation in an engine's reply.

    Args:
        reply: the parsed body of a 200 answer to `/generate`.
        vocabulary: ids are valid in [0, vocabulary).
        n_prompt: ids that were sent; an engine that counts others did not see our prompt.
        experts: the rows that were asked for. Without them only whole ones are read, in one axis.

    Raises:
        EngineError: counts that disagree, a missing or non-finite log-prob, an id outside the
            vocabulary, an unknown finish reason, no sampled id at all, no routed experts where they were
            asked for (an aborted generation has none).
    """
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError("the engine's reply has no meta_info")
    counted = meta.get("prompt_tokens")
    if n_prompt is not None and counted is not None and counted != n_prompt:
        raise EngineError(f"meta_info.prompt_tokens is {counted!r}, {n_prompt} ids were sent")
    ids_O, log_probs_O = _sampled(meta, vocabulary)
    finish, matched = _finish(meta)
    version = meta.get("weight_version")
    version = None if version is None else str(version)
    rows, rows_shape = _routed_experts(meta, len(ids_O), experts, needed=finish != "abort")
    return Generation(
        output_ids_O=ids_O,
        output_log_probs_O=log_probs_O,
        finish=finish,
        matched=matched,
        cached_tokens=_count(meta, "cached_tokens"),
        prompt_tokens=_count(meta, "prompt_tokens"),
        weight_version=version,
        weight_spans=_weight_spans(meta, version, len(ids_O)),
        routed_experts=rows,
        routed_experts_shape=rows_shape,
        engine_seconds=_seconds(meta),
    )


def _sampled(meta: dict[str, Any], vocabulary: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list):
        raise EngineError("meta_info.output_token_logprobs is not a list")
    if meta.get("completion_tokens") != len(entries):
        raise EngineError(
            f"meta_info.output_token_logprobs has {len(entries)} entries, "
            f"completion_tokens is {meta.get('completion_tokens')!r}"
        )
    if not entries:
        raise EngineError("the engine sampled no token")
    try:
        log_probs, ids = islice(zip(*entries), 2)  # noqa: B905 - entries may be longer than they need be
    except (TypeError, ValueError):
        raise EngineError("meta_info.output_token_logprobs: an entry is not [logprob, id, ...]") from None
    if not set(map(type, log_probs)) <= {float, int}:
        raise EngineError("meta_info.output_token_logprobs: a logprob is not a number")
    if set(map(type, ids)) != {int}:
        raise EngineError("meta_info.output_token_logprobs: an id is not an integer")
    log_probs_O = np.array(log_probs, np.float64)
    if not np.isfinite(log_probs_O).all():
        raise EngineError("meta_info.output_token_logprobs: a logprob is not finite")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise EngineError(f"meta_info.output_token_logprobs: an id is outside the vocabulary of {vocabulary}")
    return np.array(ids, np.int32), log_probs_O


def _finish(meta: dict[str, Any]) -> tuple[Finish, str | int | None]:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"meta_info.finish_reason is {reason!r}, want type stop, length or abort")
    matched = reason.get("matched") if isinstance(reason, dict) and kind == "stop" else None
    if matched is not None and (isinstance(matched, bool) or not isinstance(matched, str | int)):
        raise EngineError(f"meta_info.finish_reason.matched is {matched!r}, want a token id or a string")
    return kind, matched


def _count(meta: dict[str, Any], name: str) -> int:
    value = meta.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise EngineError(f"meta_info.{name} is {value!r}, want a count")
    return value


def _seconds(meta: dict[str, Any]) -> float:
    value = meta.get("e2e_latency", 0.0)
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else 0.0


def _weight_spans(meta: dict[str, Any], version: str | None, n_output: int) -> list[WeightSpan]:
    given = meta.get("weight_versions")
    if not given:
        return [] if version is None else [WeightSpan(version=version, start=0, end=n_output)]
    try:
        spans = [WeightSpan(version=str(s["version"]), start=int(s["start"]), end=int(s["end"])) for s in given]
    except (TypeError, KeyError, ValueError):
        raise EngineError("meta_info.weight_versions: want a list of {version, start, end}") from None
    edge = 0
    for span in spans:
        if span.start != edge or span.end < span.start:
            raise EngineError(f"meta_info.weight_versions: [{span.start}, {span.end}) does not follow {edge}")
        edge = span.end
    if edge != n_output:
        raise EngineError(f"meta_info.weight_versions ends at {edge}, {n_output} tokens were sampled")
    return spans


def _routed_experts(
    meta: dict[str, Any], n_output: int, asked: AskedExperts | None, *, needed: bool
) -> tuple[bytes | None, list[int] | None]:
    """The rows and their shape; an engine that does not know where to start gives all of them."""
    given = meta.get("routed_experts")
    if given is None:
        if asked is not None and needed:
            raise EngineError("the engine gave no routed experts: start it with --enable-return-routed-experts")
        return None, None
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise EngineError("meta_info.routed_experts is not base64") from None
    whole = _count(meta, "prompt_tokens") + n_output - 1
    if asked is None:
        shapes = [[whole, len(data) // (4 * whole)]] if whole > 0 else []
    else:
        shapes = [[rows, asked.layers, asked.per_token] for rows in (whole - asked.start, whole)]
    for shape in shapes:
        if len(data) == 4 * prod(shape):
            return data, shape
    wanted = f", want shape {shapes[0]}" if shapes else ""
    raise EngineError(f"meta_info.routed_experts: {len(data)} bytes are no int32 rows of {whole} tokens{wanted}")
