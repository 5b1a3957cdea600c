"""Measure the tiny checkpoint: `python -m rollout.engine.tiny.accuracy [--checkpoint DIR]`.

Plays held-out prompts with the embedded engine's model in this process and prints one JSON line
per kind: the share answered rightly, cut turns, tool calls, turns.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rollout.engine.checkpoint import read_checkpoint
from rollout.engine.model import Qwen3, load_model
from rollout.engine.params import SamplingParams
from rollout.engine.sampler import SamplingState, sample
from rollout.engine.tiny import CHECKPOINT
from rollout.engine.tiny.encoding import Encoder
from rollout.engine.tiny.playing import Game, Sampler, play
from rollout.engine.tiny.prompts import make_prompts
from rollout.engine.tiny.tasks import MAKERS

Logits = npt.NDArray[np.float32]

TURN_LIMIT = 128
"""Sampled tokens of one turn, at most."""


def make_sampler(directory: Path, *, temperature: float = 0.0, seed: int = 0) -> Sampler:
    """A sampler of the checkpoint in `directory`; equal prompts and seeds give equal completions."""
    checkpoint = read_checkpoint(directory)
    model = load_model(checkpoint)
    params = SamplingParams(temperature=temperature, max_new_tokens=TURN_LIMIT)
    asked = 0

    def sampler(prompts: Sequence[list[int]]) -> list[list[int]]:
        nonlocal asked
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), model.block):
            block = prompts[start : start + model.block]
            states = [
                SamplingState(params=params, seed=seed * 1_000_003 + asked + row, position=len(prompt))
                for row, prompt in enumerate(block)
            ]
            asked += len(block)
            outputs += _complete(model, block, states, checkpoint.stop_ids)
        return outputs

    return sampler


def _complete(
    model: Qwen3, prompts: Sequence[list[int]], states: list[SamplingState], stop_ids: frozenset[int]
) -> list[list[int]]:
    """Completions of one block of prompts, each until a stop token or TURN_LIMIT."""
    caches = [model.new_cache() for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for row, prompt in enumerate(prompts):
        logits = model.prefill(caches[row], prompt)
        _note(outputs, [row], states, logits.numpy())
    while running := [row for row, ids in enumerate(outputs) if ids[-1] not in stop_ids and len(ids) < TURN_LIMIT]:
        logits = model.decode([caches[row] for row in running], [outputs[row][-1] for row in running])
        _note(outputs, running, states, logits.numpy())
    return outputs


def _note(outputs: list[list[int]], rows: list[int], states: list[SamplingState], logits_B_V: Logits) -> None:
    for row, sampled in zip(rows, sample(logits_B_V, [states[row] for row in rows]), strict=True):
        if sampled is None:
            raise ValueError("the checkpoint gives no finite logits")
        states[row].note(sampled.token)
        outputs[row].append(sampled.token)


def summary(games: Sequence[Game]) -> dict[str, float]:
    """Counts and shares of some games."""
    turns = [len(turn) for game in games for turn in game.turns]
    return {
        "games": len(games),
        "right": round(sum(game.right for game in games) / len(games), 4),
        "cut": sum(game.cut for game in games),
        "tool_calls": round(sum(game.called for game in games) / len(games), 2),
        "turns": round(len(turns) / len(games), 2),
        "longest_turn": max(turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the tiny checkpoint on held-out prompts.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="model directory")
    parser.add_argument("--count", type=int, default=500, help="prompts")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a model this small is slower on two
    sampler = make_sampler(options.checkpoint, temperature=options.temperature, seed=options.seed)
    games = play(
        make_prompts(options.count, seed=options.seed, kinds=tuple(MAKERS)), sampler, Encoder(options.checkpoint)
    )
    by_kind: dict[str, list[Game]] = defaultdict(list)
    for game in games:
        by_kind[game.row["metadata"]["kind"]].append(game)
    for kind in MAKERS:
        if kind in by_kind:
            print(json.dumps({"kind": kind, **summary(by_kind[kind])}))


if __name__ == "__main__":
    main()
