"""Several engines that serve the same, used as one: each session has its engine, and another one when that is gone.

A session's engine is the one with the highest hash of session and URL (rendezvous hashing): the same in every
process and after every restart, so that its prefix cache stays in one place. An engine that refuses connections, or
a router with no worker, is down: nothing was begun there, so its sessions, and only they, go at once to the next in
their own order, until it answers again and serves what the others do.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout.closing import ClosedByBlock
from rollout.engine.agreement import read_facts, require_same
from rollout.engine.client import EngineClient
from rollout.engine.retrying import unbegun
from rollout.errors import EngineError, EngineMismatch, EngineUnreachable

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds for which a request waits for any engine, at most, while all are down."""
RETRY_S = 1.0
"""Seconds between two looks at an engine that is down."""
_ABORT_S = 30.0
"""Seconds for which the engine of a request that its caller has left is remembered, for the abort that follows."""


def weight(session_id: str, url: str) -> bytes:
    """Of all engines, a session's is the one where this is highest; the next one stands in for it."""
    return hashlib.blake2b(f"{session_id}\0{url}".encode(), digest_size=8).digest()


def connect(urls: Sequence[str], *, timeout_s: float = 600.0) -> EngineClient | EnginePool:
    """A client of one engine, or of several as one."""
    return EnginePool(urls, timeout_s=timeout_s) if len(urls) > 1 else EngineClient(urls[0], timeout_s=timeout_s)


@dataclass(kw_only=True, slots=True, eq=False)
class _Member:
    """One engine. `why` it is not in use; null while it is. `returning`: looks whether it is back.

    `facts`: what it stated when it was last in use; null if it never was.
    """

    client: EngineClient
    why: str | None = "it was not asked yet"
    facts: dict[str, Any] | None = None
    returning: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.client.base_url

    def note_weights(self, reply: dict[str, Any]) -> None:
        """They change while the engine is in use, and every answer states them."""
        meta = reply.get("meta_info")
        if self.facts is not None and isinstance(meta, dict) and meta.get("weight_version") is not None:
            self.facts["weight_version"] = meta["weight_version"]


class EnginePool(ClosedByBlock):
    """As an EngineClient, in front of several engines. Belongs to one event loop.

    Before the first request all engines are asked what they serve. Those that answer must serve the same, and are
    in use from then on. Another one, and one that was down, is held against those in use when it answers, and their
    weight_version of that moment: one that comes back with older weights stays out until it has theirs. If none is in
    use, what the others served last counts, unless all answer and agree on something new. While they are in use
    engines may be given new weights one after another: every answer states its own.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = 600.0, patience_s: float = PATIENCE_S, retry_s: float = RETRY_S
    ) -> None:
        """`timeout_s`: deadline of one generation, from its arrival here to the last byte of its answer."""
        # Their own patience is none: another engine is there at once.
        self._members = [_Member(client=EngineClient(url, timeout_s=timeout_s, patience_s=0.0)) for url in urls]
        self._timeout_s, self._patience_s, self._retry_s = timeout_s, patience_s, retry_s
        self._holders: dict[str, _Member] = {}
        self._asking, self._asked = asyncio.Lock(), False
        self._mismatch: tuple[str, float] | None = None
        self._any = asyncio.Event()

    @property
    def held(self) -> int:
        """Generations that wait here until their engine's queue has room."""
        return sum(member.client.held for member in self._members)

    async def generate(self, request: dict[str, Any], *, rid: str, session_id: str | None) -> dict[str, Any]:
        """As EngineClient.generate, at the session's engine; without a session the request's own.

        Raises:
            EngineUnreachable: all engines are down, and stayed so for a while; says why for each.
            EngineError: they do not serve the same; names two and the fact that differs. Others: as EngineClient.
        """
        key = rid if session_id is None else session_id
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._timeout_s
        while True:
            member = await self._choose(key, deadline)
            left_s = deadline - clock.time()
            try:
                with self._holding(rid, member):
                    reply = await member.client.generate(request, rid=rid, session_id=session_id, timeout_s=left_s)
                member.note_weights(reply)
                return reply
            except EngineError as error:
                if unbegun(error) != "nobody" or clock.time() >= deadline:
                    raise
                self._lost(member, error)

    @contextmanager
    def _holding(self, rid: str, member: _Member) -> Iterator[None]:
        """Remember which engine has a request, for a while longer if its caller leaves: an abort follows."""
        self._holders[rid], left = member, False
        try:
            yield
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            if left:
                asyncio.get_running_loop().call_later(_ABORT_S, self._holders.pop, rid, None)
            else:
                del self._holders[rid]

    async def abort(self, rid: str) -> None:
        """Ask the engine that has a request of ours to end it; fine if none has.

        Raises:
            EngineError: it cannot be reached or refuses.
        """
        member = self._holders.get(rid)
        if member is not None:
            await member.client.abort(rid)

    async def model_info(self) -> dict[str, Any]:
        """/model_info of an engine in use.

        Raises:
            EngineError: as for `generate`, but at once.
        """
        return await self.facts("/model_info")

    async def facts(self, path: str) -> dict[str, Any]:
        """What an engine in use tells of itself at `path`.

        Raises:
            EngineError: as for `generate`, but at once.
        """
        await self._ask_first()
        for member in self._in_use():
            try:
                return await member.client.facts(path)
            except EngineUnreachable as error:
                self._lost(member, error)
        raise self._none_left()

    async def close(self) -> None:
        tasks = [member.returning for member in self._members if member.returning is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members:
            await member.client.close()

    def _in_use(self) -> list[_Member]:
        return [member for member in self._members if member.why is None]

    async def _choose(self, key: str, deadline: float) -> _Member:
        """The first engine in the order of `key` that is in use; waits while there is none."""
        await self._ask_first()
        end = min(deadline, asyncio.get_running_loop().time() + self._patience_s)
        while not (members := self._in_use()):
            try:
                async with asyncio.timeout_at(end):
                    await self._any.wait()
            except TimeoutError:
                raise self._none_left() from None
        return max(members, key=lambda member: weight(key, member.url))

    def _none_left(self) -> EngineUnreachable:
        said = "; ".join(f"{member.url}: {member.why}" for member in self._members)
        return EngineUnreachable(f"none of {len(self._members)} engines can be used: {said}")

    async def _ask_first(self) -> None:
        """Once, before anything else: ask all engines what they serve.

        Raises:
            EngineError: two differ. They are asked again by whoever comes RETRY_S later.
        """
        if self._asked:
            return
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._mismatch is not None and now < self._mismatch[1]:
                raise EngineError(self._mismatch[0])
            if not self._asked:
                try:
                    await self._ask_all()
                except EngineMismatch as error:
                    self._mismatch = str(error), now + self._retry_s
                    log.error("%s", error)
                    raise EngineError(str(error)) from error

    async def _ask_all(self) -> None:
        told = await asyncio.gather(*(self._facts_of(member) for member in self._members))
        require_same({member.url: facts for member, facts in zip(self._members, told, strict=True) if facts})
        self._asked = True
        for member, facts in zip(self._members, told, strict=True):
            if facts is None:
                self._watch(member)
            else:
                self._use(member, facts)

    async def _facts_of(self, member: _Member) -> dict[str, Any] | None:
        """Null where the engine does not answer, which it is noted for."""
        try:
            return await read_facts(member.client)
        except EngineError as error:
            member.why = str(error)
            return None

    def _use(self, member: _Member, facts: dict[str, Any]) -> None:
        member.why, member.facts = None, facts
        self._any.set()

    def _lost(self, member: _Member, error: EngineError) -> None:
        if member.why is None:
            log.warning("engine %s is down, its sessions go to others: %s", member.url, error)
            member.why = str(error)
            if not self._in_use():
                self._any.clear()
            self._watch(member)

    def _watch(self, member: _Member) -> None:
        member.returning = asyncio.create_task(self._until_back(member))

    async def _until_back(self, member: _Member) -> None:
        while member.why is not None:
            await asyncio.sleep(self._retry_s)
            facts = await self._facts_of(member)
            if facts is None:
                continue
            async with self._asking:  # two that come back at once are held against each other
                try:
                    await self._require_as_others(member, facts)
                except EngineMismatch as error:
                    if member.why != str(error):
                        log.error("engine %s stays out: %s", member.url, error)
                    member.why = str(error)
                    continue
                self._use(member, facts)
                log.warning("engine %s is in use", member.url)

    async def _require_as_others(self, member: _Member, facts: dict[str, Any]) -> None:
        """Hold an engine that answers again against the others; raises EngineMismatch."""
        others = [other for other in self._members if other is not member]
        in_use = [other for other in others if other.why is None]
        asked = in_use or others
        told = await asyncio.gather(*(read_facts(other.client) for other in asked), return_exceptions=True)
        stated = {other.url: said for other, said in zip(asked, told, strict=True) if isinstance(said, dict)}
        if len(stated) < len(asked):  # some are silent
            stated = {**_last(in_use), **stated} if in_use else _last(others)
        require_same({**stated, member.url: facts})


def _last(members: Sequence[_Member]) -> dict[str, dict[str, Any]]:
    return {member.url: member.facts for member in members if member.facts is not None}
