"""A small mixture of experts that computes what the shipped checkpoint computes.

Every expert of a layer is the checkpoint's own dense MLP, and the weights of the chosen experts sum to 1: so
the model samples what it was trained to sample, turns end by their stop token, and only the router is random.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rollout.engine.tiny import CHECKPOINT

EXPERTS = 4
TOP_K = 2
LAYERS = json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"]
_PARTS = ("gate_proj", "up_proj", "down_proj")


def make_moe(directory: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint as Qwen3MoeForCausalLM with the shipped tokenizer; `seed` makes the routers."""
    directory.mkdir(parents=True)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,  # SGLang ties them in no mixture of experts
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(CHECKPOINT / name, directory / name)
    save_file(_weights(config["hidden_size"], seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(hidden: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(CHECKPOINT / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        for part in _PARTS:
            dense = weights.pop(f"{mlp}.{part}.weight")
            weights |= {f"{mlp}.experts.{expert}.{part}.weight": dense.clone() for expert in range(EXPERTS)}
        weights[f"{mlp}.gate.weight"] = torch.randn((EXPERTS, hidden), generator=generator).bfloat16()
    return weights
