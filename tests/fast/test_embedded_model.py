"""The forward pass: transformers' numbers, and rows that do not depend on each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_checkpoints import load, make_checkpoint
from torch import Tensor

from rollout.engine.model import BLOCK_ROWS, PREFILL_TOKENS, KvCache, Qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "one head each, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "sharded": {"shards": 3, "rope_theta": 1e6},
    "odd sizes": {
        "vocab_size": 261,
        "hidden_size": 70,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 101,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    directory = make_checkpoint(tmp_path / "model", **SHAPES[shape])
    theirs = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ours = load(directory)
    ids = random.Random(1).choices(range(ours.config.vocabulary), k=PREFILL_TOKENS + 40)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)

    cache, got = ours.new_cache(), {}
    for end in (20, PREFILL_TOKENS, PREFILL_TOKENS + 20):
        got[end - 1] = ours.prefill(cache, ids[cache.length : end])
    for n in range(PREFILL_TOKENS + 20, len(ids)):
        got[n] = ours.decode([cache], [ids[n]])
    assert expected.std() > 0.5
    for n, logits in got.items():
        torch.testing.assert_close(logits[0].log_softmax(-1), expected[n], atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [None, 1, 4])
def test_a_row_has_the_same_bits_at_every_place_and_width(shape: str, block: int | None, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "model", **SHAPES[shape]), block=block)
    draw = random.Random(2)
    prompts = [draw.choices(range(250), k=draw.randrange(1, 150)) for _ in range(BLOCK_ROWS)]
    alone = {n: _decode_three(model, [prompts[n]])[0] for n in range(len(prompts))}
    for width in (2, 3, 7, model.block):
        order = draw.sample(range(len(prompts)), k=min(width, model.block))
        for n, logits in zip(order, _decode_three(model, [prompts[n] for n in order]), strict=True):
            assert torch.equal(logits, alone[n])


def _decode_three(model: Qwen3, prompts: list[list[int]]) -> list[Tensor]:
    caches = [model.new_cache() for _ in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        model.prefill(cache, prompt)
    steps = [model.decode(caches, [(prompt[0] + step) % 250 for prompt in prompts]) for step in range(3)]
    return list(torch.stack(steps, dim=1))


def test_the_load_trial_finds_rows_that_depend_on_their_place(tmp_path: Path) -> None:
    class RowsDependOnPlace(Qwen3):
        def decode(self, caches: Sequence[KvCache], ids: Sequence[int]) -> Tensor:
            return super().decode(caches, ids) + torch.arange(len(ids))[:, None] * 1e-3

    sound = load(make_checkpoint(tmp_path / "model"))
    weights = {"model.embed_tokens.weight": sound.embed, "model.norm.weight": torch.ones(64)}
    for name, shape in _layer_shapes(sound).items():
        weights[name] = torch.randn(shape)
    assert Qwen3(sound.config, weights).block == sound.block
    assert RowsDependOnPlace(sound.config, weights).block == 1


def _layer_shapes(model: Qwen3) -> dict[str, tuple[int, ...]]:
    from rollout.engine.checkpoint import expected_shapes

    return {name: shape for name, shape in expected_shapes(model.config).items() if ".layers." in name}


def test_a_cache_grows_without_losing_a_token(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "model"))
    cache, ids = model.new_cache(), list(range(200))
    model.prefill(cache, ids[:3])
    for token in ids[3:]:
        stepped = model.decode([cache], [token])
    whole = model.prefill(model.new_cache(), ids)
    torch.testing.assert_close(stepped, whole, atol=1e-4, rtol=1e-4)
    assert cache.length == 200
