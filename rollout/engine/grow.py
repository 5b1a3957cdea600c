"""A checkpoint in a greater shape that computes the same function, to try a machine without the weights.

Width is padded with zeros, and every RMSNorm over it is corrected: with r = old / new size the mean
square shrinks by r. One epsilon serves two kinds of norm, over the hidden size (r_w) and over a head
(r_h), so epsilon becomes eps * r_w and

    norms over hidden    weight * sqrt(r_w)
    queries and keys     projection * sqrt(r_w / r_h), norm's weight * sqrt(r_h)
    queries, besides     norm's weight / sqrt(r_h): attention divides by the root of the new head size

RoPE turns dimension i of a head's half by theta^(-2i/D), so dimension i goes to i * D_new / D, which
turns as fast. New heads have zero columns in the output projection; new layers are copies of the old
ones whose output projections are zero. The vocabulary stays the tokenizer's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from rollout.engine.checkpoint import Qwen3Config
from rollout.errors import BadConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes to grow to, in the units of a Qwen3 config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


SHAPES = {
    "qwen3-8b": Shape(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288),
    "dry": Shape(hidden=192, layers=5, heads=9, kv_heads=3, head_dim=64, intermediate=448),
}
"""By name: Qwen3-8B's (7.0 of its 8.2 billion weights, the rest are its vocabulary's), and one for dry runs."""


def find_shape(name: str) -> Shape:
    """The shape of this name.

    Raises:
        BadConfig: there is none; the message names those there are.
    """
    if name not in SHAPES:
        raise BadConfig(f"--grow {name!r}: there is {', '.join(SHAPES)}")
    return SHAPES[name]


def grown_config(config: Qwen3Config, shape: Shape) -> Qwen3Config:
    """The config of the grown model.

    Raises:
        BadConfig: a size would shrink, or the head size is no multiple of the old one.
    """
    grown = replace(
        config,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        norm_eps=config.norm_eps * config.hidden / shape.hidden,
    )
    pairs = [(getattr(config, name), getattr(shape, name)) for name in Shape.__slots__]
    pairs.append((config.heads // config.kv_heads, shape.heads // shape.kv_heads))
    whole = shape.heads % shape.kv_heads == 0 and shape.head_dim % config.head_dim == 0
    if not whole or any(new < old for old, new in pairs):
        raise BadConfig(f"{config} cannot be grown to {shape}: no size may shrink, head sizes must be multiples")
    return grown


def grow(config: Qwen3Config, weights: dict[str, Tensor], shape: Shape) -> tuple[Qwen3Config, dict[str, Tensor]]:
    """Config and weights (float32, on the given ones' device) of `shape` that compute the same function.

    Raises:
        BadConfig: see grown_config.
    """
    grown = grown_config(config, shape)
    narrower = sqrt(config.hidden / shape.hidden)
    made = {
        "model.embed_tokens.weight": _padded(weights["model.embed_tokens.weight"], config.vocabulary, shape.hidden),
        "model.norm.weight": _padded_row(weights["model.norm.weight"] * narrower, shape.hidden),
    }
    if not config.tied:
        made["lm_head.weight"] = _padded(weights["lm_head.weight"], config.vocabulary, shape.hidden)
    for n in range(shape.layers):
        old = f"model.layers.{n % config.layers}."
        layer = {name.removeprefix(old): weight for name, weight in weights.items() if name.startswith(old)}
        new = _grown_layer(config, layer, shape)
        if n >= config.layers:
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                new[name].zero_()
        made |= {f"model.layers.{n}.{name}": weight for name, weight in new.items()}
    return grown, made


def _grown_layer(config: Qwen3Config, layer: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    r_w, r_h = config.hidden / shape.hidden, config.head_dim / shape.head_dim
    queries = _head_places(config, shape, config.heads // config.kv_heads, shape.heads // shape.kv_heads)
    keys = _head_places(config, shape, 1, 1)
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    turn = sqrt(r_w / r_h)

    def projection(name: str, places: list[int], rows: int, factor: float) -> Tensor:
        return _placed(layer[name] * factor, places, rows, shape.hidden)

    def head_norm(name: str, factor: float) -> Tensor:
        grown = torch.zeros(shape.head_dim, device=layer[name].device)
        grown[_dimensions(config, shape)] = layer[name] * factor
        return grown

    return {
        "input_layernorm.weight": _padded_row(layer["input_layernorm.weight"] * sqrt(r_w), shape.hidden),
        "post_attention_layernorm.weight": _padded_row(
            layer["post_attention_layernorm.weight"] * sqrt(r_w), shape.hidden
        ),
        "self_attn.q_proj.weight": projection("self_attn.q_proj.weight", queries, q_rows, turn),
        "self_attn.k_proj.weight": projection("self_attn.k_proj.weight", keys, kv_rows, turn),
        "self_attn.v_proj.weight": projection("self_attn.v_proj.weight", keys, kv_rows, 1.0),
        "self_attn.o_proj.weight": _placed(layer["self_attn.o_proj.weight"].t(), queries, q_rows, shape.hidden).t(),
        "self_attn.q_norm.weight": head_norm("self_attn.q_norm.weight", 1.0),
        "self_attn.k_norm.weight": head_norm("self_attn.k_norm.weight", sqrt(r_h)),
        "mlp.gate_proj.weight": _padded(layer["mlp.gate_proj.weight"], shape.intermediate, shape.hidden),
        "mlp.up_proj.weight": _padded(layer["mlp.up_proj.weight"], shape.intermediate, shape.hidden),
        "mlp.down_proj.weight": _padded(layer["mlp.down_proj.weight"], shape.hidden, shape.intermediate),
    }


def _dimensions(config: Qwen3Config, shape: Shape) -> list[int]:
    """The new place of each dimension of a head: those that turn as fast."""
    step, half = shape.head_dim // config.head_dim, config.head_dim // 2
    return [side * shape.head_dim // 2 + step * i for side in (0, 1) for i in range(half)]


def _head_places(config: Qwen3Config, shape: Shape, old: int, new: int) -> list[int]:
    """The new row of each old row of a projection with `old` heads for each key-value head, then `new`."""
    return [
        (head // old * new + head % old) * shape.head_dim + place
        for head in range(config.kv_heads * old)
        for place in _dimensions(config, shape)
    ]


def _placed(weight: Tensor, rows: list[int], height: int, width: int) -> Tensor:
    grown = torch.zeros((height, width), device=weight.device)
    grown[rows, : weight.shape[1]] = weight
    return grown


def _padded(weight: Tensor, height: int, width: int) -> Tensor:
    grown = torch.zeros((height, width), device=weight.device)
    grown[: weight.shape[0], : weight.shape[1]] = weight
    return grown


def _padded_row(weight: Tensor, width: int) -> Tensor:
    grown = torch.zeros(width, device=weight.device)
    grown[: weight.shape[0]] = weight
    return grown
