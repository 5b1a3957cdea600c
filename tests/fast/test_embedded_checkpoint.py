"""A checkpoint directory is refused for one clear reason, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_checkpoints import CONFIG, EOS, make_checkpoint
from safetensors.torch import load_file, save_file

from rollout.engine.checkpoint import read_checkpoint
from rollout.engine.embedded import start_embedded
from rollout.errors import BadCheckpoint


def _set_config(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def _edit_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(directory / "model.safetensors")
    weights |= {name.replace("__", "."): value for name, value in changes.items() if value is not None}
    for name, value in changes.items():
        if value is None:
            del weights[name.replace("__", ".")]
    save_file(weights, directory / "model.safetensors")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


FAULTS = {
    "other architecture": (lambda d: _set_config(d, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
    "mixture of experts": (lambda d: _set_config(d, architectures=["Qwen3MoeForCausalLM"]), "Qwen3MoeForCausalLM"),
    "scaled rope": (lambda d: _set_config(d, rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
    "attention bias": (lambda d: _set_config(d, attention_bias=True), "attention_bias"),
    "sliding window": (lambda d: _set_config(d, use_sliding_window=True), "sliding window"),
    "quantised": (lambda d: _set_config(d, quantization_config={"bits": 4}), "quantised"),
    "no hidden size": (lambda d: _set_config(d, hidden_size=None), "missing or wrong field"),
    "heads do not divide": (lambda d: _set_config(d, num_key_value_heads=3), "do not fit"),
    "no heads": (lambda d: _set_config(d, num_attention_heads=0, head_dim=None), "missing or wrong field"),
    "no rope base": (lambda d: _set_config(d, rope_theta=0), "rope_theta 0.0 is out of bounds"),
    "rope is no object": (lambda d: _set_config(d, rope_scaling="x"), "rope_scaling is no object"),
    "architectures is no list": (lambda d: _set_config(d, architectures=5), "architecture 5"),
    "stop id outside the vocabulary": (lambda d: _set_config(d, eos_token_id=[EOS, 10**6]), "eos_token_id 1000000"),
    "index is no map to names": (
        lambda d: (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": [1]}})),
        "missing",
    ),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
    "config missing": (lambda d: (d / "config.json").unlink(), "config.json: missing"),
    "tokenizer missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "weights missing": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors: missing"),
    "weights cut short": (lambda d: _truncate(d / "model.safetensors"), "not a whole safetensors file"),
    "weights not safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"PK" * 100),
        "not a whole safetensors file",
    ),
    "weights empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
    "one weight missing": (lambda d: _edit_weights(d, model__norm__weight=None), "model.norm.weight is missing"),
    "wrong shape": (lambda d: _edit_weights(d, model__norm__weight=torch.ones(63)), "(63,)"),
    "unknown weight": (lambda d: _edit_weights(d, model__extra=torch.ones(3)), "unknown weight model.extra"),
    "integer weights": (lambda d: _edit_weights(d, model__norm__weight=torch.ones(64, dtype=torch.int8)), "I8"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_directory_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    damage, words = FAULTS[fault]
    damage(directory)
    with pytest.raises(BadCheckpoint) as refusal:
        read_checkpoint(directory)
    message = str(refusal.value)
    assert words in message
    assert str(directory) in message
    assert "\n" not in message
    with pytest.raises(BadCheckpoint) as again:
        await start_embedded(directory, log=tmp_path / "log")
    assert str(again.value) == message
    assert not (tmp_path / "log").exists()


def test_a_missing_directory_and_a_missing_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no such directory"):
        read_checkpoint(tmp_path / "nowhere")
    directory = make_checkpoint(tmp_path / "model", shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"00002-of-00003\.safetensors: missing"):
        read_checkpoint(directory)


def test_sizes_and_stop_ids_come_from_the_files(tmp_path: Path) -> None:
    directory = make_checkpoint(
        tmp_path / "model", rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    checkpoint = read_checkpoint(directory)
    assert checkpoint.config.rope_theta == 5e5
    assert checkpoint.config.context == 4096
    assert checkpoint.stop_ids == {256, EOS, 258}
