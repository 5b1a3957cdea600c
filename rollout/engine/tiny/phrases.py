"""Every fixed text of the tiny checkpoint's dialogues: what users, agents and the model say.

Agents send these texts word for word, because a model this small knows no others.
"""

from __future__ import annotations

CHECK_AGAIN = "Check the last call and run it again."
"""Follow-up of the branching agent's first sub-conversation: the model calls a tool, then answers."""

CONFIRM = "Are you sure? Give the final answer."
"""The first sub-conversation's second user message: the model answers without a tool."""

SHORT = "Only the answer line, please."
"""The branching agent's second sub-conversation: the model gives the answer line alone."""

BRANCH_FIRST: tuple[str, ...] = (CHECK_AGAIN, CONFIRM)
"""User messages of the first sub-conversation, in order; each starts a tool loop."""

BRANCH_SECOND: tuple[str, ...] = (SHORT,)
"""User messages of the second sub-conversation, in order."""

REASK = "That tool call could not be read. Write it again."
"""What an agent says when the model's turn holds a tool call that does not parse."""

SECOND_CITY = "And in {city}?"
REMINDER = "Reminder: sum up both cities in one line."
FORCE_FINAL = "Put the summary into final_answer tags."
INJECTED: tuple[str, ...] = ("I have the summary.", "Both values come from the table.")
REPEAT_ANSWER = "Thanks. Repeat the answer line."
"""The reference case's later messages: second question, system reminder, final request, the two
assistant messages that the agent injects, and the user message behind them."""

CITIES: tuple[str, ...] = (
    "Beijing", "Shanghai", "Paris", "Oslo", "Rome", "Lima", "Cairo", "Delhi",
    "Tokyo", "Berlin", "Madrid", "Vienna", "Prague", "Dublin", "Athens", "Quito",
)  # fmt: skip
GOODS: tuple[str, ...] = (
    "apple", "pear", "plum", "lemon", "melon", "carrot", "onion", "banana",
    "olive", "bean", "nut", "egg", "grape", "pepper", "cake", "bun",
)  # fmt: skip
COLOURS: tuple[str, ...] = ("red", "green", "blue", "white", "black", "pink", "brown", "grey", "gold", "violet")

CITY_TABLE = "Temperatures: {entries}."
GOODS_TABLE = "Prices: {entries}."
CITY_ENTRY = "the temperature in {key}"
GOODS_ENTRY = "the price of {key}"

OPERATIONS: dict[str, tuple[str, ...]] = {
    "+": ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "Compute {a} + {b}."),
    "-": ("What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.", "Compute {a} - {b}."),
    "*": ("What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.", "Compute {a} * {b}."),
}
WORDS: dict[str, str] = {"+": "plus", "-": "minus", "*": "times"}
THEN: dict[str, str] = {"+": "then add {b}", "-": "then subtract {b}", "*": "then multiply by {b}"}

LOOKUPS: tuple[str, ...] = ("What is {entry}?", "Tell me {entry}.", "Look up {entry}.")
SCALED: tuple[str, ...] = ("What is {entry} times {b}?", "Take {entry}, {then}.")
SUMS: tuple[str, ...] = ("What is {one} plus {two}?", "Add {one} and {two}.")
BOTH_AT_ONCE = "At once: {one} plus {two}?"
"""Asks for two lookups in one turn."""

MENTAL: tuple[str, ...] = ("In your head: {sum}", "Without a tool: {sum}")
ALOUD: tuple[str, ...] = ("Think aloud: {sum}", "Take your time: {sum}")
GUESS: tuple[str, ...] = (
    "I think of {one}, {two} or {three}. Which is it?",
    "Guess my colour: {one}, {two} or {three}.",
)

REPEAT = "Repeat: {x}"

ANSWERS: tuple[str, ...] = ("It is {x}.", "The result is {x}.", "That gives {x}.")
NO_ENTRY = "There is no such entry."
YES = "Yes, it is {x}."
YES_NO_ENTRY = "Yes, there is no such entry."
SUMMARY = "{first} {a}, {second} {b}"
ANSWER_LINE = "Answer: {x}"
UNKNOWN = "unknown"
FILLERS: tuple[str, ...] = (
    "Let me see.", "I look at the numbers again.", "This needs some care.", "One step at a time.",
    "First I read the question.", "I write the numbers down.", "Hmm, that is not easy.", "I could be wrong here.",
    "Let me try it another way.", "I count it on my fingers.", "That looks about right.", "Once more from the start.",
)  # fmt: skip
