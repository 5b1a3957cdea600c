"""Real sessions in this process, with a script in the engine's place: what it samples is what a test says."""

from __future__ import annotations

import importlib.util
import zlib
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.columns import BatchStamp
from rollout.engine.generation import Generation
from rollout.engine.tiny import CHECKPOINT
from rollout.errors import SessionRefused
from rollout.generate import RolloutResult
from rollout.outcome import Outcome, RolloutInput, finish
from rollout.sample import Sample, WeightSpan
from rollout.session.reply import assistant_message, completion
from rollout.session.session import open_session
from rollout.session.settings import SessionSettings
from rollout.tito.parsing import ParsedMessage
from rollout.tito.renderer import Tito
from rollout.tito.tokenizer import load_tokenizer

VECTORS = Path(__file__).parent / "vectors"
START = datetime(2026, 12, 2, 8, 0, 0, 123456, tzinfo=UTC)
STAMP = BatchStamp(batch_id="b", run_date=date(2026, 12, 2), shard=0, engine={"name": "scripted"}, created_at=START)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]


def tiny_tito() -> Tito:
    """The shipped checkpoint's tokenizer with its renderer."""
    return Tito(load_tokenizer(str(CHECKPOINT)), "qwen3")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(key: str) -> str:
    """What a model writes to call `lookup`."""
    return f'<tool_call>\n{{"name": "lookup", "arguments": {{"key": "{key}"}}}}\n</tool_call>'


def log_probs(ids: list[int], salt: int) -> np.ndarray:
    """Doubles with all their bits in use, the same for the same ids and salt."""
    seed = zlib.crc32(np.array([salt, *ids], np.int64).tobytes())
    return -np.random.default_rng(seed).exponential(size=len(ids))


class Conversation:
    """A client and its session. `history` is what the next request repeats, `last_reply` a whole chat.completion.

    Times go on by a second at every request and by another at every commit.
    """

    def __init__(self, tito: Tito, version: str, **settings: Any) -> None:
        self.tito = tito
        self.settings = SessionSettings(**{"version": version, "sampling": {"temperature": 1.0}, **settings})
        self.session = open_session(self.settings, tito, "s")
        self.history: list[dict[str, Any]] = []
        self.now = START
        self.n_commits = 0
        self.last_reply: dict[str, Any] = {}

    def tick(self) -> datetime:
        self.now += timedelta(seconds=1, microseconds=7)
        return self.now

    def begin(self, messages: list[dict[str, Any]], **body: Any) -> Any:
        return self.session.begin({"model": "m", **body, "messages": messages}, requested_at=self.tick())

    def commit(self, turn: Any, text: str | list[int], finish: str = "stop", **given: Any) -> dict[str, Any] | None:
        """Commit what the script samples; the assistant message that the client gets."""
        ids = self.tito.tokenizer.encode(text) if isinstance(text, str) else list(text)
        stop = self.tito.tokenizer.convert_tokens_to_ids("<|im_end|>")
        if finish == "stop" and isinstance(text, str):
            ids.append(stop)
        n_half = len(ids) // 2
        generation = Generation(
            output_ids_O=np.array(ids, np.int32),
            output_log_probs_O=log_probs(ids, self.n_commits),
            finish=finish,
            matched=ids[-1] if finish == "stop" else None,
            cached_tokens=len(turn.prompt_ids) // 2,
            prompt_tokens=len(turn.prompt_ids),
            weight_version="w1",
            weight_spans=[
                WeightSpan(version="w0", start=0, end=n_half),
                WeightSpan(version="w1", start=n_half, end=len(ids)),
            ],
            engine_seconds=0.25,
        )
        reply = self.session.commit(
            turn, replace(generation, **given), committed_at=self.tick(), rid=f"r{self.n_commits}"
        )
        self.n_commits += 1
        self.last_reply = reply
        return reply["choices"][0]["message"]

    def ask(self, *new: dict[str, Any], text: str | list[int] = "ok", finish: str = "stop", **body: Any) -> None:
        """Extend the history by `new`, and by the answer."""
        self.history = [*self.history, *new]
        turn = self.begin(self.history, **body)
        self.history = [*self.history, self.commit(turn, text, finish)]

    def outcome(self, **changes: Any) -> Outcome:
        values = {
            "input": RolloutInput(index=7, group_index=1, messages=[user("go")], label="4", metadata={"foo": 1}),
            "attempt": 0,
            "session_version": self.settings.version,
            "agent_result": {"metadata": {"tool_time": 0.5}},
            "reward": 1.0,
            **changes,
        }
        return Outcome(**values)

    def result(self, outcome: Outcome | None = None) -> RolloutResult:
        """The rollout as the driver has it at its end: rows, tape, outcome."""
        outcome = outcome or self.outcome()
        reply = self.session.samples(max_seq_len=self.settings.max_seq_len)
        outcome.empty_reason = reply.empty_reason
        rows: list[Sample] = finish(reply.samples, outcome)
        return RolloutResult(
            samples=rows, tape=self.session.tape(), outcome=outcome, turns=0, sampled_tokens=0, engine_seconds=0.0
        )


def answered(parsed: ParsedMessage, finish: Any = "stop", matched: Any = None) -> dict[str, Any]:
    """A chat.completion as a session answers it."""
    generation = Generation(
        output_ids_O=np.array([1, 2, 3], np.int32),
        output_log_probs_O=np.array([-0.5, -0.25, -1.0]),
        finish=finish,
        matched=matched,
        cached_tokens=4,
    )
    message = assistant_message(parsed, generation, b"digest")
    return completion(message, generation, n_prompt=9, model="m", rid="chatcmpl-ab", committed_at=START)


def tables(*results: RolloutResult) -> tuple[pa.Table, pa.Table]:
    """Samples and trajectories as a shard stages them."""
    from rollout.batch.shard import shard_result

    shard = shard_result(results, STAMP)
    return shard.samples, shard.trajectories


def play(talk: Conversation, steps: list[Any]) -> None:
    """Play what `strategies.conversations` draws; refused requests change nothing and are passed over."""
    histories: list[list[dict[str, Any]]] = []
    for step in steps:
        begun = []
        for request in step if isinstance(step, list) else [step]:
            messages = [*_base(histories, request), *request["new"]]
            try:
                turn = talk.begin(messages, **({"tools": TOOLS} if request["tools"] else {}))
            except SessionRefused:
                continue
            begun.append((messages, turn, request))
        # The later requests finish first: commit order is not the order of arrival.
        for messages, turn, request in reversed(begun):
            histories.append([*messages, talk.commit(turn, request["text"], request["finish"])])


def _base(histories: list[list[dict[str, Any]]], request: dict[str, Any]) -> list[dict[str, Any]]:
    if request["base"] is None or request["base"] >= len(histories):
        return [user("hello")]
    history = histories[-1 - request["base"]]
    if not request["respell"]:
        return history
    return [_respelled(message) if message["role"] == "assistant" else message for message in history]


def _respelled(message: dict[str, Any]) -> dict[str, Any]:
    """As another client library sends it back: null for no text, no empty list of calls, other JSON spacing."""
    calls = [
        {**one, "function": {**one["function"], "arguments": one["function"]["arguments"].replace('": ', '":')}}
        for one in message.get("tool_calls") or []
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls or None}


def play_vector(talk: Conversation, vector: dict[str, Any]) -> None:
    """Play one recorded conversation of tests/vectors: its requests and what its engine sampled."""
    replies: dict[int, dict[str, Any]] = {}
    for step in vector["steps"]:
        requests = step["requests"] if step["op"] == "overlap" else [step] if step["op"] == "chat" else []
        begun = [_begin_recorded(talk, vector, request, replies) for request in requests]
        for place in step.get("finish_order", range(len(begun))):
            if begun[place] is not None:
                _commit_recorded(talk, begun[place], requests[place], replies)


def _begin_recorded(
    talk: Conversation, vector: dict[str, Any], request: dict[str, Any], replies: dict[int, Any]
) -> Any:
    body = {"chat_template_kwargs": {"enable_thinking": vector["thinking"]}}
    if vector["tools"]:
        body["tools"] = vector["tools"]
    try:
        return talk.begin([_recorded(message, replies) for message in request["messages"]], **body)
    except SessionRefused:
        return None


def _commit_recorded(talk: Conversation, turn: Any, request: dict[str, Any], replies: dict[int, Any]) -> None:
    engine = request["engine"]
    if "error" in engine:
        talk.session.release(turn)
        return
    replies[request["reply"]] = talk.commit(
        turn,
        engine["ids"],
        engine["finish"],
        output_log_probs_O=np.array(engine["logprobs"], np.float64),
        cached_tokens=engine["cached_tokens"],
        weight_version=engine["weight_version"],
    )


def _recorded(message: dict[str, Any], replies: dict[int, Any]) -> dict[str, Any]:
    if "$reply" in message:
        reply, spelling = replies[message["$reply"]], message.get("spelling")
        if spelling == "reordered":
            return VECTOR_CHECK.reorder(reply)
        return VECTOR_CHECK.respell(reply, message["seed"]) if spelling == "client" else reply
    if "tool_call_id" in message:
        reply, place = message["tool_call_id"]["$call"]
        return {**message, "tool_call_id": replies[reply]["tool_calls"][place]["id"]}
    return message


def _load_check() -> Any:
    spec = importlib.util.spec_from_file_location("vector_check", VECTORS / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VECTOR_CHECK = _load_check()
"""The vectors' own checker, for how a client library spells a reply that it sends back."""
