"""What is done to the picked samples before they leave the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.errors import UnknownPart
from rollout.session.picking import LeafSample

Finisher = Callable[[Sequence[LeafSample]], None]
"""Changes the samples' masks in place; nothing else of them."""


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


FINISHERS: dict[str, Finisher] = {"train_once": train_once}


def find_finisher(name: str) -> Finisher:
    """The finisher of this exact name.

    Raises:
        UnknownPart: there is none.
    """
    finisher = FINISHERS.get(name)
    if finisher is None:
        raise UnknownPart(f"finisher {name!r} is unknown: one of {', '.join(FINISHERS)}")
    return finisher
