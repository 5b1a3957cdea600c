"""The trunk saves time only: with it and without it a session is the same, byte for byte."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import strategies as st
from scripted import Conversation, tiny_tito, user
from session_dump import dump
from strategies import SMALL_VOCABULARY
from thousands import twice

from rollout.errors import SessionRefused
from rollout.session.session import Session

TITO = tiny_tito()

_ids = st.lists(st.integers(0, SMALL_VOCABULARY - 1), min_size=1, max_size=4)
_spellings = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 9), st.sampled_from(["name", "n"]), st.sampled_from(["a", "b", 1, 1.0, True, None])),
)
talks = st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 1, 2, 5]), _spellings, _ids), min_size=3, max_size=14)
"""How many of the newest messages a request leaves out, a key added to one that it repeats, and what is sampled."""


class WithoutTrunk(Session):
    """A session that looks at every generation of every request."""

    def _usable_trunk(self, seen: int) -> None:
        return None


def play(talk: Conversation, steps: list[Any]) -> list[Any]:
    """What a client hears."""
    history: list[dict[str, Any]] = []
    heard: list[Any] = []
    for number, (left_out, spelling, ids) in zip(count(), steps, strict=False):
        messages = [*history[: len(history) - 2 * left_out], user(f"{number}")]
        if spelling is not None:
            place, key, value = spelling
            place %= len(messages)
            messages[place] = {**messages[place], key: value}
        try:
            turn = talk.begin(messages)
        except SessionRefused as refusal:
            heard.append(str(refusal))
            continue
        history = [*messages, talk.commit(turn, ids, "stop")]
        heard.append(history[-1])
    return heard


def check(version: str, steps: list[Any]) -> None:
    talks = [Conversation(TITO, version, seed="07") for _ in range(2)]
    talks[1].session.__class__ = WithoutTrunk
    heard = [play(talk, steps) for talk in talks]
    assert heard[0] == heard[1]
    assert dump(talks[0].session) == dump(talks[1].session)


test_a_session_is_the_same_without_its_trunk, test_a_session_without_its_trunk_thousands = twice(
    check, version=st.sampled_from(["v1", "v2"]), steps=talks, fast=100, full=3000
)


def test_a_straight_conversation_uses_its_trunk() -> None:
    talk = Conversation(TITO, "v2", seed="07")
    for number in range(4):
        talk.ask(user(str(number)))
    turn = talk.begin([*talk.history, user("last")])
    trunk = talk.session._trunk
    assert trunk is not None and trunk.child is turn.parent
    assert trunk.spelled == talk.history[: len(trunk.spelled)]
