"""What a /generate body may say."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.params import BadRequest, Limits, SamplingParams, read_request, read_sampling_params

LIMITS = Limits(vocabulary=100, context=50, encode=lambda text: [len(word) for word in text.split()])


def _read(body: Any) -> Any:
    return read_request(body, LIMITS)


def test_defaults_and_nulls_are_the_same() -> None:
    defaults = read_sampling_params(None, vocabulary=100)
    assert defaults == SamplingParams()
    nulls = {"temperature": None, "top_k": None, "stop": None, "logit_bias": None, "sampling_seed": None}
    assert read_sampling_params(nulls, vocabulary=100) == defaults


def test_every_parameter_is_read() -> None:
    raw = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": -1.5},
        "stop": ["a", ""],
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": -3,
        "spaces_between_special_tokens": True,
        "n": 1,
    }
    assert read_sampling_params(raw, vocabulary=100) == SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=1.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={3: -1.5},
        stop=("a",),
        stop_token_ids=frozenset({4, 5}),
        ignore_eos=True,
        skip_special_tokens=False,
        no_stop_trim=True,
        sampling_seed=-3,
    )


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -0.1}, "temperature must be in"),
        ({"temperature": float("nan")}, "temperature must be in"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p must be in (0, 1]"),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"top_k": 2.0}, "top_k must be an integer"),
        ({"min_p": 2}, "min_p must be in"),
        ({"frequency_penalty": 3}, "frequency_penalty must be in"),
        ({"presence_penalty": -3}, "presence_penalty must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2]"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens must be in [0, max_new_tokens(3)], got 4."),
        ({"logit_bias": {"100": 1.0}}, "id 100, which is outside the vocabulary"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias must have token ids as keys."),
        ({"logit_bias": {"1": None}}, "logit_bias must be a number"),
        ({"stop_token_ids": [100]}, "id 100, which is outside the vocabulary"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of integers."),
        ({"stop": [1]}, "stop must be a string or a list of strings."),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"sampling_seed": 1.5}, "sampling_seed must be an integer"),
        ({"n": 2}, "n other than 1"),
        ({"regex": "a+"}, "regex is not served"),
        ({"json_schema": "{}"}, "json_schema is not served"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ([], "sampling_params must be an object"),
    ],
)
def test_a_bad_parameter_is_named(params: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        _read({"input_ids": [1], "sampling_params": params})
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the body must be a JSON object"),
        ({}, "give either input_ids or text"),
        ({"input_ids": [1], "text": "a"}, "give either input_ids or text"),
        ({"input_ids": []}, "the prompt must have at least one token"),
        ({"text": ""}, "the prompt must have at least one token"),
        ({"text": ["a", "b"]}, "text must be one string"),
        ({"input_ids": [[1], [2]]}, "input_ids must be a list of integers."),
        ({"input_ids": [1, True]}, "input_ids must be a list of integers."),
        ({"input_ids": [1, 100]}, "input_ids has the id 100, which is outside the vocabulary [0, 99]."),
        ({"input_ids": [1, -1]}, "input_ids has the id -1, which is outside the vocabulary [0, 99]."),
        ({"input_ids": [1] * 50}, "The input (50 tokens) is longer than the model's context length (50 tokens)."),
        (
            {"input_ids": [1] * 40, "sampling_params": {"max_new_tokens": 10}},
            "Requested token count exceeds the model's maximum context length of 50 tokens. You requested a total of "
            "50 tokens: 40 tokens from the input and 10 tokens for the completion.",
        ),
        ({"input_ids": [1], "stream": True}, "stream is not served"),
        ({"input_ids": [1], "lora_path": "a"}, "lora_path is not served"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 0}, "prompt logprobs"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"input_ids": [1], "rid": 7}, "rid must be a string"),
    ],
)
def test_a_bad_request_is_explained(body: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        _read(body)
    assert words in str(refusal.value)


def test_a_request_gets_a_name_a_prompt_and_the_room_that_is_left() -> None:
    request = _read({"text": "one three", "unknown_field": 1, "logprob_start_len": 0})
    assert request.input_ids == (3, 5)
    assert request.rid != _read({"text": "one three"}).rid
    assert not request.return_logprob
    assert request.params.max_new_tokens == 50 - 1 - 2
    assert _read({"input_ids": [1] * 49}).params.max_new_tokens == 0
    assert _read({"input_ids": [1] * 40, "sampling_params": {"max_new_tokens": 9}}).params.max_new_tokens == 9
