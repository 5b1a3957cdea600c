"""A chat body that begins as the session's last one did: of it only what is new is parsed.

A client sends its whole history at every turn, nearly always in the bytes of the turn before. What they mean is
known, so reading a body costs what is new in it, and one comparison of bytes.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollout.session.incoming import drop_parsed_arguments

_FIRST, _LAST = uuid.uuid4().hex, uuid.uuid4().hex
"""Elements that no client can send, as none knows them: they tell `messages` from all that only looks like it."""
_OPENED = b'{"messages":["%b"' % _FIRST.encode()
"""What is parsed in place of the known bytes: they, too, end behind an element of `messages`."""
_CLOSED = b',"%b"]}' % _LAST.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resent:
    """What is known of the last chat body.

    It is `known`, which means `fields` and ends behind the last of their messages, and then `rest`, in which the
    messages `added` stand. While nothing is known, `rest` is all of it. It only saves time.
    """

    known: bytes = b""
    fields: dict[str, Any] = field(default_factory=dict)
    rest: bytes = b""
    added: list[Any] = field(default_factory=list)

    def read(self, content: bytes) -> tuple[Any, Resent]:
        """The body as orjson reads it, without what `drop_parsed_arguments` drops; and what is known for the next.

        Messages are the last body's own objects where they can be: nobody may change them.

        Raises:
            orjson.JSONDecodeError: no JSON.
        """
        same = self._grown(content) if content.startswith(self.known) else Resent()
        rest = content[len(same.known) :]
        new = same._continued(rest) if same.known else None
        if new is None:
            return _parsed(content), Resent(rest=content)
        messages = [*same.fields["messages"], *new["messages"]]
        body = {**same.fields, **new, "messages": messages}
        return body, Resent(known=same.known, fields=same.fields, rest=rest, added=new["messages"])

    def holding(self, messages: list[Any] | None) -> Resent:
        """The same with a session's own objects for the first messages, which say the same: no text is kept twice."""
        if not self.known or not messages:
            return self
        held = [*messages, *[*self.fields["messages"], *self.added][len(messages) :]]
        end = len(self.fields["messages"])
        fields = {**self.fields, "messages": held[:end]}
        return Resent(known=self.known, fields=fields, rest=self.rest, added=held[end:])

    def _grown(self, content: bytes) -> Resent:
        """With the last body's messages all known, if `content` goes on where they end."""
        start = len(self.known)
        end = _shared(self.rest, content[start:])
        if self.rest[end : end + 1] != b"]" or content[start + end : start + end + 1] != b",":
            return self
        try:
            fields = _parsed((_OPENED if self.known else b"") + self.rest[:end] + _CLOSED)
        except orjson.JSONDecodeError:
            return self  # inside of a text, or deeper
        messages = fields.get("messages")
        if not isinstance(messages, list) or messages[-1:] != [_LAST]:
            return self  # another field's list
        del messages[-1]
        if self.known:
            fields = {**self.fields, "messages": [*self.fields["messages"], *self.added]}
        return Resent(known=content[: start + end], fields=fields)

    def _continued(self, rest: bytes) -> dict[str, Any] | None:
        """The fields in `rest`, `messages` with the new ones only; null where the body must be read as a whole."""
        try:
            new: dict[str, Any] = _parsed(_OPENED + rest)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(new["messages"], list) or new["messages"][:1] != [_FIRST]:
            return None  # `rest` has a `messages` of its own
        del new["messages"][0]
        return new


def _parsed(content: bytes) -> Any:
    body = orjson.loads(content)
    if b"parsed_arguments" in content:
        drop_parsed_arguments(body)
    return body


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
