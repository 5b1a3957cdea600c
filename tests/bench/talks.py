"""Long agent conversations for benchmarks, as an agent at work makes them: tool calls, results, now and then a user."""

from __future__ import annotations

import json
import random

from scripted import TOOLS, Conversation, user

from rollout.tito.renderer import Tito

WORDS = """
the file has been changed and now every test of the parser passes but one that reads a table with
empty rows which we have to look at before the release so open it again and show me line 42 please
"""
USER_EVERY = 8
"""Turns from one message of the user to the next; between them the environment answers."""
_WORDS = WORDS.split()


def agent_talk(tito: Tito, version: str, *, turns: int, words: int, seed: int) -> Conversation:
    """A conversation of so many turns, each with about `words` sampled words and 2 x `words` of a tool's result."""
    rng = random.Random(seed)
    talk = Conversation(tito, version)
    talk.history = [{"role": "system", "content": _text(rng, 4 * words)}]
    talk.ask(user(_text(rng, words)), text=_call(rng, words), tools=TOOLS)
    for turn in range(1, turns):
        result = {
            "role": "tool",
            "tool_call_id": talk.history[-1]["tool_calls"][0]["id"],
            "content": _text(rng, 2 * words),
        }
        more = [user(_text(rng, words))] if turn % USER_EVERY == 0 else []
        talk.ask(result, *more, text=_call(rng, words), tools=TOOLS)
    return talk


def _call(rng: random.Random, words: int) -> str:
    arguments = {"name": "lookup", "arguments": {"key": _text(rng, words // 2)}}
    return f"{_text(rng, words // 2)}\n<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))
