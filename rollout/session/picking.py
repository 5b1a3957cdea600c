"""Which leaves of a v2 session become samples. Pure selection: a picker returns some of what it got.

Order matters: the first sample is the main one. A user's own picker is a function of the leaves alone:
what it returns for the same leaves is the same, or the batch's replay differs and is not published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rollout.errors import SessionRefused
from rollout.parts import PICKERS, load_hook
from rollout.sample import Sample
from rollout.session.node import Node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LeafSample:
    """A leaf with its root path and the sample that was made of it."""

    path: list[Node]
    sample: Sample

    @property
    def leaf(self) -> Node:
        return self.path[-1]


Picker = Callable[[Sequence[LeafSample]], list[LeafSample]]


def drop_retries(leaves: Sequence[LeafSample]) -> list[LeafSample]:
    """All leaves but abandoned attempts: those whose parent has a later child. The deepest path comes first.

    Roots are never dropped, nor is a branch that went on beyond one generation. Creation order alone
    decides; what looks odd beside it (a longer attempt, a clock that ran backwards) is logged.
    """
    for leaf in leaves:
        if _was_retried(leaf.leaf):
            _warn(leaf.leaf)
    return _main_first(leaf for leaf in leaves if not _was_retried(leaf.leaf))


def keep_all(leaves: Sequence[LeafSample]) -> list[LeafSample]:
    """Every leaf, the deepest path first."""
    return _main_first(leaves)


def find_picker(name: str) -> Picker:
    """The installed picker of this exact name (entry points of rollout.pickers, see rollout.parts).

    Raises:
        UnknownPart: there is none, or it does not take the leaves.
    """
    return load_hook(PICKERS, name, "pick(leaves)", 1)


def pick(name: str, leaves: Sequence[LeafSample]) -> list[LeafSample]:
    """The chosen leaves.

    Raises:
        SessionRefused: 422, the picker returned something that it was not given, or one leaf twice, or
            changed a sample.
    """
    before = [frozen(leaf.sample) for leaf in leaves]
    chosen = list(find_picker(name)(leaves))
    if before != [frozen(leaf.sample) for leaf in leaves]:
        raise SessionRefused(422, "pick hook must change nothing of its input samples (pure selection)")
    given = {id(leaf) for leaf in leaves}
    taken = [id(leaf) for leaf in chosen]
    if len(set(taken)) != len(taken) or not given.issuperset(taken):
        raise SessionRefused(
            422, "pick hook must return a subset of its input samples without duplicates (pure selection)"
        )
    return chosen


def frozen(sample: Sample, *, mask: bool = True) -> list[Any]:
    """Every field of a sample, to be held against what a hook leaves of it; its mask unless that may change."""
    return [_frozen(getattr(sample, field.name)) for field in fields(sample) if mask or field.name != "loss_mask_R"]


def _frozen(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return deepcopy(value)


def _was_retried(leaf: Node) -> bool:
    return leaf.parent is not None and leaf.parent.children[-1].seq > leaf.seq


def _warn(dropped: Node) -> None:
    later = [node for node in dropped.parent.children if node.seq > dropped.seq] if dropped.parent else []
    if all(dropped.n_tokens > _deepest(node) for node in later):
        log.warning(
            "node %d: the dropped attempt is longer than every later sibling's deepest leaf; continuing by seq",
            dropped.seq,
        )
    if any(node.committed_at < dropped.committed_at for node in later):
        log.warning("node %d: wall-clock rollback among its later siblings; continuing by seq", dropped.seq)


def _deepest(node: Node) -> int:
    """Most ids of a path through `node`."""
    most, open_nodes = 0, [node]
    while open_nodes:
        current = open_nodes.pop()
        most = max(most, current.n_tokens)
        open_nodes.extend(current.children)
    return most


def _main_first(leaves: Iterable[LeafSample]) -> list[LeafSample]:
    return sorted(leaves, key=lambda leaf: (len(leaf.path), leaf.leaf.seq), reverse=True)
