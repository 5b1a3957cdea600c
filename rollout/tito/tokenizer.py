"""A tokenizer for `renderers`, straight from a checkpoint's tokenizer.json.

`renderers` asks for encode, decode and convert_tokens_to_ids; the `tokenizers` package has them
in Rust. transformers would give the same ids and take seconds to import.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from rollout.errors import BadCheckpoint


class Tokenizer:
    """Text to ids and back, with the special tokens of one checkpoint directory."""

    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, directory: Path) -> None:
        """Load `tokenizer.json` (and the eos token of `tokenizer_config.json` where there is one).

        Raises:
            BadCheckpoint: the directory has no readable tokenizer.json.
        """
        path = directory / "tokenizer.json"
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:
            raise BadCheckpoint(f"{path}: not a readable tokenizer.json ({error}); give a model directory") from error
        self.name_or_path = str(directory)
        config = directory / "tokenizer_config.json"
        if config.exists():
            eos = json.loads(config.read_text()).get("eos_token")
            eos = eos.get("content") if isinstance(eos, dict) else eos
            self.eos_token_id = self._rust.token_to_id(eos) if eos else None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return list(self._rust.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        """Text of `token_ids`, special tokens kept unless `skip_special_tokens` says otherwise."""
        skip = bool(kwargs.get("skip_special_tokens", False))
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._rust.decode(ids, skip_special_tokens=skip))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._rust.token_to_id(tokens)
        return [self._rust.token_to_id(token) for token in tokens]

    def __len__(self) -> int:
        return int(self._rust.get_vocab_size(with_added_tokens=True))


@lru_cache(maxsize=8)
def load_tokenizer(directory: str) -> Tokenizer:
    """The tokenizer of a checkpoint directory, read once per process."""
    return Tokenizer(Path(directory))
