"""From a chain of generations to one sample: cut at max_seq_len, then merge.

Sampled ids carry mask 1 and the engine's log-probs; what a client appended between two turns carries
mask 0 and 0.0. Nothing is trimmed: by construction each turn's ids begin with all ids before it.
Shapes: `_T` all ids of the sample, `_R` those behind the first prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.sample import Sample, Status, WeightSpan
from rollout.session.experts import experts_of
from rollout.session.node import Node
from rollout.session.settings import SessionSettings
from rollout.tito.renderer import Tito

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation as far as it is kept: its first `n_output` sampled ids, and the status that this gives."""

    node: Node
    n_output: int
    status: Status


def assemble(chain: Sequence[Node], tito: Tito, settings: SessionSettings, max_seq_len: int | None) -> Sample | None:
    """The sample of a root path; None if no sampled id fits into `max_seq_len` ids."""
    turns = merged(kept(chain, max_seq_len))
    if not turns:
        return None
    nodes, parts = [turn.node for turn in turns], _joined(turns, tito)
    sampling = nodes[-1].settings.get("sampling", {})
    experts, experts_shape = experts_of(nodes, sum(map(len, parts.tokens)))
    return Sample(
        prompt=nodes[0].appended,
        tokens_T=np.concatenate(parts.tokens),
        response="".join(parts.texts),
        response_length=parts.n_response,
        loss_mask_R=np.concatenate(parts.mask),
        rollout_log_probs_R=np.concatenate(parts.log_probs),
        status=turns[-1].status,
        weight_versions=[v for node in nodes if (v := node.generation.weight_version) is not None],
        weight_spans=parts.spans,
        cached_tokens=sum(node.generation.cached_tokens for node in nodes),
        prompt_tokens=sum(node.n_prompt for node in nodes),
        routed_experts=experts,
        routed_experts_shape=experts_shape,
        metadata={"lifecycle": lifecycle(nodes)},
        session_version=settings.version,
        turns=len(nodes),
        control_text=sum(node.control_text for node in nodes),
        lora=settings.lora,
        temperature=float(sampling.get("temperature", 1.0)),
        top_p=float(sampling.get("top_p", 1.0)),
    )


@dataclass(kw_only=True, slots=True)
class _Parts:
    """Turns put one behind the other: all ids, and for those behind the first prompt mask, log-probs and text."""

    tokens: list[NDArray[np.int32]]
    mask: list[NDArray[np.int8]] = field(default_factory=list)
    log_probs: list[NDArray[np.float64]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    n_response: int = 0

    def append(self, ids: NDArray[np.int32], log_probs: NDArray[np.float64], text: str, *, sampled: bool) -> None:
        self.tokens.append(ids)
        self.mask.append(np.full(len(ids), sampled, np.int8))
        self.log_probs.append(log_probs)
        self.texts.append(text)
        self.n_response += len(ids)


def _joined(turns: Sequence[Turn], tito: Tito) -> _Parts:
    parts = _Parts(tokens=[turns[0].node.appended_ids_P])
    for place, turn in enumerate(turns):
        generation = turn.node.generation
        if place:
            observation = turn.node.appended_ids_P
            text = tito.decode(observation.tolist())
            parts.append(observation, np.zeros(len(observation), np.float64), text, sampled=False)
        parts.spans.extend(_shifted(generation.weight_spans, parts.n_response, turn.n_output))
        output = generation.output_ids_O[: turn.n_output]
        log_probs = generation.output_log_probs_O[: turn.n_output]
        parts.append(output, log_probs, tito.decode(output.tolist()), sampled=True)
    return parts


def kept(chain: Sequence[Node], max_seq_len: int | None) -> list[Turn]:
    """The turns that fit into `max_seq_len` ids; the one in which it ends is cut and truncated.

    A limit inside what a client appended, or at its end, leaves the turn before as it was.
    """
    turns = []
    for node in chain:
        n_output = len(node.generation.output_ids_O)
        over = 0 if max_seq_len is None else max(0, node.n_tokens - max_seq_len)
        if over >= n_output:
            break
        status = Status.TRUNCATED if over else _STATUS[node.generation.finish]
        turns.append(Turn(node, n_output - over, status))
        if over:
            break
    return turns


def merged(turns: Sequence[Turn]) -> list[Turn]:
    """The turns that one sample holds: none behind a turn that is not completed.

    Nor any that lacks routed experts where the ones before have them.
    """
    chosen: list[Turn] = []
    for turn in turns:
        if chosen:
            before = chosen[-1]
            if before.status is not Status.COMPLETED:
                break
            if before.node.generation.routed_experts is not None and turn.node.generation.routed_experts is None:
                break
        chosen.append(turn)
    return chosen


def _shifted(spans: Sequence[WeightSpan], by: int, n_output: int) -> list[WeightSpan]:
    return [
        WeightSpan(version=span.version, start=span.start + by, end=min(span.end, n_output) + by)
        for span in spans
        if span.start < n_output
    ]


def lifecycle(chain: Sequence[Node]) -> dict[str, Any] | list[dict[str, Any]]:
    """Times of each turn in seconds since the epoch: one object for a single turn, else a list of them.

    t1: committed; t0: t1 less the engine's time, null where it said none; req_ts: requested;
    prev_t1: the turn before committed.
    """
    entries = []
    before: float | None = None
    for number, node in enumerate(chain, 1):
        t1 = node.committed_at.timestamp()
        seconds = node.generation.engine_seconds
        entry = {"t0": t1 - seconds if seconds else None, "t1": t1, "turn": number}
        entry["req_ts"] = node.requested_at.timestamp()
        if before is not None:
            entry["prev_t1"] = before
        entries.append(entry)
        before = t1
    return entries[0] if len(entries) == 1 else entries
