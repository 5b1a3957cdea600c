"""Qwen3's forward pass for serving: one request's prefill, and decode steps over blocks of requests.

A request's bits never depend on its neighbours, by these rules:

- Prefill runs one request alone, in pieces of PREFILL_TOKENS tokens counted from its first token,
  so every shape depends on the request's own length only.
- A decode step always multiplies exactly `block` rows (BLOCK_ROWS), the free ones filled with
  token 0. A matrix product's kernel is chosen by its shape, so it is always the same kernel, and
  inside it one row's sum never mixes with another row. (With a width that follows the load, rows
  change bits: one row and 16 rows differ on every shape that we measured.)
- Attention runs for each row by itself over exactly that request's keys and values.
- Whether a block's rows are independent of their position and of each other on this machine is
  tried out at load, over the whole step. Where they are not, `block` becomes 1: each row alone.

Everything is float32, whatever the weights' type, on a GPU too (`exact` says how). One thread: a
model this small gains nothing from more, and the cores are the session server's and the agents'.

Shape legend: _T tokens of a prompt piece, _B rows of a decode block, _V vocabulary, _H hidden,
_Q query heads, _K key-value heads, _D head dimension, _L tokens in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine.checkpoint import Checkpoint, Qwen3Config
from rollout.engine.exact import make_exact
from rollout.engine.grow import Shape, grow
from rollout.engine.weights import read_weights
from rollout.errors import BadCheckpoint

BLOCK_ROWS = 16
"""Rows of a decode step's matrix products, whatever the number of running requests."""

PREFILL_TOKENS = 512
"""Prompt tokens that are computed in one piece."""

_CACHE_STEP = 64
_ROPE_STEP = 4096

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries (rows, Q, D), keys and values (rows, 2K, D)) -> attention output (rows, Q * D)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """One block's weights, transposed for `rows @ weight`, related projections side by side."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class KvCache:
    """Keys and values of one request: per layer (2K, capacity, D), and its halves as (1, K, capacity, D).

    The capacity grows with the request's own length and by nothing else.
    """

    def __init__(self, config: Qwen3Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._store = self._allocate(0)
        self.length = 0
        self.layers: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all."""
        capacity = self._store.shape[2]
        if length <= capacity:
            return
        grown = self._allocate(max(length + _CACHE_STEP - 1, capacity * 3 // 2) // _CACHE_STEP * _CACHE_STEP)
        grown[:, :, : self.length] = self._store[:, :, : self.length]
        self._store, kv_heads = grown, self._config.kv_heads
        self.layers = list(grown.unbind(0))
        self.keys = [layer[None, :kv_heads] for layer in self.layers]
        self.values = [layer[None, kv_heads:] for layer in self.layers]

    def _allocate(self, capacity: int) -> Tensor:
        c = self._config
        return torch.empty((c.layers, 2 * c.kv_heads, capacity, c.head_dim), device=self._device)


class Qwen3:
    """A loaded model. Not thread-safe: one caller at a time."""

    def __init__(self, config: Qwen3Config, weights: dict[str, Tensor], *, block: int | None = None) -> None:
        """Arrange `weights` (float32, on their device). `block`: rows of a decode step; None: try it out."""
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]
        self.device = self.embed.device
        self._norm = weights["model.norm.weight"]
        self._head = self.embed if config.tied else weights["lm_head.weight"]
        self._layers = [_arrange(config, weights, n) for n in range(config.layers)]
        self._cos, self._sin = self._rope_tables(_ROPE_STEP)
        self.block = BLOCK_ROWS if block is None else block
        if block is None and not self._rows_are_independent():
            self.block = 1

    @torch.inference_mode()
    def prefill(self, cache: KvCache, ids: Sequence[int]) -> Tensor:
        """Append at most PREFILL_TOKENS prompt tokens to `cache`; logits (1, V) after the last of them."""
        start, end = cache.length, cache.length + len(ids)
        cache.reserve(end)
        mask = None
        if start:
            mask = torch.ones((len(ids), end), dtype=torch.bool, device=self.device).tril_(start)

        def attend(layer: int, q_T_Q_D: Tensor, kv_T_2K_D: Tensor) -> Tensor:
            cache.layers[layer][:, start:end] = kv_T_2K_D.transpose(0, 1)
            mixed = F.scaled_dot_product_attention(
                q_T_Q_D.transpose(0, 1)[None],
                cache.keys[layer][:, :, :end],
                cache.values[layer][:, :, :end],
                attn_mask=mask,
                is_causal=not start,
                enable_gqa=self.config.heads != self.config.kv_heads,
            )
            return mixed[0].transpose(0, 1).reshape(len(ids), -1)

        hidden = self._forward(self._embed(ids), range(start, end), attend)
        cache.length = end
        return self._logits(hidden[-1:])

    @torch.inference_mode()
    def decode(self, caches: Sequence[KvCache], ids: Sequence[int]) -> Tensor:
        """One token for each of up to `block` requests: append ids[i] to caches[i]; logits (len(ids), V)."""
        c, spare = self.config, self.block - len(ids)
        for cache in caches:
            cache.reserve(cache.length + 1)
        padding = torch.zeros((spare, c.heads * c.head_dim), device=self.device)

        def attend(layer: int, q_B_Q_D: Tensor, kv_B_2K_D: Tensor) -> Tensor:
            mixed = [padding]
            # A copy of each row starts at an aligned address, whatever the row's place in the block.
            for cache, q_Q_D, kv_2K_D in zip(caches, q_B_Q_D.unbind(0), kv_B_2K_D.unbind(0), strict=False):
                end = cache.length + 1
                cache.layers[layer][:, cache.length] = kv_2K_D
                row = F.scaled_dot_product_attention(
                    q_Q_D.clone().view(1, c.kv_heads, -1, c.head_dim),
                    cache.keys[layer][:, :, :end],
                    cache.values[layer][:, :, :end],
                )
                mixed.append(row.reshape(1, -1))
            mixed.append(mixed.pop(0))
            return torch.cat(mixed)

        positions = [cache.length for cache in caches] + [0] * spare
        hidden = self._forward(self._embed([*ids, *[0] * spare]), positions, attend)
        for cache in caches:
            cache.length += 1
        return self._logits(hidden)[: len(ids)]

    def new_cache(self) -> KvCache:
        return KvCache(self.config, self.device)

    def _embed(self, ids: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(ids, device=self.device), self.embed)

    def _forward(self, x: Tensor, positions: Sequence[int], attend: Attend) -> Tensor:
        """Hidden states (rows, H) behind the last layer, before the final norm."""
        c, rows, half = self.config, x.shape[0], self.config.head_dim // 2
        cos, sin = self._rope(positions)
        for n, layer in enumerate(self._layers):
            heads = (self._rms(x, layer.input_norm) @ layer.qkv).view(rows, -1, c.head_dim)
            qk, v = torch.split(heads, [c.heads + c.kv_heads, c.kv_heads], dim=1)
            qk = F.rms_norm(qk, (c.head_dim,), eps=c.norm_eps) * layer.qk_norm
            qk = qk * cos + torch.cat((qk[..., half:], qk[..., :half]), dim=-1) * sin
            mixed = attend(n, qk[:, : c.heads], torch.cat((qk[:, c.heads :], v), dim=1))
            x = torch.addmm(x, mixed, layer.out)
            gate, up = (self._rms(x, layer.post_norm) @ layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down)
        return x

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._rms(hidden, self._norm), self._head)

    def _rope(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (rows, 1, D) of the positions."""
        if max(positions) >= self._cos.shape[0]:
            self._cos, self._sin = self._rope_tables((max(positions) // _ROPE_STEP + 1) * _ROPE_STEP)
        index = torch.tensor(positions, device=self.device)
        return self._cos[index][:, None], self._sin[index][:, None]

    def _rope_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """RoPE in the rotate-half form: x * cos + swap_halves(x) * sin, the swap's sign kept in sin."""
        dim = self.config.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        angles = torch.outer(torch.arange(length).float(), 1.0 / self.config.rope_theta**exponents)
        cos, sin = angles.cos().to(self.device), angles.sin().to(self.device)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _rows_are_independent(self) -> bool:
        """Whether every row of a step has the same bits at any place, among any neighbours."""
        size = self.config.vocabulary
        prompts = [[(7 * row + 3 * n) % size for n in range(row + 1)] for row in range(self.block)]

        def step(order: list[int]) -> dict[int, Tensor]:
            caches = [self.new_cache() for _ in order]
            for cache, row in zip(caches, order, strict=True):
                self.prefill(cache, prompts[row])
            logits = self.decode(caches, [(11 * row) % size for row in order])
            return dict(zip(order, logits, strict=True))

        rows = list(range(self.block))
        whole = step(rows)
        others = [step(rows[::-1]), step(rows[5:] + rows[:5]), step(rows[-1:]), step(rows[2:9][::-1])]
        return all(torch.equal(whole[row], logits) for other in others for row, logits in other.items())


def _arrange(config: Qwen3Config, weights: dict[str, Tensor], n: int) -> Layer:
    def get(name: str) -> Tensor:
        return weights[f"model.layers.{n}.{name}.weight"]

    def transposed(*names: str) -> Tensor:
        return torch.cat([get(name) for name in names]).t().contiguous()

    q_norm = get("self_attn.q_norm").expand(config.heads, -1)
    k_norm = get("self_attn.k_norm").expand(config.kv_heads, -1)
    return Layer(
        input_norm=get("input_layernorm"),
        qkv=transposed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=torch.cat((q_norm, k_norm)),
        out=transposed("self_attn.o_proj"),
        post_norm=get("post_attention_layernorm"),
        gate_up=transposed("mlp.gate_proj", "mlp.up_proj"),
        down=transposed("mlp.down_proj"),
    )


def load_model(
    checkpoint: Checkpoint, *, device: str = "cpu", block: int | None = None, shape: Shape | None = None
) -> Qwen3:
    """Read the weights of a checked checkpoint as float32 onto `device`, grown to `shape` where one is given.

    Raises:
        BadCheckpoint: a weights file cannot be read after all, or the device is not there.
        BadConfig: the checkpoint cannot be grown to that shape.
    """
    try:
        target = torch.device(device)
        make_exact(target)
        weights = read_weights(checkpoint, target)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise BadCheckpoint(f"{checkpoint.directory}: cannot be loaded on {device} ({reason})") from error
    config = checkpoint.config
    if shape is not None:
        config, weights = grow(config, weights, shape)
    return Qwen3(config, weights, block=block)
