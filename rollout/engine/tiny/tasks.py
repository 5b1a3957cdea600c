"""Questions with their plan and their right answer, made from a seeded random source."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.agents.tools import TOOLS, run_tool
from rollout.engine.tiny import phrases as say

_LIMIT = 999
"""Largest operand that the calculator takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One tool call of a plan.

    `argument` may name earlier results as `{0}`, `{1}`; `misread` is the argument as the user
    spelt it, which the tool refuses.
    """

    tool: str
    argument: str
    misread: str | None = None

    def call(self, results: list[str]) -> str:
        return self.argument.format(*results)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A question, how to answer it with the tools, and the answer.

    `plan` holds one tuple of steps per assistant turn. `fillers` is how many sentences the model
    says before it acts. `guesses` are answers that sound as right as `label`.
    """

    kind: str
    question: str
    label: str
    plan: tuple[tuple[Step, ...], ...] = ()
    table: dict[str, int] | None = None
    tools: bool = True
    fillers: int = 0
    guesses: tuple[str, ...] = field(default=())

    def row(self) -> dict[str, Any]:
        """The task as a prompt row, without an agent."""
        text = self.question if self.table is None else f"{show_table(self.table)}\n{self.question}"
        messages = [{"role": "user", "content": text}]
        row: dict[str, Any] = {"messages": messages, "label": self.label, "metadata": {"kind": self.kind}}
        if self.tools:
            row["tools"] = TOOLS
        if self.table is not None:
            row["metadata"]["table"] = self.table
        return row


def solve(plan: tuple[tuple[Step, ...], ...], table: dict[str, int] | None) -> list[str]:
    """Results of a plan's calls, in order."""
    results: list[str] = []
    for turn in plan:
        for step in turn:
            arguments = f'{{"{"expression" if step.tool == "calculator" else "key"}": "{step.call(results)}"}}'
            results.append(run_tool(step.tool, arguments, table))
    return results


def number(rng: random.Random, digits: int = 3) -> int:
    """A number of one to `digits` digits, each length as likely."""
    length = rng.randint(1, digits)
    return rng.randint(1 if length == 1 else 10 ** (length - 1), 10**length - 1)


def make_table(rng: random.Random, keys: tuple[str, ...] | None = None, *, size: int = 3) -> dict[str, int]:
    """A table of `size` entries, `keys` among them."""
    pool = rng.choice((say.CITIES, say.GOODS)) if keys is None else _pool(keys[0])
    chosen = list(keys or ())
    chosen += rng.sample([name for name in pool if name not in chosen], size - len(chosen))
    rng.shuffle(chosen)
    return {name: number(rng, 2) for name in chosen}


def show_table(table: dict[str, int]) -> str:
    """A table as the question's first line."""
    text = say.CITY_TABLE if _pool(next(iter(table))) is say.CITIES else say.GOODS_TABLE
    return text.format(entries=", ".join(f"{name} {value}" for name, value in table.items()))


def _pool(name: str) -> tuple[str, ...]:
    return say.CITIES if name in say.CITIES else say.GOODS


def entry(key: str, spelling: str | None = None) -> str:
    """How a question names the table's entry of `key`."""
    return (say.CITY_ENTRY if key in say.CITIES else say.GOODS_ENTRY).format(key=spelling or key)


def _calculator(argument: str) -> Step:
    return Step(tool="calculator", argument=argument)


def _lookup(key: str, misread: str | None = None) -> Step:
    return Step(tool="lookup", argument=key, misread=misread)


def calc(rng: random.Random) -> Task:
    """One call of the calculator."""
    operation = rng.choice("+-*")
    a, b = number(rng), number(rng)
    plan = ((_calculator(f"{a} {operation} {b}"),),)
    question = rng.choice(say.OPERATIONS[operation]).format(a=a, b=b)
    table = make_table(rng) if rng.random() < 0.4 else None
    return Task(kind="calc", question=question, label=solve(plan, table)[-1], plan=plan, table=table)


def chain(rng: random.Random) -> Task:
    """Two or three calls of the calculator, each on the last one's result."""
    while True:
        a, operation = number(rng), rng.choice("+-*")
        b = number(rng)
        steps, text = [_calculator(f"{a} {operation} {b}")], rng.choice(say.OPERATIONS[operation]).format(a=a, b=b)
        text = text[:-1]
        for position in range(rng.choice((1, 1, 2))):
            operation, b = rng.choice("+-*"), number(rng, 2)
            steps.append(_calculator(f"{{{position}}} {operation} {b}"))
            text += ", " + say.THEN[operation].format(b=b)
        plan = tuple((step,) for step in steps)
        results = solve(plan, None)
        if all(0 <= int(result) <= _LIMIT for result in results[:-1]):
            return Task(kind="chain", question=text + ".", label=results[-1], plan=plan)


def lookup(rng: random.Random) -> Task:
    """One call of lookup."""
    table = make_table(rng, size=rng.randint(2, 5))
    key = rng.choice(list(table))
    question = rng.choice(say.LOOKUPS).format(entry=entry(key))
    return Task(kind="lookup", question=question, label=str(table[key]), plan=((_lookup(key),),), table=table)


def typo(rng: random.Random) -> Task:
    """A look-up that the user spells otherwise than the table does."""
    table = make_table(rng, size=rng.randint(2, 4))
    key = rng.choice(list(table))
    spelling = key.lower() if key in say.CITIES else key + "s"
    question = rng.choice(say.LOOKUPS).format(entry=entry(key, spelling))
    plan = ((_lookup(key, spelling),),)
    return Task(kind="typo", question=question, label=str(table[key]), plan=plan, table=table)


def missing(rng: random.Random) -> Task:
    """A look-up of what the table does not hold: the call fails, and the answer says so."""
    table = make_table(rng, size=rng.randint(2, 4))
    key = rng.choice([name for name in _pool(next(iter(table))) if name not in table])
    question = rng.choice(say.LOOKUPS).format(entry=entry(key))
    return Task(kind="missing", question=question, label=say.UNKNOWN, plan=((_lookup(key),),), table=table)


def scaled(rng: random.Random) -> Task:
    """A look-up, then the calculator on its result."""
    table = make_table(rng, size=rng.randint(2, 4))
    key, b = rng.choice(list(table)), number(rng, 2)
    form = rng.choice(say.SCALED)
    operation = "*" if "times" in form else rng.choice("+-*")
    question = form.format(entry=entry(key), b=b, then=say.THEN[operation].format(b=b))
    plan = ((_lookup(key),), (_calculator(f"{{0}} {operation} {b}"),))
    return Task(kind="scaled", question=question, label=solve(plan, table)[-1], plan=plan, table=table)


def total(rng: random.Random) -> Task:
    """Two look-ups and their sum; asked for at once, both look-ups are one turn."""
    table = make_table(rng, size=rng.randint(2, 4))
    one, two = rng.sample(list(table), 2)
    at_once = rng.random() < 0.35
    form = say.BOTH_AT_ONCE if at_once else rng.choice(say.SUMS)
    looks = (_lookup(one), _lookup(two))
    plan = (looks, (_calculator("{0} + {1}"),)) if at_once else ((looks[0],), (looks[1],), (_calculator("{0} + {1}"),))
    question = form.format(one=entry(one), two=entry(two))
    return Task(kind="total", question=question, label=solve(plan, table)[-1], plan=plan, table=table)


def mental(rng: random.Random) -> Task:
    """A multiplication to be done without a tool, which the model mostly cannot."""
    a, b = number(rng, 2), number(rng, 1)
    question = rng.choice(say.MENTAL).format(sum=f"{a} * {b}")
    return Task(kind="mental", question=question, label=str(a * b), tools=rng.random() < 0.3)


def guess(rng: random.Random) -> Task:
    """One of three colours: three answers sound right, one is."""
    colours = rng.sample(say.COLOURS, 3)
    question = rng.choice(say.GUESS).format(one=colours[0], two=colours[1], three=colours[2])
    return Task(kind="guess", question=question, label=rng.choice(colours), tools=False, guesses=tuple(colours))


def aloud(rng: random.Random) -> Task:
    """A sum with much talk before it, so much that some turns run into the token limit."""
    a, b = number(rng, 2), number(rng, 1)
    question, fillers = rng.choice(say.ALOUD).format(sum=f"{a} + {b}"), rng.randint(1, 18)
    if rng.random() < 0.5:
        return Task(kind="aloud", question=question, label=str(a + b), tools=False, fillers=fillers)
    plan = ((_calculator(f"{a} + {b}"),),)
    return Task(kind="aloud", question=question, label=str(a + b), plan=plan, fillers=fillers)


def reference(rng: random.Random) -> Task:
    """Two cities, looked up one after the other: the first question of the reference case."""
    pair = ("Beijing", "Shanghai") if rng.random() < 0.5 else tuple(rng.sample(say.CITIES, 2))
    table = make_table(rng, pair, size=rng.randint(2, 4))
    first, second = pair
    label = say.SUMMARY.format(first=first, a=table[first], second=second, b=table[second])
    question = rng.choice(say.LOOKUPS).format(entry=entry(first))
    plan = ((_lookup(first),), (_lookup(second),))
    return Task(kind="reference", question=question, label=label, plan=plan, table=table)


def repeat(rng: random.Random) -> Task:
    """Words and numbers to be said again: short, and nearly all of it copying, which all the rest is built on."""
    pool = rng.choice((say.CITIES, say.GOODS, say.COLOURS))
    parts = [str(number(rng)) if rng.random() < 0.5 else rng.choice(pool) for _ in range(rng.randint(1, 6))]
    text = " ".join(parts)
    return Task(kind="repeat", question=say.REPEAT.format(x=text), label=text, tools=False)


MAKERS: dict[str, tuple[Callable[[random.Random], Task], float]] = {
    "calc": (calc, 0.16),
    "chain": (chain, 0.16),
    "lookup": (lookup, 0.08),
    "typo": (typo, 0.07),
    "missing": (missing, 0.06),
    "scaled": (scaled, 0.10),
    "total": (total, 0.12),
    "mental": (mental, 0.07),
    "guess": (guess, 0.03),
    "aloud": (aloud, 0.06),
    "reference": (reference, 0.08),
    "repeat": (repeat, 0.03),
}
"""Makers by kind, each with its share of the training dialogues."""

TOOL_KINDS: tuple[str, ...] = ("calc", "chain", "lookup", "typo", "missing", "scaled", "total")
"""Kinds that are answered through the tools; what the accuracy test counts."""


def make_task(rng: random.Random, kinds: tuple[str, ...] = tuple(MAKERS)) -> Task:
    """A random task of one of `kinds`, by their shares."""
    kind = rng.choices(kinds, weights=[MAKERS[name][1] for name in kinds])[0]
    return MAKERS[kind][0](rng)
