"""Dialogues: a task played out as a user, two tools and a model with known bad habits would.

The habits (a slip in a number, an answer without the tool, a call that does not parse, an
argument in the user's spelling) are rare, so greedy decoding does not show them; sampling at
temperature 1 does, and gives a batch its failed calls, re-asked calls and wrong answers.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from rollout.agents.tools import TOOLS, run_tool
from rollout.engine.tiny import phrases as say
from rollout.engine.tiny.tasks import TOOL_KINDS, Step, Task, make_task

Message = dict[str, Any]

SLIP, SKIP, BROKEN, MISREAD, IN_WORDS = 0.08, 0.05, 0.03, 0.35, 0.04
"""How often: a wrong digit in a calculation, no tool at all, a call that does not parse, the user's
spelling of a key, an expression in words."""

FOLLOW_UP = 0.3
"""How often a tool task goes on with one of the branching agent's sub-conversations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogue:
    """A conversation; `sampled` are the positions of the messages that the model itself says."""

    kind: str
    messages: list[Message]
    sampled: tuple[int, ...]
    tools: list[dict[str, Any]] | None


class _Play:
    """One dialogue while it is being written."""

    def __init__(self, task: Task, rng: random.Random, *, habits: bool) -> None:
        self.task, self.rng, self.habits = task, rng, habits
        self.messages: list[Message] = list(task.row()["messages"])
        self.sampled: list[int] = []
        self.results: list[str] = []
        self.fillers = [rng.choice(say.FILLERS) for _ in range(task.fillers)]

    def chance(self, share: float) -> bool:
        return self.habits and self.rng.random() < share

    def user(self, text: str, role: str = "user") -> None:
        self.messages.append({"role": role, "content": text})

    def says(self, content: str, calls: list[dict[str, Any]] | None = None) -> None:
        talk, self.fillers = " ".join(self.fillers), []
        content = "\n".join(part for part in (talk, content) if part)
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        self.sampled.append(len(self.messages))
        self.messages.append(message)

    def answers(self, x: str, sentence: str | None = None) -> None:
        line = say.ANSWER_LINE.format(x=x)
        self.says(line if sentence is None else f"{sentence}\n{line}")

    def calls(self, pairs: list[tuple[str, str]]) -> list[str]:
        """The model calls tools, one (tool, argument) per call; gives the tools' results."""
        calls = [_call(tool, argument) for tool, argument in pairs]
        if self.chance(BROKEN):
            self.says("\n".join(_broken(call) for call in calls))
            self.user(say.REASK)
        self.says("", calls)
        results = [run_tool(c["function"]["name"], c["function"]["arguments"], self.task.table) for c in calls]
        self.messages += [{"role": "tool", "content": result} for result in results]
        return results

    def turn(self, steps: tuple[Step, ...]) -> None:
        """One turn of the plan: the calls, and the calls once more where a spelling was refused."""
        arguments = [step.call(self.results) for step in steps]
        first = [self._misread(step, argument) for step, argument in zip(steps, arguments, strict=True)]
        results = self.calls([(step.tool, argument) for step, argument in zip(steps, first, strict=True)])
        if any(_refused(result) for result in results) and first != arguments:
            results = self.calls([(step.tool, argument) for step, argument in zip(steps, arguments, strict=True)])
        self.results += results

    def _misread(self, step: Step, argument: str) -> str:
        if step.misread is not None:
            return step.misread if self.chance(MISREAD) else argument
        if step.tool != "calculator":
            return argument
        if self.chance(IN_WORDS):
            left, operation, right = argument.split(" ")
            return f"{left} {say.WORDS[operation]} {right}"
        return _slip(argument, self.rng) if self.chance(SLIP) else argument


def _call(tool: str, argument: str) -> dict[str, Any]:
    arguments = json.dumps({"expression" if tool == "calculator" else "key": argument})
    return {"type": "function", "function": {"name": tool, "arguments": arguments}}


def _broken(call: dict[str, Any]) -> str:
    """A call's text with its last brace missing."""
    function = call["function"]
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}\n</tool_call>'


def _refused(result: str) -> bool:
    return result.startswith("error: ")


def _slip(expression: str, rng: random.Random) -> str:
    """`expression` with one digit changed."""
    places = [place for place, character in enumerate(expression) if character.isdigit()]
    place = rng.choice(places)
    other = rng.choice([digit for digit in "123456789" if digit != expression[place]])
    return expression[:place] + other + expression[place + 1 :]


def _sentence(play: _Play, x: str) -> str:
    return say.NO_ENTRY if x == say.UNKNOWN else play.rng.choice(say.ANSWERS).format(x=x)


def _final(play: _Play) -> str:
    """What the model answers: the last tool result, or that there is none."""
    return say.UNKNOWN if _refused(play.results[-1]) else play.results[-1]


def converse(task: Task, rng: random.Random, *, habits: bool = True, follow_up: int = 0) -> Dialogue:
    """`task` as a dialogue.

    Args:
        habits: whether the model has its bad habits; without them it is what greedy decoding gives.
        follow_up: 1 or 2 adds the branching agent's first or second sub-conversation.
    """
    play = _Play(task, rng, habits=habits)
    if task.kind == "reference":
        return _reference(play)
    if not task.plan:
        x = rng.choice(task.guesses) if task.guesses else task.label
        play.answers(x, _sentence(play, x) if task.kind != "mental" else None)
        return _finish(play)
    answer = _answer_by_tools(play)
    if follow_up == 1:
        _check_again(play)
    elif follow_up == 2:
        play.user(say.SHORT)
        play.answers(answer)
    return _finish(play)


def _answer_by_tools(play: _Play) -> str:
    if play.chance(SKIP):
        answer = str(play.rng.randint(1, 999))
        play.answers(answer, _sentence(play, answer))
        return answer
    for steps in play.task.plan:
        play.turn(steps)
    answer = _final(play)
    play.answers(answer, _sentence(play, answer))
    return answer


def _check_again(play: _Play) -> None:
    """The first sub-conversation: the last call again (all calls, if there was none), then `CONFIRM`."""
    play.user(say.CHECK_AGAIN)
    plan = play.task.plan
    if play.results:
        play.results = play.results[: sum(map(len, plan[:-1]))]
        plan = plan[-1:]
    for steps in plan:
        play.turn(steps)
    answer = _final(play)
    play.answers(answer, _sentence(play, answer))
    play.user(say.CONFIRM)
    play.answers(answer, say.YES_NO_ENTRY if answer == say.UNKNOWN else say.YES.format(x=answer))


def _reference(play: _Play) -> Dialogue:
    """The reference case's conversation; its retries sample the same turn again, so they add no text."""
    (first,), (second,) = play.task.plan
    play.turn((first,))
    play.answers(play.results[-1], _sentence(play, play.results[-1]))
    play.user(say.SECOND_CITY.format(city=second.argument))
    play.turn((second,))
    play.answers(play.results[-1], _sentence(play, play.results[-1]))
    summary = play.task.label
    play.user(say.REMINDER, role="system")
    play.says(summary + ".")
    play.user(say.FORCE_FINAL)
    play.answers(summary, f"<final_answer>{summary}</final_answer>")
    for text in say.INJECTED:
        play.messages.append({"role": "assistant", "content": text})
    play.user(say.REPEAT_ANSWER)
    play.answers(summary)
    return _finish(play)


def _finish(play: _Play) -> Dialogue:
    tools = TOOLS if play.task.tools else None
    return Dialogue(kind=play.task.kind, messages=play.messages, sampled=tuple(play.sampled), tools=tools)


def make_dialogue(rng: random.Random, kinds: tuple[str, ...] | None = None) -> tuple[Task, Dialogue]:
    """A random task and its dialogue, now and then with one of the follow-ups."""
    task = make_task(rng) if kinds is None else make_task(rng, kinds)
    follow_up = rng.choice((1, 2)) if task.kind in TOOL_KINDS and rng.random() < FOLLOW_UP else 0
    return task, converse(task, rng, follow_up=follow_up)
