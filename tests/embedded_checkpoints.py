"""Random small Qwen3 checkpoints in Hugging Face layout, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout.engine.checkpoint import expected_shapes, read_checkpoint, read_config
from rollout.engine.model import Qwen3, load_model

EOS = 257
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 263,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": EOS,
    "torch_dtype": "bfloat16",
}


def make_checkpoint(directory: Path, *, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """Write a random checkpoint; `changes` go into config.json, `shards` > 1 writes an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    _write_tokenizer(directory)
    weights = _random_weights(directory, seed)
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        part, file = names[shard::shards], f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def _random_weights(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(read_config(directory))
    scales = {1: (0.2, 1.0), 2: (0.15, 0.0)}
    return {
        name: (torch.randn(shape, generator=generator) * scales[len(shape)][0] + scales[len(shape)][1]).bfloat16()
        for name, shape in shapes.items()
    }


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") == EOS
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def load(directory: Path, *, block: int | None = None) -> Qwen3:
    """The model of a checkpoint directory."""
    return load_model(read_checkpoint(directory), block=block)
