"""A tokenizer for `renderers`, straight from a checkpoint's tokenizer.json.

`renderers` asks for encode, decode and convert_tokens_to_ids; the `tokenizers` package has them
in Rust. transformers would give the same ids and take seconds to import.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from rollout.errors import BadCheckpoint

PLAIN_MARK = "\ufdd0"
"""A Unicode noncharacter: behind the first character of a control string it makes that string plain text."""

_SHORT = 32
_AT_MOST_NFC: tuple[Any, ...] = (None, [], {"type": "NFC"})


class Tokenizer:
    """Text to ids and back, with the special tokens of one checkpoint directory.

    `control_ids` maps every added token's text to its id; `special` holds those that the checkpoint
    flags as special. `size` is one more than the greatest id. `model_vocabulary`,
    `context_length` and `routed` (layers and experts per token of a mixture of experts) are what config.json
    says of the model, None where it does not.
    """

    unk_token_id: int | None = None
    eos_token_id: int | None = None
    _reads_marks = False

    def __init__(self, directory: Path) -> None:
        """Load `tokenizer.json` (and the eos token of `tokenizer_config.json` where there is one).

        Raises:
            BadCheckpoint: the directory has no readable tokenizer.json.
        """
        path = directory / "tokenizer.json"
        try:
            self._text = path.read_text(encoding="utf-8")
            self._rust = RustTokenizer.from_str(self._text)
            data = json.loads(self._text)
            added = data.get("added_tokens") or []
        except Exception as error:
            raise BadCheckpoint(f"{path}: not a readable tokenizer.json ({error}); give a model directory") from error
        self.name_or_path = str(directory)
        self.control_ids = {str(token["content"]): int(token["id"]) for token in added}
        self.special = frozenset(str(token["content"]) for token in added if token.get("special"))
        self.size = 1 + max([self._rust.get_vocab_size(with_added_tokens=True) - 1, *self.control_ids.values()])
        self._short: dict[str, list[int]] = {}
        self._only_nfc = (data.get("normalizer") or {}).get("normalizers", data.get("normalizer")) in _AT_MOST_NFC
        model = _read_json(directory / "config.json")
        self.model_vocabulary: int | None = model.get("vocab_size")
        self.context_length: int | None = model.get("max_position_embeddings")
        self.routed = _routed(model)
        eos = _read_json(directory / "tokenizer_config.json").get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        self.eos_token_id = self._rust.token_to_id(eos) if eos else None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Ids of `text`; control strings become control ids."""
        if len(text) <= _SHORT:
            known = self._short.get(text)
            if known is None:
                known = self._encode(text)
                if len(self._short) < 4096:  # the template's own pieces come first and stay
                    self._short[text] = known
            return list(known)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._reads_marks and PLAIN_MARK in text:
            return self.plain.encode(text)
        return list(self._rust.encode(text, add_special_tokens=False).ids)

    @cached_property
    def marked(self) -> Tokenizer:
        """This tokenizer for text in which PLAIN_MARK behind a control string's first character makes it plain.

        Only such text may hold the mark; anywhere else it is a character like others.
        """
        other = copy(self)
        other._reads_marks, other._short = True, {}
        return other

    @cached_property
    def plain(self) -> PlainText:
        """The same vocabulary with marked control strings as plain text.

        Raises:
            BadCheckpoint: an added token takes white space along, or is spelled by ordinary merges.
        """
        return PlainText(self._text, self.control_ids, self.name_or_path)

    def decode(self, token_ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        """Text of `token_ids`, special tokens kept unless `skip_special_tokens` says otherwise."""
        skip = bool(kwargs.get("skip_special_tokens", False))
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._rust.decode(ids, skip_special_tokens=skip))

    def as_decoded(self, text: str) -> str:
        """What `decode` gives of the ids of `text`: itself but for what the checkpoint normalises."""
        if text.isascii() or (self._only_nfc and unicodedata.is_normalized("NFC", text)):
            return text
        return self.decode(self.encode(text))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._rust.token_to_id(tokens)
        return [self._rust.token_to_id(token) for token in tokens]

    def __len__(self) -> int:
        return int(self._rust.get_vocab_size(with_added_tokens=True))


class PlainText:
    """Encodes text in which marked control strings are plain and all others are control ids."""

    def __init__(self, tokenizer_json: str, control_ids: dict[str, int], name: str) -> None:
        data = json.loads(tokenizer_json)
        trims = any(t.get("lstrip") or t.get("rstrip") or t.get("single_word") for t in data["added_tokens"])
        data["added_tokens"], data["post_processor"] = [], None
        self._rust = RustTokenizer.from_str(json.dumps(data))
        spelled = {number for text in control_ids for number in self._rust.encode(text, add_special_tokens=False).ids}
        if trims or spelled & set(control_ids.values()):
            raise BadCheckpoint(f"{name}: its control strings cannot be read as plain text")
        self._control_ids = control_ids
        by_length = sorted(control_ids, key=len, reverse=True)
        self._unmarked = re.compile("(" + "|".join(f"{re.escape(t)}(?!{PLAIN_MARK})" for t in by_length) + ")")
        self._marked = re.compile("|".join(re.escape(t[0] + PLAIN_MARK + t[1:]) for t in by_length))

    def encode(self, text: str) -> list[int]:
        """Split at the unmarked control strings as the Rust tokenizer does; the rest knows no control strings."""
        ids: list[int] = []
        for place, piece in enumerate(self._unmarked.split(text)):
            if place % 2:
                ids.append(self._control_ids[piece])
            elif piece:
                plain = self._marked.sub(lambda found: found[0].replace(PLAIN_MARK, "", 1), piece)
                ids.extend(self._rust.encode(plain, add_special_tokens=False).ids)
        return ids


def _routed(model: dict[str, Any]) -> tuple[int, int] | None:
    """(layers, experts per token) as an engine counts them: all layers of the text model, dense ones too."""
    text = model["text_config"] if isinstance(model.get("text_config"), dict) else model
    layers, per_token = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if isinstance(layers, int) and isinstance(per_token, int) and min(layers, per_token) > 0:
        return layers, per_token
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(f"{path}: no JSON ({error})") from error
    return value if isinstance(value, dict) else {}


@lru_cache(maxsize=8)
def load_tokenizer(directory: str) -> Tokenizer:
    """The tokenizer of a checkpoint directory, read once per process."""
    return Tokenizer(Path(directory))
