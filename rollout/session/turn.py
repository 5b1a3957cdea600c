"""A request on its way: what `begin` found out, and all that `commit` needs. Not part of a session's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rollout.engine.generation import AskedExperts
from rollout.session.node import Message, Node, path_to, tokens_of
from rollout.session.request import ChatRequest
from rollout.session.sampling import with_turn_ends
from rollout.session.shadow import Decision


@dataclass(kw_only=True, eq=False)
class Turn:
    """One running generation.

    `parent` is the node that it extends, None for a root. `recorded` is None until the commit, which
    says whether the turn became part of the session (a v1 answer that lost a race does not).
    `refusal` says why the renderer's bridge could not be used, None where it was; `unknown_results`
    counts runs of tool results with an id that no call has; `shadow` is what the session's shadow
    matcher would have decided, None without one; `spelled` as Replayed.spelled of the parent.
    `experts` are the routed experts that the engine is asked for.
    """

    request: ChatRequest
    parent: Node | None
    appended: list[Message]
    respelled: dict[int, Message]
    appended_ids_P: NDArray[np.int32]
    open_length: int
    control_text: int
    digest: blake2b
    sampling: dict[str, Any]
    max_new_tokens: int | None
    sampling_seed: int | None
    stop_token_ids: list[int]
    lora: str | None
    experts: AskedExperts | None
    seen: int
    requested_at: datetime
    refusal: str | None = None
    unknown_results: int = 0
    unreadable_calls: int = 0
    shadow: Decision | None = None
    spelled: list[Message] | None = None
    recorded: bool | None = field(default=None)

    @cached_property
    def prompt_ids_T(self) -> NDArray[np.int32]:
        """All ids of the prompt (int32)."""
        return np.concatenate([tokens_of(path_to(self.parent)), self.appended_ids_P])

    @property
    def prompt_ids(self) -> list[int]:
        """All ids of the prompt as a list."""
        ids: list[int] = self.prompt_ids_T.tolist()
        return ids

    @property
    def n_prompt(self) -> int:
        return (self.parent.n_tokens if self.parent else 0) + len(self.appended_ids_P)

    @property
    def engine_request(self) -> dict[str, Any]:
        """The body of POST /generate, without rid. No prompt log-probs: they would defeat the prefix cache."""
        return self._request(self.prompt_ids)

    @property
    def engine_body(self) -> dict[str, Any]:
        """`engine_request` for orjson, its ids written already: a long prompt never becomes Python integers."""
        return self._request(orjson.Fragment(b"[%b]" % self.written_ids))

    @cached_property
    def written_ids(self) -> bytes:
        """The prompt's ids as JSON without brackets: written anew only behind what the parent has kept."""
        before = self.parent.written_ids if self.parent else None
        return _joined(before, self.appended_ids_P) if before else write_ids(self.prompt_ids_T)

    def written_with(self, output_ids_O: NDArray[np.int32]) -> bytes | None:
        """The same up to and with sampled ids; None where the prompt was never written."""
        written = self.__dict__.get("written_ids")
        return _joined(written, output_ids_O) if written else None

    def _request(self, input_ids: Any) -> dict[str, Any]:
        stops = with_turn_ends(self.sampling.get("stop_token_ids", []), self.stop_token_ids)
        parameters = {**self.sampling, "stop_token_ids": stops}
        if self.max_new_tokens is not None:
            parameters["max_new_tokens"] = self.max_new_tokens
            if "min_new_tokens" in parameters:
                parameters["min_new_tokens"] = min(parameters["min_new_tokens"], self.max_new_tokens)
        if self.sampling_seed is not None:
            parameters["sampling_seed"] = self.sampling_seed
        request: dict[str, Any] = {"input_ids": input_ids, "sampling_params": parameters, "return_logprob": True}
        if self.lora:
            request["lora_path"] = self.lora
        if self.experts is not None:
            request |= {"return_routed_experts": True, "routed_experts_start_len": self.experts.start}
        return request


def write_ids(ids: NDArray[np.int32]) -> bytes:
    """Ids as JSON without brackets."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _joined(before: bytes, ids: NDArray[np.int32]) -> bytes:
    return b"%b,%b" % (before, write_ids(ids)) if len(ids) else before
