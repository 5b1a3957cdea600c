"""A grown checkpoint computes what the small one does, and its rows are as independent."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_checkpoints import make_checkpoint
from torch import Tensor

from rollout.engine.checkpoint import expected_shapes, read_checkpoint
from rollout.engine.grow import SHAPES, Shape, find_shape, grow, grown_config
from rollout.engine.model import Qwen3, load_model
from rollout.engine.params import GenerateRequest, SamplingParams
from rollout.engine.scheduler import Job, Scheduler
from rollout.engine.tiny import CHECKPOINT
from rollout.engine.weights import read_weights
from rollout.errors import BadConfig

CASES: dict[str, tuple[dict[str, Any], Shape]] = {
    "all sizes": ({}, Shape(hidden=192, layers=5, heads=12, kv_heads=3, head_dim=48, intermediate=200)),
    "width alone": ({}, Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96)),
    "heads alone": ({}, Shape(hidden=64, layers=2, heads=8, kv_heads=2, head_dim=32, intermediate=96)),
    "one head each, untied": (
        {"num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-2},
        Shape(hidden=80, layers=3, heads=8, kv_heads=4, head_dim=64, intermediate=96),
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_the_same_function(case: str, tmp_path: Path) -> None:
    changes, shape = CASES[case]
    checkpoint = read_checkpoint(make_checkpoint(tmp_path / "model", **changes))
    small, grown = load_model(checkpoint, block=4), load_model(checkpoint, block=4, shape=shape)
    assert (shape.hidden, shape.layers) == (grown.embed.shape[1], grown.config.layers)
    ids = random.Random(3).choices(range(250), k=90)
    expected, found = _log_probs(small, ids), _log_probs(grown, ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert torch.equal(expected.argmax(-1), found.argmax(-1))


def _log_probs(model: Qwen3, ids: list[int]) -> Tensor:
    cache = model.new_cache()
    rows = [model.prefill(cache, ids[:60]), model.prefill(cache, ids[60:70])]
    rows += [model.decode([cache], [token]) for token in ids[70:]]
    return torch.cat(rows).double().log_softmax(-1)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_have_the_grown_configs_shapes(case: str, tmp_path: Path) -> None:
    changes, shape = CASES[case]
    checkpoint = read_checkpoint(make_checkpoint(tmp_path / "model", **changes))
    config, weights = grow(checkpoint.config, read_weights(checkpoint, torch.device("cpu")), shape)
    assert expected_shapes(config) == {name: tuple(weight.shape) for name, weight in weights.items()}


def test_the_tiny_checkpoint_grown_samples_the_same_tokens_alone_and_beside_others() -> None:
    checkpoint = read_checkpoint(CHECKPOINT)
    small = load_model(checkpoint)
    grown = load_model(checkpoint, shape=SHAPES["dry"])
    draw = random.Random(5)
    prompts = [draw.choices(range(800), k=draw.randrange(5, 60)) for _ in range(32)]
    alone = [_run(grown, [prompt])[0] for prompt in prompts]
    for width in (2, 5, 16, 32):
        order = draw.sample(range(32), k=width)
        for n, job in zip(order, _run(grown, [prompts[n] for n in order]), strict=True):
            assert (alone[n].output_ids, alone[n].log_probs) == (job.output_ids, job.log_probs)
    for job, other in zip(_run(small, prompts), alone, strict=True):
        assert job.output_ids == other.output_ids
        assert max(abs(a - b) for a, b in zip(job.log_probs, other.log_probs, strict=True)) < 1e-4


def _run(model: Qwen3, prompts: Sequence[list[int]]) -> list[Job]:
    scheduler = Scheduler(model, stop_ids=frozenset(), decode=str)
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    jobs = [
        scheduler.add(GenerateRequest(rid=str(n), input_ids=tuple(ids), params=params, return_logprob=True))
        for n, ids in enumerate(prompts)
    ]
    while not all(job.done for job in jobs):
        scheduler.step()
    return jobs


def test_the_8b_shape_fits_the_tiny_checkpoint() -> None:
    config = grown_config(read_checkpoint(CHECKPOINT).config, find_shape("qwen3-8b"))
    counts = [torch.Size(shape).numel() for shape in expected_shapes(config).values()]
    assert 6.9e9 < sum(counts) < 7.0e9


@pytest.mark.parametrize(
    "change",
    [{"hidden": 64}, {"layers": 3}, {"head_dim": 48}, {"kv_heads": 8, "heads": 8}, {"heads": 32, "kv_heads": 5}],
)
def test_a_shape_that_cannot_hold_the_model_is_refused(change: dict[str, int]) -> None:
    sizes = {"hidden": 256, "layers": 4, "heads": 32, "kv_heads": 4, "head_dim": 64, "intermediate": 384}
    config = read_checkpoint(CHECKPOINT).config
    assert 256 == grown_config(config, Shape(**sizes)).hidden
    with pytest.raises(BadConfig, match="cannot be grown"):
        grown_config(config, Shape(**{**sizes, **change}))


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(BadConfig, match="qwen3-8b"):
        find_shape("huge")
