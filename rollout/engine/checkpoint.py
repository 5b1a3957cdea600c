"""A Hugging Face Qwen3 checkpoint directory: read its config and check its weights, without torch.

Everything that can be wrong with a directory is found here, from `config.json` and the safetensors
headers alone, in milliseconds and before any process does work: one BadCheckpoint line says what.
Served: Qwen3ForCausalLM, dense, default RoPE, no attention bias, no sliding window, not quantised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rollout.errors import BadCheckpoint

ARCHITECTURE = "Qwen3ForCausalLM"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config:
    """Sizes of a dense Qwen3 model, in the units of its config.json."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    context: int
    tied: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A directory that can be loaded: its sizes, the file of every weight, the ids that end a turn."""

    directory: Path
    config: Qwen3Config
    files: dict[str, Path]
    stop_ids: frozenset[int]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Check a checkpoint directory completely, short of reading the weights' values.

    Raises:
        BadCheckpoint: one line that names the file and what is wrong with it.
    """
    if not directory.is_dir():
        raise BadCheckpoint(f"{directory}: no such directory; give a Hugging Face model directory")
    config = read_config(directory)
    files = _check_weights(directory, config)
    if not (directory / "tokenizer.json").is_file():
        raise BadCheckpoint(f"{directory / 'tokenizer.json'}: missing")
    return Checkpoint(directory=directory, config=config, files=files, stop_ids=_read_stops(directory, config))


def expected_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the model needs."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocabulary, c.hidden),
        "model.norm.weight": (c.hidden,),
    }
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocabulary, c.hidden)
    for n in range(c.layers):
        shapes |= {
            f"model.layers.{n}.input_layernorm.weight": (c.hidden,),
            f"model.layers.{n}.post_attention_layernorm.weight": (c.hidden,),
            f"model.layers.{n}.self_attn.q_proj.weight": (c.heads * c.head_dim, c.hidden),
            f"model.layers.{n}.self_attn.k_proj.weight": (c.kv_heads * c.head_dim, c.hidden),
            f"model.layers.{n}.self_attn.v_proj.weight": (c.kv_heads * c.head_dim, c.hidden),
            f"model.layers.{n}.self_attn.o_proj.weight": (c.hidden, c.heads * c.head_dim),
            f"model.layers.{n}.self_attn.q_norm.weight": (c.head_dim,),
            f"model.layers.{n}.self_attn.k_norm.weight": (c.head_dim,),
            f"model.layers.{n}.mlp.gate_proj.weight": (c.intermediate, c.hidden),
            f"model.layers.{n}.mlp.up_proj.weight": (c.intermediate, c.hidden),
            f"model.layers.{n}.mlp.down_proj.weight": (c.hidden, c.intermediate),
        }
    return shapes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path}: not a JSON object")
    return value


def _read_stops(directory: Path, config: Qwen3Config) -> frozenset[int]:
    """The ids that end a turn: those of config.json and, where there is one, generation_config.json."""
    stops: set[int] = set()
    for path in (directory / "config.json", directory / "generation_config.json"):
        found = _read_json(path).get("eos_token_id") if path.is_file() else None
        for token in found if isinstance(found, list) else [found]:
            if token is not None and (type(token) is not int or not 0 <= token < config.vocabulary):
                raise BadCheckpoint(f"{path}: eos_token_id {token!r} is no id of a vocabulary of {config.vocabulary}")
            stops.update([] if token is None else [token])
    return frozenset(stops)


def read_config(directory: Path) -> Qwen3Config:
    """The sizes in a directory's config.json.

    Raises:
        BadCheckpoint: it is missing, broken, or asks for what the engine does not serve.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    _refuse_unserved(path, raw)
    rope = raw.get("rope_parameters") or {}
    try:
        config = Qwen3Config(
            vocabulary=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=int(raw["num_attention_heads"]),
            kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
            intermediate=int(raw["intermediate_size"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            context=int(raw.get("max_position_embeddings", 32_768)),
            tied=bool(raw.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise BadCheckpoint(f"{path}: missing or wrong field ({type(error).__name__}: {error})") from error
    sizes = (config.vocabulary, config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim)
    if min(*sizes, config.intermediate, config.context) < 1 or config.heads % config.kv_heads or config.head_dim % 2:
        raise BadCheckpoint(f"{path}: sizes do not fit each other: {config}")
    if not (config.norm_eps >= 0 and config.rope_theta > 0):
        raise BadCheckpoint(
            f"{path}: rms_norm_eps {config.norm_eps} or rope_theta {config.rope_theta} is out of bounds"
        )
    return config


def _refuse_unserved(path: Path, raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        found = ", ".join(map(str, architectures)) if isinstance(architectures, list) else repr(architectures)
        raise BadCheckpoint(f"{path}: architecture {found}; the embedded engine serves {ARCHITECTURE} only")
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(name) or {}, dict):
            raise BadCheckpoint(f"{path}: {name} is no object")
        scaling |= raw.get(name) or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    refused = {
        f"rope type {rope_type}": rope_type != "default",
        "attention_bias": bool(raw.get("attention_bias")),
        "a sliding window": bool(raw.get("use_sliding_window")),
        "quantised weights": raw.get("quantization_config") is not None,
        f"hidden_act {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
    }
    for what, present in refused.items():
        if present:
            raise BadCheckpoint(f"{path}: {what} is not served by the embedded engine")


def _check_weights(directory: Path, config: Qwen3Config) -> dict[str, Path]:
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(directory):
        for name, shape in _read_header(path).items():
            files[name], shapes[name] = path, shape
    for name, shape in expected_shapes(config).items():
        if name not in shapes:
            raise BadCheckpoint(f"{directory}: weight {name} is missing")
        if shapes[name] != shape:
            raise BadCheckpoint(f"{files[name]}: {name} has shape {shapes[name]}, config.json asks for {shape}")
    spare = sorted(set(shapes) - set(expected_shapes(config)) - {"lm_head.weight"})
    if spare:
        raise BadCheckpoint(f"{files[spare[0]]}: unknown weight {spare[0]} ({len(spare)} in all)")
    return files


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    names = weight_names(index) if index.is_file() else [WEIGHTS_FILE]
    return [directory / name for name in names]


def weight_names(index: Path) -> list[str]:
    """Names of the files that hold the weights, from the checkpoint's index file; sorted.

    Raises:
        BadCheckpoint: it cannot be read or names none.
    """
    mapping = _read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise BadCheckpoint(f"{index}: no weight_map")
    return sorted({str(name) for name in mapping.values()})


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name from a safetensors header, checked against the file's size (the format's own layout)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _HEADER_LIMIT:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        room = path.stat().st_size - 8 - length
        header.pop("__metadata__", None)
        return {name: _check_entry(name, entry, room) for name, entry in header.items()}
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not a whole safetensors file ({error})") from error


def _check_entry(name: str, entry: dict[str, Any], room: int) -> tuple[int, ...]:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in _ITEM_BYTES:
        raise ValueError(f"{name} is {entry['dtype']}, served are {', '.join(_ITEM_BYTES)}")
    if not 0 <= begin <= end <= room or end - begin != prod(shape) * _ITEM_BYTES[entry["dtype"]]:
        raise ValueError(f"{name} does not fit the file")
    return shape
