"""From a chain of generations to one sample: cut at max_seq_len, then merge.

Sampled ids carry mask 1 and the engine's log-probs; what a client appended between two turns carries
mask 0 and 0.0. Nothing is trimmed: by construction each turn's ids begin with all ids before it.
Shapes: `_T` all ids of the sample, `_R` those behind the first prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    first, last = turns[0].node, turns[-1]
    tokens, mask, log_probs, texts, spans = [first.appended_ids_P], [], [], [], []
    n_response = 0
    for place, turn in enumerate(turns):
        generation = turn.node.generation
        if place:
            observation = turn.node.appended_ids_P
            tokens.append(observation)
            mask.append(np.zeros(len(observation), np.int8))
            log_probs.append(np.zeros(len(observation), np.float64))
            texts.append(tito.decode(observation.tolist()))
            n_response += len(observation)
        output = generation.output_ids_O[: turn.n_output]
        tokens.append(output)
        mask.append(np.ones(len(output), np.int8))
        log_probs.append(generation.output_log_probs_O[: turn.n_output])
        texts.append(tito.decode(output.tolist()))
        spans.extend(_shifted(generation.weight_spans, n_response, turn.n_output))
        n_response += len(output)
    sampling = last.node.settings.get("sampling", {})
    experts, experts_shape = experts_of([turn.node for turn in turns], len(first.appended_ids_P) + n_response)
    return Sample(
        prompt=first.appended,
        tokens_T=np.concatenate(tokens),
        response="".join(texts),
        response_length=n_response,
        loss_mask_R=np.concatenate(mask),
        rollout_log_probs_R=np.concatenate(log_probs),
        status=last.status,
        weight_versions=[v for turn in turns if (v := turn.node.generation.weight_version) is not None],
        weight_spans=spans,
        cached_tokens=sum(turn.node.generation.cached_tokens for turn in turns),
        prompt_tokens=sum(turn.node.n_prompt for turn in turns),
        routed_experts=experts,
        routed_experts_shape=experts_shape,
        metadata={"lifecycle": lifecycle([turn.node for turn in turns])},
        session_version=settings.version,
        turns=len(turns),
        control_text=sum(turn.node.control_text for turn in turns),
        lora=settings.lora,
        temperature=float(sampling.get("temperature", 1.0)),
        top_p=float(sampling.get("top_p", 1.0)),
    )


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
