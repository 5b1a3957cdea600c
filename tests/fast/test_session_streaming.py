"""Streams, read by the SDKs' own decoders: put together, they are the plain answer, however they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anthropic._streaming
import openai._streaming
import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import strategies as st
from openai._models import construct_type
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from scripted import answered
from strategies import answers
from thousands import twice

from rollout.session.anthropic import to_message
from rollout.session.streaming import KEEP_ALIVE, chat_events, event, message_events
from rollout.tito.parsing import ParsedCall, ParsedMessage

places_to_cut = st.lists(st.integers(0, 10**6), max_size=5)
ENDINGS = [("stop", 3), ("stop", "END"), ("stop", None), ("length", None), ("abort", None)]


def cut(events: Iterator[bytes], places: list[int]) -> list[bytes]:
    """The stream in pieces, a comment before it."""
    whole = KEEP_ALIVE + b"".join(events)
    edges = [0, *sorted(place % len(whole) for place in places), len(whole)]
    return [whole[start:end] for start, end in pairwise(edges)]


def read_chat(pieces: list[bytes]) -> tuple[Any, list[Any]]:
    """What OpenAI's SDK makes of the pieces: the whole, and the chunks."""
    state, chunks = ChatCompletionStreamState(), []
    for found in openai._streaming.SSEDecoder().iter_bytes(iter(pieces)):
        if found.data == "[DONE]":
            return state.current_completion_snapshot, chunks
        # As its client does it: a finish_reason that OpenAI does not have ("abort") is no error.
        chunks.append(construct_type(value=found.json(), type_=ChatCompletionChunk))
        state.handle_chunk(chunks[-1])
    raise AssertionError("the stream did not end")


def read_message(pieces: list[bytes]) -> tuple[Any, list[dict[str, Any]]]:
    """What Anthropic's SDK makes of the pieces: the whole, and the events."""
    whole, seen, buffers = None, [], {}
    for found in anthropic._streaming.SSEDecoder().iter_bytes(iter(pieces)):
        seen.append(found.json())
        assert found.event == seen[-1]["type"]
        if found.event != "ping":
            whole = accumulate_event(event=found.json(), current_snapshot=whole, json_bufs=buffers)
    assert "message_stop" == seen[-1]["type"]
    return whole, seen


def check_chat_stream(parsed: ParsedMessage, ending: tuple[Any, Any], places: list[int], include_usage: bool) -> None:
    reply = answered(parsed, *ending)
    whole, chunks = read_chat(cut(chat_events(reply, include_usage=include_usage), places))
    choice, plain = whole.choices[0], reply["choices"][0]
    for name, value in plain["message"].items():
        given_back = choice.message.to_dict()[name]
        if name == "tool_calls":
            given_back = [{key: item for key, item in call.items() if key != "index"} for call in given_back]
            for call in given_back:
                call["function"].pop("parsed_arguments", None)
        assert value == given_back
    assert plain["finish_reason"] == choice.finish_reason
    assert (reply["id"], reply["created"], "m") == (whole.id, whole.created, whole.model)
    assert reply["usage"] == whole.usage.to_dict()
    assert (2 if include_usage else 1) == len(chunks)


test_a_chat_stream_put_together_is_the_plain_answer, test_a_chat_stream_thousands = twice(
    check_chat_stream, answers, st.sampled_from(ENDINGS), places_to_cut, st.booleans(), fast=100, full=3000
)


def test_the_reference_sends_two_events_and_options_add_the_usage() -> None:
    reply = answered(ParsedMessage(content="ok", tool_calls=[ParsedCall(name="ping", arguments="{}")]))
    one, done = chat_events(reply)
    chunk = json.loads(one.removeprefix(b"data: "))
    assert b"data: [DONE]\n\n" == done
    assert {"id", "object", "created", "model", "choices", "usage"} == chunk.keys()
    assert ("chat.completion.chunk", reply["usage"]) == (chunk["object"], chunk["usage"])
    choice = chunk["choices"][0]
    assert {"index", "delta", "logprobs", "finish_reason"} == choice.keys()
    call = {"index": 0, **reply["choices"][0]["message"]["tool_calls"][0]}
    assert {"role": "assistant", "content": "ok", "tool_calls": [call]} == choice["delta"]
    first, usage, _ = [
        json.loads(part[6:]) if b"DONE" not in part else None for part in chat_events(reply, include_usage=True)
    ]
    assert (None, [], reply["usage"]) == (first["usage"], usage["choices"], usage["usage"])


def check_message_stream(parsed: ParsedMessage, ending: tuple[Any, Any], places: list[int]) -> None:
    message = to_message(answered(parsed, *ending))
    whole, events = read_message(cut(message_events(message), places))
    plain = json.loads(orjson.dumps(message))
    assert plain == {name: value for name, value in whole.to_dict().items() if name in plain}
    indices = [found["index"] for found in events if found["type"] == "content_block_start"]
    assert list(range(len(plain["content"]))) == indices


test_a_message_stream_put_together_is_the_plain_answer, test_a_message_stream_thousands = twice(
    check_message_stream, answers, st.sampled_from(ENDINGS), places_to_cut, fast=100, full=3000
)


def test_g41_an_empty_input_is_an_empty_object_however_the_stream_is_cut() -> None:
    calls = [ParsedCall(name="ping", arguments="{}"), ParsedCall(name="pong", arguments='{"n": 7}')]
    reply = answered(ParsedMessage(content="", tool_calls=calls))
    every = list(range(10**4))
    whole, _ = read_chat(cut(chat_events(reply), every))
    assert ["{}", '{"n": 7}'] == [call.function.arguments for call in whole.choices[0].message.tool_calls]
    found, _ = read_message(cut(message_events(to_message(reply)), every))
    assert [("ping", {}), ("pong", {"n": 7})] == [(block.name, block.input) for block in found.content]


def test_g42_each_of_three_calls_is_a_block_with_its_own_index() -> None:
    calls = [ParsedCall(name=f"f{n}", arguments=f'{{"n": {n}}}') for n in range(3)]
    message = to_message(answered(ParsedMessage(content="a\n\n", reasoning_content="hm", tool_calls=calls)))
    _, events = read_message(cut(message_events(message), []))
    order = ["message_start", "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], block[1], block[2]]
    assert [*order, *thinking, *block * 4, "message_delta", "message_stop"] == [found["type"] for found in events]
    deltas = [found for found in events if found["type"] == "content_block_delta"]
    kinds = ["thinking_delta", "signature_delta", "text_delta", *["input_json_delta"] * 3]
    assert kinds == [found["delta"]["type"] for found in deltas]
    for n, found in enumerate(deltas[3:]):
        assert (n + 2, {"n": n}) == (found["index"], json.loads(found["delta"]["partial_json"]))


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\n", "\r"])
def test_an_event_is_one_line_for_any_reader(mark: str) -> None:
    text = event({"a": f"x{mark}y"}).decode()
    assert 2 == len(text.splitlines())
    assert {"a": f"x{mark}y"} == json.loads(text[6:])
