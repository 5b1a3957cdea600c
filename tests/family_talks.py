"""Conversations that any model family can have, played through real sessions with its real vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import numpy as np
from scripted import log_probs

from rollout.engine.generation import Generation
from rollout.session.session import open_session
from rollout.session.settings import SessionSettings
from rollout.session.turn import Turn
from rollout.tito.prepared import prepared
from rollout.tito.renderer import Tito

START = datetime(2026, 12, 2, 8, 0, tzinfo=UTC)
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Says:
    """What a model answers: text, reasoning before it, and the keys that it looks up by tool calls."""

    text: str = ""
    reasoning: str | None = None
    keys: tuple[str, ...] = ()

    def message(self) -> Message:
        calls = [
            {"id": f"call_{place}", "type": "function", "function": {"name": "lookup", "arguments": {"key": key}}}
            for place, key in enumerate(self.keys)
        ]
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return {**message, "tool_calls": calls} if calls else message


def written(tito: Tito, turn: Turn, messages: list[Message], says: Says, *, thinking: bool) -> list[int]:
    """Ids that a model of this family samples: what its template writes of the answer behind the generation prompt."""
    renderer = tito._renderer(thinking, None)
    messages = [message for message in messages if message["role"] not in ("system", "developer")]
    rendered = renderer.render(prepared([*messages, says.message()]), tools=cast(Any, turn.request.tools))
    places = [place for place, message in enumerate(rendered.message_indices) if message == len(messages)]
    close = max(place for place in places if rendered.token_ids[place] in tito.stop_token_ids)
    text = tito.decode(rendered.token_ids[places[0] : close])
    opened = tito.decode(turn.appended_ids_P[len(turn.appended_ids_P) - turn.open_length :].tolist())
    if not text.startswith(opened):  # the template attributes the turn's opening to the message before
        thought = f"{says.reasoning or ''}\n</think>\n\n" if opened.rstrip().endswith("<think>") else ""
        text = opened + thought + text.removeprefix(tito.assistant_start)
    return [*tito.tokenizer.encode(text[len(opened) :]), rendered.token_ids[close]]


class Talk:
    """A client of one session; `history` is what its next request repeats."""

    def __init__(self, tito: Tito, version: str, **settings: Any) -> None:
        thinking = settings.get("enable_thinking", False)
        self.tito, self.thinking = tito, thinking
        self.settings = SessionSettings(**{"version": version, "renderer": tito.name, **settings})
        self.session = open_session(self.settings, tito, "s")
        self.history: list[Message] = []
        self.turns: list[Turn] = []
        self.now = START

    def begin(self, *new: Message, **body: Any) -> Turn:
        self.now += timedelta(seconds=1)
        messages = [*self.history, *new]
        turn = self.session.begin({"model": "m", "messages": messages, **body}, requested_at=self.now)
        self.turns.append(turn)
        self.history = messages
        return turn

    def commit(self, turn: Turn, ids: list[int], finish: str = "stop") -> Message:
        self.now += timedelta(seconds=1)
        generation = Generation(
            output_ids_O=np.array(ids, np.int32),
            output_log_probs_O=log_probs(ids, len(self.turns)),
            finish=finish,  # type: ignore[arg-type]
            matched=ids[-1] if finish == "stop" else None,
            prompt_tokens=turn.n_prompt,
        )
        reply = self.session.commit(turn, generation, committed_at=self.now, rid=f"r{len(self.turns)}")
        message: Message = reply["choices"][0]["message"]
        self.history = [*self.history, message]
        return message

    def ask(self, *new: Message, says: Says, **body: Any) -> Message:
        turn = self.begin(*new, **body)
        return self.commit(turn, written(self.tito, turn, self.history, says, thinking=self.thinking))


def results(message: Message, *texts: str) -> list[Message]:
    """Tool results for the calls of a message."""
    calls = message["tool_calls"]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)
    ]


def keys_of(message: Message) -> tuple[str, ...]:
    return tuple(json.loads(call["function"]["arguments"])["key"] for call in message.get("tool_calls") or [])
