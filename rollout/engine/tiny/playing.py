"""Play prompt rows against a sampler, all of them turn by turn, with no server between.

What the accuracy in the model card is measured with: the same ids a session would send, the
same tools, the same end of a rollout as `tool_loop`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.agents.tools import run_tool
from rollout.engine.tiny import phrases as say
from rollout.engine.tiny.dialogues import Message
from rollout.engine.tiny.encoding import Encoder

Sampler = Callable[[Sequence[list[int]]], list[list[int]]]
"""Prompts to completions, in order; a completion that ends with no stop token was cut."""


@dataclass(kw_only=True, slots=True, eq=False)
class Game:
    """One row's conversation: `ids` are all tokens so far, `turns` the sampled ones of each turn."""

    row: dict[str, Any]
    messages: list[Message]
    ids: list[int]
    turns: list[list[int]] = field(default_factory=list)
    called: int = 0
    over: bool = False
    cut: bool = False

    @property
    def answer(self) -> str | None:
        """What stands behind `Answer: ` in the last line of the last message, if the model spoke last."""
        last = self.messages[-1]
        line = str(last["content"]).rsplit("\n", 1)[-1] if last["role"] == "assistant" else ""
        head = say.ANSWER_LINE.format(x="")
        return line[len(head) :].strip() if line.startswith(head) else None

    @property
    def right(self) -> bool:
        return not self.cut and self.answer == self.row["label"]


def play(rows: Sequence[dict[str, Any]], sample: Sampler, encoder: Encoder, *, max_turns: int = 8) -> list[Game]:
    """Games of all rows, each until the model answers without a call, is cut, or has had `max_turns`."""
    games = [
        Game(row=row, messages=list(row["messages"]), ids=encoder.prompt(row["messages"], row.get("tools")))
        for row in rows
    ]
    go_on(games, sample, encoder, max_turns=max_turns)
    return games


def go_on(games: Sequence[Game], sample: Sampler, encoder: Encoder, *, max_turns: int = 8) -> None:
    """Play the games that are not over, as `play` does."""
    for _ in range(max_turns):
        running = [game for game in games if not game.over]
        if not running:
            break
        for game, completion in zip(running, sample([game.ids for game in running]), strict=True):
            _take_turn(game, completion, encoder)


def put(game: Game, messages: Sequence[Message], encoder: Encoder) -> None:
    """Put the agent's next messages behind a game that was not cut, and open it again."""
    game.messages += messages
    game.ids = encoder.extend(game.ids, list(messages), game.messages, game.row.get("tools"))
    game.over = False


def _take_turn(game: Game, completion: list[int], encoder: Encoder) -> None:
    """Keep a completion; run its calls, ask again for one that does not parse, or end the game."""
    tools = game.row.get("tools")
    parsed = encoder.renderer.parse_response(completion, tools=tools, prompt_ids=game.ids)
    game.ids = game.ids + completion
    game.turns.append(completion)
    game.cut = completion[-1] not in encoder.renderer.get_stop_token_ids()
    game.over = True
    calls = [] if game.cut or not tools else parsed.tool_calls
    readable = bool(calls) and all(call.name for call in calls)
    if not readable:
        stop = None if game.cut else -1
        game.messages.append({"role": "assistant", "content": encoder.tokenizer.decode(completion[:stop])})
        if calls:
            put(game, [{"role": "user", "content": say.REASK}], encoder)
        return
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
    said = [{"type": "function", "function": function} for function in functions]
    game.messages.append({"role": "assistant", "content": parsed.content, "tool_calls": said})
    table = game.row["metadata"].get("table")
    results = [run_tool(function["name"], function["arguments"], table) for function in functions]
    game.called += len(results)
    put(game, [{"role": "tool", "content": result} for result in results], encoder)
