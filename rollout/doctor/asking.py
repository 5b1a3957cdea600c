"""One plain HTTP GET, with the moment at which it was answered."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from rollout.errors import RolloutLakeError

TIMEOUT_S = 10.0


class NoAnswer(RolloutLakeError):
    """Nobody answers at this URL; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`at`: Unix seconds in the middle between sending and receiving."""

    status: int
    body: bytes
    date: str | None
    at: float

    @property
    def json(self) -> Any:
        """The body as JSON, null where it is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


async def ask(url: str) -> Answer:
    """GET `url`, whatever status it answers.

    Raises:
        NoAnswer: no HTTP answer within TIMEOUT_S.
    """
    sent = time.time()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http,
            http.get(url) as reply,
        ):
            body = await reply.read()
    except TimeoutError as error:
        raise NoAnswer(f"{url} gave no answer within {TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(f"{url} does not answer ({type(error).__name__}: {error})") from error
    return Answer(status=reply.status, body=body, date=reply.headers.get("Date"), at=(sent + time.time()) / 2)
