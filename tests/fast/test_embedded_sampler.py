"""Sampling: which token, which logprob, and that a row depends on nothing beside it."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sampling_params

from rollout.engine.params import SamplingParams
from rollout.engine.sampler import Sampled, SamplingState, sample, uniform

VOCABULARY = 24
STOPS = frozenset({3, 5})


def _logits(seed: int, rows: int, *, vocabulary: int = VOCABULARY) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 3).astype(np.float32)


def _state(params: SamplingParams, *, history: tuple[int, ...] = (), position: int = 40) -> SamplingState:
    state = SamplingState(params=params, seed=params.sampling_seed or 0, position=position, stop_ids=STOPS)
    for token in history:
        state.note(token)
    return state


def _bits(results: list[Sampled | None]) -> list[tuple[int, bytes] | None]:
    return [None if r is None else (r.token, struct.pack("<d", r.log_prob)) for r in results]


def _one(logits_V: npt.NDArray[np.float32], state: SamplingState) -> Sampled:
    (result,) = sample(logits_V[None], [state])
    assert result is not None
    return result


def _softmax(row: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    mass = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(mass / mass.sum())


rows_of_params = st.lists(
    st.tuples(sampling_params(), st.lists(st.integers(0, VOCABULARY - 1), max_size=6).map(tuple)),
    min_size=1,
    max_size=9,
)


@given(rows_of_params, st.integers(0, 2**32), st.data())
def test_a_row_has_the_same_bits_alone_and_among_others(rows: Any, seed: int, data: st.DataObject) -> None:
    logits = _logits(seed, len(rows))
    states = [_state(params, history=history) for params, history in rows]
    together = _bits(sample(logits, states))
    order = data.draw(st.permutations(range(len(rows))))
    assert _bits(sample(logits[order], [states[n] for n in order])) == [together[n] for n in order]
    for n, state in enumerate(states):
        assert _bits(sample(logits[n : n + 1], [state])) == [together[n]]


@given(rows_of_params, st.integers(0, 2**32))
def test_the_token_survives_every_filter_and_the_logprob_ignores_them(rows: Any, seed: int) -> None:
    for (params, history), logits in zip(rows, _logits(seed, len(rows)), strict=True):
        result = _one(logits, _state(params, history=history))
        scaled = _adjusted(logits, params, history)
        probability = _softmax(scaled)
        assert result.log_prob == pytest.approx(float(np.log(probability[result.token])), abs=1e-9)
        assert result.token in _allowed(probability, params)


def _adjusted(
    logits: npt.NDArray[np.float32], params: SamplingParams, history: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    """SGLang's documented formulas, one token at a time."""
    row = logits.astype(np.float64)
    for token, count in Counter(history).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    if len(history) < params.min_new_tokens:
        row[list(STOPS)] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    return np.asarray(row / (1.0 if params.greedy else params.temperature))


def _allowed(probability: npt.NDArray[np.float64], params: SamplingParams) -> set[int]:
    ranked = sorted(range(len(probability)), key=lambda token: -probability[token])
    kept, before = set(), 0.0
    for rank, token in enumerate(ranked):
        past_top_k = params.top_k != -1 and rank >= params.top_k
        # Sums in another order may differ in the last bits; a token at the very edge may go either way.
        past_top_p = before > params.top_p + 1e-9
        below_min_p = probability[token] < params.min_p * probability[ranked[0]] - 1e-12
        if rank == 0 or not (past_top_k or past_top_p or below_min_p):
            kept.add(token)
        before += float(probability[token])
    return {ranked[0]} if params.greedy else kept


def test_frequencies_follow_the_probabilities() -> None:
    logits, params = _logits(5, 1)[0], SamplingParams(temperature=0.7, sampling_seed=11)
    expected = _softmax(logits / 0.7)
    n = 20_000
    states = [_state(params, position=position) for position in range(n)]
    drawn = Counter(result.token for result in sample(np.repeat(logits[None], n, axis=0), states) if result)
    for token, probability in enumerate(expected):
        spread = np.sqrt(n * probability * (1 - probability))
        assert abs(drawn[token] - n * probability) <= 4.5 * spread + 1


def test_a_filter_shares_the_lost_mass_among_the_kept() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    params, n = SamplingParams(top_p=0.79, sampling_seed=1), 8_000
    states = [SamplingState(params=params, seed=1, position=position) for position in range(n)]
    drawn = Counter(result.token for result in sample(np.repeat(logits[None], n, axis=0), states) if result)
    assert set(drawn) == {0, 1}
    assert drawn[0] / n == pytest.approx(0.5 / 0.8, abs=0.02)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31 - 1, -(2**63), 2**63 - 1])
def test_random_numbers_repeat_and_spread(seed: int) -> None:
    numbers = [uniform(seed, position) for position in range(2_000)]
    assert numbers == [uniform(seed, position) for position in range(2_000)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.03)
    assert abs(float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])) < 0.1
    assert numbers != [uniform(seed + 1, position) for position in range(2_000)]


@pytest.mark.parametrize("number", [0.0, 0.25, 1 - 2**-53])
def test_a_token_without_mass_is_never_drawn(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.sampler.uniform", lambda seed, position: number)
    logits = np.array([-np.inf, 0.0, -np.inf, 0.1, -np.inf, -5000.0], dtype=np.float32)
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.999999)):
        assert _one(logits, SamplingState(params=params, seed=0, position=0)).token in {1, 3}


def test_greedy_takes_the_first_of_equals_and_its_unscaled_logprob() -> None:
    logits = np.array([1.0, 2.0, 2.0, 0.0], dtype=np.float32)
    result = _one(logits, SamplingState(params=SamplingParams(temperature=0.0), seed=0, position=0))
    assert result.token == 1
    assert result.log_prob == pytest.approx(float(np.log(_softmax(logits)[1])), abs=1e-12)


def test_a_row_without_finite_logits_is_reported_and_its_neighbours_are_untouched() -> None:
    logits = _logits(3, 4)
    states = [_state(SamplingParams(sampling_seed=n)) for n in range(4)]
    sound = _bits(sample(logits, states))
    broken = logits.copy()
    broken[1], broken[2, 7] = -np.inf, np.nan
    assert _bits(sample(broken, states)) == [sound[0], None, None, sound[3]]
