"""What is done to the picked samples before they leave the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import SessionRefused
from rollout.parts import FINISHERS, load_hook
from rollout.sample import Sample
from rollout.session.picking import LeafSample, frozen

Finisher = Callable[[Sequence[LeafSample]], None]
"""Clears entries of the samples' masks in place; whatever else it did to them is refused."""


def train_once(leaves: Sequence[LeafSample]) -> None:
    """Every sampled span trains in one sample only: that of the kept leaf with the smallest id.

    In all others its mask is zeroed.
    """
    owner: dict[int, int] = {}
    for leaf in leaves:
        for node in leaf.path:
            owner[node.seq] = min(owner.get(node.seq, leaf.leaf.seq), leaf.leaf.seq)
    for leaf in leaves:
        sample = leaf.sample
        n_prompt = len(sample.tokens_T) - sample.response_length
        for node in leaf.path:
            if owner[node.seq] != leaf.leaf.seq:
                end = node.n_tokens - n_prompt
                start = end - len(node.generation.output_ids_O)
                sample.loss_mask_R[max(0, start) : max(0, end)] = 0


def find_finisher(name: str) -> Finisher:
    """The installed finisher of this exact name (entry points of rollout.finishers, see rollout.parts), guarded.

    Raises:
        UnknownPart: there is none, or it does not take the leaves.
    """
    finisher = load_hook(FINISHERS, name, "finish(leaves)", 1)

    def guarded(leaves: Sequence[LeafSample]) -> None:
        before = [(frozen(leaf.sample, mask=False), leaf.sample.loss_mask_R.copy()) for leaf in leaves]
        finisher(leaves)
        for leaf, (fields, mask) in zip(leaves, before, strict=True):
            _check(leaf.sample, fields, mask)

    return guarded


def _check(sample: Sample, before: list[Any], mask: NDArray[np.int8]) -> None:
    """Only tokens that were sampled may train, with the ids and log-probs that they were sampled with."""
    if frozen(sample, mask=False) != before:
        raise SessionRefused(422, "finish hook must change the samples' masks and nothing else of them")
    new = sample.loss_mask_R
    if new.dtype != mask.dtype or new.shape != mask.shape or not np.isin(new, (0, 1)).all() or (new > mask).any():
        raise SessionRefused(422, "finish hook must only clear entries of the masks")
