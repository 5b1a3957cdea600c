"""Rules C10 of the reference's session server: whichever leaves are kept, every sampled span has one owner."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Conversation, play, tiny_tito
from strategies import conversations

from rollout.session.assembly import assemble
from rollout.session.finishing import find_finisher
from rollout.session.node import path_to
from rollout.session.picking import LeafSample

TITO = tiny_tito()


@settings(max_examples=60, deadline=None)
@given(conversations, st.none() | st.integers(20, 300), st.randoms(use_true_random=False))
def test_c10_over_any_kept_leaves_every_sampled_span_trains_in_exactly_one_sample(
    steps: list[Any], limit: int | None, chance: Any
) -> None:
    """Which leaves are kept, and in which order, is the picker's: whatever it does, train_once gives one owner."""
    talk = Conversation(TITO, "v2")
    play(talk, steps)
    made = []
    for node in (node for node in talk.session.nodes if not node.children):
        path = path_to(node)
        sample = assemble(path, TITO, talk.settings, limit)
        if sample is not None:
            made.append(LeafSample(path, sample))
    kept = chance.sample(made, chance.randint(0, len(made)))
    whole = [leaf.sample.loss_mask_R.copy() for leaf in kept]
    find_finisher("train_once")(kept)
    trained: Counter[int] = Counter()
    for leaf, before in zip(kept, whole, strict=True):
        mask, n_first = leaf.sample.loss_mask_R, leaf.path[0].n_prompt
        assert not (mask > before).any()
        for node in leaf.path[: leaf.sample.turns]:
            start = node.n_prompt - n_first
            span = mask[start : start + len(node.generation.output_ids_O)]
            assert set(span.tolist()) in ({0}, {1})
            trained[node.seq] += int(span[0])
    assert all(1 == trained[node.seq] for leaf in kept for node in leaf.path[: leaf.sample.turns])
