"""The conversation that both sides of the session benchmark have: what a client sends, what the engine answers.

Built once, before any clock starts, by a session in this process: every request's body, the ids that
its prompt must have, and the engine's reply to them.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from bench.talks import WORDS
from scripted import START, TOOLS, log_probs, user

from rollout.engine.generation import read_generation
from rollout.session.session import open_session
from rollout.session.settings import SessionSettings
from rollout.tito.renderer import Tito

_WORDS = WORDS.split()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedTurn:
    """One exchange: the client's body, the JSON of the prompt's ids, the engine's reply, and the answer's message."""

    body: bytes
    input_ids: bytes
    engine_reply: bytes
    n_prompt: int
    message: dict[str, Any]


def make_script(tito: Tito, *, turns: int, n_in: int, n_out: int, seed: int = 0) -> list[ScriptedTurn]:
    """A conversation of tool calls and their results.

    Args:
        n_in: ids that a turn's new message has; the template's own come on top.
        n_out: ids that a turn samples, its end included.
    """
    rng = random.Random(seed)
    session = open_session(SessionSettings(sampling={"temperature": 1.0}), tito, "script")
    history: list[dict[str, Any]] = [user(_text(tito, rng, n_in))]
    script = []
    for number in range(turns):
        body = orjson.dumps({"model": "m", "messages": history, "tools": TOOLS, "temperature": 1.0})
        turn = session.begin(orjson.loads(body), requested_at=START)
        reply = _engine_reply(tito, _call(tito, rng, n_out), turn.n_prompt, number)
        generation = read_generation(orjson.loads(reply), vocabulary=tito.vocabulary, n_prompt=turn.n_prompt)
        message = session.commit(turn, generation, committed_at=START)["choices"][0]["message"]
        ids = orjson.dumps(turn.prompt_ids)
        script.append(
            ScriptedTurn(body=body, input_ids=ids, engine_reply=reply, n_prompt=turn.n_prompt, message=message)
        )
        known = message["tool_calls"][0]["id"]
        history = [*history, message, {"role": "tool", "tool_call_id": known, "content": _text(tito, rng, n_in)}]
    return script


def _engine_reply(tito: Tito, text: str, n_prompt: int, salt: int) -> bytes:
    end = tito.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*tito.tokenizer.encode(text), end]
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": end},
        "prompt_tokens": n_prompt,
        "completion_tokens": len(ids),
        "cached_tokens": n_prompt // 2,
        "weight_version": "w1",
        "output_token_logprobs": [[p, one, None] for p, one in zip(log_probs(ids, salt).tolist(), ids, strict=True)],
        "e2e_latency": 0.25,
    }
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def _call(tito: Tito, rng: random.Random, n_ids: int) -> str:
    def spelled(words: list[str]) -> str:
        half = len(words) // 2
        call = json.dumps({"name": "lookup", "arguments": {"key": " ".join(words[half:])}})
        return f"{' '.join(words[:half])}\n<tool_call>\n{call}\n</tool_call>"

    return _grown(tito, rng, n_ids - 1, spelled)


def _text(tito: Tito, rng: random.Random, n_ids: int) -> str:
    return _grown(tito, rng, n_ids, " ".join)


def _grown(tito: Tito, rng: random.Random, n_ids: int, spelled: Callable[[list[str]], str]) -> str:
    words = [rng.choice(_WORDS)]
    while len(tito.tokenizer.encode(spelled(words))) < n_ids:
        words.append(rng.choice(_WORDS))
    return spelled(words)


def n_tokens(script: list[ScriptedTurn], turns: int) -> int:
    """Ids of the conversation after so many turns."""
    last = script[turns - 1]
    ids: np.ndarray = np.asarray(orjson.loads(last.engine_reply)["output_ids"])
    return last.n_prompt + int(ids.size)


def save(script: list[ScriptedTurn], file: Path) -> None:
    file.write_bytes(pickle.dumps([(s.body, s.input_ids, s.engine_reply, s.n_prompt, s.message) for s in script]))
