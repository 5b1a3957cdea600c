"""One conversation: requests come in, generations are committed, samples and the tape come out.

Pure: no IO, no clock, no randomness. The server drives it with an engine, a replay with a tape. All
methods are synchronous, so under asyncio each is one step; generations run between `begin` and `commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np

from rollout.engine.generation import Generation
from rollout.errors import SessionRefused
from rollout.session import linear, tree
from rollout.session.collecting import SamplesReply, collect, make_samples
from rollout.session.committing import answer_turn, make_node
from rollout.session.drift import PathDrift
from rollout.session.experts import ask_experts
from rollout.session.matching import find_matcher
from rollout.session.node import Node, ids_bytes, path_to, start_digest
from rollout.session.opening import check_settings
from rollout.session.prompting import Prompt, make_prompt
from rollout.session.recording import record_tape
from rollout.session.replayed import Replayed, Trunk
from rollout.session.request import ChatRequest, read_request
from rollout.session.room import Room
from rollout.session.sampling import read_pins
from rollout.session.seeds import Seeds
from rollout.session.settings import SessionSettings
from rollout.session.shadow import open_shadow
from rollout.session.tape import Tape
from rollout.session.turn import Turn
from rollout.session.views import metadata_view
from rollout.tito.renderer import Tito


def open_session(
    settings: SessionSettings, tito: Tito, session_id: str, *, context_length: int | None = None
) -> Session:
    """A new session.

    Args:
        context_length: the model's context in tokens, where it is known: caps what a turn may sample.

    Raises:
        UnknownPart: a matcher, shadow matcher, picker or finisher that there is not.
        SessionRefused: 400, a setting out of bounds; the message names it.
    """
    check_settings(settings, tito)
    return Session(settings, tito, session_id, context_length)


class Session:
    """A conversation under one version's rules. `nodes` are its generations in commit order.

    `keep` gets each new node before it is one of them; what it raises leaves the session as it was, and
    the turn to be released.
    """

    def __init__(self, settings: SessionSettings, tito: Tito, session_id: str, context_length: int | None) -> None:
        """Use `open_session`, which checks the settings."""
        self.settings = settings
        self.session_id = session_id
        self.nodes: list[Node] = []
        self.line: list[Node] = []
        self.roots: list[Node] = []
        self.keep: Callable[[Node], None] | None = None
        self._trunk: Trunk | None = None
        self._forked = False
        self._tito = tito
        self._drift = PathDrift(tito, settings)
        self._matcher = find_matcher(settings.matcher)
        self._shadow = open_shadow(settings)
        self._pins = read_pins(settings.sampling, vocabulary=tito.vocabulary)
        self._seeds = Seeds(settings.seed)
        self._room = Room(settings.max_seq_len, context_length)
        self._routed = tito.tokenizer.routed if settings.routed_experts else None
        self._running: set[Turn] = set()

    @property
    def running(self) -> int:
        """Generations that were begun and neither committed nor released."""
        return len(self._running)

    def begin(self, body: Any, *, requested_at: datetime, seen: int | None = None) -> Turn:
        """Check a chat body, find what it extends, and make its prompt. The conversation does not change.

        Every turn that is begun is later committed or released.

        Args:
            body: the parsed OpenAI chat body.
            seen: a replay of concurrent requests: only the first `seen` generations were there.

        Raises:
            SessionRefused: with HTTP status and text; nothing has changed then.
        """
        request = self._read(body)
        seen = len(self.nodes) if seen is None else seen
        self._check_turns()
        replayed, prompt = self._prompt(request, seen)
        turn = self._turn(request, replayed, prompt, requested_at, seen)
        self._running.add(turn)
        return turn

    def count(self, body: Any) -> int:
        """Ids of the prompt that `begin` would make of a chat body; no limit of turns or tokens counts.

        Raises:
            SessionRefused: as for `begin`.
        """
        return self._prompt(self._read(body), len(self.nodes))[1].n_tokens

    def _read(self, body: Any) -> ChatRequest:
        return read_request(
            body,
            vocabulary=self._tito.vocabulary,
            thinking=self.settings.enable_thinking,
            template_fields=self._tito.template_fields,
        )

    def _prompt(self, request: ChatRequest, seen: int) -> tuple[Replayed, Prompt]:
        replayed = Replayed(request.messages, self._matcher, self._usable_trunk(seen))
        parent = self._locate(replayed, seen)
        replayed.check(parent.n_messages if parent else 0)
        return replayed, make_prompt(request, parent, self._tito, self.settings)

    def _usable_trunk(self, seen: int) -> Trunk | None:
        """The trunk, if the search for what a request repeats may begin at its end: no other path can match then."""
        if self._trunk is None or (self.settings.version == "v2" and (self._forked or self._trunk.node.seq >= seen)):
            return None
        return self._trunk

    def commit(self, turn: Turn, generation: Generation, *, committed_at: datetime, rid: str = "") -> dict[str, Any]:
        """Make a turn's generation part of the conversation and give the client's chat.completion.

        In v1 a turn that another one overtook is answered and not recorded (`turn.recorded`).
        """
        message, reply = answer_turn(turn, generation, self._tito, rid=rid, committed_at=committed_at)
        turn.recorded = self.settings.version == "v2" or turn.seen == len(self.nodes)
        if turn.recorded:
            before = self.nodes[-1] if self.nodes else None
            node = make_node(turn, generation, message, before, rid=rid, committed_at=committed_at)
            self._attach(node)
            self._trunk = None
            if turn.parent is not None and turn.spelled is not None:
                self._trunk = Trunk(node=turn.parent, child=node, spelled=turn.spelled)
            self._seeds.count(turn.digest.digest())
            if self._shadow is not None and turn.shadow is not None:
                self._shadow.count(turn.shadow)
        self._running.discard(turn)
        return reply

    def release(self, turn: Turn) -> None:
        """Forget a turn whose generation failed or was cancelled."""
        self._running.discard(turn)

    def samples(
        self, *, max_seq_len: int | None = None, metadata: dict[str, Any] | None = None, drift: bool = True
    ) -> SamplesReply:
        """The session's samples: one in v1, one per picked leaf in v2, the main one first.

        Args:
            max_seq_len: cut each at so many ids.
            metadata: an agent's, laid over each sample's in v2; its `reward` becomes their reward.
            drift: compare each path with its template; a replay that wants the payload alone need not.

        Raises:
            SessionRefused: 422, a picker or finisher failed.
        """
        made = make_samples(self.nodes, self.line, self._tito, self.settings, max_seq_len)
        agent = metadata if self.settings.version == "v2" else None
        compared = self._drift if drift else None
        view = metadata_view(self.active_path(), self._tree(), agent, self._shadow, compared)
        return collect(self.nodes, made, view, agent or {}, compared)

    def tape(self, *, refused: dict[str, int] | None = None) -> Tape:
        """Every committed exchange in commit order; `refused` counts what was not, by HTTP status."""
        return record_tape(self.session_id, self.settings, self.nodes, refused or {})

    def active_path(self) -> list[Node]:
        """The path that GET shows: v1's line; in v2 that of the generation committed last."""
        if self.settings.version == "v1":
            return list(self.line)
        return path_to(self.nodes[-1] if self.nodes else None)

    def metadata(self) -> dict[str, Any]:
        """Session metadata, the same in GET and beside samples."""
        return metadata_view(self.active_path(), self._tree(), None, self._shadow, self._drift)

    def _tree(self) -> list[Node] | None:
        return self.nodes if self.settings.version == "v2" else None

    def _check_turns(self) -> None:
        begun, limit = len(self.nodes) + len(self._running), self.settings.max_turns
        if limit is not None and begun >= limit:
            raise SessionRefused(429, f"the session has had its max_turns={limit} turns", code="max_turns")
        if self.settings.version == "v2" and begun >= tree.MAX_NODES:
            raise SessionRefused(409, f"the session has its {tree.MAX_NODES} generations; open a new one")

    def _locate(self, request: Replayed, seen: int) -> Node | None:
        if self.settings.version == "v1":
            return linear.locate(self.line, request)
        return tree.locate(self.roots, request, seen=seen)

    def _turn(
        self, request: ChatRequest, replayed: Replayed, prompt: Prompt, requested_at: datetime, seen: int
    ) -> Turn:
        parent = prompt.parent
        appended_ids = np.array(prompt.rendered.ids, np.int32)
        digest = parent.digest.copy() if parent else start_digest()
        digest.update(ids_bytes(appended_ids))
        sampling = {**request.sampling, **self._pins}
        return Turn(
            request=request,
            parent=parent,
            appended=prompt.appended,
            respelled=replayed.respelled(parent),
            appended_ids_P=appended_ids,
            open_length=prompt.rendered.open_length,
            control_text=prompt.control_text,
            digest=digest,
            sampling=sampling,
            max_new_tokens=self._room.behind(prompt.n_tokens, sampling.get("max_new_tokens")),
            sampling_seed=self._seeds.of(digest.digest(), self._running, request.seed),
            stop_token_ids=self._tito.stop_token_ids,
            lora=self.settings.lora,
            experts=ask_experts(parent, self._routed),
            seen=seen,
            requested_at=requested_at,
            refusal=prompt.rendered.refusal,
            unknown_results=prompt.unknown_results,
            shadow=None if self._shadow is None else self._shadow.decide(replayed, seen, self._locate),
            spelled=replayed.spelled(parent),
        )

    def _attach(self, node: Node) -> None:
        if self.keep is not None:
            self.keep(node)
        if self.nodes:
            self.nodes[-1].written_ids = None
        self.nodes.append(node)
        siblings = node.parent.children if node.parent else self.roots
        self._forked = self._forked or bool(siblings)
        siblings.append(node)
        if self.settings.version == "v1":
            linear.attach(self.line, node)
