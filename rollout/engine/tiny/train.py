"""Train the tiny checkpoint from nothing: `python -m rollout.engine.tiny.train --out DIR`.

Needs the `train` extra (transformers). Everything is drawn from one seed; two runs on the same
machine with the same number of threads give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.engine.tiny.dialogues import make_dialogue
from rollout.engine.tiny.encoding import Encoded, Encoder
from rollout.engine.tiny.prompts import held_out
from rollout.engine.tiny.tokenizer_training import train_tokenizer

SEED = 20261202
STEPS = 1700
BATCH_TOKENS = 5120
"""Tokens of one step behind the common prefix, padding included."""
POOL = 768
"""Dialogues that are sorted by length before they are cut into batches, so little is padding."""
MATRIX_RATE, VECTOR_RATE = 0.02, 3e-3
"""Peak learning rates: Muon's for the layers' matrices, AdamW's for embeddings and norms. On `repeat`
tasks Muon reached a loss of 0.37 in the steps that AdamW alone took to 1.3."""
WARM_UP = 60
COPY_STEPS = 200
"""Steps at the start that see `repeat` tasks only. Copying appears all at once, and on the whole mix it
takes much longer: few of a dialogue's tokens ask for it."""


def make_config(encoder: Encoder) -> Qwen3Config:
    """The model's shape: 0.9 million parameters."""
    ids = encoder.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(encoder.tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        pad_token_id=ids[0],
        eos_token_id=ids[1],
        dtype="bfloat16",
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Dialogues that begin with the same `prefix_P`; `tokens_B_T` (int64, padded with 0 on the right) is
    what follows it, `mask_B_T` (bool) marks what the model itself says."""

    prefix_P: torch.Tensor
    tokens_B_T: torch.Tensor
    mask_B_T: torch.Tensor


def batches(encoder: Encoder, seed: int, kinds: tuple[str, ...] | None = None) -> Iterator[Batch]:
    """Endless fresh batches of all kinds, or of `kinds`."""
    rng = random.Random(seed)
    while True:
        with_tools: list[Encoded] = []
        without: list[Encoded] = []
        while len(with_tools) + len(without) < POOL:
            task, dialogue = make_dialogue(rng, kinds)
            if not held_out(task.row()["messages"]):
                (with_tools if dialogue.tools else without).append(encoder.encode(dialogue))
        cut = [batch for pool in (with_tools, without) if pool for batch in _cut(pool)]
        rng.shuffle(cut)
        yield from map(_stack, cut)


def _cut(pool: list[Encoded]) -> Iterator[list[Encoded]]:
    """Runs of `pool`, by length, whose padded size is at most BATCH_TOKENS behind the prefix."""
    prefix = _prefix_length(pool)
    batch: list[Encoded] = []
    for encoded in sorted(pool, key=lambda encoded: len(encoded.tokens_T)):
        if batch and (len(batch) + 1) * (len(encoded.tokens_T) - prefix) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(encoded)
    yield batch


def _prefix_length(batch: list[Encoded]) -> int:
    """How many tokens all of `batch` have in common at their start."""
    first, last = (min(batch, key=_ids), max(batch, key=_ids))
    size = min(len(first.tokens_T), len(last.tokens_T))
    return int(np.argmin(np.append(first.tokens_T[:size] == last.tokens_T[:size], False)))


def _ids(encoded: Encoded) -> list[int]:
    return list(encoded.tokens_T.tolist())


def _stack(batch: list[Encoded]) -> Batch:
    prefix = _prefix_length(batch) if len(batch) > 1 else 1
    tokens_B_T = np.zeros((len(batch), max(len(encoded.tokens_T) for encoded in batch) - prefix), np.int64)
    mask_B_T = np.zeros(tokens_B_T.shape, bool)
    for row, encoded in enumerate(batch):
        tokens_B_T[row, : len(encoded.tokens_T) - prefix] = encoded.tokens_T[prefix:]
        mask_B_T[row, : len(encoded.mask_T) - prefix] = encoded.mask_T[prefix:] == 1
    return Batch(
        prefix_P=torch.from_numpy(batch[0].tokens_T[:prefix].astype(np.int64)),
        tokens_B_T=torch.from_numpy(tokens_B_T),
        mask_B_T=torch.from_numpy(mask_B_T),
    )


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross entropy in nats over the tokens that the model itself says.

    The prefix (the tools' description, more than half of a dialogue) is computed once for the batch.
    """
    wanted_B_T = batch.mask_B_T[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.model(input_ids=batch.prefix_P[None], use_cache=True).cache
        cache.batch_repeat_interleave(len(batch.tokens_B_T))
        hidden_B_T = model.model(input_ids=batch.tokens_B_T[:, :-1], cache=cache).last_hidden_state
        logits = model.lm_head(hidden_B_T[wanted_B_T])
    return functional.cross_entropy(logits.float(), batch.tokens_B_T[:, 1:][wanted_B_T])


def rate(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: a linear warm-up, then a cosine down to 1 %."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def train(out: Path, *, steps: int = STEPS, seed: int = SEED) -> None:
    """Tokenizer and weights into `out`; one JSON line of progress every 50 steps on stdout."""
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(out, seed=seed)
    encoder = Encoder(out)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(make_config(encoder))
    model.set_attn_implementation("eager")  # in bfloat16 faster than torch's fused one on a CPU
    optimizers = _optimizers(model)
    copying, mixed = batches(encoder, seed, ("repeat",)), batches(encoder, seed)
    started, recent = time.perf_counter(), []
    for step in range(steps):
        loss = loss_of(model, next(copying if step < COPY_STEPS else mixed))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _step(optimizers, rate(step, steps))
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            _report(step + 1, recent, started)
            recent = []
            save(model, out)


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    parameters = dict(model.named_parameters())
    matrices = {name for name, value in parameters.items() if value.ndim == 2 and "embed" not in name}
    rest = [value for name, value in parameters.items() if name not in matrices]
    muon = torch.optim.Muon([parameters[name] for name in sorted(matrices)], lr=MATRIX_RATE, weight_decay=0.01)
    return [muon, torch.optim.AdamW(rest, lr=VECTOR_RATE, betas=(0.9, 0.98), weight_decay=0.0)]


def _step(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """One step of every optimizer at `share` of its peak rate; clears the gradients."""
    for optimizer, peak in zip(optimizers, (MATRIX_RATE, VECTOR_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _report(step: int, recent: list[float], started: float) -> None:
    line = {
        "step": step,
        "loss": round(sum(recent) / len(recent), 4),
        "wall_s": round(time.perf_counter() - started),
        "cpu_s": round(time.process_time()),
    }
    print(json.dumps(line), flush=True)


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Weights as bfloat16 safetensors (the tied output head left out), config and generation defaults."""
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(out)
    generation = {
        "eos_token_id": [model.config.eos_token_id, model.config.pad_token_id],
        "pad_token_id": model.config.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of data, tokenizer and weights")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; more change the last bits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, steps=options.steps, seed=options.seed)


if __name__ == "__main__":
    main()
