"""The tiny checkpoint's tokenizer: byte-level BPE over its own dialogues, with Qwen3's special tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from rollout.engine.tiny.chat_template import CHAT_TEMPLATE
from rollout.engine.tiny.dialogues import make_dialogue
from rollout.engine.tiny.encoding import Encoder

SPECIAL: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens; they come behind the vocabulary's byte and merge tokens, as Qwen3's do."""

MARKUP: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single ids that are text all the same: Qwen3 keeps them when special tokens are skipped."""

VOCABULARY = 896
"""Ids in all: every word of the dialogues gets one. A multiple of 64, so SGLang pads nothing."""

_PIECES = r"""\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+(?: [{\["]+)?|\n+|[^\S\n]+"""
"""Where merges stop: single digits, words and runs of signs with the space before them (JSON's
`": "` is one run), line ends."""


def _blank(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> RustTokenizer:
    tokenizer = RustTokenizer(BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special(tokenizer: RustTokenizer) -> None:
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])


def _texts(directory: Path, seed: int, count: int) -> Iterator[str]:
    """Pieces of `count` rendered dialogues between special tokens, written with bytes for ids."""
    alphabet = {symbol: place for place, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = _blank(alphabet, [])
    _add_special(bytes_only)
    bytes_only.save(str(directory / "tokenizer.json"))
    encoder = Encoder(directory)
    rng = random.Random(seed)
    between = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKUP))))
    for _ in range(count):
        _, dialogue = make_dialogue(rng)
        text = encoder.tokenizer.decode(encoder.encode(dialogue).tokens_T.tolist())
        yield from filter(None, between.split(text))


def train_tokenizer(directory: Path, *, seed: int = 0, count: int = 2000) -> None:
    """Learn the merges from `count` dialogues and write tokenizer.json and tokenizer_config.json."""
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = _blank({}, [])
    tokenizer.train_from_iterator(list(_texts(directory, seed, count)), trainer)
    _add_special(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2, ensure_ascii=False) + "\n")


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
