"""One generation for a request that is sent again while its first still runs, if it says that it is the same.

It says so by the Idempotency-Key of the first, or, without one, by the retry count that the vendors' SDKs
send. Equal bodies without such a mark are siblings: best-of-n sends them on purpose. Once the first has
ended, a repeat is a turn of its own, whatever its mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollout.errors import SessionRefused
from rollout.session.turn import Turn

KEY_HEADER = "Idempotency-Key"
RETRY_HEADER = "x-stainless-retry-count"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What a request is known by when it comes again: its endpoint, its body byte for byte, and its marks."""

    path: str
    body: bytes
    key: str | None = None
    is_repeat: bool = False

    @classmethod
    def of(cls, path: str, body: bytes, headers: Mapping[str, str]) -> Sent:
        count = headers.get(RETRY_HEADER, "")
        return cls(
            path=path,
            body=body,
            key=headers.get(KEY_HEADER) or None,
            is_repeat=count.isascii() and count.isdigit() and bool(count.strip("0")),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Running:
    """One generation: what asked for it first, its turn, and how many clients wait for it.

    `task` gives the chat.completion. `answers` counts the requests that it was begun or joined for.
    """

    rid: str
    sent: Sent
    turn: Turn
    task: asyncio.Task[dict[str, Any]]
    waiting: int = 1
    answers: int = 1


def find_running(generations: Iterable[Running], sent: Sent) -> Running | None:
    """The running generation that `sent` asks for again; None where it is a request of its own.

    Of several siblings it is one that has been joined least, the oldest of them: each repeat its own.

    Raises:
        SessionRefused: 409, the key was sent with another request, which still runs.
    """
    if sent.key is not None:
        same_key = [one for one in generations if one.sent.key == sent.key]
        if any(not _is_same(one.sent, sent) for one in same_key):
            raise SessionRefused(
                409, f"{KEY_HEADER}: another request with this key still runs; a repeat has the same path and body"
            )
        found = same_key
    elif sent.is_repeat:
        found = [one for one in generations if _is_same(one.sent, sent)]
    else:
        return None
    return min(found, key=lambda one: one.answers, default=None)


def _is_same(first: Sent, again: Sent) -> bool:
    return first.path == again.path and (first.body == again.body or _canonical(first.body) == _canonical(again.body))


def _canonical(body: bytes) -> bytes:
    """The body whatever its spacing and the order of its keys; as it is where that cannot be said."""
    try:
        return orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # empty; deeper than orjson writes, though it reads it
        return body
