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
STEPS = 2400
BATCH_TOKENS = 8192
"""Tokens of one step, padding included."""
POOL = 768
"""Dialogues that are sorted by length before they are cut into batches, so little is padding."""
PEAK_RATE = 4e-3
WARM_UP = 60


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


def batches(encoder: Encoder, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless fresh batches: tokens_B_T (int64, padded with 0 on the right) and mask_B_T (bool)."""
    rng = random.Random(seed)
    while True:
        pool: list[Encoded] = []
        while len(pool) < POOL:
            task, dialogue = make_dialogue(rng)
            if not held_out(task.row()["messages"]):
                pool.append(encoder.encode(dialogue))
        pool.sort(key=lambda encoded: len(encoded.tokens_T))
        cut = list(_cut(pool))
        rng.shuffle(cut)
        yield from map(_stack, cut)


def _cut(pool: list[Encoded]) -> Iterator[list[Encoded]]:
    """Runs of `pool` (sorted by length) whose padded size is at most BATCH_TOKENS."""
    batch: list[Encoded] = []
    for encoded in pool:
        if (len(batch) + 1) * len(encoded.tokens_T) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(encoded)
    yield batch


def _stack(batch: list[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_B_T = np.zeros((len(batch), max(len(encoded.tokens_T) for encoded in batch)), np.int64)
    mask_B_T = np.zeros(tokens_B_T.shape, bool)
    for row, encoded in enumerate(batch):
        tokens_B_T[row, : len(encoded.tokens_T)] = encoded.tokens_T
        mask_B_T[row, : len(encoded.mask_T)] = encoded.mask_T == 1
    return torch.from_numpy(tokens_B_T), torch.from_numpy(mask_B_T)


def loss_of(model: Qwen3ForCausalLM, tokens_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats over the tokens that the model itself says."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden_B_T = model.model(input_ids=tokens_B_T[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden_B_T[mask_B_T[:, 1:]])
    return functional.cross_entropy(logits.float(), tokens_B_T[:, 1:][mask_B_T[:, 1:]])


def rate(step: int, steps: int) -> float:
    """Learning rate: a linear warm-up, then a cosine down to 1 % of the peak."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def train(out: Path, *, steps: int = STEPS, seed: int = SEED) -> None:
    """Tokenizer and weights into `out`; one JSON line of progress every 50 steps on stdout."""
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(out, seed=seed)
    encoder = Encoder(out)
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(make_config(encoder)).float()
    optimizer = _optimizer(model)
    started, source, recent = time.perf_counter(), batches(encoder, seed), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = loss_of(model, *next(source))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            _report(step + 1, recent, started)
            recent = []
            save(model, out)


def _optimizer(model: Qwen3ForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.02},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


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
