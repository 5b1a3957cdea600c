"""Reading an engine's reply: exact, or an error; never padded."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from rollout.engine.generation import read_generation
from rollout.errors import EngineError
from rollout.sample import WeightSpan


def reply(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "w0",
        "output_token_logprobs": [[-0.0, 5, None], [-1e-300, 6, None], [-0.1, 2, None]],
        "e2e_latency": 0.5,
    }
    return {"text": "", "meta_info": {**meta, **changes}}


def read(**changes: Any) -> Any:
    return read_generation(reply(**changes), vocabulary=10, n_prompt=3)


def test_ids_and_the_bits_of_their_log_probs_come_from_the_logprob_entries() -> None:
    generation = read()
    assert [5, 6, 2] == generation.output_ids_O.tolist()
    assert np.array([-0.0, -1e-300, -0.1]).tobytes() == generation.output_log_probs_O.tobytes()
    assert np.dtype(np.int32) == generation.output_ids_O.dtype
    assert ("stop", 2, 1, "w0", 0.5) == (
        generation.finish,
        generation.matched,
        generation.cached_tokens,
        generation.weight_version,
        generation.engine_seconds,
    )
    assert [WeightSpan(version="w0", start=0, end=3)] == generation.weight_spans


def test_a_change_of_weights_in_mid_turn_gives_two_spans() -> None:
    versions = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}]
    assert [("a", 0, 2), ("b", 2, 3)] == [
        (s.version, s.start, s.end) for s in read(weight_versions=versions).weight_spans
    ]


def test_routed_experts_are_rows_of_all_tokens_but_the_last() -> None:
    data = np.arange(5 * 4, dtype="<i4").tobytes()
    generation = read(routed_experts=base64.b64encode(data).decode())
    assert (data, [5, 4]) == (generation.routed_experts, generation.routed_experts_shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_tokens": 4}, "3 entries, completion_tokens is 4"),
        ({"output_token_logprobs": None}, "not a list"),
        ({"output_token_logprobs": [], "completion_tokens": 0}, "no token"),
        ({"output_token_logprobs": [[math.nan, 1, None]], "completion_tokens": 1}, "not finite"),
        ({"output_token_logprobs": [[-math.inf, 1, None]], "completion_tokens": 1}, "not finite"),
        ({"output_token_logprobs": [[None, 1, None]], "completion_tokens": 1}, "not a number"),
        ({"output_token_logprobs": [[True, 1, None]], "completion_tokens": 1}, "not a number"),
        ({"output_token_logprobs": [[-1.0, 10, None]], "completion_tokens": 1}, "outside the vocabulary of 10"),
        ({"output_token_logprobs": [[-1.0, -1, None]], "completion_tokens": 1}, "outside the vocabulary"),
        ({"output_token_logprobs": [[-1.0, 1.5, None]], "completion_tokens": 1}, "not an integer"),
        ({"output_token_logprobs": [[-1.0]], "completion_tokens": 1}, "is not"),
        ({"finish_reason": {"type": "tired"}}, "finish_reason"),
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": {"type": "stop", "matched": [1]}}, "matched"),
        ({"prompt_tokens": 2}, "3 ids were sent"),
        ({"cached_tokens": -1}, "cached_tokens"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 2}]}, "ends at 2"),
        ({"weight_versions": [{"version": "a", "start": 1, "end": 3}]}, "does not follow"),
        ({"routed_experts": "AAA="}, "no int32 rows"),
        ({"routed_experts": "?"}, "base64"),
    ],
)
def test_g24_a_breach_of_the_contract_is_an_engine_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read(**changes)


def test_no_meta_info_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="meta_info"):
        read_generation({"text": "x"}, vocabulary=10)
