"""A request's messages held against those that a session stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rollout.session.matching import Matcher, ask_matcher
from rollout.session.node import Message, Node, path_to, spelled_by
from rollout.session.request import check_message, check_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Trunk:
    """What a session's last request was let repeat: the path to `node`, in the words of `spelled`, all of it text.

    `child` is the generation that this request became. It only saves time.
    """

    node: Node
    child: Node
    spelled: list[Message]


class Replayed:
    """The messages of one request, and which stored generations they repeat.

    A client sends the whole history at every turn. What it said in the very same spelling before is
    recognised by one comparison, at once or per generation; only the rest is checked and given to the
    matcher. `known` is a generation that is repeated with all before it, found by the session's trunk.
    """

    def __init__(self, messages: list[Any], matcher: Matcher, trunk: Trunk | None = None) -> None:
        self.messages = list(messages)
        self._matcher = matcher
        self._checked: set[int] = set()
        self._trunk: Trunk | None = None
        if trunk is not None and self.messages[: len(trunk.spelled)] == trunk.spelled:
            self.messages[: len(trunk.spelled)] = trunk.spelled
            self._trunk = trunk

    @property
    def known(self) -> Node | None:
        return self._trunk.node if self._trunk else None

    def __len__(self) -> int:
        return len(self.messages)

    def repeats(self, node: Node) -> bool:
        """Whether a generation's own messages stand where it has them: what was appended, then the reply.

        Raises:
            SessionRefused: 400, one of them is no message; 500, the matcher failed.
        """
        end = node.n_messages
        if end > len(self.messages):
            return False
        start = end - 1 - len(node.appended)
        # None of the granted values is a number, so equality in Python is equality in JSON.
        if self.messages[start:end] != node.granted and not self._matches(node, start):
            return False
        if node.granted is not None:
            self.messages[start:end] = node.granted  # the same objects: later comparisons are of pointers
        return True

    def _matches(self, node: Node, start: int) -> bool:
        stored, theirs = [*node.appended, node.reply], self.messages[start : node.n_messages]
        for place, (ours, given) in enumerate(zip(stored, theirs, strict=True), start):
            self._check(place)
            if not ask_matcher(self._matcher, ours, given):
                return False
        check_text(theirs, "messages")
        granted = [ours if ours == given else given for ours, given in zip(stored, theirs, strict=True)]
        node.granted = granted if _only_text(theirs) else None
        return True

    def _check(self, place: int) -> None:
        if place not in self._checked:
            check_message(self.messages[place], place)
            self._checked.add(place)

    def check(self, start: int) -> None:
        """Check every message from this place on.

        Raises:
            SessionRefused: 400 that names the place.
        """
        for place in range(start, len(self.messages)):
            self._check(place)

    def respelled(self, parent: Node | None) -> dict[int, Message]:
        """Messages by place that are spelled otherwise than this path's last request spelled them.

        Args:
            parent: a generation that the request repeats, with all before it.
        """
        if self._trunk is not None and parent is self._trunk.child:
            start, last = len(self._trunk.spelled), [*parent.appended, parent.reply]
        else:
            start, last = 0, spelled_by(path_to(parent))
        exact = self._is_text(parent)
        pairs = enumerate(zip(last, self.messages[start:], strict=False), start)
        return {
            place: given
            for place, (before, given) in pairs
            if before is not given and (before != given or not (exact or _canonical(before) == _canonical(given)))
        }

    def spelled(self, parent: Node | None) -> list[Message] | None:
        """The messages up to and with `parent` as the request has them; null unless all of them are text."""
        return self.messages[: parent.n_messages] if parent is not None and self._is_text(parent) else None

    def _is_text(self, parent: Node | None) -> bool:
        """Whether no message that the request repeats has a number."""
        if self._trunk is not None and parent is self._trunk.child:
            return parent.granted is not None
        return all(node.granted is not None for node in path_to(parent))


def _only_text(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_only_text, value.values()))
    return all(map(_only_text, value)) if isinstance(value, list) else value is None or isinstance(value, str)


def _canonical(message: Message) -> bytes:
    """JSON that tells 1, 1.0 and true apart, as `==` does not."""
    return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
