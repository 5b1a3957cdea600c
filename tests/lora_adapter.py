"""A LoRA adapter of the shipped checkpoint in PEFT's layout, with seeded weights that move what it samples."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rollout.engine.tiny import CHECKPOINT

RANK = 4
_TARGETS = ("q_proj", "v_proj")


def make_adapter(directory: Path, *, seed: int = 0, scale: float = 0.15) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; both factors of every target are nonzero."""
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_TARGETS),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, weight in load_file(CHECKPOINT / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(_TARGETS):
            n_out, n_in = weight.shape
            for factor, shape in (("lora_A", (RANK, n_in)), ("lora_B", (n_out, RANK))):
                factors[f"base_model.model.{module}.{factor}.weight"] = scale * torch.randn(shape, generator=generator)
    save_file(factors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory
