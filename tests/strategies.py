"""Hypothesis strategies that the test modules share; each part appends its own."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollout.engine.params import SamplingParams
from rollout.errors import FAILURE_TYPES, Failure
from rollout.sample import Sample, Status, WeightSpan
from rollout.tito.parsing import ParsedCall, ParsedMessage

# Parity: values and samples

all_doubles = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
"""Every double by its bits: NaN payloads, both zeros, subnormals."""

finite_doubles = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
int64s = st.integers(-(2**63), 2**63 - 1)

json_values = st.recursive(
    st.none() | st.booleans() | int64s | finite_doubles | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
"""What a JSON column can hold and give back bit for bit."""


@st.composite
def lifecycles(draw: st.DrawFn) -> Any:
    """The lifecycle of a sample: a dict for one turn, a list for several."""
    times = st.none() | st.floats(0, 2e9)
    keys = st.fixed_dictionaries({"t0": times, "t1": times}, optional={"req_ts": times, "prev_t1": times})
    turns = [{**turn, "turn": k + 1} for k, turn in enumerate(draw(st.lists(keys, min_size=1, max_size=3)))]
    return turns[0] if len(turns) == 1 else turns


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Valid samples with every optional part now and then; identity of one rollout."""
    n_response = draw(st.integers(0, 6))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n_response, max_size=n_response + 4))
    failure = draw(st.none() | st.builds(Failure, type=st.sampled_from(FAILURE_TYPES), message=texts))
    siblings = draw(st.integers(1, 3))
    spans = st.tuples(texts, st.integers(0, n_response), st.integers(0, n_response))
    metadata = draw(st.dictionaries(texts, json_values, max_size=3))
    sizes = st.lists(st.integers(1, 2), min_size=2, max_size=2)
    routed = [len(tokens) - 1, *draw(sizes)] if tokens and draw(st.booleans()) else None
    return Sample(
        group_index=draw(st.none() | int64s),
        index=draw(st.integers(0, 2**40)),
        attempt=draw(st.integers(0, 3)),
        rollout_id=draw(st.none() | st.just(0) | int64s),
        sibling=draw(st.integers(0, siblings - 1)),
        siblings=siblings,
        prompt=[{"role": "user", "content": draw(texts)}],
        tokens_T=np.array(tokens, np.int32),
        response=draw(texts),
        response_length=n_response,
        loss_mask_R=np.array(draw(st.lists(st.integers(0, 1), min_size=n_response, max_size=n_response)), np.int8),
        rollout_log_probs_R=np.array(
            draw(st.lists(finite_doubles, min_size=n_response, max_size=n_response)), np.float64
        ),
        status=draw(st.sampled_from(list(Status))),
        reward=None if failure else draw(st.none() | finite_doubles),
        reward_json=draw(st.none() | texts),
        label=draw(st.none() | texts),
        weight_versions=draw(st.lists(texts, max_size=2)),
        weight_spans=[
            WeightSpan(version=v, start=min(a, b), end=max(a, b)) for v, a, b in draw(st.lists(spans, max_size=2))
        ],
        cached_tokens=draw(st.integers(0, 2**40)),
        prompt_tokens=draw(st.integers(0, 2**40)),
        routed_experts=None
        if routed is None
        else draw(st.binary(min_size=4 * prod(routed), max_size=4 * prod(routed))),
        routed_experts_shape=routed,
        remove_sample=failure is not None or draw(st.booleans()),
        metadata={**metadata, "lifecycle": draw(lifecycles()), "leaf": {"node_id": draw(st.integers(0, 9))}},
        train_metadata=draw(st.none() | st.dictionaries(texts, json_values, max_size=2)),
        session_version=draw(st.sampled_from(["v1", "v2"])),
        agent=draw(texts),
        turns=draw(st.integers(0, 9)),
        leaf_path=draw(st.none() | st.lists(st.integers(0, 9), max_size=3)),
        picker=draw(texts),
        finisher=draw(texts),
        drift=draw(st.none() | texts),
        control_text=draw(st.integers(0, 9)),
        lora=draw(st.none() | texts),
        temperature=draw(finite_doubles),
        top_p=draw(finite_doubles),
        failure=failure,
    )


# Embedded engine: sampling parameters


@st.composite
def sampling_params(draw: st.DrawFn, vocabulary: int = 24) -> SamplingParams:
    """Parameters with every filter, penalty and bias now and then; greedy among them."""
    tokens = st.integers(0, vocabulary - 1)
    return SamplingParams(
        max_new_tokens=16,
        min_new_tokens=draw(st.sampled_from([0, 0, 4])),
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-6])),
        top_k=draw(st.sampled_from([-1, -1, 1, 3, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        logit_bias=draw(st.dictionaries(tokens, st.floats(-5, 5), max_size=2)),
        sampling_seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


# Parity: conversations

SMALL_VOCABULARY = 896
"""Ids that a script may sample, control tokens among them: the shipped tokenizer has so many."""

_roles = st.sampled_from(["user", "user", "user", "tool", "system", "assistant"])
_replies = st.sampled_from(
    [
        "ok",
        "",
        "Answer: 7",
        '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>',
        'two <tool_call>\n{"name": "lookup", "arguments": {"key": "b"}}\n</tool_call>',
        '<tool_call>\n{"name": "lookup", "arguments": {"key" "b"}}\n</tool_call>',
        "<think>\nhm\n</think>\n\nyes",
        "a <|im_end|> inside",
        "ü東 \n\n",
    ]
)


@st.composite
def _requests(draw: st.DrawFn) -> dict[str, Any]:
    """What one request adds to which earlier history (0: the newest; null: a new conversation)."""
    messages = st.builds(lambda role, text: {"role": role, "content": text}, _roles, texts)
    return {
        "base": draw(st.sampled_from([0, 0, 0, 0, 0, 1, 1, 2, 3, None])),
        "new": draw(st.lists(messages, max_size=3)),
        "text": draw(_replies | texts | st.lists(st.integers(0, SMALL_VOCABULARY - 1), min_size=1, max_size=5)),
        "finish": draw(st.sampled_from(["stop"] * 8 + ["length", "abort"])),
        "tools": draw(st.booleans()),
        "respell": draw(st.booleans()),
    }


conversations = st.lists(_requests() | st.lists(_requests(), min_size=2, max_size=3), min_size=1, max_size=8)
"""Steps of a conversation: a request, or several that run beside each other.

Appended turns, retries and branches (an older base), compaction (no base), injected assistants,
respelled replies, cut and aborted turns; what a session refuses is part of it.
"""

# Session: answers

_objects = st.dictionaries(texts, json_values | st.integers(), max_size=3)

answers = st.builds(
    lambda content, reasoning, calls: ParsedMessage(
        content=content,
        reasoning_content=reasoning,
        tool_calls=[ParsedCall(name=name, arguments=json.dumps(given, ensure_ascii=False)) for name, given in calls],
    ),
    texts
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["a\n\nb", "\x85\u2028\u2029", "data: \r\n"]),
    st.none() | texts,
    st.lists(st.tuples(texts, _objects), max_size=3),
)
"""What a turn may say: any content, reasoning and tool calls, with integers of any length in their arguments."""

# Session: messages as a client library may repeat them

_arguments = (
    st.none()
    | st.sampled_from(
        ["", "{}", " ", '{"a": 1}', '{"a":1}', '{"a": 1.0}', '{"a": true}', '{"a": 1, "a": 1}', '{"a": NaN}', "x"]
    )
    | st.sampled_from(["[1]", "[" * 2000, '{"a": ' + "[" * 2000 + "]" * 2000 + "}"])
    | st.dictionaries(texts, json_values, max_size=3)
    | st.dictionaries(texts, json_values, max_size=3).map(json.dumps)
)
_call = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.sampled_from("fg")}, optional={"arguments": _arguments})},
    optional={"id": st.sampled_from("ab"), "type": st.just("function"), "index": st.integers(0, 2)},
)
_content = st.none() | st.sampled_from(["", "a", [], [{"type": "text", "text": "a"}]])
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "user"]), "content": _content},
    optional={
        "reasoning_content": st.none() | st.sampled_from(["", "hm"]),
        "tool_calls": st.none() | st.lists(_call | st.just("no call"), max_size=2),
        "name": st.just("n"),
    },
)


@st.composite
def _repeated(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A message, and itself with one part drawn anew or spelled otherwise."""
    message = draw(_message)
    other = json.loads(json.dumps(message))
    name = draw(st.sampled_from(["role", "content", "reasoning_content", "tool_calls", "arguments"]))
    if name != "arguments":
        drawn = draw(_message)
        other.pop(name, None)
        return message, {**other, **({name: drawn[name]} if name in drawn else {})}
    for one in other.get("tool_calls") or []:
        if isinstance(one, dict) and isinstance(one["function"].get("arguments"), dict):
            one["function"]["arguments"] = json.dumps(dict(reversed(one["function"]["arguments"].items())))
        elif isinstance(one, dict) and draw(st.booleans()):
            one["function"]["arguments"] = draw(_arguments)
    return message, other


message_pairs = st.tuples(_message, _message) | _repeated()
"""What a session stores, and what a client sends in its place."""
