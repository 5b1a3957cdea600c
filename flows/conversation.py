"""One sample as a person reads it: its tokens in order, with mask and log-probs as colours."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rollout.errors import BadInput

LEVELS = ((-0.1, "green"), (-0.7, "yellow"), (-2.3, "dark_orange"), (float("-inf"), "red"))
"""A sampled token's colour: the first whose log-prob (natural) is reached. -0.7 is one half, -2.3 a tenth."""
OUTSIDE = "dim"

Token = tuple[str, bool, bool, float]
"""Text, whether it is of the response, whether it is trained on, its log-prob."""


def print_sample(sample: dict[str, Any], *, config: dict[str, Any]) -> None:
    """Print the sample's facts and conversation; without a terminal one line per run of tokens.

    Args:
        sample: columns of the samples table.
        config: the batch's, which names the tokenizer's directory.

    Raises:
        BadInput: the tokenizer is not there any more.
    """
    console = Console()
    print(_headline(sample))
    tokens = _tokens(sample, _tokenizer(config))
    if not console.is_terminal:
        _print_runs(tokens)
        return
    text = Text()
    for piece, in_response, trained, log_prob in tokens:
        text.append(piece, style=_style(in_response, trained, log_prob))
    console.print(text)
    legend = Text("\n")
    for floor, colour in LEVELS:
        legend.append(f" {floor:g} and above " if floor > float("-inf") else " below ", style=colour)
    legend.append(" not trained on ", style=OUTSIDE)
    console.print(legend)


def _headline(sample: dict[str, Any]) -> str:
    failure = sample["failure"]
    parts = [
        f"sample {sample['sample_id']}",
        f"rollout_key {sample['rollout_key']} (rollout_id {sample['rollout_id']}), index {sample['index']}",
        f"sibling {sample['sibling'] + 1} of {sample['siblings']}, attempt {sample['attempt']}",
        f"{sample['agent']} on {sample['session_version']}, {sample['turns']} turns",
        f"{len(sample['tokens'])} tokens, {sample['response_length']} of them response, "
        f"{sum(sample['loss_mask'])} trained on",
        f"status {sample['status']}, reward {sample['reward']}, label {sample['label']}",
    ]
    if failure:
        parts.append(f"failure {failure['type']}: {failure['message']}")
    return "\n".join(parts) + "\n"


def _tokenizer(config: dict[str, Any]) -> Any:
    from rollout.batch.model import tokenizer_directory
    from rollout.tito.tokenizer import load_tokenizer

    directory = tokenizer_directory(config.get("model"))
    if not Path(directory, "tokenizer.json").is_file():
        raise BadInput(f"the batch's tokenizer is not at {directory} any more; --json shows the token ids")
    return load_tokenizer(str(directory))


def _tokens(sample: dict[str, Any], tokenizer: Any) -> list[Token]:
    ids = sample["tokens"]
    first = len(ids) - sample["response_length"]
    tokens = []
    for position, piece in enumerate(_pieces(ids, tokenizer)):
        at = position - first
        if at < 0:
            tokens.append((piece, False, False, 0.0))
        else:
            tokens.append((piece, True, bool(sample["loss_mask"][at]), sample["rollout_log_probs"][at]))
    return tokens


def _pieces(ids: list[int], tokenizer: Any) -> list[str]:
    """Each token's text; of several that make one character only the last has it."""
    pieces, waiting = [], []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text.endswith("�") and len(waiting) < 4:
            pieces.append("")
            continue
        pieces.append(text)
        waiting = []
    return pieces


def _style(in_response: bool, trained: bool, log_prob: float) -> str:
    if not in_response or (not trained and log_prob == 0.0):
        return OUTSIDE
    colour = next(colour for floor, colour in LEVELS if log_prob >= floor)
    return colour if trained else f"{colour} underline"


def _print_runs(tokens: list[Token]) -> None:
    for (in_response, trained), run in groupby(tokens, key=lambda token: token[1:3]):
        pieces = list(run)
        name = "trained" if trained else "response" if in_response else "prompt"
        text = "".join(piece for piece, *_ in pieces)
        mean = f", mean log-prob {sum(token[3] for token in pieces) / len(pieces):.3f}" if trained else ""
        print(f"[{name}, {len(pieces)} tokens{mean}]\n{text}")
