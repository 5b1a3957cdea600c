"""From a session's generations to its samples: assembled, picked, finished, with an agent's metadata laid over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollout.errors import SessionRefused
from rollout.sample import Sample
from rollout.session import tree
from rollout.session.assembly import assemble
from rollout.session.drift import PathDrift
from rollout.session.finishing import find_finisher
from rollout.session.node import Message, Node, history_of, path_to
from rollout.session.picking import LeafSample, pick
from rollout.session.settings import SessionSettings
from rollout.tito.renderer import Tito

SERVER_KEYS = ("accumulated_token_ids", "tito_session_mismatch", "leaf", "lifecycle")
"""Keys of a sample's metadata that an agent can neither override nor plant."""


@dataclass(kw_only=True, slots=True)
class SamplesReply:
    """What a session gives for training. `empty_reason` says why there is none: no_records, all_truncated.

    `messages` has each sample's whole conversation; `exchanges` counts those of the tape at this moment.
    """

    samples: list[Sample]
    empty_reason: str | None = None
    session_metadata: dict[str, Any] = field(default_factory=dict)
    messages: list[list[Message]] = field(default_factory=list)
    exchanges: int = 0


def collect(
    nodes: Sequence[Node], made: list[LeafSample], view: dict[str, Any], agent: dict[str, Any], drift: PathDrift | None
) -> SamplesReply:
    """The reply that gives a session's samples.

    Args:
        made: what make_samples made of `nodes`.
        view: the session's metadata.
        agent: an agent's metadata, laid over each sample's.
        drift: compares each sample's path; null leaves the column null.
    """
    for leaf in made:
        _overlay(leaf.sample, agent)
        mismatch = drift.of(leaf.path) if drift is not None else None
        leaf.sample.drift = None if mismatch is None else orjson.dumps(mismatch).decode()
    return SamplesReply(
        samples=[leaf.sample for leaf in made],
        empty_reason=None if made else "all_truncated" if nodes else "no_records",
        session_metadata=view,
        messages=[history_of(leaf.path) for leaf in made],
        exchanges=len(nodes),
    )


def make_samples(
    nodes: Sequence[Node], line: Sequence[Node], tito: Tito, settings: SessionSettings, max_seq_len: int | None
) -> list[LeafSample]:
    """Samples of a session: one of v1's `line`, one per picked leaf of v2's `nodes`, the main one first.

    Raises:
        SessionRefused: 422, a picker or finisher failed.
    """
    if not nodes:
        return []
    if settings.version == "v1":
        return _linear(line, tito, settings, max_seq_len)
    return _leaves(nodes, tito, settings, max_seq_len)


def _linear(line: Sequence[Node], tito: Tito, settings: SessionSettings, max_seq_len: int | None) -> list[LeafSample]:
    path = list(line)
    sample = assemble(path, tito, settings, max_seq_len)
    return [] if sample is None else [LeafSample(path, sample)]


def _leaves(nodes: Sequence[Node], tito: Tito, settings: SessionSettings, max_seq_len: int | None) -> list[LeafSample]:
    made = []
    for leaf in tree.leaves(nodes):
        path = path_to(leaf)
        sample = assemble(path, tito, settings, max_seq_len)
        if sample is not None:
            _describe_leaf(sample, path, settings)
            made.append(LeafSample(path, sample))
    picker, finisher = settings.picker, settings.finisher
    try:
        chosen = pick(picker, made)
        find_finisher(finisher)(chosen)
    except SessionRefused:
        raise
    except Exception as error:
        text = f"session sample hook failed (picker={picker}, postprocessor={finisher}): {error}"
        raise SessionRefused(422, text) from error
    return chosen


def _describe_leaf(sample: Sample, path: list[Node], settings: SessionSettings) -> None:
    leaf = path[-1]
    sample.leaf_path = [node.seq for node in path]
    sample.picker, sample.finisher = settings.picker, settings.finisher
    sample.metadata["leaf"] = {
        "node_id": leaf.seq,
        "parent": leaf.parent.seq if leaf.parent else None,
        "path_node_ids": sample.leaf_path,
        "response_id": leaf.rid,
    }


def _overlay(sample: Sample, agent: dict[str, Any]) -> None:
    sample.metadata |= {key: value for key, value in agent.items() if key not in SERVER_KEYS}
    if agent.get("reward") is not None:
        sample.reward = float(agent["reward"])
