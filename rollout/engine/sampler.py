"""Sampling: one token and its logprob for each row, in float64, from the row's own facts alone.

The logprob is that of the distribution behind penalties, bias and temperature (greedy: temperature
1), before top-k, top-p and min-p, as SGLang gives it. A row's token and logprob depend on its
logits, its parameters, its seed and its position, on nothing beside it: divisions are exact,
sums run over the vocabulary in order, and the random number is a hash of (seed, position).
The orders of steps and the rules of each filter follow SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log

import numpy as np
import numpy.typing as npt

from rollout.engine.params import SamplingParams

Floats = npt.NDArray[np.float64]


@dataclass(kw_only=True, slots=True)
class SamplingState:
    """What sampling needs to know of one request: constants, and the tokens that it has sampled.

    position: index in the whole sequence of the token to be sampled next.
    stop_ids: ids that end the request; kept from being sampled below min_new_tokens.
    """

    params: SamplingParams
    seed: int
    position: int
    stop_ids: frozenset[int] = frozenset()
    sampled: int = 0
    counts: dict[int, int] = field(default_factory=dict)

    def note(self, token: int) -> None:
        """Count one sampled token."""
        self.sampled += 1
        self.position += 1
        self.counts[token] = self.counts.get(token, 0) + 1

    def adjust(self, logits_V: Floats) -> None:
        """Apply penalties, min_new_tokens and logit_bias to one row, in place."""
        params = self.params
        additive = params.frequency_penalty or params.presence_penalty
        if self.counts and (additive or params.repetition_penalty != 1.0):
            ids = np.fromiter(self.counts, dtype=np.int64)
            counts = np.fromiter(self.counts.values(), dtype=np.float64)
            row = logits_V[ids] - (params.frequency_penalty * counts + params.presence_penalty)
            penalty = params.repetition_penalty
            logits_V[ids] = np.where(row < 0, row * penalty, row / penalty)
        if self.sampled < params.min_new_tokens:
            logits_V[list(self.stop_ids)] = -np.inf
        for token, bias in params.logit_bias.items():
            logits_V[token] += bias


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token and its logprob."""

    token: int
    log_prob: float


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed and a position: 53 bits of their hash."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits_B_V: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sampled | None]:
    """One token for each row; None where a row has no largest finite logit (a broken model).

    Does not call `SamplingState.note`: the caller does, when it keeps the token.
    """
    scaled_B_V = logits_B_V.astype(np.float64)
    for row, state in zip(scaled_B_V, states, strict=True):
        state.adjust(row)
    scaled_B_V /= np.array([1.0 if s.params.greedy else s.params.temperature for s in states])[:, None]
    peak_B = scaled_B_V.max(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        mass_B_V = np.exp(scaled_B_V - peak_B[:, None])
        sums_B_V = np.cumsum(mass_B_V, axis=1)
    results: list[Sampled | None] = []
    for n, state in enumerate(states):
        if not np.isfinite(peak_B[n]):
            results.append(None)
            continue
        token = _choose(mass_B_V[n], sums_B_V[n], state)
        log_prob = float(scaled_B_V[n, token] - peak_B[n]) - log(sums_B_V[n, -1])
        results.append(Sampled(token, log_prob))
    return results


def _choose(mass_V: Floats, sums_V: Floats, state: SamplingState) -> int:
    params = state.params
    if params.greedy:
        return int(mass_V.argmax())
    number = uniform(state.seed, state.position)
    if params.top_k == -1 and params.top_p == 1.0 and params.min_p == 0.0:
        return _invert(sums_V, number)
    order = np.argsort(-mass_V, kind="stable")
    kept = filter_mass(mass_V[order], float(sums_V[-1]), params)
    return int(order[_invert(np.cumsum(kept), number)])


def filter_mass(sorted_mass_V: Floats, total: float, params: SamplingParams) -> Floats:
    """The leading part of a descending distribution that top-k, top-p and min-p leave, jointly.

    top-p keeps a token while the mass before it is at most top_p of the whole; min-p keeps those
    with at least min_p of the most likely one's mass. The most likely token always stays.
    """
    size = len(sorted_mass_V)
    if params.top_k != -1:
        size = min(size, params.top_k)
    if params.top_p < 1.0:
        before = np.cumsum(sorted_mass_V) - sorted_mass_V
        size = min(size, int(np.searchsorted(before, params.top_p * total, side="right")))
    if params.min_p > 0.0:
        size = min(size, int((sorted_mass_V >= params.min_p * sorted_mass_V[0]).sum()))
    return sorted_mass_V[: max(size, 1)]


def _invert(sums: Floats, number: float) -> int:
    """The first index whose running sum exceeds `number` of the whole; never one without mass."""
    index = int(np.searchsorted(sums, number * sums[-1], side="right"))
    # Rounding can lift the product to the whole itself: then the last index that has mass.
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1], side="left"))
